"""Draws a layout as text and SVG: what each rank computes with, what it stores, and which tokens it sees."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from fivefold.observe.format import short_number
from fivefold.observe.holding import Holding, holding, span_words, stage_words
from fivefold.recipe import Recipe
from fivefold.spread.layout import Layout
from fivefold.spread.layout_text import describe, equation

MOST = 64  # ranks drawn; the first ones of larger layouts
COLUMNS = 6  # ranks side by side, if groups can be broken
WIDE, HIGH, GAP = 184, 180, 10  # pixels: a rank's box, space between boxes
ICON = 74  # pixels: height of the two small pictures in it
STYLE = """
.layout { color-scheme: light dark; font: 12px system-ui, "Segoe UI", Roboto, "Liberation Sans", Arial, sans-serif;
  --paper: #fdfcf9; --ink: #22211f; --soft: #66625b; --rule: #d8d3c8; --idle: #f0ede5; --has: #a9c3de; --keeps: #1d5b9c;
  --sees: #2c7a5b; }
@media (prefers-color-scheme: dark) { .layout { --paper: #171614; --ink: #e9e6df; --soft: #a49f95; --rule: #45423b;
  --idle: #24221f; --has: #33557a; --keeps: #7fb2ea; --sees: #79c9a3; } }
.layout .paper { fill: var(--paper); } .layout text { fill: var(--ink); font-variant-numeric: tabular-nums; }
.layout .soft { fill: var(--soft); font-size: 10.5px; } .layout .title { font-size: 15px; font-weight: 600; }
.layout .name { font-weight: 600; } .layout .box { fill: none; stroke: var(--rule); }
.layout .idle { fill: var(--idle); }
.layout .has { fill: var(--has); } .layout .keeps { fill: var(--keeps); } .layout .sees { fill: var(--sees); }
"""


def to_text(recipe: Recipe, layout: Layout) -> str:
    """A table of the ranks, for terminals. recipe: resolved."""
    ranks = [holding(recipe, layout, rank) for rank in range(min(layout.ranks, MOST))]
    rows = [["rank", "place", "layers", "of each matrix", "states kept", "sequences", "tokens", "experts"]]
    for found in ranks:
        rows.append(
            [
                str(found.rank), _place(found, layout) or "-", stage_words(found), _part(found.tensor),
                f"{_part(found.shard)}: {short_number(found.keeps)}", span_words(found.rows), _tokens(found),
                "-" if found.experts is None else span_words((found.experts.start, found.experts.stop)),
            ]
        )  # fmt: skip
    used = [column for column in zip(*rows, strict=True) if set(column[1:]) != {"-"}]
    widths = [max(map(len, column)) for column in used]
    lines = [describe(layout), equation(layout), ""]
    for row in zip(*used, strict=True):
        cells = (f"{cell:{width}}" for cell, width in zip(row, widths, strict=True))
        lines.append("  ".join(cells).rstrip())
    return "\n".join([*lines, *_rest(layout)]) + "\n"


def _rest(layout: Layout) -> list[str]:
    return [f"... and {layout.ranks - MOST} more ranks"] if layout.ranks > MOST else []


def _place(found: Holding, layout: Layout) -> str:
    """The rank's indices on the axes that are used, such as `pp 1, tp 0`, behind its site if there are several."""
    axes = [f"{axis} {index}" for axis, index in found.coordinates.items() if layout.sizes[axis] > 1]
    return ", ".join(_site(found) + axes)


def _site(found: Holding) -> list[str]:
    return [] if found.site is None else [f"site {found.site}"]


def _part(part: tuple[int, int]) -> str:
    index, of = part
    return "all" if of == 1 else f"{index + 1} of {of}"


def _tokens(found: Holding) -> str:
    return " and ".join(map(span_words, found.tokens))


def to_svg(recipe: Recipe, layout: Layout, title: str = "") -> str:
    """The ranks as an SVG document. recipe: resolved.

    Each index on the pipeline axis has a panel with a box for each rank. Tensor ranks are side by side.
    """
    ranks = [holding(recipe, layout, rank) for rank in range(min(layout.ranks, MOST))]
    panels = [[r for r in ranks if r.coordinates["pp"] == pp] for pp in range(layout.pp)]
    columns = _columns(layout, max(map(len, panels)))
    side_by_side = max(1, COLUMNS // columns)
    width = max(740, 20 + min(side_by_side, len(panels)) * (columns * (WIDE + GAP) + 20))
    top, parts = 96, []
    for start in range(0, len(panels), side_by_side):
        row = [panel for panel in panels[start : start + side_by_side] if panel]
        for place, panel in enumerate(row):
            parts.append(
                _panel(panel, layout, recipe, 20 + place * (columns * (WIDE + GAP) + 20), top, columns)
            )
        top += 58 + max((-(-len(panel) // columns) for panel in row), default=0) * (HIGH + GAP)
    more = f'<text class="soft" x="20" y="{top + 4}">{_rest(layout)[0]}</text>' if _rest(layout) else ""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="layout" role="img" width="{width}" height="{top + 16}" '
        f'viewBox="0 0 {width} {top + 16}">\n<title>{escape(title)} ({escape(describe(layout))})</title>'
        f'<style>{STYLE}</style>\n<rect class="paper" width="100%" height="100%"/>\n'
        f'<text class="title" x="20" y="24">{escape(title)}</text>'
        f'<text class="soft" x="20" y="42">{escape(equation(layout))}</text>\n{_legend()}{"".join(parts)}{more}</svg>\n'
    )


def icons(recipe: Recipe, layout: Layout, title: str) -> str:
    """The first few ranks side by side: each one's part of the model (layers downwards, the width of matrices across)
    and of the batch (sequences downwards, tokens across). recipe: resolved."""
    ranks = [holding(recipe, layout, rank) for rank in range(min(layout.ranks, 4))]
    each, high = 2 * ICON + 30, ICON + 44
    width = len(ranks) * each - 6
    parts = []
    for number, found in enumerate(ranks):
        left = number * each + 8
        words = (
            f"experts {span_words((found.experts.start, found.experts.stop))}"
            if layout.ep > 1 and found.experts
            else ""
        )
        parts.append(f'<text class="name" x="{left}" y="18">rank {found.rank}</text>')
        parts.append(f'<text class="soft" x="{left + 48}" y="18">{words}</text>')
        parts.append(_model(found, recipe, left, 26) + _batch(found, recipe, left + ICON + 6, 26))
        parts.append(f'<text class="soft" x="{left}" y="{high - 4}">model</text>')
        parts.append(f'<text class="soft" x="{left + ICON + 6}" y="{high - 4}">batch</text>\n')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="layout" role="img" width="{width}" height="{high}" '
        f'viewBox="0 0 {width} {high}">\n<title>{escape(title)}</title><style>{STYLE}</style>{"".join(parts)}</svg>\n'
    )


def _columns(layout: Layout, ranks: int) -> int:
    """Number of boxes side by side in a panel: the tensor ranks, or a square of boxes without them."""
    if layout.tp > 1:
        return min(layout.tp, COLUMNS)
    return max(1, min(ranks, 4 if layout.pp == 1 else 2))


def _legend() -> str:
    left, parts = 20, []
    for kind, words in (
        ("has", "computes with these weights"),
        ("keeps", "and keeps their fp32 masters and moments"),
        ("sees", "computes these tokens of the batch"),
    ):
        parts.append(f'<rect class="{kind}" x="{left}" y="56" width="11" height="11"/>')
        parts.append(f'<text class="soft" x="{left + 16}" y="66">{words}</text>')
        left += 34 + 5.6 * len(words)
    return "".join(parts) + "\n"


def _panel(
    ranks: Sequence[Holding], layout: Layout, recipe: Recipe, left: int, top: int, columns: int
) -> str:
    """The ranks of one place on the pipeline axis."""
    first, name = ranks[0], "the whole model"
    if layout.pp > 1:
        numbers = " and ".join(map(str, first.stages))
        name = f"pp {first.coordinates['pp']}: stage{'s' * (len(first.stages) > 1)} {numbers}"
    boxes = (
        _box(found, layout, recipe, left + i % columns * (WIDE + GAP), top + 26 + i // columns * (HIGH + GAP))
        for i, found in enumerate(ranks)
    )
    words = f'<text class="soft" x="{left}" y="{top + 16}">{escape(stage_words(first))}</text>'
    return f'<text x="{left}" y="{top}">{name}</text>{words}\n{"".join(boxes)}'


def _box(found: Holding, layout: Layout, recipe: Recipe, left: float, top: float) -> str:
    """The box of a rank: its name and place, its parts of the model and the batch, and numbers."""
    model, batch = left + 10, left + 10 + ICON + 14
    axes = [f"{a} {i}" for a, i in found.coordinates.items() if a != "pp" and layout.sizes[a] > 1]
    place = ", ".join(_site(found) + axes)
    experts = f"experts {span_words((found.experts.start, found.experts.stop))}" if found.experts else ""
    keeps = "all" if found.keeps == found.computes else short_number(found.keeps)
    lines = [f"{short_number(found.computes)} weights, keeps {keeps}", f"tokens {_tokens(found)}", experts]
    texts = "".join(
        f'<text class="soft" x="{left + 10}" y="{top + 137 + 15 * i}">{line}</text>'
        for i, line in enumerate(lines)
    )
    return (
        f"<g><title>rank {found.rank}: {_place(found, layout)}; {stage_words(found)}; sequences "
        f"{span_words(found.rows)}, tokens {_tokens(found)}</title>"
        f'<rect class="box" x="{left}" y="{top}" width="{WIDE}" height="{HIGH}" rx="4"/>'
        f'<text class="name" x="{left + 10}" y="{top + 18}">rank {found.rank}</text>'
        f'<text class="soft" x="{left + 10}" y="{top + 33}">{place}</text>'
        f"{_model(found, recipe, model, top + 44)}{_batch(found, recipe, batch, top + 44)}{texts}</g>\n"
    )


def _model(found: Holding, recipe: Recipe, left: float, top: float) -> str:
    """The model from embedding (top) to head, as wide as its matrices.

    It shows this rank's layers, its slice of them, and the part of the slice that it stores.
    """
    layers = recipe.model.layers + 2  # the embedding, the blocks, the head
    spans = [(b.start + 1, b.stop + 1) for b in found.stages.values()]
    spans += [(0, 1)] * found.first + [(layers - 1, layers)] * found.last
    (index, of), (shard, shards) = found.tensor, found.shard
    slice_left, slice_wide = left + ICON * index / of, ICON / of
    parts = [_rect("idle", left, top, ICON, ICON)]
    for start, stop in spans:
        y, high = top + ICON * start / layers, ICON * (stop - start) / layers - 0.6
        parts.append(_rect("has", slice_left, y, slice_wide, high))
        parts.append(_rect("keeps", slice_left + slice_wide * shard / shards, y, slice_wide / shards, high))
    return "".join(parts)


def _batch(found: Holding, recipe: Recipe, left: float, top: float) -> str:
    """The global batch with one line per sequence: this rank's sequences, and its tokens in them."""
    sequences, T = recipe.train.global_batch_size, recipe.model.seq_len
    start, stop = found.rows
    y, high = top + ICON * start / sequences, ICON * (stop - start) / sequences
    filled = (_rect("sees", left + ICON * a / T, y, ICON * (b - a) / T, high) for a, b in found.tokens)
    return "".join([_rect("idle", left, top, ICON, ICON), *filled])


def _rect(kind: str, left: float, top: float, wide: float, high: float) -> str:
    return f'<rect class="{kind}" x="{left:.2f}" y="{top:.2f}" width="{wide:.2f}" height="{high:.2f}"/>'
