"""Tokens that a process beside the training is still writing (`data.stream`), and how they are read.

One process per machine tokenizes (`StreamWriter`). It appends to shards in a folder of the cache, and says in its
journal which tokens are there. A reader posts which ones it needs (`files.Post`), waits until they are there, and
starts that process if there is none. With a bound, the process removes shards that every reader has behind it, and
waits when there are none. For a reader that needs tokens which are gone, it starts again at the last noted border
before them. Tokens depend on the source and the settings alone, so all ranks read the same ones, whenever they ask, on
whatever machine.

Item u of a stream stands in window u // W, and the items of a window come in the order of a keyed permutation. So an
item is known once its window is there. The last window may be shorter. Then the next epoch begins.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import numpy as np

from fivefold import files
from fivefold.data import tokens
from fivefold.data.build import Chunk, Summary, Work, require_few_bad, save_tokenizer, skipped, tokenized
from fivefold.data.kinds.kind import TRAIN, VAL
from fivefold.data.sources import find
from fivefold.errors import UserError
from fivefold.host import cores
from fivefold.recipe import DataSection, Recipe

ERROR, BUILDER, COMMITS = "error.txt", "builder.lock", "commits.jsonl"
ENDLESS = 1 << 62
"""Length of a stream whose end is not known yet."""
COMMAND = [sys.executable, "-P", "-c", "from fivefold.data.stream import main; main()"]
LEAST_VAL = 1 << 16  # tokens kept for validation; no fewer, so that few settings make another stream
LEAST_SHARD, MOST_SHARD = 1 << 10, 1 << 22  # tokens
POLL_S = 0.02
TOLD_S, AGAIN_S = 1.0, 60.0  # a wait that is longer is said, but not more often
LOOK_S = 1.0  # between looks whether the tokenizing process lives
NICE = 10  # training goes first
PUBLISH_S = 0.25
LOCK_S = 3.0  # a reader that looks holds the lock for a moment
UNREAD_S = 600.0  # a process that nobody reads from ends
QUIET = 0.1  # seconds between looks at the posts

Shuffled = Callable[[np.ndarray, int, int, int], np.ndarray]
"""The items at some positions of a window, of which it has so many; (positions, items, epoch, window)."""


def commits(folder: Path) -> list[tokens.Commit]:
    """The borders that were noted, in the order of notes."""
    borders, path = [], folder / COMMITS
    for line in path.read_bytes().splitlines() if path.exists() else ():
        with suppress(*files.BROKEN):  # cut off
            borders.append(tokens.Commit.of(files.parse_json(line)))
    return borders


def last_border(folder: Path, token: int, shard: int) -> tokens.Commit:
    """The last noted border before the shard of a token."""
    return max((c for c in commits(folder) if c.train <= token // shard * shard), default=tokens.Commit())


class Stream:
    """The training tokens of a stream, which are read in sequences of `seq_len` tokens and `overlap` of the next one.

    window: tokens. setup: a line for `main`.
    """

    def __init__(self, folder: Path, window: int, seq_len: int, overlap: int, setup: dict[str, Any]):
        self.folder, self.setup = folder, setup
        self.window, self.seq_len, self.overlap = window, seq_len, overlap
        self.flags = None  # of conversations: see `Tokens`
        self.waiting: Callable[[str], object] | None = None
        self.given_up = False  # nobody wants what a reader still waits for
        self._told = -AGAIN_S
        self._owner = 0  # process that posts
        self._items = max(1, window // seq_len)  # of a window
        self._span = self._items * seq_len  # its tokens

    def __reduce__(self) -> tuple[Any, ...]:
        return Stream, (self.folder, self.window, self.seq_len, self.overlap, self.setup)

    def __len__(self) -> int:
        """The number of tokens; ENDLESS while it is not known."""
        total = self._journal().total
        return ENDLESS if total is None else total

    def numbers(self, uses_R: np.ndarray, shuffled: Shuffled) -> np.ndarray:
        """The items that uses 0, 1, 2, ... take."""
        with _reading:
            numbers_R, done = np.empty_like(uses_R), np.zeros(len(uses_R), bool)
            while not done.all():  # window by window
                use = int(uses_R[~done].min())
                total = self._journal().total
                if total is None:
                    low = use // self._items * self._span
                    total = self._await(low, low + self._span + self.overlap).total
                count = ENDLESS if total is None else max(0, total - self.overlap) // self.seq_len
                if not count:
                    raise UserError(
                        f"data.source: {self.setup['source']} has {total:,} training tokens, fewer than one sequence "
                        f"of model.seq_len = {self.seq_len}"
                    )
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

    def begin_at(self, border: tokens.Commit) -> None:
        """Notes where a checkpoint wants to have tokens from."""
        if border not in commits(self.folder):
            with closing(files.Lines(self.folder / COMMITS)) as lines:
                lines.write(json.dumps(border))

    def state(self, use: int) -> tokens.Commit:
        """Where tokenizing has to begin for this and all later uses, if nothing is cached."""
        return last_border(self.folder, self._low(use), self._journal().shard)

    def whole(self, tell: tokens.Tell) -> tuple[tokens.Tokens, dict[str, int]]:
        """Waits until everything is tokenized. Returns all tokens, and how many each split has."""
        now = self.wait(lambda now: now.total is not None, "tokenizing", tell)
        assert now.total is not None
        shards = tokens.growing_shards(self.folder, "train", now, now.total, now.shard)
        return tokens.Tokens(shards), {"train": now.total, "val": now.val}

    def stop(self) -> None:
        """Ends the tokenizing process, if this process has started it."""
        builder = _started.pop(self.folder, None)
        if builder is not None:
            builder.terminate()
            builder.wait()

    def wait(self, ready: Callable[[tokens.Journal], bool], stage: str, tell: tokens.Tell) -> tokens.Journal:
        """Waits, while a process tokenizes, until what there is is enough."""
        while True:
            self._keep_alive()
            now = tokens.read_journal(self.folder)
            if now is not None and ready(now):
                return now
            tell(stage, 0 if now is None else now.read, None)
            time.sleep(2 * POLL_S)

    def _low(self, use: int) -> int:
        """The first token of a use's window."""
        total = self._journal().total
        position = use if total is None else use % max(1, (total - self.overlap) // self.seq_len)
        return position // self._items * self._span

    def _rows(self, starts: np.ndarray, length: int, low: int, need: int) -> np.ndarray:
        """Tokens at each of `starts`, (R, length), which lie in low .. need."""
        out_RT = np.empty((len(starts), length), np.int64)
        while True:
            now = self._await(low, need)
            try:
                for row, start in zip(out_RT, starts.tolist(), strict=True):
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
                self._post(low, need, active=False)
                return out_RT
            except FileNotFoundError:  # it has made room for another reader
                time.sleep(POLL_S)

    def _journal(self) -> tokens.Journal:
        """What is there now. The end does not change once it is known."""
        now = tokens.read_journal(self.folder)
        if now is None:
            raise UserError(f"{self.folder} has been removed while it was read")
        return now

    def _post(self, low: int, need: int, active: bool) -> None:
        """Says what this reader needs, and that it waits for it or reads it (active)."""
        if self._owner != os.getpid():  # a process of its own, perhaps forked
            self._owner = os.getpid()
            self._posted = files.Post(self.folder / f"reading-{files.own_word()}")
        self._posted.write({"low": low, "need": need, "active": active})

    def _await(self, low: int, need: int) -> tokens.Journal:
        """Waits until tokens low .. need are there, as far as there are so many."""
        began = looked = time.monotonic()
        self._post(low, need, active=True)
        while not (now := self._journal()).has(low, need):
            if self.given_up:
                raise UserError("data.stream: the run ends while it waits for tokenized text")
            at = time.monotonic()
            if at - looked >= LOOK_S:
                looked = at
                self._keep_alive()
            if at - began >= TOLD_S and at >= self._told + AGAIN_S and self.waiting is not None:
                self._told = at
                self.waiting(
                    f"waiting for tokenized text: tokens up to {need:,} are needed, {now.count:,} are there"
                )
            time.sleep(POLL_S)
        return now

    def _keep_alive(self) -> None:
        """Starts the process that tokenizes into the folder, unless there is one. It ends with this process. Raises
        UserError: that with which it has ended."""
        folder = self.folder
        with suppress(OSError):  # another rank may have removed it
            raise UserError((folder / ERROR).read_text("utf-8"))
        with _starting:
            lock = files.held(folder / BUILDER)
            if lock is None:
                return
            lock.close()
            if (last := _started.get(folder)) is not None and last.poll() is None:
                return  # it has not locked yet
            root = str(Path(__file__).parents[2])  # it must find the same package, installed or not
            paths = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
            environment = os.environ | {"PYTHONPATH": paths}
            process = subprocess.Popen(
                COMMAND, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, env=environment
            )
            assert process.stdin is not None
            process.stdin.write(json.dumps(self.setup).encode() + b"\n")
            process.stdin.flush()  # it stays open: its end tells the process to end
            _started[folder] = process


_reading = threading.Lock()
"""A run reads ahead in a thread, and validates in another."""
_started: dict[Path, subprocess.Popen[bytes]] = {}
_starting = threading.Lock()


def open_stream(
    recipe: Recipe, mask: bool, whole: Path, tell: tokens.Tell
) -> tuple[Stream, tokens.Tokens | None, dict[str, Any]]:
    """A stream and its validation tokens, as soon as these are there and training has a beginning; and what is known of
    it. whole: where they were if they were tokenized before."""
    data, seq_len, overlap = recipe.data, recipe.model.seq_len, int(not mask)
    wanted = recipe.train.val_sequences * seq_len + overlap if data.val_fraction else 0
    most_val = max(LEAST_VAL, 1 << (wanted - 1).bit_length()) if wanted else 0
    shard = max(LEAST_SHARD, min(MOST_SHARD, data.stream_window))
    name, host = _hash(whole.name, shard, most_val), socket.gethostname()
    folder = whole.with_name(f"{name}.stream")
    files.make_folder(folder)
    lock = files.held(folder / BUILDER)
    if lock is None and (folder / BUILDER).read_text("utf-8") not in ("", host):
        # Another machine with the same disk tokenizes already.
        folder = whole.with_name(f"{name}.stream-{host}")
        files.make_folder(folder)
        lock = files.held(folder / BUILDER)
    if lock is not None:  # else another run's process may have just written it
        with lock:
            files.remove(folder / ERROR)  # of an earlier run
    setup = {"source": data.source, "mask": mask, "val": most_val, "shard": shard, "folder": str(folder)}
    stream = Stream(folder, data.stream_window, seq_len, overlap, setup | {"data": data.model_dump_json()})
    cached = tokens.read_journal(folder) is not None

    def enough(now: tokens.Journal) -> bool:
        window = max(data.stream_window, seq_len) + 1
        # Two windows: while one rank waits for the next, others still read this one.
        least = (2 * window + 2 * now.shard + most_val) * now.item / 2**30
        if 0 < data.stream_gib < least:
            raise UserError(
                f"data.stream_gib = {data.stream_gib} is too small for data.stream_window = {data.stream_window}. "
                f"Nearest valid: stream_gib = {least * 1.001:.4g}"
            )
        return (now.full or now.val >= wanted) and now.has(now.first, now.first + seq_len + 1)

    now = stream.wait(enough, "tokenizing until training can start", tell)
    if wanted and now.val <= overlap:
        raise UserError(
            f"data.source: no document of {data.source} was held out by data.val_fraction = {data.val_fraction}, which "
            "data.stream chooses by their hashes. Increase it, or set it to 0"
        )
    val = tokens.growing_shards(folder, "val", now, min(wanted, now.val), tokens.SHARD_TOKENS)
    info = {
        "source": data.source,
        "fingerprint": _hash(whole.name, data.stream_window),
        "folder": str(folder),
        "cached": cached,
        "tokens": {"train": now.count - now.first, "val": now.val},
    }
    return stream, tokens.Tokens(val) if wanted else None, info


def _hash(*parts: object) -> str:
    return hashlib.sha256(" ".join(map(str, parts)).encode()).hexdigest()[:32]


def main() -> None:
    """Entry point of the process that tokenizes: a line of JSON on stdin. It ends with stdin, which is its parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the trainer's, which then ends this
    line = json.loads(sys.stdin.buffer.readline())

    def leave_with_stdin() -> None:
        while os.read(sys.stdin.fileno(), 1):
            pass
        os._exit(0)

    threading.Thread(target=leave_with_stdin, daemon=True).start()
    folder, until = Path(line["folder"]), time.monotonic() + LOCK_S
    while (lock := files.held(folder / BUILDER)) is None:
        if time.monotonic() > until:
            return
        time.sleep(POLL_S)
    lock.write(socket.gethostname().encode())
    with suppress(OSError):
        os.nice(NICE)
    try:
        data = DataSection.model_validate_json(line["data"])
        StreamWriter(folder, data, line["mask"], line["val"], line["shard"]).run()
    except Exception as error:
        if isinstance(error, UserError):
            return files.write_atomically(folder / ERROR, str(error))
        what = f"{type(error).__name__}: {error}"
        files.write_atomically(folder / ERROR, f"the process that tokenizes into {folder} failed: {what}")
        raise


class _StartAgain(Exception):
    """Tokens from this one on are needed, and the next ones would be others."""


class StreamWriter:
    """The folder of a stream while it grows. most_val: tokens that validation keeps. shard: tokens of a shard."""

    def __init__(self, folder: Path, data: DataSection, mask: bool, most_val: int, shard: int):
        self.folder, self.data, self.most_val, self.shard = folder, data, most_val, shard
        self.most_bytes = int(data.stream_gib * 2**30)
        work = Work.of(find(data.source), data)
        if not tokens.has_tokenizer(folder):
            save_tokenizer(data, mask, work, folder, cores(), lambda *_: None)
        self.work = work.with_tokenizer(folder)
        self.now = tokens.continued(folder) or tokens.Journal(self.work.dtype, shard, full=not most_val)
        self._looked = self._published = 0.0
        self._posts: list[dict[str, Any]] = []
        self._read = time.monotonic()  # when somebody last was there to read

    def run(self) -> None:
        """Tokenizes from where the folder ends, again where a reader waits for what is gone, and stays while somebody
        reads."""
        while True:
            now = self.now
            self.writers = [
                tokens.ShardWriter(self.folder, "train", now.dtype, self.shard, now.count),
                tokens.ShardWriter(self.folder, "val", now.dtype, count=now.val),
            ]
            try:
                if now.total is None or now.count < now.total:
                    self._tokenize()
                while self.now.first and time.monotonic() - self._read <= UNREAD_S:
                    time.sleep(QUIET)
                    self._look()
                return
            except _StartAgain as again:
                (low,) = again.args
            finally:
                for writer in self.writers:
                    writer.close()
            first = low // self.shard * self.shard
            self._publish(first=first, count=first, at=last_border(self.folder, low, self.shard))
            for path in [*self.folder.glob("train-*.bin"), *self.folder.glob("train-*.digests")]:
                files.remove(path)

    def _tokenize(self) -> None:
        """To the end of the source. The first border in each shard is noted."""
        most_bad = self.data.max_bad_fraction
        with closing(files.Lines(self.folder / COMMITS)) as lines:
            noted = set(commits(self.folder))
            for read in tokenized(self.work, self.now, self._append, most_bad, cores()):
                if read.at.train // self.shard > self.now.at.train // self.shard and read.at not in noted:
                    lines.write(json.dumps(read.at))
                full = self.now.full or self.writers[VAL].count >= self.most_val
                self.now = self.now._replace(at=read.at, full=full, summary=read.summary)
                self._look()
                if time.monotonic() - self._published >= PUBLISH_S:
                    self._publish()
        self._publish(total=self.now.at.train, full=True)
        require_few_bad(skipped(Summary.of(self.now.summary), self.work.split.files), most_bad)

    def _append(self, chunk: Chunk, before: int) -> None:
        """Writes what is not there yet. before: tokens of the split before the chunk."""
        writer = self.writers[chunk.split]
        ids = chunk.ids[max(0, writer.count - before) :]
        if chunk.split == VAL:
            writer.write(ids[: max(0, self.most_val - writer.count)])
            return
        for start in range(0, len(ids), self.shard):
            part = ids[start : start + self.shard]
            self._make_room(len(part) * self.now.item)
            writer.write(part)

    def _publish(self, **news: Any) -> None:
        """Tells readers what there is, with these news."""
        for writer in self.writers:
            writer.flush()
        train, val = (writer.count for writer in self.writers)
        self.now = self.now._replace(**{"count": train, "val": val, **news})
        self.now.write(self.folder)
        self._published = time.monotonic()

    def _look(self) -> None:
        """Reads what readers need, now and then. Raises _StartAgain: a reader waits for tokens that are not to come."""
        if time.monotonic() - self._looked < QUIET:
            return
        self._looked, self._posts = time.monotonic(), files.posts(self.folder, "reading-*")
        if self._posts:
            self._read = time.monotonic()
        lows = [post["low"] for post in self._waiting()]
        if not lows or len(lows) < sum(post["active"] for post in self._posts):  # who reads now comes first
            return
        gone = max(lows) < self.now.first
        # Further ahead it goes on only if a border there is known and validation is complete.
        jumps = min(lows) >= self.now.first and (self.now.full or not self.data.val_fraction)
        there = max(self.writers[TRAIN].count, self.now.at.train)
        if gone or (jumps and last_border(self.folder, min(lows), self.shard).train > there):
            raise _StartAgain(min(lows))

    def _waiting(self) -> list[dict[str, Any]]:
        """The readers whose tokens are not there."""
        return [
            post for post in self._posts if post["active"] and not self.now.has(post["low"], post["need"])
        ]

    def _make_room(self, size: int) -> None:
        """Waits until there is room for so many bytes, and removes shards that all readers have behind them."""
        while self.most_bytes:
            train, val = (writer.count for writer in self.writers)
            lacking = (train - self.now.first + val) * self.now.item + size - self.most_bytes
            if lacking <= 0:
                return
            self._looked = 0.0
            self._look()
            # What has to stay: what those wait for and read now who are active, or else what all readers have to read.
            readers = [post for post in self._posts if post["active"]] if self._waiting() else self._posts
            floor = min((post["low"] for post in readers), default=0)
            if not self.now.full:  # training cannot begin before validation is there; then this starts again
                floor = train
            first = self.now.first // self.shard
            behind = min(floor, train) // self.shard
            shards = range(first, min(behind, first - (-lacking // (self.shard * self.now.item))))
            self._publish(first=max(first, shards.stop) * self.shard)  # readers learn it before
            for index in shards:
                for path in self.folder.glob(f"train-{index:05d}.*"):
                    files.remove(path)
            if not shards:
                if time.monotonic() - self._read > UNREAD_S:
                    raise SystemExit
                time.sleep(POLL_S)
