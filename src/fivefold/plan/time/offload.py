"""Prices `layout.offload`: which tier has how much, and what of its I/O computing does not hide.

The tiers and the streams are those of sharding/tiers.py, which parallel/offload executes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from fivefold.optim import OPTIMIZERS, rounding_traffic
from fivefold.plan.cluster.devices import Cluster
from fivefold.plan.memory.memory import Memory, microbatch, sums
from fivefold.plan.memory.model_states import Elements, elements, outside_blocks, rank_elements
from fivefold.plan.setting import Setting
from fivefold.plan.software import States
from fivefold.plan.time.cost import Cost
from fivefold.plan.time.stage_costs import stage_costs
from fivefold.plan.time.sync_costs import outer_buffers
from fivefold.schedules.offload import WAYS, Unit, simulate
from fivefold.schedules.timelines import StepTimeline
from fivefold.sharding.tiers import (
    AHEAD,
    CHUNK,
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
UNITS = 8  # of the model, in pictures


LINK, DISK, HOST = LANES = ("link", "disk", "host")
"""What runs beside computing: the link between device and host memory, the disk, updates on the host."""


@dataclass(frozen=True)
class Computing:
    """Seconds of one microbatch's forward and backward, and of the update by the device (`updates_here`)."""

    forward: float
    backward: float
    update: float


@dataclass(frozen=True)
class Loads:
    """Seconds on each of `LANES` that a step's phases need.

    alone: of an update beside which the device computes nothing else. forward, backward: beside those of the first
    microbatch, and of each other one. hidden: the update runs beside the first forward, and on CPUs with its cores.
    """

    alone: Mapping[str, float]
    forward: tuple[Mapping[str, float], Mapping[str, float]]
    backward: tuple[Mapping[str, float], Mapping[str, float]]
    hidden: bool


def of(s: Setting) -> Tiers:
    return tiers(s.layout.offload, s.layout.shards > 1, s.states.master > 0)


def streams(s: Setting, share: float = 0.0) -> tuple[Flow, ...]:
    """What a rank reads and writes in a step. share: see `flows`."""
    b = s.states
    return flows(of(s), b.working, b.moments, s.microbatches, b.gradient, _masters_apart(s), share)


def _masters_apart(s: Setting) -> float:
    """Bytes per parameter of masters that are not the working weights: of those that compute, copies leave if gradients
    do."""
    return s.states.master or (s.states.working if of(s).gradients != "device" else 0.0)


def held(s: Setting, found: list[Memory]) -> list[Memory]:
    """The memory of each pipeline position: without what is offloaded, with the outer loop of sites that train
    apart."""
    found = _by_tier(s, found)
    if s.sites.count == 1:
        return found
    with_outer = []
    for position, (one, own) in enumerate(zip(found, rank_elements(s), strict=True)):
        sent = outer_buffers(s, position)
        if not s.sites.overlap:  # messages go out when no activation is left
            sent = max(0.0, sent - one.activations - one.buffers)
        states = one.optimizer + s.sites.kept * own.keeps
        with_outer.append(replace(one, optimizer=states, buffers=one.buffers + sent))
    return with_outer


def _by_tier(s: Setting, found: list[Memory]) -> list[Memory]:
    if of(s).stays:
        return found
    largest = max(block.computes for block in elements(s.model, s.layout).blocks)
    return [
        _moved(s, memory, own, outside_blocks(s, position).computes, largest)
        for position, (memory, own) in enumerate(zip(found, rank_elements(s), strict=True))
    ]


def _moved(s: Setting, one: Memory, own: Elements, outside: float, block: float) -> Memory:
    t, b, keeps = of(s), s.states, own.keeps if s.layout.zero else own.computes
    away = {"device": 0.0, "host": 0.0, "disk": 0.0}
    params, gradients, optimizer, activations = one.params, one.gradients, one.optimizer, one.activations
    buffers = one.buffers
    if t.working != "device":
        inside = min(own.computes - outside, (AHEAD + 2) * block)
        away[t.working] += b.working * own.computes
        params = b.working * (outside + inside)
    if t.gradients != "device":  # but for two units (one computes, one moves) and what is outside of blocks
        away[t.gradients] += b.gradient * own.computes
        gradients = b.gradient * (outside + min(own.computes - outside, 2 * block))
    if t.masters != "device":
        away[t.masters] += _masters_apart(s) * keeps
        optimizer -= b.master * keeps
    if t.streams:
        away[t.states] += b.moments * keeps
        optimizer -= b.moments * keeps
        if t.disk and s.cluster.on_cpu:  # elsewhere the chunks are in host memory
            buffers += SLOTS * CHUNK * slot_bytes(t, b)
        if s.cluster.on_cpu:
            buffers += min(CHUNK, max(outside, block) * keeps / own.computes) * b.copied  # of one chunk
    if t.activations != "device":
        kept = min(activations, READ_AHEAD * s.activation)
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
    sizes = ((t.gradients, b.gradient), (t.masters, b.master or b.working), (t.working, b.working))
    return b.moments + sum(size for tier, size in sizes if tier == "disk")


def fits(s: Setting, memory: Sequence[Memory]) -> bool:
    """True if the ranks of a node find room in its host memory."""
    most = max(one.host for one in memory)
    return most * min(s.layout.ranks, s.cluster.per_node) <= s.cluster.host_memory


def updates_here(s: Setting) -> bool:
    """True if the device updates: always on CPUs, whose cores are the host's, too."""
    return s.cluster.on_cpu or not of(s).streams


