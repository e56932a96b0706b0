"""A collective as data: rounds of moves between ranks.

All messages of training are made of moves. Each has two halves: the source sends, the target receives. A receive is a
copy (it replaces what the target has) or a reduce (it adds to it). A move of no chunks is a signal, and receiving it is
a wait. The moves of one round are independent: each sends what its source had before the round.

Legend: n ranks; S bytes of the whole message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest
from typing import Literal, NamedTuple

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
    each other, as NCCL's channels; chunk c is in stream c modulo their number.
    """

    primitive: Primitive
    algorithm: str
    ranks: int
    chunks: int
    rounds: tuple[Round, ...]
    root: int = 0
    streams: int = 1

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
        rows: list[list[Group]] = [[] for _ in range(self.ranks)]
        for number, moves in enumerate(self.rounds):
            sends: dict[int, list[Move]] = {}
            receives: dict[int, list[Move]] = {}
            for move in moves:
                sends.setdefault(move.source, []).append(move)
                receives.setdefault(move.target, []).append(move)
            for rank in sorted(sends.keys() | receives.keys()):
                group = Group(number, tuple(sends.get(rank, ())), tuple(receives.get(rank, ())))
                rows[rank].append(group)
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

    def moved(move: Move) -> list[Move]:
        source, target, chunks, reduce = move
        if chunk is None:
            return [Move(ranks[source], ranks[target], chunks, reduce)]
        found = ranges(c for old in chunks for c in chunk(old))
        return [Move(ranks[source], ranks[target], some, reduce) for some in found]

    return [tuple(new for move in moves for new in moved(move)) for moves in rounds]


def ranges(chunks: Iterable[int]) -> list[range]:
    """The chunks as few ranges: runs of neighbours, or one range with a larger step."""
    found = list(chunks)
    step = found[1] - found[0] if len(found) > 1 else 1
    if step > 0 and found == list(range(found[0], found[-1] + 1, step)):
        return [range(found[0], found[-1] + 1, step)]
    runs: list[range] = []
    for c in found:
        if runs and runs[-1].stop == c:
            runs[-1] = range(runs[-1].start, c + 1)
        else:
            runs.append(range(c, c + 1))
    return runs
