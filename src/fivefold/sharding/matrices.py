"""Matrices whose update needs more of them than a rank keeps, as data. No torch.

Adafactor, SOAP and Muon see whole matrices. Tensor parallelism cuts a matrix, and ZeRO divides it by rows. Before the
update the pieces of a gradient come together on one of the ranks that hold them, the matrix's owner. It alone keeps the
optimizer's states of that matrix. Afterwards the pieces of the update go back. Matrices are spread evenly over the
ranks, so states and work are shared as they are without gathering.

There are two hops at most: over the tensor axis, then over the ranks that share states. Each is one all-to-all of all
matrices, and one back. Experts are a stack of matrices: dividing them by expert cuts no matrix.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Any, Literal

from fivefold.sharding.layout import Layout, group_of, groups, index_in
from fivefold.sharding.parts import (
    Model,
    Part,
    Ranges,
    cuts_in,
    held,
    joined,
    kept_rows,
    local_shape,
    offsets,
    parts,
    sharing_group,
    size_of,
    whole,
)

Needs = Literal["elements", "rows", "matrices"]
"""What an update of one element depends on: its own gradient, those of its row, or those of its matrix."""


@dataclass(frozen=True)
class Hop:
    """A gathering over the ranks of `group` on the one with index `owner`. pieces: what each of them has. whole: what
    these make up."""

    group: str
    owner: int
    pieces: tuple[Ranges, ...]
    whole: Ranges


@dataclass(frozen=True)
class Route:
    """The way of a parameter's pieces to its owner. mine: this rank is the owner."""

    hops: tuple[Hop, ...]
    mine: bool

    @property
    def whole(self) -> Ranges:
        return self.hops[-1].whole


@dataclass(frozen=True)
class Exchange:
    """An all-to-all over `group`. names: the parameters whose pieces this rank sends. given, taken: elements for and
    from each rank."""

    group: str
    names: tuple[str, ...]
    given: tuple[int, ...]
    taken: tuple[int, ...]


def routes(model: Model, layout: Layout, rank: int, needs: Mapping[str, Needs]) -> dict[str, Route]:
    """The ways of the parameters of a rank whose pieces have to come together. needs: of each parameter; one that is
    not listed needs nothing."""
    hashed: Any = model
    return _routes(hashed, layout, rank, tuple(needs.items()))


@lru_cache(maxsize=64)
def _routes(
    model: Model, layout: Layout, rank: int, needs: tuple[tuple[str, Needs], ...]
) -> dict[str, Route]:
    axes, owners = _plan(model, layout, held(model, layout, rank), dict(needs))
    tables: dict[int, dict[str, Part]] = {}

    def keeps(name: str, other: int) -> Ranges:
        if other not in tables:
            tables[other] = parts(model, layout, other)
        return tables[other][name].keeps

    found = {}
    for name, over in axes.items():
        hops, mine = [], True
        for number, group in enumerate(over):
            members = group_of(layout, group, rank)
            before = tuple(over)[:number]
            pieces = tuple(_together(layout, before, other, name, keeps) for other in members)
            hops.append(Hop(group, owners[name][group], pieces, union(pieces)))
            mine = mine and index_in(layout, group, rank) == owners[name][group]
        found[name] = Route(tuple(hops), mine)
    return found


def _together(layout: Layout, over: Sequence[str], rank: int, name: str, keeps: Any) -> Ranges:
    """What the pieces of a parameter over these groups make up, seen from a rank."""
    if not over:
        return keeps(name, rank)
    *before, last = over
    return union([_together(layout, before, other, name, keeps) for other in group_of(layout, last, rank)])


def _plan(
    model: Model, layout: Layout, table: Mapping[str, Part], needs: Mapping[str, Needs]
) -> tuple[dict[str, dict[str, int]], dict[str, dict[str, int]]]:
    """Of each matrix whose pieces come together: what `_over` says, and its owner as its index in each group."""
    over = {
        name: dims
        for name, part in table.items()
        if (dims := _over(model, layout, name, part, needs.get(name, "elements")))
    }
    sizes = {name: math.prod(table[name].shape) for name in over}
    # the largest first, each to the ranks that have least of those that come together over the same groups
    heaps: dict[tuple[str, ...], list[tuple[int, tuple[int, ...]]]] = {}
    owners = {}
    for name in sorted(over, key=lambda name: -sizes[name]):
        names = tuple(over[name])
        if names not in heaps:
            heaps[names] = [
                (0, index) for index in product(*(range(groups(layout)[group][0]) for group in names))
            ]
        load, index = heapq.heappop(heaps[names])
        heapq.heappush(heaps[names], (load + sizes[name], index))
        owners[name] = dict(zip(names, index, strict=True))
    return over, owners


