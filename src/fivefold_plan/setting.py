"""All that a prediction depends on: a layout of a model on a cluster, by a training program, with the documents that
attention does not cross. And the model cut into stages."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, Literal

from fivefold.errors import UserError
from fivefold.kernels.sizes import any_length, logits_bytes
from fivefold.models.card import Card, card_of
from fivefold.models.operations import WHOLE_SEQUENCES, Kind, Operation, Program, Seen, Sizes, Work
from fivefold.models.recomputation import of_blocks
from fivefold.models.section import ModelSection
from fivefold.optim import DEFAULT as OPTIMIZER
from fivefold.optim import OPTIMIZERS
from fivefold.precision import DTYPES, MASTER, PRECISIONS, chosen
from fivefold.precision.fp8 import SCALINGS, row_bytes, scaling
from fivefold.recipe import Recipe
from fivefold.schedules.pipeline import DEFAULT, Schedule, stages_per_rank
from fivefold.sharding.layout import Layout, changed
from fivefold.sharding.layout_rules import on_nodes
from fivefold.sharding.parts import Shape, ends_of, sharing_group, stage_blocks, stages_of
from fivefold.sharding.sequence import RING, some_queries
from fivefold.sharding.sync import ONE_REPLICA_GROUP, ReplicaGroups
from fivefold.sharding.tiers import tiers
from fivefold.sharding.units import FsdpUnit, Keeping, compressed_buckets, keepings
from fivefold_plan.cluster.devices import Cluster, Device
from fivefold_plan.messages.communication import Group, group

if TYPE_CHECKING:
    from fivefold.kernels.tiling import Sample

SOURCES = {
    "data": "counted in the data",
    "assumed": "assumed",
    "unknown": "where documents end is not known (--document-tokens N)",
}


@dataclass(frozen=True, eq=False)
class Documents:
    """The documents of a run. sample: some of its sequences, of the model's length; None: not known."""

    source: Literal["data", "assumed", "unknown"]
    sample: Sample | None = None

    def pairs(self, model: ModelSection, window: int = 0) -> float:
        """The share of the pairs of tokens that see each other, within a window if there is one."""
        sample = (whole_sequence(model.seq_len) if window else None) if self.sample is None else self.sample
        return 1.0 if sample is None else sample.pairs(card_of(model).causal, window)

    def line(self, model: ModelSection, layout: Layout, seen: Seen) -> str:
        """What attention is priced by, in a sentence; nothing if each sequence is one document."""
        sample, pairs = self.sample, self.pairs(model)
        if sample is None:
            return f"whole sequences, an upper bound: {SOURCES[self.source]}"
        if pairs == 1:
            return ""
        work = f"{100 * seen.share:.3g}% of the work of whole sequences"
        if seen == WHOLE_SEQUENCES:
            some = some_queries(layout.cp, layout.cp_method)
            why = "its kernel for documents has no price" if some else "its kernel skips nothing"
            work = f"priced as whole sequences ({why})"
        return (
            f"documents of {sample.tokens:.0f} tokens on average in a sequence ({SOURCES[self.source]}): "
            f"{100 * pairs:.3g}% of the pairs, {work}"
        )

    def as_json(self, model: ModelSection, seen: Seen) -> dict[str, Any]:
        """`attention` of `fivefold plan --json`."""
        tokens, pairs = None if self.sample is None else self.sample.tokens, self.pairs(model)
        return {"documents": self.source, "document_tokens": tokens, "pairs": pairs, "work": seen.share}


@lru_cache(maxsize=16)
def whole_sequence(T: int, fixed: bool = False) -> Sample:
    """A sequence of one document. fixed: see `Tiling`."""
    import numpy as np

    from fivefold.kernels.tiling import Sample

    return Sample(np.zeros((1, T), np.int64), fixed)


