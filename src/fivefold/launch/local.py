"""Starts local ranks, again after a failure if the caller wants that, waits for them, and ends those that do not end by
themselves.

They meet in files of a private folder and communicate over the loopback interface only. They are forked from a process
that has imported torch, so that they start at once, or spawned (GPUs, the Python interface). Whatever a rank does, or
does not do, the launcher gets its outcome:

- When a rank fails, the others are killed: they could only wait for it. Only if the first one just lost another rank,
  that one has SETTLE_S to say why.
- When the run is to stop, ranks finish their step and save. They are killed when none of them has got anything done
  for the grace time: a large save takes longer. Ranks that were suspended (SIGSTOP) are continued.
- A rank that has left its verdict has LEAVE_S to end.
"""

from __future__ import annotations

import fcntl
import json
import math
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from fivefold.errors import BusyError, RankFailed, UserError
from fivefold.files import read_json, write
from fivefold.host import cores, gpus
from fivefold.host.machine import oom_kills
from fivefold.launch import verdict
from fivefold.launch.launchers import LOOPBACK
from fivefold.launch.ranks import Place, Ranks, run_rank
from fivefold.launch.verdict import FAILED, STOPPED, Failure, Interrupt, in_words, stopping_signals, unsaved

SETTLE_S = 3.0
LEAVE_S = 5.0
POLL_S = 1.0  # between looks for ranks that have left a verdict and do not end


@dataclass(frozen=True)
class Attempt:
    """One start of all ranks. work: what each runs; returns the signal that stopped it, or None. expendable: ranks
    whose end does not end the others. grace_s: None: a signal ends the ranks at once. Otherwise they finish their step
    and save, and this says, when a signal comes, how many seconds they have. slots: the device of each rank; empty: as
    its number. reform: asked every second; True: ranks save and leave, because another number of them is to go on.
    timeout_s: seconds until a message fails."""

    work: Callable[[Ranks], int | None]
    world: int
    expendable: range = range(0)
    grace_s: Callable[[], float] | None = None
    slots: Sequence[int] = ()
    reform: Callable[[], bool] | None = None
    timeout_s: float = Ranks.timeout_s


@dataclass(frozen=True)
class Outcome:
    """How an attempt ended. All three None: its work is done. stopped: the signal after which all ranks have left, with
    everything saved. failure: a rank failed; then signal is the one that was to stop the run, if any. reform: all have
    left, with everything saved, for another number of ranks."""

    stopped: int | None = None
    failure: Failure | None = None
    signal: int | None = None
    reform: bool = False


Again = Callable[[Failure | None], tuple[float, Attempt] | None]
"""What comes after a failure, or (given None) when another number of ranks is to go on: seconds to wait, and the next
attempt. None: nothing."""


def start_ranks(
    work: Callable[[Ranks], int | None], world: int, fork: bool, share_gpus: bool = False
) -> None:
    """Runs `work` on `world` local ranks, on GPUs if there are any. A signal ends them at once.

    fork: forks the ranks on CPUs. This is quick, but only safe if the process has not used torch's threads. Otherwise
    ranks are spawned, and `work` is pickled. share_gpus: if there are fewer GPUs than ranks, they share them, and send
    by gloo. That is slow.

    Raises:
        UserError: there are fewer GPUs than ranks, or a rank met an error of the user's.
        RankFailed: a rank failed. The message names it.
        SystemExit: a signal came.
    """
    gpus = torch.cuda.device_count() if share_gpus and torch.cuda.is_available() else world
    outcome = launch(Attempt(work, world, slots=[rank % gpus for rank in range(world)]), fork)
    if outcome.failure is not None:
        raise as_error(outcome.failure)
    if outcome.stopped is not None:
        raise SystemExit(unsaved(outcome.stopped))


def returned(work: Callable[[Ranks], dict[str, Any]], world: int, fork: bool) -> dict[str, Any]:
    """What `work` returns on the first of `world` local ranks, by way of JSON. Raises as `start_ranks` does."""
    with tempfile.TemporaryDirectory(prefix="fivefold-") as folder:
        file = Path(folder, "found.json")
        start_ranks(partial(_write, work, file), world, fork)
        return read_json(file)


def _write(work: Callable[[Ranks], dict[str, Any]], file: Path, ranks: Ranks) -> None:
    found = work(ranks)
    if ranks.first:
        write(file, json.dumps(found))


def as_error(failure: Failure, more: str = "") -> UserError | RankFailed:
    """The failure as an exception. more: text to add. A traceback is printed here."""
    if failure.more and failure.kind not in verdict.FINAL:
        print(f"rank {failure.rank} failed:\n{failure.more}", file=sys.stderr, flush=True)
    kinds = {"error": UserError, "exhausted": UserError, "busy": BusyError}
    kind = kinds.get(failure.kind, RankFailed)
    return kind(failure.text + more)


