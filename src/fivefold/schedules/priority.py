"""The order in which a worker sends the parts of its gradients, to parameter servers or into sums over all workers, and
what it is worth. No torch.

Gradients are ready from the last layer to the first, and the next forward needs weights from the first to the last. So
the first layer's messages, ready last, should go first (P3, arXiv 1905.03960; ByteScheduler, SOSP 2019). Messages are
cut into parts, because what is under way cannot be overtaken, and credits limit what is.

The worker takes parts from the same queue as the simulator.
"""

from __future__ import annotations

import heapq
import math
import re
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple

FIFO, PRIORITY = ORDERS = ("fifo", "priority")
WFBP = "wfbp"
SUM_ORDERS = {
    FIFO: "FIFO, after backward",
    WFBP: "WFBP, beside backward (the trainer)",
    PRIORITY: "priority (ByteScheduler)",
}
"""Orders of sums over all workers (`Sums`), in words."""
ORDER = r"^(fifo|priority)(:[1-9][0-9]{0,5}[KM]iB)?$"
"""The texts of `Order`."""
CREDITS = 4
"""Parts that a worker has under way in each direction."""


class Order(NamedTuple):
    """Which message goes first, and bytes of fp32 of the parts into which messages are cut."""

    name: str = PRIORITY
    partition: int = 1 << 20

    @classmethod
    def parse(cls, text: str) -> Order:
        """`fifo`, `priority:256KiB`. Without a size, parts have 1 MiB."""
        name, *size = re.split("[:KM]", text.removesuffix("iB"))
        return cls(name, int(size[0]) << (20 if "M" in text else 10)) if size else cls(name)


class Ready:
    """Parts of messages that may be sent, in the order in which they are: "fifo", as they became ready; "priority",
    those of the first layer (the lowest number) first."""

    def __init__(self, order: str):
        self.order, self._serial, self._heap = order, count(), list[tuple[int, int, Any]]()

    def add(self, part: Hashable, layer: int) -> None:
        rank = layer if self.order == PRIORITY else 0
        heapq.heappush(self._heap, (rank, next(self._serial), part))

    def pop(self) -> Any:
        return heapq.heappop(self._heap)[2]

    def __len__(self) -> int:
        return len(self._heap)


@dataclass(frozen=True)
class Layer:
    """Seconds of a unit's forward and backward; bytes of its gradients and of its weights on their way."""

    forward: float
    backward: float
    pushed: float
    pulled: float


@dataclass(frozen=True)
class Line:
    """What lies between a worker and the servers. up, down: bytes/s that a worker gets. latency: seconds of a note, one
    way, beside the data that it waits behind. part: seconds of the hosts for each part of a message. update: seconds
    per byte of gradients until new weights are there. partition: bytes of a part. together: no weights change before
    all gradients have arrived, because they are clipped."""

    up: float
    down: float
    latency: float = 0.0
    part: float = 0.0
    update: float = 0.0
    partition: float = 1 << 20
    credits: int = CREDITS
    together: bool = False
    order: str = PRIORITY


@dataclass
class _Way:
    """One direction: the parts that may be sent, and when the wire has sent all that was given to it."""

    name: str
    rate: float
    ready: Ready
    credits: int
    free: float = 0.0


