"""Collectives as data: rounds of moves between ranks, the algorithms that make them, the proof that they compute what
their primitive promises, and the messages of a rank with their places in memory.

All messages of training are made of moves. Each has two halves: the source sends, the target receives. A receive is a
copy (it replaces what the target has) or a reduce (it adds to it). A move of no chunks is a signal, and receiving it is
a wait. The moves of one round are independent: each sends what its source had before the round.

Legend: n ranks; S bytes of the whole message.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import zip_longest
from typing import Literal, NamedTuple

from fivefold.errors import UserError

Primitive = Literal[
    "send", "broadcast", "scatter", "gather", "reduce", "all_gather", "reduce_scatter", "all_reduce", "all_to_all",
    "barrier",
]  # fmt: skip


class Move(NamedTuple):
    """Chunks that go from one rank to another. reduce: the target adds them to its own; otherwise it copies them."""

    source: int
    target: int
    chunks: range
    reduce: bool = False


Round = tuple[Move, ...]
Rounds = list[Round]


@dataclass(frozen=True, eq=False)  # compared by identity, so that what follows from it can be kept
class Collective:
    """`rounds` of moves that carry out `primitive` on `ranks` ranks.

    chunks: number of chunks with ids. In an all-to-all, chunk s n + d is what rank s has for rank d. whole: number of
    chunks that make up the S bytes of the message. root: the rank that has or gets everything, where there is one; a
    send goes from the root to the next rank. streams: a rank's messages are in so many streams that do not wait for
    each other, as NCCL's channels; chunk c is in stream c modulo their number. switches: participants besides the
    ranks, numbered behind them, which contribute nothing and add what they are sent. alone: the only rank whose moves
    it has; None: it has those of all.
    """

    primitive: Primitive
    algorithm: str
    ranks: int
    chunks: int
    rounds: tuple[Round, ...]
    root: int = 0
    streams: int = 1
    switches: int = 0
    alone: int | None = None

    @property
    def members(self) -> int:
        """Ranks and switches."""
        return self.ranks + self.switches

    @property
    def whole(self) -> int:
        return self.ranks if self.primitive == "all_to_all" else self.chunks

    def holds(self, rank: int) -> range:
        """The chunks that a rank contributes."""
        if self.primitive in ("reduce", "reduce_scatter", "all_reduce", "barrier"):
            return range(self.chunks)
        if self.primitive == "all_to_all":
            return range(rank * self.ranks, (rank + 1) * self.ranks)
        if self.primitive in ("gather", "all_gather"):
            return self.block(rank)
        return range(self.chunks if rank == self.root else 0)

    def wants(self, rank: int) -> range:
        """The chunks that a rank has in the end, each with all contributions."""
        if rank >= self.ranks:
            return range(0)
        if self.primitive in ("broadcast", "all_gather", "all_reduce", "barrier"):
            return range(self.chunks)
        if self.primitive == "all_to_all":
            return range(rank, self.chunks, self.ranks)
        if self.primitive in ("scatter", "reduce_scatter"):
            return self.block(rank)
        last = (self.root + (self.primitive == "send")) % self.ranks
        return range(self.chunks if rank == last else 0)

    def block(self, rank: int) -> range:
        """The chunks that belong to a rank where the message is divided among ranks."""
        width = self.chunks // self.ranks
        return range(rank * width, (rank + 1) * width)

    @cached_property
    def rows(self) -> list[list[Group]]:
        """What each rank sends and receives, in order. The executor runs these lists."""
        rows: list[list[Group]] = [[] for _ in range(self.members)]
        for number, moves in enumerate(self.rounds):
            sends: dict[int, list[Move]] = {}
            receives: dict[int, list[Move]] = {}
            for move in moves:
                sends.setdefault(move.source, []).append(move)
                receives.setdefault(move.target, []).append(move)
            for rank in sends.keys() | receives.keys():
                rows[rank].append(Group(number, tuple(sends.get(rank, ())), tuple(receives.get(rank, ()))))
        return rows


class Group(NamedTuple):
    """What one rank does in one round. The group ends when all of it is done, as NCCL's groups do."""

    round: int
    sends: tuple[Move, ...]
    receives: tuple[Move, ...]


