"""Counts what a rank sends per step: every collective by operation and axis, as `trace/traffic.py` counts a real step.

Two conventions. *Counted*: the bytes of a collective are those of the larger of its input and output (the tensor that
is summed, gathered, scattered, exchanged, sent or received). *Sent*: the bytes that leave the rank if the collective
runs as a ring (`SENT` converts). The count is exact where sizes are known before the run. Two assumptions remain:
experts get equal numbers of rows, and masked tokens are spread evenly over context ranks.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import product
from typing import NamedTuple

from fivefold.models.card import card_of
from fivefold.models.operations import Message, Operation
from fivefold.models.recomputation import region
from fivefold.models.section import ModelSection
from fivefold.optim import OPTIMIZERS
from fivefold.optim.card import planned_ways
from fivefold.precision import DTYPES, MASTER
from fivefold.precision.fp8 import TENSOR
from fivefold.schedules import ring_attention
from fivefold.schedules.collectives.collective import Collective, Primitive, messages_of
from fivefold.schedules.collectives.registry import LIBRARY, chosen
from fivefold.schedules.compression import Compressor, compressor
from fivefold.sharding.layout import Layout, first_names, groups, index_in, summing_groups
from fivefold.sharding.matrices import sizes_sent
from fivefold.sharding.parts import (
    TIED,
    ends_of,
    kept_elements,
    local_parameters,
    sharing_group,
    stage_parameters,
    stages_of,
    summed_over_tp,
    tensor_sums,
)
from fivefold.sharding.sync import outer_messages, outer_sent
from fivefold.sharding.tiers import partitions
from fivefold.sharding.units import Sync, syncs
from fivefold_plan.memory.model_states import divided
from fivefold_plan.messages.communication import best_all_reduces, summed_by
from fivefold_plan.setting import Partition, Setting, stages

DATA = ("shard", "replicate", "batch", "edp", "eshard", "inside", "across")
"""Groups that gather states and sum gradients. A plan reports them as one axis, "dp"."""
AXES = ("tp", "cp", "pp", "ep", "dp", "replica_groups")
"""The axes whose bytes a plan reports."""
SENT = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "send": lambda n: 1.0,
    "receive": lambda n: 0.0,
}
"""Bytes that one of n ranks sends in a ring, per counted byte (see communication.py)."""

Counted = dict[tuple[str, str], tuple[int, int]]
"""{(operation, axis): (calls, bytes)}."""


def counted(s: Setting, rank: int = 0) -> Counted:
    """Messages that a counter on this rank sees in a step: forward and backward of all microbatches, gradient sums, the
    norm, the update, and the agreement on the loss. Groups with the same ranks are merged. Outer steps are apart
    (`outer`)."""
    names = first_names(s.layout) | {"replica_groups": "replica_groups"}
    return _added_up(moment._replace(axis=names[moment.axis]) for moment in moments(s, rank))


def _added_up(messages: Iterable[Moment]) -> Counted:
    calls, sizes = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for one in messages:
        if one.times and one.size:
            calls[one.what, one.axis] += one.times * one.calls
            sizes[one.what, one.axis] += round(one.times * one.size)
    return {key: (calls[key], size) for key, size in sizes.items()}


def outer_elements(s: Setting, rank: int, fragment: int) -> list[int]:
    """Elements of the outer gradients in each message by which replica groups synchronise a fragment, from a rank of a
    replica group."""
    position, by_stage = index_in(s.layout, "pp", rank), stage_parameters(s.card, s.stages)
    mine = dict.fromkeys(name for stage in stages_of(s.layout, position) for name in by_stage[stage])
    found = outer_messages(mine, s.replica_groups.fragments)[fragment]
    return [kept_elements(s.card, s.layout, rank, names) for names in found]


def outer(s: Setting, rank: int, fragment: int) -> list[list[tuple[str, float]]]:
    """The collectives of these messages: (operation, bytes)."""
    sizes = outer_elements(s, rank, fragment)
    return [outer_sent(size, s.replica_groups.count, s.replica_groups.dtype) for size in sizes]


def outer_counted(s: Setting, rank: int, fragments: Iterable[int]) -> Counted:
    """What a counter on this rank sees of the outer steps of these fragments."""
    sent = (message for fragment in fragments for message in itertools.chain(*outer(s, rank, fragment)))
    return _added_up(Moment("", what, "replica_groups", size) for what, size in sent)


def sent(
    s: Setting, as_counted: bool = False, fragments: Sequence[int] | None = None, estimated: bool = False
) -> dict[str, int]:
    """Bytes that leave a rank, by axis: the largest of all ranks on each axis. as_counted: groups with the same ranks
    are merged, as a counter of real messages does. fragments: those that synchronise in this step; None: an average
    step. estimated: curvature is estimated in this step, which sends what forward and backward do once more."""
    every = s.replica_groups.every if fragments is None else 1
    summed = range(s.replica_groups.fragments) if fragments is None else fragments
    most: Counter[str] = Counter()
    by = s.layout.all_reduce
    equal = all(  # otherwise a rank may send more than another
        summed_by(by, s.group(name), s.cluster) == LIBRARY for name in summing_groups(s.layout)
    )
    replicas = [(0, 0)] if equal else [*product(range(s.layout.dp_replicate), range(s.layout.dp_shard))]
    for position in range(s.layout.pp):
        # of a ring, the first has most rows, the second sends most keys
        for index, (i, j) in product(range(min(2, s.layout.cp) if equal else s.layout.cp), replicas):
            rank = s.layout.rank({"pp": position, "dp_replicate": i, "dp_shard": j, "cp": index})
            found = counted(s, rank) if as_counted else _added_up(moments(s, rank))
            sizes = Counter(leaving(found, s.layout, s.replica_groups.count))
            passes = 1 + (s.software.estimates if fragments is None else estimated)
            sizes = Counter({axis: round(size * passes) for axis, size in sizes.items()})
            if s.replica_groups.count > 1:
                between = leaving(outer_counted(s, rank, summed), s.layout, s.replica_groups.count)
                sizes["replica_groups"] += round(between.get("replica_groups", 0) / every)
            for axis, size in sizes.items():
                most[axis] = max(most[axis], size)
    return {axis: most[axis] for axis in AXES if most[axis]}


def leaving(found: Counted, layout: Layout, count: int = 1) -> dict[str, int]:
    """Bytes that leave a rank, by axis, from counted ones. The few numbers that ranks of several axes agree on are left
    out. layout: of one of `count` replica groups."""
    shapes, total = groups(layout) | {"replica_groups": (count, layout.ranks)}, Counter[str]()
    for (what, name), (_, size) in found.items():
        if name != "all" and what in SENT:  # others, as a barrier, send nothing
            total["dp" if name in DATA else name] += int(SENT[what](shapes[name][0]) * size)
    return dict(total)


class Moment(NamedTuple):
    """Messages of a rank at a moment of a step. what: the operation. size, calls: of them together at one such moment.
    times: such moments in a step."""

    when: str
    what: str
    axis: str
    size: float
    calls: int = 1
    times: int = 1


Piece = tuple[str, str, float, int]
"""(operation, axis, bytes, calls)."""


def moments(s: Setting, rank: int = 0) -> Iterator[Moment]:
    """All messages of a rank in a step but those of outer steps, with the moments when they are sent."""
    position, card, modes = index_in(s.layout, "pp", rank), s.card, s.recompute
    first, last = s.ends(position)
    blocks = Counter((card.second[number], modes[number]) for number in s.blocks(position))
    for (second, mode), count in blocks.items():
        name, ops = card.words_of(card.second.index(second)), s.work.block[s.kind(second, mode)]
        yield from of_operations(s, rank, ops, mode, name, count * s.passes)
        if partitions(s.layout.offload, s.layout.recompute, s.layout.tp, s.layout.sp):
            name = f"backward of {name}"
            yield Moment(name, "all_gather", "tp", s.activation, 1, count * s.passes)
    if first:
        yield from of_operations(s, rank, s.work.begin, "none", "the embedding", s.passes)
    if last:
        yield from of_operations(s, rank, s.work.end, "none", "the output layer and loss", s.passes)
    # activations and their gradients between neighbouring stages on different ranks
    for ends in itertools.pairwise(s.schedule(1).rank_of[: len(s.stages)]) if s.layout.pp > 1 else ():
        if ends[0] != ends[1] and position in ends:  # one way in forward, the other in backward
            there, back = ("forward", "backward") if position == ends[0] else ("backward", "forward")
            yield Moment(f"behind the {there} of a stage", "send", "pp", s.activation, 1, s.passes)
            yield Moment(f"ahead of the {back} of a stage", "receive", "pp", s.activation, 1, s.passes)
    yield from _gradients(s, rank, position)
    for when, sent in (
        (GRADIENTS, shared(s, position, index_in(s.layout, "shard", rank))),
        ("end of the step", control(s, position)),
        ("update", matrices(s, rank)),
    ):
        yield from (Moment(when, *message) for message in sent)


GRADIENTS = "last backward"
"""The moment of what is sent once per step for gradients."""


def of_operations(
    s: Setting, rank: int, ops: Iterable[Operation], recompute: str, name: str, times: int
) -> Iterator[Moment]:
    """Messages of a rank within these operations: in forward, in backward, and what recomputation repeats there. name:
    of their part of the model."""
    again = region(recompute, s.software)
    parts: dict[str, list[Piece]] = {"forward of": [], "backward of": [], "forward again, of": []}
    for op in ops:
        forward = [piece for message in op.sent_forward for piece in _pieces(message, s, rank, False)]
        parts["forward of"] += forward
        parts["forward again, of"] += forward * again.repeats_messages(op)
        backward = [piece for message in op.sent_backward for piece in _pieces(message, s, rank, True)]
        parts["backward of"] += backward
    for when, pieces in parts.items():
        yield from _together(f"{when} {name}", pieces, times)


def _together(when: str, pieces: Iterable[Piece], times: int) -> Iterator[Moment]:
    """Messages of one moment, added up by operation and axis."""
    sizes, number = defaultdict[tuple[str, str], float](float), Counter[tuple[str, str]]()
    for what, axis, size, calls in pieces:
        if size:
            sizes[what, axis] += size
            number[what, axis] += calls
    for (what, axis), calls in number.items():
        yield Moment(when, what, axis, sizes[what, axis], calls, times)


def _pieces(message: Message, s: Setting, rank: int, backward: bool) -> Iterator[Piece]:
    """Splits a message into collectives."""
    if message.what != "ring":
        yield message.what, message.axis, message.size, message.calls
        return
    at = s.layout.cp, index_in(s.layout, "cp", rank)
    moved = ring_attention.messages(*at, s.card.causal, backward, message.reach)
    keys = message.size / len(moved)
    for way, shares in zip(("send", "receive"), zip(*moved, strict=True), strict=True):
        yield way, message.axis, keys * sum(shares), sum(share > 0 for share in shares)


def _gradients(s: Setting, rank: int, position: int) -> Iterator[Moment]:
    """Weight gathers and gradient sums over the data axes. Compression is without ZeRO: only sums."""
    compress = compressor(s.layout.compress)
    if compress is not None:
        buckets = s.compressed_buckets(position)
        wires = ((wire, name) for name, n, shapes in buckets for wire in compress.messages(shapes, n))
        yield from _together(GRADIENTS, ((wire.what, name, wire.size, 1) for wire, name in wires), 1)
        return
    for keeping in s.keepings(position):
        for unit in keeping.units:
            sent = unit.message(s.narrow(unit), s.states.working)
            own = unit.padded, unit.group == "eshard", unit.shares, unit.trained, sent
            for sync, size in synced(s, *own):
                name = "a block" if unit.module else "the rest of the model"  # which no block has
                if sync.what == "sum":
                    yield from _together(f"{GRADIENTS} of {name}", _sum(s, rank, sync, size), 1)
                    continue
                if sync.what == "gather":
                    ways = ("forward", "backward")[: sync.each] or ("first forward",)
                else:
                    ways = ("backward",) if sync.each else (GRADIENTS,)
                pieces, times = [*_divided(s, rank, sync, size)], s.passes if sync.each else 1
                for way in ways:
                    yield from _together(f"{way} of {name}", pieces, times)
        for buffer in keeping.buffers:
            sums = (
                piece
                for elements in buffer.bucket_sizes
                for sync, size in synced(s, elements, buffer.group == "edp", (), elements)
                for piece in _sum(s, rank, sync, size)
            )
            yield from _together(GRADIENTS, sums, 1)


def _sum(s: Setting, rank: int, sync: Sync, size: float) -> Iterator[Piece]:
    """The messages that sum `size` bytes over a group by the layout's algorithm."""
    among = s.group(sync.group)
    best, how = best_all_reduces(among, s.cluster), summed_by(s.layout.all_reduce, among, s.cluster)
    index = index_in(s.layout, sync.group, rank)
    schedule = chosen(how, among.ranks, among.local, round(size), best, rank=index)
    if schedule is None:
        yield "all_reduce", sync.group, size, 1
        return
    yield from _moves(index, sync.group, schedule, size, s.states.gradient if sync.rows else s.states.reduce)


