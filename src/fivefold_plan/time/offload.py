"""Prices `layout.offload`: which tier has how much, and what of its I/O computing does not hide.

The tiers and the streams are those of sharding/tiers.py, which parallel/offload executes.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from fivefold.optim import OPTIMIZERS, rounding_traffic
from fivefold.schedules.offload import WAYS, Unit, simulate
from fivefold.schedules.timelines import StepTimeline
from fivefold.sharding.tiers import CHUNK, READ_AHEAD, SLOTS, WINDOW, Flow, Phase, Tier, Tiers, flows, tiers
from fivefold.sharding.units import scattered_once
from fivefold_plan.cluster.devices import Storage
from fivefold_plan.memory.memory import Memory, leaving, microbatch, sums
from fivefold_plan.memory.model_states import Elements, elements, outside_blocks, rank_elements
from fivefold_plan.setting import Setting
from fivefold_plan.time.stage_costs import outer_buffers, stage_costs

EXPOSED = "offload"
"""The key of exposed I/O in `time.Step.exposed`."""
UNITS = 8  # of the model, in pictures
NEARLY = 1.01  # a step that takes as long as another
LINK, DISK, HOST = ("link", "disk", "host")
"""What runs beside computing: the link between device and host memory, the disk, updates on the host."""


@dataclass(frozen=True)
class Loads:
    """Seconds on each of these lanes that a step's phases need.

    alone: of an update beside which the device computes nothing else. forward: beside that of the first microbatch, and
    of each other one. backward: beside that of the last one, and of each other one. update: which of them it runs in.
    """

    alone: Mapping[str, float]
    forward: tuple[Mapping[str, float], Mapping[str, float]]
    backward: tuple[Mapping[str, float], Mapping[str, float]]
    update: str


def of(s: Setting) -> Tiers:
    return tiers(s.layout.offload, s.states.master > 0)


def streams(s: Setting) -> tuple[Flow, ...]:
    """What a rank reads and writes in a step."""
    b, zero = s.states, s.layout.zero
    sums = 1 if zero and scattered_once(zero, s.layout.pp) else s.microbatches
    stays = 0.0 if zero or s.layout.pp > 1 else min(1.0, s.layout.offload_window / s.model.blocks)
    return flows(of(s), b.working, b.moments, s.microbatches, b.gradient, _masters_apart(s), sums, stays)


def _masters_apart(s: Setting) -> float:
    """Bytes per parameter of masters that are not the working weights: of those that compute, copies leave if gradients
    do."""
    return s.states.master or (s.states.working if of(s).gradients != "device" else 0.0)


def held(s: Setting, ranks: list[Memory]) -> list[Memory]:
    """The memory of each pipeline position: without what is offloaded, with the outer loop of replica groups that train
    apart."""
    stays, apart, moved = of(s).stays, s.replica_groups.count > 1, list[Memory]()
    if stays and not apart:
        return ranks
    for position, (one, own) in enumerate(zip(ranks, rank_elements(s), strict=True)):
        one = one if stays else _moved(s, position, one, own)
        if apart:
            sent = outer_buffers(s, position)
            if not s.replica_groups.overlap:  # messages go out when no activation is left
                sent = max(0.0, sent - one.activations - one.buffers)
            states = one.optimizer + s.replica_groups.kept * own.keeps
            one = replace(one, optimizer=states, buffers=one.buffers + sent)
        moved.append(one)
    return moved


def _moved(s: Setting, position: int, one: Memory, own: Elements) -> Memory:
    """The memory of a rank without what is offloaded."""
    t, b, zero = of(s), s.states, s.layout.zero
    keeps = own.keeps if zero else own.computes
    blocks = elements(s.model, s.layout).blocks
    largest = max(blocks, key=lambda block: block.computes)
    outside, block = (p.keeps if zero else p.computes for p in (outside_blocks(s, position), largest))
    away = {"device": 0.0, "host": 0.0, "disk": 0.0}
    params, gradients, optimizer, activations = one.params, one.gradients, one.optimizer, one.activations
    buffers = one.buffers
    if zero and t.masters != "device" and b.master:  # FSDP2's rows are of weights that compute
        params += b.working * keeps
    if t.working != "device":
        away[t.working] += b.working * keeps
        params = b.working * (outside + min(keeps - outside, s.layout.offload_window * block))
    whole = zero and scattered_once(zero, s.layout.pp) and s.microbatches > 1
    if t.gradients == "device":
        if whole and t.masters != "device":  # rows have a place beside the sums that FSDP2 scatters
            gradients += b.gradient * keeps
    else:
        away[t.gradients] += b.gradient * keeps
        gradients = (gradients if whole else 0.0) + leaving(s, position) - one.left
    if t.masters != "device":
        away[t.masters] += _masters_apart(s) * keeps
        optimizer -= b.master * keeps
    if t.streams:
        away[t.states] += b.moments * keeps
        optimizer -= b.moments * keeps
        if t.disk and s.cluster.on_cpu:  # everything that moves has slots; elsewhere these are in host memory
            tiers = ((t.gradients, b.gradient), (t.masters, b.master or b.working), (t.working, b.working))
            slot = b.moments + sum(size for tier, size in tiers if tier == "disk")
            buffers += SLOTS * CHUNK * slot
        if s.cluster.on_cpu:
            buffers += min(CHUNK, max(outside, block)) * b.copied  # of one chunk
    if t.activations != "device":
        kept = min(activations, READ_AHEAD * s.activation)
        away[t.activations] += activations - kept
        activations = kept
    if s.cluster.on_cpu:
        buffers, away["host"] = buffers + away["host"], 0.0
    return replace(
        one, params=params, gradients=gradients, optimizer=max(0.0, optimizer), activations=activations,
        buffers=buffers, host=away["host"], disk=away["disk"], left=0.0,
    )  # fmt: skip


def fits(s: Setting, memory: Sequence[Memory]) -> bool:
    """True if the ranks of a node find room in its host memory."""
    most = max(one.host for one in memory)
    return most * min(s.layout.ranks, s.cluster.per_node) <= s.cluster.host_memory


def ways(s: Setting) -> dict[str, StepTimeline]:
    """A step of one microbatch by each of `schedules.offload.WAYS`, with the model in equal units. Empty unless one
    device has gradients, masters and states in host memory."""
    t = of(s)
    if s.cluster.on_cpu or s.layout.ranks > 1 or {t.gradients, t.masters, t.states} != {"host"}:
        return {}
    units, width = _units(s, min(UNITS, s.model.blocks)), {}
    if t.working != "device":
        width["width"] = max(WINDOW, math.ceil(s.layout.offload_window * len(units) / s.model.blocks))
    return {name: simulate(units, replace(way, **width if way.width else {})) for name, way in WAYS.items()}


def window(s: Setting, room: float) -> int:
    """The fewest blocks in a window with which a simulated step of one microbatch takes as long (to NEARLY) as with all
    blocks that fit: more of them would hide no more copying (STRONGHOLD, SC 2022). room: bytes of the device that a
    window of WINDOW blocks leaves. Where no block stays for backward, more than WINDOW save no copy."""
    if s.layout.zero or s.layout.pp > 1:
        return WINDOW
    units, part = _units(s, max(1, s.model.blocks // len(stage_costs(s)))), rank_elements(s)[0]
    block = s.states.working * part.computes / len(units)
    widths = range(WINDOW, max(WINDOW, min(len(units), WINDOW + int(room / block))) + 1)
    took = lambda width: simulate(units, replace(WAYS["window"], width=width)).seconds  # noqa: E731
    return widths[bisect_left(widths, -NEARLY * took(widths[-1]), key=lambda width: -took(width))]


def _units(s: Setting, count: int) -> list[Unit]:
    """A rank's first stage in equal units. Their weights and gradients cross the links of their tiers."""
    t, b, cost, own = of(s), s.states, stage_costs(s)[0], rank_elements(s)[0]
    part = (own.keeps if s.layout.zero else own.computes) / count

    def crosses(tier: Tier, into: float, out: float) -> float:
        links = (link for _, name, link in _links(s) if name in ("host", tier))
        return max((link.seconds(into, out) for link in links), default=0.0)

    forward, backward = cost.forward / count, (cost.input + cost.weight) / count
    out, back = crosses(t.gradients, 0.0, part * b.gradient), crosses(t.working, part * b.working, 0.0)
    return [Unit(forward, backward, out, _update_on_host(s, part), back)] * count


