"""Properties of a training program that neither model nor layout determine: its states and their bytes, its fused
kernels, what it overlaps. The default is this program; others serve to predict published runs."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from fivefold.kernels import sizes
from fivefold.models.operations import Program
from fivefold.optim import DEFAULT, OPTIMIZERS
from fivefold.precision import DTYPES, MASTER, PRECISIONS

if TYPE_CHECKING:
    from fivefold.plan.cluster.devices import Cluster
    from fivefold.plan.documents import Documents


@dataclass(frozen=True)
class States:
    """Bytes per parameter of each state. `memory.state_bytes` shards them by ZeRO stage.

    working: the weights that compute. master: the weights that the optimizer updates; 0 if they are the working ones.
    moments: the optimizer's states, by its card; what some parameters have more is in `memory.more_states`. gradient:
    the sum over microbatches. reduce: bytes per element of a gradient message. cast: under ZeRO, working weights exist
    only gathered, cast from the masters (FSDP2), and whole gradients only while microbatches add up. copied:
    fp32 copies of what an update rounds (optim/updater.py), of a few parameters at a time.
    """

    working: float = DTYPES["bf16"].bytes
    master: float = DTYPES[MASTER].bytes
    gradient: float = DTYPES[MASTER].bytes
    moments: float = OPTIMIZERS[DEFAULT].bytes
    reduce: float = DTYPES[MASTER].bytes
    cast: bool = False
    copied: float = 0.0

    @property
    def optimizer(self) -> float:
        """Bytes that ZeRO 1 shards: masters and optimizer states."""
        return self.master + self.moments


def own_states(name: str) -> States:
    """The states of this program in a mode (parallel/data.py). `predict.for_recipe` sets the optimizer's."""
    mode = PRECISIONS[name]
    return States(
        working=DTYPES[mode.working].bytes,
        master=DTYPES[mode.master].bytes if mode.copies else 0,
        gradient=DTYPES[mode.gradient].bytes,
        cast=True,
    )


PAPER = States(gradient=2, reduce=2)
"""The mixed precision of the ZeRO paper (arXiv 1910.02054): 2 + 2 + 12 bytes."""


Partition = Literal["balanced", "even", "greedy"]
"""The rule for dividing blocks between pipeline stages. balanced (ours): the most expensive stage is as cheap as
possible. even (Megatron): the same number each. greedy (nanotron): stages are filled in order, each up to its share of
the weights, with the output layer counted."""


@dataclass(frozen=True)
class Software(Program):
    """A training program: its way of computing, communicating and storing.

    overlap_data: gradient sums and weight gathers overlap with computation. overlap_scatter: so do ZeRO's scatters of
    gradients. overlap_pipeline: so do transfers between
    stages. scatters_transfers: each tensor-parallel rank sends its slice of the replicated activation, and the
    receivers gather it. partition: how blocks are divided between stages. expert_load: load of the busiest expert rank
    relative to an even split; it is not known before the run. scatter: the collective that adds up shards of gradients.
    kernel: seconds between two kernels of the device. host: seconds the host takes to issue a block's forward
    (`host_tensor` more for each of its collectives), and as long again for its backward. step: fixed seconds per step.
    optimizer_passes: how often an unfused optimizer reads and writes its memory. optimizer: its name in the registry.
    checked: each update is checked by the largest weight (step/step.py).
    documents: those that attention does not cross; None: sequences are whole.
    """

    name: str = "fivefold"
    overlap_data: bool = True
    overlap_scatter: bool = True
    overlap_pipeline: bool = True
    scatters_transfers: bool = False
    partition: Partition = "balanced"
    expert_load: float = 1.0
    scatter: Literal["reduce_scatter", "all_to_all"] = "reduce_scatter"
    kernel: float = 1.5e-6
    host: float = 0.3e-3
    host_tensor: float = 0.0
    step: float = 5e-3
    optimizer_passes: float = 1.0
    optimizer: str = DEFAULT
    checked: bool = True
    documents: Documents | None = None
    states: dict[str, States] = field(default_factory=lambda: {name: own_states(name) for name in PRECISIONS})

    def check_traffic(self, on_cpu: bool) -> float:
        """Bytes per parameter that are read to check an update. on_cpu: it runs there."""
        return OPTIMIZERS[self.optimizer].check_traffic(on_cpu) if self.checked else 0.0


FIVEFOLD = Software()
"""This program on GPUs."""
FIVEFOLD_CPU = replace(
    FIVEFOLD,
    name="fivefold on CPUs",
    attention="blocks",
    masks="numbers",
    scatter="all_to_all",
    overlap_scatter=False,
    chunk_bytes=sizes.logits_bytes("cpu"),
    fp32_parts=False,
)
"""This program on CPUs. gloo has no reduce-scatter, so each rank sends every other one its part (parallel/zero.py).
FSDP2 reads the result at once where there are no streams."""


def of(cluster: Cluster) -> Software:
    """Returns this program as it runs on a cluster's devices."""
    return FIVEFOLD_CPU if cluster.machine and cluster.machine.on_cpu else FIVEFOLD
