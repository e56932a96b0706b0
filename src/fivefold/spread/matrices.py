"""Matrices whose update needs more of them than a rank keeps, as data. No torch.

Adafactor, SOAP and Muon see whole matrices. Tensor parallelism cuts a matrix, and ZeRO divides it by rows. Before the
update the pieces of a gradient come together on one of the ranks that hold them, the matrix's owner. It alone keeps the
optimizer's states of that matrix. Afterwards the pieces of the update go back. Matrices are spread evenly over the
ranks, so states and work are shared as they are without gathering.

There are two hops at most: over the tensor axis, then over the ranks that share states. Each is one all-to-all of all
matrices, and one back. Experts are a stack of matrices: dividing them by expert cuts no matrix.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Any, Literal

from fivefold.spread.layout import Layout, group_of, groups, index_in
from fivefold.spread.parts import (
    Model,
    Part,
    Ranges,
    cuts_in,
    held,
    joined,
    kept_rows,
    local_shape,
    parts,
    sharing_group,
    size_of,
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

    @property
    def size(self) -> int:
        """Elements of the larger of input and output, as messages are counted."""
        return max(sum(self.given), sum(self.taken))


def routes(model: Model, layout: Layout, rank: int, needs: Mapping[str, Needs]) -> dict[str, Route]:
    """The ways of the parameters of a rank whose pieces have to come together. needs: of each parameter; one that is
    not listed needs nothing."""
    hashed: Any = model
    return _routes(hashed, layout, rank, tuple(needs.items()))


@lru_cache(maxsize=64)
def _routes(
    model: Model, layout: Layout, rank: int, needs: tuple[tuple[str, Needs], ...]
) -> dict[str, Route]:
    table, wanted = held(model, layout, rank), dict(needs)
    axes = {
        name: found
        for name, part in table.items()
        if (found := _axes(model, layout, name, part, wanted.get(name, "elements")))
    }
    tables: dict[int, dict[str, Part]] = {}

    def keeps(name: str, other: int) -> Ranges:
        if other not in tables:
            tables[other] = parts(model, layout, other)
        return tables[other][name].keeps

    owners = _owners({name: (size_of(table[name].computes), axes[name]) for name in axes}, layout)
    found = {}
    for name, over in axes.items():
        hops, mine = [], True
        for number, group in enumerate(over):
            members = group_of(layout, group, rank)
            before = over[:number]
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


def _axes(model: Model, layout: Layout, name: str, part: Part, needs: Needs) -> tuple[str, ...]:
    """The groups over which pieces come together, in their order."""
    if needs == "elements":
        return ()
    dims = len(part.shape)
    first = dims - 1 if needs == "rows" else max(0, dims - 2)  # the dims before count matrices
    cuts = cuts_in(model.cuts.get(name), layout.sp)
    found = []
    if layout.tp > 1 and any(cut.axis == "tp" and cut.dim >= first for cut in cuts):
        found.append("tp")
    group, ranks = sharing_group(layout, part.expert)
    if layout.zero and ranks > 1 and kept_rows(local_shape(part.computes), 0, ranks)[0] >= first:
        found.append(group)
    return tuple(found)


def _owners(matrices: Mapping[str, tuple[int, tuple[str, ...]]], layout: Layout) -> dict[str, dict[str, int]]:
    """The owner of each matrix, as its index in each group: the largest first, each to the ranks that have least."""
    load: dict[tuple[int, int, int], float] = {}
    sizes = {group: groups(layout)[group][0] for group in ("tp", "shard", "eshard")}
    found = {}
    for name, (size, over) in sorted(matrices.items(), key=lambda item: -item[1][0]):
        choices = [
            [(group, index) for index in range(sizes[group])] if group in over else [(group, -1)]
            for group in sizes
        ]
        best = min(product(*choices), key=lambda chosen: load.get(_place(chosen), 0.0))
        load[_place(best)] = load.get(_place(best), 0.0) + size
        found[name] = {group: index for group, index in best if index >= 0}
    return found


def _place(chosen: Sequence[tuple[str, int]]) -> tuple[int, int, int]:
    return chosen[0][1], chosen[1][1], chosen[2][1]


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
    dims = []
    for spans, around in zip(inner, outer, strict=True):
        offset, dim = 0, []
        for start, stop in spans:
            base = 0
            for first, last in around:
                if first <= start and stop <= last:
                    begin = base + start - first
                    dim.append((slice(offset, offset + stop - start), slice(begin, begin + stop - start)))
                base += last - first
            offset += stop - start
        dims.append(dim)
    for combination in product(*dims):
        yield tuple(a for a, _ in combination), tuple(b for _, b in combination)
