"""Memory per rank: states from the parameter table, activations from the operations, live microbatches from the
schedule, and buffers at the moment with the largest sum. Search, `plan` and plan.json share this formula."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

from fivefold.models.card import card_of
from fivefold.models.operations import Sizes, Work
from fivefold.models.recomputation import of_blocks
from fivefold.models.section import ModelSection
from fivefold.optim import OPTIMIZERS, placing
from fivefold.plan import operations
from fivefold.plan.operations import Sums
from fivefold.plan.partition import schedule, stages
from fivefold.plan.software import Partition, Software, States
from fivefold.precision import DTYPES, MASTER
from fivefold.schedules.collectives.choose import AUTO, LIBRARY, chosen
from fivefold.schedules.collectives.messages import messages_of
from fivefold.schedules.compression import compressor
from fivefold.schedules.memory_timeline import CATEGORIES
from fivefold.schedules.pipeline import SENDS_PER_RANK, Schedule, few, holds_all, peak_live
from fivefold.spread.layout import Layout, groups
from fivefold.spread.matrices import sizes_sent
from fivefold.spread.parts import TIED, held, sharing_group, size_of, stages_of
from fivefold.spread.units import (
    Local,
    buffer_order,
    compressed_buckets,
    keepings,
    local_parameters,
    scattered_once,
    syncs,
    updated_together,
)
from fivefold.spread.zeropp import zeropp

ERROR = 0.015
"""Mean error of the formula against tracked peaks on CPUs (benchmarks/planner/own_memory.py), rounded up."""
PUBLISHED_ERROR = 0.027
"""Its mean error on GPUs, against published peaks of another program (benchmarks/planner/published.py, SimuMax)."""


@dataclass(frozen=True)
class Elements:
    """Elements of some parameters on a rank.

    computes: elements the rank computes with, after tensor and expert parallelism. keeps: elements it stores under
    ZeRO. largest: elements of the largest parameter. experts, experts_keep: the part of both in routed experts, which
    have groups of their own if ep > 1. frozen: the part of these four that is not trained.
    """

    computes: float = 0
    keeps: float = 0
    largest: float = 0
    experts: float = 0
    experts_keep: float = 0
    frozen: tuple[float, float, float, float] = (0, 0, 0, 0)

    def __add__(self, other: Elements) -> Elements:
        return Elements(
            self.computes + other.computes,
            self.keeps + other.keeps,
            max(self.largest, other.largest),
            self.experts + other.experts,
            self.experts_keep + other.experts_keep,
            self.frozen
            if not any(other.frozen)
            else tuple(a + b for a, b in zip(self.frozen, other.frozen, strict=True)),  # pyright: ignore
        )

    def groups(self) -> tuple[tuple[float, float, bool], tuple[float, float, bool]]:
        """(elements computed with, elements stored, False) of dense parameters, and (.., .., True) of experts."""
        return (
            (self.computes - self.experts, self.keeps - self.experts_keep, False),
            (self.experts, self.experts_keep, True),
        )

    def frozen_groups(self) -> tuple[tuple[float, float], tuple[float, float]]:
        """(elements computed with, elements stored) of frozen dense parameters, and of frozen experts."""
        computes, keeps, experts, experts_keep = self.frozen
        return (computes - experts, keeps - experts_keep), (experts, experts_keep)


@dataclass(frozen=True)
class Memory:
    """Bytes on the first rank of a pipeline position; no other rank there has more.

    params: weights that compute. gradients: the fp32 sums. optimizer: moments, and fp32 masters that do not compute.
    activations: tensors that forward, or its recomputation, keeps for backward. buffers: the rest.
    host, disk: what is offloaded there; not in the total.
    """

    params: float
    gradients: float
    optimizer: float
    activations: float
    buffers: float
    host: float = 0.0
    disk: float = 0.0

    @property
    def total(self) -> float:
        return sum(getattr(self, name) for name in CATEGORIES)

    def with_outer(self, kept: float, sent: float, overlap: bool) -> Memory:
        """The same with the states of an outer loop. Its messages go out when no activation is left, or overlap."""
        more = sent if overlap else max(0.0, sent - self.activations - self.buffers)
        return replace(self, optimizer=self.optimizer + kept, buffers=self.buffers + more)

    def as_json(self) -> dict[str, int]:
        away = [name for name in ("host", "disk") if getattr(self, name)]
        return {name: round(getattr(self, name)) for name in (*CATEGORIES, "total", *away)}


def state_bytes(
    bytes_per_parameter: States,
    zero: int,
    computes: float,
    keeps: float,
    microbatches: int = 2,
    pp: int = 1,
) -> tuple[float, float, float]:
    """Bytes of weights, gradients and optimizer states. Each is whole (`computes` elements) below the ZeRO stage that
    shards it, and `keeps` elements from that stage on (arXiv 1910.02054, figure 1). FSDP2 (`States.cast`) differs in
    two ways: the gathered weights of stage 3 are buffers, and gradients that are scattered once per step are whole
    until then."""
    b = bytes_per_parameter
    if b.cast and zero:
        whole = scattered_once(zero, pp) and microbatches > 1
        gathered = computes if zero < 3 else 0.0
        own = 0.0 if b.master else b.working * keeps
        return b.working * gathered + own, b.gradient * (computes if whole else keeps), b.optimizer * keeps
    return (
        b.working * (keeps if zero >= 3 else computes),
        b.gradient * (keeps if zero >= 2 else computes),
        b.optimizer * (keeps if zero >= 1 else computes),
    )


@lru_cache(maxsize=4096)
def more_states(optimizer: str, model: ModelSection, layout: Layout, position: int, moments: float) -> float:
    """Bytes of the optimizer's states at a pipeline position beyond `moments` per parameter: those of its first rank.
    Of matrices that are updated whole, it keeps the largest."""
    card, spec, rank = OPTIMIZERS[optimizer], card_of(model), layout.rank({"pp": position})
    if card.uniform:
        return 0.0
    kept = sum(size_of(part.keeps) for part in held(spec, layout, rank).values() if not part.frozen)
    return placing.state_bytes(card, spec, layout, rank) - moments * kept


@lru_cache(maxsize=4096)
def update_scratch(optimizer: str, model: ModelSection, layout: Layout, position: int) -> float:
    """Bytes of an update that brings pieces together: what arrives, the matrices, and what goes back."""
    found = placing.planned_ways(OPTIMIZERS[optimizer], card_of(model), layout, layout.rank({"pp": position}))
    return 3 * DTYPES[MASTER].bytes * max((size for _, size in sizes_sent(found)), default=0)


def rank_states(
    bytes_per_parameter: States, layout: Layout, own: Elements, microbatches: int
) -> tuple[float, float, float]:
    """`state_bytes` of a rank. Parameters whose sharing group has one rank are kept whole, as without ZeRO: all of them
    if there is one data rank, and experts if expert parallelism takes all ranks that share."""
    found, b = [0.0, 0.0, 0.0], bytes_per_parameter
    for (computes, keeps, expert), (still, still_keep) in zip(own.groups(), own.frozen_groups(), strict=True):
        zero = layout.zero if sharing_group(layout, expert)[1] > 1 else 0
        some = state_bytes(b, zero, computes - still, keeps - still_keep, microbatches, layout.pp)
        found = [one + more for one, more in zip(found, some, strict=True)]
        if still:  # FSDP2 keeps masters of its rows, whatever is trained
            only = replace(b, gradient=0.0, moments=0.0, master=b.master if zero else 0.0)
            some = state_bytes(only, zero, still, still_keep, microbatches, layout.pp)
            found = [one + more for one, more in zip(found, some, strict=True)]
    return found[0], found[1], found[2]


Counted = tuple[list[Elements], Elements, Elements, Elements]


def elements(model: ModelSection, layout: Layout) -> Counted:
    """Elements on the first rank, which has most: of each block, of the parameters before the blocks, of those behind
    them, and of the last stage's copy of a tied embedding."""
    hashed: Any = model
    return _elements(hashed, layout.tp, layout.ep, layout.sp, layout.shards, layout.zero > 0)


