"""Draws a layout as text and SVG: what each rank computes with, what it stores, and which tokens it sees; under context
parallelism also which queries see which keys, by the rank that computes them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fivefold.draw.canvas import NAMES, Canvas
from fivefold.kernels.tiling import Tiling
from fivefold.models.card import card_of
from fivefold.observe.format import aligned, short_number
from fivefold.recipe import Recipe
from fivefold.sharding.layout import Layout, describe, equation, index_in, share
from fivefold.sharding.parts import (
    Columns,
    Span,
    ends_of,
    held,
    joined,
    narrow,
    sharing_group,
    size_of,
    stage_blocks,
    stages_of,
)
from fivefold.sharding.sequence import deals, some_queries, token_spans
from fivefold.sharding.sync import in_replica_group, replica_group_layout
from fivefold.sharding.units import regathers

MOST = 64  # ranks drawn; the first ones of larger layouts
COLUMNS = 6  # ranks side by side, if groups can be broken
WIDE, HIGH, GAP = 184, 180, 10  # pixels: a rank's box, space between boxes
ICON = 74  # pixels: height of the two small pictures in it
HEADS = (
    "rank", "place", "layers", "of each matrix", "states kept", "sequences", "tokens", "between matmuls", "experts"
)  # fmt: skip
COLORS = {"has": "blue half", "lent": "blue faint", "keeps": "blue", "whole": "green half", "sees": "green"}


def to_text(recipe: Recipe, layout: Layout, documents: Tiling | None = None) -> str:
    """A table of the ranks, for terminals. recipe: resolved. documents: see `columns`."""
    rows: list[list[str]] = [list(HEADS)]
    for rank in range(min(layout.ranks, MOST)):
        holds = holding(recipe, layout, rank, documents)
        rows.append([
            str(rank),
            _place(holds, layout) or "-",
            stage_words(holds),
            _part(holds.tensor),
            f"{_part(holds.shard)}: {short_number(holds.keeps)}",
            span_words(holds.rows),
            _tokens(holds.tokens),
            _tokens(holds.between) if layout.sp else "-",
            span_words(holds.experts) if holds.experts else "-",
        ])  # fmt: skip
    used = [column for column in zip(*rows, strict=True) if set(column[1:]) != {"-"}]
    table = aligned(list(zip(*used, strict=True)))
    lines = [describe(layout), equation(layout), "", *table, *_notes(recipe, layout, documents)]
    return "\n".join(lines) + "\n"


def _notes(recipe: Recipe, layout: Layout, documents: Tiling | None) -> list[str]:
    notes = [f"... and {layout.ranks - MOST} more ranks"] * (layout.ranks > MOST)
    if deals(layout) and recipe.data.document_masks:
        which = "one document" if documents is None else "the run's first sequence"
        notes.append(f"tokens as dealt in {which}; the documents of each microbatch decide")
    return notes


def _place(holds: Holding, layout: Layout, without: str = "") -> str:
    """The rank's indices on the axes that are used, such as `pp 1, tp 0`, behind its replica group if there are
    several."""
    axes = [
        f"{axis} {i}" for axis, i in holds.coordinates.items() if layout.sizes[axis] > 1 and axis != without
    ]
    return ", ".join([f"group {holds.replica_group}"] * (holds.replica_group is not None) + axes)


def _part(part: tuple[int, int]) -> str:
    index, of = part
    return "all" if of == 1 else f"{index + 1} of {of}"


def _tokens(spans: Sequence[Span]) -> str:
    if len(spans) > 2:
        return f"{sum(stop - start for start, stop in spans)} in {len(spans)} parts"
    return " and ".join(map(span_words, spans))


def to_svg(recipe: Recipe, layout: Layout, title: str = "", documents: Tiling | None = None) -> str:
    """The ranks as an SVG document. recipe: resolved. documents: see `columns`.

    Each index on the pipeline axis has a panel with a box for each rank. Tensor ranks are side by side, without them
    boxes are in a square.
    """
    ranks = [holding(recipe, layout, rank, documents) for rank in range(min(layout.ranks, MOST))]
    panels = [[r for r in ranks if r.coordinates["pp"] == pp] for pp in range(layout.pp)]
    square = max(1, min(max(map(len, panels)), 4 if layout.pp == 1 else 2))
    columns = min(layout.tp, COLUMNS) if layout.tp > 1 else square
    side_by_side = max(1, COLUMNS // columns)
    canvas = Canvas(title, width=740, about=f" ({describe(layout)})")
    canvas.text(20, 42, equation(layout), "soft")
    weights = "computes with these weights" + " (experts: the lower part of a layer)" * (layout.ep > 1)
    whole, piece = "computes these tokens of the batch", "and has only these between matmuls"
    kinds = {
        **({"lent": f"{weights}, gathered for each use"} if regathers(layout) else {"has": weights}),
        "keeps": "keeps their fp32 masters and moments",
        **({"whole": whole, "sees": piece} if layout.sp else {"sees": whole}),
    }
    canvas.legend(20, 66, [(COLORS[kind], words) for kind, words in kinds.items()])
    top = 96
    for start in range(0, len(panels), side_by_side):
        row = [panel for panel in panels[start : start + side_by_side] if panel]
        for place, panel in enumerate(row):
            left, first, name = 20 + place * (columns * (WIDE + GAP) + 20), panel[0], "the whole model"
            if layout.pp > 1:
                numbers = " and ".join(map(str, first.stages))
                name = f"pp {first.coordinates['pp']}: stage{'s' * (len(first.stages) > 1)} {numbers}"
            canvas.text(left, top, name)
            canvas.text(left, top + 16, stage_words(first), "soft small")
            for i, holds in enumerate(panel):
                down, across = divmod(i, columns)
                x, y = left + across * (WIDE + GAP), top + 26 + down * (HIGH + GAP)
                _box(canvas, holds, layout, recipe, x, y)
        top += 58 + max((-(-len(panel) // columns) for panel in row), default=0) * (HIGH + GAP)
    canvas.text(20, top + 4, "; ".join(_notes(recipe, layout, documents)), "soft small")
    return canvas.svg()


def icons(recipe: Recipe, layout: Layout, title: str) -> str:
    """The first few ranks side by side: each one's part of the model (layers downwards, the width of matrices across;
    experts are the lower part of a layer) and of the batch (sequences downwards, tokens across). recipe: resolved."""
    canvas = Canvas(about=title)
    for rank in range(min(layout.ranks, 4)):
        holds, left = holding(recipe, layout, rank), rank * (2 * ICON + 30) + 8
        canvas.text(left, 18, f"rank {rank}", "name")
        canvas.text(left + 48, 18, _experts(holds) if layout.ep > 1 else "", "soft small")
        _model(canvas, holds, recipe, layout, left, 26)
        _batch(canvas, holds, recipe, layout, left + ICON + 6, 26)
        canvas.text(left, ICON + 40, "model", "soft small")
        canvas.text(left + ICON + 6, ICON + 40, "batch", "soft small")
    return canvas.svg()


def _experts(holds: Holding) -> str:
    return f"experts {span_words(holds.experts)}" if holds.experts else ""


def _box(canvas: Canvas, holds: Holding, layout: Layout, recipe: Recipe, left: float, top: float) -> None:
    """One rank: its place, its part of the model and of the batch, and both in numbers."""
    rows, tokens = span_words(holds.rows), _tokens(holds.tokens)
    place, stages = _place(holds, layout), stage_words(holds)
    tip = f"rank {holds.rank}: {place}; {stages}; sequences {rows}, tokens {tokens}"
    canvas.rect("frame", left, top, WIDE, HIGH, tip)
    canvas.text(left + 10, top + 18, f"rank {holds.rank}", "name")
    canvas.text(left + 10, top + 33, _place(holds, layout, "pp"), "soft small")
    _model(canvas, holds, recipe, layout, left + 10, top + 44)
    _batch(canvas, holds, recipe, layout, left + ICON + 24, top + 44)
    keeps = "all" if holds.keeps == holds.computes else short_number(holds.keeps)
    numbers = f"{short_number(holds.computes)} weights, keeps {keeps}", f"tokens {tokens}", _experts(holds)
    for line, words in enumerate(numbers):
        canvas.text(left + 10, top + 137 + 15 * line, words, "soft small")


def _model(canvas: Canvas, holds: Holding, recipe: Recipe, layout: Layout, left: float, top: float) -> None:
    """The model from embedding (top) to head, as wide as its matrices.

    It shows this rank's layers, its slice of them, and the part of the slice that it stores. In layers with experts the
    lower half is all experts side by side.
    """
    layers, card = recipe.model.blocks + 2, card_of(recipe.model)  # the embedding, the blocks, the head
    (index, of), high = holds.tensor, ICON / layers
    computes = COLORS["lent" if regathers(layout) else "has"]
    canvas.rect("idle", left, top, ICON, ICON)

    def draw(y: float, tall: float, start: float, stop: float, shard: tuple[int, int]) -> None:
        """A tensor rank's slice of the columns [start, stop), as shares of the width."""
        wide = ICON * (stop - start) / of
        at = left + ICON * start + wide * index
        canvas.rect(computes, at, y, wide, tall)
        canvas.rect(COLORS["keeps"], at + wide * shard[0] / shard[1], y, wide / shard[1], tall)

    rows = [0] * holds.first + [b + 1 for blocks in holds.stages.values() for b in blocks]
    for row in [*rows, *[layers - 1] * holds.last]:
        y, tall = top + high * row, high - 0.6
        if holds.experts is None or not 0 < row < layers - 1 or not card.is_mixed(row - 1):
            draw(y, tall, 0, 1, holds.shard)
        else:
            draw(y, tall / 2, 0, 1, holds.shard)
            count, (start, stop) = recipe.model.experts or 1, holds.experts
            draw(y + tall / 2, tall / 2, start / count, stop / count, holds.expert_shard)


