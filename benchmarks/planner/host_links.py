"""What hosts.py knows of the links between hosts beyond a `Topology`, and the time of a collective on them."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, fields
from math import inf
from typing import Any

from fivefold.schedules.collectives import Collective
from fivefold.schedules.collectives.cost import Cost, Messages, Run, Topology
from fivefold_plan.cluster.clusters import of_fit


@dataclass(frozen=True)
class HostLinks(Topology):
    """far_bus: seconds for which each message between nodes keeps the bus busy. burst: bytes that a card which was idle
    sends at once, before its rate holds (a token bucket). acks: bytes that come back per byte that a card sends, as
    TCP's acknowledgements. queue: seconds that a receiver's request (as gloo sends it) waits at a card behind data of
    other ranks."""

    far_bus: float = 0.0
    burst: float = 0.0
    acks: float = 0.0
    queue: float = 0.0

    def back(self, source: int, target: int) -> tuple[str, ...]:
        """The cards that acknowledgements of a message go through; () inside a node."""
        if source // self.local == target // self.local:
            return ()
        return f"card {self._card(target)} out", f"card {self._card(source)} in"


def links_of(fit: dict[str, float], ranks: int, local: int, hosts: int) -> HostLinks:
    """The links of a fit of `host_messages`, as `of_fit` has those of one machine."""
    net = of_fit(fit, ranks, local, hosts)
    known: dict[str, Any] = {field.name: getattr(net, field.name) for field in fields(net)}
    known |= {name: fit[name] for name in ("far_bus", "burst", "acks", "queue")}
    return HostLinks(**known)


def simulate(collective: Collective, net: HostLinks, size: float) -> Cost:
    """As `schedules.collectives.cost.simulate`."""
    return _HostRun(collective, net, size).cost()


class _HostRun(Run):
    topology: HostLinks

    def __init__(self, collective: Collective, net: HostLinks, size: float):
        super().__init__(collective, net, size)
        # of a card: seconds for which it need not send, and when it had them
        self.saved: dict[str, tuple[float, float]] = {}

    def takes(self, messages: Messages) -> Messages:
        return {
            key: max(seconds, self._alone(*key[:2], messages[key], messages))
            for key, seconds in super().takes(messages).items()
        }

    def on_links(self, messages: Messages) -> dict[str, float]:
        net, takes = self.topology, super().on_links(messages)
        begins: dict[str, float] = defaultdict(lambda: inf)
        for (source, target, stream), amount in messages.items():
            back, links = net.back(source, target), net.route(source, target).links
            more = {link: net.far_bus for link in links if back and link.startswith("bus")}
            for link, seconds in (more | {x: net.acks * amount / net.bandwidth(x) for x in back}).items():
                takes[link] += seconds
                self.busy[link] += seconds
            for link in links:
                begins[link] = min(begins[link], self.clock[source, stream])
        for link, begin in begins.items():
            if link.startswith("card"):  # what it has saved up while it was idle is sent at once
                most = net.burst / net.bandwidth(link)
                saved, last = self.saved.get(link, (most, begin))
                saved = min(most, saved + max(0.0, begin - last))
                still = max(0.0, takes[link] - saved)
                self.saved[link] = max(0.0, saved - takes[link]), begin + still
                takes[link] = still
        return takes

    def _alone(self, source: int, target: int, amount: float, messages: Messages) -> float:
        """Seconds of a message between nodes if it had its card for itself: it begins when the target's request for it
        has come past what other ranks send there. What shares its card uses that time."""
        net = self.topology
        if not net.queue or not (back := net.back(source, target)):
            return 0.0
        others = sum(
            other
            for (a, b, _), other in messages.items()
            if back[0] in net.route(a, b).links and (a, b) != (target, source)
        )
        bandwidth = net.bandwidth(back[0])
        return (amount + min(others, net.queue * bandwidth)) / bandwidth if others else 0.0