def launch(attempt: Attempt, fork: bool, again: Again = lambda failure: None) -> Outcome:
    """Runs attempts until one ends well, a signal comes, or `again` gives up. Returns the outcome of the last one.
    Raises UserError: there are fewer GPUs than ranks."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if 0 < count <= (last := max(attempt.slots, default=attempt.world - 1)):
        raise UserError(
            f"{last + 1} ranks on this machine need {last + 1} GPUs, but it has {gpus.shown()}. To use its CPU, put "
            "CUDA_VISIBLE_DEVICES= (with no value) before the command"
        )
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
            elif failure is None or failure.kind in verdict.FINAL or outcome.signal is not None:
                return outcome
            following = again(failure)
            if following is None:
                return outcome
            wait_s, attempt = following
            if signals.wait(wait_s):
                return Outcome(stopped=signals.signal)  # what was saved is saved


@contextmanager
def _environment(world: int) -> Iterator[None]:
    """Sets environment variables of the ranks inside the block, except those that the user has set."""
    values = {
        "GLOO_SOCKET_IFNAME": LOOPBACK,
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


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """A new folder, which is removed at the end."""
    remove_stale()
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    try:
        with open(folder / ".owner", "w") as lock:
            with suppress(OSError):  # a file system without locks: the folder may stay
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.replace(folder / ".owner", folder / OWNER)  # locked before others see it
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def remove_stale() -> list[Path]:
    """Removes this user's folders whose launcher and ranks have ended."""
    removed = []
    for owner in Path(tempfile.gettempdir()).glob(f"{PREFIX}*/{OWNER}"):
        with suppress(OSError):
            if owner.parent.is_symlink() or owner.parent.stat().st_uid != os.getuid():
                continue
            with open(os.open(owner, os.O_RDWR | os.O_NOFOLLOW)) as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(owner.parent)
                removed.append(owner.parent)
    return removed


class Signals(Interrupt):
    """The stopping signals that came to the launcher, and a pipe that wakes it up."""

    def __init__(self) -> None:
        super().__init__(noted=self._wake)
        self.reader, self._writer = os.pipe()
        for end in (self.reader, self._writer):
            os.set_blocking(end, False)
        self.news = 0  # signals that no rank was told

    def _wake(self, number: int) -> None:
        self.news += 1
        with suppress(OSError):
            os.write(self._writer, b"x")

    def wait(self, seconds: float) -> bool:
        """Waits; True if a signal came."""
        if self.signal is None:
            wait([self.reader], seconds)
        return self.signal is not None

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        os.close(self.reader)
        os.close(self._writer)


