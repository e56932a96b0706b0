"""Faults around a run that goes on: a full or read-only disk, suspended and slow ranks, a lost or slow network.

python tests/chaos/faults.py disk FOLDER     needs a mount namespace of its own: unshare -m
"""

from __future__ import annotations

import contextlib
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]

import process
import stored
from kills import difference, undisturbed

from fivefold.checkpoint import store

LONG_S = 120.0


def disturbed(
    folder: Path, layout: str, steps: int, fault: Callable[[process.Run], None], name: str
) -> process.Run:
    """Trains with a fault, which comes when a quarter of the steps are done; a run that ends is started again. The
    weights have to be those of a run without it."""
    sets = process.overrides(folder, layout, steps, steps // 10)
    wanted = undisturbed(folder, layout, sets, steps)
    run = process.Run(folder / name, layout, sets)
    try:
        run.start()
        assert run.wait(lambda: run.step >= steps // 4, LONG_S), run.tail()
        fault(run)
        deadline = time.monotonic() + LONG_S
        while not (run.ended and run.code == 0):
            run.wait(lambda: False, 5.0)
            assert time.monotonic() < deadline, run.tail()
            if run.ended and run.code != 0:
                assert run.starts < 5, run.tail()
                run.start()
        assert not run.left(), "processes stay behind"
        assert not difference(wanted, run.out)
    finally:
        run.close()
    return run


def suspend(seconds: float, at: random.Random) -> Callable[[process.Run], None]:
    """A rank is stopped (SIGSTOP) and continued."""

    def fault(run: process.Run) -> None:
        pid = at.choice(run.ranks())
        process.send(pid, signal.SIGSTOP)
        time.sleep(seconds)
        process.send(pid, signal.SIGCONT)

    return fault


def slow_down(seconds: float, at: random.Random) -> Callable[[process.Run], None]:
    """A rank runs at half its speed."""

    def fault(run: process.Run) -> None:
        pid, until = at.choice(run.ranks()), time.monotonic() + seconds
        while time.monotonic() < until:
            process.send(pid, signal.SIGSTOP)
            time.sleep(0.05)
            process.send(pid, signal.SIGCONT)
            time.sleep(0.05)

    return fault


def fill(run: process.Run) -> None:
    """The disk has no room for some seconds."""
    ballast = run.out.parent / "ballast"
    with open(ballast, "wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(1 << 16))
    run.wait(lambda: False, 4.0)
    ballast.unlink()


def forbid(run: process.Run) -> None:
    """The folder of checkpoints cannot be written for some seconds."""
    where = str(run.out / "checkpoints")
    subprocess.run(["mount", "--bind", where, where], check=True)
    subprocess.run(["mount", "-o", "remount,bind,ro", where], check=True)
    run.wait(lambda: False, 4.0)
    subprocess.run(["umount", "--lazy", where], check=True)


def disk(folder: Path) -> None:
    """Both, on a disk of its own."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=60m", "disk", str(folder)], check=True)
    for name, fault in (("full", fill), ("read-only", forbid)):
        run = disturbed(folder, "dp=2,zero=3", 200, fault, name)
        said = [line for _, line in run.lines if "cannot write" in line]
        assert said, f"{name}: nothing was said\n{run.tail()}"
        assert all(stored.load(found) for found in store.checkpoints(run.out))
        print(f"{name}: {run.starts} start(s); {said[0]}", flush=True)


if __name__ == "__main__":
    disk(Path(sys.argv[2]))