def reverse(rounds: Sequence[Round], reduce: bool) -> Rounds:
    """The rounds backwards, every move from its target to its source. An all-gather becomes a reduce-scatter, a
    broadcast a reduce (`reduce`), a scatter a gather."""
    return [
        tuple(Move(target, source, chunks, reduce) for source, target, chunks, _ in moves)
        for moves in reversed(rounds)
    ]


def beside(*parts: Sequence[Round]) -> Rounds:
    """Several lists of rounds at the same time."""
    return [tuple(move for moves in rounds for move in moves) for rounds in zip_longest(*parts, fillvalue=())]


def embed(
    rounds: Sequence[Round], ranks: Sequence[int], chunk: Callable[[int], Iterable[int]] | None = None
) -> Rounds:
    """The same rounds among other ranks. ranks: who plays rank 0, 1, ... chunk: the chunks that stand for chunk c."""

    return [
        tuple(
            Move(ranks[source], ranks[target], part, reduce)
            for source, target, chunks, reduce in moves
            for part in ([chunks] if chunk is None else ranges(c for old in chunks for c in chunk(old)))
        )
        for moves in rounds
    ]


def ranges(chunks: Iterable[int]) -> list[range]:
    """The chunks as few ranges: runs of neighbours, or one range with a larger step."""
    chunks = list(chunks)
    step = chunks[1] - chunks[0] if len(chunks) > 1 else 1
    if step > 0 and chunks == list(whole := range(chunks[0], chunks[-1] + 1, step)):
        return [whole]
    runs: list[range] = []
    for c in chunks:
        if runs and runs[-1].stop == c:
            runs[-1] = range(runs[-1].start, c + 1)
        else:
            runs.append(range(c, c + 1))
    return runs


class Shape(NamedTuple):
    """What a schedule is made for.

    ranks: how many. local: ranks on each node, next to each other. grid: the sizes of a torus or mesh, () for the most
    even ones. pieces: into how many pieces a pipelined algorithm cuts the message. root: see `Collective`.
    """

    ranks: int
    local: int
    grid: tuple[int, ...] = ()
    pieces: int = 1
    root: int = 0

    @property
    def nodes(self) -> int:
        return math.ceil(self.ranks / self.local)


class Wire(NamedTuple):
    """A kind of link: seconds until the first byte arrives, and bytes/s in each direction."""

    latency: float
    bandwidth: float


class Levels(NamedTuple):
    """The two levels of a group: a device's link to its node, and its share of the node's links to other nodes. pair:
    the bandwidth between two devices of a node, less than all of it where each pair has its own wire. switch: the links
    of all devices to a switch that adds, there and back; None: there is none."""

    near: Wire
    far: Wire
    pair: float
    switch: Wire | None = None


class Line(NamedTuple):
    """Seconds of a message of S bytes: `alpha + beta S`."""

    alpha: float
    beta: float


def full_nodes(shape: Shape) -> bool:
    return shape.ranks % shape.local == 0


def power_of_two(shape: Shape) -> bool:
    return shape.ranks & (shape.ranks - 1) == 0


def log2(ranks: int) -> int:
    """Rounds until all of n ranks are reached, if their number doubles in each."""
    return (ranks - 1).bit_length()


def one(shape: Shape) -> int:
    return 1


def each_rank(shape: Shape) -> int:
    return shape.ranks


@dataclass(frozen=True)
class Algorithm:
    """One way to carry out a primitive.

    rounds: its moves. chunks: into how many chunks it cuts the message. when: when to use it, for people. source: the
    paper. fits: the shapes it is for, and `needs` in words. pieces: numbers of pieces to choose from; (1,) if it is not
    pipelined. grids: number of dims of its grid, 0 without one. streams, switches: as in `Collective`. line: its cost
    on two levels as a formula, for groups too large to be simulated, None if it has none or not for these ranks. alone:
    `rounds` takes a rank, too, and makes the moves of that rank only, in the same order.
    """

    primitive: Primitive
    name: str
    rounds: Callable[..., Rounds]
    chunks: Callable[[Shape], int]
    when: str
    source: str = ""
    fits: Callable[[Shape], bool] = lambda shape: True
    needs: str = ""
    pieces: tuple[int, ...] = (1,)
    grids: int = 0
    streams: Callable[[Shape], int] = one
    switches: int = 0
    line: Callable[[Shape, Levels], Line | None] | None = None
    alone: bool = False