class Supervisor:
    """An attempt that is under way. folder: an empty one, for the ranks' store and verdicts. method: fork or spawn."""

    def __init__(self, attempt: Attempt, folder: Path, method: str, signals: Signals):
        self.attempt, self.folder, self.signals = attempt, folder, signals
        self.running: dict[int, BaseProcess] = {}
        self.ended: dict[int, tuple[float, int]] = {}
        self.killed: set[int] = set()
        self.kills = oom_kills()
        self.kill_at = math.inf  # time.monotonic when all ranks are killed, because one has failed
        self.stop_at = math.inf  # the same, because they do not leave
        self.moved = 0  # when (st_mtime_ns) a rank last said that it gets on
        self.reforming = False
        self.spoke_at: dict[int, float] = {}  # when ranks were seen to have left a verdict
        self.context: Any = multiprocessing.get_context(method)

    def run(self) -> Outcome:
        """Starts the ranks and waits until all have ended."""
        ours, theirs = self.context.Pipe(duplex=False)
        try:
            self._start((ours, theirs))
            while self.running:
                self._pass_on()
                seconds = min(POLL_S, max(0.0, min(self.kill_at, self.stop_at) - time.monotonic()))
                wait([self.signals.reader, *(process.sentinel for process in self.running.values())], seconds)
                with suppress(BlockingIOError):
                    os.read(self.signals.reader, 4096)
                self._collect()
                now = time.monotonic()
                for rank, process in self.running.items():
                    if self._said(rank) and now - self.spoke_at.setdefault(rank, now) > LEAVE_S:
                        self._kill({rank: process})
                if self.stop_at < math.inf and self.attempt.grace_s is not None:
                    # All ranks have the grace time again when one has got something done since the last look
                    moved = self.moved
                    for file in self.folder.glob(f"{verdict.MOVED}-*"):
                        with suppress(OSError):
                            moved = max(moved, file.stat().st_mtime_ns)
                    if moved != self.moved:
                        self.moved, self.stop_at = moved, time.monotonic() + self.attempt.grace_s()
                if time.monotonic() >= min(self.kill_at, self.stop_at) or self.signals.impatient:
                    self.kill_at = self.stop_at = math.inf
                    self._kill(self.running)
            return self._outcome()
        finally:
            self._kill(self.running)
            for process in self.running.values():
                process.join()
            ours.close()
            theirs.close()

    def _start(self, lifeline: tuple[Connection, Connection]) -> None:
        """Starts all ranks. A signal that comes meanwhile is blocked until the rank, or the launcher, can note it."""
        attempt, numbers = self.attempt, stopping_signals()
        graceful, grace_s = attempt.grace_s is not None, self._grace_s()
        for rank in range(attempt.world):
            slot = attempt.slots[rank] if attempt.slots else rank
            place = Place(rank, attempt.world, slot, self.folder, graceful, grace_s, os.getpid(), lifeline,
                          attempt.timeout_s)  # fmt: skip
            process = self.context.Process(
                target=run_rank, args=(attempt.work, place), name=f"rank {rank}", daemon=False
            )
            before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
            try:
                process.start()
            finally:
                self.running.update({rank: process} if process.pid is not None else {})
                signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _pass_on(self) -> None:
        """Tells the ranks that the run is to stop, or that another number of them is to go on."""
        asks, number = self.attempt.reform, self.signals.signal
        if number is None and asks is not None and not self.reforming and not self.ended and asks():
            self.reforming, number = True, signal.SIGTERM
        elif number is None or not self.signals.news:
            return
        else:
            self.signals.news = 0
        self.stop_at = min(self.stop_at, time.monotonic() + self._grace_s())
        for process in self.running.values():
            _send(process, number)
            _send(process, signal.SIGCONT)

    def _grace_s(self) -> float:
        return self.attempt.grace_s() if self.attempt.grace_s is not None else 0.0

    def _collect(self) -> None:
        """Notes the ranks that have ended."""
        for rank, process in list(self.running.items()):
            code = process.exitcode
            if code is None:
                continue
            self.ended[rank] = time.monotonic(), code
            del self.running[rank]
            process.join()
            if code == 0 or rank in self.killed:
                continue
            if not self._vital(rank):
                said = f"rank {rank} has ended ({in_words(code)}); the others go on"
                print(said, file=sys.stderr, flush=True)
            elif self._said(rank, "done", "stopped"):  # the others, too, will soon have done their work
                continue
            else:
                settles = self._said(rank, "lost") or (code == FAILED and not self._said(rank))
                self.kill_at = min(self.kill_at, time.monotonic() + SETTLE_S * settles)

    def _said(self, rank: int, *kinds: str) -> bool:
        """True if the rank has left a verdict of one of these kinds, or of any."""
        return any((self.folder / f"{kind}-{rank}").exists() for kind in kinds or verdict.CODES)

    def _vital(self, rank: int) -> bool:
        """True if the end of this rank ends the others."""
        return rank not in self.attempt.expendable or self._said(rank, *verdict.FINAL)

    def _kill(self, processes: dict[int, BaseProcess]) -> None:
        for rank, process in processes.items():
            self.killed.add(rank)
            _send(process, signal.SIGKILL)

    def _outcome(self) -> Outcome:
        vital = {rank: end for rank, end in self.ended.items() if self._vital(rank)}
        codes = [code for _, code in vital.values()]
        asked = self.signals.signal
        if all(
            code in (0, STOPPED) or self._said(rank, "done", "stopped") for rank, (_, code) in vital.items()
        ):
            stopped = verdict.read(self.folder, "stopped")
            early = bool(stopped) or STOPPED in codes  # without a file if it could not be written
            if early and self.reforming and asked is None:
                return Outcome(reform=True)
            numbers = [int(text) for text in stopped.values() if text.isdigit()]
            return Outcome(stopped=asked or min(numbers, default=signal.SIGTERM)) if early else Outcome()
        if asked is not None and self.attempt.grace_s is None:
            return Outcome(stopped=asked)
        if asked is None and not self.reforming:  # it came to a rank
            asked = next((number for number in stopping_signals() if unsaved(number) in codes), None)
        memory = self.kills is not None and (oom_kills() or 0) > self.kills
        failure = verdict.judge(self.folder, vital, self.killed & vital.keys(), memory)
        return Outcome(failure=failure, signal=asked)


def _send(process: BaseProcess, number: int) -> None:
    with suppress(ProcessLookupError):
        if process.pid is not None and process.exitcode is None:
            os.kill(process.pid, number)
