"""A microbatch: what a rank gives its model at once; and a data-parallel rank's microbatches of one step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fivefold.kernels.documents import Documents
from fivefold.parallel.mesh import Mesh
from fivefold.sharding.parts import token_spans


class Microbatch(NamedTuple):
    """Sequences that a rank computes at once.

    inputs, targets: (B, T) int64, this rank's columns. The loss is the mean over targets that are not negative.
    documents: the documents in these sequences, in all of their columns; None: a sequence is one document. weight: the
    factor of the mean loss: this microbatch's targets, relative to the average microbatch of the global batch. So a
    step's loss is the mean over all of its targets, wherever they lie.
    """

    inputs: Tensor
    targets: Tensor
    documents: Documents | None = None
    weight: float = 1.0

    def options(self, positions_T: Tensor | None) -> dict[str, Any]:
        """The model's arguments besides tokens. positions_T: of this rank's columns; None: 0, 1, 2, ..."""
        given = {"positions_T": positions_T, "documents": self.documents}
        return {name: value for name, value in given.items() if value is not None}


class Share(list[Microbatch]):
    """The microbatches of a rank, which may have fewer than others (sharding/layout.py).

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


def take(tokens_BT: Tensor, mesh: Mesh) -> Tensor:
    """This rank's columns of inputs or targets: (B, t)."""
    if mesh.size("cp") == 1:
        return tokens_BT
    mine = token_spans(mesh.layout, tokens_BT.shape[1], mesh.index("cp"))
    return torch.cat([tokens_BT[:, start:stop] for start, stop in mine], dim=1)
