"""The runs that wait, and the one that was started from the page: a process of its own, by the command line's words.

The list, the logs and the locks of a folder lie in this user's cache, so nothing starts because of a file that lies in
a folder of somebody else's. The process that runs holds a lock, which it inherits: so any server knows whether one
runs, also a later one, and none has to know its number.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from fivefold.errors import UserError, shortened
from fivefold.files import (
    cache_folder,
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
from fivefold_play.commands import last_words

MOST = 100
"""Jobs that may wait."""
MOST_PATH = 1 << 14


def _key(path: str) -> str:
    """A word for a path."""
    return hashlib.sha256(os.fsencode(path)).hexdigest()[:16]


def _whole(job: Any) -> bool:
    """True if an entry of the list is a job."""
    with suppress(KeyError, TypeError):
        texts = [job["id"], job["run"], job["cwd"], *job["words"]]
        places = all(os.path.isabs(job[key]) for key in ("run", "cwd"))
        return places and isinstance(job["words"], list) and all(isinstance(text, str) for text in texts)
    return False


class Jobs:
    """The job list of a folder. Several servers may share it."""

    def __init__(self, folder: Path) -> None:
        self.home = folder
        self.folder = cache_folder() / "play" / _key(os.path.realpath(folder))
        self._children: list[subprocess.Popen[bytes]] = []

    def waiting(self) -> list[dict[str, Any]]:
        """Those that wait, the next one first: {id, run, cwd, words}. run: its folder. Paths are absolute."""
        return self._read()[0]

    def _read(self) -> tuple[list[dict[str, Any]], list[Any]]:
        """The entries of the list, and what is damaged: entries, or the whole file."""
        jobs: Any = []
        with suppress(OSError, UserError):
            self._require_own()
            try:
                jobs = read_json(self.folder / "waiting.json").get("jobs")
            except UserError as error:
                jobs = str(error)
        jobs = jobs if isinstance(jobs, list) else [jobs]
        return [job for job in jobs if _whole(job)], [job for job in jobs if not _whole(job)]

    def add(self, words: Sequence[str], run: Path, first: bool = False) -> dict[str, Any]:
        """Lets `fivefold WORDS` wait for its turn. run: the folder that it writes. first: before the others. It is
        started in the folder that this process is in, by whichever server starts it."""
        job = {"id": own_word(), "run": os.path.abspath(run), "cwd": os.getcwd(), "words": list(words)}
        with self._changed() as jobs:
            if len(jobs) >= MOST:
                raise UserError(f"{MOST} runs wait already. Remove one first")
            jobs.insert(0 if first else len(jobs), job)
        self.start_next()
        return job

    def remove(self, name: object) -> None:
        """Raises UserError: it is not queued."""
        with self._changed() as jobs:
            if not (found := [job for job in jobs if job["id"] == name]):
                raise UserError("this run is no longer queued")
            jobs.remove(found[0])

    def _require_own(self) -> None:
        """Raises UserError: others may write into the folder, and what lies there is started."""
        there, others = self.folder.lstat(), stat.S_IWGRP | stat.S_IWOTH
        own = stat.S_ISDIR(there.st_mode) and there.st_uid == os.getuid() and not there.st_mode & others
        for folder in self.folder.parents[:2]:  # up to the cache. A group may share it
            own = own and folder.stat().st_mode & (stat.S_IWOTH | stat.S_ISVTX) != stat.S_IWOTH
        if not own:
            raise UserError(
                f"{self.folder} is not this user's own folder, or lies in one that everybody may write, so no run is "
                "queued there. Remove it, or name another cache in $FIVEFOLD_CACHE"
            )

    @contextmanager
    def _changed(self) -> Iterator[list[dict[str, Any]]]:
        """The list, to be changed inside the block."""
        make_folder(self.folder, mode=0o700)
        self._require_own()
        with locked(self.folder / ".lock"):
            jobs, damaged = self._read()
            for job in damaged:
                text = shortened(json.dumps(job), 200)
                print(f"queued runs were dropped, as their entry is damaged: {text}", file=sys.stderr)
            yield jobs
            write_atomically(self.folder / "waiting.json", json.dumps({"jobs": jobs}))

    def start_next(self) -> None:
        """Starts the next job, if there is one, none runs, and nothing else trains in its folder."""
        self._children = [child for child in self._children if child.poll() is None]
        if not any(self._read()):
            return
        if (lock := held(self.folder / "running")) is None:
            return
        with lock:
            with self._changed() as jobs:
                if (job := next((job for job in jobs if not in_use(Path(job["run"]))), None)) is None:
                    return
                jobs.remove(job)
                lock.truncate()
                lock.write(job["run"].encode())
            self._start(job, lock.fileno())  # the list is written, so no job is started twice

    def _start(self, job: dict[str, Any], lock: int) -> None:
        """Starts a job, which inherits the lock. Why it cannot be started is its log."""
        with stream(self.log(Path(job["run"]))) as log:
            command = [sys.executable, "-P", "-m", "fivefold", *job["words"]]
            try:
                child = subprocess.Popen(
                    command,
                    cwd=job["cwd"],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    pass_fds=[lock],
                )
            except (OSError, ValueError) as error:  # of a NUL in a word
                log.write(f"error: this cannot be started: {error}\n".encode())
            else:
                self._children.append(child)

    def running(self) -> Path | None:
        """The folder of the job that runs, an absolute path; None: none does."""
        path = self.folder / "running"
        if not path.exists():
            return None
        if (lock := held(path)) is None:
            return Path(read_text(path, MOST_PATH))
        return lock.close()

    def started(self) -> list[Path]:
        """The folders of new runs that were started here, as far as they are there."""
        with suppress(OSError):
            logs = {*self.folder.glob("*.log")}
            return [one for one in sorted(self.home.iterdir()) if self.log(one) in logs and one.is_dir()]
        return []

    def log(self, run: Path) -> Path:
        """What the job of a run prints. It is not in the run's folder, which has the files that a command leaves."""
        return self.folder / f"{run.name[:50]}-{_key(os.path.abspath(run))}.log"

    def said(self, run: Path) -> str:
        """The last words of a run's job, or of its beginning; "" if it was started elsewhere."""
        with suppress(OSError, UserError), open_file(self.log(run)) as file:
            return last_words(file)
        return ""

    def follow(self, stop: threading.Event) -> None:
        """Starts jobs until `stop` is set."""
        while not stop.wait(0.5):
            with suppress(OSError, UserError):
                self.start_next()
