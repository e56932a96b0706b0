"""Parameter servers as data: who keeps which rows, what is sent in which parts, who computes what next. No torch.

Servers keep the master weights and the optimizer's states; each has a share of the rows of every parameter, as a rank
of ZeRO 1 has. Workers have the whole model. They push the gradients of a unit (a block, or what lies before or behind
the blocks) once backward has computed them, and pull its new weights before the next forward needs them.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from fivefold.precision import DTYPES, MASTER
from fivefold.spread.layout import Layout
from fivefold.spread.parts import Model, Span, parts
from fivefold.spread.sites import messages as units_of

SERVER = "server"
"""The `sync.method`."""
UNBOUNDED = -1
ORDERS = ("fifo", "priority")


@dataclass(frozen=True)
class Servers:
    """How `count` servers serve. staleness, order, partition, credits: as in `[sync]`."""

    count: int = 0
    staleness: int = 0
    order: str = "priority"
    partition: int = 1 << 20
    credits: int = 4

    @property
    def synchronous(self) -> bool:
        return self.staleness == 0

    @property
    def layout(self) -> Layout:
        """The servers share states as the ranks of this layout do."""
        return Layout(dp_shard=self.count, zero=1) if self.count > 1 else Layout()


@dataclass(frozen=True)
class Message:
    """What a worker and a server exchange of a unit in each direction. number: among all messages. rows: (parameter,
    its elements [start, stop)), in the order of the message. cuts: its parts, [start, stop)."""

    number: int
    unit: int
    server: int
    rows: tuple[tuple[str, int, int], ...]
    cuts: tuple[Span, ...]

    @cached_property
    def size(self) -> int:
        """Number of elements."""
        return sum(stop - start for _, start, stop in self.rows)


def units(model: Model) -> list[tuple[str, ...]]:
    """The parameters of each unit, in the order of forward. A tied embedding is a unit of its own."""
    return units_of(model.parameters, 1)[0]


def messages(model: Model, servers: Servers) -> list[Message]:
    """All messages, by unit and server. A server without rows of a unit has none. Parameters lie in the order in which
    backward finishes, as in flat buffers."""
    tables = [parts(model, servers.layout, server) for server in range(servers.count)]
    elements, found = max(1, servers.partition // int(DTYPES[MASTER].bytes)), list[Message]()
    for unit, names in enumerate(units(model)):
        for server, table in enumerate(tables):
            rows = []
            for name in reversed(names):
                shape, keeps = model.parameters[name], table[name].keeps
                width = math.prod(shape[1:])
                rows += [(name, start * width, stop * width) for start, stop in keeps[0] if start < stop]
            if size := sum(stop - start for _, start, stop in rows):
                cuts = tuple((start, min(size, start + elements)) for start in range(0, size, elements))
                found.append(Message(len(found), unit, server, tuple(rows), cuts))
    return found


class Shares:
    """Hands out the shares of global batches to workers. Each batch has as many shares as there are workers.

    Synchronous: worker w computes share w of every batch. Else whoever asks gets the next share, of the oldest batch
    first. What a lost worker has not finished is handed out again. limit: no share of this step or a later one is
    handed out. oldest: the first step (0, 1, ...) that is not finished.
    """

    def __init__(self, workers: int, first: int, limit: int, staleness: int = 0):
        self.workers, self.limit, self.oldest, self.staleness = workers, limit, first, staleness
        self.alive = set(range(workers))
        self.under_way: dict[int, list[tuple[int, int]]] = {worker: [] for worker in self.alive}
        self.highest = first - 1  # the last step of which a share was handed out
        self._own = dict.fromkeys(self.alive, first)
        self._given_back: list[tuple[int, int]] = []
        self._next = (first, 0)
        self._finished: Counter[int] = Counter()

    def take(self, worker: int) -> tuple[int, int] | None:
        """(step, share) for a worker. None: it has to wait."""
        if self.staleness == 0:
            found = self._own[worker], worker
            if found[0] >= self.limit:
                return None
            self._own[worker] += 1
        else:
            found = self._given_back[0] if self._given_back else self._next
            late = self.staleness != UNBOUNDED and found[0] - self.oldest > self.staleness
            if found[0] >= self.limit or late:
                return None
            if self._given_back:
                heapq.heappop(self._given_back)
            else:
                step, share = found
                self._next = (step, share + 1) if share + 1 < self.workers else (step + 1, 0)
        self.under_way[worker].append(found)
        self.highest = max(self.highest, found[0])
        return found

    def finish(self, worker: int, step: int, share: int) -> None:
        """All servers have applied the gradient of this share."""
        self.under_way[worker].remove((step, share))
        self._finished[step] += 1
        while self._finished[self.oldest] == self.workers:
            del self._finished[self.oldest]
            self.oldest += 1

    def lose(self, worker: int) -> None:
        """The worker is gone. Its shares are handed out again."""
        self.alive.discard(worker)
        for found in self.under_way.pop(worker, []):
            heapq.heappush(self._given_back, found)


def pieces(message: Message, offsets: dict[str, int]) -> list[Span]:
    """Where the elements of a message lie in a flat buffer that has each parameter at its offset. Neighbours are
    joined."""
    found: list[Span] = []
    for name, start, stop in message.rows:
        a, b = offsets[name] + start, offsets[name] + stop
        if found and found[-1][1] == a:
            found[-1] = found[-1][0], b
        else:
            found.append((a, b))
    return found


def unit_sizes(found: Sequence[Message], unit: int) -> int:
    """Elements of a unit."""
    return sum(message.size for message in found if message.unit == unit)
