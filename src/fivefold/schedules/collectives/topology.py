"""Where messages go: the links of a cluster, and the links on the way from one rank to another.

    rank -> port -> [switch of the node] -> port -> rank                          inside a node (NVLink, or PCIe alone)
    rank -> port -> card -> [leaf switch] -> card -> port -> rank                 between nodes
    rank -> port -> card -> leaf -> [spine] -> leaf -> card -> port -> rank       between leaf switches

Every link has its bandwidth in each direction. Messages of one round that use the same link share it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple

from fivefold.errors import UserError
from fivefold.schedules.collectives.algorithm import Levels, Shape, Wire


class Route(NamedTuple):
    """The way of a message: seconds until its first byte arrives, and the links that it uses."""

    latency: float
    links: tuple[str, ...]


@dataclass(frozen=True)
class Topology:
    """`ranks` devices, `local` of them on each node.

    near: a device's link to its node. far: a network card's link; None if there is one node only. cards: network cards
    per node, 0 for one per device. domain: devices that `near` connects, 0 for the whole node; beyond it, and on the
    way to the cards, messages take `pcie`, if that is given. leaf: nodes on a leaf switch, 0 for all of them.
    oversubscription: what all cards below a leaf switch can send, by what its links to the spine can carry. torus:
    sizes of a torus inside the node, where `near` is the link to each neighbour; () for a switch. pairs: every pair of
    devices in a node has its own wire, and `near` is all wires of a device together. bus: what all messages of a
    machine share, its cores and memory; its latency is the time that each message keeps it busy, far_bus that of each
    message between nodes. hosts: nodes on one
    machine (namespaces, containers), which share its bus. burst: bytes that a card which was idle sends at once, before
    its rate holds (a token bucket). acks: bytes that come back per byte that a card sends, as TCP's acknowledgements.
    queue: seconds that a receiver's request for data (as gloo sends it) waits at a card behind data of other ranks.
    reduce_s: seconds per byte that is added.
    """

    name: str
    ranks: int
    local: int
    near: Wire
    far: Wire | None = None
    cards: int = 0
    domain: int = 0
    pcie: Wire | None = None
    leaf: int = 0
    oversubscription: float = 1.0
    torus: tuple[int, ...] = ()
    pairs: bool = False
    bus: Wire | None = None
    far_bus: float = 0.0
    hosts: int = 1
    burst: float = 0.0
    acks: float = 0.0
    queue: float = 0.0
    reduce_s: float = 0.0

    def __post_init__(self) -> None:
        if self.torus and prod(self.torus) != self.local:
            sizes = "x".join(map(str, self.torus))
            raise UserError(
                f"topology '{self.name}': torus: {sizes} has {prod(self.torus)} devices, but a node has {self.local}"
            )
        if self.ranks > self.local and self.far is None:
            raise UserError(
                f"topology '{self.name}': {self.ranks} ranks on nodes of {self.local} need a link between nodes, "
                "which is missing: give inter_gb_s and inter_latency_us"
            )

    @property
    def shape(self) -> Shape:
        """What schedules are made for here."""
        grid = self.torus if prod(self.torus) == self.ranks else ()
        return Shape(self.ranks, min(self.local, self.ranks), grid)

    @property
    def levels(self) -> Levels:
        """The two levels, for formulas: every device with its share of the node's cards."""
        pair = self.near.bandwidth / max(1, self.local - 1) if self.pairs else self.near.bandwidth
        if self.far is None:
            return Levels(self.near, self.near, pair)
        cards = self.cards or self.local
        return Levels(self.near, Wire(self.far.latency, self.far.bandwidth * cards / self.local), pair)

    @cached_property
    def _routes(self) -> dict[tuple[int, int], Route]:
        return {}

    def route(self, source: int, target: int) -> Route:
        """The way from one rank to another."""
        known = self._routes
        if (source, target) not in known:
            node, other = source // self.local, target // self.local
            make = self._inside if node == other else self._across
            known[source, target] = make(source, target)
        return known[source, target]

    def _inside(self, source: int, target: int) -> Route:
        if self.bus:
            return Route(self.near.latency, (f"rank {source} out", self._bus(source), f"rank {target} in"))
        if self.torus:
            links = tuple(self._along(source, target))
            return Route(len(links) * self.near.latency, links)
        if self.pairs:
            return Route(self.near.latency, (f"wire {source} to {target}",))
        if self.domain and source // self.domain != target // self.domain:
            wire = self.pcie or self.near
            return Route(wire.latency, (f"pcie {source} out", f"pcie {target} in"))
        return Route(self.near.latency, (f"rank {source} out", f"rank {target} in"))

    def _across(self, source: int, target: int) -> Route:
        assert self.far is not None
        port = "pcie" if self.pcie else "rank"
        way = [f"{port} {source} out", f"card {self._card(source)} out"]
        if self.leaf:
            leaf, other = (rank // self.local // self.leaf for rank in (source, target))
            if leaf != other:
                way += [f"leaf {leaf} up", f"leaf {other} down"]
        if self.bus:
            way += dict.fromkeys((self._bus(source), self._bus(target)))
        return Route(self.far.latency, (*way, f"card {self._card(target)} in", f"{port} {target} in"))

    def back(self, source: int, target: int) -> tuple[str, ...]:
        """The cards that acknowledgements of a message go through."""
        if source // self.local == target // self.local:
            return ()
        return f"card {self._card(target)} out", f"card {self._card(source)} in"

    def _bus(self, rank: int) -> str:
        return f"bus {rank // (self.local * self.hosts)}"

    def _card(self, rank: int) -> str:
        node, place = divmod(rank, self.local)
        return f"{node}.{place * (self.cards or self.local) // self.local}"

    def _along(self, source: int, target: int) -> Iterator[str]:
        """The links through a torus, dim by dim, the shorter way around each."""
        base = source // self.local * self.local
        here, stride = source - base, self.local
        for size in self.torus:
            stride //= size
            ahead = ((target - base) // stride - here // stride) % size
            step = 1 if ahead <= size - ahead else -1
            for _ in range(min(ahead, size - ahead)):
                place = here // stride % size
                next_ = here + ((place + step) % size - place) * stride
                yield f"link {base + here} to {base + next_}"
                here = next_

    def bandwidth(self, link: str) -> float:
        """Bytes/s of a link in one direction."""
        kind = link.partition(" ")[0]
        if kind == "bus":
            assert self.bus is not None
            return self.bus.bandwidth
        if kind == "wire":
            return self.levels.pair
        if kind == "pcie":
            return (self.pcie or self.near).bandwidth
        if kind in ("card", "leaf"):
            assert self.far is not None
            below = self.leaf * (self.cards or self.local) / self.oversubscription
            return self.far.bandwidth * (below if kind == "leaf" else 1)
        return self.near.bandwidth

    def occupied(self, link: str, far: bool) -> float:
        """Seconds that each message, or each between nodes, keeps a link busy besides its bytes."""
        if not self.bus or not link.startswith("bus"):
            return 0.0
        return self.far_bus if far else self.bus.latency
