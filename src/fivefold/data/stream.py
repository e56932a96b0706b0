"""Tokens that a process beside the training is still writing (`data.stream`), and how they are read.

One process per machine tokenizes (`stream_writer.py`). It appends to shards in a folder of the cache, and says in
`progress.json` which tokens are there. A reader posts which ones it needs, waits until they are there, and starts that
process if there is none. Tokens depend on the source and the settings alone, so all ranks read the same ones, whenever
they ask, on whatever machine.

Item u of a stream stands in window u // W, and the items of a window come in the order of a keyed permutation. So an
item is known once its window is there. The last window may be shorter. Then the next epoch begins.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fivefold.data.kinds.kind import Shard
from fivefold.data.tokens import Tell, Tokens
from fivefold.errors import UserError
from fivefold.files import BROKEN, Post, held, make_folder, own_word, parse_json, remove
from fivefold.recipe import Recipe

PROGRESS, ERROR, BUILDER, COMMITS = "progress.json", "error.txt", "builder.lock", "commits.jsonl"
ENDLESS = 1 << 62
"""Length of a stream whose end is not known yet."""
COMMAND = [sys.executable, "-P", "-c", "from fivefold.data.stream_writer import main; main()"]
LEAST_VAL = 1 << 16  # tokens kept for validation; no fewer, so that few settings make another stream
LEAST_SHARD, MOST_SHARD = 1 << 10, 1 << 22  # tokens
POLL_S = 0.02
TOLD_S, AGAIN_S = 1.0, 60.0  # a wait that is longer is said, but not more often
LOOK_S = 1.0  # between looks whether the tokenizing process lives

Shuffled = Callable[[np.ndarray, int, int, int], np.ndarray]
"""The items at some positions of a window, of which it has so many; (positions, items, epoch, window)."""


class Commit(NamedTuple):
    """A border between groups of documents. train, val: tokens before it. place: where the next group begins."""

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
    last whole group; tokens between it and `count` are there, too.
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
        progress = Progress(**parse_json((folder / PROGRESS).read_bytes()))
        return progress._replace(at=Commit.of(progress.at))
    except (OSError, *BROKEN):
        return None


def commits(folder: Path) -> list[Commit]:
    """The borders that were noted, in the order of notes."""
    borders, lines = [], list[bytes]()
    with suppress(OSError):  # there are none yet
        lines = (folder / COMMITS).read_bytes().splitlines()
    for line in lines:
        try:
            borders.append(Commit.of(parse_json(line)))
        except BROKEN:  # cut off
            continue
    return borders


class Stream:
    """The training tokens of a stream, which are read in sequences of `seq_len` tokens and `overlap` of the next one.

    window: tokens. setup: a line for `stream_writer.main`. hint: where a checkpoint wants to have them from.
    """

    def __init__(
        self,
        folder: Path,
        window: int,
        seq_len: int,
        overlap: int,
        setup: dict[str, Any],
        hint: Commit | None = None,
    ):
        self.folder, self.setup, self.hint = folder, setup, hint
        self.window, self.seq_len, self.overlap = window, seq_len, overlap
        self.flags = None  # of conversations: see `Tokens`
        self.waiting: Callable[[str], object] | None = None
        self.given_up = False  # nobody wants what a reader still waits for
        self._told = -AGAIN_S
        self._owner = 0  # process that posts
        self._items = max(1, window // seq_len)  # of a window
        self._span = self._items * seq_len  # its tokens

    def __reduce__(self) -> tuple[Any, ...]:
        return Stream, (self.folder, self.window, self.seq_len, self.overlap, self.setup, self.hint)

    def __len__(self) -> int:
        """The number of tokens; ENDLESS while it is not known."""
        total = self._progress().total
        return ENDLESS if total is None else total

    def numbers(self, uses_R: np.ndarray, shuffled: Shuffled) -> np.ndarray:
        """The items that uses 0, 1, 2, ... take."""
        with _reading:
            numbers_R, done = np.empty_like(uses_R), np.zeros(len(uses_R), bool)
            while not done.all():  # window by window
                use = int(uses_R[~done].min())
                count = self._count(use)
                epoch, position = divmod(use, count)
                window = position // self._items
                first = window * self._items
                size = min(self._items, count - first)
                begin = use - position + first
                here = ~done & (uses_R < begin + size)
                numbers_R[here] = first + shuffled(uses_R[here] - begin, size, epoch, window)
                done |= here
            return numbers_R

    def rows(self, starts: np.ndarray, length: int) -> np.ndarray:
        """tokens[s : s + length] for each s of starts (R,), as int64 of shape (R, length)."""
        out_RT = np.empty((len(starts), length), np.int64)
        with _reading:
            windows_R = starts // self._span
            for window in np.unique(windows_R).tolist():
                here, low = windows_R == window, window * self._span
                need = max(low + self._span, int(starts[here].max()) + length)
                out_RT[here] = self._rows(starts[here], length, low, need)
        return out_RT

    def state(self, use: int) -> Commit:
        """Where tokenizing has to begin for this and all later uses, if nothing is cached."""
        now = self._progress()
        border = self._low(use) // now.shard * now.shard
        return max((c for c in commits(self.folder) if c.train <= border), default=Commit())

    def whole(self, tell: Tell) -> tuple[Tokens, dict[str, int]]:
        """Waits until everything is tokenized. Returns all tokens, and how many each split has."""
        now = _wait(self.folder, self.setup, lambda now: now.total is not None, "tokenizing", tell)
        assert now.total is not None
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

    def _items_in(self, tokens: int) -> int:
        return max(0, tokens - self.overlap) // self.seq_len

    def _low(self, use: int) -> int:
        """The first token of a use's window."""
        total = self._progress().total
        position = use if total is None else use % max(1, self._items_in(total))
        return position // self._items * self._span

    def _count(self, use: int) -> int:
        """The number of items of an epoch; ENDLESS: its end is not known, and the window of this use is there."""
        total = self._progress().total
        if total is None:
            low = use // self._items * self._span
            total = self._await(low, low + self._span + self.overlap).total
        if total is None:
            return ENDLESS
        if not (count := self._items_in(total)):
            raise UserError(
                f"data.source: {self.setup['source']} has {total:,} training tokens, fewer than one sequence of "
                f"model.seq_len = {self.seq_len}"
            )
        return count

    def _rows(self, starts: np.ndarray, length: int, low: int, need: int) -> np.ndarray:
        """Tokens at each of `starts`, (R, length), which lie in low .. need."""
        out_RT = np.empty((len(starts), length), np.int64)
        while True:
            now = self._await(low, need)
            try:
                for row, start in zip(out_RT, starts.tolist(), strict=True):
                    self._read(row, start, now)
                self._post(low, need, active=False)
                return out_RT
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
        began = looked = time.monotonic()
        self._post(low, need, active=True)
        while not (now := self._progress()).has(low, need):
            if self.given_up:
                raise UserError("data.stream: the run ends while it waits for tokenized text")
            at = time.monotonic()
            if at - looked >= LOOK_S:
                looked = at
                _keep_alive(self.folder, self.setup)
            if at - began >= TOLD_S and at >= self._told + AGAIN_S and self.waiting is not None:
                self._told = at
                self.waiting(
                    f"waiting for tokenized text: tokens up to {need:,} are needed, {now.count:,} are there"
                )
            time.sleep(POLL_S)
        return now


