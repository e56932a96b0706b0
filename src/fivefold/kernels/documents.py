"""Documents in packed sequences, as attention needs them: a token sees keys of its own document only.

`tiling.py` says which tiles of queries and keys that leaves.

Legend: B sequences, T columns of a sequence, Q queries, S keys, N documents.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fivefold.kernels.sizes import query_blocks
from fivefold.kernels.tiling import Columns, Tiling


class Tile(NamedTuple):
    """A block of queries with the keys that any of them sees, in one matmul.

    rows: sequences of the batch. start, end: queries. low, high: keys. bounds: the keys [from, to) that each query
    sees, counted from `low`: int32 (rows, end - start, 2). None: all keys, or those that a causal mask leaves.
    """

    rows: slice
    start: int
    end: int
    low: int
    high: int
    bounds: Tensor | None = None


class Documents:
    """The documents in a batch of sequences. first_BT: the column at which the document of each token begins.

    On the device: `first`, and `cumulative`, the cumulative lengths of all documents of the flattened batch, int32
    (N + 1). Tiles are kept, since every layer asks for the same.
    """

    def __init__(self, first_BT: np.ndarray, device: torch.device | str = "cpu") -> None:
        self.tiling, self.device = Tiling(first_BT), torch.device(device)
        self.first_BT, self.shape = self.tiling.first_BT, self.tiling.shape
        self._tiles: dict[tuple[Columns, Columns, bool, int], list[Tile]] = {}
        ends = np.append(np.flatnonzero(self.tiling.begins_BT.ravel()), first_BT.size)
        # Here, and not where they are used: PyTorch's compiler reads attributes, and cannot trace numpy.
        self.first = torch.from_numpy(self.first_BT).to(self.device, non_blocking=True)
        self.cumulative = torch.from_numpy(ends.astype(np.int32)).to(self.device, non_blocking=True)

    def filled(self, rows: int) -> Documents:
        """With more sequences, up to `rows`, that are as the first one."""
        more = np.repeat(self.first_BT[:1], rows - self.shape[0], axis=0)
        return Documents(np.concatenate([self.first_BT, more]), self.device) if len(more) else self

    def positions(self, columns_t: Tensor) -> Tensor:
        """Positions of the tokens at these columns in their documents: (B, t)."""
        return columns_t - self.first[:, columns_t]

    def mask(self, causal: bool) -> Tensor:
        """True where a query (dim 2) sees a key (dim 3): (B, 1, T, T) on the device."""
        first = self.first
        seen = first[:, :, None] == first[:, None, :]
        return (seen.tril() if causal else seen)[:, None]

    def tiles(self, queries: Columns, keys: Columns, causal: bool, element_size: int) -> list[Tile]:
        """The tiles of queries and keys at these columns. Queries and keys of a tile are counted among them. A query
        that sees none of the keys may be in no tile."""
        asked = queries, keys, causal, element_size
        if asked not in self._tiles:
            self._tiles[asked] = self._found(*asked)
        return self._tiles[asked]

    def _found(self, queries: Columns, keys: Columns, causal: bool, element_size: int) -> list[Tile]:
        found = []
        for block in self.tiling.blocks(queries, keys, causal, element_size):
            first, last, start, end, low, high, bounds_BQ2 = block
            inside = np.clip(bounds_BQ2[first:last, start:end] - low, 0, high - low)
            bounds = torch.from_numpy(inside.astype(np.int32)).to(self.device)
            found.append(Tile(slice(first, last), start, end, low, high, bounds))
        return found


def whole_tiles(
    B: int, T: int, causal: bool, element_size: int, documents: Documents | None = None
) -> Sequence[Tile]:
    """The tiles of whole sequences; without documents those of a causal mask, or of none."""
    if documents is not None:
        assert documents.shape == (B, T), f"documents of {documents.shape}, tokens of {(B, T)}"
        return documents.tiles(((0, T),), ((0, T),), causal, element_size)
    return [Tile(slice(0, B), *block[:2], 0, block[2]) for block in query_blocks(T, causal, element_size)]


def sums_dtype(tiles: Sequence[Tile], dtype: torch.dtype) -> torch.dtype:
    """The dtype in which gradients of keys are summed over tiles: fp32 if a sequence is in many."""
    blocks = {tile.start for tile in tiles}
    return dtype if len(blocks) <= 2 else torch.float32