@lru_cache(maxsize=4096)
def _elements(model: ModelSection, tp: int, ep: int, sp: bool, shards: int, shared: bool) -> Counted:
    layout = Layout(tp=tp, ep=ep, sp=sp, dp_shard=shards, zero=int(shared))
    kinds: dict[str, Elements] = {}
    blocks = [Elements() for _ in range(model.layers)]
    before = behind = Elements()
    frozen = card_of(model).frozen
    for name, local in local_parameters(card_of(model), layout).items():
        expert = ep > 1 and local.axis == "ep"
        size, part = local.size, local.share(sharing_group(layout, expert)[1])
        some = size, part, size if expert else 0, part if expert else 0
        own = Elements(size, part, size, *some[2:], frozen=some if name in frozen else (0, 0, 0, 0))
        kinds[name] = own
        if name.startswith("blocks."):
            number = int(name.split(".")[1])
            blocks[number] += own
        elif name.startswith("embed"):
            before += own
        else:
            behind += own
    return blocks, before, behind, kinds[TIED] if model.tie_embeddings else Elements()


def outside_blocks(model: ModelSection, layout: Layout, mine: Sequence[int], stages: int) -> Elements:
    """Elements outside of blocks on a rank with the stages `mine` of so many."""
    _, before, behind, tied = elements(model, layout)
    first, last = 0 in mine, stages - 1 in mine
    return sum([before] * first + [behind] * last + [tied] * (last and not first), Elements())