def seconds(s: Setting, forward: float, backward: float, update: float, own: Elements) -> float:
    """Seconds of a rank's microbatches and update, from those of one microbatch's forward and backward, and of the
    update by the device. A phase takes as long as its computing or its slowest lane."""
    beside, others = loads(s, own), s.microbatches - 1
    updates = dict.fromkeys(("alone", "forward", "backward"), 0.0) | {beside.update: update}
    total = _longest(updates["alone"], beside.alone) + others * _longest(forward, beside.forward[1])
    total += _longest(forward + updates["forward"], beside.forward[0])
    total += _longest(backward + updates["backward"], beside.backward[0])
    return total + others * _longest(backward, beside.backward[1])


def _longest(computing: float, load: Mapping[str, float]) -> float:
    return max([computing, *load.values()])


def loads(s: Setting, own: Elements) -> Loads:
    """What runs beside a rank's computing. own: its parameters.

    The update runs beside the forward of the first microbatch, or beside the last backward (`layout.offload_update`);
    elsewhere than on CPUs the host's memory bounds it.
    """
    t, cluster = of(s), s.cluster
    if not t.streams:
        size = 0.0
        if t.activations != "device":  # what a rank saves for the backward of one microbatch
            operations, modes = sums(s), s.recompute
            saved = {mode: microbatch(s, operations, mode) for mode in modes}
            block = sum(max(saved[mode].plain, saved[mode].mixed) for mode in modes) / s.model.blocks
            blocks = math.ceil(s.model.blocks / s.layout.pp) * block
            size = blocks + saved[modes[0]].begin + saved[modes[-1]].end
        out, back = ({LINK: cluster.host_link.seconds(*way)} for way in ((0.0, size), (size, 0.0)))
        return Loads({}, (out, out), (back, back), "alone")
    keeps = own.keeps if s.layout.zero else own.computes

    def io(*phases: Phase) -> dict[str, float]:
        """Seconds of I/O in these phases by lane."""
        found = [flow for flow in streams(s) if flow.phase in phases]
        seconds = dict[str, float]()
        for lane, name, link in _links(s):
            flows = [flow for flow in found if flow.link == name]
            into, out = (
                keeps * sum(flow.bytes for flow in flows if flow.out == way) for way in (False, True)
            )
            seconds[lane] = link.seconds(into, out)
        return seconds

    update = {HOST: 0.0}
    if not cluster.on_cpu:  # the CPU reads and writes masters and moments, and reads gradients
        update = {HOST: _update_on_host(s, keeps * min(s.layout.ranks, cluster.per_node))}
    forward, backward = io("forward"), io("backward")
    # In a pipeline ZeRO scatters behind the last backward
    if s.layout.early and not (s.layout.zero and s.layout.pp > 1):
        last = io("update", "backward") | update
        return Loads({}, (forward, forward), (last, backward), "backward")
    if s.layout.zero:  # FSDP2 gathers ahead, so its update is not beside a forward
        return Loads(io("update") | update, (forward, forward), (backward, backward), "alone")
    return Loads({}, (io("update", "forward") | update, forward), (backward, backward), "forward")


def _links(s: Setting) -> list[tuple[str, str, Storage]]:
    """(lane, name in `Flow`, share of a rank) of each link."""
    disk = s.cluster.storage.shared(min(s.layout.ranks, s.cluster.per_node))
    # On CPUs no link is between device and host memory
    return [(DISK, "disk", disk), *([] if s.cluster.on_cpu else [(LINK, "host", s.cluster.host_link)])]


def _update_on_host(s: Setting, count: float) -> float:
    """Seconds of an update of so many parameters in host memory, and of its check. Its bandwidth bounds both."""
    b = s.states
    size = b.gradient + 2 * (b.master or b.working) + 2 * b.moments + rounding_traffic(b.copied)
    size *= OPTIMIZERS[s.software.optimizer].reads
    return count * (size + s.software.check_traffic(one_pass=True)) / s.cluster.host_bandwidth
