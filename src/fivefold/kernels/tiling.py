"""The scores that attention computes where a sequence holds several documents. No torch: kernels compute these tiles,
and the planner counts them.

A document is a run of columns, so the keys that a token sees are a range. The kernels for CPUs compute tiles: blocks of
queries with the keys that any of them sees. Keys of other documents are skipped, block by block. Which tiles there are
follows from two lists of columns, those of the queries and those of the keys that are present. So a whole sequence, a
turn of ring attention and a rank's part of one are the same thing here.

Legend: B sequences, T columns of a sequence, Q queries, S keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

import numpy as np

from fivefold.kernels.sizes import SPAN_STEPS, WASTE, block_size, query_blocks
from fivefold.schedules.collectives.collective import joined
from fivefold.sharding.layout import Layout
from fivefold.sharding.parts import Columns
from fivefold.sharding.sequence import deals, dealt, gathered_keys, ring_columns, token_spans

Block = tuple[slice, int, int, int, int, np.ndarray]
"""A block of queries with the keys that any of them sees: sequences; queries [from, to); keys [from, to); the keys
[from, to) that each query sees (B, Q, 2), counted among all keys."""
Product = tuple[Columns, Columns]
"""Columns of queries and of the keys that they are multiplied with."""


class Tiling:
    """A batch of sequences. first_BT: the column at which the document of each token begins. fixed: nobody deals
    columns, since it is not asked for documents.

    behind_BT: the column behind the document of each token. documents_N2: the first column and that behind, of each
    document.
    """

    def __init__(self, first_BT: np.ndarray, fixed: bool = False) -> None:
        (B, T), self.fixed = first_BT.shape, fixed
        columns_T = np.arange(T)
        self.begins_BT = first_BT == columns_T
        assert self.begins_BT[:, 0].all(), "a sequence begins with a document, or with a part of one"
        assert (np.maximum.accumulate(np.where(self.begins_BT, columns_T, 0), axis=1) == first_BT).all()
        self.first_BT, self.shape = first_BT.astype(np.int64), (B, T)
        # The next beginning at or behind each column, found from the right.
        next_BT = np.minimum.accumulate(np.where(self.begins_BT, columns_T, T)[:, ::-1], axis=1)[:, ::-1]
        self.behind_BT = np.concatenate([next_BT[:, 1:], np.full((B, 1), T)], axis=1)
        self.documents_N2 = np.stack([self.first_BT, self.behind_BT], axis=2)[self.begins_BT]
        self._lengths: dict[Columns, np.ndarray] = {}

    def dealt(self, ranks: int, causal: bool) -> tuple[Columns, ...]:
        """The columns of each rank of the context axis, dealt by the pairs that these documents leave."""
        behind = np.arange(self.shape[1]) + 1 if causal else self.behind_BT
        return dealt((behind - self.first_BT).sum(0), ranks)

    def turns(self, layout: Layout, causal: bool, window: int = 0) -> list[list[list[Product]]]:
        """What each rank of the context axis multiplies in each turn. A whole sequence is one rank's. window: keys that
        a query sees; 0: all."""
        T = self.shape[1]
        whole = ((0, T),)
        if deals(layout):
            own = [joined(token_spans(layout, T, rank)) for rank in range(layout.cp)]
            own = own if self.fixed else self.dealt(layout.cp, causal)
            return [[[((span,), (gathered_keys(span, T, causal, window),)) for span in some]] for some in own]
        if layout.cp == 1 or layout.cp_method == "ulysses":
            return [[[(whole, whole)]]]
        return [
            [[turn] for turn in ring_columns(layout, T, rank, causal, window)] for rank in range(layout.cp)
        ]

    def lengths(self, columns: Columns) -> np.ndarray:
        """The tokens that each document has at these columns: (N), sequence by sequence."""
        if columns not in self._lengths:
            inside = [np.diff(np.clip(self.documents_N2, *span))[:, 0] for span in columns]
            self._lengths[columns] = np.sum(inside, axis=0)
        return self._lengths[columns]

    def pairs(self, queries: Columns, keys: Columns, causal: bool, window: int = 0) -> np.ndarray:
        """The pairs of a query and a key that it sees, of each document at these columns: (N). Causal: the last query
        sees the last key, or all keys are before the queries."""
        if window:
            low_BQ, high_BQ = self.bounds(queries, keys, causal, window)
            by_token = np.zeros(self.shape, np.int64)
            by_token[:, _places(queries)] = high_BQ - low_BQ
            return np.add.reduceat(by_token.ravel(), np.flatnonzero(self.begins_BT))
        q, k = self.lengths(queries), self.lengths(keys)
        return q * k - (q * (q - 1) // 2 if causal and keys[-1][1] > queries[0][0] else 0)

    def bounds(
        self, queries: Columns, keys: Columns, causal: bool, window: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """The keys [from, to) at these columns that each query sees, counted among them: twice (B, Q)."""
        q, k = _places(queries), _places(keys)
        first_BQ = self.first_BT[:, q]
        low_BQ = np.searchsorted(k, np.maximum(first_BQ, q - window + 1) if window else first_BQ)
        behind_BQ = np.broadcast_to(q + 1, low_BQ.shape) if causal else self.behind_BT[:, q]
        return low_BQ, np.maximum(np.searchsorted(k, behind_BQ), low_BQ)

    def blocks(
        self, queries: Columns, keys: Columns, causal: bool, element_size: int, window: int = 0
    ) -> Iterator[Block]:
        """The tiles of queries and keys at these columns. A query that sees none of the keys may be in no tile."""
        Q, S = (sum(b - a for a, b in columns) for columns in (queries, keys))
        bounds_BQ2 = np.stack(self.bounds(queries, keys, causal, window), axis=2)
        step = block_size(Q, element_size, window) // SPAN_STEPS
        for start, end, _ in query_blocks(Q, causal, element_size, window):
            low_Bq, high_Bq = np.moveaxis(bounds_BQ2[:, start:end], 2, 0)
            seen_Bq = high_Bq > low_Bq
            lows_B = np.where(seen_Bq, low_Bq, S).min(1) // step * step
            highs_B = np.minimum(-(-np.where(seen_Bq, high_Bq, 0).max(1) // step) * step, S)
            for first, last, low, high in shared_spans(lows_B.tolist(), highs_B.tolist()):
                yield slice(first, last), start, end, low, high, bounds_BQ2


def _places(columns: Columns) -> np.ndarray:
    return np.concatenate([np.arange(0), *(np.arange(*span) for span in columns)])


def joined_lengths(lengths_2N: np.ndarray) -> np.ndarray:
    """Lengths of documents, of queries and of keys (2, N), without those that have only one of them: (2, n). Between
    two others, all of their queries are one sequence without keys, and all of their keys one without queries."""
    shared_N = np.all(lengths_2N > 0, axis=0)
    starts = np.flatnonzero(shared_N | np.append(True, shared_N[:-1]))
    (q_R, k_R), shared_R = np.add.reduceat(lengths_2N, starts, axis=1), shared_N[starts]
    joined_2RP = np.array([[q_R, 0 * q_R], [k_R * shared_R, k_R * ~shared_R]]).swapaxes(1, 2)
    found_2n = joined_2RP.reshape(2, -1)
    return found_2n[:, found_2n.any(0)]


def shared_spans(lows: list[int], highs: list[int]) -> list[tuple[int, int, int, int]]:
    """Joins the spans of keys [low, high) of neighbouring sequences: (first, behind the last, low, high) of each tile.
    Sequences with an empty span are in none."""
    tiles: list[tuple[int, int, int, int]] = []
    needed = 0  # by the sequences of the last tile
    for row, (low, high) in enumerate(zip(lows, highs, strict=True)):
        if high <= low:
            continue
        if tiles and tiles[-1][1] == row:
            first, _, least, most = tiles[-1]
            least, most = min(least, low), max(most, high)
            if (row + 1 - first) * (most - least) <= WASTE * (needed + high - low):
                tiles[-1] = first, row + 1, least, most
                needed += high - low
                continue
        tiles.append((row, row + 1, low, high))
        needed = high - low
    return tiles


class Sample:
    """Some sequences of a run: what attention computes of them, as shares of what it computes of whole sequences."""

    def __init__(self, first_RT: np.ndarray, fixed: bool = False) -> None:
        self.tiling = Tiling(first_RT, fixed)
        self._computed: dict[tuple[object, ...], float] = {}
        self._copied: dict[tuple[object, ...], tuple[float, float]] = {}

    @cached_property
    def tokens(self) -> float:
        """The average length of a document, or of the part of it that is in a sequence."""
        return self.tiling.begins_BT.size / int(self.tiling.begins_BT.sum())

    @cached_property
    def seen(self) -> float:
        """The length of its document that an average token is in: that of sequences with equally many pairs."""
        return float((self.tiling.behind_BT - self.tiling.first_BT).mean())

    def pairs(self, causal: bool, window: int = 0) -> float:
        """The share of the pairs of a query and a key of the same document, and within a window if there is one."""
        R, T = self.tiling.shape
        if not causal:
            return self.seen / T
        before_RT = np.arange(T) - self.tiling.first_BT + 1
        return float(np.minimum(before_RT, window or T).sum()) / (R * T * (T + 1) / 2)

    def in_turns(self, B: int, causal: bool, layout: Layout, window: int = 0) -> float:
        """`pairs`, in microbatches of B sequences, of the slowest rank in each turn of a ring. With other methods the
        ranks of the context axis have equally many, or nearly."""
        if layout.cp == 1 or layout.cp_method != "ring":
            return self.pairs(causal, window)
        if (asked := (B, causal, layout.cp, window)) not in self._computed:
            of, whole = (B, causal, layout), Tiling(np.zeros_like(self.tiling.first_BT))
            self._computed[asked] = max_pairs(self.tiling, *of, window) / max_pairs(whole, *of)
        return self._computed[asked]

    def copied(self, B: int, causal: bool, layout: Layout, window: int = 0) -> tuple[float, float]:
        """Tokens of queries and of keys that a rank of the context axis multiplies in all turns, relative to its own
        tokens: on average over microbatches of B sequences, of the rank with most. Flash attention wants the tokens of
        several sequences in a row (kernels/partial_attention.py)."""
        if (asked := (B, causal, layout.cp, layout.cp_method, window)) not in self._copied:
            starts, each = _microbatches(self.tiling, B), self.tiling.shape[1] / layout.cp
            found = []
            for turns in self.tiling.turns(layout, causal, window):
                tokens = np.zeros(2)
                for columns in (product for products in turns for product in products):
                    some = np.add.reduceat(self.tiling.pairs(*columns, causal, window), starts) > 0
                    tokens += some.mean() * np.array([sum(b - a for a, b in of) for of in columns])
                found.append(tuple((tokens / each).tolist()))
            # Backward copies more of queries.
            self._copied[asked] = max(found, key=lambda tokens: (sum(tokens), tokens[0]))
        return self._copied[asked]

    def computed(
        self, B: int, causal: bool, element_size: int, layout: Layout | None = None, window: int = 0,
        pairs: bool = False,
    ) -> float:  # fmt: skip
        """The share of the scores that tiles have, in microbatches of B sequences, of those without a window; or of its
        pairs, which flash attention computes.

        layout: says which columns a rank of the context axis has. The slowest one counts, in each turn of a ring.
        """
        layout, fixed = layout or Layout(), self.tiling.fixed
        asked = B, causal, element_size, layout.cp, layout.cp_method, window, pairs
        if asked not in self._computed:
            none = Tiling(np.zeros((1, self.tiling.shape[1]), np.int64), fixed)
            rows = [self.tiling.first_BT[at : at + B] for at in range(0, self.tiling.shape[0], B)]
            of = layout, causal, element_size, window
            scores = sum(max_scores(Tiling(first_BT, fixed), *of) for first_BT in rows)
            plain = layout, causal, element_size
            whole = max_pairs(none, 1, causal, layout) if pairs else max_scores(none, *plain)
            self._computed[asked] = scores / (whole * self.tiling.shape[0])
        return self._computed[asked]


def assumed(T: int, tokens: float) -> Sample:
    """Sequences of T tokens with documents of `tokens` on average, whose lengths are drawn from a geometric
    distribution, one behind the other."""
    R = max(16, ASSUMED // T)
    begins_RT = np.random.default_rng(0).random((R, T)) < 1 / tokens
    return Sample(np.maximum.accumulate(np.where(begins_RT, np.arange(T), 0), axis=1))


ASSUMED = 1 << 17  # tokens of a sample that is drawn


def _microbatches(tiling: Tiling, B: int) -> np.ndarray:
    """The first document of each microbatch of B sequences."""
    return np.flatnonzero(np.diff(np.nonzero(tiling.begins_BT)[0] // B, prepend=-1))


def max_pairs(tiling: Tiling, B: int, causal: bool, layout: Layout, window: int = 0) -> int:
    """Pairs of the slowest rank in each turn of a ring, with each microbatch of B sequences."""
    starts = _microbatches(tiling, B)
    turns = zip(*tiling.turns(layout, causal, window), strict=True)
    of = (
        [np.add.reduceat(tiling.pairs(q, k, causal, window), starts) for ((q, k),) in ranks]
        for ranks in turns
    )
    return int(sum(np.max(each, axis=0).sum() for each in of))


def max_scores(tiling: Tiling, layout: Layout, causal: bool, element_size: int, window: int = 0) -> int:
    """Scores that the slowest rank of each turn computes."""
    turns = zip(*tiling.turns(layout, causal, window), strict=True)
    return sum(max(scores(tiling, of, causal, element_size, window) for of in ranks) for ranks in turns)


def scores(
    tiling: Tiling, products: Sequence[Product], causal: bool, element_size: int, window: int = 0
) -> int:
    """Scores of the tiles of these products."""
    blocks = (block for of in products for block in tiling.blocks(*of, causal, element_size, window))
    return sum((r.stop - r.start) * (end - start) * (high - low) for r, start, end, low, high, _ in blocks)
