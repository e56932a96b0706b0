"""Messages of training, as data: activations between tensor, context and expert parallel ranks, and the parameters
whose weights are gathered and whose gradients are scattered or summed together. No torch.

Between two tensor-parallel regions an activation is whole on every rank, or with sequence parallelism (sp) cut along
the sequence (Megatron-LM, arXiv 1909.08053 and 2205.05198). Where a region begins, forward makes activations whole
(`WHOLE`) and backward sums their gradients (`SUM`). Where it ends, forward sums and backward makes whole. The other
messages of the passes are `Collective`s: `parallel` sends them, the operations of a model (`models/work.py`) count
them.

Without ZeRO gradients lie in flat buffers, which are summed in buckets. With ZeRO parameters are divided by rows, and
FSDP2 gathers and scatters them in units: a block, its experts if fewer ranks share these, and the rest of the stage.

`Sync` is a message of parameters. ZeRO++ (arXiv 2306.10209) sends some of ZeRO 3 with fewer bytes between nodes.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from fivefold.errors import UserError, did_you_mean
from fivefold.precision.fp8 import tile_of_rows
from fivefold.schedules.compression import INT4, INT8, NONE, Blocks
from fivefold.sharding.layout import Layout, buckets, groups
from fivefold.sharding.parts import (
    Model,
    Shape,
    block_of,
    ends_of,
    kept_rows,
    local_parameters,
    sharing_group,
    stage_blocks,
    stage_parameters,
)
from fivefold.sharding.tiers import OFFLOADS

What = Literal["all_gather", "all_reduce", "reduce_scatter", "all_to_all"]

WHOLE: dict[bool, What | None] = {False: None, True: "all_gather"}
"""By sp: the collective that makes an activation whole. None: every rank has it."""
SUM: dict[bool, What] = {False: "all_reduce", True: "reduce_scatter"}
"""By sp: the collective that adds up the ranks' partial sums, whole or each rank's piece."""
AGAIN: dict[bool, What | None] = {False: None, True: WHOLE[True]}
"""By sp_regather: the collective that makes the input of a region's first matmul whole again in backward, beside the
matmul of the input's gradient. Megatron-LM does so. None: forward keeps the whole input, and sp sends as many bytes as
the all-reduces would."""


@dataclass(frozen=True)
class Collective:
    """A collective of forward on an axis, and the one that sends its gradient in backward.

    number: bytes of each number that is sent; 0: those of the compute dtype.
    """

    axis: str
    forward: What
    backward: What | None = None
    number: int = 0


KEYS = Collective("cp", "all_gather", "reduce_scatter")
"""Keys and values of all tokens, which forward and backward gather, and the sums of their gradients."""
HEADS = Collective("cp", "all_to_all", "all_to_all")
"""Ulysses: all heads of some tokens for some heads of all tokens, and back."""
STATISTICS = Collective("tp", "all_gather", number=4)
"""What ranks with parts of the vocabulary tell each other: `LOSS_STATISTICS` numbers per row of logits."""
LOSS_STATISTICS = 3
"""The largest logit, the sum of exponentials, the target's logit."""
SQUARES = Collective("tp", "all_reduce", "all_reduce", number=4)
"""Sums for the norm of a vector whose features the ranks share: in forward of its squares, in backward of its products
with the gradient. One number per vector."""
TARGETS = Collective("cp", "all_reduce", number=8)
"""The number of targets: ranks with parts of a sequence have different ones."""
COUNTS = Collective("ep", "all_to_all", number=8)
"""Rows for each expert. They go before the rows."""
ROWS = Collective("ep", "all_to_all", "all_to_all")
"""Rows on their way to the experts, and results on their way back."""


def loads(sp: bool) -> list[Collective]:
    """Sums of the rows that chose each expert, over the axes whose ranks have different tokens of one sequence."""
    return [Collective(axis, "all_reduce", number=8) for axis in (("cp", "tp") if sp else ("cp",))]


ZEROPP_GRADIENTS = {"gradients": INT4, "gradients:int4": INT4, "gradients:int8": INT8}
ZEROPP_WORDS = ("weights", "hier", *ZEROPP_GRADIENTS)


