"""Draws a collective round by round: as text for terminals, as a standalone SVG for light and dark themes, and as an
offline page that steps through the rounds.

All show what every rank has after each round. A chunk's cell is filled by the share of its contributions that it
contains, and empty if the rank does not have it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from html import escape

from fivefold.draw.canvas import Canvas
from fivefold.observe.document import asset, document
from fivefold.schedules.collectives import Collective, prove
from fivefold.schedules.collectives.collective import Round, State, ranges

BLOCKS = "▁▂▃▄▅▆▇█"
MOST_CELLS = 16  # more chunks share cells
LEFT, TOP, ROW, CELL, HIGH = 92, 66, 54, 9, 14  # pixels: margins, a round's height, a cell's width and height
KINDS = {True: ("blue", "adds"), False: ("green", "copies")}
"""Colour of an arrow, and what its target does."""


def shares(collective: Collective, states: list[State] | None = None) -> list[list[list[float]]]:
    """By round (0: before the first) and rank, how full each cell is, 0..1. At most MOST_CELLS cells per rank; further
    chunks share them. A rank of an all-to-all has one cell for each rank that sends to it."""
    states = prove(collective) if states is None else states
    whole: dict[int, int] = {}
    for row in states[0]:
        for chunk, (bits, _) in row.items():
            whole[chunk] = whole.get(chunk, 0) | bits

    def share(row: dict[int, tuple[int, int]], chunk: int) -> float:
        return row[chunk][0].bit_count() / whole[chunk].bit_count() if chunk in row else 0.0

    def cells(rank: int) -> list[range]:
        chunks = collective.wants(rank) if collective.primitive == "all_to_all" else range(collective.chunks)
        count = min(MOST_CELLS, len(chunks))
        return [chunks[i * len(chunks) // count : (i + 1) * len(chunks) // count] for i in range(count)]

    places = [cells(rank) for rank in range(collective.ranks)]
    return [
        [
            [sum(share(row, c) for c in some) / len(some) for some in of]
            for row, of in zip(state, places, strict=True)
        ]
        for state in states
    ]


def head(collective: Collective) -> str:
    x = collective
    return f"{x.primitive} '{x.algorithm}': {x.ranks} ranks, {x.chunks} chunks, {len(x.rounds)} rounds"


def words(moves: Round) -> Iterator[str]:
    """Each message of a round: source, chunks, target. A plus: the target adds."""
    together: dict[tuple[int, int, bool], list[int]] = {}
    for source, target, chunks, reduce in moves:
        together.setdefault((source, target, reduce), []).extend(chunks)
    for (source, target, reduce), chunks in together.items():
        yield f"{source} {'+' if reduce else '='}{_names(chunks)}→ {target}"


def _names(chunks: list[int]) -> str:
    def name(some: range) -> str:
        last = some[-1]
        step = f":{some.step}" if some.step > 1 else ""
        return str(some[0]) if last == some[0] else f"{some[0]}-{last}{step}"

    return ",".join(map(name, ranges(chunks)))


def to_text(collective: Collective, columns: int = 100) -> str:
    """The rounds as text: the messages of each, and what every rank has after it. `1 +3-5→ 2`: rank 1 sends chunks 3
    to 5 to rank 2, which adds them; with `=` it copies them."""
    levels = shares(collective)
    lines = [head(collective)]
    strips = collective.ranks * (len(levels[0][0]) + 2) + 10 <= columns
    for number, ranks in enumerate(levels):
        if number:
            lines += _wrapped(f"round {number}", list(words(collective.rounds[number - 1])), columns)
        if strips:
            cells = "  ".join("".join(_block(x) for x in cells) for cells in ranks)
            lines.append(f"{'start' if not number else '':10}{cells}".rstrip())
    return "\n".join(lines) + "\n"


def _block(share: float) -> str:
    return BLOCKS[max(0, round(share * len(BLOCKS)) - 1)] if share else "·"


def _wrapped(begin: str, parts: list[str], columns: int) -> list[str]:
    lines = [f"{begin:10}"]
    for part in parts:
        if len(lines[-1]) > 10 and len(lines[-1]) + len(part) + 3 > columns:
            lines.append(" " * 10)
        lines[-1] += part + "   "
    return [line.rstrip() for line in lines]


def to_svg(collective: Collective, title: str = "") -> str:
    """The rounds as an SVG document: a column for each rank, time downwards, an arrow for each message."""
    levels = shares(collective)
    lane = max(60, max(len(row) for row in levels[0]) * CELL + 26)
    canvas = Canvas(title or head(collective), 14)
    there = {move.reduce for moves in collective.rounds for move in moves}
    canvas.legend(
        LEFT, 36, [(f"line {color}", word) for kind, (color, word) in KINDS.items() if kind in there]
    )
    for rank in range(collective.ranks):
        canvas.text(LEFT + rank * lane, TOP - 12, f"rank {rank}")
    for number, ranks in enumerate(levels):
        canvas.text(14, TOP + number * ROW + 11, f"round {number}" if number else "start", "soft")
        for rank, cells in enumerate(ranks):
            _cells(canvas, cells, LEFT + rank * lane, TOP + number * ROW)
    for number, moves in enumerate(collective.rounds):
        for source, target, adds in dict.fromkeys((move.source, move.target, move.reduce) for move in moves):
            apart = 8 * (source > target)  # both directions stay visible
            x, y = (LEFT + rank * lane + 16 + apart for rank in (source, target))
            _arrow(canvas, KINDS[adds][0], x, y, TOP + number * ROW + HIGH + 3)
    return canvas.svg()


def _cells(canvas: Canvas, cells: list[float], left: float, top: float) -> None:
    """What a rank has after a round."""
    for i, share in enumerate(cells):
        canvas.rect("idle", left + i * CELL, top, CELL - 1, HIGH)
        if share:
            canvas.rect("orange", left + i * CELL, top + HIGH * (1 - share), CELL - 1, HIGH * share)


def _arrow(canvas: Canvas, color: str, x: float, end: float, top: float) -> None:
    """From `x` at one round to `end` at the next."""
    bottom = top + ROW - HIGH - 7
    canvas.line(f"line {color}", [(x, top), (end, bottom - 4)])
    canvas.line(f"area tip {color}", [(end, bottom + 1), (end - 3.5, bottom - 5), (end + 3.5, bottom - 5)])


def page(collective: Collective, ends: list[str], note: str = "") -> str:
    """The page. ends: the time after each round, as text. note: where these times come from."""
    cells = shares(collective)
    rounds = [{"moves": [], "cells": cells[0], "words": "what every rank begins with", "end": ""}]
    for moves, after, end in zip(collective.rounds, cells[1:], ends, strict=True):
        pairs = dict.fromkeys((move.source, move.target, move.reduce) for move in moves)
        rounds.append({"moves": list(pairs), "cells": after, "words": "   ".join(words(moves)), "end": end})
    data = json.dumps({"ranks": collective.ranks, "rounds": rounds}).replace("<", "\\u003c")
    title = head(collective)
    body = f"""<header><p class="kicker">Collective</p><h1>{escape(title)}</h1>
<p class="lead">{escape(note)} Arrow keys step. Blue arrows add, green arrows copy. A rank's cells are its
chunks, filled by the share of contributions that they contain.</p></header>
<main><div class="steps"><button id="back" aria-label="previous round">‹</button>
<button id="next" aria-label="next round">›</button>
<button id="play">Play</button><input id="round" type="range" min="0" max="{len(collective.rounds)}" value="0"
aria-label="round"><span id="where"></span></div>
<p id="moves"></p>
<svg id="stage" viewBox="0 0 640 640" role="img" aria-label="{escape(title)}"></svg></main>
<script type="application/json" id="data">{data}</script>"""
    return document(title, body, asset("report.css") + asset("collective.css"), asset("collective.js"))