def _batch(canvas: Canvas, holds: Holding, recipe: Recipe, layout: Layout, left: float, top: float) -> None:
    """The global batch with one line per sequence: this rank's sequences, and its tokens in them. With sp those that it
    has between tensor-parallel regions are darker."""
    sequences, T = recipe.train.global_batch_size, recipe.model.seq_len
    start, stop = holds.rows
    y, high = top + ICON * start / sequences, ICON * (stop - start) / sequences
    canvas.rect("idle", left, top, ICON, ICON)
    for kind, part in [("whole", holds.tokens)] * layout.sp + [("sees", holds.between)]:
        for a, b in part:
            canvas.rect(COLORS[kind], left + ICON * a / T, y, ICON * (b - a) / T, high)


@dataclass(frozen=True)
class Holding:
    """The parts of model and batch that one rank computes and stores.

    replica_group: its number, None if there is one replica group. coordinates: on the axes of the replica group;
    `dp_replicate` on the run's.
    stages: its pipeline stages and the blocks of each. first, last: it has the beginning or the end of the model.
    tensor: its part of every cut matrix, (index, number of parts). shard: its part of sharded states; expert_shard: of
    its experts'. rows: sequences [start, stop) of the global batch. tokens: spans of each sequence. between: those that
    it has between tensor-parallel regions (sp). experts: their numbers, None without experts. computes, keeps: numbers
    of parameters.
    """

    rank: int
    replica_group: int | None
    coordinates: dict[str, int]
    stages: dict[int, range]
    first: bool
    last: bool
    tensor: tuple[int, int]
    shard: tuple[int, int]
    expert_shard: tuple[int, int]
    rows: Span
    tokens: tuple[Span, ...]
    between: tuple[Span, ...]
    experts: Span | None
    computes: int
    keeps: int


