"""The part of each parameter and of each sequence that a rank holds, as data. No torch.

A model's card lists its parameters, and which of them tensor and expert parallelism cut. From these tables the trainer
builds its shards, the checkpoint places them, and the planner counts them.

A rank's part of a parameter is written as `Ranges`: for each dim, the spans [start, stop) of the whole, in the rank's
order. A fused matrix (query, key and value heads in one) is cut section by section, so a rank's rows come from several
spans.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import lru_cache
from itertools import pairwise, product
from typing import Protocol

from fivefold.schedules.collectives.collective import Span, joined
from fivefold.schedules.pipeline import SCHEDULES, cut, place
from fivefold.schedules.pipeline.schedule import Placement
from fivefold.sharding.layout import Layout, index_in

Shape = tuple[int, ...]
Columns = tuple[Span, ...]
Ranges = tuple[Columns, ...]
TIED, OUTPUT = "embed.weight", "head.weight"
"""The parameter that the output layer shares if embeddings are tied, and the output layer's own if not."""

STACKED = ("bias", "vectors")
"""Endings of the names of vectors that lie in one tensor: biases of experts, filters of a convolution, a gate's row."""


def is_matrix(name: str, shape: Shape) -> bool:
    """True for a parameter that multiplies, or a stack of such; False for vectors, and for several in one tensor."""
    return len(shape) > 1 and not name.endswith(STACKED)


@dataclass(frozen=True)
class Cut:
    """The division of a parameter: `dim` of the tensor, over `axis` of the mesh. The dim consists of sections, and each
    section is divided evenly.

    kind: "column" (output features), "row" (input features), "vocab" (rows of the vocabulary), "expert". whole_tokens:
    it needs tensor-parallel ranks with the same tokens, so under sequence parallelism there is none. within: a further
    cut of each expert.
    """

    kind: str
    dim: int
    sections: tuple[int, ...]
    whole_tokens: bool = False
    within: Cut | None = None

    @property
    def axis(self) -> str:
        return "ep" if self.kind == "expert" else "tp"


@dataclass(frozen=True)
class Sections:
    """Matrices, or vectors, that lie side by side in one parameter, with their sizes along `dim`."""

    dim: int
    sizes: tuple[int, ...]

    def shapes(self, shape: Shape) -> list[Shape]:
        """The shape of each, given the parameter's."""
        return [(*shape[: self.dim], size, *shape[self.dim + 1 :]) for size in self.sizes]


def sections_by(cuts: Mapping[str, Cut]) -> dict[str, Sections]:
    """Those of the parameters whose cuts have several sections: each is a matrix of its own."""
    all_cuts = ((name, each) for name, cut in cuts.items() for each in cuts_in(cut, sp=False))
    return {name: Sections(each.dim, each.sections) for name, each in all_cuts if len(each.sections) > 1}


def cuts_in(cut: Cut | None, sp: bool) -> tuple[Cut, ...]:
    """The cuts of a parameter with or without sequence parallelism."""
    if cut is None:
        return ()
    own = () if sp and cut.whole_tokens else (cut,)
    return own + cuts_in(cut.within, sp)


class Model(Protocol):
    """The properties of a model that this file needs. A card of `models/` has them.

    parameters: names and shapes, in the module's order. Names that begin with one of `beginning` belong to the
    beginning, `STACK.N....` to a block, all others to the end. frozen: those that are not trained. cuts: the parameters
    that tensor or expert parallelism cuts. sections: of those that consist of several matrices. costs: FLOPs per token
    of each block, of the beginning, of the end. tied: the end computes with the weight `TIED`, too. further: blocks
    that belong to the end. whole_sequences: prefixes of parameters that compute with whole sequences under sequence
    parallelism. regional: endings of uncut parameters within tensor-parallel regions.
    """

    @property
    def parameters(self) -> Mapping[str, Shape]: ...

    @property
    def cuts(self) -> Mapping[str, Cut]: ...

    @property
    def sections(self) -> Mapping[str, Sections]: ...

    @property
    def costs(self) -> tuple[Sequence[float], float, float]: ...

    @property
    def tied(self) -> bool: ...

    @property
    def further(self) -> int: ...

    @property
    def whole_sequences(self) -> tuple[str, ...]: ...

    @property
    def regional(self) -> tuple[str, ...]: ...

    @property
    def frozen(self) -> frozenset[str]: ...

    @property
    def stack(self) -> str: ...

    @property
    def beginning(self) -> tuple[str, ...]: ...


def block_of(model: Model, name: str) -> str:
    """The number of the block that a parameter belongs to, as text; "" outside of blocks."""
    prefix = f"{model.stack}."
    return name[len(prefix) :].partition(".")[0] if model.stack and name.startswith(prefix) else ""


