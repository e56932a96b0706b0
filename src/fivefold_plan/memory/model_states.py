"""What a rank holds besides activations: elements of its parameters, bytes of weights, gradients and optimizer states,
gathered weights, unfinished gradients, and scratch memory of sums and updates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import add
from typing import NamedTuple, cast

from fivefold.models.card import card_of
from fivefold.models.section import ModelSection
from fivefold.optim import OPTIMIZERS
from fivefold.optim.card import planned_ways
from fivefold.optim.card import state_bytes as all_state_bytes
from fivefold.precision import DTYPES, MASTER
from fivefold.schedules.collectives import Primitive
from fivefold.schedules.collectives.collective import messages_of
from fivefold.schedules.collectives.registry import AUTO, CHOICES, LIBRARY, chosen
from fivefold.schedules.compression import compressor
from fivefold.sharding.layout import Layout, changed, groups
from fivefold.sharding.matrices import sizes_sent
from fivefold.sharding.parts import (
    TIED,
    Local,
    ends_of,
    held,
    local_parameters,
    sharing_group,
    size_of,
    stages_of,
)
from fivefold.sharding.tiers import OFFLOADS
from fivefold.sharding.units import buffer_order, regathers, scattered_once, syncs, updated_together, zeropp
from fivefold_plan.setting import Partition, Setting, States, stages

Four = tuple[float, float, float, float]
Group = tuple[float, float, bool, float, float]
"""(elements computed with, elements stored, whether of experts, frozen ones of both) of parameters that the same ranks
share."""


class Elements(NamedTuple):
    """Elements of some parameters on a rank.

    computes: elements the rank computes with, after tensor and expert parallelism. keeps: elements it stores under
    ZeRO. largest: elements of the largest parameter. experts, experts_keep: the part of both in routed experts, which
    have groups of their own if ep > 1. frozen: the part of these four that is not trained. matrices: the part of
    `computes` in trained matrices of blocks; stacks: in those of experts.
    """

    computes: float = 0
    keeps: float = 0
    largest: float = 0
    experts: float = 0
    experts_keep: float = 0
    frozen: Four = (0, 0, 0, 0)
    matrices: float = 0
    stacks: float = 0

    def __add__(self, other: Elements) -> Elements:  # pyright: ignore[reportIncompatibleMethodOverride]
        return Elements(
            self.computes + other.computes,
            self.keeps + other.keeps,
            max(self.largest, other.largest),
            self.experts + other.experts,
            self.experts_keep + other.experts_keep,
            cast("Four", tuple(map(add, self.frozen, other.frozen))) if any(other.frozen) else self.frozen,
            self.matrices + other.matrices,
            self.stacks + other.stacks,
        )

    def times(self, number: float) -> Elements:
        """So many parts of a model with these elements each."""
        frozen = cast("Four", tuple(number * size for size in self.frozen))
        blocks = self._replace(computes=number * self.computes, keeps=number * self.keeps, frozen=frozen)
        blocks = blocks._replace(matrices=number * self.matrices, stacks=number * self.stacks)
        return blocks._replace(experts=number * self.experts, experts_keep=number * self.experts_keep)

    def groups(self) -> tuple[Group, Group]:
        """Dense parameters, and experts."""
        computes, keeps, experts, experts_keep = self.frozen
        dense = self.computes - self.experts, self.keeps - self.experts_keep
        still = computes - experts, keeps - experts_keep
        return (*dense, False, *still), (self.experts, self.experts_keep, True, experts, experts_keep)


def state_bytes(
    b: States,
    zero: int,
    computes: float,
    keeps: float,
    microbatches: int = 2,
    pp: int = 1,
    again: bool = False,
) -> tuple[float, float, float]:
    """Bytes of weights, gradients and optimizer states. Each is whole (`computes` elements) below the ZeRO stage that
    shards it, and `keeps` elements from that stage on (arXiv 1910.02054, figure 1). FSDP2 (`States.cast`) differs in
    two ways: the gathered weights of stage 3 are buffers, and gradients that are scattered once per step are whole
    until then. b: bytes per parameter. again: weights are gathered for each use also below stage 3
    (`units.regathers`)."""
    if b.cast and zero:
        whole = scattered_once(zero, pp) and microbatches > 1
        gathered = computes if zero < 3 and not again else 0.0
        own = 0.0 if b.master else b.working * keeps
        return b.working * gathered + own, b.gradient * (computes if whole else keeps), b.optimizer * keeps
    return (
        (b.working + b.rounded) * (keeps if zero >= 3 else computes),
        b.gradient * (keeps if zero >= 2 else computes),
        b.optimizer * (keeps if zero >= 1 else computes),
    )


def rank_states(s: Setting, own: Elements) -> tuple[float, float, float]:
    """`state_bytes` of a rank. Parameters whose sharing group has one rank are kept whole, as without ZeRO: all of them
    if there is one data rank, and experts if expert parallelism takes all ranks that share."""
    matrices, stacks = rounded_once(s, own)
    weights, gradients, optimizer = s.kept_rounded * matrices + s.states.rounded * stacks, 0.0, 0.0
    states = replace(s.states, rounded=0.0)
    for computes, keeps, expert, still, still_keep in own.groups():
        zero = s.layout.zero if sharing_group(s.layout, expert)[1] > 1 else 0
        parts = [(states, computes - still, keeps - still_keep)]
        if still:  # FSDP2 keeps masters of its rows, whatever is trained
            only = replace(states, gradient=0.0, moments=0.0, master=s.states.master if zero else 0.0)
            parts.append((only, still, still_keep))
        for b, whole, shared in parts:
            w, g, o = state_bytes(b, zero, whole, shared, s.microbatches, s.layout.pp, regathers(s.layout))
            weights, gradients, optimizer = weights + w, gradients + g, optimizer + o
    return weights, gradients, optimizer


def rounded_once(s: Setting, own: Elements) -> tuple[float, float]:
    """Elements that a replica rounds once per step, of dense layers and of experts. (Routers, which it does not round,
    are small.)"""
    return own.matrices * s.rounded_once[0], own.stacks * s.rounded_once[1]


def adding_up(s: Setting, own: Elements) -> tuple[float, float]:
    """Bytes of the gradients that add up whole on a rank, and of its shards of them. FSDP2 allocates them in the first
    backward of a pipeline stage and scatters them in its last one. `rank_states` counts all of them as whole."""
    if not (s.states.cast and s.microbatches > 1 and scattered_once(s.layout.zero, s.layout.pp)):
        return 0.0, 0.0
    shared = [group for group in own.groups() if sharing_group(s.layout, group[2])[1] > 1]
    whole = sum(computes - still for computes, _, _, still, _ in shared)
    return s.states.gradient * whole, s.states.gradient * sum(
        keeps - still for _, keeps, _, _, still in shared
    )


def stage_elements(s: Setting, stage: int) -> Elements:
    """Elements of a pipeline stage. A rank with both ends of the model keeps one copy of a tied embedding: the first
    stage's."""
    own, (first, last) = elements(s.model, s.layout), ends_of(s.layout, [stage])
    both = all(s.ends(0))
    outside = [own.before] * first + [own.behind] * last + [own.tied] * (last and not both)
    return sum((own.blocks[number] for number in s.stages[stage]), sum(outside, Elements()))


