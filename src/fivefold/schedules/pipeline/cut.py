"""Assigns the blocks of a model to pipeline stages."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate

StageCost = Callable[[int, int, int], float]
"""(stage, its first block, the block after its last) -> cost of the stage."""


def cut(costs: Sequence[float], stages: int, first: float = 0.0, last: float = 0.0) -> tuple[range, ...]:
    """Divides blocks into `stages` runs of at least one block each. The most expensive stage is as cheap as possible.
    Of these cuts it takes the most even one (least sum of squares).

    costs: of each block. first, last: extra cost of the first and the last stage (the embedding, the head). Any unit
    works, for example FLOPs per token.
    """
    assert 1 <= stages <= len(costs), f"{stages} stages of {len(costs)} blocks"
    before = [0.0, *accumulate(costs)]

    def cost(stage: int, start: int, stop: int) -> float:
        return before[stop] - before[start] + first * (stage == 0) + last * (stage == stages - 1)

    if stages == 1:
        return (range(len(costs)),)
    possible = _run_costs(tuple(before), first, last)
    worst = bisect_left(possible, True, key=lambda limit: _possible(len(costs), stages, cost, limit))
    limit = possible[worst] * (1 + 1e-9)
    ends = _most_even(len(costs), stages, cost, limit)
    return tuple(range(start, stop) for start, stop in zip([0, *ends], ends, strict=False))


@lru_cache(maxsize=64)
def _run_costs(before: tuple[float, ...], first: float, last: float) -> list[float]:
    """Every possible cost of a stage, ascending. before: prefix sums of the blocks' costs."""
    runs = {stop - start for i, start in enumerate(before) for stop in before[i + 1 :]}
    return sorted(run + extra for run in runs for extra in (0.0, first, last))


def _possible(blocks: int, stages: int, cost: StageCost, limit: float) -> bool:
    """True if no stage needs to cost more than `limit`. Each stage takes as many blocks as it may, and leaves one for
    each later stage."""
    start = 0
    for stage in range(stages - 1):
        stop, most = start, blocks - (stages - stage - 1)
        while stop < most and cost(stage, start, stop + 1) <= limit:
            stop += 1
        if stop == start:
            return False
        start = stop
    return cost(stages - 1, start, blocks) <= limit


def _most_even(blocks: int, stages: int, cost: StageCost, limit: float) -> list[int]:
    """The ends of the stages such that none costs more than `limit` and the sum of squares is least."""
    totals: list[dict[int, tuple[float, int]]] = [{0: (0.0, 0)}]  # after each stage: {end: (sum, its start)}
    for stage in range(stages):
        found = {}
        for stop in range(stage + 1, blocks - (stages - stage - 1) + 1):
            choices = []
            for start in range(stop - 1, -1, -1):
                own = cost(stage, start, stop)
                if own > limit:
                    break
                if start in totals[-1]:
                    choices.append((totals[-1][start][0] + own * own, start))
            if choices:
                found[stop] = min(choices)
        totals.append(found)
    ends = [blocks]
    for found in reversed(totals[2:]):
        ends.append(found[ends[-1]][1])
    return ends[::-1]