def patterns(text: str) -> tuple[str, ...]:
    """The patterns of names that a recipe writes as `embed*, blocks.[0-3].*`."""
    return tuple(part for word in text.split(",") if (part := word.strip()))


def matching(text: str, names: Iterable[str]) -> frozenset[str]:
    """The names that any of the patterns matches (`*`, `?`, `[0-3]`)."""
    wanted = patterns(text)
    return frozenset(n for n in names if any(fnmatchcase(n, pattern) for pattern in wanted))


@dataclass(frozen=True)
class Part:
    """A rank's part of a parameter.

    shape: the whole parameter's. computes: the part it computes with. keeps: the part whose master weight and optimizer
    state it keeps; the same, unless ZeRO shares states. owned: exactly one of the ranks that keep this part owns it.
    The owner counts it in norms and writes it to checkpoints. frozen: it is not trained. sections: of a parameter that
    consists of several matrices.
    """

    shape: Shape
    computes: Ranges
    keeps: Ranges
    owned: bool
    expert: bool = False
    frozen: bool = False
    sections: Sections | None = None


def parts(model: Model, layout: Layout, rank: int) -> dict[str, Part]:
    """The part of each parameter on a rank, as if it had every pipeline stage."""
    table, found = model.cuts, dict[str, Part]()
    first = {name: index_in(layout, name, rank) == 0 for name in ("tp", "replicate", "batch", "edp")}
    for name, shape in model.parameters.items():
        computes, cuts = whole(shape), cuts_in(table.get(name), layout.sp)
        expert = any(each.kind == "expert" for each in cuts)
        for each in cuts:
            if (ranks := getattr(layout, each.axis)) > 1:
                computes = divide(computes, each, index_in(layout, each.axis, rank), ranks)
        apart = any(each.axis == "tp" for each in cuts) or (expert and layout.folded > 1)
        keeps, owned = computes, apart or first["tp"]
        same = "edp" if expert else "batch"  # the ranks that keep the same rows
        if layout.zero:
            group, ranks = sharing_group(layout, expert)
            dim, (start, stop) = kept_rows(local_shape(computes), index_in(layout, group, rank), ranks)
            keeps, same = narrow(computes, dim, start, stop), "replicate"
        frozen, sections = name in model.frozen, model.sections.get(name)
        found[name] = Part(shape, computes, keeps, owned and first[same], expert, frozen, sections)
    return found


def held(model: Model, layout: Layout, rank: int) -> dict[str, Part]:
    """A rank's part of each parameter of its own pipeline stages, in the module's order. A tied embedding is on the
    first and on the last stage; the first owns it."""
    table, mine = parts(model, layout, rank), stages_of(layout, index_in(layout, "pp", rank))
    by_stage = stage_parameters(model, stage_blocks(model, layout))
    names = {name for stage in mine for name in by_stage[stage]}
    first = len(by_stage) // layout.copies  # the first copy of the model owns them
    owned = {
        name for stage in mine if stage < first for name in by_stage[stage] if name != TIED or stage == 0
    }
    return {n: p if n in owned else replace(p, owned=False) for n, p in table.items() if n in names}


def stages_of(layout: Layout, pp_index: int) -> tuple[int, ...]:
    """The pipeline stages of the ranks with this index on the pp axis."""
    if layout.pp == 1:
        return (0,)
    return _stages_of(SCHEDULES[layout.schedule].placement, layout.pp, layout.stages_per_rank, pp_index)


@lru_cache(maxsize=4096)
def _stages_of(placement: Placement, ranks: int, chunks: int, pp_index: int) -> tuple[int, ...]:
    return tuple(stage for stage, owner in enumerate(place(placement, ranks, chunks)) if owner == pp_index)


def stage_blocks(model: Model, layout: Layout) -> tuple[range, ...]:
    """The blocks of each pipeline stage, cut as evenly as possible by FLOPs, with embedding and head counted."""
    stages = layout.pp * layout.stages_per_rank // layout.copies
    return _stage_blocks(model, stages, layout.bare_ends) * layout.copies


def ends_of(layout: Layout, stages: Sequence[int]) -> tuple[bool, bool]:
    """Whether some stages have a first stage of the model among them, and a last one."""
    length = layout.pp * layout.stages_per_rank // layout.copies
    return any(stage % length == 0 for stage in stages), any((stage + 1) % length == 0 for stage in stages)