def open_stream(
    recipe: Recipe, mask: bool, root: Path, key: str, tell: Tell
) -> tuple[Stream, Tokens | None, dict[str, Any]]:
    """A stream and its validation tokens, as soon as these are there and training has a beginning; and what is known of
    it. key: a hash of what determines the tokens."""
    data, seq_len, overlap = recipe.data, recipe.model.seq_len, int(not mask)
    wanted = recipe.train.val_sequences * seq_len + overlap if data.val_fraction else 0
    most_val = max(LEAST_VAL, 1 << (wanted - 1).bit_length()) if wanted else 0
    shard = max(LEAST_SHARD, min(MOST_SHARD, data.stream_window))
    folder = _folder_here(root, _hash(key, shard, most_val))
    make_folder(folder)
    if (lock := held(folder / BUILDER)) is not None:  # else another run's process may have just written it
        with lock:
            remove(folder / ERROR)  # of an earlier run
    facts = {"source": data.source, "mask": mask, "val": most_val, "shard": shard}
    setup = facts | {"data": data.model_dump_json(), "folder": str(folder)}
    cached = read_progress(folder) is not None

    def enough(now: Progress) -> bool:
        _require_room(recipe, now, most_val)
        return (now.full or now.val >= wanted) and now.has(now.first, now.first + seq_len + 1)

    now = _wait(folder, setup, enough, "tokenizing until training can start", tell)
    if wanted and now.val <= overlap:
        raise UserError(
            f"data.source: no document of {data.source} was held out by data.val_fraction = {data.val_fraction}, which "
            "data.stream chooses by their hashes. Increase it, or set it to 0"
        )
    val = Tokens([Shard(folder / "val-00000.bin", now.dtype, 0, min(wanted, now.val))]) if wanted else None
    info = {
        "source": data.source,
        "fingerprint": _hash(key, data.stream_window),
        "folder": str(folder),
        "cached": cached,
        "tokens": {"train": now.count - now.first, "val": now.val},
    }
    return Stream(folder, data.stream_window, seq_len, overlap, setup), val, info