def rank_elements(model: ModelSection, layout: Layout, how: Partition = "balanced") -> list[Elements]:
    """Elements per rank at each pipeline position."""
    blocks = elements(model, layout)[0]
    by_stage = stages(model, layout, how)
    found = []
    for position in range(layout.pp):
        total, mine = Elements(), stages_of(layout, position)
        for stage in mine:
            for number in by_stage[stage]:
                total += blocks[number]
        found.append(total + outside_blocks(model, layout, mine, len(by_stage)))
    return found


class MicrobatchBytes(NamedTuple):
    """Bytes of one microbatch on a rank.

    plain, mixed: kept from forward to backward by a block without and with experts. begin, end: kept by the layers
    before and behind the blocks. owed_plain, owed_mixed: kept by a block from I to W. again: recomputed in a block's
    backward. inside, loss: workspace of a block's backward, and of the loss. stream: the activation between two blocks.
    tokens: inputs and targets.
    """

    plain: float
    mixed: float
    begin: float
    end: float
    owed_plain: float
    owed_mixed: float
    again: float
    inside: float
    loss: float
    stream: float
    tokens: float


def sums(s: Sizes, work: Work) -> Sums:
    """Sums over the operations of one rank."""
    return operations.sums(work, s.e, any(card_of(s.model).mixed), s.narrow)


def microbatch(s: Sizes, found: Sums, recompute: str, software: Software) -> MicrobatchBytes:
    """Bytes of one microbatch on a rank under a recomputation mode."""
    kept = {kind: operations.kept(block, recompute, software) for kind, block in found.block.items()}
    again, inside = operations.largest_backward(found, recompute, software)
    stream = s.n * s.model.dim * s.e
    return MicrobatchBytes(
        kept.get(False, 0.0),
        kept.get(True, 0.0),
        operations.kept(found.begin, "none", software),  # not in a block
        operations.kept(found.end, "none", software),
        found.owed.get(False, 0.0),
        found.owed.get(True, 0.0),
        again,
        inside + stream,  # with the gradient of the residual stream
        found.loss,
        stream,
        2 * 8 * s.N,
    )


@dataclass(frozen=True)
class Buffers:
    """Bytes of gathered weights and unfinished gradients at five moments. loss: at the loss. block: in the backward of
    the block with most parameters. scatter: when its gradient is scattered. next: in the backward of the next block,
    while that scatter still runs. rest: when the gradient of the parameters outside blocks is scattered."""

    loss: float = 0.0
    block: float = 0.0
    scatter: float = 0.0
    next: float = 0.0
    rest: float = 0.0


