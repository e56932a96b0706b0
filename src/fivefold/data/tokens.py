"""Tokens on disk, seen as one long array; and the data set that a run trains on."""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fivefold.data.tokenizer import Tokenizer

OPEN_MAPS = 256  # each mapping holds a file descriptor, and a process has 1024 of them by default


class Shard(NamedTuple):
    """`tokens` ids of type `dtype` in `path`, from byte `offset` on."""

    path: Path
    dtype: str
    offset: int
    tokens: int


class Tokens:
    """Memory-mapped token ids over any number of shards: len() counts tokens, [a:b] reads across borders.

    start, stop: the window of the shards' tokens that this object shows (all of them by default).
    """

    def __init__(self, shards: Sequence[Shard], start: int = 0, stop: int | None = None):
        self.shards = [s for s in shards if s.tokens]
        self._starts = [0]
        for shard in self.shards:
            self._starts.append(self._starts[-1] + shard.tokens)
        self._start = start
        self._stop = self._starts[-1] if stop is None else stop
        assert 0 <= self._start <= self._stop <= self._starts[-1]
        self._maps: OrderedDict[int, np.ndarray] = OrderedDict()

    def __len__(self) -> int:
        return self._stop - self._start

    def __getitem__(self, window: slice) -> np.ndarray:
        """Ids [a:b] as an array of the shards' dtype (a view of the mapping where one shard holds all)."""
        a, b, step = window.indices(len(self))
        assert step == 1, "tokens are read in order"
        pieces = list(self._pieces(a, b))
        return pieces[0] if len(pieces) == 1 else np.concatenate([np.empty(0, np.uint16), *pieces])

    def rows(self, starts: np.ndarray, length: int) -> np.ndarray:
        """tokens[s : s + length] for each s of starts (R,), as int64 of shape (R, length)."""
        out_RT = np.empty((len(starts), length), np.int64)
        for row, start in zip(out_RT, starts.tolist(), strict=True):
            at = 0
            for piece in self._pieces(start, start + length):
                row[at : at + len(piece)] = piece
                at += len(piece)
            assert at == length
        return out_RT

    def _pieces(self, a: int, b: int):
        a, b = a + self._start, b + self._start
        shard = bisect_right(self._starts, a) - 1
        while a < b:
            first = self._starts[shard]
            stop = min(b, self._starts[shard + 1])
            yield self._map(shard)[a - first : stop - first]
            a, shard = stop, shard + 1

    def _map(self, index: int) -> np.ndarray:
        mapped = self._maps.get(index)
        if mapped is None:
            shard = self.shards[index]
            mapped = np.memmap(shard.path, shard.dtype, "r", shard.offset, (shard.tokens,)).view(np.ndarray)
            self._maps[index] = mapped
            if len(self._maps) > OPEN_MAPS:
                self._maps.popitem(last=False)
        return mapped


@dataclass(frozen=True)
class DataSet:
    """What `prepare` returns.

    train, val: the two splits (val None when nothing is held out). tokenizer: None for `tokens:` sources.
    vocab_size: ids are below it. mask_id: the id that stands for a hidden token, where arch is `bert`.
    info: source, fingerprint, folder, cached, documents / tokens / bytes per split, what was skipped.
    """

    train: Tokens
    val: Tokens | None
    tokenizer: Tokenizer | None
    vocab_size: int
    mask_id: int | None = None
    info: dict[str, Any] = field(default_factory=dict)
