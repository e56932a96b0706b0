"""The links of a cluster, and the time of a collective on them, by the alpha-beta-gamma model.

    rank -> port -> [switch of the node] -> port -> rank                          inside a node (NVLink, or PCIe alone)
    rank -> port -> card -> [leaf switch] -> card -> port -> rank                 between nodes
    rank -> [switch that adds] -> rank                                            where there is one
    rank -> port -> card -> leaf -> [spine] -> leaf -> card -> port -> rank       between leaf switches

Every link has its bandwidth in each direction. Messages of one round that use the same link share it.

A message of S bytes from a rank that is ready at time t is there at t + alpha + S beta: alpha is the latency of its
route, 1 / beta the bandwidth of its slowest link, shared with the other messages of the round. Messages of a round
through one port pay their alphas one after the other. The sender goes on after S beta, the receiver when the message is
there, and when it has added it (gamma per byte). A switch adds and passes on what arrives, while it arrives. No rank
waits for ranks that it has no messages with. On equal links this gives the formulas of textbooks:

    ring 2 (n-1) (alpha + S/n beta) + (n-1)/n S gamma          butterfly log2 n (alpha + S beta + S gamma)
    Rabenseifner 2 log2 n alpha + 2 (n-1)/n S beta + (n-1)/n S gamma          (Thakur et al. 2005)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from math import prod
from typing import NamedTuple

from fivefold.errors import UserError
from fivefold.schedules.collectives.collective import Algorithm, Collective, Levels, Line, Round, Shape, Wire
from fivefold.schedules.collectives.registry import ALGORITHMS, build


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
    machine share, its cores and memory; its latency is the time that each message inside a node keeps it busy. hosts:
    nodes on one machine (namespaces, containers), which share its bus. reduce_s: seconds per byte that is added.
    switch: every rank's link to a switch that adds; its latency is that of the way there and back. None: there is none.
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
    hosts: int = 1
    reduce_s: float = 0.0
    switch: Wire | None = None

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
            return Levels(self.near, self.near, pair, self.switch)
        cards = self.cards or self.local
        return Levels(self.near, Wire(self.far.latency, self.far.bandwidth * cards / self.local), pair)

    @cached_property
    def route(self) -> Callable[[int, int], Route]:
        """The way from one rank to another."""
        return cache(self._route)

    def _route(self, source: int, target: int) -> Route:
        if max(source, target) >= self.ranks:
            assert self.switch is not None, f"topology '{self.name}' has no switch that adds"
            way = f"switch {source} up" if source < target else f"switch {target} down"
            return Route(self.switch.latency / 2, (way,))
        near, ends = self.near.latency, (f"rank {source} out", f"rank {target} in")
        machines = (rank // (self.local * self.hosts) for rank in (source, target))
        buses = dict.fromkeys(f"bus {machine}" for machine in machines) if self.bus else ()
        if source // self.local != target // self.local:
            assert self.far is not None
            port, leaves = "pcie" if self.pcie else "rank", list[str]()
            if self.leaf:
                leaf, other = (rank // self.local // self.leaf for rank in (source, target))
                leaves = [f"leaf {leaf} up", f"leaf {other} down"] if leaf != other else []
            out = f"{port} {source} out", f"card {self._card(source)} out"
            return Route(
                self.far.latency,
                (*out, *leaves, *buses, f"card {self._card(target)} in", f"{port} {target} in"),
            )
        if self.bus:
            return Route(near, (ends[0], *buses, ends[1]))
        if self.torus:
            links = tuple(self._along(source, target))
            return Route(len(links) * near, links)
        if self.pairs:
            return Route(near, (f"wire {source} to {target}",))
        if self.domain and source // self.domain != target // self.domain:
            return Route((self.pcie or self.near).latency, (f"pcie {source} out", f"pcie {target} in"))
        return Route(near, ends)

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
        if kind == "switch":
            assert self.switch is not None
            return self.switch.bandwidth
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


LARGE = 1e15  # bytes, for which latencies do not count


@dataclass(frozen=True)
class Cost:
    """What a collective costs.

    seconds: until the last rank has finished. ends: the same after each round. sent: bytes that the busiest rank sends.
    busiest: the link that is busy longest, its bytes and its seconds.
    """

    seconds: float
    ends: tuple[float, ...]
    sent: float
    busiest: str
    link_bytes: float
    link_seconds: float

    @property
    def rounds(self) -> int:
        return len(self.ends)


def simulate(collective: Collective, topology: Topology, size: float) -> Cost:
    """The cost of a message of `size` bytes (what a rank has in all; in an all-gather, what it ends with)."""
    return Run(collective, topology, size).cost()


Place = tuple[int, int]
"""(rank, stream)"""
Messages = dict[tuple[int, int, int], float]
"""Bytes or seconds of the messages of a round, by source, target and stream."""


class Run:
    """Goes through a collective, round by round. It knows when each rank is ready, what it has sent, and what the links
    have carried."""

    def __init__(self, collective: Collective, topology: Topology, size: float):
        self.topology, self.rounds, self.streams = topology, collective.rounds, collective.streams
        self.each = size / collective.whole if collective.primitive != "barrier" else 0.0
        self.clock: dict[Place, float] = defaultdict(float)
        self.sent = [0.0] * collective.members
        self.carried: dict[str, float] = defaultdict(float)
        self.busy: dict[str, float] = defaultdict(float)

    def cost(self) -> Cost:
        ends = []
        for moves in self.rounds:
            self.go(moves)
            ends.append(max(self.clock.values()))
        link = max(self.busy, key=self.busy.__getitem__, default="")
        seconds, carried = ends[-1] if ends else 0.0, self.carried.get(link, 0.0)
        return Cost(
            seconds,
            tuple(ends),
            max(self.sent[: self.topology.ranks]),
            link,
            carried,
            self.busy.get(link, 0.0),
        )

    def go(self, moves: Round) -> None:
        net = self.topology
        messages: Messages = defaultdict(float)
        added: dict[Place, float] = defaultdict(float)  # bytes
        for source, target, chunks, reduce in moves:
            stream, amount = chunks.start % self.streams, self.each * len(chunks)
            messages[source, target, stream] += amount
            if reduce:
                added[target, stream] += amount
        takes = self.takes(messages)
        lag: dict[tuple[str, int], float] = defaultdict(float)  # latencies of a port's messages up to here
        after = dict(self.clock)
        arrived: dict[Place, float] = {}
        for (source, target, stream), amount in messages.items():
            latency, links = net.route(source, target)
            leaves = self.clock[source, stream] + takes[source, target, stream]
            ports = {(links[0], stream), (links[-1], stream)}
            before = lag[links[0], stream]
            for port in ports:
                lag[port] += latency
            from_, to = (source, stream), (target, stream)
            after[from_] = max(after.get(from_, 0.0), leaves + before)
            begins = leaves if target < net.ranks else self.clock[from_]
            arrived[to] = max(arrived.get(to, 0.0), begins + max(lag[port] for port in ports))
            self.sent[source] += amount
        for to, at in arrived.items():
            adding = net.reduce_s * added.get(to, 0.0) * (to[0] < net.ranks)
            after[to] = max(after.get(to, 0.0), max(at, self.clock[to]) + adding)
        self.clock.update(after)

    def takes(self, messages: Messages) -> Messages:
        """Seconds of each message of a round on the slowest link of its way."""
        on, route = self.on_links(messages), self.topology.route
        return {key: max(map(on.__getitem__, route(*key[:2]).links)) for key in messages}

    def on_links(self, messages: Messages) -> dict[str, float]:
        """Seconds that the messages of a round take on each link."""
        takes: dict[str, float] = defaultdict(float)
        net = self.topology
        for (source, target, _), amount in messages.items():
            near = source // net.local == target // net.local
            note = net.bus.latency if net.bus and near else 0.0
            for link in net.route(source, target).links:
                takes[link] += amount / net.bandwidth(link) + note * link.startswith("bus")
                self.carried[link] += amount
        for link, seconds in takes.items():
            self.busy[link] += seconds
        return takes


def line(collective: Collective, topology: Topology) -> Line:
    """alpha and beta of a collective: seconds of an empty message, and seconds per byte of a very large one. The time
    in between is at most `alpha + beta S`."""
    return Line(
        simulate(collective, topology, 0).seconds, simulate(collective, topology, LARGE).seconds / LARGE
    )


class Choice(NamedTuple):
    """An algorithm with the best number of pieces for a size, and its cost."""

    algorithm: Algorithm
    pieces: int
    cost: Cost


def compare(primitive: str, topology: Topology, size: float) -> tuple[list[Choice], dict[str, str]]:
    """(all algorithms of a primitive that are possible on a topology, fastest first; why the others are not)."""
    choices, refused, shape = [], {}, topology.shape
    for made in ALGORITHMS[primitive].values():  # type: ignore[index]
        switched = topology.switch is not None or not made.switches
        if not (made.fits(shape) and switched) or (made.grids and len(shape.grid) not in (0, made.grids)):
            refused[made.name] = f"needs {made.needs}" + f", not {topology.ranks}" * (not made.switches)
            continue
        costs = {
            pieces: simulate(build(primitive, made.name, shape._replace(pieces=pieces)), topology, size)
            for pieces in made.pieces
        }
        best = min(costs, key=lambda pieces: costs[pieces].seconds)
        choices.append(Choice(made, best, costs[best]))
    # Among equals those for any topology come first.
    return sorted(choices, key=lambda x: (round(x.cost.seconds, 12), bool(x.algorithm.needs))), refused