def buffers(
    model: ModelSection, layout: Layout, first: bool, last: bool, b: States, software: Software
) -> Buffers:
    """The buffers of ranks that have the first stage, the last, both or neither.

    Replicas add each gradient to its sum as soon as it exists. FSDP2 (parallel/zero.py) gathers a block's weights
    while the one before it computes. Under stage 3 these are buffers, and so are the weights outside blocks, which
    stay gathered. After a block's backward, FSDP2 scatters an fp32 copy of its gradient. gloo has no reduce-scatter,
    so the rank also needs as much to receive into.
    """
    blocks, before, behind, tied = elements(model, layout)
    block = max(blocks, key=lambda block: block.computes)
    rest = [part for part, has in ((before, first), (behind, last), (tied, last and not first)) if has]
    on_its_way = b.working * block.largest
    if first and last:
        on_its_way += b.working * tied.computes  # the output's gradient, until the embedding's is there
    shards = layout.shards
    if shards == 1:
        return Buffers(0.0, on_its_way, rest=b.working * max((part.largest for part in rest), default=0.0))
    unit = max(_largest_unit(block, layout) for block in blocks)
    whole = sum(part.computes for part in rest)
    received = b.reduce if software.scatter == "all_to_all" else 0.0
    cast = b.reduce if b.reduce != b.gradient else 0.0
    scattered = (
        b.gradient * (1 + 1 / shards) + cast + received
    )  # a copy and its shard, the send buffer, the receive buffer
    gathered = b.working if layout.zero == 3 else 0.0
    if last and not scattered_once(layout.zero, layout.pp):
        on_its_way += b.working * behind.computes  # scattered together with the embedding's
    under_way = 0.0  # of the next unit's weights, besides the place where FSDP2 wants them
    if (plus := zeropp(layout.zeropp)).two_gathers:
        under_way = plus.weights.per_element if plus.weights else b.working
        under_way /= 1 if keeps_copies(layout) else groups(layout)["inside"][0]
    if plus.gradients:  # a copy and its shard, the sums inside the node, the messages given and taken
        inside = groups(layout)["inside"][0]
        scattered = b.gradient * (1 + 1 / shards + 1 / inside) + 2 * plus.gradients.per_element
    return Buffers(
        gathered * whole,
        gathered * (whole + 2 * unit) + on_its_way + under_way * unit,
        gathered * (whole + unit) + on_its_way + (scattered + under_way) * unit,
        gathered * (whole + 2 * unit) + on_its_way + (b.gradient + under_way) * unit,
        scattered * whole,
    )


def keeps_copies(layout: Layout) -> bool:
    """True if every node keeps a copy of the weights that it has gathered."""
    return zeropp(layout.zeropp).hier and groups(layout)["across"][0] > 1


def node_copies(
    model: ModelSection, layout: Layout, mine: list[int], by_stage: Sequence[range], b: States
) -> float:
    """Bytes of a rank's share of its node's copy: what one message across the nodes has brought."""
    if not keeps_copies(layout):
        return 0.0
    (sync,) = (sync for sync in syncs(layout) if sync.what == "gather" and sync.group == "across")
    ranks = sharing_group(layout)[1]
    units = (unit for keeping in keepings(card_of(model), layout, mine, by_stage) for unit in keeping.units)
    return sum(sync.size(unit.padded, b.working, unit.shares, ranks) for unit in units)


def _largest_unit(block: Elements, layout: Layout) -> float:
    """Elements that FSDP2 gathers and scatters together. Experts have a unit of their own, or none if nobody shares
    them."""
    experts = block.experts if sharing_group(layout, expert=True)[1] > 1 else 0.0
    return max(experts, block.computes - block.experts)


def transfers(one: MicrobatchBytes, layout: Layout, microbatches: int) -> float:
    """Bytes of all inputs. A pipeline adds one activation and one gradient that arrive, and the sends that the rank has
    not waited for."""
    size = microbatches * one.tokens
    if layout.pp > 1:
        size += (2 + min(SENDS_PER_RANK * layout.pp, microbatches)) * one.stream
    return size


class Tail(NamedTuple):
    """A block's backward: bytes that the blocks behind it kept, and it keeps; recomputed bytes; workspace."""

    behind: float
    kept: float
    again: float
    inside: float


def at_peak(
    one: MicrobatchBytes,
    besides: Buffers,
    live: float,
    own: float,
    last: bool,
    after: float = 0.0,
    tails: Sequence[Tail] = (),
) -> tuple[float, float]:
    """(activations, buffers) at the moment of `Buffers` with the largest sum.

    live: bytes kept by all live microbatches. own: bytes kept by one of them. last: True if the rank has the last
    stage. after: bytes of what happens behind backward: the end of compressed sums, the update. tails: the
    rank's blocks, the last one first, if they recompute different things; else only the last one counts, behind which
    most is live.
    """
    loss = one.end if last else 0.0
    tails = tails or (Tail(0.0, max(one.plain, one.mixed), one.again, one.inside),)
    left = own - loss - tails[0].kept
    moments = [
        (left, one.stream + besides.scatter),
        (0.0, besides.rest),
        (0.0, after),
    ]
    for behind, _, again, inside in tails:
        moments.append((live - loss - behind + again, inside + besides.block))
        moments.append((own - loss - max(behind, tails[0].kept) + again, inside + besides.next))
    if last:
        moments.append((live, one.loss + besides.loss))
    return max(moments, key=sum)


