"""What a rank sends in a step: every collective by operation and axis, as `observe/collectives.py` counts them in a
real step, and from that the bytes that leave the rank.

Two conventions. *Counted*: the bytes of a collective are those of the larger of its input and output (what is summed,
the whole that is gathered or scattered, what is exchanged, sent or received). *Sent*: what leaves the rank if the
collective is a ring (`SENT` converts). Exact for everything whose size is known before the run; rows that go to experts
are those of even load, and BERT's targets under context parallelism those of an even division.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from fivefold.layout import Layout, index_in
from fivefold.plan import memory, operations, units
from fivefold.plan.communication import group
from fivefold.plan.cost import Setting
from fivefold.plan.operations import Message, Operation
from fivefold.plan.software import Software
from fivefold.sharding import TIED, stages_of

NAMES = ("pp", "tp", "cp", "shard", "replicate", "dp", "batch", "all", "ep", "edp", "eshard")
"""Groups that have the same ranks go by the first of these names, as where they are counted."""
DATA = ("shard", "replicate", "batch", "edp", "eshard")
"""Groups over which states are gathered and gradients are summed: one axis, "dp", in what a plan reports."""
AXES = ("tp", "cp", "pp", "ep", "dp")
"""What a plan reports bytes of."""
SENT = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "send": lambda n: 1.0,
    "receive": lambda n: 0.0,
}
"""Bytes that one of n ranks sends, by those counted: rings (see communication.py)."""

Counted = dict[tuple[str, str], tuple[int, int]]
"""{(operation, axis): (calls, bytes)}."""


@dataclass
class Tally:
    """Calls and bytes by (operation, axis), each axis by what it is for."""

    calls: Counter[tuple[str, str]] = field(default_factory=Counter)
    bytes: Counter[tuple[str, str]] = field(default_factory=Counter)

    @property
    def found(self) -> Counted:
        return {key: (self.calls[key], size) for key, size in self.bytes.items()}

    def add(self, what: str, axis: str, size: float, times: int = 1, calls: int = 1) -> None:
        """`times` collectives, each of `size` bytes in `calls` pieces."""
        if times and size:
            self.calls[what, axis] += times * calls
            self.bytes[what, axis] += round(times * size)


def counted(s: Setting, rank: int = 0) -> Counted:
    """What a counter on this rank sees in a step: forward and backward of all microbatches, sums of gradients, norm,
    update, and the loss on which all agree. Groups that have the same ranks are one."""
    names, merged = _first_names(s.layout), Tally()
    tally = _tally(s, rank)
    for (what, axis), size in tally.bytes.items():
        merged.bytes[what, names[axis]] += size
        merged.calls[what, names[axis]] += tally.calls[what, axis]
    return merged.found


def sent(s: Setting, as_counted: bool = False) -> dict[str, int]:
    """Bytes that leave a rank, by axis; of the rank that sends most on each. as_counted: groups that have the same
    ranks are one, as where messages are counted."""
    most: Counter[str] = Counter()
    for position in range(s.layout.pp):
        for index in range(min(2, s.layout.cp)):  # the first has most rows, the second sends most keys
            rank = s.layout.rank({"pp": position, "cp": index})
            found = counted(s, rank) if as_counted else _tally(s, rank).found
            for axis, size in leaving(found, s.layout).items():
                most[axis] = max(most[axis], size)
    return {axis: most[axis] for axis in AXES if most[axis]}


def leaving(found: Counted, layout: Layout) -> dict[str, int]:
    """Bytes that leave a rank, by axis, of those counted. Without what all ranks of several axes agree on: a few
    numbers."""
    groups, total = _groups(layout), Counter[str]()
    for (what, name), (_, size) in found.items():
        if name != "all" and what in SENT:  # others, as a barrier, send nothing
            total["dp" if name in DATA else name] += int(SENT[what](groups[name][0]) * size)
    return dict(total)


def _first_names(layout: Layout) -> dict[str, str]:
    """The name by which each group goes."""
    found, first = _groups(layout), dict[tuple[int, int], str]()
    return {name: first.setdefault(found[name], name) for name in NAMES}


def _groups(layout: Layout) -> dict[str, tuple[int, int]]:
    """Of each group by its name: so many ranks, so far apart."""
    inner, shard, batch = layout.tp, layout.dp_shard * layout.cp, layout.dp * layout.cp
    return {
        "pp": (layout.pp, layout.ranks // layout.pp),
        "tp": (layout.tp, 1),
        "cp": (layout.cp, inner),
        "shard": (shard, inner),
        "replicate": (layout.dp_replicate, shard * inner),
        "dp": (layout.dp, layout.cp * inner),
        "batch": (batch, inner),
        "all": (layout.ranks, 1),
        "ep": (layout.ep, inner),
        "edp": (batch // layout.ep, layout.ep * inner),
        "eshard": (max(1, shard // layout.ep), layout.ep * inner),
    }


def _tally(s: Setting, rank: int) -> Tally:
    tally, position = Tally(), index_in(s.layout, "pp", rank)
    by_stage = memory.stages(s.model, s.layout, s.software.partition)
    mine = stages_of(s.layout, position)
    blocks = Counter(operations.is_mixed(s.model, number) for stage in mine for number in by_stage[stage])
    for mixed, count in blocks.items():
        _operations(tally, s, rank, operations.block(s.sizes, s.software, mixed), count, s.layout.recompute)
    if 0 in mine:
        _operations(tally, s, rank, operations.begin(s.sizes, s.software), 1, "none")
    if len(by_stage) - 1 in mine:
        _operations(tally, s, rank, operations.end(s.sizes, s.software), 1, "none")
    _transfers(tally, s, position, len(by_stage))
    _gradients(tally, s, rank, mine)
    _control(tally, s)
    return tally


def _operations(
    tally: Tally, s: Setting, rank: int, ops: Iterable[Operation], count: int, recompute: str
) -> None:
    """Messages of the operations of `count` equal blocks, of all microbatches."""
    for op in ops:
        forward = 1 + repeats(op, recompute, s.software)
        for times, messages, back in ((forward, op.sent_forward, False), (1, op.sent_backward, True)):
            for message in messages:
                for what, size, calls in _pieces(message, s, rank, back):
                    tally.add(what, message.axis, size, times * count * s.microbatches, calls)


def repeats(op: Operation, recompute: str, software: Software) -> bool:
    """Whether backward repeats an operation's messages of forward."""
    if recompute == "full":
        return op.part != "never"
    sublayer = software.selective == "sublayer"
    return recompute == "selective" and (op.part == "core" or (op.part == "out" and sublayer))


