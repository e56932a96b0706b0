"""Tokens that a process beside the training is still writing (`data.stream`), and how they are read.

One process per machine tokenizes (`stream_writer.py`). It appends to shards in a folder of the cache, and says in
`progress.json` which tokens are there. A reader posts which ones it needs, waits until they are there, and starts that
process if there is none. Tokens depend on the source and the settings alone, so all ranks read the same ones, whenever
they ask, on whatever machine.

Item u of a stream stands in window u // W, and the items of a window come in the order of a keyed permutation. So an
item is known once its window is there. The last window may be shorter. Then the next epoch begins.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fivefold.data.kinds.kind import Shard
from fivefold.data.tokens import Tokens
from fivefold.errors import UserError
from fivefold.files import BROKEN, Post, held, own_word, parse_json, remove

PROGRESS, ERROR, BUILDER, COMMITS = "progress.json", "error.txt", "builder.lock", "commits.jsonl"
ENDLESS = 1 << 62
"""Length of a stream whose end is not known yet."""
COMMAND = [sys.executable, "-P", "-c", "from fivefold.data.stream_writer import main; main()"]
POLL_S = 0.02
TOLD_S, AGAIN_S = 1.0, 60.0  # a wait that is longer is said, but not more often
LOOK_S = 1.0  # between looks whether the tokenizing process lives


Shuffled = Callable[[np.ndarray, int, int, int], np.ndarray]
"""The items at some positions of a window, of which it has so many; (positions, items, epoch, window)."""


class Commit(NamedTuple):
    """A border between tasks. train, val: tokens before it. place: where the next task begins."""

    train: int = 0
    val: int = 0
    place: tuple[int, ...] = ()

    @classmethod
    def of(cls, found: Any) -> Commit:
        """Raises one of `files.BROKEN` if it is none."""
        train, val, place = found
        if not all(type(n) is int and n >= 0 for n in (train, val, *place)):
            raise ValueError("not whole numbers")
        return cls(train, val, tuple(place))


class Progress(NamedTuple):
    """What the folder of a stream holds: training tokens first .. count, and the first `val` tokens of validation.

    total: number of training tokens, once the end was seen. full: validation gets no more. at: the border behind the
    last whole task; tokens between it and `count` are there, too.
    """

    dtype: str
    shard: int
    first: int = 0
    count: int = 0
    val: int = 0
    full: bool = False
    total: int | None = None
    at: Commit = Commit()
    summary: dict[str, Any] | None = None

    @property
    def item(self) -> int:
        return np.dtype(self.dtype).itemsize

    @property
    def read(self) -> int:
        """Bytes of text that are tokenized."""
        return sum(self.summary["bytes"]) if self.summary else 0

    def has(self, low: int, need: int) -> bool:
        """Are tokens low .. need there, as far as there are so many?"""
        return self.first <= low and self.count >= (need if self.total is None else min(need, self.total))


def read_progress(folder: Path) -> Progress | None:
    """None: there is nothing yet."""
    try:
        found = Progress(**parse_json((folder / PROGRESS).read_bytes()))
        return found._replace(at=Commit.of(found.at))
    except (OSError, *BROKEN):
        return None


def commits(folder: Path) -> list[Commit]:
    """The borders that were noted, in the order of notes."""
    found = []
    try:
        lines = (folder / COMMITS).read_bytes().split(b"\n")
    except OSError:
        return []
    for line in lines:
        try:
            found.append(Commit.of(parse_json(line)))
        except BROKEN:  # cut off
            continue
    return found


class Stream:
    """The training tokens of a stream. setup: a line for `stream_writer.main`. window: tokens."""

    def __init__(self, folder: Path, window: int, setup: dict[str, Any]):
        self.folder, self.window, self.setup = folder, window, setup
        self.flags = None  # of conversations: see `Tokens`
        self.hint: Commit | None = None
        self.waiting: Callable[[str], object] | None = None
        self.given_up = False  # nobody wants what a reader still waits for
        self._told = -AGAIN_S
        self._owner = 0  # process that posts
        self._span = max(1, window)  # tokens that a reader keeps: a window of whole items

    def __getstate__(self) -> dict[str, Any]:
        return {"folder": self.folder, "window": self.window, "setup": self.setup, "hint": self.hint}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["folder"], state["window"], state["setup"])
        self.hint = state["hint"]

    def __len__(self) -> int:
        """The number of tokens; ENDLESS while it is not known."""
        total = self._progress().total
        return ENDLESS if total is None else total

    def numbers(self, uses_R: np.ndarray, seq_len: int, overlap: int, shuffled: Shuffled) -> np.ndarray:
        """The items that uses 0, 1, 2, ... take, each `seq_len` tokens and `overlap` of the next one."""
        with _reading:
            W = self._items_of_window(seq_len)
            self._span = W * seq_len
            found_R, done = np.empty_like(uses_R), np.zeros(len(uses_R), bool)
            while not done.all():  # window by window
                use = int(uses_R[~done].min())
                count = self._count(seq_len, overlap, use)
                epoch, position = divmod(use, count) if count else (0, use)
                window = position // W
                size = min(W, count - window * W) if count else W
                begin = use - position + window * W
                here = ~done & (uses_R < begin + size)
                found_R[here] = window * W + shuffled(uses_R[here] - begin, size, epoch, window)
                done |= here
            return found_R

    def rows(self, starts: np.ndarray, length: int) -> np.ndarray:
        """tokens[s : s + length] for each s of starts (R,), as int64 of shape (R, length)."""
        out_RT = np.empty((len(starts), length), np.int64)
        with _reading:
            windows_R = starts // self._span
            for window in np.unique(windows_R).tolist():
                here = windows_R == window
                need = max((window + 1) * self._span, int(starts[here].max()) + length)
                out_RT[here] = self._rows(starts[here], length, window * self._span, need)
        return out_RT

    def state(self, use: int, seq_len: int, overlap: int) -> Commit:
        """Where tokenizing has to begin for this and all later uses, if nothing is cached."""
        low = self._low(use, seq_len, overlap)
        border = low // self._progress().shard * self._progress().shard
        return max((c for c in commits(self.folder) if c.train <= border), default=Commit())

    def whole(self, tell: Callable[[str, int, int | None], None]) -> tuple[Tokens, dict[str, int]]:
        """Waits until everything is tokenized. Returns all tokens, and how many each split has."""
        while (now := self._progress()).total is None:
            tell("tokenizing", now.read, None)
            self._look()
            time.sleep(10 * POLL_S)
        shards = [
            Shard(self.folder / f"train-{i:05d}.bin", now.dtype, 0, min(now.shard, now.total - start))
            for i, start in enumerate(range(0, now.total, now.shard))
        ]
        return Tokens(shards), {"train": now.total, "val": now.val}

    def stop(self) -> None:
        """Ends the tokenizing process, if this process has started it."""
        builder = _started.pop(self.folder, None)
        if builder is not None:
            builder.terminate()
            builder.wait()

    def _items_of_window(self, seq_len: int) -> int:
        return max(1, self.window // seq_len)

    def _low(self, use: int, seq_len: int, overlap: int) -> int:
        """The first token of a use's window."""
        W, total = self._items_of_window(seq_len), self._progress().total
        position = use if total is None else use % max(1, _items(total, seq_len, overlap))
        return position // W * W * seq_len

    def _count(self, seq_len: int, overlap: int, use: int) -> int | None:
        """The number of items of an epoch; None: its end is not known, and the window of this use is there."""
        now, W = self._progress(), self._items_of_window(seq_len)
        if now.total is None:
            window = use // W
            now = self._await(window * W * seq_len, (window + 1) * W * seq_len + overlap)
        if now.total is None:
            return None
        count = _items(now.total, seq_len, overlap)
        if count < 1:
            raise UserError(
                f"data.source: {self.setup['source']} has {now.total:,} training tokens, fewer than one sequence of "
                f"model.seq_len = {seq_len}"
            )
        return count

    def _rows(self, starts: np.ndarray, length: int, low: int, need: int) -> np.ndarray:
        """Tokens at each of `starts`, (R, length), which lie in low .. need."""
        while True:
            now = self._await(low, need)
            try:
                out = np.empty((len(starts), length), np.int64)
                for row, start in zip(out, starts.tolist(), strict=True):
                    self._read(row, start, now)
                self._post(low, need, active=False)
                return out
            except FileNotFoundError:  # it has made room for another reader
                time.sleep(POLL_S)

    def _read(self, row: np.ndarray, start: int, now: Progress) -> None:
        at = 0
        while at < len(row):
            index, within = divmod(start + at, now.shard)
            count = min(len(row) - at, now.shard - within)
            path = self.folder / f"train-{index:05d}.bin"
            ids = np.fromfile(path, now.dtype, count, offset=within * now.item)
            if len(ids) < count:
                raise FileNotFoundError
            row[at : at + count] = ids
            at += count

    def _progress(self) -> Progress:
        """What is there now. The end does not change once it is known."""
        now = read_progress(self.folder)
        if now is None:
            raise UserError(f"{self.folder} has been removed while it was read")
        return now

    def _post(self, low: int, need: int, active: bool) -> None:
        """Says what this reader needs, and that it waits for it or reads it (active)."""
        if self._owner != os.getpid():  # a process of its own, perhaps forked
            self._owner = os.getpid()
            self._posted = Post(self.folder / f"reading-{own_word()}")
        self._posted.write({"low": low, "need": need, "active": active, "hint": self.hint})

    def _await(self, low: int, need: int) -> Progress:
        """Waits until tokens low .. need are there, as far as there are so many."""
        began, looked = time.monotonic(), 0.0
        self._post(low, need, active=True)
        while not (now := self._progress()).has(low, need):
            if self.given_up:
                raise UserError("data.stream: the run ends while it waits for tokenized text")
            waited = time.monotonic() - began
            if waited - looked >= LOOK_S:
                looked = waited
                self._look()
            if waited >= TOLD_S and began + waited >= self._told + AGAIN_S and self.waiting is not None:
                self._told = began + waited
                self.waiting(
                    f"waiting for tokenized text: tokens up to {need:,} are needed, {now.count:,} are there"
                )
            time.sleep(POLL_S)
        return now

    def _look(self) -> None:
        """Starts the tokenizing process if there is none. Raises the error with which it has ended."""
        if (text := error_of(self.folder)) is not None:
            raise UserError(text)
        start(self.folder, self.setup)