class ModelElements(NamedTuple):
    """Elements on the first rank, which has most: of each block, of the parameters before the blocks, of those behind
    them, and of the last stage's copy of a tied embedding."""

    blocks: list[Elements]
    before: Elements
    behind: Elements
    tied: Elements

    def outside(self, first: bool, last: bool) -> Elements:
        """Elements outside of blocks on a rank with the first stage, the last, both or neither."""
        parts = [self.before] * first + [self.behind] * last + [self.tied] * (last and not first)
        return sum(parts, Elements())


def elements(model: ModelSection, layout: Layout) -> ModelElements:
    x = layout
    return _elements(model, x.tp, x.ep, x.ep_fold, x.sp, x.shards, x.zero > 0)


@lru_cache(maxsize=4096)
def _elements(
    model: ModelSection, tp: int, ep: int, fold: bool, sp: bool, shards: int, shared: bool
) -> ModelElements:
    layout = Layout(tp=tp, ep=ep, ep_fold=fold, sp=sp, dp_shard=shards, zero=int(shared))
    blocks = [Elements() for _ in range(model.blocks)]
    before = behind = Elements()
    known, frozen = dict[object, Elements](), card_of(model).frozen  # many parameters are alike
    local = local_parameters(card_of(model), layout)
    for name, one in local.items():
        inside = name.startswith("blocks.")
        if (key := (one, inside, name in frozen)) not in known:
            known[key] = _counted(one, layout, inside, name in frozen)
        if inside:
            blocks[int(name.split(".")[1])] += known[key]
        elif name.startswith("embed"):
            before += known[key]
        else:
            behind += known[key]
    tied = _counted(local[TIED], layout, False, TIED in frozen) if card_of(model).tied else Elements()
    return ModelElements(blocks, before, behind, tied)


