"""Draws a layout as text and SVG: what each rank computes with, what it stores, and which tokens it sees."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from fivefold.models.card import card_of
from fivefold.observe.format import short_number
from fivefold.observe.holding import Holding, holding, span_words, stage_words
from fivefold.recipe import Recipe
from fivefold.spread.layout import Layout
from fivefold.spread.layout_text import describe, equation
from fivefold.spread.parts import Span

MOST = 64  # ranks drawn; the first ones of larger layouts
COLUMNS = 6  # ranks side by side, if groups can be broken
WIDE, HIGH, GAP = 184, 180, 10  # pixels: a rank's box, space between boxes
ICON = 74  # pixels: height of the two small pictures in it
HEADS = (
    "rank", "place", "layers", "of each matrix", "states kept", "sequences", "tokens", "between matmuls", "experts"
)  # fmt: skip
STYLE = """
.layout { color-scheme: light dark; font: 12px system-ui, "Segoe UI", Roboto, "Liberation Sans", Arial, sans-serif;
  --paper: #fdfcf9; --ink: #22211f; --soft: #66625b; --rule: #d8d3c8; --idle: #f0ede5; --has: #a9c3de; --keeps: #1d5b9c;
  --sees: #2c7a5b; --whole: #a8cdbd; --lent: #dbe5f0; }
@media (prefers-color-scheme: dark) { .layout { --paper: #171614; --ink: #e9e6df; --soft: #a49f95; --rule: #45423b;
  --idle: #24221f; --has: #33557a; --keeps: #7fb2ea; --sees: #79c9a3; --whole: #2f5646;
  --lent: #26333f; } }
.layout .paper { fill: var(--paper); } .layout text { fill: var(--ink); font-variant-numeric: tabular-nums; }
.layout .soft { fill: var(--soft); font-size: 11px; } .layout .title { font-size: 15px; font-weight: 600; }
.layout .name { font-weight: 600; } .layout .box { fill: none; stroke: var(--rule); }
.layout .idle { fill: var(--idle); }
.layout .has { fill: var(--has); } .layout .keeps { fill: var(--keeps); } .layout .sees { fill: var(--sees); }
.layout .whole { fill: var(--whole); } .layout .lent { fill: var(--lent); }
"""


def to_text(recipe: Recipe, layout: Layout) -> str:
    """A table of the ranks, for terminals. recipe: resolved."""
    ranks = [holding(recipe, layout, rank) for rank in range(min(layout.ranks, MOST))]
    rows = [[*HEADS], *([*_cells(found, layout)] for found in ranks)]
    used = [column for column in zip(*rows, strict=True) if set(column[1:]) != {"-"}]
    widths = [max(map(len, column)) for column in used]
    lines = [describe(layout), equation(layout), ""]
    for row in zip(*used, strict=True):
        cells = (f"{cell:{width}}" for cell, width in zip(row, widths, strict=True))
        lines.append("  ".join(cells).rstrip())
    return "\n".join([*lines, *_rest(layout)]) + "\n"


def _cells(found: Holding, layout: Layout) -> Iterator[str]:
    yield str(found.rank)
    yield _place(found, layout) or "-"
    yield stage_words(found)
    yield _part(found.tensor)
    yield f"{_part(found.shard)}: {short_number(found.keeps)}"
    yield span_words(found.rows)
    yield _tokens(found.tokens)
    yield _tokens(found.between) if layout.sp else "-"
    yield "-" if found.experts is None else span_words((found.experts.start, found.experts.stop))


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


def _tokens(spans: Sequence[Span]) -> str:
    return " and ".join(map(span_words, spans))


def to_svg(recipe: Recipe, layout: Layout, title: str = "") -> str:
    """The ranks as an SVG document. recipe: resolved.

    Each index on the pipeline axis has a panel with a box for each rank. Tensor ranks are side by side.
    """
    ranks = [holding(recipe, layout, rank) for rank in range(min(layout.ranks, MOST))]
    panels = [[r for r in ranks if r.coordinates["pp"] == pp] for pp in range(layout.pp)]
    columns = _columns(layout, max(map(len, panels)))
    side_by_side = max(1, COLUMNS // columns)
    legend, wide = _legend(_kinds(layout))
    width = max(740, round(wide), 20 + min(side_by_side, len(panels)) * (columns * (WIDE + GAP) + 20))
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
        f'<text class="soft" x="20" y="42">{escape(equation(layout))}</text>\n{legend}{"".join(parts)}{more}</svg>\n'
    )


def icons(recipe: Recipe, layout: Layout, title: str) -> str:
    """The first few ranks side by side: each one's part of the model (layers downwards, the width of matrices across;
    experts are the lower part of a layer) and of the batch (sequences downwards, tokens across). recipe: resolved."""
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
        parts.append(
            _model(found, recipe, layout, left, 26) + _batch(found, recipe, layout, left + ICON + 6, 26)
        )
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


def _kinds(layout: Layout) -> dict[str, str]:
    """What the colours of the picture say."""
    weights = "computes with these weights"
    if layout.ep > 1:
        weights += " (experts: the lower part of a layer)"
    whole, piece = "computes these tokens of the batch", "and has only these between matmuls"
    return {
        **({"lent": f"{weights}, gathered for each use"} if layout.zero == 3 else {"has": weights}),
        "keeps": "keeps their fp32 masters and moments",
        **({"whole": whole, "sees": piece} if layout.sp else {"sees": whole}),
    }


def _legend(kinds: dict[str, str]) -> tuple[str, float]:
    """The legend as SVG, and its width."""
    left, parts = 20.0, []
    for kind, words in kinds.items():
        parts.append(f'<rect class="{kind}" x="{left:g}" y="56" width="11" height="11"/>')
        parts.append(f'<text class="soft" x="{left + 16:g}" y="66">{words}</text>')
        left += 34 + 5.6 * len(words)
    return "".join(parts) + "\n", left


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
    lines = [
        f"{short_number(found.computes)} weights, keeps {keeps}",
        f"tokens {_tokens(found.tokens)}",
        experts,
    ]
    texts = "".join(
        f'<text class="soft" x="{left + 10}" y="{top + 137 + 15 * i}">{line}</text>'
        for i, line in enumerate(lines)
    )
    return (
        f"<g><title>rank {found.rank}: {_place(found, layout)}; {stage_words(found)}; sequences "
        f"{span_words(found.rows)}, tokens {_tokens(found.tokens)}</title>"
        f'<rect class="box" x="{left}" y="{top}" width="{WIDE}" height="{HIGH}" rx="4"/>'
        f'<text class="name" x="{left + 10}" y="{top + 18}">rank {found.rank}</text>'
        f'<text class="soft" x="{left + 10}" y="{top + 33}">{place}</text>'
        f"{_model(found, recipe, layout, model, top + 44)}{_batch(found, recipe, layout, batch, top + 44)}{texts}</g>\n"
    )


def _model(found: Holding, recipe: Recipe, layout: Layout, left: float, top: float) -> str:
    """The model from embedding (top) to head, as wide as its matrices.

    It shows this rank's layers, its slice of them, and the part of the slice that it stores. In layers with experts the
    lower half is all experts side by side.
    """
    layers, card = recipe.model.layers + 2, card_of(recipe.model)  # the embedding, the blocks, the head
    (index, of), high = found.tensor, ICON / layers
    computes = "lent" if layout.zero == 3 else "has"
    parts = [_rect("idle", left, top, ICON, ICON)]

    def draw(y: float, tall: float, start: float, stop: float, shard: tuple[int, int]) -> None:
        """A tensor rank's slice of the columns [start, stop), as shares of the width."""
        wide = ICON * (stop - start) / of
        at = left + ICON * start + wide * index
        parts.append(_rect(computes, at, y, wide, tall))
        parts.append(_rect("keeps", at + wide * shard[0] / shard[1], y, wide / shard[1], tall))

    rows = [0] * found.first + [b + 1 for blocks in found.stages.values() for b in blocks]
    for row in [*rows, *[layers - 1] * found.last]:
        y, tall = top + high * row, high - 0.6
        if found.experts is None or not 0 < row < layers - 1 or not card.is_mixed(row - 1):
            draw(y, tall, 0, 1, found.shard)
        else:
            draw(y, tall / 2, 0, 1, found.shard)
            count, (start, stop) = recipe.model.experts or 1, (found.experts.start, found.experts.stop)
            draw(y + tall / 2, tall / 2, start / count, stop / count, found.expert_shard)
    return "".join(parts)


def _batch(found: Holding, recipe: Recipe, layout: Layout, left: float, top: float) -> str:
    """The global batch with one line per sequence: this rank's sequences, and its tokens in them. With sp those that it
    has between tensor-parallel regions are darker."""
    sequences, T = recipe.train.global_batch_size, recipe.model.seq_len
    start, stop = found.rows
    y, high = top + ICON * start / sequences, ICON * (stop - start) / sequences
    spans = [("whole", found.tokens)] * layout.sp + [("sees", found.between)]
    filled = (
        _rect(kind, left + ICON * a / T, y, ICON * (b - a) / T, high) for kind, part in spans for a, b in part
    )
    return "".join([_rect("idle", left, top, ICON, ICON), *filled])


def _rect(kind: str, left: float, top: float, wide: float, high: float) -> str:
    return f'<rect class="{kind}" x="{left:.2f}" y="{top:.2f}" width="{wide:.2f}" height="{high:.2f}"/>'
