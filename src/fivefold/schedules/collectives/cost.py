"""Time of a collective on a topology, by the alpha-beta-gamma model.

A message of S bytes from a rank that is ready at time t is there at t + alpha + S beta: alpha is the latency of its
route, 1 / beta the bandwidth of its slowest link, shared with the other messages of the round. Messages of a round
through one port pay their alphas one after the other. The sender goes on after S beta, the receiver when the message is
there, and when it has added it (gamma per byte). No rank waits for ranks that it has no messages with. On equal links
this gives the formulas of textbooks:

    ring 2 (n-1) (alpha + S/n beta) + (n-1)/n S gamma          butterfly log2 n (alpha + S beta + S gamma)
    Rabenseifner 2 log2 n alpha + 2 (n-1)/n S beta + (n-1)/n S gamma          (Thakur et al. 2005)
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from fivefold.schedules.collectives.algorithm import Algorithm, Line
from fivefold.schedules.collectives.move import Collective, Round
from fivefold.schedules.collectives.registry import ALGORITHMS, build
from fivefold.schedules.collectives.topology import Topology

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
    run = _Run(collective, topology, size)
    ends = []
    for moves in collective.rounds:
        run.go(moves)
        ends.append(max(run.clock.values()))
    busy = run.busy
    link = max(busy, key=lambda name: busy[name], default="")
    seconds = ends[-1] if ends else 0.0
    return Cost(seconds, tuple(ends), max(run.sent), link, run.carried.get(link, 0.0), busy.get(link, 0.0))


Place = tuple[int, int]
"""(rank, stream)"""


class _Run:
    """The state between two rounds: when each rank is ready, what it has sent, what the links have carried."""

    def __init__(self, collective: Collective, topology: Topology, size: float):
        self.topology, self.streams = topology, collective.streams
        self.each = size / collective.whole if collective.primitive != "barrier" else 0.0
        self.clock: dict[Place, float] = defaultdict(float)
        self.sent = [0.0] * collective.ranks
        self.carried: dict[str, float] = defaultdict(float)
        self.busy: dict[str, float] = defaultdict(float)
        # of a card: seconds for which it need not send, and when it had them
        self.saved: dict[str, tuple[float, float]] = {}

    def go(self, moves: Round) -> None:
        """Goes through a round."""
        messages, added = self._messages(moves)
        takes = self._takes(messages)
        lag: dict[tuple[str, int], float] = defaultdict(float)  # latencies of a port's messages up to here
        after = dict(self.clock)
        arrived: dict[Place, float] = {}
        for (source, target, stream), amount in messages.items():
            latency, links = self.topology.route(source, target)
            alone = self._alone(source, target, amount, messages) if self.topology.queue else 0.0
            leaves = self.clock[source, stream] + max(alone, *map(takes.__getitem__, links))
            ports = {(links[0], stream), (links[-1], stream)}
            before = lag[links[0], stream]
            for port in ports:
                lag[port] += latency
            from_, to = (source, stream), (target, stream)
            after[from_] = max(after.get(from_, 0.0), leaves + before)
            arrived[to] = max(arrived.get(to, 0.0), leaves + max(lag[port] for port in ports))
            self.sent[source] += amount
        for to, at in arrived.items():
            adding = self.topology.reduce_s * added.get(to, 0.0)
            after[to] = max(after.get(to, 0.0), max(at, self.clock[to]) + adding)
        self.clock.update(after)

    def _messages(self, moves: Round) -> tuple[dict[tuple[int, int, int], float], dict[Place, float]]:
        """(bytes of each message by source, target and stream; bytes that each place adds)."""
        messages: dict[tuple[int, int, int], float] = defaultdict(float)
        added: dict[Place, float] = defaultdict(float)
        for source, target, chunks, reduce in moves:
            stream = chunks.start % self.streams
            amount = self.each * len(chunks)
            messages[source, target, stream] += amount
            if reduce:
                added[target, stream] += amount
        return messages, added

    def _takes(self, messages: dict[tuple[int, int, int], float]) -> dict[str, float]:
        """Seconds that the messages of a round take on each link."""
        takes: dict[str, float] = defaultdict(float)
        begins: dict[str, float] = defaultdict(lambda: inf)
        acks = self.topology.acks
        for (source, target, stream), amount in messages.items():
            back = self.topology.back(source, target)
            for link in self.topology.route(source, target).links:
                takes[link] += amount / self.topology.bandwidth(link) + self.topology.occupied(
                    link, bool(back)
                )
                self.carried[link] += amount
                begins[link] = min(begins[link], self.clock[source, stream])
            for link in back if acks else ():
                takes[link] += acks * amount / self.topology.bandwidth(link)
        for link, seconds in takes.items():
            self.busy[link] += seconds
        for link in begins if self.topology.burst else ():
            if link.startswith("card"):
                takes[link] = self._after_burst(link, begins[link], takes[link])
        return takes

    def _alone(
        self, source: int, target: int, amount: float, messages: dict[tuple[int, int, int], float]
    ) -> float:
        """Seconds of a message between nodes if it had its card for itself: it begins when the target's request for it
        has come past what other ranks send there. What shares its card uses that time."""
        net = self.topology
        if not (back := net.back(source, target)):
            return 0.0
        others = sum(
            other
            for (a, b, _), other in messages.items()
            if back[0] in net.route(a, b).links and (a, b) != (target, source)
        )
        bandwidth = net.bandwidth(back[0])
        return (amount + min(others, net.queue * bandwidth)) / bandwidth if others else 0.0

    def _after_burst(self, link: str, begins: float, seconds: float) -> float:
        """Seconds that a card's messages of a round still take when what it has saved up while idle is gone."""
        most = self.topology.burst / self.topology.bandwidth(link)
        saved, last = self.saved.get(link, (most, begins))
        saved = min(most, saved + max(0.0, begins - last))
        still = max(0.0, seconds - saved)
        self.saved[link] = max(0.0, saved - seconds), begins + still
        return still


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
    found, refused = [], {}
    shape = topology.shape
    for made in ALGORITHMS[primitive].values():  # type: ignore[index]
        if not made.fits(shape) or (made.grids and len(shape.grid) not in (0, made.grids)):
            refused[made.name] = f"needs {made.needs}"
            continue
        costs = {
            pieces: simulate(build(primitive, made.name, shape._replace(pieces=pieces)), topology, size)
            for pieces in made.pieces
        }
        best = min(costs, key=lambda pieces: costs[pieces].seconds)
        found.append(Choice(made, best, costs[best]))
    # Among equals those for any topology come first.
    return sorted(found, key=lambda x: (round(x.cost.seconds, 12), bool(x.algorithm.needs))), refused