@lru_cache(maxsize=1024)
def _stage_blocks(model: Model, stages: int, bare_ends: bool) -> tuple[range, ...]:
    blocks, first, last = model.costs
    if stages == 1:  # also of a user's module without blocks
        return (range(len(blocks)),)
    movable = len(blocks) - model.further
    found = cut(blocks[:movable], stages, first, last + sum(blocks[movable:]), bare_ends)
    return (*found[:-1], range(found[-1].start, len(blocks)))


@lru_cache(maxsize=64)
def stage_parameters(model: Model, blocks: tuple[range, ...]) -> tuple[tuple[str, ...], ...]:
    """Names of the parameters of each pipeline stage, in the module's order. The first stage has the embeddings; the
    last has the rest and a copy of a tied embedding. blocks: those of each stage."""
    half = len(blocks) // 2
    if half and blocks[:half] == blocks[half:]:  # two copies of the model
        return stage_parameters(model, blocks[:half]) * 2
    stage_of = {str(block): stage for stage, part in enumerate(blocks) for block in part}
    found: list[list[str]] = [[] for _ in blocks]
    for name in model.parameters:
        if block := block_of(model, name):
            found[stage_of[block]].append(name)
        else:
            found[0 if name.startswith(model.beginning) else -1].append(name)
        if name == TIED and model.tied and len(blocks) > 1:
            found[-1].append(name)
    return tuple(map(tuple, found))


def sharing_group(layout: Layout, expert: bool = False) -> tuple[str, int]:
    """The group of ranks that share the states of a parameter, and its size: 1 without ZeRO. expert: True if expert
    parallelism cuts the parameter."""
    return ("eshard", layout.expert_shards) if expert else ("shard", layout.shards)


def kept_rows(shape: Shape, index: int, ranks: int) -> tuple[int, Span]:
    """The rows of a parameter of this shape that rank `index` of its sharing group keeps: (dim, [start, stop) along
    it)."""
    dim = shard_dim(shape, ranks)
    return dim, chunk(shape[dim], index, ranks)


def shard_dim(shape: Shape, ranks: int) -> int:
    """The dim along which ZeRO divides a parameter between `ranks`, given its shape on a rank: its rows. Experts are a
    stack of matrices. They are divided by expert, or by the rows of each matrix if only that comes out even, since few
    experts over many ranks would be mostly padding."""
    return 1 if len(shape) > 2 and shape[0] % ranks and shape[1] % ranks == 0 else 0


