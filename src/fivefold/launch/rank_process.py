"""The process of one local rank: sets it up, runs its work, leaves its verdict."""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn

from fivefold.errors import PASSING, BusyError, CommunicationError, UserError
from fivefold.files import NO_ROOM
from fivefold.launch import ranks as ranks_
from fivefold.launch import verdict
from fivefold.launch.interrupt import FAILED, Interrupt, stopping_signals, unsaved
from fivefold.launch.ranks import Ranks

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
    os.environ |= {verdict.FOLDER: str(place.folder), ranks_.STORE_FILE: str(place.folder / "store")}
    with Interrupt(noted=None if place.graceful else _end) as interrupt:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)
        met = threading.Event()
        _follow_launcher(place, met)
        code = _run(work, interrupt, met, place.timeout_s)
    end(code)


def end(code: int) -> NoReturn:
    """Ends this process. After a failure it ends at once: threads may still be inside the backend, and one that comes
    back to an interpreter which is being torn down crashes the process."""
    if code == FAILED:
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
        with ranks_.join(timeout_s) as ranks:
            met.set()
            stopped = work(ranks)
            return verdict.leave("done") if stopped is None else verdict.leave("stopped", str(stopped))
    except KeyboardInterrupt:
        return unsaved(signal.SIGINT)
    except UserError as error:
        code = verdict.leave("busy" if isinstance(error, BusyError) else "error", str(error))
    except OSError as error:
        if error.errno in PASSING | _HOPELESS:
            kind = "busy" if error.errno in PASSING else "error"
            code = verdict.leave(kind, f"{error.filename or 'the run'}: {error.strerror}")
        else:
            code = _fail(error)
    except CommunicationError as error:
        code = verdict.leave("lost", str(error))
    except Exception as error:
        code = _fail(error)
    return code if interrupt.signal is None else unsaved(interrupt.signal)


def _fail(error: Exception) -> int:
    if verdict.lost(error):
        said = verdict.backend_words(error)
        return verdict.leave("lost", f"rank {os.environ['RANK']} lost another rank: {said}")
    said = traceback.format_exception_only(error)[0].partition("\n")[0]
    verdict.leave("failed", f"{said}\n{''.join(traceback.format_exception(error))}")
    return FAILED


def _follow_launcher(place: Place, met: threading.Event) -> None:
    """Has this rank stop, and save, when the launcher is killed; and end in any case once it has done nothing for
    the grace time. Before the ranks have met there is nothing to save, and some may never come."""
    ours, theirs = place.lifeline
    theirs.close()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != place.launcher:  # it ended before; there is nothing to save
        _end(signal.SIGTERM)
    threading.Thread(
        target=_watch_launcher, args=(ours, place.grace_s, met), name="launcher", daemon=True
    ).start()


def _watch_launcher(lifeline: Connection, grace_s: float, met: threading.Event) -> None:
    with suppress(EOFError, OSError):
        lifeline.recv_bytes()
    if sys.platform != "linux":
        os.kill(os.getpid(), signal.SIGTERM)
    began = time.monotonic()
    while met.is_set() and (left_s := max(began, verdict.moved_at()) + grace_s - time.monotonic()) > 0:
        time.sleep(left_s)
    os.kill(os.getpid(), signal.SIGKILL)
