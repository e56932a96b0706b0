"""A data-parallel rank's microbatches of one step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from fivefold.parallel.mesh import Mesh
from fivefold.parallel.microbatch import Microbatch


class Share(list[Microbatch]):
    """The microbatches of a rank, which may have fewer than others (spread/shares.py).

    counted: how many of them count. Empty ones follow, without targets, where ranks exchange something in every
    microbatch. total: those that count on all data-parallel ranks of the site. A microbatch's
    `weight` is relative to their average.
    """

    def __init__(self, microbatches: Iterable[tuple[Any, ...]], counted: int, total: int):
        super().__init__(Microbatch(*microbatch) for microbatch in microbatches)
        self.counted, self.total = counted, total

    @classmethod
    def of(cls, microbatches: Sequence[tuple[Any, ...]], mesh: Mesh) -> Share:
        """The share itself. A plain list stands for one of equal shares."""
        if isinstance(microbatches, Share):
            return microbatches
        count = len(microbatches)
        return cls(microbatches, count, count * mesh.size("dp"))
