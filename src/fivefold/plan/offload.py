"""Prices `layout.offload`: which tier has how much, and what of its I/O computing does not hide.

The tiers and the streams are those of spread/tiers.py, which parallel/offload executes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fivefold.models.card import card_of
from fivefold.models.recomputation import of_blocks
from fivefold.models.section import ModelSection
from fivefold.plan.cost import Cost, Setting
from fivefold.plan.devices import Cluster
from fivefold.plan.memory import Memory, microbatch, sums
from fivefold.plan.model_states import Elements, elements, outside_blocks, rank_elements
from fivefold.plan.software import States
from fivefold.precision import DTYPES, MASTER
from fivefold.schedules.offload import Unit
from fivefold.spread.layout import Layout
from fivefold.spread.parts import stages_of
from fivefold.spread.tiers import (
    AHEAD,
    CHUNK,
    NOT_OFFLOADED,
    READ_AHEAD,
    SLOTS,
    Flow,
    Phase,
    Tiers,
    flows,
    runs_twice,
    share_of_second,
    tiers,
)

EXPOSED = "offload"
"""The key of exposed I/O in `time.Step.exposed`."""
FP32 = DTYPES[MASTER].bytes


@dataclass(frozen=True)
class Computing:
    """Seconds of one microbatch's forward and backward, and of the update, where nothing is offloaded."""

    forward: float
    backward: float
    update: float


def of(s: Setting) -> Tiers:
    return tiers(s.layout.offload, s.layout.shards > 1, s.states.master > 0)


def streams(s: Setting, share: float = 0.0) -> tuple[Flow, ...]:
    """What a rank reads and writes in a step. share: see `flows`."""
    b = s.states
    master = b.master or (FP32 if of(s).gradients != "device" else 0.0)
    return flows(of(s), b.working, b.moments, s.microbatches, b.gradient, master, share)


def held(s: Setting, found: list[Memory]) -> list[Memory]:
    """The memory of each pipeline position, by tier."""
    if s.layout.offload == NOT_OFFLOADED:
        return found
    blocks = elements(s.model, s.layout)[0]
    ranks = rank_elements(s.model, s.layout, s.software.partition)
    largest = max(block.computes for block in blocks)
    return [
        _moved(s, one, own, _outside(s.model, s.layout, position), largest)
        for position, (one, own) in enumerate(zip(found, ranks, strict=True))
    ]


def _outside(model: ModelSection, layout: Layout, position: int) -> float:
    stages = layout.pp * layout.stages_per_rank
    return outside_blocks(model, layout, list(stages_of(layout, position)), stages).computes


def _moved(s: Setting, one: Memory, own: Elements, outside: float, block: float) -> Memory:
    t, b, keeps = of(s), s.states, own.keeps if s.layout.zero else own.computes
    away = {"device": 0.0, "host": 0.0, "disk": 0.0}
    params, gradients, optimizer, activations = one.params, one.gradients, one.optimizer, one.activations
    buffers = one.buffers
    if t.working != "device":
        inside = min(own.computes - outside, (AHEAD + 2) * block)
        away[t.working] += b.working * own.computes
        params = b.working * (outside + inside)
    if (
        t.gradients != "device"
    ):  # of a unit that computes, one that is read or written, and what is outside of blocks
        away[t.gradients] += b.gradient * own.computes
        gradients = b.gradient * (outside + min(own.computes - outside, 2 * block))
    master = b.master or (FP32 if t.gradients != "device" else 0.0)
    if t.masters != "device":
        away[t.masters] += master * keeps
        optimizer -= b.master * keeps
    if t.streams:
        away[t.states] += b.moments * keeps
        optimizer -= b.moments * keeps
        if t.disk and s.cluster.on_cpu:  # elsewhere the chunks are in host memory
            buffers += SLOTS * CHUNK * slot_bytes(t, b)
    if t.activations != "device":
        kept = min(activations, READ_AHEAD * s.sizes.n * s.model.dim * s.sizes.e)
        away[t.activations] += activations - kept
        activations = kept
    if s.cluster.on_cpu:
        buffers, away["host"] = buffers + away["host"], 0.0
    return replace(
        one, params=params, gradients=gradients, optimizer=max(0.0, optimizer), activations=activations,
        buffers=buffers, host=away["host"], disk=away["disk"],
    )  # fmt: skip


def slot_bytes(t: Tiers, b: States) -> float:
    """Bytes per element of a slot: of everything that moves."""
    sizes = ((t.gradients, b.gradient), (t.masters, b.master or FP32), (t.working, b.working))
    return b.moments + sum(size for tier, size in sizes if tier == "disk")


