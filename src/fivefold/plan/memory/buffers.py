"""What a rank holds beside states and activations: gathered weights, unfinished gradients, and scratch memory of sums
and updates."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from fivefold.models.card import card_of
from fivefold.models.section import ModelSection
from fivefold.optim import OPTIMIZERS
from fivefold.optim.card import planned_ways
from fivefold.plan.memory.model_states import Elements, elements
from fivefold.plan.setting import Setting
from fivefold.precision import DTYPES, MASTER
from fivefold.schedules.collectives.collective import messages_of
from fivefold.schedules.collectives.registry import AUTO, LIBRARY, chosen
from fivefold.schedules.compression import compressor
from fivefold.sharding.layout import Layout, groups
from fivefold.sharding.matrices import sizes_sent
from fivefold.sharding.parts import local_parameters, sharing_group
from fivefold.sharding.tiers import OFFLOADS
from fivefold.sharding.units import buffer_order, scattered_once, syncs, updated_together, zeropp


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


def buffers(s: Setting, first: bool, last: bool) -> Buffers:
    """The buffers of ranks that have the first stage, the last, both or neither.

    Replicas add each gradient to its sum as soon as it exists. FSDP2 (parallel/zero.py) gathers a block's weights
    while the one before it computes. Under stage 3 these are buffers, and so are the weights outside blocks, which
    stay gathered. After a block's backward, FSDP2 scatters an fp32 copy of its gradient. gloo has no reduce-scatter,
    so the rank also needs as much to receive into.
    """
    layout, b, (blocks, before, behind, tied) = s.layout, s.states, elements(s.model, s.layout)
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
    received = b.reduce if s.software.scatter == "all_to_all" else 0.0
    cast = b.reduce if b.reduce != b.gradient else 0.0
    # a copy and its shard, the send buffer, the receive buffer
    scattered = b.gradient * (1 + 1 / shards) + cast + received
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


def node_copies(s: Setting, position: int) -> float:
    """Bytes of a rank's share of its node's copy: what one message across the nodes has brought."""
    if not keeps_copies(s.layout):
        return 0.0
    (sync,) = (sync for sync in syncs(s.layout) if sync.what == "gather" and sync.group == "across")
    ranks = sharing_group(s.layout)[1]
    units = (unit for keeping in s.keepings(position) for unit in keeping.units)
    return sum(sync.size(unit.padded, s.states.working, unit.shares, ranks) for unit in units)


def _largest_unit(block: Elements, layout: Layout) -> float:
    """Elements that FSDP2 gathers and scatters together. Experts have a unit of their own, or none if nobody shares
    them."""
    experts = block.experts if sharing_group(layout, expert=True)[1] > 1 else 0.0
    return max(experts, block.computes - block.experts)


@lru_cache(maxsize=4096)
def update_scratch(optimizer: str, model: ModelSection, layout: Layout, position: int) -> float:
    """Bytes of an update that brings pieces together: what arrives, the matrices, and what goes back."""
    found = planned_ways(OPTIMIZERS[optimizer], card_of(model), layout, layout.rank({"pp": position}))
    return 3 * DTYPES[MASTER].bytes * max((size for _, size in sizes_sent(found)), default=0)


def sum_scratch(s: Setting, position: int) -> float:
    """Bytes into which the messages of gradient sums are received, on the first rank of a group, as on one node: of
    each group the largest."""
    layout, b, most = s.layout, s.states, dict[str, float]()
    if layout.all_reduce in (LIBRARY, AUTO):
        return 0.0
    for keeping in s.keepings(position):
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


def rounding_scratch(s: Setting, position: int) -> float:
    """Bytes of the fp32 copies that an update with rounding works on (optim/updater.py), on the first rank. A streamed
    one copies chunks (`offload.held`)."""
    card, layout, most = s.card, s.layout, 0.0
    if not s.states.copied or OFFLOADS[layout.offload].streams:
        return 0.0
    local, whole = local_parameters(card, layout), card.parameters
    for keeping in s.keepings(position):
        held = {name for unit in keeping.units for name in unit.names}
        replicas = [[name for name in whole if name in held and name not in card.frozen]]
        replicas += [buffer_order(list(buffer.names)) for buffer in keeping.buffers]
        for names in replicas:
            for some in updated_together({name: math.prod(whole[name]) for name in names}):
                expert = {name: layout.ep > 1 and local[name].axis == "ep" for name in some}
                kept = (local[name].share(sharing_group(layout, expert[name])[1]) for name in some)
                most = max(most, s.states.copied * sum(kept))
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
