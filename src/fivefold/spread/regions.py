"""Messages of tensor-parallel regions, as data: `parallel/` sends them, the operations of a model count them. No torch.

Between two regions an activation is whole on every rank, or with sequence parallelism (sp) cut along the sequence
(Megatron-LM, arXiv 1909.08053 and 2205.05198). Where a region begins, forward makes activations whole (`WHOLE`) and
backward sums their gradients (`SUM`). Where it ends, forward sums and backward makes whole.
"""

from __future__ import annotations

from typing import Literal

WHOLE: dict[bool, Literal["all_gather"] | None] = {False: None, True: "all_gather"}
"""By sp: the collective that makes an activation whole. None: every rank has it. With sp a layer keeps only its piece,
so backward gathers it once more, beside the matmul of the input's gradient."""
SUM: dict[bool, Literal["all_reduce", "reduce_scatter"]] = {False: "all_reduce", True: "reduce_scatter"}
"""By sp: the collective that adds up the ranks' partial sums, whole or each rank's piece."""


def sequence_axes(sp: bool) -> tuple[str, ...]:
    """The axes whose ranks have different tokens of the same sequences."""
    return ("cp", "tp") if sp else ("cp",)
