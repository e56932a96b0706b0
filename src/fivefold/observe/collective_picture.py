"""Draws a collective round by round: as text for terminals, as a standalone SVG for light and dark themes, and as an
offline page that steps through the rounds.

All show what every rank has after each round. A chunk's cell is filled by the share of its contributions that it
contains, and empty if the rank does not have it.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from fivefold.draw.canvas import Canvas
from fivefold.observe.format import aligned
from fivefold.observe.player import ARROWS, MOST_RANKS, Frame, Player
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

    places = []  # by rank, the chunks of each cell
    for rank in range(collective.members):
        chunks = collective.wants(rank) if collective.primitive == "all_to_all" else range(collective.chunks)
        count = min(MOST_CELLS, len(chunks))
        bounds = [i * len(chunks) // count for i in range(count + 1)]
        places.append([chunks[start:stop] for start, stop in pairwise(bounds)])
    return [
        [
            [sum(share(row, c) for c in chunks) / len(chunks) for chunks in cells]
            for row, cells in zip(state, places, strict=True)
        ]
        for state in states
    ]


def head(collective: Collective) -> str:
    x = collective
    switch = f"; {x.ranks} is a switch that adds" * x.switches
    return (
        f"{x.primitive} '{x.algorithm}': {x.ranks} ranks, {x.chunks} chunks, {len(x.rounds)} rounds{switch}"
    )


def words(moves: Round) -> Iterator[str]:
    """Each message of a round: source, chunks, target. A plus: the target adds."""
    together: dict[tuple[int, int, bool], list[int]] = {}
    for source, target, chunks, reduce in moves:
        together.setdefault((source, target, reduce), []).extend(chunks)
    for (source, target, reduce), chunks in together.items():
        parts = []
        for part in ranges(chunks):
            step = f":{part.step}" if part.step > 1 else ""
            parts.append(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}{step}")
        yield f"{source} {'+' if reduce else '='}{','.join(parts)}→ {target}"


def to_text(collective: Collective, columns: int = 100) -> str:
    """The rounds as text: the messages of each, and what every rank has after it. `1 +3-5→ 2`: rank 1 sends chunks 3
    to 5 to rank 2, which adds them; with `=` it copies them."""
    levels = shares(collective)
    lines = [head(collective)]
    strips = collective.members * (len(levels[0][0]) + 2) + 10 <= columns
    for number, ranks in enumerate(levels):
        if number:
            line = f"{f'round {number}':10}"
            for message in words(collective.rounds[number - 1]):
                if len(line) > 10 and len(line) + len(message) + 3 > columns:
                    lines.append(line.rstrip())
                    line = " " * 10
                line += message + "   "
            lines.append(line.rstrip())
        if strips:
            blocks = [
                "".join(BLOCKS[max(0, round(x * len(BLOCKS)) - 1)] if x else "·" for x in cells)
                for cells in ranks
            ]
            lines.append(f"{'start' if not number else '':10}{'  '.join(blocks)}".rstrip())
    return "\n".join(lines) + "\n"


def to_svg(collective: Collective, title: str = "") -> str:
    """The rounds as an SVG document: a column for each rank, time downwards, an arrow for each message."""
    levels = shares(collective)
    lane = max(60, max(len(row) for row in levels[0]) * CELL + 26)
    canvas = Canvas(title or head(collective), 14)
    there = {move.reduce for moves in collective.rounds for move in moves}
    canvas.legend(
        LEFT, 36, [(f"line {color}", word) for kind, (color, word) in KINDS.items() if kind in there]
    )
    for rank in range(collective.members):
        canvas.text(LEFT + rank * lane, TOP - 12, f"rank {rank}")
    for number, ranks in enumerate(levels):
        top = TOP + number * ROW
        canvas.text(14, top + 11, f"round {number}" if number else "start", "soft")
        for rank, cells in enumerate(ranks):
            for i, share in enumerate(cells):
                left = LEFT + rank * lane + i * CELL
                canvas.rect("idle", left, top, CELL - 1, HIGH)
                if share:
                    canvas.rect("orange", left, top + HIGH * (1 - share), CELL - 1, HIGH * share)
    for number, moves in enumerate(collective.rounds):
        top, bottom = TOP + number * ROW + HIGH + 3, TOP + (number + 1) * ROW - 4
        for source, target, adds in dict.fromkeys((move.source, move.target, move.reduce) for move in moves):
            apart, color = 8 * (source > target), KINDS[adds][0]  # both directions stay visible
            x, end = (LEFT + rank * lane + 16 + apart for rank in (source, target))
            canvas.arrow(color, (x, top), (end, bottom + 1))
    return canvas.svg()


def values(collective: Collective, state: State) -> str:
    """The numbers of the first chunks on every rank: rank r contributes 10 (r + 1) + c to chunk c. Lines of a table."""
    chunks = range(min(MOST_CELLS, collective.chunks))

    def number(row: dict[int, tuple[int, int]], chunk: int) -> str:
        bits = row[chunk][0] if chunk in row else 0
        return (
            str(sum(10 * (r + 1) + chunk for r in range(collective.ranks) if bits >> r & 1)) if bits else "·"
        )

    names = [f"rank {r}" if r < collective.ranks else "switch" for r in range(min(MOST_RANKS, len(state)))]
    rows = [[name, *(number(row, c) for c in chunks)] for name, row in zip(names, state, strict=False)]
    return "\n".join(aligned([["chunk", *map(str, chunks)], *rows], (0,)))


def player(collective: Collective, ends: list[str], note: str = "") -> Player:
    """The rounds of a page that steps through them. ends: the time after each round, as text. note: where these times
    come from."""
    states, last = prove(collective), len(collective.rounds)
    levels, numbers = shares(collective, states), [values(collective, state) for state in states]
    frames = [Frame(levels[0], "start", "what every rank begins with", values=numbers[0])]
    rounds = zip(collective.rounds, levels[1:], ends, numbers[1:], strict=True)
    for number, (moves, after, end, text) in enumerate(rounds, 1):
        pairs = list(dict.fromkeys((move.source, move.target, move.reduce) for move in moves))
        title = f"round {number} of {last}" + f", {end}" * bool(end)
        frames.append(Frame(after, title, "   ".join(words(moves)), pairs, values=text))
    about = f"A rank's cells are its chunks, filled by the share of contributions that they contain. {ARROWS}"
    about += " As numbers: rank r begins with 10 (r + 1) + c in chunk c."
    return Player(head(collective), f"{note} {about}".strip(), frames)