def _divided(s: Setting, rank: int, sync: Sync, size: float) -> Iterator[Piece]:
    """The messages that gather weights or scatter gradients, `size` bytes with all ranks' parts, by the layout's
    algorithms."""
    gathers, among = sync.what == "gather", s.group(sync.group)
    primitive: Primitive = "all_gather" if gathers else "reduce_scatter"
    name, each = getattr(s.layout, primitive), s.states.working if gathers else s.states.reduce
    index = index_in(s.layout, sync.group, rank)
    schedule = chosen(name, among.ranks, among.local, round(size), primitive=primitive, rank=index)
    if schedule is None:
        what = primitive if gathers else "all_to_all" if sync.blocks else s.software.scatter
        yield what, sync.group, size, 1
    else:
        yield from _moves(index, sync.group, schedule, size, each)


def _moves(index: int, group: str, schedule: Collective, size: float, each: float) -> Iterator[Piece]:
    """The messages of a rank in a schedule, by its place in the group. each: bytes of an element."""
    for step in messages_of(schedule, index, round(size / each)).steps:
        for what, some in (("send", step.sends), ("receive", step.receives)):
            yield from ((what, group, message.size * each, 1) for message in some)


def synced(
    s: Setting,
    whole: float,
    expert: bool,
    shares: Sequence[int] = (),
    trained: float | None = None,
    gathered: float | None = None,
) -> Iterator[tuple[Sync, float]]:
    """The messages of data parallelism for parameters with so many elements, with the bytes of each: of the larger of
    its input and output. whole: with each parameter's rows padded to a multiple of the ranks that share them. shares:
    see `FsdpUnit`; without them a quantised message is as if for one parameter. trained: those with gradients; None:
    all. gathered: bytes of a rank's part of weights that are not quantised; None: as those of an average parameter."""
    if not whole:
        return
    b, ranks = s.states, sharing_group(s.layout, expert)[1]
    for sync in syncs(s.layout, expert):
        own = whole if sync.what == "gather" or trained is None else trained
        if not own:
            continue
        if sync.rows:  # what arrived is as exact as the sum over microbatches
            yield sync, own / ranks * b.gradient
        elif s.group(sync.group).ranks > 1:
            width = b.reduce
            if sync.what == "gather":
                width = s.gathered if gathered is None else ranks * gathered / own
            yield sync, sync.size(own, width, shares or (math.ceil(own / ranks),), ranks)