@dataclass(frozen=True)
class FsdpUnit:
    """Parameters that FSDP2 gathers and scatters together.

    stage: their pipeline stage. module: name of the wrapped module; "" is the stage itself. group: the ranks that share
    them. pieces: the shape of each parameter on a rank, with rows padded to a multiple of the ranks. padded: the sum
    over all ranks. trained: that of the parameters with gradients. across: the parameters that are divided along
    another dim than the first.
    """

    stage: int
    module: str
    group: str
    names: tuple[str, ...]
    pieces: tuple[Shape, ...]
    padded: int
    trained: int
    across: tuple[str, ...]

    @property
    def shares(self) -> tuple[int, ...]:
        """Elements of each parameter on a rank."""
        return tuple(map(math.prod, self.pieces))

    def narrow(self, scaling: str, rounded: Container[str], layout: Layout) -> dict[str, tuple[int, int]]:
        """The parameters that are gathered in 8 bits, with the (rows, columns) of a piece that share a scale. rounded:
        the matrices that layers round."""
        if zeropp(layout.zeropp).two_gathers or OFFLOADS[layout.offload].streams:
            return {}
        named = zip(self.names, self.pieces, strict=True)
        tiles = {name: tile_of_rows(scaling, piece) for name, piece in named if name in rounded}
        return {name: tile for name, tile in tiles.items() if tile}

    def message(self, narrow: Mapping[str, tuple[int, int]], width: float) -> float:
        """Bytes of a rank's part of a gather. width: of an element that is not narrow. A tile has a scale (fp32)."""
        size = 0.0
        for name, share in zip(self.names, self.shares, strict=True):
            size += share + 4 * share / math.prod(narrow[name]) if name in narrow else share * width
        return math.ceil(size / 4) * 4 if narrow else size


@dataclass(frozen=True)
class FlatBuffer:
    """Parameters that every rank of a group has whole, in the module's order. Their gradients share one flat buffer,
    which is cut into buckets of at least `bucket_bytes`."""

    group: str
    names: tuple[str, ...]
    shapes: tuple[Shape, ...]
    bucket_bytes: float

    @property
    def size(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes)

    @property
    def bucket_sizes(self) -> list[int]:
        """Elements of each bucket."""
        return [sum(math.prod(shape) for shape in shapes) for shapes in self.bucket_shapes]

    @property
    def bucket_shapes(self) -> tuple[tuple[Shape, ...], ...]:
        return _bucket_shapes(self.shapes, self.bucket_bytes)


@dataclass(frozen=True)
class Keeping:
    """The units and buffers for the parameters of some stages of a rank. It covers one stage; or all of a rank's, if
    these include the model's first and last and share a tied embedding. Inner units come first, each stage itself
    last. frozen: parameters that are whole and not trained; they are in no buffer."""

    stages: tuple[int, ...]
    units: tuple[FsdpUnit, ...]
    buffers: tuple[FlatBuffer, ...]
    frozen: tuple[str, ...] = ()


def keepings(
    model: Model, layout: Layout, stages: Sequence[int], blocks: tuple[range, ...] | None = None
) -> list[Keeping]:
    """The units and buffers of ranks with these pipeline stages. blocks: of every stage, if another program cuts
    them."""
    blocks = blocks or stage_blocks(model, layout)
    by_stage, tied = stage_parameters(model, blocks), model.tied and all(ends_of(layout, stages))
    together = [tuple(stages)] if tied else [(stage,) for stage in stages]
    local, kept = local_parameters(model, layout), list[Keeping]()
    for some in together:
        names = {name for stage in some for name in by_stage[stage]}
        whole: dict[str, list[str]] = {}  # by the group that sums their gradients
        frozen = []
        for name in (n for n in model.parameters if n in names):
            expert = layout.ep > 1 and local[name].axis == "ep"
            if sharing_group(layout, expert)[1] > 1:
                continue  # ranks divide it: it is in a unit
            if name in model.frozen:
                frozen.append(name)
            else:
                (sync,) = syncs(layout, expert)
                whole.setdefault(sync.group, []).append(name)
        buffers = tuple(
            FlatBuffer(group, tuple(mine), tuple(local[name].shape for name in mine), bucket_bytes(layout))
            for group, mine in sorted(whole.items())  # experts' ("edp") last
        )
        units = tuple(unit for stage in some for unit in _units(model, layout, stage, by_stage[stage]))
        kept.append(Keeping(some, units, buffers, tuple(frozen)))
    return kept


