"""The division of a sequence over the ranks of the context axis, as data. No torch.

Each rank has the same number of tokens. Who has which is fixed for a layout (`token_spans`), or where packed documents
make queries unequally expensive, dealt for each microbatch (`dealt`). The trainer takes columns by these lists, the
planner counts their scores, and pictures draw them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fivefold.schedules.collectives.collective import Span, joined
from fivefold.schedules.ring_attention import reach_of, turns
from fivefold.sharding.layout import Layout
from fivefold.sharding.parts import Columns

if TYPE_CHECKING:
    import numpy as np

RING = "ring"
METHODS = (RING, "ulysses", "all_gather")  # parallel/context.py says what each does
MOST_BLOCKS, LEAST_TOKENS = 8, 32
"""Blocks that a rank is dealt at most, and their tokens at least, if that leaves two. Small blocks balance better, but
their matmuls are slower."""


def token_spans(layout: Layout, T: int, index: int) -> list[Span]:
    """The spans [start, stop) of a sequence of T tokens on rank `index` of the context axis, in order. `ulysses`: one
    chunk. Others: a chunk from the front and its mirror image from the back, which balances causal attention."""
    c = layout.cp
    if layout.cp_method == "ulysses":
        return [(T // c * index, T // c * (index + 1))]
    n = T // (2 * c)
    return [(n * i, n * (i + 1)) for i in (index, 2 * c - 1 - index)]


def ring_columns(
    layout: Layout, T: int, index: int, causal: bool, window: int = 0
) -> list[tuple[Columns, Columns]]:
    """The columns of the queries and of the keys that rank `index` multiplies, in each turn of ring attention."""
    own, found = tuple(token_spans(layout, T, index)), []
    for turn in turns(layout.cp, index, causal, reach_of(layout.cp, T, window)):
        keys = tuple(token_spans(layout, T, turn.owner))[: int(2 * turn.keys)]  # two chunks each
        found.append((own[1:] if turn.late else own, keys))
    return found


def gathered_keys(span: Span, T: int, causal: bool, window: int) -> Span:
    """The keys that queries at a span see, if all T are there. window: that each of them sees; 0: all."""
    return max(0, span[0] - window + 1) if window else 0, span[1] if causal else T


def some_queries(cp: int, method: str) -> bool:
    """True if a rank attends with some queries and all heads (`kernels/partial_attention.py`)."""
    return cp > 1 and method != "ulysses"


def deals(layout: Layout) -> bool:
    """True if documents decide who has which tokens: every rank has all keys, so any queries will do."""
    return layout.cp > 1 and layout.cp_method == "all_gather"


def dealt(keys_T: np.ndarray, ranks: int) -> tuple[Columns, ...]:
    """The columns of each rank, dealt in blocks by the work of their queries: the heaviest block first, each to the
    rank with the least work that still has place (Graham 1969; torchtitan's PTRR deals sorted blocks in turn).

    keys_T: number of keys that the queries of each column see, in all sequences of a microbatch.
    """
    tokens = len(keys_T) // ranks
    most = min(MOST_BLOCKS, max(2, tokens // LEAST_TOKENS))
    place = max(n for n in range(1, most + 1) if tokens % n == 0)  # blocks of a rank
    size = tokens // place
    work = keys_T.reshape(-1, size).sum(1).tolist()
    own: list[list[int]] = [[] for _ in range(ranks)]
    load = [0] * ranks
    for block in sorted(range(len(work)), key=lambda block: -work[block]):
        rank = min((r for r in range(ranks) if len(own[r]) < place), key=load.__getitem__)
        own[rank].append(block)
        load[rank] += work[block]
    return tuple(joined([(block * size, (block + 1) * size) for block in sorted(some)]) for some in own)