def first_dim(needs: Needs, dims: int) -> int:
    """The first of a parameter's dims along which an update of one element depends on others. The dims before count
    matrices, or rows."""
    return max(0, dims - {"elements": 0, "rows": 1, "matrices": 2}[needs])


def _over(model: Model, layout: Layout, name: str, part: Part, needs: Needs) -> dict[str, int]:
    """{group over which pieces come together: the dim that it divides}, in their order."""
    first, found = first_dim(needs, len(part.shape)), dict[str, int]()
    for cut in cuts_in(model.cuts.get(name), layout.sp):
        if layout.tp > 1 and cut.axis == "tp" and cut.dim >= first:
            found["tp"] = cut.dim
    group, ranks = sharing_group(layout, part.expert)
    if layout.zero and ranks > 1:
        dim, _ = kept_rows(local_shape(part.computes), 0, ranks)
        if dim >= first:
            found[group] = dim
    return found


@dataclass(frozen=True)
class Outline:
    """What the planner asks of a route. sent: (group, elements that the rank has, elements that it then owns) of each
    hop that it takes part in. whole: the part that its owner updates; None: another rank is it."""

    sent: tuple[tuple[str, int, int], ...]
    whole: Ranges | None


def outlines(model: Model, layout: Layout, rank: int, needs: Mapping[str, Needs]) -> dict[str, Outline]:
    """The same as `routes`, without looking at what other ranks have."""
    table = held(model, layout, rank)
    over, owners = _plan(model, layout, table, needs)
    made = {}
    for name, part in table.items():
        if name not in over:
            continue
        ranges, size, sent, mine = list(part.keeps), size_of(part.keeps), [], True
        for group, dim in over[name].items():
            tp = "tp" in over[name]
            together = (
                layout.tp * size if group == "tp" else size_of(part.computes) * (layout.tp if tp else 1)
            )
            ranges[dim] = whole(part.shape)[dim] if tp and dim == over[name]["tp"] else part.computes[dim]
            mine = index_in(layout, group, rank) == owners[name][group]
            sent.append((group, size, together if mine else 0))
            size = together
            if not mine:
                break
        made[name] = Outline(tuple(sent), tuple(ranges) if mine else None)
    return made


def sizes_sent(found: Mapping[str, Outline]) -> list[tuple[str, int]]:
    """(group, elements of the larger of input and output) of each all-to-all of `exchanges`."""
    totals: dict[str, list[int]] = {}
    for one in found.values():
        for group, given, taken in one.sent:
            total = totals.setdefault(group, [0, 0])
            total[0], total[1] = total[0] + given, total[1] + taken
    return [(group, max(totals[group])) for group in ("tp", "shard", "eshard") if group in totals]


def exchanges(found: Mapping[str, Route], layout: Layout, rank: int) -> list[Exchange]:
    """The all-to-alls of a rank that bring pieces together, in their order. Those that send them back are the same the
    other way."""
    present, out = dict.fromkeys(found, 0), []  # hops that a parameter has behind it
    for group in ("tp", "shard", "eshard"):
        names = [
            n for n, done in present.items() if found[n].hops[done:] and found[n].hops[done].group == group
        ]
        if not names:
            continue
        size, index = groups(layout)[group][0], index_in(layout, group, rank)
        given, taken = [0] * size, [0] * size
        for name in names:
            hop = found[name].hops[present[name]]
            given[hop.owner] += size_of(hop.pieces[index])
            if hop.owner == index:
                present[name] += 1
                taken = [a + size_of(piece) for a, piece in zip(taken, hop.pieces, strict=True)]
            else:
                del present[name]  # it has left this rank
        out.append(Exchange(group, tuple(names), tuple(given), tuple(taken)))
    return out


def union(pieces: Sequence[Ranges]) -> Ranges:
    """What disjoint or equal parts of a parameter make up."""
    return tuple(
        joined(sorted({span for spans in dim for span in spans})) for dim in zip(*pieces, strict=True)
    )


def placed(inner: Ranges, outer: Ranges) -> Iterator[tuple[tuple[slice, ...], tuple[slice, ...]]]:
    """Where a part lies in a larger one: pairs of (slices of the part, slices of the larger one)."""
    dims = (
        [
            (slice(at, at + stop - start), slice(base + start - first, base + stop - first))
            for at, (start, stop) in offsets(spans)
            for base, (first, last) in offsets(around)
            if first <= start and stop <= last
        ]
        for spans, around in zip(inner, outer, strict=True)
    )
    for combination in product(*dims):
        yield tuple(a for a, _ in combination), tuple(b for _, b in combination)