def _units(model: Model, layout: Layout, stage: int, names: Sequence[str]) -> list[FsdpUnit]:
    local, parts = local_parameters(model, layout), dict[tuple[str, str], list[str]]()
    if sharing_group(layout)[1] == 1:
        return []
    parts["", "shard"] = []  # the stage itself, even if it has only blocks
    for name in names:
        number = block_of(model, name)
        block = f"{model.stack}.{number}" if number else ""
        if layout.ep > 1 and local[name].axis == "ep":
            if sharing_group(layout, expert=True)[1] > 1:
                parts.setdefault((name.rpartition(".")[0], "eshard"), []).append(name)
        else:
            parts.setdefault((block, "shard"), []).append(name)
    found = []
    for (module, group), members in parts.items():
        ranks = sharing_group(layout, expert=group == "eshard")[1]
        pieces = tuple(local[name].piece(ranks) for name in members)
        shares = list(map(math.prod, pieces))
        across = tuple(name for name in members if kept_rows(local[name].shape, 0, ranks)[0])
        padded = ranks * sum(shares)
        still = ranks * sum(s for n, s in zip(members, shares, strict=True) if n in model.frozen)
        found.append(FsdpUnit(stage, module, group, tuple(members), pieces, padded, padded - still, across))
    return sorted(found, key=lambda unit: len(unit.module.split(".")) if unit.module else 0, reverse=True)


def compressed_buckets(
    model: Model, layout: Layout, stages: Sequence[int], blocks: tuple[range, ...] | None = None
) -> Iterator[tuple[str, int, tuple[Shape, ...]]]:
    """(group, its number of ranks, shapes of the parameters) of each bucket whose sum is compressed
    (schedules/compression)."""
    if layout.compress == NONE:
        return
    for keeping in keepings(model, layout, stages, blocks):
        for buffer in keeping.buffers:
            ranks = groups(layout)[buffer.group][0]
            if ranks > 1:
                yield from ((buffer.group, ranks, shapes) for shapes in buffer.bucket_shapes)


def bucket_bytes(layout: Layout) -> float:
    """Minimum bytes of fp32 gradients per bucket; infinite if there is one bucket."""
    return layout.bucket_mib * 2**20 or math.inf


@lru_cache(maxsize=1024)
def _bucket_shapes(shapes: tuple[Shape, ...], bucket_bytes: float) -> tuple[tuple[Shape, ...], ...]:
    ordered = buffer_order(shapes)
    some = buckets([math.prod(shape) for shape in ordered], bucket_bytes)
    return tuple(tuple(ordered[bucket.start : bucket.stop]) for bucket in some)


def buffer_order(parameters: Sequence[Any]) -> list[Any]:
    """Orders parameters of the module's order for a flat buffer: backward finishes roughly in reverse."""
    return list(reversed(parameters))


UPDATED = 1 << 18
"""Elements of whole parameters that an update with rounding takes at once, unless one parameter has more: few enough
that their fp32 copies (optim/updater.py) are small beside the states."""


def updated_together(sizes: Mapping[str, int]) -> Iterator[list[str]]:
    """Parameters in the order of their replica, in groups of at most `UPDATED` elements: the same groups on all ranks.
    sizes: of the whole parameters."""
    some, size = list[str](), 0
    for name, elements in sizes.items():
        if some and size + elements > UPDATED:
            yield some
            some, size = [], 0
        some.append(name)
        size += elements
    if some:
        yield some


@dataclass(frozen=True)
class ZeroPP:
    """weights, gradients: how they are quantised; None: not at all. hier: each node keeps the weights that it has
    gathered, a share on each of its ranks, until they change."""

    weights: Blocks | None = None
    hier: bool = False
    gradients: Blocks | None = None

    @property
    def two_gathers(self) -> bool:
        """True if weights are gathered across the nodes first, and then inside each of them."""
        return self.hier or self.weights is not None


