"""The runs that wait, and the one that was started from the page: a process of its own, by the command line's words.

A list in FOLDER/.play/waiting.json. The process that runs holds a lock, which it inherits: so any server knows whether
one runs, also a later one, and none has to know its number.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from fivefold.errors import UserError, printable
from fivefold.files import (
    held,
    in_use,
    locked,
    make_folder,
    open_file,
    own_word,
    read_json,
    read_text,
    stream,
    write_atomically,
)

MOST = 100
"""Jobs that may wait."""
MOST_PATH = 1 << 14
TAIL = 4000
"""Bytes of a job's last words."""


class Jobs:
    """The job list of a folder. Several servers may share it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / ".play"
        self._children: list[subprocess.Popen[bytes]] = []

    def waiting(self) -> list[dict[str, Any]]:
        """Those that wait, the next one first: {id, run, words}."""
        with suppress(OSError, UserError, KeyError, TypeError):
            jobs = read_json(self.folder / "waiting.json")["jobs"]
            return [
                job
                for job in jobs
                if all(isinstance(word, str) for word in (job["id"], job["run"], *job["words"]))
            ]
        return []

    def add(self, words: Sequence[str], run: Path, first: bool = False) -> dict[str, Any]:
        """Lets `fivefold WORDS` wait for its turn. run: the folder that it works in. first: before the others."""
        job = {"id": own_word(), "run": str(run), "words": list(words)}
        with self._changed() as jobs:
            if len(jobs) >= MOST:
                raise UserError(f"{MOST} runs wait already. Remove one first")
            jobs.insert(0 if first else len(jobs), job)
        self.start_next()
        return job

    def remove(self, name: object) -> None:
        """Raises UserError: it does not wait."""
        with self._changed() as jobs:
            if not (found := [job for job in jobs if job["id"] == name]):
                raise UserError("this run does not wait any more")
            jobs.remove(found[0])

    @contextmanager
    def _changed(self) -> Iterator[list[dict[str, Any]]]:
        """The list, to be changed inside the block."""
        make_folder(self.folder, mode=0o700)
        with locked(self.folder / ".lock"):
            yield (jobs := self.waiting())
            write_atomically(self.folder / "waiting.json", json.dumps({"jobs": jobs}))

    def start_next(self) -> None:
        """Starts the next job, if there is one, none runs, and nothing else trains in its folder."""
        self._children = [child for child in self._children if child.poll() is None]
        if not self.waiting():
            return
        make_folder(self.folder, mode=0o700)
        if (lock := held(self.folder / "running")) is None:
            return
        with lock, self._changed() as jobs:
            if (job := next((job for job in jobs if not in_use(Path(job["run"]))), None)) is None:
                return
            jobs.remove(job)
            lock.truncate()
            lock.write(job["run"].encode())
            with stream(self.log(Path(job["run"]))) as log:
                command = [sys.executable, "-m", "fivefold", *job["words"]]
                self._children.append(
                    subprocess.Popen(
                        command,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                        start_new_session=True,
                        pass_fds=[lock.fileno()],
                    )
                )

    def running(self) -> Path | None:
        """The folder of the job that runs; None: none does."""
        path = self.folder / "running"
        if not path.exists():
            return None
        if (lock := held(path)) is None:
            return Path(read_text(path, MOST_PATH))
        return lock.close()

    def started(self) -> list[Path]:
        """The folders of jobs that were started here, as far as they are there."""
        with suppress(OSError):
            folders = [self.folder.parent / log.stem for log in sorted(self.folder.glob("*.log"))]
            return [folder for folder in folders if folder.is_dir()]
        return []

    def log(self, run: Path) -> Path:
        """What the job of a run prints. It is not in the run's folder, which has the files that a command leaves."""
        return self.folder / f"{run.name}.log"

    def said(self, run: Path) -> str:
        """The last words of a run's job, or of its beginning; "" if it was started elsewhere."""
        with suppress(OSError, UserError), open_file(self.log(run)) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL))
            return printable(file.read(TAIL).decode("utf-8", "replace").replace("\r", "\n")).strip()
        return ""

    def follow(self, stop: threading.Event) -> None:
        """Starts jobs until `stop` is set."""
        while not stop.wait(0.5):
            with suppress(OSError, UserError):
                self.start_next()
