"""Where documents end in a file of token ids, by the index that Megatron-LM writes beside it (megatron.py)."""

from __future__ import annotations

import struct
from bisect import bisect_right
from pathlib import Path

import numpy as np

MAGIC, VERSION = b"MMIDIDX\0\0", 1
HEADER = struct.Struct("<9sQBQQ")
DTYPES = {1: "|u1", 2: "|i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}


class Borders:
    """An index that `megatron.read_index` has accepted. It is searched where it lies: a border costs no memory."""

    def __init__(self, index: Path):
        with open(index, "rb") as file:
            _, _, code, n, m = HEADER.unpack(file.read(HEADER.size))
        self._item = np.dtype(DTYPES[code]).itemsize
        # Sequences have a length and a first byte. Documents are numbers of sequences.
        parts = (("<i4", n), ("<i8", n), ("<i8", m))
        offset, maps = HEADER.size, []
        for dtype, count in parts:
            maps.append(np.memmap(index, dtype, "r", offset, (count,)) if count else np.empty(0, dtype))
            offset += count * np.dtype(dtype).itemsize
        self._lengths, self._begins, self._documents = maps

    def ends(self, a: int, b: int) -> np.ndarray:
        """The tokens of a .. b that are the last of a document: int64, sorted."""
        borders = range(1, len(self._documents))  # the first one is the beginning
        low, high = (bisect_right(borders, at, key=self._behind) + 1 for at in (a, b))
        last = np.asarray(self._documents[low:high]) - 1  # the last sequence of each document
        return np.unique(self._begins[last] // self._item + self._lengths[last]) - 1

    def _behind(self, border: int) -> int:
        """The token behind a document."""
        last = int(self._documents[border]) - 1
        return int(self._begins[last]) // self._item + int(self._lengths[last]) if last >= 0 else 0