def seen(
    documents: Documents | None, model: ModelSection, layout: Layout, B: int, element_size: float, program: Program,
    window: int = 0,
) -> Seen:  # fmt: skip
    """What the kernels compute that run there: on CPUs tiles, on GPUs in 16 bits document by document, in each turn of
    a ring as long as its slowest rank. Other kernels compute whole sequences. window: keys that a query sees; 0:
    all."""
    sample, several = documents.sample if documents else None, B > 1
    if sample is None and window:
        sample, B = whole_sequence(model.seq_len, documents is None), 1
    if sample is None:
        return WHOLE_SEQUENCES
    of = B, card_of(model).causal, layout, window
    if program.attention == "blocks":
        return Seen(sample.computed(*of[:2], int(element_size), *of[2:]))
    if program.attention == "flash" and any_length(element_size, model.head_width):
        if window and layout.cp > 1 and layout.cp_method == RING:  # tiles, which copy none in a row
            pairs = sample.computed(*of[:2], int(element_size), *of[2:], pairs=True)
            return Seen(pairs, min(sample.seen, window))
        some = several and some_queries(layout.cp, layout.cp_method)
        copied = sample.copied(*of) if some else (0.0, 0.0)
        return Seen(sample.in_turns(*of), min(sample.seen, window or sample.seen), copied)
    return WHOLE_SEQUENCES


def documents_of(recipe: Recipe, tokens: float | None = None) -> Documents | None:
    """The documents of a recipe: of `tokens` on average, else those of data that are tokenized already. None: they see
    each other. Raises UserError: `tokens` is out of range or has no effect."""
    T, masks = recipe.model.seq_len, recipe.data.document_masks
    if tokens is None:
        if not masks:
            return None
        from fivefold.data.facts import known, sample

        with suppress(UserError):  # tokens on this disk may be damaged, which is no fault of a plan
            if (data := known(recipe)) is not None and (counted := sample(recipe, data)) is not None:
                return Documents("data", counted)
        return Documents("unknown")
    if not masks:
        raise UserError(
            "--document-tokens has no effect with data.document_masks = false; leave one of them out"
        )
    if not 1 <= tokens <= T:
        raise UserError(
            f"--document-tokens {tokens:g}: must be from 1 to model.seq_len = {T}. Nearest valid: "
            f"{T if tokens > T else 1}"
        )
    from fivefold.kernels.tiling import assumed

    return Documents("assumed", assumed(T, tokens))


@dataclass(frozen=True)
class States:
    """Bytes per parameter of each state. `model_states.state_bytes` shards them by ZeRO stage.

    working: the weights that compute. rounded: copies of the blocks' matrices that are kept: in 8 bits
    (`Mode.weight`), or rounded along their other dim where modes are emulated. master: the weights that the optimizer
    updates; 0 if they are the working ones. moments: the optimizer's states, by its card; what some parameters have
    more is in `uneven_states`. gradient: the sum over microbatches. reduce: bytes per element of a gradient message.
    cast: under ZeRO, working weights exist only gathered, cast from the masters (FSDP2), and whole gradients only
    while microbatches add up. copied: fp32 copies of what an update rounds (optim/updater.py), of a few parameters at
    a time. estimate: of the curvature, from the passes that estimate it to the update.
    """

    working: float = DTYPES["bf16"].bytes
    master: float = DTYPES[MASTER].bytes
    gradient: float = DTYPES[MASTER].bytes
    moments: float = OPTIMIZERS[OPTIMIZER].bytes
    reduce: float = DTYPES[MASTER].bytes
    cast: bool = False
    copied: float = 0.0
    estimate: float = 0.0
    rounded: float = 0.0

    @property
    def optimizer(self) -> float:
        """Bytes that ZeRO 1 shards: masters and optimizer states."""
        return self.master + self.moments


