"""Messages of the forward and backward passes, as data: `parallel/` sends them, the operations of a model
(`models/work.py`) count them. No torch.

Between two tensor-parallel regions an activation is whole on every rank, or with sequence parallelism (sp) cut along
the sequence (Megatron-LM, arXiv 1909.08053 and 2205.05198). Where a region begins, forward makes activations whole
(`WHOLE`) and backward sums their gradients (`SUM`). Where it ends, forward sums and backward makes whole. The other
messages are `Collective`s.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

What = Literal["all_gather", "all_reduce", "reduce_scatter", "all_to_all"]

WHOLE: dict[bool, What | None] = {False: None, True: "all_gather"}
"""By sp: the collective that makes an activation whole. None: every rank has it."""
SUM: dict[bool, What] = {False: "all_reduce", True: "reduce_scatter"}
"""By sp: the collective that adds up the ranks' partial sums, whole or each rank's piece."""
AGAIN: dict[bool, What | None] = {False: None, True: WHOLE[True]}
"""By sp_regather: the collective that makes the input of a region's first matmul whole again in backward, beside the
matmul of the input's gradient. Megatron-LM does so. None: forward keeps the whole input, and sp sends as many bytes as
the all-reduces would."""


@dataclass(frozen=True)
class Collective:
    """A collective of forward on an axis, and the one that sends its gradient in backward.

    number: bytes of each number that is sent; 0: those of the compute dtype.
    """

    axis: str
    forward: What
    backward: What | None = None
    number: int = 0


HEADS = Collective("cp", "all_to_all", "all_to_all")
"""Ulysses: all heads of some tokens for some heads of all tokens, and back."""
STATISTICS = Collective("tp", "all_gather", number=4)
"""What ranks with parts of the vocabulary tell each other: `LOSS_STATISTICS` numbers per row of logits."""
LOSS_STATISTICS = 3
"""The largest logit, the sum of exponentials, the target's logit."""
SQUARES = Collective("tp", "all_reduce", "all_reduce", number=4)
"""Sums for the norm of a vector whose features the ranks share: in forward of its squares, in backward of its products
with the gradient. One number per vector."""
TARGETS = Collective("cp", "all_reduce", number=8)
"""The number of targets: ranks with parts of a sequence have different ones."""
COUNTS = Collective("ep", "all_to_all", number=8)
"""Rows for each expert. They go before the rows."""
ROWS = Collective("ep", "all_to_all", "all_to_all")
"""Rows on their way to the experts, and results on their way back."""


def loads(sp: bool) -> list[Collective]:
    """Sums of the rows that chose each expert, over the axes whose ranks have different tokens of one sequence."""
    return [Collective(axis, "all_reduce", number=8) for axis in (("cp", "tp") if sp else ("cp",))]
