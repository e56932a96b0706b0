"""Prices of messages: those of the cheapest algorithm of `schedules/collectives`, on the two levels of a cluster.

A group's members are evenly spread, `local` of them on each of its nodes. Of each algorithm the registry has a line,
alpha + beta S, which the simulator gives, too (tests/test_collectives_cost.py). Bandwidths are those that NCCL reaches
with large messages. A ring uses all network cards of the group's devices on a node, one channel each. With S bytes and
n ranks, a rank sends S (n-1)/n in all-gather and reduce-scatter, and twice that in all-reduce.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, cast

from fivefold.host import tables
from fivefold.schedules.collectives import ALGORITHMS, Levels, Line, Primitive, Wire, build, shape_of
from fivefold.schedules.collectives.cost import Topology, line, simulate
from fivefold.schedules.collectives.registry import AUTO, LIBRARY, fastest, pieces_of, resolved
from fivefold.sharding.layout import Layout, changed, groups, on_node
from fivefold_plan.cluster.devices import Cluster
from fivefold_plan.cluster.measured import line_through

# Seconds of a collective besides its algorithm: kernels start, ranks meet. All-reduces of 32 KiB take 39.8 us on 8
# H200, 43.8 on 8 A100, 47.8 on 8 B200 (stas00/ml-engineering, network/README.md). Of these the best algorithm
# explains 10.5.
LAUNCH = 33e-6


@dataclass(frozen=True)
class Group:
    """A group of communicating ranks: their number, and the number of them on each node."""

    ranks: int
    local: int

    @property
    def nodes(self) -> int:
        return math.ceil(self.ranks / self.local)


def group(layout: Layout, cluster: Cluster, name: str) -> Group:
    """The group with this name, in the order of ranks of `sharding/layout.py`."""
    x = layout
    axes = (x.pp, x.dp_replicate, x.dp_shard, x.cp, x.tp, x.ep, x.ep_fold, x.ranks_per_node)
    return _group(name, axes, cluster.per_node)


SIZES = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep", "ep_fold", "ranks_per_node")


@lru_cache(maxsize=2**16)
def _group(name: str, sizes: tuple[int | None, ...], per_node: int) -> Group:
    """The group with this name. sizes: what a layout has of `SIZES`."""
    layout = changed(Layout(), **dict(zip(SIZES, sizes, strict=True)))
    return Group(groups(layout)[name][0], on_node(layout, name, per_node))


def collective(
    what: str, size: float, group: Group, cluster: Cluster, dtype: str = "fp32", measured: str = ""
) -> float:
    """Seconds of a collective whose larger of input and output has `size` bytes. dtype: of sums. measured: its name in
    a machine's table, if it is another one's there."""
    machine = cluster.machine
    if group.ranks == 1:
        return 0.0
    if machine and group.nodes == 1:
        sums = what in ("all_reduce", "reduce_scatter")
        name = measured or (f"{what} {dtype}" if sums else what)
        return machine.message(name, size, group.ranks, cluster.on_machine)
    key = what, group.ranks, group.local
    lines = cluster.lines.get(key)
    if lines is None:
        price = _gloo if machine else _lines
        lines = cluster.lines[key] = price(cast("Primitive", what), group, cluster)
    seconds = min([alpha + beta * size for alpha, beta in lines])
    return seconds if machine else LAUNCH + seconds


def scatter_gradients(size: float, group: Group, cluster: Cluster) -> float:
    """Seconds of ZeRO's reduce-scatter (parallel/zero.py). On a CPU it avoids gloo's, which is an all-reduce."""
    if cluster.machine:
        return collective("all_to_all", size, group, cluster, measured="scatter_gradients")
    return collective("reduce_scatter", size, group, cluster)


def best_all_reduces(group: Group, cluster: Cluster) -> dict[int, str]:
    """The fastest all-reduce of a group by size, as measured on this machine; empty for other clusters."""
    machine = cluster.machine
    return tables.best_all_reduce(group.ranks, machine.device) if machine and group.nodes == 1 else {}


def summed_by(by: str, group: Group, cluster: Cluster) -> str:
    """What a `layout.all_reduce` means for a group."""
    return resolved(by, group.ranks, group.local, best_all_reduces(group, cluster), cluster.on_cpu)


def sum_gradients(size: float, group: Group, cluster: Cluster, by: str) -> float:
    """Seconds to sum `size` bytes of gradients over a group by a `layout.all_reduce`. This machine's are those that
    `fivefold bench collectives` measured; without them, those of the library."""
    name = summed_by(by, group, cluster)
    if name == AUTO:
        name = fastest(best_all_reduces(group, cluster), round(size))
    if name == LIBRARY or group.ranks == 1:
        return collective("all_reduce", size, group, cluster)
    if cluster.machine and group.nodes == 1:
        seconds = tables.all_reduce_seconds(group.ranks, name)
        if not seconds:
            return collective("all_reduce", size, group, cluster)
        return cluster.machine.factors["messages"] * line_through(seconds, size)
    return by_schedule("all_reduce", name, size, group, cluster)


def share_states(
    primitive: Literal["all_gather", "reduce_scatter"], size: float, group: Group, cluster: Cluster, by: str
) -> float:
    """Seconds of ZeRO's all-gather or reduce-scatter by a `layout.all_gather` or `layout.reduce_scatter`. On this
    machine those of the library are measured; others take as many times as long as the simulator says."""
    library = collective(primitive, size, group, cluster)
    if primitive == "reduce_scatter":
        library = scatter_gradients(size, group, cluster)
    if by == LIBRARY or group.ranks == 1:
        return library
    seconds = by_schedule(primitive, by, size, group, cluster)
    if cluster.machine and group.nodes == 1:
        own = GLOO["all_to_all" if primitive == "reduce_scatter" else primitive]
        return library * seconds / by_schedule(*own, size, group, cluster)
    return seconds


def by_schedule(primitive: Primitive, name: str, size: float, group: Group, cluster: Cluster) -> float:
    """Seconds of an algorithm that the trainer runs round by round."""
    made = ALGORITHMS[primitive][name]
    shape = shape_of(group.ranks, group.local, pieces=pieces_of(made, round(size)))
    if cluster.machine:  # small groups are simulated
        links, start = on_hosts(group, cluster), 0.0
        levels, formula = links.levels, made.line if group.ranks > SIMULATED else None
    else:
        levels, start, formula = _levels(group, cluster), LAUNCH, made.line
        links = Topology(
            cluster.name, group.ranks, group.local, levels.near, levels.far, pairs=cluster.intra.mesh
        )
    if formula and (price := formula(shape, levels)):
        return start + price.alpha + price.beta * size
    if group.ranks <= SIMULATED:
        return start + simulate(build(primitive, name, shape), links, size).seconds
    key = f"{primitive} by {name} in {shape.pieces}", group.ranks, group.local
    if key not in cluster.lines:  # one simulation for all sizes
        cluster.lines[key] = (line(build(primitive, name, shape), links),)
    ((alpha, beta),) = cluster.lines[key]
    return start + alpha + beta * size


def send(size: float, crosses: bool, cluster: Cluster) -> float:
    """Seconds to send `size` bytes to another rank. `crosses`: that rank is on another node."""
    if cluster.machine and not crosses:
        return cluster.machine.message("send", size, 2, cluster.on_machine)
    if cluster.machine:
        return cluster.inter.latency + size / cluster.rail
    if crosses:
        return LAUNCH + cluster.inter.latency + size / cluster.rail
    return LAUNCH + cluster.intra.latency + size / _pair(cluster)


def send_line(size: float, crosses: bool, cluster: Cluster) -> Line:
    """What messages to another rank take, as a line: exact for `size` bytes behind those up to which all messages take
    equally long (the smallest that was measured)."""
    level = cluster.machine.smallest("send", 2) if cluster.machine and not crosses else 0.0
    latency = send(0.0, crosses, cluster)
    return Line(latency, (send(level + size, crosses, cluster) - latency) / size)


def exposed(seconds: float, held: float, beside: float) -> float:
    """Exposed seconds of a message that overlaps with `beside` seconds of computation, and holds its device for some of
    its time."""
    return held + max(0.0, seconds - held - beside)


def held(seconds: float, group: Group, cluster: Cluster) -> float:
    """Seconds of a message in which its devices cannot compute. A CPU itself copies and adds within a node; between
    nodes the link takes nearly all of the time. On GPUs see `Device.contended`."""
    return seconds * (1.0 - cluster.free if group.nodes == 1 else cluster.device.contended)


# gloo's algorithms (gloo/allreduce.cc, allgather.cc). Its reduce-scatter is an all-reduce; an all-to-all is ours
# (comm/axis.py).
SIMULATED = 64  # ranks; larger groups are priced by formulas
GLOO: dict[Primitive, tuple[Primitive, str]] = {
    "all_reduce": ("all_reduce", "ring"),
    "reduce_scatter": ("all_reduce", "ring"),
    "all_gather": ("all_gather", "ring"),
    "all_to_all": ("all_to_all", "direct"),
}


def _gloo(primitive: Primitive, group: Group, cluster: Cluster) -> tuple[Line]:
    """The line of gloo's algorithm between hosts."""
    primitive, name = GLOO[primitive]
    links, shape, formula = on_hosts(group, cluster), shape_of(group.ranks), ALGORITHMS[primitive][name].line
    far, found = links.far, None
    if group.ranks > SIMULATED and formula and far:  # as if every hop left its host
        found = formula(shape, Levels(far, far, far.bandwidth))
    return (found or line(build(primitive, name, shape), links),)