def _items(tokens: int, seq_len: int, overlap: int) -> int:
    """Sequences in so many tokens, which share `overlap` with the next one."""
    return max(0, tokens - overlap) // seq_len


_reading = threading.Lock()
"""A run reads ahead in a thread, and validates in another."""
_started: dict[Path, subprocess.Popen[bytes]] = {}
_starting = threading.Lock()


def error_of(folder: Path) -> str | None:
    try:
        return (folder / ERROR).read_text("utf-8")
    except OSError:
        return None


def start(folder: Path, setup: dict[str, Any], *, anew: bool = False) -> None:
    """Starts the process that tokenizes into a folder, unless there is one. It ends with this process. anew: the error
    of an earlier one is forgotten."""
    with _starting:
        lock = held(folder / BUILDER)
        if lock is None:
            return
        if anew:
            remove(folder / ERROR)
        lock.close()
        if (last := _started.get(folder)) is not None and last.poll() is None:
            return  # it has not locked yet
        root = str(Path(__file__).parents[2])  # it must find the same package, installed or not
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        }
        process = subprocess.Popen(COMMAND, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, env=environment)
        assert process.stdin is not None
        process.stdin.write(json.dumps(setup | {"folder": str(folder)}).encode() + b"\n")
        process.stdin.flush()  # it stays open: its end tells the process to end
        _started[folder] = process