def chunk(size: int, index: int, ranks: int) -> Span:
    """Rows of shard `index` when `size` rows are divided as FSDP2 does: in equal chunks, rounded up. The last ones may
    be smaller or empty."""
    rows = -(-size // ranks)
    return min(size, rows * index), min(size, rows * (index + 1))


def whole(shape: Shape) -> Ranges:
    """All of a parameter."""
    return tuple(((0, size),) for size in shape)


def divide(ranges: Ranges, cut: Cut, index: int, ranks: int) -> Ranges:
    """The part of a parameter on rank `index` of `ranks`. Before this cut the parameter is whole along the cut's
    dim."""
    assert len(ranges[cut.dim]) == 1, "cut before"
    spans, start = [], 0
    for size in cut.sections:
        assert size % ranks == 0, f"section {size} over {ranks} ranks"
        spans.append((start + size // ranks * index, start + size // ranks * (index + 1)))
        start += size
    assert start == ranges[cut.dim][0][1], "the sections are the dim"
    return (*ranges[: cut.dim], joined(spans), *ranges[cut.dim + 1 :])


def narrow(ranges: Ranges, dim: int, start: int, stop: int) -> Ranges:
    """Elements start .. stop along a dim, in the holder's own numbering."""
    spans = []
    for at, (first, last) in offsets(ranges[dim]):
        a, b = max(start - at, 0), min(stop - at, last - first)
        if a < b:
            spans.append((first + a, first + b))
    return (*ranges[:dim], tuple(spans), *ranges[dim + 1 :])


def offsets(spans: Sequence[Span]) -> Iterator[tuple[int, Span]]:
    """Each span behind the place at which it begins in the holder's own numbering."""
    at = 0
    for start, stop in spans:
        yield at, (start, stop)
        at += stop - start


def local_shape(ranges: Ranges) -> Shape:
    return tuple(sum(stop - start for start, stop in spans) for spans in ranges)


def size_of(ranges: Ranges) -> int:
    """Number of elements."""
    return math.prod(local_shape(ranges))


def positions(ranges: Ranges, shape: Shape) -> tuple[int, int]:
    """The number of a part's elements, and the sum of their positions in a tensor of this shape. Those of parts that
    make it up add up to those of the whole."""
    size, total, stride = size_of(ranges), 0, 1
    for spans, length in zip(reversed(ranges), reversed(shape), strict=True):
        own = sum(b - a for a, b in spans)
        total += stride * sum((a + b - 1) * (b - a) // 2 for a, b in spans) * (size // own if own else 0)
        stride *= length
    return size, total


def boxes(ranges: Ranges) -> Iterator[tuple[tuple[slice, ...], tuple[Span, ...]]]:
    """The rectangular pieces of a part: (where in the local tensor, which box of the whole)."""
    dims = ([(slice(at, at + b - a), (a, b)) for at, (a, b) in offsets(spans)] for spans in ranges)
    for combination in product(*dims):
        yield tuple(where for where, _ in combination), tuple(box for _, box in combination)


def stretches(ranges: Ranges, start: int, stop: int) -> Iterator[Ranges]:
    """Elements start .. stop of a part, as the holder's tensor has them in memory, as parts that are contiguous there,
    in order: whole rows, and pieces of the rows at both ends."""
    if stop - start == size_of(ranges):
        yield ranges
        return
    row = size_of(ranges[1:])
    ends = -(-start // row) * row, stop // row * row  # of the whole rows
    cuts = sorted({start, *(at for at in ends if start < at < stop), stop})
    for first, last in pairwise(cuts):
        number = first // row
        if first % row == last % row == 0:
            yield narrow(ranges, 0, number, last // row)
        else:
            one = narrow(ranges, 0, number, number + 1)
            for inner in stretches(ranges[1:], first - number * row, last - number * row):
                yield (one[0], *inner)


@dataclass(frozen=True)
class Local:
    """A parameter as a rank computes with it. axis: the one that cuts it ("tp" or "ep"; "ep" if both do), or ""."""

    shape: Shape
    axis: str = ""

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def share(self, ranks: int, index: int = 0) -> int:
        """Elements that rank `index` of `ranks` keeps when they share the parameter; rank 0 has most."""
        return math.prod(self.piece(ranks, index))

    def piece(self, ranks: int, index: int = 0) -> Shape:
        """The shape of what that rank keeps."""
        dim, (start, stop) = kept_rows(self.shape, index, ranks)
        return (*self.shape[:dim], stop - start, *self.shape[dim + 1 :])


def local_parameters(model: Model, layout: Layout) -> dict[str, Local]:
    """Every parameter as a rank that has it computes with it, in the module's order."""
    return _local_parameters(model, layout.tp, layout.ep, layout.sp)


@lru_cache(maxsize=256)
def _local_parameters(model: Model, tp: int, ep: int, sp: bool) -> dict[str, Local]:
    found = {}
    for name, shape in model.parameters.items():
        cuts = cuts_in(model.cuts.get(name), sp)
        for each in cuts:  # equal on every rank; a search also counts layouts that do not divide the model
            ranks, dim = (ep if each.axis == "ep" else tp), each.dim
            shape = (*shape[:dim], shape[dim] // ranks, *shape[dim + 1 :])
        found[name] = Local(shape, cuts[0].axis if cuts else "")
    return found


def summed_over_tp(model: Model, layout: Layout, names: Iterable[str]) -> list[str]:
    """The uncut parameters whose gradients are partial sums over the tensor axis: those within its regions, and under
    sequence parallelism, where each rank sees a piece of the sequence, all others except those of modules that compute
    with whole sequences, and of experts on an axis that takes in the tensor axis."""
    if layout.tp == 1:
        return []
    moving, others = (n for n in names if n not in model.frozen), ("tp", "ep")[: 1 + (layout.folded > 1)]
    uncut = (n for n in moving if all(c.axis not in others for c in cuts_in(model.cuts.get(n), layout.sp)))
    return [
        name
        for name in uncut
        if name.endswith(model.regional) or (layout.sp and not name.startswith(model.whole_sequences))
    ]


def tensor_sums(model: Model, layout: Layout, names: Iterable[str]) -> list[list[str]]:
    """The messages that sum the gradients of these parameters over the tensor axis: matrices each in a message of its
    own, in place; vectors together."""
    local = local_parameters(model, layout)
    vectors, found = [], list[list[str]]()
    for name in names:
        (found.append([name]) if len(local[name].shape) > 1 else vectors.append(name))
    return [*found, vectors] if vectors else found


def kept_elements(model: Model, layout: Layout, rank: int, names: Iterable[str]) -> int:
    """Number of elements of these parameters whose states a rank keeps."""
    local, total = local_parameters(model, layout), 0
    for name in names:
        group, ranks = sharing_group(layout, expert=local[name].axis == "ep")
        total += local[name].share(ranks, index_in(layout, group, rank) if ranks > 1 else 0)
    return total
