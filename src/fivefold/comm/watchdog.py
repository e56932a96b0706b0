"""Finds a message that does not end, names the rank that is missing, and ends this rank, so that all can start again.

    with watching(ranks, hang_s=30, traces=out / "traces"):
        train()

A thread of each rank posts once a second what the rank has begun and what it waits for (`progress.py`): ranks that
Fivefold started on this machine in files of the launch's private folder (`Files`), others, perhaps on several hosts, in
the store in which they met (`Store`).
When its rank has waited for as long as a message may take, it reads the others' posts and judges (`hang.py`). So does a
rank that waits for nobody and gets nothing done, after twice the time: perhaps nobody waits, or all do without a word,
in the launch of a kernel. The first rank with a verdict collects the stacks of all ranks of its machine, says it, and
all leave (`launch/verdict.py`). gloo's own time-out (`launch.timeout`) stays the last resort.

A message may take `hang_s`, or three usual steps if they are longer; after SIGTERM or Ctrl-C a third of that. Work that
ranks do apart has more time (`Progress.phase`). Time counts only while this thread runs, so a machine that sleeps finds
no hang when it wakes up.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import signal
import socket
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from fivefold.comm.hang import STEPS, Judge, Post, Seen, Verdict, Wait
from fivefold.comm.progress import progress
from fivefold.errors import printable
from fivefold.files import make_folder, remove, write_atomically
from fivefold.host import machine_id
from fivefold.kernels.private import default_store
from fivefold.launch import verdict
from fivefold.launch.ranks import STORE_FILE, Ranks
from fivefold.launch.verdict import unsaved

TICKS, TICK_S = 10, 1.0  # looks in the time that a message may take; most seconds between two
STOPPING = 3  # after a signal, a message may take so many times less
UNASKED = 2  # a rank that waits for nobody judges that many times later: others know more
ANSWERED = 3  # times that posts may have been read since one asked for them
ROUNDS = 10  # posts to a store in the time that a message may take
STACKS_S = 0.5  # for other ranks to write their stacks
LEAVE_S = 2.0  # for the rank with the verdict to write it
MOST = 1 << 16  # bytes of a post
HEAD = 8  # digits of its length
# batch systems send the usual ones
_SIGNAL = signal.SIGRTMIN + 7 if hasattr(signal, "SIGRTMIN") else signal.SIGUSR2


class Files:
    """A file per rank in a folder of this machine. Each post takes the place of the one before by one write.

    every_s: seconds between posts. answers: grows when other ranks' posts have been read."""

    def __init__(self, folder: Path, rank: int, every_s: float):
        make_folder(folder, mode=0o700)
        self.folder, self.every_s, self.answers = folder, every_s, 0
        self._own = os.open(folder / str(rank), os.O_WRONLY | os.O_CREAT, 0o600)
        self._others: dict[int, int] = {}

    def post(self, said: str) -> None:
        content = said.encode()[:MOST]
        with suppress(OSError):  # a full disk
            os.pwrite(self._own, b"%0*d" % (HEAD, len(content)) + content, 0)

    def read(self, ranks: Iterable[int]) -> dict[int, dict[str, Any]]:
        """What was last posted, by rank."""
        found = {}
        for rank in ranks:
            with suppress(OSError, ValueError):  # not there yet, or it was just being written
                if rank not in self._others:
                    self._others[rank] = os.open(self.folder / str(rank), os.O_RDONLY)
                content = os.pread(self._others[rank], HEAD + MOST, 0)
                found[rank] = json.loads(content[HEAD : HEAD + int(content[:HEAD])])
        self.answers += 1
        return found

    def claim(self) -> bool:
        """True for the first rank that calls it."""
        with suppress(OSError):
            os.close(os.open(self.folder / "claimed", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
            return True
        return False

    def close(self) -> None:
        for file in (self._own, *self._others.values()):
            os.close(file)
        self._others.clear()


class Store:
    """Keys of the store in which the ranks met. A thread of its own talks to it, because a store that cannot be reached
    never answers. every_s: seconds between posts. It reads only what is asked for. The store keeps the posts of hosts
    that are lost."""

    def __init__(self, store: dist.Store, rank: int, every_s: float):
        self.store, self.rank, self.every_s, self.answers = store, rank, every_s, 0
        self._said, self._wanted = "", set[int]()
        self._found: dict[int, dict[str, Any]] = {}
        self._over, self._claim = threading.Event(), threading.Event()
        self._claimed: bool | None = None
        self._hurry = threading.Event()
        self._thread = threading.Thread(target=self._run, name="posts of ranks", daemon=True)
        self._thread.start()

    def post(self, said: str) -> None:
        self._said = said

    def read(self, ranks: Iterable[int]) -> dict[int, dict[str, Any]]:
        """What was last posted, by rank: what an earlier call has asked for."""
        self._wanted = set(ranks)
        return dict(self._found)

    def claim(self) -> bool:
        """A store that does not answer within two seconds cannot say no."""
        self._claim.set()
        self._hurry.set()
        self._over.wait(2)
        return self._claimed is not False

    def close(self) -> None:
        self._over.set()
        self._hurry.set()
        self._thread.join(2)

    def _run(self) -> None:
        with suppress(RuntimeError):  # the store has ended: so does the run
            store = dist.PrefixStore("ranks", self.store.clone())  # pyright: ignore[reportAttributeAccessIssue]
            store.set_timeout(timedelta(days=1))
            while not self._over.is_set():
                if self._said:
                    store.set(str(self.rank), self._said)
                if self._claim.is_set() and self._claimed is None:
                    self._claimed = store.add("claimed", 1) == 1
                    self._over.set()
                wanted, self._wanted = self._wanted, set[int]()
                there = [str(r) for r in sorted(wanted) if r in self._found or store.check([str(r)])]
                if there:
                    for rank, content in zip(there, store.multi_get(there), strict=True):
                        with suppress(ValueError):
                            self._found[int(rank)] = json.loads(content)
                self.answers += 1
                self._hurry.wait(self.every_s)


Board = Files | Store


@contextmanager
def watching(ranks: Ranks, hang_s: float, traces: Path) -> Iterator[None]:
    """Watches this rank inside the block, which trains in the thread that calls it. hang_s: 0: it does not. traces: the
    folder for stacks."""
    progress.start()
    if not hang_s:
        yield
        return
    board: Board | None = None  # where these ranks post; one rank has no other
    if ranks.world > 1 and (path := os.environ.get(STORE_FILE)):
        board = Files(Path(f"{path}.ranks"), ranks.rank, min(TICK_S, hang_s / TICKS))
    elif ranks.world > 1:
        board = Store(default_store(), ranks.rank, hang_s / ROUNDS)
    watchdog = Watchdog(ranks, hang_s, traces, board).start()
    try:
        yield
    finally:
        watchdog.close()


class Watchdog:
    """Watches one rank, in a thread of its own."""

    def __init__(self, ranks: Ranks, hang_s: float, traces: Path, board: Board | None):
        self.ranks, self.hang_s, self.traces, self.board = ranks, hang_s, traces, board
        self.host, self.tick_s = machine_id().decode(), min(TICK_S, hang_s / TICKS)
        self.signal: int | None = None
        self._beat, self._moved, self._still_s = 0, -1, 0.0
        self._seen: dict[int, Seen] = {}
        self._answers, self._unanswered_s, self._asked_s = 0, 0.0, 0.0
        self._stack, self._stack_path = tempfile.mkstemp(prefix="fivefold-stack-")
        if sys.platform == "linux":  # so nothing stays behind, whatever ends this process
            remove(Path(self._stack_path))
            self._stack_path = f"/proc/{os.getpid()}/fd/{self._stack}"
        faulthandler.register(_SIGNAL, self._stack, all_threads=True)
        self._bell, self._wake = socket.socketpair()
        self._bell.settimeout(self.tick_s)  # it waits by poll(), which takes any number of open files
        self._wake.setblocking(False)
        self._blind, self._before, self._sending = False, -1, Sending()
        if threading.current_thread() is threading.main_thread():  # only it can have signals ring there
            self._before = signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)
        self.cpu_s = 0.0
        """Processor seconds of the thread."""
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def start(self) -> Watchdog:
        self._thread.start()
        return self

    def close(self) -> None:
        if threading.current_thread() is threading.main_thread():
            signal.set_wakeup_fd(self._before)
        self._wake.shutdown(socket.SHUT_RDWR)
        if self._thread.ident is not None:
            self._thread.join()
        for end in (self._bell, self._wake):
            end.close()
        faulthandler.unregister(_SIGNAL)
        os.close(self._stack)
        if sys.platform != "linux":
            remove(Path(self._stack_path))
        if self.board is not None:
            self.board.close()

    @property
    def limit_s(self) -> float:
        """How long a message may take."""
        return max(self.hang_s / (STOPPING if self.signal else 1), STEPS * progress.usual_s)

    def _run(self) -> None:
        last = time.monotonic()
        while True:
            with suppress(TimeoutError):
                rung = self._bell.recv(64)
                if not rung:
                    return
                self._note(rung)
            now = time.monotonic()
            try:
                self._look(min(now - last, 2 * self.tick_s))
                self._blind = False
            except Exception as error:  # whatever it is, the run goes on, and the next look may work
                if not self._blind:
                    said = f"the watchdog cannot watch ({error!r:.300}). A hang may only be found after launch.timeout"
                    print(printable(f"WARNING: rank {self.ranks.rank}: {said}"), file=sys.stderr, flush=True)
                self._blind = True
            last, self.cpu_s = now, time.thread_time()

    def _note(self, rung: bytes) -> None:
        for number in rung:
            if self.signal is None and number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                self.signal = number

    def _look(self, seconds: float) -> None:
        """seconds: that have passed."""
        if self.board is not None and seconds:
            held_s, to = self._sending.look()
            progress.sending = min(1.0, held_s / seconds), to
        moved = progress.moved
        if self.signal is not None and moved != self._moved:
            verdict.get_on()
        self._still_s = self._still_s + seconds if moved == self._moved else 0.0
        self._moved, self._beat = moved, self._beat + 1
        own = self._post()
        self._seen[self.ranks.rank] = Seen(own)
        # A save, for example, may be long. One rank is perhaps a notebook, which must not end.
        idle = own.wait is None and not own.phase and self.board is not None
        judges, limit_s = own.wait is not None or idle, self.limit_s
        if self.board is not None:
            self.board.post(json.dumps(asdict(own)))
            overseen = progress.overseen
            asked = bool(overseen) or (judges and self._still_s >= limit_s / 2)
            self._asked_s = self._asked_s + seconds if asked else 0.0
            known = self._asked_s >= ANSWERED * self.board.every_s  # a signal may have come in between
            judges = judges and known
            if asked or 0 not in self._seen:  # rank 0's host is where the store may be lost
                self._read(seconds if asked else 0.0, asked)
            else:
                self._unanswered_s = 0.0
            if overseen and known and (found := self._judge(own, overseen)) is not None:
                self._leave(found)
        if idle and self.signal is None:
            limit_s *= UNASKED
        if judges and self._still_s >= limit_s and (found := self._judge(own)) is not None:
            self._leave(found)

    def _post(self) -> Post:
        phase, patience = [("", 1.0), *progress.phases][-1]
        waiting, working, wait = progress.waits.get(progress.main), None, None
        if waiting is not None:  # perhaps a thread that serves others does something now
            working = next(
                (thread for thread in progress.serving.copy() if thread not in progress.waits), None
            )
        at = progress.places(working)
        if waiting is not None and working is None:
            own = [number for number, place in enumerate(at) if place.startswith("fivefold/comm/")]
            callers = at[own[-1] + 1 :] if own else at
            callers = [place for place in callers if place.startswith("fivefold/")] or callers
            axis, operation, ops, number, peers, began = waiting
            wait = Wait(operation, at=callers[0].split(" in ")[0] if callers else "")
            if axis is not None:
                wait = replace(
                    wait, axis=axis.name, purpose=axis.purpose, ranks=axis.ranks, group=ops.group if ops else axis.name,
                    number=number, peers=tuple(axis.ranks[i] for i in peers), began=str(began) if began else "",
                )  # fmt: skip
        begun = {name: ops.begun for name, ops in progress.groups.copy().items()}
        return Post(
            self.ranks.rank, self.host, os.getpid(), self._beat, progress.step, phase, patience, self._still_s, wait,
            begun, tuple(at), self._stack_path, int(_SIGNAL), progress.usual_s, progress.role,
        )  # fmt: skip

    def _read(self, seconds: float, everybody: bool) -> None:
        """Reads what others, or rank 0, have posted. seconds: that count as silence of those who have not."""
        assert self.board is not None
        others = [rank for rank in range(self.ranks.world if everybody else 1) if rank != self.ranks.rank]
        found = self.board.read(others)
        answered = self.board.answers > self._answers
        self._answers = self.board.answers
        self._unanswered_s = 0.0 if answered else self._unanswered_s + seconds
        for rank, content in found.items():
            post, (before, silent_s) = Post.parse(content), self._seen.get(rank, Seen(None))
            same = before is not None and before.beat == post.beat
            self._seen[rank] = Seen(post, silent_s + seconds if same else 0.0)

    def _judge(self, own: Post, overseen: frozenset[int] = frozenset()) -> Verdict | None:
        silence_s = max(self.limit_s / 3, 3 * self.board.every_s) if self.board else 0.0
        apart_s = max(self.hang_s, self.limit_s)
        ahead = self.ranks.device.type == "cuda"
        judge = Judge(self.ranks.rank, self.host, self._seen, self.limit_s, silence_s, apart_s, ahead)
        if self.board and own.wait is not None and self._unanswered_s >= silence_s:
            return judge.store_lost(self._unanswered_s)
        return judge.overseen(overseen) if overseen else judge.verdict()

    def _leave(self, found: Verdict) -> None:
        """Says the verdict, unless another rank does so, and ends this process."""
        code = verdict.CODES["hung"] if self.signal is None else unsaved(self.signal)
        if self.board is not None and not self.board.claim():
            time.sleep(LEAVE_S)  # the other rank says it, and whoever started us ends us
            os._exit(code)
        text = found.text
        if verdict.FOLDER in os.environ:  # a launcher knows it also if asking for the stacks ends a rank
            verdict.leave("hung", text)
        with suppress(OSError):
            text = f"{text}. Stacks of all ranks: {self._stacks(text)}"
        verdict.leave("hung", text)
        os._exit(code)

    def _stacks(self, text: str) -> Path:
        """Writes the stacks of all ranks on this machine. Of those that do not answer, what they posted last."""
        posts = [seen.post for _, seen in sorted(self._seen.items()) if seen.post]
        here = [post for post in posts if post.host == self.host]
        for post in here:
            with suppress(OSError):
                os.kill(post.pid, post.signal)
        time.sleep(STACKS_S)
        parts = [text]
        for post in posts:
            stack = ""
            with suppress(OSError):
                stack = Path(post.stack).read_text() if post in here else ""
            last = "".join(f"  {place}\n" for place in post.at)
            stack = stack or f"last posted, innermost first:\n{last}"
            parts.append(f"rank {post.rank}, process {post.pid}\n{stack}")
        make_folder(self.traces)
        several = len({post.host for post in posts}) > 1
        name = f"hang-step-{progress.step}" + f"-{self.host.split(' ')[0]}" * several
        path = self.traces / f"{name}.txt"
        write_atomically(path, "\n\n".join(parts) + "\n")
        return path


_TCP_INFO, _SIZE = 11, 192
_TIMES = struct.Struct("168x3Q")  # microseconds: busy_time, rwnd_limited, sndbuf_limited
_ADDRESS = 16  # bytes of a sockaddr_in


class Sending:
    """Seconds that the busiest connection was held up by the network, since the last look."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None) if sys.platform == "linux" else None
        self._info, self._length = ctypes.create_string_buffer(_SIZE), ctypes.c_uint32()
        self._before: dict[int, int] = {}

    def look(self) -> tuple[float, int]:
        """(seconds, IPv4 address of the other end as a number). A receiver that does not read is not the network."""
        if self._libc is None:
            return 0.0, 0
        before, self._before, most, busiest = self._before, {}, 0, -1
        with suppress(OSError):
            for name in os.listdir("/proc/self/fd"):
                file = int(name)
                self._length.value = _SIZE
                given = self._info, ctypes.byref(self._length)
                failed = self._libc.getsockopt(file, socket.IPPROTO_TCP, _TCP_INFO, *given)
                if failed or self._length.value < _SIZE:
                    continue
                busy, unread, unsent = _TIMES.unpack(self._info.raw)
                self._before[file] = busy - unread - unsent
                if (since := self._before[file] - before.get(file, self._before[file])) > most:
                    most, busiest = since, file
        self._length.value = _ADDRESS
        if not most or self._libc.getpeername(busiest, self._info, ctypes.byref(self._length)):
            return 1e-6 * most, 0
        family, _, address = struct.unpack("=HHI", self._info.raw[:8])
        return 1e-6 * most, socket.ntohl(address) if family == socket.AF_INET else 0