def compressed(s: Setting, expert: bool) -> list[Sent]:
    """The messages of a compressed gradient sum, in their order: bytes per element, on average over the model's
    parameters, each a bucket of its own."""
    compress, (sync,) = compressor(s.layout.compress), syncs(s.layout, expert)
    ranks = s.group(sync.group).ranks
    if compress is None or ranks == 1:
        return []
    found = _per_element(s.model, s.layout.tp, s.layout.ep, s.layout.sp, compress, ranks, expert)
    return [(what, sync.group, size) for what, size in found]


@lru_cache(maxsize=256)
def _per_element(
    model: ModelSection, tp: int, ep: int, sp: bool, compress: Compressor, ranks: int, expert: bool
) -> list[tuple[str, float]]:
    local = local_parameters(card_of(model), Layout(tp=tp, ep=ep, sp=sp)).values()
    shapes = [one.shape for one in local if (ep > 1 and one.axis == "ep") == expert]
    whole = sum(math.prod(shape) for shape in shapes)
    return [(wire.what, wire.size / whole) for wire in compress.messages(shapes, ranks)] if whole else []


Sent = tuple[str, str, float]
"""(operation, axis, bytes)."""


def shared(s: Setting, position: int, index: int = 0) -> list[Sent]:
    """The messages that sum gradients once per step over other axes than the data's, for a rank at a position of the
    pipeline: over "tp" those that are partial (`summed_over_tp`); over "pp" those of an embedding that two stages
    share, or of all that two copies of the model have. index: the rank's among those that share its states; the first
    has most.
    """
    if not (s.layout.tp > 1 or s.layout.copies > 1 or (s.card.tied and s.layout.pp > 1)):
        return []
    # other programs sum whole gradients under ZeRO 1
    zero, each = s.layout.zero if s.states.cast or s.layout.zero > 1 else 0, s.states.gradient
    of_rank = divided(replace(s.layout, zero=zero))
    partial, twice = _shared(s.model, of_rank, s.software.partition, position, index)
    found = [("all_reduce", "tp", elements * each) for elements in partial]
    return found + [(way, "pp", elements * each) for elements in twice for way in ("send", "receive")]