def _pieces(message: Message, s: Setting, rank: int, backward: bool) -> Iterator[tuple[str, float, int]]:
    """(operation, bytes, calls) of which a message is made."""
    if message.what != "ring":
        yield message.what, message.size, message.calls
        return
    turns, keys = s.layout.cp - 1, message.size / (s.layout.cp - 1) / (2 if backward else 1)
    out, into, home, back = _ring(s.layout.cp, index_in(s.layout, "cp", rank), s.model.arch != "bert")
    if not backward:
        home = back = 0.0
    yield "send", keys * (out + home), turns * (2 if backward else 1)
    yield "receive", keys * (into + back), turns * (2 if backward else 1)


def _ring(ranks: int, index: int, causal: bool) -> tuple[float, float, float, float]:
    """How often one rank's keys and values this rank sends and receives on their way round, and their gradients on
    their way home (`ContextAxis` and `_ring_gradients` of parallel/context.py)."""

    def length(rank: int, turn: int) -> float:
        return 1.0 if not causal or rank % ranks + turn < ranks else 0.5

    turns = range(1, ranks)
    return (
        sum(length(index - 1, turn) for turn in turns),
        sum(length(index, turn) for turn in turns),
        sum(length(index, turn) for turn in turns),
        sum(length(index - turn, turn) for turn in turns),
    )


def _transfers(tally: Tally, s: Setting, position: int, stages: int) -> None:
    """Activations and their gradients between neighbouring stages that are on different ranks."""
    if s.layout.pp == 1:
        return
    rank_of = memory.schedule(s.layout.schedule, s.layout.pp, 1, s.layout.virtual_stages).rank_of
    activation = s.sizes.n * s.model.dim * s.sizes.e
    for stage in range(stages - 1):
        ends = rank_of[stage], rank_of[stage + 1]
        if ends[0] != ends[1] and position in ends:  # one way in forward, the other in backward
            tally.add("send", "pp", activation, s.microbatches)
            tally.add("receive", "pp", activation, s.microbatches)


def _gradients(tally: Tally, s: Setting, rank: int, mine: list[int]) -> None:
    """States gathered, gradients summed: over the data axes; over "tp" where ranks have seen parts of the sequence;
    over "pp" where two stages share an embedding."""
    held = units.of_rank(s.model, s.layout, mine, s.software.partition)
    b, m = s.software.states[s.dtype], s.microbatches
    for unit in held.shared:
        gathers = 2 * m if s.layout.zero == 3 else 1
        scatters = 1 if memory.scattered_once(s.layout) else m
        n = group(s.layout, s.cluster, unit.group).ranks
        tally.add("all_gather", unit.group, unit.padded * b.working, gathers)
        tally.add(s.software.scatter, unit.group, unit.padded * b.reduce, scatters)
        if s.layout.dp_replicate > 1:
            tally.add("all_reduce", "replicate", unit.padded / n * 4)  # what arrived is fp32
    for replica in held.replicated:
        if group(s.layout, s.cluster, replica.group).ranks > 1:
            tally.add("all_reduce", replica.group, replica.size * b.reduce, calls=replica.buckets)
    if s.layout.sp:
        tally.add("all_reduce", "tp", 4 * units.partial(s.model, s.layout, rank, held.names))
    last = units.last_stage(s.model, s.layout, s.software.partition)
    if s.model.tie_embeddings and s.layout.pp > 1 and (0 in mine) != (last in mine):
        rows = 4 * units.kept(s.model, s.layout, rank, [TIED])
        tally.add("send", "pp", rows)
        tally.add("receive", "pp", rows)


def _control(tally: Tally, s: Setting) -> None:
    """Numbers on which all ranks agree once a step: the square of the norm (fp64) where states are divided, loss and
    whether to stop (2 fp32), the load of the experts (fp64; a few facts a block besides)."""
    if s.layout.ranks == 1:
        return
    tally.add("all_reduce", "all", 8)
    if s.layout.divided:
        tally.add("all_reduce", "all", 8)
    if s.model.arch == "moe":
        mixed = s.model.layers - s.model.dense_layers
        tally.add("all_reduce", "all", 8 * mixed * ((s.model.experts or 0) + 4))
