"""Draws a collective round by round: as text for terminals, and as a standalone SVG for light and dark themes.

Both show what every rank has after each round. A chunk's cell is filled by the share of its contributions that it
contains, and empty if the rank does not have it.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from fivefold.schedules.collectives.check import State, prove
from fivefold.schedules.collectives.move import Collective, Move, Round, ranges

BLOCKS = "▁▂▃▄▅▆▇█"
MOST_CELLS = 16  # more chunks share cells
LEFT, TOP, ROW, CELL, HIGH = (
    92,
    66,
    54,
    9,
    14,
)  # pixels: margins, height of a round, a cell's width and height
KINDS = (("reduce", "adds", True), ("copy", "copies", False))
STYLE = """
.collective { color-scheme: light dark; font: 12px system-ui, "Segoe UI", Roboto, "Liberation Sans", Arial, sans-serif;
  --paper: #fdfcf9; --ink: #22211f; --soft: #66625b; --rule: #d8d3c8; --cell: #e9e5da; --full: #9c5410;
  --reduce: #1d5b9c; --copy: #2c7a5b; }
@media (prefers-color-scheme: dark) { .collective { --paper: #171614; --ink: #e9e6df; --soft: #a49f95;
  --rule: #45423b; --cell: #2b2925; --full: #f0b06a; --reduce: #7fb2ea; --copy: #79c9a3; } }
.collective .paper { fill: var(--paper); } .collective text { fill: var(--ink); font-variant-numeric: tabular-nums; }
.collective .soft { fill: var(--soft); } .collective .title { font-size: 15px; font-weight: 600; }
.collective .cell { fill: var(--cell); } .collective .full { fill: var(--full); }
.collective path { fill: none; stroke-width: 1.4; } .collective .reduce { stroke: var(--reduce); }
.collective .copy { stroke: var(--copy); } .collective .tip.reduce { fill: var(--reduce); stroke: none; }
.collective .tip.copy { fill: var(--copy); stroke: none; }
"""


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
    cells = max(len(row) for row in levels[0])
    lane = max(60, cells * CELL + 26)
    width = max(LEFT + collective.ranks * lane, 28 + 9 * len(title or head(collective)))  # letters of 15 px
    height = TOP + len(collective.rounds) * ROW + 40
    rows = "".join(_row(ranks, number, lane) for number, ranks in enumerate(levels))
    arrows = "".join(
        _arrow(move, number, lane)
        for number, moves in enumerate(collective.rounds)
        for move in _merged(moves)
    )
    names = "".join(
        f'<text x="{LEFT + rank * lane}" y="{TOP - 12}">rank {rank}</text>'
        for rank in range(collective.ranks)
    )
    kinds = {move.reduce for moves in collective.rounds for move in moves}
    there = [(name, word) for name, word, kind in KINDS if kind in kinds]
    legend = "".join(
        f'<path class="{name}" d="M{LEFT + 70 * i} 32h18"/>'
        f'<text class="soft" x="{LEFT + 70 * i + 24}" y="36">{word}</text>'
        for i, (name, word) in enumerate(there)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="collective" role="img" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}">\n<title>{escape(title or head(collective))}</title><style>{STYLE}</style>\n'
        f'<rect class="paper" width="100%" height="100%"/>\n<text class="title" x="14" y="20">'
        f"{escape(title or head(collective))}</text>{legend}\n{names}\n{rows}{arrows}</svg>\n"
    )


def _row(ranks: list[list[float]], number: int, lane: int) -> str:
    """Draws what the ranks have after a round."""
    top = TOP + number * ROW
    parts = [f'<text class="soft" x="14" y="{top + 11}">{f"round {number}" if number else "start"}</text>']
    for rank, cells in enumerate(ranks):
        for i, share in enumerate(cells):
            left = LEFT + rank * lane + i * CELL
            parts.append(f'<rect class="cell" x="{left}" y="{top}" width="{CELL - 1}" height="{HIGH}"/>')
            if share:
                high = round(share * HIGH, 1)
                where = f'y="{round(top + HIGH - high, 1)}" width="{CELL - 1}" height="{high}"'
                parts.append(f'<rect class="full" x="{left}" {where}/>')
    return "".join(parts) + "\n"


def _merged(moves: Round) -> Iterator[Move]:
    """One move for each pair of ranks and kind."""
    seen: dict[tuple[int, int, bool], Move] = {}
    for move in moves:
        seen.setdefault((move.source, move.target, move.reduce), move)
    yield from seen.values()


def _arrow(move: Move, number: int, lane: int) -> str:
    top, bottom = TOP + number * ROW + HIGH + 3, TOP + (number + 1) * ROW - 4
    x, y = (LEFT + rank * lane + 16 for rank in move[:2])
    if move.source > move.target:  # both directions stay visible
        x, y = x + 8, y + 8
    kind = "reduce" if move.reduce else "copy"
    return (
        f'<path class="{kind}" d="M{x} {top}L{y} {bottom - 4}"/>'
        f'<path class="tip {kind}" d="M{y} {bottom + 1}l-3.5 -6h7z"/>\n'
    )
