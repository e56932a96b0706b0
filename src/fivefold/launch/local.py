"""Starts local ranks, again after a failure if the caller wants that, and reports how they ended.

They meet in files of a private folder and communicate over the loopback interface only.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from fivefold.errors import BusyError, RankFailed, UserError
from fivefold.host import cores
from fivefold.launch.interrupt import unsaved
from fivefold.launch.ranks import Ranks
from fivefold.launch.supervisor import Attempt, Outcome, Signals, Supervisor
from fivefold.launch.verdict import Failure

Again = Callable[[Failure | None], tuple[float, Attempt] | None]
"""What comes after a failure, or (given None) when another number of ranks is to go on: seconds to wait, and the next
attempt. None: nothing."""


def start_ranks(work: Callable[[Ranks], int | None], world: int, fork: bool) -> None:
    """Runs `work` on `world` local ranks, on GPUs if there are any. A signal ends them at once.

    fork: forks the ranks on CPUs. This is quick, but only safe if the process has not used torch's threads. Otherwise
    ranks are spawned, and `work` is pickled.

    Raises:
        UserError: there are fewer GPUs than ranks, or a rank met an error of the user's.
        RankFailed: a rank failed. The message names it.
        SystemExit: a signal came.
    """
    outcome = launch(Attempt(work, world), fork)
    if outcome.failure is not None:
        raise as_error(outcome.failure)
    if outcome.stopped is not None:
        raise SystemExit(unsaved(outcome.stopped))


def as_error(failure: Failure, more: str = "") -> UserError | RankFailed:
    """The failure as an exception. more: text to add. A traceback is printed here."""
    if failure.more:
        print(f"rank {failure.rank} failed:\n{failure.more}", file=sys.stderr, flush=True)
    kind = {"error": UserError, "busy": BusyError}.get(failure.kind, RankFailed)
    return kind(failure.text + more)


def launch(attempt: Attempt, fork: bool, again: Again = lambda failure: None) -> Outcome:
    """Runs attempts until one ends well, a signal comes, or `again` gives up. Returns the outcome of the last one.

    Raises:
        UserError: there are fewer GPUs than ranks.
    """
    _assert_enough_gpus(max(attempt.slots, default=attempt.world - 1) + 1)
    method = "fork" if fork and not torch.cuda.is_available() else "spawn"
    number = 0
    with scratch_folder() as folder, Signals() as signals:
        while True:
            number += 1
            inside = folder / str(number)
            inside.mkdir()
            with _environment(attempt.world):
                outcome = Supervisor(attempt, inside, method, signals).run()
            failure = outcome.failure
            if outcome.reform:
                failure = None
            elif failure is None or failure.kind == "error" or outcome.signal is not None:
                return outcome
            following = again(failure)
            if following is None:
                return outcome
            wait_s, attempt = following
            if signals.wait(wait_s):
                return Outcome(stopped=signals.first)  # what was saved is saved


def _assert_enough_gpus(world: int) -> None:
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if 0 < gpus < world:
        raise UserError(
            f"{world} ranks on this machine need {world} GPUs, but it has {gpus}. To use its CPU, put "
            "CUDA_VISIBLE_DEVICES= (with no value) before the command"
        )


@contextmanager
def _environment(world: int) -> Iterator[None]:
    """Sets environment variables of the ranks inside the block, except those that the user has set."""
    values = {
        "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
        "NCCL_SOCKET_IFNAME": "lo",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": str(max(1, cores() // world)),
    }
    own = {key: value for key, value in values.items() if key not in os.environ}
    os.environ.update(own)
    try:
        yield
    finally:
        for key in own:
            os.environ.pop(key, None)


PREFIX, OWNER = "fivefold-", "owner"


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """A new folder, which is removed at the end."""
    remove_stale()
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    try:
        with open(folder / ".owner", "w") as lock:
            with contextlib.suppress(OSError):  # a file system without locks: the folder may stay
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.replace(folder / ".owner", folder / OWNER)  # locked before others see it
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def remove_stale() -> list[Path]:
    """Removes this user's folders whose launcher and ranks have ended."""
    removed = []
    for owner in Path(tempfile.gettempdir()).glob(f"{PREFIX}*/{OWNER}"):
        with contextlib.suppress(OSError):
            if owner.parent.is_symlink() or owner.parent.stat().st_uid != os.getuid():
                continue
            with open(os.open(owner, os.O_RDWR | os.O_NOFOLLOW)) as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(owner.parent)
                removed.append(owner.parent)
    return removed