def even_grid(ranks: int, dims: int) -> tuple[int, ...] | None:
    """The most even sizes of a grid, each at least 2; None if the number of ranks has too few factors."""
    if dims == 1:
        return (ranks,) if ranks > 1 else None
    grids = []
    for first in range(2, math.isqrt(ranks) + 1):
        if ranks % first == 0 and (rest := even_grid(ranks // first, dims - 1)):
            grids.append(tuple(sorted((first, *rest))))
    return min(grids, key=lambda grid: grid[-1] - grid[0], default=None)


Sum = tuple[int, int]
"""(contributions as bits, the order in which they were added). The order is equal where the bits of a sum are equal:
a + b is b + a, but (a + b) + c is not a + (b + c)."""
State = list[dict[int, Sum]]
"""By rank, the chunks it has."""


def prove(collective: Collective) -> list[State]:
    """Follows every chunk through the rounds. Returns what the ranks have before the first round and after each.

    In the end every rank has what it wants, with each contribution exactly once (in a barrier: at least once). Ranks
    that end with the same chunk have added it in the same order, so they have the same bits. Raises UserError: names
    the round and the move that is wrong, or the contribution that is missing."""
    states: list[State] = [
        [
            {
                chunk: (1 << rank if rank < collective.ranks else 0, hash(("input", rank, chunk)))
                for chunk in collective.holds(rank)
            }
            for rank in range(collective.members)
        ]
    ]
    name, barrier = f"{collective.primitive} '{collective.algorithm}'", collective.primitive == "barrier"
    for number, moves in enumerate(collective.rounds, 1):
        states.append(_after(f"{name}, round {number}", moves, states[-1], barrier))
    whole: dict[int, int] = {}
    for row in states[0]:
        for chunk, (bits, _) in row.items():
            whole[chunk] = whole.get(chunk, 0) | bits
    orders: dict[int, int] = {}
    for rank, row in enumerate(states[-1]):
        for chunk in collective.wants(rank):
            bits, order = row.get(chunk, (0, 0))
            if missing := whole[chunk] & ~bits:
                least = (missing & -missing).bit_length() - 1
                raise UserError(
                    f"{name}: rank {rank} ends without rank {least}'s contribution to chunk {chunk}"
                )
            if orders.setdefault(chunk, order) != order and not barrier:
                raise UserError(
                    f"{name}: rank {rank} adds chunk {chunk} in another order than other ranks: the bits differ"
                )
    return states


def _after(where: str, moves: Round, before: State, barrier: bool) -> State:
    """What the ranks have after a round. where: the round in messages."""
    after = [dict(row) for row in before]
    sent = {(move.source, chunk) for move in moves for chunk in move.chunks}
    copied: set[tuple[int, int]] = set()
    for source, target, chunks, reduce in moves:
        if not (0 <= source < len(before) and 0 <= target < len(before) and source != target):
            raise UserError(f"{where}: a move from rank {source} to rank {target} is not possible")
        for chunk in chunks:
            what = f"{where}: rank {source} sends chunk {chunk} to rank {target}"
            if chunk not in before[source]:
                raise UserError(f"{what}, but does not have it")
            arrived, held = before[source][chunk], after[target].get(chunk)
            if (target, chunk) in copied or (held != before[target].get(chunk) and not reduce):
                raise UserError(f"{what}, which gets it twice")
            if not reduce:
                if (target, chunk) in sent:
                    raise UserError(f"{what}, which sends its own away in the same round")
                copied.add((target, chunk))
                after[target][chunk] = arrived
                continue
            if held is None:
                raise UserError(f"{what}, which has nothing to add it to")
            if (twice := held[0] & arrived[0]) and not barrier:
                raise UserError(f"{what}, so that rank {twice.bit_length() - 1}'s contribution counts twice")
            order = hash((min(held[1], arrived[1]), max(held[1], arrived[1])))
            after[target][chunk] = held[0] | arrived[0], order
    return after


Span = tuple[int, int]
"""(first element, element after the last)"""


def joined(spans: Iterable[Span]) -> tuple[Span, ...]:
    """Merges neighbouring spans, and leaves out empty ones."""
    out: list[Span] = []
    for start, stop in spans:
        if out and out[-1][1] == start:
            out[-1] = out[-1][0], stop
        elif start < stop:
            out.append((start, stop))
    return tuple(out)


@dataclass(frozen=True)
class Message:
    """What a rank sends to a peer in one round, or receives from it, to be added (`reduce`) or copied. spans: where it
    is in the work tensor. packed: its place in the scratch tensor, None if it is sent from or received into the work
    tensor itself."""

    peer: int
    spans: tuple[Span, ...]
    reduce: bool
    packed: Span | None

    @property
    def size(self) -> int:
        """Number of elements."""
        return sum(stop - start for start, stop in self.spans)


class Step(NamedTuple):
    """The messages of a rank in one round."""

    sends: list[Message]
    receives: list[Message]


class Messages(NamedTuple):
    """All messages of a rank in a collective. places: where each chunk is in the work tensor. scratch: elements of the
    scratch tensor."""

    steps: list[Step]
    places: dict[int, Span]
    scratch: int


@lru_cache(maxsize=1024)
def messages_of(collective: Collective, rank: int, size: int) -> Messages:
    """The messages of a rank, round by round: the executor runs them (`comm/execute.py`), and the planner counts them.

    size: elements of the tensor that it gives; in an all-gather or gather, that it gets. Elements count from the start
    of the flat tensor that a rank works in.
    """
    assert collective.alone in (None, rank), f"rank {rank} has no moves here, only rank {collective.alone}"
    places, steps, most = _places(collective, rank, size), list[Step](), 0
    for group in collective.rows[rank]:
        used, step = 0, Step([], [])
        for receives, moves in enumerate((group.sends, group.receives)):
            parts: dict[tuple[int, bool], list[Move]] = {}
            for move in moves:
                parts.setdefault((move.source if receives else move.target, move.reduce), []).append(move)
            for (peer, reduce), moved in parts.items():
                spans = joined(places[chunk] for move in moved for chunk in move.chunks)
                if length := sum(stop - start for start, stop in spans):
                    direct = len(spans) == 1 and not (receives and reduce)
                    packed = None if direct else (used, used + length)
                    used = packed[1] if packed else used
                    step[receives].append(Message(peer, spans, reduce, packed))
        if step.sends or step.receives:
            steps.append(step)
        most = max(most, used)
    return Messages(steps, places, most)


def _places(x: Collective, rank: int, size: int) -> dict[int, Span]:
    """Where each chunk is in the work tensor."""
    n = x.ranks
    if x.primitive == "barrier":
        return dict.fromkeys(range(x.chunks), (0, 1))
    if x.primitive == "all_to_all":
        part, slots = size // n, 2 * n
        places = {}
        passing = {c for g in x.rows[rank] for m in (*g.sends, *g.receives) for c in m.chunks}
        for chunk in sorted(passing | {*x.holds(rank), *x.wants(rank)}):
            source, target = divmod(chunk, n)
            slot = target if source == rank else n + source if target == rank else slots
            slots += slot == slots
            places[chunk] = slot * part, (slot + 1) * part
        places[-1] = size, 2 * size  # what arrives is there even if nothing passes by
        return places
    blocks = n if x.primitive in ("all_gather", "gather", "reduce_scatter", "scatter") else 1
    part, width = size // blocks, x.chunks // blocks

    def bound(chunk: int, end: int) -> int:
        block, within = divmod(chunk, width)
        return block * part + (within + end) * part // width

    return {chunk: (bound(chunk, 0), bound(chunk, 1)) for chunk in range(x.chunks)}
