"""The process that tokenizes a stream beside the training: appends to its folder, makes room in it, starts again in it.

It serves readers by what they post (`files.Post`). Its folder holds training tokens first .. count. With a bound, it
removes shards that every reader has behind it, and waits when there are none. For a reader that needs tokens which are
gone, it starts again at the last noted border before them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

from fivefold.data.build import Chunk, Summary, Work, learn, require_few_bad, require_good, run, skipped
from fivefold.data.kinds.kind import TRAIN, VAL
from fivefold.data.sources import find
from fivefold.data.stream import (
    BUILDER,
    COMMITS,
    ERROR,
    POLL_S,
    PROGRESS,
    Commit,
    Progress,
    commits,
    read_progress,
)
from fivefold.data.tokens import NAMES, ShardWriter
from fivefold.errors import UserError
from fivefold.files import BROKEN, Lines, held, posts, remove, write_atomically
from fivefold.host import cores
from fivefold.recipe import DataSection

NICE = 10  # training goes first
PUBLISH_S = 0.25
LOCK_S = 3.0  # a reader that looks holds the lock for a moment
UNREAD_S = 600.0  # a process that nobody reads from ends
QUIET = 0.1  # seconds between looks at the posts


def main() -> None:
    """Entry point: a line of JSON on stdin. The process ends with stdin, which is its parent."""
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C in a terminal is the trainer's, which then ends this
    line = json.loads(sys.stdin.buffer.readline())
    threading.Thread(target=_leave_with_stdin, daemon=True).start()
    folder = Path(line["folder"])
    lock = _locked(folder)
    if lock is None:
        return
    lock.write(socket.gethostname().encode())
    with contextlib.suppress(OSError):
        os.nice(NICE)
    try:
        StreamWriter(folder, DataSection.model_validate_json(line["data"]), line).run()
    except UserError as error:
        write_atomically(folder / ERROR, str(error))
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        write_atomically(folder / ERROR, f"the process that tokenizes into {folder} failed: {what}")
        raise


def _leave_with_stdin() -> None:
    while os.read(sys.stdin.fileno(), 1):
        pass
    os._exit(0)


def _locked(folder: Path) -> Any:
    until = time.monotonic() + LOCK_S
    while (lock := held(folder / BUILDER)) is None and time.monotonic() < until:
        time.sleep(POLL_S)
    return lock


class _StartAgain(Exception):
    """Tokens from `low` on are needed, and the next ones would be others."""

    def __init__(self, low: int):
        self.low = low


class StreamWriter:
    """The folder of a stream while it grows. facts: mask, val (tokens that validation keeps), shard (tokens)."""

    def __init__(self, folder: Path, data: DataSection, facts: dict[str, Any]):
        self.folder, self.data, self.mask = folder, data, bool(facts["mask"])
        self.most_val, self.shard = int(facts["val"]), int(facts["shard"])
        self.most_bytes = int(data.stream_gib * 2**30)
        self.work = Work.of(find(data.source), data)
        self._looked = self._published = 0.0
        self._posts: list[dict[str, Any]] = []
        self._read = time.monotonic()

    def run(self) -> None:
        if not (self.folder / "tokenizer.json").exists():
            tokenizer = learn(self.data, self.mask, [(self.work, 1.0)], cores(), lambda *_: None)
            tokenizer.save(self.folder / "tokenizer.json")
        self.work = self.work.with_tokenizer(self.folder)
        self.now = self._left() or Progress(self.work.dtype, self.shard, full=not self.most_val)
        self.noted = set(commits(self.folder))
        with Lines(self.folder / COMMITS) as self.lines:
            while True:
                try:
                    self._grow()
                    return
                except _StartAgain as wanted:
                    self._start_again(wanted.low)

    def _left(self) -> Progress | None:
        """What the folder holds, without shards that an interruption has left; None: nothing, or not all it says."""
        now = read_progress(self.folder)
        if now is None:
            return None
        wanted = {f"train-{i:05d}" for i in range(now.first // self.shard, -(-now.count // self.shard))}
        wanted |= {"val-00000"} if now.val else set()
        there = {path.stem for path in self.folder.glob("*-*.bin")}
        for name in there - wanted:
            for path in self.folder.glob(f"{name}.*"):
                remove(path)
        return now if wanted <= there else None

    def _grow(self) -> None:
        """Tokenizes from where the folder ends to the end of the source, and stays while somebody reads."""
        now, files = self.now, self.work.split.files
        self.position, self.writers = [now.at.train, now.at.val], []
        for name, count in zip(NAMES, (now.count, now.val), strict=True):
            shard = self.shard if name == "train" else max(1, self.most_val)
            self.writers.append(ShardWriter(self.folder, name, now.dtype, shard, count))
        total = Summary.of(now.summary) if now.summary else Summary()
        try:
            if now.total is None or now.count < now.total:
                for group in run(self.work, now.at.place, cores()):
                    for chunk in group.chunks:
                        self._append(chunk)
                    total.add(group.summary)
                    require_good(files, group.summary.bad, self.data.max_bad_fraction)
                    self._note(Commit(self.position[0], self.position[1], tuple(group.place)), total)
                    self._look()
                    if time.monotonic() - self._published >= PUBLISH_S:
                        self._publish()
                self.now = self.now._replace(total=self.position[TRAIN], full=True)
                self._publish()
                require_few_bad(skipped(total, files), self.data.max_bad_fraction)
            while self.now.first and time.monotonic() - self._read < UNREAD_S:
                time.sleep(QUIET)
                self._look()
        finally:
            for writer in self.writers:
                writer.close()

    def _append(self, chunk: Chunk) -> None:
        """Writes what is not there yet."""
        writer, ids = self.writers[chunk.split], chunk.ids
        known = writer.count - self.position[chunk.split]
        self.position[chunk.split] += len(ids)
        ids = ids[max(0, known) :]
        if chunk.split == VAL:
            ids = ids[: max(0, self.most_val - writer.count)] if not self.now.full else ids[:0]
        for start in range(0, len(ids), self.shard):
            part = ids[start : start + self.shard]
            if chunk.split == TRAIN:
                self._make_room(len(part) * self.now.item)
            writer.write(part)

    def _note(self, at: Commit, total: Summary) -> None:
        """Notes the first border in each shard."""
        if at.train // self.shard > self.now.at.train // self.shard and at not in self.noted:
            self.noted.add(at)
            self.lines.write(json.dumps(at))
        full = self.now.full or self.writers[VAL].count >= self.most_val
        self.now = self.now._replace(at=at, full=full, summary=dataclasses.asdict(total))

    def _publish(self) -> None:
        for writer in self.writers:
            writer.flush()
        self.now = self.now._replace(count=self.writers[TRAIN].count, val=self.writers[VAL].count)
        write_atomically(self.folder / PROGRESS, json.dumps(self.now._asdict()))
        self._published = time.monotonic()

    # Readers

    def _look(self) -> None:
        """Reads what readers need, now and then.

        Raises:
            _StartAgain: a reader waits for tokens that are not to come.
        """
        if time.monotonic() - self._looked < QUIET:
            return
        self._looked, self._posts = time.monotonic(), posts(self.folder, "reading-*")
        if self._posts:
            self._read = time.monotonic()
        for post in self._posts:
            with contextlib.suppress(*BROKEN):
                if post["hint"] and (hint := Commit.of(post["hint"])) not in self.noted:
                    self.noted.add(hint)
                    self.lines.write(json.dumps(hint))
        active = [post for post in self._posts if post["active"]]
        lows = [post["low"] for post in active if not self._has(post)]
        if not lows or len(lows) < len(active):  # who reads now comes first
            return
        gone = max(lows) < self.now.first
        # Further ahead it goes on only if a border there is known and validation is complete.
        jumps = min(lows) >= self.now.first and (self.now.full or not self.data.val_fraction)
        there = max(self.writers[TRAIN].count, self.position[TRAIN])
        if gone or (jumps and self._border(min(lows)).train > there):
            raise _StartAgain(min(lows))

    def _has(self, post: dict[str, Any]) -> bool:
        return self.now.has(post["low"], post["need"])

    def _border(self, low: int) -> Commit:
        """The last noted border before the shard of a token."""
        shard = low // self.shard * self.shard
        return max((c for c in self.noted if c.train <= shard), default=Commit())

    def _start_again(self, low: int) -> None:
        """Removes all training tokens, and continues with those from `low` on."""
        first = low // self.shard * self.shard
        self.now = self.now._replace(
            first=first, count=first, val=self.writers[VAL].count, at=self._border(low)
        )
        write_atomically(self.folder / PROGRESS, json.dumps(self.now._asdict()))
        for path in [*self.folder.glob("train-*.bin"), *self.folder.glob("train-*.digests")]:
            remove(path)

    def _make_room(self, size: int) -> None:
        """Waits until there is room for so many bytes."""
        while self.most_bytes and (lacking := self._bytes() + size - self.most_bytes) > 0:
            self._looked = 0.0
            self._look()
            wanted = -(-lacking // (self.shard * self.now.item))
            behind = (min(self._floor(), self.writers[TRAIN].count) - self.now.first) // self.shard
            if behind > 0:
                self._drop(min(wanted, behind))
                continue
            self._publish()
            if time.monotonic() - self._read > UNREAD_S:
                raise SystemExit
            time.sleep(POLL_S)

    def _floor(self) -> int:
        """The first token that has to stay: for those who wait and read now, or else for all readers."""
        if not self.now.full:  # training cannot begin before validation is there; then this starts again
            return self.writers[TRAIN].count
        active = [post for post in self._posts if post["active"]]
        waiting = any(not self._has(post) for post in active)
        return min((post["low"] for post in (active if waiting else self._posts)), default=0)

    def _drop(self, shards: int) -> None:
        """Removes the first shards. Readers learn it before."""
        gone = self.now.first // self.shard
        self.now = self.now._replace(first=self.now.first + shards * self.shard)
        self._publish()
        for index in range(gone, gone + shards):
            for path in self.folder.glob(f"train-{index:05d}.*"):
                remove(path)

    def _bytes(self) -> int:
        """Those of the tokens that are kept."""
        train, val = (writer.count for writer in self.writers)
        return (train - self.now.first + val) * self.now.item