@lru_cache(maxsize=4096)
def _shared(
    model: ModelSection, layout: Layout, how: Partition, position: int, index: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Elements of the gradients that a rank sums over "tp", by message, and of those that it sums with another rank of
    the pipeline, which has them, too."""
    card, blocks, mine = card_of(model), stages(model, layout, how), stages_of(layout, position)
    names = stage_parameters(card, blocks)
    partial = summed_over_tp(card, layout, [name for stage in mine for name in names[stage]])
    first, last = ends_of(layout, mine)
    twice = [TIED] * (card.tied and first != last)
    if layout.copies > 1:
        twice = [n for n in sorted({n for stage in mine for n in names[stage]}) if n not in card.frozen]
    rank = layout.rank({"pp": position}) + index * groups(layout)["shard"][1]
    return (
        tuple(kept_elements(card, layout, rank, some) for some in tensor_sums(card, layout, partial)),
        tuple(kept_elements(card, layout, rank, [name]) for name in twice),
    )


def matrices(s: Setting, rank: int) -> list[Sent]:
    """The messages that bring pieces of matrices together before an update, and those that send them back."""
    card, fp32 = OPTIMIZERS[s.software.optimizer], DTYPES[MASTER].bytes
    if card.needs == "elements":
        return []
    found = planned_ways(card, s.card, s.layout, rank)
    return [("all_to_all", group, size * fp32) for group, size in sizes_sent(found)] * 2


def control(s: Setting, position: int = 0) -> list[Sent]:
    """The numbers that all ranks agree on once per step, in fp64: the loss, whether to stop or save, the squared norm,
    and whether the last update has destroyed weights; and expert loads (with four more numbers per block). Replica
    groups agree on the means of the first four. The largest norms (fp32) of queries and keys that QK-clip needs, and
    the largest numbers (fp32) of weights whose ranks agree on a scale."""
    apart = [("all_reduce", "replica_groups", 32.0)] if s.replica_groups.count > 1 else []
    if s.layout.ranks == 1:
        return apart
    sizes = [32.0, 8.0 * math.prod(s.card.load_sums)] if s.card.has_experts else [32.0]
    sizes += [8.0] * (s.card.further > 0) + [8.0 * math.prod(s.card.score_maxima)] * s.software.qk_clip
    kept = s.keepings(position) if s.fp8_scaling == TENSOR else []
    agreed = [sum(len(s.narrow(unit)) for unit in keeping.units) for keeping in kept]
    apart += [("all_reduce", "shard", 4.0 * number) for number in agreed if number]
    return [*(("all_reduce", "all", size) for size in sizes), *apart]
