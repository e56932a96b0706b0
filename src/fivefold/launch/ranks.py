"""The ranks of a run: this rank's number and device, the process group of all ranks, and the process of one that
Fivefold started, which sets itself up, runs its work and leaves its verdict.

The same command works with these kinds of ranks: one process, ranks that Fivefold started on this machine (they meet in
a file, so nothing listens beyond loopback), and those of the launchers in `launchers.py`.
"""

from __future__ import annotations

import atexit
import ctypes
import errno
import gc
import os
import signal
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from fivefold.errors import PASSING, BusyError, CommunicationError, MemoryRanOut, UserError
from fivefold.files import NO_ROOM
from fivefold.host import cores, gpus, machine_id
from fivefold.launch import launchers, verdict
from fivefold.launch.launchers import found, master
from fivefold.launch.private import abort_groups
from fivefold.launch.verdict import DONE, FAILED, STOPPED, Interrupt, stopping_signals, unsaved

STORE_FILE = "FIVEFOLD_STORE_FILE"  # set by launch/local.py for the ranks it starts
SPARE_POLL_S = 1.0
_FINISHED = "finished"  # a key of the store: the ranks that train have ended
ABORT_S = 1.0  # for a backend to let go of its messages after an error


@dataclass(frozen=True)
class Ranks:
    rank: int
    world: int
    local_rank: int
    local_world: int
    device: torch.device
    timeout_s: float = 600  # until a message fails, and for which ranks wait for each other at the start
    near: str = ""  # which CPUs it was bound to, in words

    @property
    def first(self) -> bool:
        return self.rank == 0


def device_for(local_rank: int) -> torch.device:
    """The GPU with that number, or the CPU of a machine without GPUs."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    if local_rank >= torch.cuda.device_count():
        # Slurm's --gpus-per-task=1 shows each rank its own GPU only
        if torch.cuda.device_count() == 1 and "SLURM_PROCID" in os.environ:
            return torch.device("cuda", 0)
        raise UserError(f"local rank {local_rank} has no GPU: GPUs that this process sees: {gpus.shown()}")
    return torch.device("cuda", local_rank)


def _backend(local_world: int = 1) -> str:
    """NCCL with GPUs, unless ranks of our launcher share them: it refuses that."""
    shared = STORE_FILE in os.environ and local_world > torch.cuda.device_count()
    return "nccl" if torch.cuda.is_available() and not shared else "gloo"


def group_options(backend: str, timeout: timedelta) -> Any:
    """Options of a new process group. NCCL's kernels get streams of high priority: a message that overlaps with
    computation otherwise begins when kernels queued before it leave room, and all its ranks wait for the last one."""
    if backend != "nccl":
        return None
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = timeout  # it warns of another than the group's
    return options


def connect(group: dist.ProcessGroup | None, device: torch.device) -> None:
    """Makes NCCL's communicator of a group (None: of all ranks) by a small sum, before the first step has to. Ranks
    make their groups in one order. It is a part of meeting, no message of training: no `comm.Axis` counts it.

    The argument `device_id` of init_process_group would do it, too (torch 2.11 to 2.15). But then new groups are split
    from that of all ranks, which waits for ranks that are no members, and a pipeline's sends and receives go through
    one queue instead of one per pair. NCCL itself connects ranks in the first message (since 2.22).
    """
    if dist.get_backend(group) == "nccl":
        dist.all_reduce(torch.zeros(1, device=device), group=group)
        torch.cuda.synchronize(device)


def threads_of(local_world: int) -> int:
    """Threads of each of `local_world` ranks on this machine. The user's or the launcher's setting wins."""
    said = os.environ.get("OMP_NUM_THREADS", "")
    return int(said) if said.isdigit() and int(said) else max(1, cores() // local_world)


@contextmanager
def join(
    timeout_s: float = Ranks.timeout_s, meet_s: float = Ranks.timeout_s, members: int | None = None
) -> Iterator[Ranks]:
    """Joins the process group of the launcher (if any) and leaves it at the end. After an error nothing waits for other
    ranks: NCCL would, in `destroy_process_group`, and they may never come.

    timeout_s: seconds until a message fails. meet_s: seconds for which the ranks wait for each other. members: the
    ranks that train; the others are spare (`wait_as_spare`). None: all.

    Raises:
        UserError: a variable of the launcher is wrong.
        BusyError: the other ranks cannot be reached.
        CommunicationError: one of our launcher's ranks has ended.
    """
    rank, launched, local_rank, local_world = found() or (0, 1, 0, 1)
    world = members or launched
    local_world = min(local_world, world)
    device = device_for(local_rank)
    with gpus.near(device.index) as near:  # before CUDA and NCCL start threads
        if device.type == "cuda":
            torch.cuda.set_device(device)
        else:
            torch.set_num_threads(threads_of(local_world))
            if world > 1:
                schedule_as_batch()
        ranks = Ranks(rank, world, local_rank, local_world, device, timeout_s, near)
        if near.startswith(gpus.WARNING) and rank:  # the console is the first rank's
            print(f"rank {rank}: {near}", file=sys.stderr)
        store = _meet(ranks, launched, meet_s) if launched > 1 else None
        try:
            if world > 1:
                connect(None, device)
            yield ranks
        except BaseException as error:
            if world > 1 and verdict.FOLDER not in os.environ:  # a rank of our launcher ends now: see `end`
                _abandon(error)
            raise
        finally:
            if store is not None and rank == 0 and world < launched:
                with suppress(RuntimeError):  # it has ended before
                    store.set(_FINISHED, "")
        if world > 1:
            dist.destroy_process_group()


def _abandon(error: BaseException) -> None:
    """Frees the process groups after an error. A backend that does not let go within ABORT_S ends this process, with
    the error's words."""
    aborting = threading.Thread(target=abort_groups, daemon=True)
    aborting.start()
    aborting.join(ABORT_S)
    if aborting.is_alive():
        end(verdict.leave(*_kind_and_words(error)) if isinstance(error, Exception) else FAILED)


