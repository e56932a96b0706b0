"""How a command and its ranks end: exit codes; Ctrl-C, SIGTERM and a closed terminal (finish the step, save, exit);
what ranks say about their end, and which of them failed first. No torch.

A rank leaves a file KIND-RANK in the private folder of its launcher, which makes one message of them all. So nothing is
printed by a rank that only lost another one.

| Kind | Said by a rank that |
|---|---|
| `done` | did its work |
| `stopped` | was asked to stop, and has saved; the file holds the signal's number |
| `error` | met an error of the user's, which trying again does not mend |
| `exhausted` | met an allocator's error; the last line is what the planner needs for its advice |
| `busy` | met a full disk, a folder in use or the like, which may pass |
| `hung` | found that a message does not end; the file says which, and what rank is missing |
| `failed` | raised an exception: a line that names it, then the traceback |
| `lost` | could not reach another rank, which may be the one that failed |
"""

from __future__ import annotations

import atexit
import math
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import ContextDecorator, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Self

from fivefold.errors import printable, shortened
from fivefold.files import own_word
from fivefold.launch.launchers import found

# Exit codes of `fivefold train`, of its ranks and of the other commands
DONE = 0  # the last step was reached
FAILED = 1  # a rank failed and the run could not be restarted, or a check failed
USER = 2  # an error that the user can fix; trying again does not help
BUSY = 74  # EX_IOERR: a full disk, a folder in use, a host or replica group that does not answer: trying again may help
STOPPED = 75  # EX_TEMPFAIL of sysexits.h: stopped by a signal with everything saved: start it again to go on
HUNG = 76  # of a rank: a message did not end; its launcher restarts all ranks
PATIENCE_S = 5  # a launcher repeats the signal that the terminal sent; both count as one
FOLDER = "FIVEFOLD_VERDICTS"  # environment variable of a rank: the folder of its attempt
CODES = {
    "done": 0,
    "stopped": STOPPED,
    "error": USER,
    "exhausted": USER,
    "busy": BUSY,
    "hung": HUNG,
    "failed": FAILED,
    "lost": FAILED,
}
FINAL = ("error", "exhausted")
"""Kinds that another start would not mend."""
LONGEST_TEXT = 20_000
"""Characters of a rank's last words: a traceback."""
SOONER_S = 0.5  # the launcher may see it that much after a survivor's message
# What gloo, NCCL and torch's stores say when the other end of a connection is gone
_GONE = re.compile(
    "Connection (closed by peer|reset by peer|refused|was likely closed)|Broken pipe|Socket closed"
    "|remote process exited|[Tt]imed out waiting"
)


def own_rank() -> str:
    """This rank's number."""
    return os.environ.get("RANK") or str((found() or (0,))[0])


def leave(kind: str, text: str = "") -> int:
    """Leaves this rank's verdict; returns the code to exit with. Without a launcher of ours the text is printed.

    It only writes a small file, so a watchdog's thread may call it while another one hangs."""
    assert kind in CODES, kind
    text = printable(shortened(text, LONGEST_TEXT))  # it quotes what others wrote
    folder = os.environ.get(FOLDER)
    if folder is None:
        if text and kind not in ("done", "stopped"):
            named = text.startswith((f"rank {own_rank()}:", f"rank {own_rank()} "))
            print(text if named else f"rank {own_rank()}: {text}", file=sys.stderr, flush=True)
        return CODES[kind]
    path = Path(folder, f"{kind}-{own_rank()}")
    temporary = path.with_name(f".{path.name}.{own_word()}")
    with suppress(OSError):  # the exit code says the kind, too
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace")
        _date(temporary)
        temporary.replace(path)
    return CODES[kind]


def _date(path: Path) -> None:
    """Dates a file by time.monotonic: nobody sets that clock, and all processes of a machine share it."""
    now = time.monotonic()
    with suppress(OSError):  # the file counts all the same
        os.utime(path, (now, now))


