"""Putting it together: ranks on several axes, who sums what with whom, and which layouts there are.

Axes are in the order (pp, dp, tp): neighbours of the tensor axis have neighbouring ranks. Time: three quarters of an
hour. Data: none. Plain Python.
"""


def coordinates(rank: int, sizes: tuple[int, int, int]) -> tuple[int, int, int]:
    """The indices (pp, dp, tp) of a rank."""
    raise NotImplementedError


def group(rank: int, axis: int, sizes: tuple[int, int, int]) -> list[int]:
    """The ranks, in order, that have the same indices as this rank on all other axes. axis: 0 is pp, 1 dp, 2 tp."""
    raise NotImplementedError


def layouts(ranks: int, per_node: int, heads: int, layers: int, batch: int) -> list[tuple[int, int, int]]:
    """All (pp, dp, tp) for so many ranks, sorted: tp divides the heads and stays within a node, pp divides the layers,
    dp divides the batch."""
    raise NotImplementedError


def weights_per_rank(sizes: tuple[int, int, int], psi: float, zero3: bool) -> float:
    """Parameters that a rank stores: pp and tp divide the model; with ZeRO 3 dp does, too."""
    raise NotImplementedError


def step_time(sizes: tuple[int, int, int], batch: int, block: float, message: float, layers: int) -> float:
    """Seconds of a step, roughly. A sequence is a microbatch. A block computes it in `block` seconds on one rank, and
    tp divides that. If tp > 1, a block also waits `message` seconds. A pipeline adds its bubble, (pp - 1) / m of the
    time of the rank's own m microbatches."""
    raise NotImplementedError