def columns(recipe: Recipe, layout: Layout, documents: Tiling | None = None) -> Sequence[Columns]:
    """The tokens of a sequence that each rank of the context axis has. documents: of some sequences, where they decide
    that in each microbatch (`sharding.sequence.dealt`); None: a sequence is one document."""
    c, T = layout.cp, recipe.model.seq_len
    if c == 1:
        return [((0, T),)]
    if deals(layout) and recipe.data.document_masks:
        tiling = documents or Tiling(np.zeros((1, T), np.int64))
        return tiling.dealt(c, card_of(recipe.model).causal)
    return [joined(token_spans(layout, T, index)) for index in range(c)]


def holding(recipe: Recipe, layout: Layout, rank: int, documents: Tiling | None = None) -> Holding:
    """The holding of a rank, for a resolved recipe. layout: of the whole run. documents: see `columns`."""
    model, whole = recipe.model, layout
    layout, number = replica_group_layout(whole, recipe.replica_groups.count), rank
    replica_group, rank = in_replica_group(layout, number)
    blocks = stage_blocks(card_of(model), layout) if layout.pp > 1 else (range(model.blocks),)
    stages = stages_of(layout, index_in(layout, "pp", rank))
    parts = held(card_of(model), layout, rank)
    B = recipe.train.microbatch_size or 1
    dp = replica_group * layout.dp + index_in(layout, "dp", rank)
    microbatches = share(recipe.train.global_batch_size // B, dp, whole.dp)
    coordinates = layout.coordinates(rank)
    coordinates["dp_replicate"] += replica_group * layout.dp_replicate
    experts = model.experts
    ep = index_in(layout, "ep", rank)
    tp = index_in(layout, "tp", rank)
    tokens = columns(recipe, layout, documents)[index_in(layout, "cp", rank)]
    piece = size_of((tokens,)) // layout.tp
    group, sharers = sharing_group(layout, expert=True)
    return Holding(
        rank=number,
        replica_group=replica_group if recipe.replica_groups.count > 1 else None,
        coordinates=coordinates,
        stages={stage: blocks[stage] for stage in stages},
        first=ends_of(layout, stages)[0],
        last=ends_of(layout, stages)[1],
        tensor=(tp, layout.tp),
        shard=(index_in(layout, "shard", rank), layout.shards) if layout.zero else (0, 1),
        expert_shard=(index_in(layout, group, rank), sharers) if layout.zero else (0, 1),
        rows=(microbatches.start * B, microbatches.stop * B),
        tokens=tokens,
        between=narrow((tokens,), 0, tp * piece, (tp + 1) * piece)[0] if layout.sp else tokens,
        experts=(experts * ep // layout.ep, experts * (ep + 1) // layout.ep) if experts else None,
        computes=sum(size_of(part.computes) for part in parts.values()),
        keeps=sum(size_of(part.keeps) for part in parts.values()),
    )


def stage_words(holds: Holding) -> str:
    """`embedding, blocks 0-2`."""
    words = ["embedding"] if holds.first else []
    words += [
        f"block{'s' * (len(b) > 1)} {span_words((b.start, b.stop))}" for b in holds.stages.values() if b
    ]
    return ", ".join([*words, "head"] if holds.last else words)


def span_words(span: Span) -> str:
    """[start, stop) as `start-last`, or one number."""
    start, stop = span
    return str(start) if stop - start == 1 else f"{start}-{stop - 1}"


MOST_CHUNKS = 32  # of a sequence that are drawn
CELL, LEFT, TOP, SIDE = 22, 40, 70, 130  # pixels: a pair of chunks, margins, room for words beside a picture


def divisions(layout: Layout, causal: bool, tiling: Tiling | None = None) -> dict[str, list[int]]:
    """The rank of each of 2 cp chunks of a sequence: as neighbouring parts, and zig-zag. With the documents of one
    sequence, in smaller chunks, also as they are dealt. Empty if ranks attend to whole sequences."""
    c, T = layout.cp, 2 * layout.cp if tiling is None else tiling.shape[1]
    if not some_queries(c, layout.cp_method):
        return {}
    near = [[(T // c * rank, T // c * (rank + 1))] for rank in range(c)]
    ways = {"neighbouring parts": near, "zig-zag": [token_spans(layout, T, rank) for rank in range(c)]}
    if tiling is not None:
        ways["dealt by documents"] = [list(columns) for columns in tiling.dealt(c, causal)]
    size, found = math.gcd(*(bound for w in ways.values() for spans in w for s in spans for bound in s)), {}
    for name, every in ways.items():
        owner = {at: rank for rank, spans in enumerate(every) for a, b in spans for at in range(a, b, size)}
        found[name] = [owner[at] for at in range(0, T, size)]
    return found


def seen_pairs(chunks: int, causal: bool, tiling: Tiling | None = None) -> np.ndarray:
    """The share of the pairs of each chunk of queries (rows) and of keys that attention computes."""
    if tiling is None:
        return (
            np.tril(np.ones((chunks, chunks))) - np.eye(chunks) / 2 if causal else np.ones((chunks, chunks))
        )
    T = tiling.shape[1]
    behind_T = np.arange(T) + 1 if causal else tiling.behind_BT[0]
    size, (first_T1, behind_T1) = T // chunks, (x[:, None] for x in (tiling.first_BT[0], behind_T))
    low = np.arange(0, T, size)
    seen = np.clip(behind_T1, low, low + size) - np.clip(first_T1, low, low + size)
    return seen.reshape(chunks, size, chunks).sum(1) / size**2


def work_shares(owners: Sequence[int], seen: np.ndarray) -> list[float]:
    """Each rank's share of the pairs of queries and keys that are computed."""
    pairs = np.bincount(owners, seen.sum(1))
    return (pairs / pairs.sum()).tolist()


def context_svg(plans: Mapping[str, Sequence[int]], seen: np.ndarray, title: str) -> str:
    """Queries down, keys across, a square for each pair of chunks that attention computes, in the colour of its rank;
    paler where half of the pairs are seen."""
    canvas, left, chunks = Canvas(title), LEFT, len(next(iter(plans.values())))
    canvas.text(LEFT - 20, 40, "queries down, keys across; ranks of the queries at the left")
    colors = [NAMES[rank % len(NAMES)] for rank in range(chunks)]
    for name, owners in plans.items():
        canvas.text(left, TOP - 10, name)
        for query, key in np.argwhere(seen > 0).tolist():
            kind = colors[owners[query]] + " half" * bool(seen[query, key] < 1)
            tip = f"rank {owners[query]}: queries {query}, keys {key}"
            canvas.rect(kind, left + key * CELL, TOP + query * CELL, CELL - 2, CELL - 2, tip)
        beside = left + chunks * CELL + 8
        for rank, part in enumerate(work_shares(owners, seen)):
            canvas.legend(beside, TOP + 14 + rank * CELL, [(colors[rank], f"rank {rank}: {part:.0%}")])
        for query, owner in enumerate(owners):
            canvas.text(left - 6, TOP + query * CELL + 14, str(owner), "soft small end")
        left += chunks * CELL + SIDE + 30
    return canvas.svg()
