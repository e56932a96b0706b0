"""What a training program does that neither model nor layout say: which states it keeps, in how many bytes, what it
fuses, what it overlaps. Ours by default; others' for predicting published runs."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from fivefold.plan.clusters import Cluster


@dataclass(frozen=True)
class States:
    """Bytes a parameter of each state, and the ZeRO stage from which ranks share it.

    working: the weights that compute. master: those that the optimizer updates, 0 where they are the same. moments: of
    the optimizer. gradient: where microbatches add up. reduce: bytes an element that a rank sends of a gradient. cast:
    under ZeRO the working weights exist only gathered, cast from the masters (FSDP2), and whole gradients only while
    microbatches add up.
    """

    working: float = 2
    master: float = 4
    gradient: float = 4
    moments: float = 8
    reduce: float = 4
    cast: bool = False

    @property
    def optimizer(self) -> float:
        """What ZeRO 1 shares: masters and moments."""
        return self.master + self.moments


BF16 = States(cast=True)
"""Ours in bf16: fp32 masters, gradients and moments beside the bf16 weights (precision/weights.py)."""
FP32 = States(master=0, working=4, cast=True)
"""Ours in fp32: the masters compute."""
PAPER = States(working=2, master=4, gradient=2, moments=8, reduce=2)
"""The mixed precision of the ZeRO paper (arXiv 1910.02054): 2 + 2 + 12 bytes."""


Partition = Literal["balanced", "even", "greedy"]
"""How blocks are divided between pipeline stages: so that the costliest costs least (ours); equally many each
(Megatron); filled in order up to each one's share of the weights, the output layer counted (nanotron)."""


@dataclass(frozen=True)
class Software:
    """How a program computes.

    attention: "flash" keeps no probabilities, "plain" does. probability_dropout: drops attention's probabilities, too.
    selective: what "selective" recomputes: the "core" of attention only (arXiv 2205.05198), or of each "sublayer" what
    follows its first matrix product (parallel/recompute.py), or every second product and what lies between products
    ("operations": torchtitan's default, which keeps attention's result). fused: element-wise operations that follow
    one another are one pass over memory. loss: logits exist by "chunks"; or whole, in the compute dtype ("fused": the
    gradient takes their place) or with fp32 copies ("plain"). overlap_data: gradients are summed, and shards gathered,
    while others compute. overlap_pipeline: so are transfers between stages. scatters_transfers: each tensor-parallel
    rank sends its part of what all have, which they gather on the other side. partition: how blocks are divided between
    stages. expert_load: rows that the busiest rank's experts get, by the even share: nobody knows it before the run.
    scatter: the collective that adds up shards of gradients. memory: from formulas (memory.py), or by going
    through the step tensor by tensor (rehearsal.py), which knows this program on CPUs only.
    kernel: seconds between two kernels of the device. host: seconds the processor takes to issue a block's forward
    (`host_tensor` more for each of its collectives), and as long to issue its backward. step: seconds a step besides.
    optimizer_passes: how often an unfused optimizer goes over its memory.
    """

    name: str = "fivefold"
    attention: Literal["flash", "plain"] = "flash"
    probability_dropout: bool = False
    selective: Literal["core", "sublayer", "operations"] = "sublayer"
    fused: bool = True
    loss: Literal["chunks", "fused", "plain"] = "chunks"
    chunk_bytes: float = 16 * 2**20
    overlap_data: bool = True
    overlap_pipeline: bool = True
    scatters_transfers: bool = False
    partition: Partition = "balanced"
    expert_load: float = 1.0
    scatter: Literal["reduce_scatter", "all_to_all"] = "reduce_scatter"
    memory: Literal["formulas", "rehearsal"] = "formulas"
    kernel: float = 1.5e-6
    host: float = 0.3e-3
    host_tensor: float = 0.0
    step: float = 5e-3
    optimizer_passes: float = 1.0
    states: dict[str, States] = field(default_factory=lambda: {"bf16": BF16, "fp16": BF16, "fp32": FP32})


FIVEFOLD = Software()
"""This program on GPUs."""
FIVEFOLD_CPU = replace(FIVEFOLD, name="fivefold on CPUs", scatter="all_to_all", memory="rehearsal")
"""This program on CPUs: gloo has no reduce-scatter, so each rank sends every other one its part (parallel/zero.py)."""


def of(cluster: Cluster) -> Software:
    """This program on a cluster's devices."""
    return FIVEFOLD_CPU if cluster.machine and cluster.machine.on_cpu else FIVEFOLD
