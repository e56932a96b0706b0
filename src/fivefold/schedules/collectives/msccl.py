"""A collective as a program of MSCCL (Cowan et al. 2023, arXiv 2201.11840), for its runtime in NCCL and RCCL.

A rank has thread blocks, each for one peer, direction and channel. A block runs its steps in order, and waits for
nothing else but the one step of another block that a step names (`depid`, `deps`); further ones stand in `nop`s before
it. Here a step waits for those that wrote its chunks, and before it overwrites them for those that still send them.
Chunks lie in the input "i", the output "o" or the scratch "s". Limits and attributes are those of the parser of
github.com/microsoft/msccl (src/graph/topo.cc).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from math import ceil
from typing import Any
from xml.etree import ElementTree

from fivefold.errors import UserError
from fivefold.schedules.collectives.collective import Collective

COLLECTIVES = {
    "all_reduce": "allreduce",
    "all_gather": "allgather",
    "reduce_scatter": "reduce_scatter",
    "all_to_all": "alltoall",
}
MOST_STEPS, MOST_BLOCKS, MOST_COUNT, MOST_PEERS = 256, 216, 71, 32
"""Steps of a thread block, thread blocks of a rank, chunks of a step, peers of a rank in one direction of a channel."""
Place = tuple[str, int]
"""(buffer, offset in chunks)."""
Block = tuple[int, int, int]
"""(rank that it sends to, rank that it receives from, channel); -1: none."""


class Program:
    """The steps of one rank, by thread block."""

    def __init__(self, collective: Collective, rank: int):
        self.collective, self.rank = collective, rank
        self.blocks: dict[Block, list[dict[str, Any]]] = {}
        self.scratch: dict[int, int] = {}
        self._wrote: dict[Place, tuple[Block, int]] = {}  # the step that wrote a chunk last
        # those that read it since then
        self._read: defaultdict[Place, list[tuple[Block, int]]] = defaultdict(list)
        self._waited: dict[tuple[Block, Block], int] = {}

    def place(self, chunk: int) -> Place:
        """Where a chunk is. All but all-to-alls work in place: in the larger of input and output."""
        x = self.collective
        if x.primitive != "all_to_all":
            return "o" if x.primitive == "all_gather" else "i", chunk
        source, target = divmod(chunk, x.ranks)
        if source == self.rank:
            return "i", target
        return (
            ("o", source) if target == self.rank else ("s", self.scratch.setdefault(chunk, len(self.scratch)))
        )

    def add(self, kind: str, block: Block, reads: list[Place], writes: list[Place]) -> None:
        """Adds a step (MSCCL's `kind`) on neighbouring chunks, behind the steps that it has to wait for."""
        steps, last = self.blocks.setdefault(block, []), dict[Block, int]()
        before = [self._wrote[place] for place in (*reads, *writes) if place in self._wrote]
        before += [step for place in writes for step in self._read.pop(place, ())]
        for other, step in before:
            if other != block and step > self._waited.get((block, other), -1):
                last[other] = self._waited[block, other] = max(step, last.get(other, -1))
        (source, at), (target, to) = (reads or writes)[0], (writes or reads)[0]
        span = {"srcbuf": source, "srcoff": at, "dstbuf": target, "dstoff": to, "cnt": len(reads or writes)}
        waits = [(self._number(other), step) for other, step in last.items()] or [(-1, -1)]
        for number, (depid, deps) in enumerate(waits, 1):
            what = {"s": len(steps), "type": kind if number == len(waits) else "nop"} | span
            steps.append(what | {"depid": depid, "deps": deps, "hasdep": 0})
        for other, step in last.items():
            self.blocks[other][step]["hasdep"] = 1
        for place in reads:
            self._read[place].append((block, len(steps) - 1))
        self._wrote |= dict.fromkeys(writes, (block, len(steps) - 1))

    def _number(self, block: Block) -> int:
        return [*self.blocks].index(block)

    def xml(self) -> ElementTree.Element:
        x, n = self.collective, self.collective.ranks
        sizes = {"i": x.whole // n if x.primitive == "all_gather" else x.whole}
        sizes |= {"o": x.whole // n if x.primitive == "reduce_scatter" else x.whole, "s": len(self.scratch)}
        rank = _element("gpu", id=self.rank, **{f"{name}_chunks": size for name, size in sizes.items()})
        for number, ((send, recv, channel), steps) in enumerate(self.blocks.items()):
            block = _element("tb", id=number, send=send, recv=recv, chan=channel)
            block.extend(_element("step", **step) for step in steps)
            rank.append(block)
        return rank


def to_xml(collective: Collective, most_bytes: float = 2**27) -> str:
    """The program of all ranks, for messages of up to `most_bytes`. It is for calls in place (`ncclAllReduce` with one
    buffer); an all-to-all for two. Raises UserError: MSCCL has no such collective or no switch, or the program is
    larger than its limits."""
    x = collective
    name = f"{x.primitive} '{x.algorithm}'"
    if x.primitive not in COLLECTIVES or x.switches:
        raise UserError(
            f"{name} has no program for MSCCL (valid: {', '.join(COLLECTIVES)}, between ranks only)"
        )
    ranks = [Program(x, rank) for rank in range(x.ranks)]
    if x.primitive == "all_to_all":
        for rank in ranks:
            rank.add("cpy", (-1, -1, 0), [("i", rank.rank)], [("o", rank.rank)])
    for moves in x.rounds:
        parts = [
            (move, run)
            for move in moves
            for run in _runs(move.chunks, ranks[move.source], ranks[move.target])
        ]
        for move, run in parts:  # all send what they had before the round
            source = ranks[move.source]
            block = move.target, -1, run[0] % x.streams
            source.add("s", block, [source.place(chunk) for chunk in run], [])
        for move, run in parts:
            target = ranks[move.target]
            places, block = [target.place(chunk) for chunk in run], (-1, move.source, run[0] % x.streams)
            target.add("rrc" if move.reduce else "r", block, places if move.reduce else [], places)
    most = max((len(steps) for rank in ranks for steps in rank.blocks.values()), default=0)
    blocks = max(len(rank.blocks) for rank in ranks)
    ways = Counter(
        (number, send >= 0, channel)
        for number, rank in enumerate(ranks)
        for send, receive, channel in rank.blocks
        if max(send, receive) >= 0  # not copies on the rank itself
    )
    peers = max(ways.values(), default=0)
    if most > MOST_STEPS or blocks > MOST_BLOCKS or peers > MOST_PEERS:
        raise UserError(
            f"{name} on {x.ranks} ranks is too large for MSCCL: {blocks} thread blocks per rank (at most {MOST_BLOCKS})"
            f", {peers} peers in a direction (at most {MOST_PEERS}), {most} steps in a block (at most {MOST_STEPS})"
        )
    program = _element(
        "algo", name=x.algorithm, proto="Simple", nchannels=x.streams, nchunksperloop=x.whole, ngpus=x.ranks,
        coll=COLLECTIVES[x.primitive], inplace=int(x.primitive != "all_to_all"), minBytes=0,
        maxBytes=max(2**27, ceil(most_bytes)) + 1,
    )  # fmt: skip
    program.extend(rank.xml() for rank in ranks)
    ElementTree.indent(program)
    return ElementTree.tostring(program, encoding="unicode") + "\n"


def _runs(chunks: range, *ranks: Program) -> Iterator[list[int]]:
    """The chunks in runs that are neighbours on all ranks, and few enough for a step."""
    run: list[int] = []
    for chunk in chunks:
        pairs = [(rank.place(run[-1]), rank.place(chunk)) for rank in ranks] if run else []
        if len(run) == MOST_COUNT or any((a, b + 1) != there for (a, b), there in pairs):
            yield run
            run = []
        run.append(chunk)
    yield run


def _element(tag: str, **attributes: Any) -> ElementTree.Element:
    return ElementTree.Element(tag, {name: str(value) for name, value in attributes.items()})