MOVED = "moved"  # a file MOVED-RANK: see `get_on`
moved_at = -math.inf  # when (time.monotonic) this rank last said that it gets on


def get_on() -> None:
    """This rank has been asked to stop, and still gets something done: it saves, or ends a validation. Who would kill
    it after the grace time waits for longer."""
    global moved_at
    moved_at = time.monotonic()
    if folder := os.environ.get(FOLDER):
        with suppress(OSError):
            path = Path(folder, f"{MOVED}-{own_rank()}")
            path.touch()
            _date(path)


def backend_words(error: BaseException) -> str:
    """The first line of a backend's error, without its source file and its advice."""
    line = (str(error).strip().splitlines() or [repr(error)])[0]
    return re.sub(r"^\[\S+:\d+\] ", "", line).partition(". This is typically caused by")[0][:300]


def lost(error: BaseException) -> bool:
    """True if this error, or one that it came from, is that another rank has gone."""
    found: BaseException | None = error
    while found is not None:
        if isinstance(found, RuntimeError | ConnectionError) and _GONE.search(str(found)):
            return True
        found = found.__cause__ or found.__context__
    return False


@dataclass(frozen=True)
class Failure:
    """What ended an attempt. rank: the one that failed first. kind: that of its file, or "killed" by a signal,
    "memory": killed because memory ran out, or "ended" without a word. text: one message. more: a traceback, or the
    last line of what is "exhausted"."""

    rank: int
    kind: str
    text: str
    more: str = ""


def read(folder: Path, kind: str) -> dict[int, str]:
    """By rank, what those say that left a verdict of this kind."""
    found = {}
    for file in folder.glob(f"{kind}-*"):
        number = file.name.removeprefix(f"{kind}-")
        if number.isdigit():
            found[int(number)] = file.read_text(encoding="utf-8", errors="replace")
    return found


def judge(
    folder: Path, ended: Mapping[int, tuple[float, int]], killed: Collection[int], memory: bool
) -> Failure:
    """Names the failure of an attempt. ended: when (time.monotonic) and with which code each rank ended. killed: the
    ranks that the launcher killed. memory: the system has killed a process of ours because memory ran out."""
    for kind in FINAL:
        if errors := read(folder, kind):
            rank = min(errors)
            text, _, held = errors[rank].rpartition("\n") if kind == "exhausted" else (errors[rank], "", "")
            return Failure(rank, kind, text, held)
    spoken: list[tuple[float, int, str]] = []
    said = {kind: read(folder, kind) for kind in ("busy", "hung", "failed", "lost")}
    for kind, texts in said.items():
        spoken += [((folder / f"{kind}-{rank}").stat().st_mtime, rank, kind) for rank in texts]
    first = [one for one in spoken if one[2] != "lost"]
    spoke = {rank for _, rank, _ in spoken} | read(folder, "done").keys() | read(folder, "stopped").keys()
    for rank, (at, code) in ended.items():
        # Asking a rank for its stacks may end it, if a thread of it ends just then (CPython issue 116008)
        asked = bool(said["hung"]) and code == -signal.SIGSEGV
        if code and rank not in spoke and rank not in killed and not asked:
            # A signal ends no rank because of another's failure, except the abort of a broken backend.
            at -= SOONER_S if code < 0 and code != -signal.SIGABRT else 0
            first.append((at, rank, "killed" if code < 0 else "ended"))
    if not first:
        if spoken:  # they lost each other; the first is nearest to the cause
            _, rank, _ = min(spoken)
            return Failure(rank, "lost", said["lost"][rank])
        rank = min(killed)
        return Failure(rank, "ended", f"rank {rank} did not end by itself, and was killed")
    _, rank, kind = min(first)
    if kind in ("busy", "hung"):
        return Failure(rank, kind, said[kind][rank])
    if kind == "failed":
        named, _, trace = said["failed"][rank].partition("\n")
        return Failure(rank, kind, f"rank {rank} failed: {named[:500]}", trace.rstrip())
    code = ended[rank][1]
    if code == -signal.SIGKILL and memory:
        return Failure(
            rank, "memory", f"rank {rank} was killed by the system (SIGKILL), because memory ran out"
        )
    what = f"was killed ({in_words(code)})" if code < 0 else f"ended ({in_words(code)}) without a message"
    return Failure(rank, kind, f"rank {rank} {what}")