def fits(s: Setting, memory: Sequence[Memory]) -> bool:
    """True if the ranks of a node find room in its host memory."""
    most = max(one.host for one in memory)
    return most * min(s.layout.ranks, s.cluster.per_node) <= s.cluster.host_memory


def exposed(s: Setting, computing: Computing, own: Elements) -> float:
    """Seconds that a rank's step takes longer because of its I/O, beyond computing."""
    if s.layout.offload == NOT_OFFLOADED:
        return 0.0
    return seconds(s, computing, own) - seconds(s, computing, None)


def units_of(s: Setting, cost: Cost, count: int) -> list[Unit]:
    """A model on one rank with one microbatch, in so many equal units, for `schedules.offload`. cost: of the whole."""
    own = rank_elements(s.model, s.layout, s.software.partition)[0]
    part, b = own.computes / count, s.states
    out = s.cluster.host_link.seconds(0.0, part * b.gradient)
    back = s.cluster.host_link.seconds(part * b.working, 0.0)
    update = part * (2 * (b.moments + FP32) + FP32) / s.cluster.host_bandwidth
    return [Unit(cost.forward / count, (cost.input + cost.weight) / count, out, update, back)] * count


def seconds(s: Setting, computing: Computing, own: Elements | None) -> float:
    """Seconds of a rank's microbatches and update. own: its parameters; None: without I/O.

    The update runs beside the forward of the first microbatch, and shares its cores on a CPU; elsewhere the host's
    memory bounds it. A share of it may run again beside the first backward (`tiers.runs_twice`): as much as backward
    hides. A phase takes as long as its computing or its slowest link.
    """
    t, m = of(s), s.microbatches
    if own is None or not t.streams:
        found = m * (computing.forward + computing.backward) + computing.update
        if own is not None and t.activations != "device":
            found += _activations(s, computing)
        return found
    keeps = own.keeps if s.layout.zero else own.computes
    cluster, on_cpu = s.cluster, s.cluster.on_cpu
    ranks = min(s.layout.ranks, cluster.per_node)
    update = computing.update
    if not on_cpu:  # the CPU reads and writes masters and moments, and reads gradients
        update = keeps * ranks * (2 * (s.states.moments + FP32) + FP32) / cluster.host_bandwidth
    beside = not s.layout.zero  # FSDP2 gathers ahead, so its update is not beside a forward

    def io(*phases: Phase, share: float = 0.0) -> float:
        return _io([flow for flow in streams(s, share) if flow.phase in phases], keeps, cluster, ranks)

    share, back = 0.0, max(computing.backward, io("backward"))
    if runs_twice(t, on_cpu):
        share = share_of_second(back - io("backward"), io("again", share=1.0))
    first = (computing.forward if beside else 0.0) + (update if on_cpu else 0.0)
    phases = ("update", "forward") if beside else ("update",)
    total = max(first, io(*phases, share=share), 0.0 if on_cpu else update)
    total += (m - beside) * max(computing.forward, io("forward"))
    return total + max(computing.backward, io("backward", "again", share=share)) + (m - 1) * back


def _io(found: Sequence[Flow], elements: float, cluster: Cluster, ranks: int) -> float:
    """Seconds of I/O over all links at once. The ranks of a node share its disk. On CPUs there is no link between
    device and host memory."""
    longest, links = 0.0, {"disk": cluster.storage.shared(ranks)}
    if not cluster.on_cpu:
        links["host"] = cluster.host_link
    for name, link in links.items():
        into = elements * sum(flow.bytes for flow in found if flow.link == name and not flow.out)
        out = elements * sum(flow.bytes for flow in found if flow.link == name and flow.out)
        longest = max(longest, link.seconds(into, out))
    return longest


def _saved(s: Setting) -> float:
    """Bytes that a rank saves for the backward of one microbatch."""
    found = sums(s.sizes, card_of(s.model).work(s.sizes, s.software))
    modes = of_blocks(s.layout.recompute, s.model.layers)
    ones = {mode: microbatch(s.sizes, found, mode, s.software) for mode in modes}
    blocks = sum(max(ones[mode].plain, ones[mode].mixed) for mode in modes) / s.model.layers
    return math.ceil(s.model.layers / s.layout.pp) * blocks + ones[modes[0]].begin + ones[modes[-1]].end


def _activations(s: Setting, computing: Computing) -> float:
    """Exposed seconds of activations that travel to host memory in forward, and back in backward."""
    size, link = _saved(s), s.cluster.host_link
    out, back = link.seconds(0.0, size), link.seconds(size, 0.0)
    return s.microbatches * (max(0.0, out - computing.forward) + max(0.0, back - computing.backward))
