"""Putting it together: ranks on several axes, who sums what with whom, and which layouts there are.

Axes are in the order (pp, dp, tp): neighbours of the tensor axis have neighbouring ranks. Time: three quarters of an
hour. Data: none. Plain Python.
"""


def coordinates(rank: int, sizes: tuple[int, int, int]) -> tuple[int, int, int]:
    """The indices (pp, dp, tp) of a rank."""
    _, dp, tp = sizes
    return rank // (dp * tp), rank // tp % dp, rank % tp


def group(rank: int, axis: int, sizes: tuple[int, int, int]) -> list[int]:
    """The ranks, in order, that have the same indices as this rank on all other axes. axis: 0 is pp, 1 dp, 2 tp."""
    mine = coordinates(rank, sizes)
    found = []
    for other in range(sizes[0] * sizes[1] * sizes[2]):
        theirs = coordinates(other, sizes)
        if all(theirs[i] == mine[i] for i in range(3) if i != axis):
            found.append(other)
    return found


def layouts(ranks: int, per_node: int, heads: int, layers: int, batch: int) -> list[tuple[int, int, int]]:
    """All (pp, dp, tp) for so many ranks, sorted: tp divides the heads and stays within a node, pp divides the layers,
    dp divides the batch."""
    found = []
    for pp in range(1, ranks + 1):
        for tp in range(1, per_node + 1):
            if ranks % (pp * tp) or per_node % tp or heads % tp or layers % pp:
                continue
            dp = ranks // (pp * tp)
            if batch % dp == 0:
                found.append((pp, dp, tp))
    return sorted(found)


def weights_per_rank(sizes: tuple[int, int, int], psi: float, zero3: bool) -> float:
    """Parameters that a rank stores: pp and tp divide the model; with ZeRO 3 dp does, too."""
    pp, dp, tp = sizes
    return psi / (pp * tp * (dp if zero3 else 1))


def step_time(sizes: tuple[int, int, int], batch: int, block: float, message: float, layers: int) -> float:
    """Seconds of a step, roughly. A sequence is a microbatch. A block computes it in `block` seconds on one rank, and
    tp divides that. If tp > 1, a block also waits `message` seconds. A pipeline adds its bubble, (pp - 1) / m of the
    time of the rank's own m microbatches."""
    pp, dp, tp = sizes
    microbatches = batch // dp
    each = (block / tp + (message if tp > 1 else 0.0)) * layers / pp
    return microbatches * each * (1 + (pp - 1) / microbatches)