def unsaved(number: int) -> int:
    """The code of a run that this signal stopped before everything was saved."""
    return 128 + number


def in_words(code: int) -> str:
    """How a process ended, such as "SIGKILL" or "exit code 1". Python gives a signal as a negative code."""
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def stopping_signals() -> list[int]:
    """The signals that stop a run. An ignored SIGHUP, as under nohup, stays ignored."""
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [signal.SIGINT, signal.SIGTERM, *[signal.SIGHUP] * (not ignored)]


class Interrupt:
    """Inside the block, SIGINT, SIGTERM and SIGHUP only set `signal` and print `message`.

    A SIGINT more than PATIENCE_S after the first aborts at once. A signal that came to the block around this one counts
    here, too. Outside the main thread this does nothing, because Python allows no handlers there.

    noted: called with each signal's number."""

    def __init__(self, message: str = "", noted: Callable[[int], None] | None = None) -> None:
        self.message, self.noted = message, noted
        self.signal: int | None = None
        self.impatient = False  # a second SIGINT came
        self._at = 0.0
        self._before: dict[int, object] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            around = getattr(signal.getsignal(signal.SIGTERM), "__self__", None)
            for number in stopping_signals():
                self._before[number] = signal.signal(number, self._note)
            if isinstance(around, Interrupt) and around.signal is not None and self.signal is None:
                self._note(around.signal, None)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        around = getattr(self._before.get(signal.SIGTERM), "__self__", None)
        if isinstance(around, Interrupt) and around.signal is None and self.signal is not None:
            around.signal, around._at = self.signal, self._at

    def wanted(self) -> bool:
        return self.signal is not None

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.signal is None:
            self.signal, self._at = number, now
            if self.message:
                say(self.message)
        elif number == signal.SIGINT and now - self._at > PATIENCE_S:
            self.impatient = True
            if self.noted is None:
                raise KeyboardInterrupt
        if self.noted is not None:
            self.noted(number)


def say(message: str) -> None:
    """Prints a line in a handler, where print() is not safe."""
    with suppress(OSError):
        os.write(2, f"{message}\n".encode())


class Leaving(ContextDecorator):
    """Inside the block, or a function with this decorator, a signal ends the command at once, with `code`. It is for
    the time when no step is trained: before the first one nothing is lost (STOPPED), after the last one the run is
    complete (DONE)."""

    def __init__(self) -> None:
        self.code = STOPPED
        self._before: dict[int, object] = {}

    def __enter__(self) -> Leaving:
        self.code = STOPPED
        _leaving.append(self)
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._leave) for number in stopping_signals()}
        return self

    def __exit__(self, *_: object) -> None:
        _leaving.remove(self)
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        if self._before:
            atexit.register(ignore_signals)

    def _leave(self, number: int, frame: FrameType | None) -> None:
        ignore_signals()
        if self.code == STOPPED:
            say(f"stopped by {signal.Signals(number).name} before training; nothing is lost")
        raise SystemExit(self.code)


_leaving: list[Leaving] = []  # the commands that are under way in this process


def run_complete() -> None:
    """From now on a signal that ends the command does so with DONE."""
    for command in _leaving:
        command.code = DONE


def ignore_signals() -> None:
    """For a process that is about to exit: a signal in its last moments must not change its code."""
    for number in stopping_signals():
        signal.signal(number, signal.SIG_IGN)
