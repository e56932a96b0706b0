"""Commands and launchers in processes of their own, forked from the server of the rank pools, which has imported torch:
they start at once, and may fork ranks."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ranks import PATIENCE, _servers


class Launched:
    """A process that calls function(*arguments). said: what it and its children have printed."""

    def __init__(self, log: Path, function: Callable[..., Any], *arguments: Any):
        self.log = log
        self.result, theirs = _servers.Pipe(duplex=False)
        self.process = _servers.Process(target=_call, args=(str(log), theirs, function, *arguments))
        self.process.start()
        theirs.close()
        assert self.process.pid is not None
        self.pid: int = self.process.pid

    @property
    def said(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def ranks(self) -> list[int]:
        """The processes of its ranks, in order of their numbers."""
        found = []
        for task in Path(f"/proc/{self.pid}/task").glob("*/children"):
            found += map(int, task.read_text().split())
        return sorted(found)

    def wait(self, seconds: float = 60) -> int:
        """Waits until it ends; the exit code."""
        self.process.join(seconds * PATIENCE)
        if self.process.is_alive():
            self.kill()
            raise AssertionError(f"it did not end in {seconds} s:\n{self.said}")
        return self.process.exitcode or 0

    def value(self, seconds: float = 60) -> Any:
        """What the function returned."""
        assert self.result.poll(seconds * PATIENCE), self.said
        value = self.result.recv()
        self.wait(seconds)
        return value

    def until(self, there: Callable[[], Any], seconds: float = 60) -> Any:
        """Waits until `there` returns something; returns that."""
        end = time.monotonic() + seconds * PATIENCE
        while not (found := there()):
            assert self.process.is_alive(), f"it ended with {self.process.exitcode}:\n{self.said}"
            assert time.monotonic() < end, f"not within {seconds} s:\n{self.said}"
            time.sleep(0.01)
        return found

    def send(self, number: int, pid: int | None = None) -> None:
        os.kill(pid or self.pid, number)

    def kill(self) -> None:
        for pid in (*self.ranks(), self.pid):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.join()


def _call(log: str, result: Connection, function: Callable[..., Any], *arguments: Any) -> None:
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(file, stream)
    os.close(file)
    for name in ("RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)
    os.environ["OMP_NUM_THREADS"] = "1"
    result.send(function(*arguments))


def command(log: Path, *words: str, folder: Path | str = ".", **environment: str) -> Launched:
    """`fivefold WORDS`, in a folder, with this process's environment and more."""
    return Launched(log, _main, words, os.path.abspath(folder), {**os.environ, **environment})


def typed(log: Path, *words: str) -> Launched:
    """`fivefold WORDS` in a process group of its own, as a terminal starts it: a signal to the group is its Ctrl-C."""
    return Launched(log, _main, words, os.getcwd(), dict(os.environ), True)


def _main(words: tuple[str, ...], folder: str, environment: dict[str, str], own_group: bool = False) -> None:
    from fivefold.cli.main import main

    if own_group:
        os.setsid()
    os.chdir(folder)
    os.environ.update(environment)
    sys.argv = ["fivefold", *words]
    main(words)


def last_step(run: Path) -> int:
    """The last step that a run has recorded."""
    from fivefold.observe.metrics import last_line

    return (last_line(run) or {}).get("step", 0)
