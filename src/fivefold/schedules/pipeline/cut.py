"""Which blocks of a model each pipeline stage gets."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate

Cost = Callable[[int, int, int], float]
"""(stage, its first block, the one behind its last) -> what the stage costs."""


def cut(costs: Sequence[float], stages: int, first: float = 0.0, last: float = 0.0) -> tuple[range, ...]:
    """Divides blocks into `stages` runs of at least one block each, so that the costliest stage costs as little as
    possible; among those cuts, the most even one (least sum of squares).

    costs: of each block. first, last: what the first and the last stage cost besides (the embedding, the head); in
    whatever unit, for example FLOPs a token.
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
    """All that a stage may cost, ascending; before: the costs of the blocks, added up."""
    runs = {stop - start for i, start in enumerate(before) for stop in before[i + 1 :]}
    return sorted(run + extra for run in runs for extra in (0.0, first, last))


def _possible(blocks: int, stages: int, cost: Cost, limit: float) -> bool:
    """Whether no stage needs to cost more: each takes as many blocks as it may, and leaves one for each behind it."""
    start = 0
    for stage in range(stages - 1):
        stop, most = start, blocks - (stages - stage - 1)
        while stop < most and cost(stage, start, stop + 1) <= limit:
            stop += 1
        if stop == start:
            return False
        start = stop
    return cost(stages - 1, start, blocks) <= limit


def _most_even(blocks: int, stages: int, cost: Cost, limit: float) -> list[int]:
    """Where the stages end, so that none costs more than `limit` and the sum of squares is least."""
    totals: list[dict[int, tuple[float, int]]] = [{0: (0.0, 0)}]  # behind each stage: {end: (sum, its start)}
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