def _meet(ranks: Ranks, launched: int, meet_s: float) -> dist.Store:
    """Joins the process group; returns the store. launched: ranks with the spare ones. Raises as `join` does."""
    rank, world, backend = ranks.rank, ranks.world, _backend(ranks.local_world)
    launchers.require_interface(backend)
    atexit.unregister(_free_groups)  # of a join before
    atexit.register(_free_groups)
    try:
        store = _store(rank, launched, meet_s)
        if world > 1 and STORE_FILE not in os.environ:  # the same on all ranks
            host, here = master()[0], _on_one_machine(store, rank, world, meet_s)
            if world > ranks.local_world and not os.environ.get(launchers.variable(backend)):
                launchers.name_interface(backend, host if here else launchers.reachable(host, backend), here)
        # Local ranks have the time of a message to start, and may need longer
        if ranks.timeout_s < meet_s and STORE_FILE in os.environ:
            store.set(f"fivefold/{rank}", "")
            store.wait([f"fivefold/{other}" for other in range(launched)], timedelta(seconds=meet_s))
        if world > 1:
            timeout = timedelta(seconds=ranks.timeout_s)
            given = {"timeout": timeout, "pg_options": group_options(backend, timeout)}
            dist.init_process_group(backend, store=store, rank=rank, world_size=world, **given)
        return store
    except RuntimeError as error:
        said = f"rank {rank} cannot reach the other ranks: {verdict.backend_words(error)}"
        if verdict.FOLDER in os.environ:  # ranks of our launcher: one of them has ended
            raise CommunicationError(said) from error
        raise BusyError(f"{said}.{launchers.interfaces(backend)}") from error


def wait_as_spare(meet_s: float = Ranks.timeout_s) -> None:
    """Waits while the other ranks of the launcher train, also after a signal: they are saving then, and some launchers
    kill all ranks when one has ended. Nor could they use a rank that has ended when another is gone."""
    launched = found()
    assert launched is not None, "only a launcher has ranks to spare"
    rank, world, *_ = launched
    with suppress(RuntimeError):  # the store has ended with the others
        store = _store(rank, world, meet_s)
        while not store.check([_FINISHED]):
            time.sleep(SPARE_POLL_S)


def schedule_as_batch() -> None:
    """Lets this rank's threads wait for a core until the thread on it pauses (Linux, SCHED_BATCH).

    gloo's thread polls a connection for as long as another thread holds its lock. If the holder has just been
    interrupted by a thread that woke up, this lasts for a time slice, 4 ms, in which a small message could be sent 20
    times."""
    with suppress(OSError):
        if sys.platform == "linux" and os.sched_getscheduler(0) == os.SCHED_OTHER:
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def _free_groups() -> None:
    """Frees the process groups, which waits for gloo's threads.

    The threads need the interpreter to release the tensors of their last operation, and crash if it is already ending.
    gc runs because cycles may hold groups."""
    gc.collect()


