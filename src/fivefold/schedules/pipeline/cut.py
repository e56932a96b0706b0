"""Which blocks of a model each pipeline stage gets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate


def cut(costs: Sequence[float], stages: int, first: float = 0.0, last: float = 0.0) -> tuple[range, ...]:
    """Divides blocks into `stages` runs of at least one block each, so that the costliest stage costs as little as
    possible; among those cuts, the most even one (least sum of squares).

    costs: of each block. first, last: what the first and the last stage cost besides (the embedding, the head); in
    whatever unit, for example FLOPs a token. Time: stages x blocks^2.
    """
    assert 1 <= stages <= len(costs), f"{stages} stages of {len(costs)} blocks"
    before = [0.0, *accumulate(costs)]

    def cost(stage: int, start: int, stop: int) -> float:
        return before[stop] - before[start] + first * (stage == 0) + last * (stage == stages - 1)

    worst, _ = _best(len(costs), stages, lambda so_far, stage, a, b: max(so_far, cost(stage, a, b)))
    limit = worst * (1 + 1e-9)

    def squares(so_far: float, stage: int, start: int, stop: int) -> float:
        own = cost(stage, start, stop)
        return so_far + own * own if own <= limit else float("inf")

    _, ends = _best(len(costs), stages, squares)
    return tuple(range(start, stop) for start, stop in zip([0, *ends], ends, strict=False))


def _best(blocks: int, stages: int, add: Callable[[float, int, int, int], float]) -> tuple[float, list[int]]:
    """The smallest total of a cut, and where its stages end. add(total so far, stage, start, stop) -> total."""
    totals: list[dict[int, tuple[float, int]]] = []  # of each stage: {its end: (total, its start)}
    for stage in range(stages):
        found = {}
        for stop in range(stage + 1, blocks - (stages - stage - 1) + 1):
            starts = [0] if stage == 0 else [start for start in totals[-1] if start < stop]
            found[stop] = min((add(totals[-1][a][0] if stage else 0.0, stage, a, stop), a) for a in starts)
        totals.append(found)
    ends = [blocks]
    for found in reversed(totals[1:]):
        ends.append(found[ends[-1]][1])
    return totals[-1][blocks][0], ends[::-1]
