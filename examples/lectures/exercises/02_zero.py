"""ZeRO: what a rank stores, which part it owns, and what it sends.

Time: half an hour. Data: none. Plain Python.
"""


def bytes_per_rank(psi: float, ranks: int, stage: int) -> float:
    """Bytes of states that a rank stores with `psi` parameters: a weight and a gradient of 2 bytes each, and 12 for
    Adam's master and moments. stage: 0 to 3."""
    raise NotImplementedError


def owned(sizes: list[int], ranks: int, rank: int) -> list[tuple[int, int, int]]:
    """The rank's part of each parameter, as (parameter, first element, end), without empty parts. The parameters, one
    after the other, are a flat vector of sum(sizes) elements. It is filled up to a multiple of the ranks, and cut into
    equal parts."""
    raise NotImplementedError


def sent(stage: int, microbatches: int) -> int:
    """What a rank sends in a step, in units of psi elements, on many ranks: an all-gather and a reduce-scatter send one
    unit each. Stage 1 scatters gradients once per step, stages 2 and 3 once per microbatch. Stage 3 gathers weights in
    each forward and in each backward, the others once per step."""
    raise NotImplementedError


def fewest_ranks(psi: float, memory: float, stage: int) -> int | None:
    """The fewest ranks with which a rank's states take at most `memory` bytes. None: no number is enough."""
    raise NotImplementedError
