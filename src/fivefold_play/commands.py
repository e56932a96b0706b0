"""Commands that the server runs for the page: searches, measurements, exports, proofs. They end with the server, which
trainings (`jobs.py`) survive."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile, gettempdir, mkdtemp
from typing import IO, Any

from fivefold.errors import UserError, printable
from fivefold.files import cache_folder, own_word, remove

LONGEST = {"machine": 600, "proof": 600}
"""Seconds of a kind of command. Another has no limit."""
MOMENT = 2.0
"""Seconds until a command that was asked to end is killed."""
TAIL = 4000
"""Bytes of the last words."""


def last_words(file: IO[bytes]) -> str:
    """The end of what a process has written into a file. Its place there is left alone: the two share it."""
    size = os.fstat(file.fileno()).st_size
    text = os.pread(file.fileno(), TAIL, max(0, size - TAIL)).decode("utf-8", "replace")
    return printable(text.replace("\r", "\n")).strip()


class Command:
    """`fivefold WORDS --json`, with all that it starts. As everywhere, -P: a folder that is shown lends no modules.
    Its temporary files have a folder of their own, which goes with it. longest: seconds."""

    def __init__(self, words: Sequence[str], longest: float) -> None:
        self.name, self.why = own_word(), ""
        self.folder = Path(mkdtemp(prefix="fivefold-"))
        self.out, self.err = TemporaryFile(), TemporaryFile()  # noqa: SIM115
        line = [sys.executable, "-P", "-m", "fivefold", *words, "--json"]
        # What stays: compiled code, and the cache, which is a temporary folder where there is no home
        compiled = f"{gettempdir()}/torchinductor_{os.getuid()}"
        own = {"TORCHINDUCTOR_CACHE_DIR": compiled, **os.environ, "TMPDIR": str(self.folder)}
        own["FIVEFOLD_CACHE"] = str(cache_folder())
        self.process = subprocess.Popen(
            line, stdin=subprocess.DEVNULL, stdout=self.out, stderr=self.err, start_new_session=True, env=own
        )
        late = f"it took more than {longest / 60:.0f} minutes, and was ended. A terminal has no such limit"
        self.limit = threading.Timer(longest, self.stop, [late])
        self.limit.daemon = True
        self.limit.start()

    @property
    def runs(self) -> bool:
        return self.process.poll() is None

    def stop(self, why: str = "stopped") -> None:
        if self.runs:
            self.why = why
            for number in (signal.SIGTERM, signal.SIGKILL):  # the second one for what it leaves behind
                with suppress(ProcessLookupError, subprocess.TimeoutExpired):
                    os.killpg(self.process.pid, number)
                    self.process.wait(MOMENT)
        self._clean()

    def _clean(self) -> None:
        self.limit.cancel()
        remove(self.folder)

    def said(self) -> str:
        """Its last words besides the result."""
        return last_words(self.err)

    def result(self) -> dict[str, Any]:
        """The object that it prints, once it has ended. Raises UserError: it failed, was stopped, or took too long."""
        code = self.process.wait()
        self._clean()
        size, found = os.fstat(self.out.fileno()).st_size, None
        with suppress(ValueError):  # a report may be followed by what is wrong with it
            found = json.loads(os.pread(self.out.fileno(), size, 0).partition(b"\n")[0])
        if self.why or found is None:
            raise UserError(
                self.why or self.said().removeprefix("error: ") or f"it has ended with code {code}"
            )
        if code and "error" in found:
            raise UserError(found["error"]["message"])
        return found


class Commands:
    """One command of a kind at a time."""

    def __init__(self) -> None:
        self._last, self._lock, self._ended = dict[str, Command](), threading.Lock(), False

    def start(self, kind: str, words: Sequence[str], replace: bool = True) -> Command:
        """replace: ends the one before. Raises UserError: it runs, and is not replaced."""
        with self._lock:
            if self._ended:
                raise UserError("the server ends")
            if not replace and (before := self.last(kind)) is not None and before.runs:
                raise UserError(f"another {kind} runs now. Try again when it is done")
            self.stop(kind)
            self._last[kind] = command = Command(words, LONGEST.get(kind, threading.TIMEOUT_MAX))
        return command

    def last(self, kind: str) -> Command | None:
        return self._last.get(kind)

    def stop(self, kind: str) -> None:
        if (command := self.last(kind)) is not None:
            command.stop()

    def end(self) -> None:
        """Ends all, for good."""
        with self._lock:
            self._ended = True
            for kind in self._last:
                self.stop(kind)