def on_hosts(group: Group, cluster: Cluster) -> Topology:
    """The links of a group on several hosts, with its share of each host's cards. Inside a host they are as measured
    between local ranks."""
    machine = cluster.machine
    assert machine is not None
    points = machine.links[min(machine.links)]["send"]
    near = Wire(points[0][1], (points[-1][0] - points[0][0]) / max(1e-9, points[-1][1] - points[0][1]))
    cards = group.local * cluster.cards / cluster.per_node
    whole = max(1, math.floor(cards))
    far = Wire(cluster.inter.latency, cluster.rail * group.local / whole)
    return Topology(cluster.name, group.ranks, group.local, near, far, cards=whole)


def _lines(primitive: Primitive, group: Group, cluster: Cluster) -> tuple[Line, ...]:
    """The lines of all algorithms of a group, without those that are never the cheapest."""
    levels, shape = _levels(group, cluster), shape_of(group.ranks, group.local)
    found = [
        formula
        for made in ALGORITHMS[primitive].values()
        if made.line and made.fits(shape) and (formula := made.line(shape, levels))
    ]
    best: list[Line] = []
    for one in sorted(found):  # by alpha: each must have less beta than those before it
        if not best or one.beta < best[-1].beta:
            best.append(one)
    return tuple(best)


def _levels(group: Group, cluster: Cluster) -> Levels:
    """The links of a group. Where each pair of devices has its own wire, it uses those between its members."""
    link, near = cluster.intra, cluster.intra.achieved
    if link.mesh:
        near *= (group.local - 1) / max(1, cluster.per_node - 1)
    # A device that is alone on its node sends nothing inside, but through its port to the network.
    near = near or link.achieved
    switch = link.switch(group.ranks) if group.ranks == group.local == cluster.per_node else None
    return Levels(Wire(link.latency, near), Wire(cluster.inter.latency, cluster.rail), _pair(cluster), switch)


def _pair(cluster: Cluster) -> float:
    """Bytes/s between two devices of a node."""
    return cluster.intra.achieved / (max(1, cluster.per_node - 1) if cluster.intra.mesh else 1)