def _hash(*parts: object) -> str:
    return hashlib.sha256(" ".join(map(str, parts)).encode()).hexdigest()[:32]


def _folder_here(root: Path, key: str) -> Path:
    """The folder of a stream on this machine: another one where a machine with the same disk tokenizes already."""
    folder, host = root / f"{key}.stream", socket.gethostname()
    try:
        owner = (folder / BUILDER).read_text("utf-8")
    except OSError:
        return folder
    if owner not in ("", host):
        lock = held(folder / BUILDER)
        if lock is None:
            return root / f"{key}.stream-{host}"
        lock.close()
    return folder


def _require_room(recipe: Recipe, now: Progress, most_val: int) -> None:
    data = recipe.data
    window = max(data.stream_window, recipe.model.seq_len) + 1
    # Two windows: while one rank waits for the next, others still read this one.
    least = (2 * window + 2 * now.shard + most_val) * now.item / 2**30
    if 0 < data.stream_gib < least:
        raise UserError(
            f"data.stream_gib = {data.stream_gib} is too small for data.stream_window = {data.stream_window}. Nearest "
            f"valid: stream_gib = {least * 1.001:.4g}"
        )


# The process that tokenizes

_reading = threading.Lock()
"""A run reads ahead in a thread, and validates in another."""
_started: dict[Path, subprocess.Popen[bytes]] = {}
_starting = threading.Lock()


def _wait(
    folder: Path, setup: dict[str, Any], ready: Callable[[Progress], bool], stage: str, tell: Tell
) -> Progress:
    """Waits, while a process tokenizes into a folder, until what it holds is enough."""
    while True:
        _keep_alive(folder, setup)
        now = read_progress(folder)
        if now is not None and ready(now):
            return now
        tell(stage, 0 if now is None else now.read, None)
        time.sleep(2 * POLL_S)


def _keep_alive(folder: Path, setup: dict[str, Any]) -> None:
    """Starts the process that tokenizes into a folder, unless there is one. It ends with this process.

    Raises:
        UserError: that with which it has ended.
    """
    with suppress(OSError):  # another rank may have removed it
        raise UserError((folder / ERROR).read_text("utf-8"))
    with _starting:
        lock = held(folder / BUILDER)
        if lock is None:
            return
        lock.close()
        if (last := _started.get(folder)) is not None and last.poll() is None:
            return  # it has not locked yet
        root = str(Path(__file__).parents[2])  # it must find the same package, installed or not
        paths = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        environment = os.environ | {"PYTHONPATH": paths}
        process = subprocess.Popen(COMMAND, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, env=environment)
        assert process.stdin is not None
        process.stdin.write(json.dumps(setup).encode() + b"\n")
        process.stdin.flush()  # it stays open: its end tells the process to end
        _started[folder] = process