def _counted(one: Local, layout: Layout, inside: bool, frozen: bool) -> Elements:
    """Elements of a parameter. inside: it is one of a block's."""
    expert = layout.ep > 1 and one.axis == "ep"
    size, part = one.size, one.share(sharing_group(layout, expert)[1])
    some = size, part, size if expert else 0, part if expert else 0
    dims = len(one.shape) * inside * (not frozen)
    still = some if frozen else (0, 0, 0, 0)
    return Elements(size, part, size, *some[2:], still, size * (dims == 2), size * (dims == 3))


def outside_blocks(s: Setting, position: int) -> Elements:
    """Elements outside of blocks on a rank of a pipeline position."""
    return elements(s.model, s.layout).outside(*s.ends(position))


def divided(layout: Layout) -> Layout:
    """The layout by which a rank's part of the model is counted; many layouts have the same."""
    fields = ("pp", "tp", "ep", "ep_fold", "sp", "schedule", "virtual_stages", "bare_ends")
    kept = {name: getattr(layout, name) for name in fields}
    return changed(Layout(), **kept, dp_shard=layout.shards, zero=int(layout.zero > 0))


def rank_elements(s: Setting) -> Sequence[Elements]:
    """Elements per rank at each pipeline position."""
    return _positions(s.model, divided(s.layout), s.software.partition)[0]


def alike(s: Setting) -> Sequence[int]:
    """For each pipeline position the first one whose ranks have blocks of the same kinds and the same ends of the
    model, and so the same elements, messages and buffers."""
    return _positions(s.model, divided(s.layout), s.software.partition)[1]


@lru_cache(maxsize=1024)
def _positions(
    model: ModelSection, layout: Layout, how: Partition
) -> tuple[Sequence[Elements], Sequence[int]]:
    """(`rank_elements`, `alike`)."""
    parts, by_stage, second = elements(model, layout), stages(model, layout, how), card_of(model).second
    first, ranks, same = dict[object, int](), list[Elements](), list[int]()
    for position in range(layout.pp):
        mine = stages_of(layout, position)
        kinds = [tuple(i if model.freeze else second[i] for i in by_stage[stage]) for stage in mine]
        ends = ends_of(layout, mine)
        same.append(first.setdefault((tuple(kinds), ends), position))
        if same[-1] < position:
            ranks.append(ranks[same[-1]])
        else:
            blocks = sum((parts.blocks[number] for stage in mine for number in by_stage[stage]), Elements())
            ranks.append(blocks + parts.outside(*ends))
    return ranks, same


@dataclass(frozen=True)
class Buffers:
    """Bytes of gathered weights and unfinished gradients at five moments. loss: at the loss. block: in the backward of
    the block with most parameters. scatter: when its gradient is scattered. next: in the backward of the next block,
    while that scatter still runs. rest: when the gradient of the parameters outside blocks is scattered. left:
    gradients that are in another tier at the loss, and on the device at the other moments."""

    loss: float = 0.0
    block: float = 0.0
    scatter: float = 0.0
    next: float = 0.0
    rest: float = 0.0
    left: float = 0.0