@dataclass
class Simulation:
    """Several iterations of one worker. Others do the same at the same time.

    A part is announced, and its data leaves once the server has a place for it. The server acknowledges it, which gives
    its credit back, and tells the worker when the weights are new. The worker asks for them. Data and notes of a
    direction leave one after the other.

    events: (what, layer, start, end); what: "forward", "backward", "push", "pull". ends: of each iteration's backward.
    """

    layers: Sequence[Layer]
    line: Line
    iterations: int = 8

    def __post_init__(self) -> None:
        line = self.line
        self.events: list[tuple[str, int, float, float]] = []
        self.ends: list[float] = []
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._serial, self._now = count(), 0.0
        self._fresh = [True] * len(self.layers)
        self._left = [0] * len(self.layers)  # parts of a layer whose new weights have not arrived
        self._parts = [max(1, -int(-one.pushed // self.line.partition)) for one in self.layers]
        self._complete: list[int] = []
        self._next: tuple[str, int] | None = ("forward", 0)
        self._computing = False
        self._push = _Way("push", line.up, Ready(line.order), line.credits)
        self._pull = _Way("pull", line.down, Ready(line.order), line.credits)
        self._compute()
        while self._agenda:
            self._now, _, act = heapq.heappop(self._agenda)
            act()

    @property
    def seconds(self) -> float:
        """Of an iteration, once they repeat."""
        half = len(self.ends) // 2
        return (self.ends[-1] - self.ends[half - 1]) / (len(self.ends) - half)

    def _at(self, delay: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._agenda, (self._now + delay, next(self._serial), act))

    def _compute(self) -> None:
        """Starts the next layer, if it has its weights."""
        if self._computing or self._next is None:
            return
        what, layer = self._next
        if what == "forward" and not self._fresh[layer]:
            return
        seconds = getattr(self.layers[layer], what)
        self._computing = True
        self.events.append((what, layer, self._now, self._now + seconds))
        self._at(seconds, lambda: self._computed(what, layer))

    def _computed(self, what: str, layer: int) -> None:
        self._computing, last = False, len(self.layers) - 1
        if what == "forward":
            self._next = ("forward", layer + 1) if layer < last else ("backward", last)
        else:
            self._fresh[layer] = False
            self._left[layer] = self._parts[layer]
            for _ in range(self._parts[layer]):
                self._push.ready.add(layer, layer)
            self._fill(self._push)
            if layer:
                self._next = ("backward", layer - 1)
            else:
                self.ends.append(self._now)
                self._next = ("forward", 0) if len(self.ends) < self.iterations else None
        self._compute()

    def _fill(self, way: _Way) -> None:
        """Starts parts while there are credits."""
        while way.credits and len(way.ready):
            way.credits -= 1
            layer = way.ready.pop()
            if way is self._push:  # announced, and waited for
                self._tell(
                    self._push, lambda layer=layer: self._tell(self._pull, lambda: self._send(way, layer))
                )
            else:  # asked for
                self._tell(self._push, lambda layer=layer: self._send(way, layer))

    def _tell(self, way: _Way, act: Callable[[], None]) -> None:
        """A note waits behind the data that was sent before it."""
        self._at(max(0.0, way.free - self._now) + self.line.latency, act)

    def _send(self, way: _Way, layer: int) -> None:
        size = getattr(self.layers[layer], f"{way.name}ed") / self._parts[layer]
        start = max(way.free, self._now)
        way.free = start + self.line.part + size / way.rate
        self.events.append((way.name, layer, start, way.free))
        self._at(way.free - self._now + self.line.latency, lambda: self._arrived(way, layer))

    def _arrived(self, way: _Way, layer: int) -> None:
        """A part has reached the servers, or the worker."""

        def credit() -> None:
            way.credits += 1
            self._fill(way)

        if way is self._pull:
            self._left[layer] -= 1
            self._fresh[layer] = self._left[layer] == 0
            credit()
            self._compute()
            return
        self._tell(self._pull, credit)
        self._complete.append(layer)
        if self.line.together and len(self._complete) < sum(self._parts):
            return
        complete, self._complete = self._complete, []

        def ask() -> None:  # the worker has heard that weights are new
            for layer in complete:
                self._pull.ready.add(layer, layer)
            self._fill(self._pull)

        size = sum(self.layers[layer].pushed / self._parts[layer] for layer in complete)
        self._at(self.line.update * size, lambda: self._tell(self._pull, ask))


@dataclass
class Sums(Simulation):
    """The same with sums over all workers in place of servers: one message at a time, which all workers start together.

    FIFO: sums begin after backward. WFBP: as soon as a gradient is ready (wait-free backpropagation: Poseidon, arXiv
    1706.03292). In both forward begins after the last sum, as the norm of the whole gradient wants it. Priority: the
    first layer's part goes first, and a layer's forward waits for its own sums only, so it needs `grad_clip = 0`.

    takes: seconds of a sum of so many bytes, in place of the line's rates. events: "push" is a sum.
    """

    takes: Callable[[float], float] = lambda size: size

    @property
    def ideal(self) -> float:
        """Seconds of an iteration in which all that can overlap does: the longer of computing and sums."""
        sums = (n * self.takes(one.pushed / n) for n, one in zip(self._parts, self.layers, strict=True))
        return max(sum(one.forward + one.backward for one in self.layers), sum(sums))

    def _compute(self) -> None:
        super()._compute()
        self._fill(self._push)

    def _fill(self, way: _Way) -> None:
        waits = self.line.order == FIFO and self._next is not None and self._next[0] == "backward"
        if way.free or not len(way.ready) or waits:
            return
        layer, way.free = way.ready.pop(), math.inf
        seconds = self.takes(self.layers[layer].pushed / self._parts[layer])
        self.events.append(("push", layer, self._now, self._now + seconds))
        self._at(seconds, lambda: self._summed(layer))

    def _summed(self, layer: int) -> None:
        self._push.free = 0.0
        self._left[layer] -= 1
        if self.line.order == PRIORITY:
            self._fresh[layer] = self._left[layer] == 0
        elif self._next in (("forward", 0), None) and not any(self._left):
            self._fresh = [True] * len(self.layers)
        self._fill(self._push)
        self._compute()
