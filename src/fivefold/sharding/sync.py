"""What `[sync]` adds to a layout, as data: replica groups that train apart, and parameter servers. No torch.

A replica group (DiLoCo) is a run with a layout of its own: its ranks sum gradients among themselves only, and the
replica groups synchronise their weights every few steps.

Servers keep the master weights and the optimizer's states; each has a share of the rows of every parameter, as a rank
of ZeRO 1 has. Workers have the whole model. They push the gradients of a unit (a block, or what lies before or behind
the blocks) once backward has computed them, and pull its new weights before the next forward needs them.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, chain, pairwise

from fivefold.precision import DTYPES, MASTER
from fivefold.schedules.compression import INT8
from fivefold.schedules.priority import Order
from fivefold.sharding.layout import Layout
from fivefold.sharding.parts import TIED, Model, Span, joined, parts

OWN_SHARE = 0.5
"""What a replica group keeps of its own weights when a sum arrives that overlapped with inner steps (alpha of arXiv
2501.18512): the common weights do not know these steps yet."""


@dataclass(frozen=True)
class ReplicaGroups:
    """How `count` replica groups synchronise: each of `fragments` parts of the model once in `every` inner steps, by
    outer gradients sent as `dtype` ("fp32", "bf16" or "int8"). kept: bytes per parameter of the common weights and the
    outer optimizer's states. overlap: inner steps that a replica group takes while a sum is under way."""

    count: int = 1
    every: int = 1
    fragments: int = 1
    dtype: str = "fp32"
    kept: float = 0.0
    overlap: int = 0

    def due(self, step: int, last: int) -> tuple[int, ...]:
        """The fragments whose sums start after inner step `step` (1, 2, ...) of a run of `last` steps: their turns are
        spread evenly over `every` steps. The run ends with all of them, so that its model holds every step; no sum
        starts that would arrive later."""
        if step == last:
            return tuple(range(self.fragments))
        if step + self.overlap >= last:
            return ()
        turns = ((number + 1) * self.every // self.fragments for number in range(self.fragments))
        return tuple(number for number, turn in enumerate(turns) if (step - turn) % self.every == 0)

    def arriving(self, step: int, last: int) -> tuple[int, ...]:
        """The fragments whose sums arrive after this step, and change the weights."""
        if step == last or not self.overlap:
            return self.due(step, last)
        return self.due(step - self.overlap, last) if step > self.overlap else ()

    def traced(self, last: int) -> int:
        """The step that stands for all where a single one is looked at: the first one that synchronises the last
        fragment, and all before have."""
        return min(self.every, last) if self.count > 1 else 1

    @property
    def at_once(self) -> int:
        """The most fragments whose sums are under way at once."""
        return min(self.fragments, self.overlap * self.fragments // self.every + 1)

    def aligned(self, step: int, last: int) -> bool:
        """True if all replica groups have the same weights after this step. 0: before the first."""
        if step in (0, last):
            return True
        return not self.overlap and len(self.due(step, last)) == self.fragments


ONE_REPLICA_GROUP = ReplicaGroups()


def replica_group_layout(layout: Layout, count: int) -> Layout:
    """The layout of one of `count` replica groups. They divide the replicas, and consecutive ranks form a replica
    group, so that it stays within as few machines as it can (`in_replica_group`)."""
    assert layout.dp_replicate % count == 0, f"{layout.dp_replicate} replicas in {count} replica groups"
    return layout if count == 1 else replace(layout, dp_replicate=layout.dp_replicate // count)


def in_replica_group(replica_group: Layout, rank: int) -> tuple[int, int]:
    """(number of the replica group, rank in it) of a rank of the run. replica_group: the layout of a replica group."""
    return divmod(rank, replica_group.ranks)


def outer_messages(names: Iterable[str], fragments: int) -> list[list[tuple[str, ...]]]:
    """The outer messages of each fragment: the parameters of each, from those that a rank has.

    Blocks are dealt out to fragments in turn (strided fragments, arXiv 2501.18512); what lies before them belongs to
    the first fragment, what lies behind them to the last. A message is a block, or what lies before or behind the
    blocks. A tied embedding has its own, so that two pipeline stages sum their copies in the same order.
    """
    found: list[dict[str, list[str]]] = [{} for _ in range(fragments)]
    for name in names:
        if name.startswith("blocks."):
            number = int(name.split(".")[1])
            found[number % fragments].setdefault(f"blocks.{number}", []).append(name)
        else:
            before = name.startswith("embed")
            key = name if name == TIED else "before" if before else "behind"
            found[0 if before else -1].setdefault(key, []).append(name)
    return [[tuple(some) for some in fragment.values()] for fragment in found]


Sent = tuple[str, float]
"""(operation, bytes of the larger of its input and output)."""


def outer_sent(elements: int, count: int, dtype: str) -> list[Sent]:
    """The collectives by which `count` replica groups sum an outer gradient. In int8 each replica group sums its share
    of the elements, and sends the others its sum (as in ZeRO++, arXiv 2306.10209)."""
    if not elements:
        return []
    if dtype != "int8":
        return [("all_reduce", elements * DTYPES[dtype].bytes)]
    return [*INT8.messages([(elements,)], count)]


SERVER = "server"
"""The `sync.method`."""
UNBOUNDED = -1


@dataclass(frozen=True)
class Servers:
    """How `count` servers serve. staleness, order: as in `[sync]`. judging: no weight changes before the whole gradient
    is known; False where it may be neither clipped nor skipped."""

    count: int = 0
    staleness: int = 0
    order: Order = field(default_factory=Order)
    judging: bool = True

    @property
    def synchronous(self) -> bool:
        return self.staleness == 0

    @property
    def layout(self) -> Layout:
        """The servers share states as the ranks of this layout do."""
        return Layout(dp_shard=self.count, zero=1) if self.count > 1 else Layout()


Row = tuple[str, int, int]
"""(parameter, its elements [start, stop)): whole rows."""


@dataclass(frozen=True)
class Message:
    """What a worker and a server exchange of a unit in each direction. number: among all messages. parts: what is sent,
    updated and pulled at once; rows of parameters, in the order of the message."""

    number: int
    unit: int
    server: int
    parts: tuple[tuple[Row, ...], ...]

    @cached_property
    def cuts(self) -> tuple[Span, ...]:
        """The elements [start, stop) of each part in the message."""
        sizes = [sum(stop - start for _, start, stop in part) for part in self.parts]
        ends = list(accumulate(sizes, initial=0))
        return tuple(pairwise(ends))

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.cuts[-1][1]

    @cached_property
    def rows(self) -> dict[str, Span]:
        """The elements [start, stop) of each parameter, in the order of the message."""
        found: dict[str, Span] = {}
        for name, start, stop in chain.from_iterable(self.parts):
            found[name] = found.get(name, (start, stop))[0], stop
        return found


def units(model: Model) -> list[tuple[str, ...]]:
    """The parameters of each unit, in the order of forward. A tied embedding is a unit of its own."""
    return outer_messages(model.parameters, 1)[0]


def messages(model: Model, servers: Servers) -> list[Message]:
    """All messages, by unit and server. A server without rows of a unit has none. Parameters lie in the order in which
    backward finishes, as in flat buffers."""
    tables = [parts(model, servers.layout, server) for server in range(servers.count)]
    most, found = max(1, servers.order.partition // int(DTYPES[MASTER].bytes)), list[Message]()
    for unit, names in enumerate(units(model)):
        for server, table in enumerate(tables):
            rows = [
                (name, span, math.prod(model.parameters[name][1:]))
                for name in reversed(names)
                for span in table[name].keeps[0]
            ]
            if cut := _cut(rows, most):
                found.append(Message(len(found), unit, server, cut))
    return found


def _cut(rows: list[tuple[str, Span, int]], most: int) -> tuple[tuple[Row, ...], ...]:
    """Parts of at most so many elements, but at least a row. rows: (parameter, rows [start, stop), elements of one)."""
    found, room = list[list[Row]](), 0
    for name, (start, stop), width in rows:
        while start < stop:
            if room < width:
                found.append([])
                room = max(most, width)
            taken = min(stop - start, room // width)
            found[-1].append((name, start * width, (start + taken) * width))
            start, room = start + taken, room - taken * width
    return tuple(map(tuple, found))


class Shares:
    """Hands out the shares of global batches to workers. Each batch has as many shares as there are workers.

    Synchronous: worker w computes share w of every batch. Else whoever asks gets the next share, of the oldest batch
    first. What a lost worker has not finished is handed out again. limit: no share of this step or a later one is
    handed out. oldest: the first step (0, 1, ...) that is not finished. lags: of a worker's share of a step that is not
    synchronous, the number of earlier steps that were not finished when it got it.
    """

    def __init__(self, workers: int, first: int, limit: int, staleness: int = 0):
        self.workers, self.limit, self.oldest, self.staleness = workers, limit, first, staleness
        self.alive = set(range(workers))
        self.under_way: dict[int, list[tuple[int, int]]] = {worker: [] for worker in self.alive}
        self.highest = first - 1  # the last step of which a share was handed out
        self.lags: dict[tuple[int, int], int] = {}
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
            self.lags[worker, found[0]] = found[0] - self.oldest
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

    def lose(self, worker: int, applied: tuple[int, int] | None = None) -> list[tuple[int, int]]:
        """The worker is gone. applied: the last of its shares that the servers have applied. Returns its shares up to
        that one, which are finished; the others are handed out again."""
        self.alive.discard(worker)
        taken = self.under_way[worker]
        finished = taken[: taken.index(applied) + 1] if applied in taken else []
        for step, share in finished:
            self.finish(worker, step, share)
        for found in self.under_way.pop(worker):
            heapq.heappush(self._given_back, found)
        return finished


def pieces(rows: Iterable[Row], offsets: Mapping[str, int]) -> list[Span]:
    """Where rows lie in a flat buffer that has each parameter at its offset. Neighbours are joined."""
    return list(joined([(offsets[name] + start, offsets[name] + stop) for name, start, stop in rows]))
