"""Prices collectives by the alpha-beta model, with the algorithms that NCCL chooses from.

A group's members are evenly spread, `local` of them on each of its nodes. A ring through all members leaves each node
once and uses the network of all the group's devices there ("rails"). So its bandwidth is that of the slower level. With
S bytes and n ranks, a rank sends S (n-1)/n in all-gather and reduce-scatter, and twice that in all-reduce.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from fivefold.plan.devices import Cluster, Link
from fivefold.spread.layout import Layout, groups

LAUNCH = 10e-6  # seconds until a collective is under way on all ranks


@dataclass(frozen=True)
class Group:
    """A group of communicating ranks: their number, and the number of them on each node."""

    ranks: int
    local: int

    @property
    def nodes(self) -> int:
        return math.ceil(self.ranks / self.local)


def group(layout: Layout, cluster: Cluster, name: str) -> Group:
    """The group with this name, in the order of ranks of `spread/layout.py`."""
    x = layout
    return _group(name, (x.pp, x.dp_replicate, x.dp_shard, x.cp, x.tp), x.ep, cluster.per_node)


@lru_cache(maxsize=2**16)
def _group(name: str, axes: tuple[int, ...], ep: int, per_node: int) -> Group:
    """The group with this name. axes: sizes of the axes in the order of AXES."""
    pp, dp_replicate, dp_shard, cp, tp = axes
    layout = Layout(pp=pp, dp_replicate=dp_replicate, dp_shard=dp_shard, cp=cp, tp=tp, ep=ep)
    size, stride = groups(layout)[name]
    return Group(size, max(1, min(size, per_node // stride)))


def all_reduce(size: float, group: Group, cluster: Cluster, dtype: str = "fp32") -> float:
    """Seconds to sum `size` bytes over a group, by the faster of a ring and a double tree."""
    if group.ranks == 1:
        return 0.0
    if cluster.machine:
        return _measured(f"all_reduce {dtype}", size, group, cluster)
    sent = 2 * size * (group.ranks - 1) / group.ranks
    bandwidth = _bandwidth(group, cluster)
    if group.nodes == 1 and group.ranks == cluster.per_node and cluster.intra.reduce:
        bandwidth = cluster.intra.reduce
    ring = 2 * _ring_latency(group, cluster)
    tree = 2 * (
        math.ceil(math.log2(group.nodes)) * cluster.inter.latency + (group.local - 1) * cluster.intra.latency
    )
    return LAUNCH + min(ring, tree if group.nodes > 1 else ring) + sent / bandwidth


def all_gather(size: float, group: Group, cluster: Cluster, dtype: str = "") -> float:
    """Seconds to gather `size` bytes in total on every rank, by a ring."""
    if group.ranks == 1:
        return 0.0
    if cluster.machine:
        return _measured("all_gather", size, group, cluster)
    return _ring(size, group, cluster)


def _ring(size: float, group: Group, cluster: Cluster) -> float:
    sent = size * (group.ranks - 1) / group.ranks
    return LAUNCH + _ring_latency(group, cluster) + sent / _bandwidth(group, cluster)


def reduce_scatter(size: float, group: Group, cluster: Cluster, dtype: str = "fp32") -> float:
    """Seconds to leave each rank with the sum of its part of `size` bytes. It is an all-gather backwards."""
    if group.ranks == 1:
        return 0.0
    if cluster.machine:
        return _measured(f"reduce_scatter {dtype}", size, group, cluster)
    return _ring(size, group, cluster)


def scatter_gradients(size: float, group: Group, cluster: Cluster) -> float:
    """Seconds of ZeRO's reduce-scatter (parallel/zero.py). On a CPU it avoids gloo's, which is an all-reduce."""
    if cluster.machine and group.ranks > 1:
        return _measured("scatter_gradients", size, group, cluster)
    return reduce_scatter(size, group, cluster)


def all_to_all(size: float, group: Group, cluster: Cluster, dtype: str = "") -> float:
    """Seconds for every rank to send an equal part of its `size` bytes to each rank."""
    if group.ranks == 1:
        return 0.0
    if cluster.machine:
        return _measured("all_to_all", size, group, cluster)
    inside = size * (group.local - 1) / group.ranks / _link(cluster.intra, group.local, cluster)
    outside = size * (group.ranks - group.local) / group.ranks / cluster.rail
    hops = cluster.inter.latency if group.nodes > 1 else cluster.intra.latency
    return LAUNCH + hops * math.log2(group.ranks) + max(inside, outside)


def send(size: float, crosses: bool, cluster: Cluster) -> float:
    """Seconds to send `size` bytes to another rank. `crosses`: that rank is on another node."""
    if cluster.machine:
        return _measured("send", size, Group(2, 2), cluster)
    link = cluster.inter if crosses else cluster.intra
    bandwidth = link.achieved / (cluster.per_node - 1) if link.mesh else link.achieved
    return LAUNCH + link.latency + size / bandwidth


def exposed(seconds: float, beside: float, cluster: Cluster) -> float:
    """Exposed seconds of a message that overlaps with `beside` seconds of computation.

    Between local ranks the CPU itself copies and adds. Only the rest of the message can overlap.
    """
    return seconds * (1.0 - cluster.free) + max(0.0, seconds * cluster.free - beside)


def _measured(what: str, size: float, group: Group, cluster: Cluster) -> float:
    assert cluster.machine is not None
    return cluster.machine.message(what, size, group.ranks, cluster.devices)


def _bandwidth(group: Group, cluster: Cluster) -> float:
    """Bytes/s that a rank sends in a ring."""
    inside = _link(cluster.intra, group.local, cluster)
    if group.nodes == 1:
        return inside
    rails = group.local * cluster.rail
    return rails if group.local == 1 else min(inside, rails)


def _link(link: Link, members: int, cluster: Cluster) -> float:
    return link.achieved * (members - 1) / max(1, cluster.per_node - 1) if link.mesh else link.achieved


def _ring_latency(group: Group, cluster: Cluster) -> float:
    """Latency of one round through the ring, in seconds. One hop per node crosses the network."""
    between = group.nodes if group.nodes > 1 else 0
    return (group.ranks - 1 - min(between, group.ranks - 1)) * cluster.intra.latency + min(
        between, group.ranks - 1
    ) * cluster.inter.latency