@lru_cache
def zeropp(text: str) -> ZeroPP:
    """The meaning of a `layout.zeropp`. Raises UserError: it is not a list of different parts."""
    words = [] if text == NONE else [word.strip() for word in text.split(",")]
    valid = (
        f"valid: {NONE}, or some of weights, hier, gradients (gradients:int8), such as weights,hier,gradients"
    )
    for word in words:
        if word not in ZEROPP_WORDS:
            raise UserError(f"zeropp: '{word}' is unknown{did_you_mean(word, ZEROPP_WORDS)} ({valid})")
    kinds = [word.partition(":")[0] for word in words]
    if len(set(kinds)) < len(kinds):
        raise UserError(f"zeropp: '{text}' has a part twice ({valid})")
    gradients = next((ZEROPP_GRADIENTS[word] for word in words if word in ZEROPP_GRADIENTS), None)
    return ZeroPP(INT8 if "weights" in words else None, "hier" in words, gradients)


@dataclass(frozen=True)
class Sync:
    """A message by which ranks with the same parameters share weights or sum gradients.

    what: "gather" weights from the ranks that keep them; "scatter" sums of gradients to these; "sum" gradients. each:
    times per microbatch, in forward and again in backward if twice; 0: once per step. rows: only those that a rank
    keeps. part: the message as a share of a unit's elements. blocks: how they are quantised, if they are.
    """

    what: Literal["gather", "scatter", "sum"]
    group: str
    each: int = 0
    rows: bool = False
    part: float = 1.0
    blocks: Blocks | None = None

    def size(self, padded: float, width: float, shares: Sequence[int], ranks: int) -> float:
        """Bytes for a unit of `padded` elements, of which `ranks` ranks have `shares`. width: bytes of an element that
        is not quantised."""
        if self.blocks is None:
            return self.part * padded * width
        return self.part * ranks * self.blocks.row(self.blocks.chunk([(share,) for share in shares], 1))


def syncs(layout: Layout, expert: bool = False) -> tuple[Sync, ...]:
    """The messages for parameters in a step, in their order. expert: those that expert parallelism cuts.

    Whole parameters are summed once. Of divided ones, stage 3 gathers weights before forward and before backward, the
    other stages after the update. Gradients are scattered, and a hybrid then sums its rows over the replicas.
    """
    group, ranks = sharing_group(layout, expert)
    inside = groups(layout)["inside"][0] if layout.zeropp != NONE else 1
    again = regathers(layout)
    return _syncs(
        group, ranks > 1, layout.zero, layout.pp > 1, layout.dp_replicate > 1, layout.zeropp, inside, again
    )


@lru_cache
def _syncs(
    group: str, shared: bool, zero: int, pipeline: bool, hybrid: bool, plus: str, inside: int, again: bool
) -> tuple[Sync, ...]:
    if not shared:
        return (Sync("sum", {"shard": "batch", "eshard": "edp"}[group]),)
    chosen, gathers, scatters = zeropp(plus), 2 if again else 0, 1
    if scattered_once(zero, 2 if pipeline else 1):
        scatters = 0
    found = [Sync("gather", group, gathers)]
    if chosen.two_gathers:  # the nodes' copies stay until the weights change
        first = Sync(
            "gather", "across", 0 if chosen.hier else gathers, part=1 / inside, blocks=chosen.weights
        )
        found = [first, Sync("gather", "inside", gathers, blocks=chosen.weights)]
    if chosen.gradients:
        found.append(Sync("scatter", "inside", scatters, blocks=chosen.gradients))
        found.append(Sync("scatter", "across", scatters, part=1 / inside, blocks=chosen.gradients))
    else:
        found.append(Sync("scatter", group, scatters))
    return (*found, Sync("sum", "replicate", rows=True)) if hybrid else tuple(found)


def regathers(layout: Layout) -> bool:
    """True if gathered weights are freed after each use: under ZeRO 3, and where a rank's own rows leave the device."""
    return layout.zero == 3 or (layout.zero > 0 and OFFLOADS[layout.offload].working != "device")


def scattered_once(zero: int, pp: int) -> bool:
    """True if gradients add up whole on each rank and are scattered once per step, in the last microbatch.

    ZeRO 1 does so. In a pipeline every ZeRO stage does: microbatches overlap, and may defer weight gradients.
    """
    return zero == 1 or (zero > 1 and pp > 1)