def buffers(s: Setting, first: bool, last: bool, some: bool = True) -> Buffers:
    """The buffers of ranks that have the first stage, the last, both or neither, and some blocks or none.

    Replicas add each gradient to its sum as soon as it exists. FSDP2 (parallel/zero.py) gathers a block's weights
    while the one before it computes. Under stage 3 these are buffers, and so are the weights outside blocks, which
    stay gathered. The last block's are still there at the loss. After a block's backward, FSDP2 scatters an fp32
    copy of its gradient. gloo has no reduce-scatter, so the rank also needs as much to receive into.
    """
    layout, b, (blocks, before, behind, tied) = s.layout, s.states, elements(s.model, s.layout)
    blocks = blocks if some else [Elements()]
    block = max(blocks, key=lambda block: block.computes)
    rest = [part for part, has in ((before, first), (behind, last), (tied, last and not first)) if has]
    on_its_way = b.working * block.largest
    if first and last:
        on_its_way += b.working * tied.computes  # the output's gradient, until the embedding's is there
    shards = layout.shards
    if shards == 1:
        return Buffers(0.0, on_its_way, rest=b.working * max((part.largest for part in rest), default=0.0))
    # experts have an FSDP2 unit of their own, or none if nobody shares them
    shared = sharing_group(layout, expert=True)[1] > 1
    unit = max(max(one.experts if shared else 0.0, one.computes - one.experts) for one in blocks)
    whole = sum(part.computes for part in rest)
    library = layout.reduce_scatter == LIBRARY  # a schedule works in what it sends
    received = b.reduce if s.software.scatter == "all_to_all" and library else 0.0
    cast = b.reduce if b.reduce != b.gradient else 0.0
    # a copy and its shard, the send buffer, the receive buffer
    scattered = b.gradient * (1 + 1 / shards) + cast + received
    gathered = b.working if regathers(layout) else 0.0
    if last and not scattered_once(layout.zero, layout.pp):
        on_its_way += b.working * behind.computes  # scattered together with the embedding's
    under_way = 0.0  # of the next unit's weights, besides the place where FSDP2 wants them
    if s.gathered < b.working:  # a message of fewer bits
        under_way = s.gathered * (1 + 1 / shards)
    if (plus := zeropp(layout.zeropp)).two_gathers:
        under_way = plus.weights.per_element if plus.weights else b.working
        under_way /= 1 if keeps_copies(layout) else groups(layout)["inside"][0]
    if plus.gradients:  # a copy and its shard, the sums inside the node, the messages given and taken
        inside = groups(layout)["inside"][0]
        scattered = b.gradient * (1 + 1 / shards + 1 / inside) + 2 * plus.gradients.per_element
    return Buffers(
        gathered * (whole + unit),
        gathered * (whole + 2 * unit) + on_its_way + under_way * unit,
        gathered * (whole + unit) + on_its_way + (scattered + under_way) * unit,
        gathered * (whole + 2 * unit) + on_its_way + (b.gradient + under_way) * unit,
        scattered * whole,
    )


def keeps_copies(layout: Layout) -> bool:
    """True if every node keeps a copy of the weights that it has gathered."""
    return zeropp(layout.zeropp).hier and groups(layout)["across"][0] > 1


def node_copies(s: Setting, position: int) -> float:
    """Bytes of a rank's share of its node's copy: what one message across the nodes has brought."""
    if not keeps_copies(s.layout):
        return 0.0
    (sync,) = (sync for sync in syncs(s.layout) if sync.what == "gather" and sync.group == "across")
    ranks = sharing_group(s.layout)[1]
    units = (unit for keeping in s.keepings(position) for unit in keeping.units)
    return sum(sync.size(unit.padded, s.states.working, unit.shares, ranks) for unit in units)


