"""Seconds and bytes of collectives: the alpha-beta model, with the algorithms that NCCL chooses from.

A group's members are evenly spread: `local` of them on each of its nodes. A ring through all members leaves each node
once and uses the network of as many devices as the group has there ("rails"), so its bandwidth is that of the slower
of the two levels. Bytes sent by a rank: of S bytes in all and n ranks, all-gather and reduce-scatter S (n-1)/n,
all-reduce twice that.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from fivefold.layout import AXES, EXPERT_GROUPS, GROUPS, Layout
from fivefold.plan.clusters import Cluster, Link

LAUNCH = 10e-6  # seconds until a collective is under way on all ranks


@dataclass(frozen=True)
class Group:
    """Ranks that communicate: how many, and how many of them share a node."""

    ranks: int
    local: int

    @property
    def nodes(self) -> int:
        return math.ceil(self.ranks / self.local)


def group(layout: Layout, cluster: Cluster, name: str) -> Group:
    """The groups of this name under the order of ranks of `layout.py`."""
    x = layout
    return _group(name, (x.pp, x.dp_replicate, x.dp_shard, x.cp, x.tp), x.ep, cluster.per_node)


@lru_cache(maxsize=2**16)
def _group(name: str, axes: tuple[int, ...], ep: int, per_node: int) -> Group:
    """axes: sizes, in the order of AXES."""
    sizes = dict(zip(AXES, axes, strict=True))
    shard, tp = sizes["dp_shard"] * sizes["cp"], sizes["tp"]
    if name in EXPERT_GROUPS:
        ranks = {"ep": ep, "edp": sizes["dp_replicate"] * shard // ep}
        size = ranks.get(name, max(1, shard // ep))
        stride = tp * (1 if name == "ep" else ep)
    else:
        last = AXES.index(GROUPS[name][-1])
        size = math.prod(sizes[axis] for axis in GROUPS[name])
        stride = math.prod(axes[last + 1 :])
    return Group(size, max(1, min(size, per_node // stride)))


def all_reduce(size: float, group: Group, cluster: Cluster, dtype: str = "fp32") -> float:
    """Seconds to add up `size` bytes over a group: the faster of a ring and a double tree."""
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
    """Seconds until every rank has all `size` bytes, of which each had its part. A ring."""
    if group.ranks == 1:
        return 0.0
    if cluster.machine:
        return _measured("all_gather", size, group, cluster)
    return _ring(size, group, cluster)


def _ring(size: float, group: Group, cluster: Cluster) -> float:
    sent = size * (group.ranks - 1) / group.ranks
    return LAUNCH + _ring_latency(group, cluster) + sent / _bandwidth(group, cluster)


def reduce_scatter(size: float, group: Group, cluster: Cluster, dtype: str = "fp32") -> float:
    """Seconds until every rank has the sum of its part of `size` bytes: an all-gather backwards."""
    if group.ranks == 1:
        return 0.0
    if cluster.machine:
        return _measured(f"reduce_scatter {dtype}", size, group, cluster)
    return _ring(size, group, cluster)


def scatter_gradients(size: float, group: Group, cluster: Cluster) -> float:
    """The same as ZeRO does it (parallel/zero.py): on a CPU not by gloo's reduce-scatter, which is an all-reduce."""
    if cluster.machine and group.ranks > 1:
        return _measured("scatter_gradients", size, group, cluster)
    return reduce_scatter(size, group, cluster)


def all_to_all(size: float, group: Group, cluster: Cluster, dtype: str = "") -> float:
    """Seconds in which every rank sends an equal part of its `size` bytes to each rank."""
    if group.ranks == 1:
        return 0.0
    if cluster.machine:
        return _measured("all_to_all", size, group, cluster)
    inside = size * (group.local - 1) / group.ranks / _link(cluster.intra, group.local, cluster)
    outside = size * (group.ranks - group.local) / group.ranks / cluster.inter.achieved
    hops = cluster.inter.latency if group.nodes > 1 else cluster.intra.latency
    return LAUNCH + hops * math.log2(group.ranks) + max(inside, outside)


def send(size: float, crosses: bool, cluster: Cluster) -> float:
    """Seconds until another rank has `size` bytes; `crosses`: it is on another node."""
    if cluster.machine:
        return _measured("send", size, Group(2, 2), cluster)
    link = cluster.inter if crosses else cluster.intra
    bandwidth = link.achieved / (cluster.per_node - 1) if link.mesh else link.achieved
    return LAUNCH + link.latency + size / bandwidth


def exposed(seconds: float, beside: float, cluster: Cluster) -> float:
    """What sticks out of a message beyond the work that it runs beside. Between local ranks the processor itself copies
    and adds: only the rest of the time can be hidden."""
    free = cluster.machine.free if cluster.machine else 1.0
    return seconds * (1.0 - free) + max(0.0, seconds * free - beside)


def _measured(what: str, size: float, group: Group, cluster: Cluster) -> float:
    assert cluster.machine is not None
    return cluster.machine.message(what, size, group.ranks, cluster.devices)


def _bandwidth(group: Group, cluster: Cluster) -> float:
    """bytes/s that a rank sends in a ring."""
    inside = _link(cluster.intra, group.local, cluster)
    if group.nodes == 1:
        return inside
    rails = group.local * cluster.inter.achieved
    return rails if group.local == 1 else min(inside, rails)


def _link(link: Link, members: int, cluster: Cluster) -> float:
    return link.achieved * (members - 1) / max(1, cluster.per_node - 1) if link.mesh else link.achieved


def _ring_latency(group: Group, cluster: Cluster) -> float:
    """Of once around: a hop between neighbours, of which one a node crosses the network."""
    between = group.nodes if group.nodes > 1 else 0
    return (group.ranks - 1 - min(between, group.ranks - 1)) * cluster.intra.latency + min(
        between, group.ranks - 1
    ) * cluster.inter.latency