def own_states(name: str) -> States:
    """The states of this program in a mode (parallel/data.py). `predict.for_recipe` sets the optimizer's."""
    mode = PRECISIONS[name]
    return States(
        working=DTYPES[mode.working].bytes,
        rounded=DTYPES[mode.weight].bytes if mode.weight else DTYPES[mode.working].bytes * mode.along,
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
    gradients. overlap_pipeline: so do transfers between stages. scatters_transfers: each tensor-parallel rank sends its
    slice of the replicated activation, and the receivers gather it. partition: how blocks are divided between stages.
    expert_load: load of the busiest expert rank relative to an even split; it is not known before the run. scatter: the
    collective that adds up shards of gradients. kernel: seconds between two kernels of the device. host: seconds the
    host takes to issue a block's forward, and as long again for its backward. step: fixed seconds per step.
    optimizer_passes: how often an unfused optimizer reads and writes its memory. optimizer: its name in the registry.
    estimates: forwards and backwards per step that only estimate the curvature. checked: each update is checked by the
    largest weight (step/step.py). fp8_dispatch: rows travel to experts in 8 bits. fp8_scaling, fp8_skips: the recipe's,
    the latter of first and last blocks. delayed: numbers of 8 bits have scales of earlier steps (Transformer Engine),
    so each activation, gradient, and once per step each weight, is read once and written in the orders of all products.
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
    step: float = 5e-3
    optimizer_passes: float = 1.0
    optimizer: str = OPTIMIZER
    estimates: float = 0.0
    checked: bool = True
    fp8_dispatch: bool = False
    fp8_scaling: str = SCALINGS[0]
    fp8_skips: tuple[int, int] = (0, 0)
    delayed: bool = False
    documents: Documents | None = None
    states: dict[str, States] = field(default_factory=lambda: {name: own_states(name) for name in PRECISIONS})

    def check_traffic(self, one_pass: bool) -> float:
        """Bytes per parameter that are read to check an update. one_pass: see the card's."""
        return OPTIMIZERS[self.optimizer].check_traffic(one_pass) if self.checked else 0.0


FIVEFOLD = Software(compiles=True, rows_beside=True, batch_first=True)
"""This program on GPUs."""
FIVEFOLD_CPU = replace(
    FIVEFOLD,
    name="fivefold on CPUs",
    attention="blocks",
    masks="numbers",
    compiles=False,
    scatter="all_to_all",
    overlap_scatter=False,
    chunk_bytes=logits_bytes("cpu"),
    loss_on_gpu=False,
)
"""This program on CPUs. gloo has no reduce-scatter, so each rank sends every other one its part (parallel/zero.py).
FSDP2 reads the result at once where there are no streams."""


def software_of(cluster: Cluster) -> Software:
    """This program as it runs on a cluster's devices."""
    return FIVEFOLD_CPU if cluster.machine and cluster.machine.on_cpu else FIVEFOLD


@dataclass(frozen=True)
class Setting:
    """Everything that a price depends on. layout: of one replica group, where several train apart. cluster: of all of
    them.
    microbatches: of the rank that has most. sequences: of the global batch, if ranks have unequally many."""

    model: ModelSection
    layout: Layout
    cluster: Cluster
    software: Software
    sizes: Sizes
    mode: str
    microbatches: int
    replica_groups: ReplicaGroups = ONE_REPLICA_GROUP
    sequences: int | None = None

    @property
    def dtype(self) -> str:
        """The dtype of activations."""
        return PRECISIONS[self.mode].working

    @property
    def rate(self) -> str:
        """The dtype of products, by which the device's peak is listed."""
        return PRECISIONS[self.mode].rate_on(self.cluster.device.peak)

    @property
    def states(self) -> States:
        """Bytes per parameter."""
        return self.software.states[self.mode]

    @property
    def fp8_scaling(self) -> str:
        """What shares a scale in this mode; "": it is none of fp8, or scales are delayed."""
        return "" if self.software.delayed else scaling(PRECISIONS[self.mode], self.software.fp8_scaling)

    def narrow(self, unit: FsdpUnit) -> dict[str, tuple[int, int]]:
        """The parameters of a unit that are gathered in 8 bits, with their tiles."""
        rounded = _rounded(self.model, *self.software.fp8_skips) if self.fp8_scaling else ()
        return unit.narrow(self.fp8_scaling, rounded, self.layout)

    @property
    def gathered(self) -> float:
        """Bytes of an element in gathers, on average over the model."""
        if not self.fp8_scaling or self.layout.shards == 1:
            return self.states.working
        x, names = self.layout, ("tp", "ep", "ep_fold", "sp", "zeropp", "offload")
        one = changed(Layout(), dp_shard=x.shards, zero=3, **{name: getattr(x, name) for name in names})
        return _gathered(self.model, one, self.fp8_scaling, self.software.fp8_skips, self.states.working)

    @cached_property
    def rounded_once(self) -> tuple[bool, bool]:
        """True if a replica rounds its weights once per step (parallel/data.py): dense ones, experts. Each matmul
        rounds those that are gathered or streamed."""
        held = PRECISIONS[self.mode].kernel and not tiers(self.layout.offload, self.states.master > 0).streams
        one, two = (sharing_group(self.layout, expert)[1] == 1 for expert in (False, True))
        every = self.software.delayed or not self.layout.zero
        return bool(held and (every or one)), bool(held and (every or two))

    @property
    def kept_rounded(self) -> float:
        """Bytes per element of what a replica keeps of a dense weight that it rounds once per step. Emulated, as for
        experts, the first rounding takes the place of the working weights. A device that multiplies 8 bits reads them
        in two orders."""
        emulated = self.sizes.narrow == self.sizes.e or PRECISIONS[self.mode].weight
        return self.states.rounded if emulated else 2 * self.sizes.narrow

    @property
    def rounding_traffic(self) -> float:
        """Bytes that rounding an element moves: it is read twice, for the scale and for the number; or once, and
        written in two orders."""
        once = self.software.delayed
        return (1 if once else 2) * self.sizes.e + (2 if once else 1) * self.sizes.narrow

    @cached_property
    def card(self) -> Card:
        return card_of(self.model)

    @cached_property
    def work(self) -> Work:
        """All operations of a rank for one microbatch."""
        return self.card.work(self.sizes, self.software)

    def kind(self, second: bool, recompute: str) -> Kind:
        """The kind of a block with this mode of recomputation. second: see `Card.second`."""
        experts = self.card.mixed[self.card.second.index(second)]
        return second, self.software.compiles and not self.layout.compiles(experts, recompute)

    @property
    def last_block(self) -> list[Operation]:
        """The operations of the model's last block. A model with experts has them there."""
        return self.work.block[self.kind(self.card.second[-1], self.recompute[-1])]

    @property
    def recompute(self) -> tuple[str, ...]:
        """The mode of recomputation of each block."""
        return of_blocks(self.layout.recompute, self.model.blocks)

    @property
    def activation(self) -> float:
        """Bytes of the activation between two blocks."""
        return self.sizes.n * self.model.dim * self.sizes.e

    @property
    def passes(self) -> int:
        """Microbatches that pass a pipeline stage: of two copies of the model, each has half of them."""
        return -(-self.microbatches // self.layout.copies)

    @cached_property
    def stages(self) -> tuple[range, ...]:
        """The blocks of each pipeline stage."""
        return stages(self.model, self.layout, self.software.partition)

    def blocks(self, position: int) -> list[int]:
        """The blocks of a pipeline position, in the order of its stages."""
        return [number for stage in stages_of(self.layout, position) for number in self.stages[stage]]

    def ends(self, position: int) -> tuple[bool, bool]:
        """Whether a pipeline position has the first stage, and the last."""
        return ends_of(self.layout, stages_of(self.layout, position))

    def keepings(self, position: int) -> list[Keeping]:
        """What the ranks of a pipeline position gather, scatter and sum together."""
        return keepings(self.card, self.layout, stages_of(self.layout, position), self.stages)

    def compressed_buckets(self, position: int) -> Iterator[tuple[str, int, tuple[Shape, ...]]]:
        """(group, its number of ranks, shapes) of each bucket whose sum the ranks of a position compress."""
        return compressed_buckets(self.card, self.layout, stages_of(self.layout, position), self.stages)

    def schedule(self, microbatches: int) -> Schedule:
        """The pipeline schedule of so many microbatches."""
        return self.layout.pipeline(microbatches)

    def group(self, axis: str) -> Group:
        """The ranks of an axis, "replica_groups" included."""
        if axis == "replica_groups":
            count = self.replica_groups.count
            return Group(count, max(1, min(count, self.cluster.per_node // self.layout.ranks)))
        return group(self.layout, self.cluster, axis)


def setting(
    model: ModelSection,
    layout: Layout,
    cluster: Cluster,
    B: int,
    microbatches: int,
    mode: str = "bf16",
    software: Software = FIVEFOLD,
    sequences: int | None = None,
) -> Setting:
    """Builds a setting. B: sequences per microbatch. sequences: see `Setting`. The cluster is resized to the layout's
    ranks."""
    x, card, documents = layout, PRECISIONS[mode], software.documents
    load = layout.expert_buffer or software.expert_load  # messages are filled up to the buffer
    e, chunks = DTYPES[card.working].bytes, x.expert_chunks if x.ep > 1 else 1
    # emulated: the working dtype
    narrow = DTYPES[card.rate_on(cluster.device.peak)].bytes if card.kernel else 0.0
    asked, window = (documents, model, x, B, e, software), card_of(model).narrow
    every = {"seen": seen(*asked), "near": seen(*asked, window) if window else WHOLE_SEQUENCES}
    sent = float(row_bytes(model.dim)) if software.fp8_dispatch and "fp8_dispatch" in card.fields else 0.0
    how = {name: getattr(x, name) for name in ("tp", "cp", "ep", "sp", "cp_method", "sp_regather")}
    how |= {"way": software.tensor, "tp_chunks": software.tensor.pieces or x.tp_chunks}
    sizes = Sizes(model, B, e=e, load=load, chunks=chunks, narrow=narrow, dispatched=sent, **every, **how)
    cluster = cluster.for_ranks(layout.ranks)
    layout = on_nodes(layout, cluster.per_node)
    return Setting(model, layout, cluster, software, sizes, mode, microbatches, sequences=sequences)


def mode_of(wanted: str, cluster: Cluster) -> str:
    """The mode that `precision.mode` stands for. Clusters have a rate of bf16 if it is faster than fp32. Raises
    UserError: the planner does not price it there."""
    device = cluster.device
    mode = chosen(wanted, "bf16" in device.peak)
    lacks = _lacks(mode, device) if mode in PRECISIONS else ""
    if lacks or mode not in PRECISIONS:
        known = ", ".join(name for name in PRECISIONS if not _lacks(name, device))
        why = f" {device.name} has no rate of {lacks} (`fivefold clusters`);" if lacks else ""
        raise UserError(f"precision.mode = {mode}:{why} the planner prices {known} on {device.name}")
    return mode


def _lacks(mode: str, device: Device) -> str:
    """The dtype that a mode needs and the device has no rate of."""
    needed = (PRECISIONS[mode].working, PRECISIONS[mode].rate_on(device.peak))
    return next((dtype for dtype in needed if dtype not in device.peak), "")


def stages(model: ModelSection, layout: Layout, how: Partition = "balanced") -> tuple[range, ...]:
    """The blocks of each stage, cut as the trainer does or as other programs do (see `Partition`)."""
    name = layout.schedule if layout.pp > 1 else DEFAULT
    return _stages(model, layout.pp, name, layout.virtual_stages, layout.bare_ends, how)


@lru_cache(maxsize=4096)
def _stages(
    model: ModelSection, pp: int, name: str, virtual_stages: int, bare_ends: bool, how: Partition
) -> tuple[range, ...]:
    if how == "balanced":
        layout = Layout(pp=pp, schedule=name, virtual_stages=virtual_stages, bare_ends=bare_ends)
        return stage_blocks(card_of(model), layout)
    count = pp * stages_per_rank(name, virtual_stages) if pp > 1 else 1
    if how == "even":
        each = model.layers / count
        cut = [range(round(i * each), round((i + 1) * each)) for i in range(count)]
        return (*cut[:-1], range(cut[-1].start, model.blocks))
    # greedy: fills stages in order, each until it exceeds its share of the matmul weights, output layer included
    layer = sum(
        math.prod(s) for n, s in card_of(model).parameters.items() if n.startswith("blocks.0.") and len(s) > 1
    )
    total = layer * model.layers + (model.vocab_size or 0) * model.dim
    cut, start = [], 0
    for stage in range(count - 1):
        stop = min(model.layers, math.floor(total * (stage + 1) / count / layer) + 1)
        cut.append(range(start, max(start, stop)))
        start = max(start, stop)
    return (*cut, range(start, model.blocks))


@lru_cache(maxsize=1024)
def _rounded(model: ModelSection, first: int, last: int) -> frozenset[str]:
    """The matrices that layers round, but for those of so many first and last blocks."""
    card, skipped = card_of(model), (*range(first), *range(model.layers - last, model.blocks * (last > 0)))
    outside = tuple(f"{card.stack}.{number}." for number in skipped)
    return frozenset(name for name in card.rounded if not name.startswith(outside))


@lru_cache(maxsize=1024)
def _gathered(
    model: ModelSection, layout: Layout, scaling: str, skips: tuple[int, int], width: float
) -> float:
    """`Setting.gathered` of a model in one stage."""
    rounded = _rounded(model, *skips)
    units = [unit for keeping in keepings(card_of(model), layout, [0]) for unit in keeping.units]
    sent = sum(unit.message(unit.narrow(scaling, rounded, layout), width) for unit in units)
    return sent / sum(sum(unit.shares) for unit in units)
