"""Hashes of blocks of token files, so that a byte that a disk or a cable has changed is not trained on.

A file is hashed in blocks of 64 KiB while it is written or scanned. A process compares each block when it first reads
from it, which costs about 40 microseconds per block and nothing later. So no cache is too large for it. What changes in
memory after that is not noticed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import numpy as np

BLOCK = 1 << 16
DIGEST = 8  # bytes of a block's SHA-256 that are kept


class BlockHasher:
    """Hashes a file, piece by piece as it is written."""

    def __init__(self) -> None:
        self._whole, self._current, self._missing = bytearray(), hashlib.sha256(), BLOCK

    def update(self, content: memoryview) -> None:
        """content: bytes, flat."""
        while len(content):
            taken = content[: self._missing]
            self._current.update(taken)
            self._missing -= len(taken)
            content = content[len(taken) :]
            if not self._missing:
                self._end()

    def _end(self) -> None:
        self._whole += self._current.digest()[:DIGEST]
        self._current, self._missing = hashlib.sha256(), BLOCK

    def digests(self) -> bytes:
        """Those of all blocks, one after the other."""
        if self._missing < BLOCK:
            self._end()
        return bytes(self._whole)


class Blocks:
    """The hashes of a file's blocks, and which of them have been compared. wrong: called with the first and the last
    byte of a block that differs; it raises."""

    def __init__(self, digests: bytes, wrong: Callable[[int, int], None]):
        self.digests, self.wrong = digests, wrong
        self.compared = np.zeros(len(digests) // DIGEST, bool)

    def compare(self, content: np.ndarray, start: int, stop: int) -> None:
        """Compares the blocks of bytes start .. stop. content: all bytes of the file (uint8)."""
        first, last = start // BLOCK, -(-stop // BLOCK)
        for block in np.flatnonzero(~self.compared[first:last]) + first:
            here = content[block * BLOCK : (block + 1) * BLOCK]
            known = self.digests[block * DIGEST : (block + 1) * DIGEST]
            if hashlib.sha256(here.data).digest()[:DIGEST] != known:
                self.wrong(int(block) * BLOCK, int(block) * BLOCK + len(here))
            self.compared[block] = True


def read_digests(path: Path, size: int, sha256: str) -> bytes | None:
    """The digests of a file of `size` bytes. None if they are missing or damaged."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    if len(content) != -(-size // BLOCK) * DIGEST or hashlib.sha256(content).hexdigest() != sha256:
        return None
    return content