def _store(rank: int, world: int, meet_s: float) -> dist.Store:
    """The store where the ranks meet. Those of foreign launchers have all come when it returns."""
    path = os.environ.get(STORE_FILE)
    if path:
        return dist.FileStore(path, world)
    host, port = master()
    shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    serves, timeout = rank == 0 and not shared, timedelta(seconds=meet_s)
    launched = found()
    on_one_host = launched is None or launched[1] == launched[3]
    if not on_one_host and not shared:  # torchrun's agent listens on all interfaces
        host = launchers.reachable(host, _backend())
    alone = on_one_host or launchers.only_here(host, _backend())
    at = launchers.listening(host, port, alone) if serves else launchers.wait_for(host, port, meet_s)
    store = dist.TCPStore(host, port, world, serves, timeout, wait_for_workers=False, master_listen_fd=at)
    return dist.PrefixStore(_round(store, rank, world, meet_s), store)


def _round(store: dist.Store, rank: int, world: int, meet_s: float) -> str:
    """A name that only this start of the ranks has, as a prefix of all keys.

    A store outlives a restart, and still holds the addresses of ranks that are gone. torchrun's restart count tells
    starts apart only as long as the same hosts take part: it does not count those that a host caused by joining, and a
    host that joins counts from 0. So rank 0 gives a name to each rank that says hello, until all have taken it.
    """
    own, hello = uuid.uuid4().hex, "fivefold/hello/{}".format
    if rank:
        store.set(hello(rank), own)
        name = _awaited(store, f"fivefold/{own}", meet_s)
        store.set(f"fivefold/{name}/{rank}", "")
        return name
    missing, greeted = set(range(1, world)), set[str]()
    deadline = time.monotonic() + meet_s
    while missing:
        for other in sorted(missing):
            if store.check([hello(other)]) and (who := store.get(hello(other)).decode()) not in greeted:
                store.set(f"fivefold/{who}", own)  # perhaps to a rank of an earlier start, which is gone
                greeted.add(who)
            if store.check([f"fivefold/{own}/{other}"]):
                missing.discard(other)
        if missing and time.monotonic() > deadline:
            raise RuntimeError(f"ranks {sorted(missing)} did not come within launch.meet = {meet_s:g} s")
        time.sleep(0.01 * bool(missing))
    return own


def _awaited(store: dist.Store, key: str, meet_s: float) -> str:
    """The value of a key that another rank sets. It looks again and again: a store that waits by itself lets no
    handler of a signal run."""
    deadline = time.monotonic() + meet_s
    while not store.check([key]):
        if time.monotonic() > deadline:
            raise RuntimeError(f"rank 0 did not come within launch.meet = {meet_s:g} s")
        time.sleep(0.01)
    return store.get(key).decode()


def _on_one_machine(store: dist.Store, rank: int, world: int, meet_s: float) -> bool:
    """True if all ranks are on one machine, though of several launches, such as torchrun's agents."""
    mine, key, answer = machine_id().hex(), "fivefold/machine/{}".format, "fivefold/one machine"
    store.set(key(rank), mine)
    if rank == 0:
        same = all(_awaited(store, key(other), meet_s) == mine for other in range(world))
        store.set(answer, str(same))
    return _awaited(store, answer, meet_s) == "True"


_PR_SET_PDEATHSIG = 1  # sys/prctl.h
_HOPELESS = NO_ROOM | {errno.EMFILE, errno.ENAMETOOLONG, errno.ELOOP}


@dataclass(frozen=True)
class Place:
    """Where a rank runs. slot: the number of its device. folder: of its attempt. graceful: its work finishes and saves
    when it is asked to stop, within grace_s; otherwise it ends at once. lifeline: both ends of a pipe that breaks when
    the launcher ends. timeout_s: until a message fails."""

    rank: int
    world: int
    slot: int
    folder: Path
    graceful: bool
    grace_s: float
    launcher: int
    lifeline: tuple[Connection, Connection]
    timeout_s: float