@lru_cache(maxsize=4096)
def uneven_states(
    optimizer: str, model: ModelSection, layout: Layout, position: int, moments: float
) -> tuple[float, float]:
    """Of the first rank of a pipeline position: bytes of the optimizer's states beyond `moments` per parameter; of
    matrices that are updated whole, it keeps the largest. And bytes of an update that brings pieces together: what
    arrives, the matrices, and what goes back."""
    card, spec, rank = OPTIMIZERS[optimizer], card_of(model), layout.rank({"pp": position})
    more = 0.0
    if not card.uniform:
        kept = sum(size_of(part.keeps) for part in held(spec, layout, rank).values() if not part.frozen)
        more = all_state_bytes(card, spec, layout, rank) - moments * kept
    sizes = (size for _, size in sizes_sent(planned_ways(card, spec, layout, rank)))
    return more, 3 * DTYPES[MASTER].bytes * max(sizes, default=0)


def sum_scratch(s: Setting, position: int) -> float:
    """Bytes into which the messages of schedules are received that sum gradients, or gather and scatter what ZeRO
    divides, on the first rank of a group: of each group and width of numbers the largest."""
    layout, b, most = s.layout, s.states, dict[tuple[str, float], float]()
    if all(getattr(layout, primitive) in (LIBRARY, AUTO) for primitive in CHOICES):
        return 0.0
    for keeping in s.keepings(position):
        sent = list[tuple[Primitive, str, int, float]]()
        for unit in keeping.units:
            sharing = sharing_group(layout, unit.group == "eshard")[1]
            sent.append(("all_reduce", "replicate", unit.trained // sharing, b.gradient))
            narrow = s.narrow(unit)
            bits = round(sharing * unit.message(narrow, b.working)), 1.0
            sent.append(("all_gather", unit.group, *(bits if narrow else (unit.padded, b.working))))
            sent.append(("reduce_scatter", unit.group, unit.trained, b.reduce))
        for buffer in keeping.buffers:
            sent.extend(("all_reduce", buffer.group, size, b.reduce) for size in buffer.bucket_sizes)
        for primitive, name, size, each in sent:
            among, by = s.group(name), getattr(layout, primitive)
            size_ = round(size * each)
            schedule = None if by == AUTO else chosen(by, among.ranks, among.local, size_, None, primitive, 0)
            if schedule is not None:
                scratch = messages_of(schedule, 0, size).scratch * each
                most[name, each] = max(most.get((name, each), 0.0), scratch)
    return sum(most.values())


def rounding_scratch(s: Setting, position: int) -> float:
    """Bytes of the fp32 copies that an update with rounding works on (optim/updater.py), on the first rank. A streamed
    one copies chunks (`offload.held`)."""
    card, layout, most = s.card, s.layout, 0.0
    if not s.states.copied or OFFLOADS[layout.offload].streams:
        return 0.0
    local, whole = local_parameters(card, layout), card.parameters
    for keeping in s.keepings(position):
        in_units = {name for unit in keeping.units for name in unit.names}
        replicas = [[name for name in whole if name in in_units and name not in card.frozen]]
        replicas += [buffer_order(list(buffer.names)) for buffer in keeping.buffers]
        for names in replicas:
            for together in updated_together({name: math.prod(whole[name]) for name in names}):
                size = 0
                for name in together:
                    expert = layout.ep > 1 and local[name].axis == "ep"
                    size += local[name].share(sharing_group(layout, expert)[1])
                most = max(most, s.states.copied * size)
    return most


def compression(s: Setting, position: int) -> tuple[int, int]:
    """Bytes on the ranks of a pipeline position: what compression keeps from step to step (residuals, PowerSGD's Q),
    and its first messages, given and taken, with the largest scratch."""
    compress = compressor(s.layout.compress)
    kept = messages = scratch = 0
    if compress is not None:
        for _, ranks, shapes in s.compressed_buckets(position):
            kept += compress.kept(shapes, ranks)
            messages += 2 * compress.messages(shapes, ranks)[0].size
            scratch = max(scratch, compress.scratch(shapes, ranks))
    return kept, messages + scratch
