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

from fivefold.data.build import (
    Chunk,
    Summary,
    Work,
    require_few_bad,
    require_good,
    run,
    save_tokenizer,
    skipped,
)
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
from fivefold.data.tokens import ShardWriter
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
        self._read = time.monotonic()  # when somebody last was there to read

    def run(self) -> None:
        if not (self.folder / "tokenizer.json").exists():
            save_tokenizer(self.data, self.mask, self.work, self.folder, cores(), lambda *_: None)
        self.work = self.work.with_tokenizer(self.folder)
        self.now = self._left() or Progress(self.work.dtype, self.shard, full=not self.most_val)
        self.borders = set(commits(self.folder))
        with Lines(self.folder / COMMITS) as self.lines:
            while (low := self._grow()) is not None:
                self._start_again(low)

    def _left(self) -> Progress | None:
        """What the folder holds, without shards that an interruption has left; None: nothing, or not all it says."""
        now = read_progress(self.folder)
        if now is None:
            return None
        wanted = {f"train-{i:05d}" for i in range(now.first // self.shard, -(-now.count // self.shard))}
        wanted |= {"val-00000"} if now.val else set()
        for path in self.folder.glob("*-*.*"):
            if path.suffix in (".bin", ".digests") and path.stem not in wanted:
                remove(path)
        return now if all((self.folder / f"{name}.bin").exists() for name in wanted) else None

    def _grow(self) -> int | None:
        """Tokenizes from where the folder ends to the end of the source, and stays while somebody reads. Returns the
        token from which on it has to start again, since a reader waits for it; None: nobody reads any more."""
        now, files = self.now, self.work.split.files
        self.position = [now.at.train, now.at.val]
        self.writers = [
            ShardWriter(self.folder, "train", now.dtype, self.shard, now.count),
            ShardWriter(self.folder, "val", now.dtype, max(1, self.most_val), now.val),
        ]
        total = Summary.of(now.summary) if now.summary else Summary()
        try:
            if now.total is None or now.count < now.total:
                for group in run(self.work, now.at.place, cores()):
                    for chunk in group.chunks:
                        self._append(chunk)
                    total.add(group.summary)
                    require_good(files, group.summary.bad, self.data.max_bad_fraction)
                    self._note(Commit(self.position[TRAIN], self.position[VAL], tuple(group.place)), total)
                    self._look()
                    if time.monotonic() - self._published >= PUBLISH_S:
                        self._publish()
                self.now = self.now._replace(total=self.position[TRAIN], full=True)
                self._publish()
                require_few_bad(skipped(total, files), self.data.max_bad_fraction)
            while self.now.first and not self._unread():
                time.sleep(QUIET)
                self._look()
            return None
        except _StartAgain as again:
            return again.low
        finally:
            for writer in self.writers:
                writer.close()

    def _append(self, chunk: Chunk) -> None:
        """Writes what is not there yet."""
        writer, ids = self.writers[chunk.split], chunk.ids
        there = writer.count - self.position[chunk.split]
        self.position[chunk.split] += len(ids)
        ids = ids[max(0, there) :]
        if chunk.split == VAL:
            writer.write(ids[: 0 if self.now.full else max(0, self.most_val - writer.count)])
            return
        for start in range(0, len(ids), self.shard):
            part = ids[start : start + self.shard]
            self._make_room(len(part) * self.now.item)
            writer.write(part)

    def _note(self, at: Commit, total: Summary) -> None:
        """Notes the first border in each shard."""
        if at.train // self.shard > self.now.at.train // self.shard:
            self._add_border(at)
        full = self.now.full or self.writers[VAL].count >= self.most_val
        self.now = self.now._replace(at=at, full=full, summary=dataclasses.asdict(total))

    def _add_border(self, at: Commit) -> None:
        if at not in self.borders:
            self.borders.add(at)
            self.lines.write(json.dumps(at))

    def _border(self, low: int) -> Commit:
        """The last noted border before the shard of a token."""
        shard = low // self.shard * self.shard
        return max((c for c in self.borders if c.train <= shard), default=Commit())

    def _publish(self) -> None:
        for writer in self.writers:
            writer.flush()
        self._write(count=self.writers[TRAIN].count)

    def _write(self, **news: Any) -> None:
        """Tells readers what there is, with these news."""
        self.now = self.now._replace(val=self.writers[VAL].count, **news)
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
                if post["hint"]:
                    self._add_border(Commit.of(post["hint"]))
        lows = [post["low"] for post in self._waiting()]
        if not lows or len(lows) < sum(post["active"] for post in self._posts):  # who reads now comes first
            return
        gone = max(lows) < self.now.first
        # Further ahead it goes on only if a border there is known and validation is complete.
        jumps = min(lows) >= self.now.first and (self.now.full or not self.data.val_fraction)
        there = max(self.writers[TRAIN].count, self.position[TRAIN])
        if gone or (jumps and self._border(min(lows)).train > there):
            raise _StartAgain(min(lows))

    def _waiting(self) -> list[dict[str, Any]]:
        """The readers whose tokens are not there."""
        return [
            post for post in self._posts if post["active"] and not self.now.has(post["low"], post["need"])
        ]

    def _unread(self) -> bool:
        return time.monotonic() - self._read > UNREAD_S

    def _start_again(self, low: int) -> None:
        """Removes all training tokens, and continues with those from `low` on."""
        first = low // self.shard * self.shard
        self._write(first=first, count=first, at=self._border(low))
        for path in [*self.folder.glob("train-*.bin"), *self.folder.glob("train-*.digests")]:
            remove(path)

    def _make_room(self, size: int) -> None:
        """Waits until there is room for so many bytes, and removes shards that all readers have behind them."""
        while self.most_bytes and (lacking := self._bytes() + size - self.most_bytes) > 0:
            self._looked = 0.0
            self._look()
            first = self.now.first // self.shard
            behind = min(self._floor(), self.writers[TRAIN].count) // self.shard
            shards = range(first, min(behind, first - (-lacking // (self.shard * self.now.item))))
            if shards:
                self.now = self.now._replace(first=shards.stop * self.shard)
            self._publish()  # readers learn it before
            for index in shards:
                for path in self.folder.glob(f"train-{index:05d}.*"):
                    remove(path)
            if not shards:
                if self._unread():
                    raise SystemExit
                time.sleep(POLL_S)

    def _floor(self) -> int:
        """The first token that has to stay: for those who wait and read now, or else for all readers."""
        if not self.now.full:  # training cannot begin before validation is there; then this starts again
            return self.writers[TRAIN].count
        readers = [post for post in self._posts if post["active"]] if self._waiting() else self._posts
        return min((post["low"] for post in readers), default=0)

    def _bytes(self) -> int:
        """Those of the tokens that are kept."""
        train, val = (writer.count for writer in self.writers)
        return (train - self.now.first + val) * self.now.item
