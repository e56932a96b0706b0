"""A microbatch: what a rank gives its model at once."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from fivefold.kernels.documents import Documents


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
