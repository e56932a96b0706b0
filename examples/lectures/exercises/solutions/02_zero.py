"""ZeRO: what a rank stores, which part it owns, and what it sends.

Time: half an hour. Data: none. Plain Python.
"""

import math


def bytes_per_rank(psi: float, ranks: int, stage: int) -> float:
    """Bytes of states that a rank stores with `psi` parameters: a weight and a gradient of 2 bytes each, and 12 for
    Adam's master and moments. stage: 0 to 3."""
    weights, gradients, adam = 2 * psi, 2 * psi, 12 * psi
    if stage >= 1:
        adam /= ranks
    if stage >= 2:
        gradients /= ranks
    if stage >= 3:
        weights /= ranks
    return weights + gradients + adam


def owned(sizes: list[int], ranks: int, rank: int) -> list[tuple[int, int, int]]:
    """The rank's part of each parameter, as (parameter, first element, end), without empty parts. The parameters, one
    after the other, are a flat vector of sum(sizes) elements. It is filled up to a multiple of the ranks, and cut into
    equal parts."""
    part = -(-sum(sizes) // ranks)
    low, high = rank * part, (rank + 1) * part
    found, at = [], 0
    for number, size in enumerate(sizes):
        first, end = max(low - at, 0), min(high - at, size)
        if first < end:
            found.append((number, first, end))
        at += size
    return found


def sent(stage: int, microbatches: int) -> int:
    """What a rank sends in a step, in units of psi elements, on many ranks: an all-gather and a reduce-scatter send one
    unit each. Stage 1 scatters gradients once per step, stages 2 and 3 once per microbatch. Stage 3 gathers weights in
    each forward and in each backward, the others once per step."""
    if stage == 3:
        return 3 * microbatches
    return 1 + (microbatches if stage == 2 else 1)


def fewest_ranks(psi: float, memory: float, stage: int) -> int | None:
    """The fewest ranks with which a rank's states take at most `memory` bytes. None: no number is enough."""
    least = {0: 16 * psi, 1: 4 * psi, 2: 2 * psi, 3: 0.0}[stage]
    divided = 16 * psi - least
    if least + divided <= memory:
        return 1
    if least >= memory:
        return None
    return math.ceil(divided / (memory - least))