def predict(
    model: ModelSection,
    layout: Layout,
    sizes: Sizes,
    software: Software,
    mode: str,
    microbatches: int,
    extra: float = 0.0,
) -> list[Memory]:
    """Memory per rank at each pipeline position. extra: bytes of other buffers."""
    predictor = Predictor(model, layout, sizes, software, mode, microbatches, extra)
    return predictor.of(of_blocks(layout.recompute, model.layers))


class Predictor:
    """The memory of a layout, for any modes of recomputation of its blocks."""

    def __init__(
        self,
        model: ModelSection,
        layout: Layout,
        sizes: Sizes,
        software: Software,
        mode: str,
        microbatches: int,
        extra: float = 0.0,
    ):
        card = card_of(model)
        self.model, self.layout, self.sizes, self.software = model, layout, sizes, software
        self.states, self.mixed = software.states[mode], card.is_mixed
        self.sums = sums(sizes, card.work(sizes, software))
        self._modes: dict[str, MicrobatchBytes] = {}
        self.by_stage = stages(model, layout, software.partition)
        self.schedule, self.times = live_schedule(layout, microbatches)
        self.always = transfers(self.microbatch("none"), layout, microbatches) + extra
        ranks, known = rank_elements(model, layout, software.partition), {}
        self.held = [self._held(position, own, microbatches, known) for position, own in enumerate(ranks)]

    def microbatch(self, mode: str) -> MicrobatchBytes:
        """Bytes of a microbatch whose blocks all have this mode."""
        if mode not in self._modes:
            self._modes[mode] = microbatch(self.sizes, self.sums, mode, self.software)
        return self._modes[mode]

    def kept(self, mode: str, number: int) -> float:
        """Bytes that a block keeps of a microbatch."""
        one = self.microbatch(mode)
        return one.mixed if self.mixed(number) else one.plain

    def of(self, modes: Sequence[str]) -> list[Memory]:
        """Memory per rank at each pipeline position. modes: of each block of the model."""
        kept = [sum(self.kept(modes[i], i) for i in part) for part in self.by_stage]
        one = self.microbatch(modes[-1])
        owed = [
            sum(one.owed_mixed if self.mixed(i) else one.owed_plain for i in part) for part in self.by_stage
        ]
        kept[0] += one.begin
        kept[-1] += one.end
        live = [self.times * size for size in peak_live(self.schedule, kept, owed)] if self.schedule else kept
        found = []
        for position, (states, besides, after, scratch) in enumerate(self.held):
            mine = stages_of(self.layout, position)
            last, own = len(self.by_stage) - 1 in mine, sum(kept[i] for i in mine)
            tails = self._tails(modes, mine) if len(set(modes)) > 1 else ()
            activations, more = at_peak(one, besides, live[position], own, last, after, tails)
            found.append(replace(states, activations=activations, buffers=more + scratch + self.always))
        return found

    def _tails(self, modes: Sequence[str], mine: Sequence[int]) -> list[Tail]:
        """The blocks of a rank's stages, the last one first."""
        behind, found = 0.0, []
        for number in reversed([i for stage in mine for i in self.by_stage[stage]]):
            one, kept = self.microbatch(modes[number]), self.kept(modes[number], number)
            found.append(Tail(behind, kept, one.again, one.inside))
            behind += kept
        return found

    def _held(
        self, position: int, own: Elements, microbatches: int, known: dict[tuple[bool, bool], Buffers]
    ) -> tuple[Memory, Buffers, float, float]:
        """(states, buffers, bytes behind backward, scratch of sums) of a rank, whatever it recomputes. known: the
        buffers of other ranks."""
        model, layout, b, by_stage = self.model, self.layout, self.states, self.by_stage
        mine = stages_of(layout, position)
        ends = 0 in mine, len(by_stage) - 1 in mine
        if ends not in known:
            known[ends] = buffers(model, layout, *ends, b, self.software)
        unsent, summing = compression(model, layout, mine, by_stage)
        summing = max(summing, rounding_scratch(model, layout, mine, by_stage, b))
        hashed: Any = model
        after = max(summing, update_scratch(self.software.optimizer, hashed, layout, position))
        params, gradients, optimizer = rank_states(b, layout, own, microbatches)
        optimizer += more_states(self.software.optimizer, hashed, layout, position, b.moments)
        params += node_copies(model, layout, mine, by_stage, b)
        scratch = (
            sum_scratch(model, layout, mine, by_stage, b) if layout.all_reduce not in (LIBRARY, AUTO) else 0.0
        )
        return Memory(params, gradients + unsent, optimizer, 0.0, 0.0), known[ends], after, scratch