def run_rank(work: Callable[[Ranks], int | None], place: Place) -> None:
    """Runs `work`, and ends the process with the code of its verdict. It starts with the stopping signals blocked."""
    numbers = stopping_signals()
    for number in numbers:  # the launcher's handlers, after a fork
        signal.signal(number, signal.SIG_DFL)
    rank, world = place.rank, place.world
    own = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": place.slot, "LOCAL_WORLD_SIZE": world}
    os.environ.update({name: str(value) for name, value in own.items()})
    os.environ |= {verdict.FOLDER: str(place.folder), STORE_FILE: str(place.folder / "store")}
    with Interrupt(noted=None if place.graceful else _end) as interrupt:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)
        met = threading.Event()
        _follow_launcher(place, met)
        code = _run(work, interrupt, met, place.timeout_s)
    end(code)


def end(code: int) -> NoReturn:
    """Ends this process. After an error it ends at once: threads may still be inside the backend, and one that comes
    back to an interpreter which is being torn down crashes the process."""
    if code not in (DONE, STOPPED):
        with suppress(OSError, ValueError, AttributeError):  # closed, or none
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
    raise SystemExit(code)


def _end(number: int) -> None:
    """Ends a rank that has nothing to save. The launcher knows the signal."""
    os._exit(unsaved(number))


def _run(
    work: Callable[[Ranks], int | None], interrupt: Interrupt, met: threading.Event, timeout_s: float
) -> int:
    """Does the work; returns the exit code. met: set once the ranks have met."""
    try:
        with join(timeout_s) as ranks:
            met.set()
            with words_first():
                stopped = work(ranks)
            return verdict.leave("done") if stopped is None else verdict.leave("stopped", str(stopped))
    except KeyboardInterrupt:
        return unsaved(signal.SIGINT)
    except Said as said:
        (code,) = said.args
    except Exception as error:  # they have not met
        code = verdict.leave(*_kind_and_words(error))
    return code if interrupt.signal is None else unsaved(interrupt.signal)


class Said(Exception):
    """An error of a rank whose launcher has its words. Its argument: the code to exit with."""


@contextmanager
def words_first() -> Iterator[None]:
    """An error inside the block reaches the rank's launcher before what is around the block is closed, which may take
    long. Another launcher reads no verdicts: there the error's first line is printed, but for a user's error, which
    all ranks may have. Raises Said: this rank's launcher is ours."""
    try:
        yield
    except Said:
        raise
    except Exception as error:
        kind, words = _kind_and_words(error)
        if verdict.FOLDER in os.environ:
            raise Said(verdict.leave(kind, words)) from error
        if found() and not isinstance(error, UserError):
            verdict.leave(kind, words.partition("\n")[0])
        raise


def give_up(error: BaseException) -> NoReturn:
    """Ends this rank by an error that a thread has met whom nobody waits for."""
    os._exit(verdict.leave(*_kind_and_words(error)))


def _kind_and_words(error: BaseException) -> tuple[str, str]:
    """The verdict of a rank that met this error."""
    if isinstance(error, MemoryRanOut):
        return "exhausted", str(error)
    if isinstance(error, UserError):
        return "busy" if isinstance(error, BusyError) else "error", str(error)
    if isinstance(error, CommunicationError):
        return "lost", str(error)
    if isinstance(error, OSError) and error.errno in PASSING | _HOPELESS:
        words = f"{error.filename or 'the run'}: {error.strerror}"
        return "busy" if error.errno in PASSING else "error", words
    if verdict.lost(error):
        return "lost", f"rank {verdict.own_rank()} lost another rank: {verdict.backend_words(error)}"
    named = traceback.format_exception_only(error)[0].partition("\n")[0]
    return "failed", f"{named}\n{''.join(traceback.format_exception(error))}"


def _follow_launcher(place: Place, met: threading.Event) -> None:
    """Has this rank stop, and save, when the launcher is killed; and end in any case once it has done nothing for
    the grace time. Before the ranks have met there is nothing to save, and some may never come."""
    (ours, theirs), grace_s = place.lifeline, place.grace_s
    theirs.close()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != place.launcher:  # it ended before; there is nothing to save
        _end(signal.SIGTERM)

    def watch() -> None:
        with suppress(EOFError, OSError):
            ours.recv_bytes()
        if sys.platform != "linux":
            os.kill(os.getpid(), signal.SIGTERM)
        began = time.monotonic()
        while met.is_set() and (left_s := max(began, verdict.moved_at) + grace_s - time.monotonic()) > 0:
            time.sleep(left_s)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="launcher", daemon=True).start()