def exposed(s: Setting, computing: Computing, own: Elements) -> float:
    """Seconds that a rank's step takes longer because of its I/O, beyond computing."""
    if of(s).stays:
        return 0.0
    whole = s.microbatches * (computing.forward + computing.backward) + computing.update
    return seconds(s, computing, own) - whole


def ways(s: Setting) -> dict[str, StepTimeline]:
    """A step of one microbatch by each of `schedules.offload.WAYS`, with the model in equal units. Empty unless one
    device has gradients, masters and states in host memory."""
    t = of(s)
    if s.cluster.on_cpu or s.layout.ranks > 1 or {t.gradients, t.masters, t.states} != {"host"}:
        return {}
    units = units_of(s, stage_costs(s)[0], min(UNITS, s.model.layers))
    return {name: simulate(units, way) for name, way in WAYS.items()}


def units_of(s: Setting, cost: Cost, count: int) -> list[Unit]:
    """A model on one device with one microbatch, in so many equal units, for `schedules.offload`. cost: of the
    whole."""
    part, b = rank_elements(s)[0].computes / count, s.states
    out = s.cluster.host_link.seconds(0.0, part * b.gradient)
    back = s.cluster.host_link.seconds(part * b.working, 0.0)
    update = _update_on_host(s, part)
    return [Unit(cost.forward / count, (cost.input + cost.weight) / count, out, update, back)] * count


def seconds(s: Setting, computing: Computing, own: Elements) -> float:
    """Seconds of a rank's microbatches and update. A phase takes as long as its computing or its slowest lane."""
    found, others = loads(s, computing.backward, own), s.microbatches - 1
    alone, beside = (0.0, computing.update) if found.hidden else (computing.update, 0.0)
    total = _longest(alone, found.alone) + _longest(computing.forward + beside, found.forward[0])
    total += others * _longest(computing.forward, found.forward[1])
    total += _longest(computing.backward, found.backward[0])
    return total + others * _longest(computing.backward, found.backward[1])


def _longest(computing: float, load: Mapping[str, float]) -> float:
    return max([computing, *load.values()])


def loads(s: Setting, backward: float, own: Elements) -> Loads:
    """What runs beside a rank's computing. own: its parameters. backward: seconds of a microbatch's.

    The update runs beside the forward of the first microbatch; elsewhere than on CPUs the host's memory bounds it. A
    share of it may run again beside the first backward (`tiers.runs_twice`): as much as backward hides.
    """
    t, cluster = of(s), s.cluster
    if not t.streams:
        size = _saved(s) if t.activations != "device" else 0.0
        out, back = ({LINK: cluster.host_link.seconds(*way)} for way in ((0.0, size), (size, 0.0)))
        return Loads({}, (out, out), (back, back), hidden=False)
    keeps = own.keeps if s.layout.zero else own.computes
    ranks = min(s.layout.ranks, cluster.per_node)

    def io(*phases: Phase, share: float = 0.0) -> dict[str, float]:
        return _io([flow for flow in streams(s, share) if flow.phase in phases], keeps, cluster, ranks)

    share, other = 0.0, io("backward")
    if runs_twice(t, cluster.on_cpu):
        busy = _longest(0.0, other)
        share = share_of_second(max(backward, busy) - busy, _longest(0.0, io("again", share=1.0)))
    update = {HOST: 0.0}
    if not cluster.on_cpu:  # the CPU reads and writes masters and moments, and reads gradients
        update = {HOST: _update_on_host(s, keeps * ranks)}
    forward, again = io("forward"), io("backward", "again", share=share)
    if s.layout.zero:  # FSDP2 gathers ahead, so its update is not beside a forward
        return Loads(io("update", share=share) | update, (forward, forward), (again, other), hidden=False)
    return Loads({}, (io("update", "forward", share=share) | update, forward), (again, other), hidden=True)


def _update_on_host(s: Setting, count: float) -> float:
    """Seconds of an update of so many parameters in host memory, and of its check. Its bandwidth bounds both."""
    b = s.states
    size = b.gradient + 2 * (b.master or b.working) + 2 * b.moments + rounding_traffic(b.copied)
    size *= OPTIMIZERS[s.software.optimizer].reads
    return count * (size + s.software.check_traffic(on_cpu=True)) / s.cluster.host_bandwidth


def _io(found: Sequence[Flow], elements: float, cluster: Cluster, ranks: int) -> dict[str, float]:
    """Seconds of I/O by link. The ranks of a node share its disk. On CPUs there is no link between device and host
    memory."""
    links, seconds = [(DISK, "disk", cluster.storage.shared(ranks))], dict[str, float]()
    if not cluster.on_cpu:
        links.append((LINK, "host", cluster.host_link))
    for lane, name, link in links:
        flows = [flow for flow in found if flow.link == name]
        into, out = (elements * sum(flow.bytes for flow in flows if flow.out == way) for way in (False, True))
        seconds[lane] = link.seconds(into, out)
    return seconds


def _saved(s: Setting) -> float:
    """Bytes that a rank saves for the backward of one microbatch."""
    found, modes = sums(s), s.recompute
    ones = {mode: microbatch(s, found, mode) for mode in modes}
    blocks = sum(max(ones[mode].plain, ones[mode].mixed) for mode in modes) / s.model.layers
    return math.ceil(s.model.layers / s.layout.pp) * blocks + ones[modes[0]].begin + ones[modes[-1]].end