def sum_scratch(
    model: ModelSection, layout: Layout, mine: list[int], by_stage: Sequence[range], b: States
) -> float:
    """Bytes into which the messages of gradient sums are received, on the first rank of a group, as on one node: of
    each group the largest."""
    most: dict[str, float] = {}
    for keeping in keepings(card_of(model), layout, mine, by_stage):
        parts = [
            ("replicate", unit.trained // sharing_group(layout, unit.group == "eshard")[1], b.gradient)
            for unit in keeping.units
        ]
        parts += [
            (buffer.group, size, b.reduce) for buffer in keeping.buffers for size in buffer.bucket_sizes
        ]
        for name, size, each in parts:
            ranks = groups(layout)[name][0]
            schedule = chosen(layout.all_reduce, ranks, ranks, round(size * each))
            if schedule is not None:
                most[name] = max(most.get(name, 0.0), messages_of(schedule, 0, size).scratch * each)
    return sum(most.values())


def rounding_scratch(
    model: ModelSection, layout: Layout, mine: list[int], by_stage: Sequence[range], b: States
) -> float:
    """Bytes of the fp32 copies that an update with rounding works on (optim/rounding.py), on the first rank."""
    if not b.copied:
        return 0.0
    card, most = card_of(model), 0.0
    local, whole = local_parameters(card, layout), card.parameters
    for keeping in keepings(card, layout, mine, by_stage):
        held = {name for unit in keeping.units for name in unit.names}
        replicas = [[name for name in whole if name in held and name not in card.frozen]]
        replicas += [buffer_order(list(buffer.names)) for buffer in keeping.buffers]
        for names in replicas:
            for some in updated_together({name: math.prod(whole[name]) for name in names}):
                kept = (local[n].share(_sharing(layout, local[n])) for n in some)
                most = max(most, b.copied * sum(kept))
    return most


def _sharing(layout: Layout, local: Local) -> int:
    return sharing_group(layout, layout.ep > 1 and local.axis == "ep")[1]


def compression(
    model: ModelSection, layout: Layout, mine: list[int], by_stage: Sequence[range]
) -> tuple[int, int]:
    """Bytes on a rank with these stages: what compression keeps from step to step (residuals, PowerSGD's Q), and its
    first messages, given and taken, with the largest scratch."""
    compress = compressor(layout.compress)
    kept = messages = scratch = 0
    if compress is not None:
        for _, ranks, shapes in compressed_buckets(card_of(model), layout, mine, by_stage):
            kept += compress.kept(shapes, ranks)
            messages += 2 * compress.messages(shapes, ranks)[0].size
            scratch = max(scratch, compress.scratch(shapes, ranks))
    return kept, messages + scratch


def live_microbatches(layout: Layout, microbatches: int) -> float:
    """The most microbatches that a rank keeps at once, with equal stages: all with GPipe, as many as there are ranks
    with 1F1B."""
    held, times = live_schedule(layout, microbatches)
    return times * max(peak_live(held)) / layout.stages_per_rank if held else 1.0


def live_schedule(layout: Layout, microbatches: int) -> tuple[Schedule | None, int]:
    """(a schedule of fewer microbatches, the factor from its peaks to those of the whole step); None without a
    pipeline. More microbatches than can be live at once change no peak. If all are live at once, one stands for all."""
    if layout.pp == 1:
        return None, 1
    times = 1
    if holds_all(layout.schedule, layout.pp, layout.stages_per_rank):
        microbatches, times = 1, microbatches
    else:
        microbatches = few(microbatches, layout.pp)
    return schedule(layout.schedule, layout.pp, microbatches, layout.virtual_stages), times
