"""Hashes a source's content, so that stale tokens of a changed source are never used.

The hash is SHA-256 of the content (1.7 GB/s per core with the SHA extension, several files at once). Hashing a terabyte
at every start would still take minutes. So the hash of a file is remembered under its size, modification time, change
time and inode. The change time (ctime) makes this safe. No program can set it, and the kernel updates it at every write
and at every utime(). Clocks tick coarsely, so a file that changed less than two seconds before it was hashed is hashed
again (git's "racily clean" rule).
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from fivefold.errors import UserError
from fivefold.files import write_atomically
from fivefold.host import cores

RACY_NS = 2_000_000_000
Stat = list[int]  # size, mtime, ctime (ns), inode


def stat_of(path: Path) -> Stat | None:
    """The identity of a file that is stored with its hash, or None if the file cannot be read."""
    try:
        s = path.stat()
    except OSError:
        return None
    return [s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_ino]


def sha256_file(path: Path, advance: Callable[[int], None] | None = None) -> str:
    digest, buffer = hashlib.sha256(), bytearray(1 << 20)
    with open(path, "rb", buffering=0) as f:
        while count := f.readinto(buffer):
            digest.update(memoryview(buffer)[:count])
            if advance:
                advance(count)
    return digest.hexdigest()


ENDS = 1 << 16  # bytes at each end of a file that stand for its content


def sampled_sha256(path: Path) -> str:
    """Hash of a file's size and its two ends: for streams, which begin before anybody has read all of it."""
    with open(path, "rb") as f:
        size = os.fstat(f.fileno()).st_size
        digest = hashlib.sha256(f"{size} ".encode() + f.read(ENDS))
        f.seek(max(0, size - ENDS))
        digest.update(f.read(ENDS))
    return digest.hexdigest()


class Memo:
    """Remembers a value per file while the file is certainly unchanged, in one JSON file."""

    def __init__(self, path: Path):
        self.path = path
        self._changed = False
        try:
            self._known: dict[str, dict[str, Any]] = json.loads(path.read_text("utf-8"))
        except (OSError, ValueError):
            self._known = {}

    def get(self, path: Path, stat: Stat) -> Any | None:
        entry = self._known.get(str(path))
        if (
            entry is None or entry["stat"] != stat or os.name == "nt"
        ):  # Windows: ctime is the time of creation
            return None
        return entry["value"] if entry["at"] - max(stat[1], stat[2]) > RACY_NS else None

    def put(self, path: Path, stat: Stat, at: int, value: Any) -> None:
        self._known[str(path)] = {"stat": stat, "at": at, "value": value}
        self._changed = True

    def forget(self, paths: Iterable[Path]) -> None:
        for path in paths:
            self._known.pop(str(path), None)

    def save(self) -> None:
        if self._changed:
            write_atomically(self.path, json.dumps(self._known))


def remembered(
    paths: list[Path], memo: Memo, compute: Callable[[Path], Any], unreadable: Callable[[OSError], Any]
) -> list[Any]:
    """compute(path) for each file, in threads. An unchanged file gives its remembered value."""

    def one(path: Path) -> Any:
        before, at = stat_of(path), time.time_ns()
        if before is not None and (known := memo.get(path, before)) is not None:
            return known
        try:
            value = compute(path)
        except OSError as error:
            return unreadable(error)
        if stat_of(path) != before or before is None:
            raise UserError(f"{path}: changed while being read; run again when it is complete")
        memo.put(path, before, at, value)
        return value

    with ThreadPoolExecutor(cores()) as pool:
        values = list(pool.map(one, paths))
    memo.save()
    return values
