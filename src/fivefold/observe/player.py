"""Offline pages that step through what ranks do: a collective, the ring of ring attention, ZeRO's gathers, a pipeline.

A player shows frames. In each, every rank has cells, filled by the share of something that it holds, and arrows show
what is sent. The frames are made from the objects that the trainer runs.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from html import escape

from fivefold.observe.format import asset, document, header
from fivefold.observe.timelines import ACTION_COLORS, ACTIONS
from fivefold.schedules.pipeline import Timeline
from fivefold.schedules.pipeline.schedule import Action
from fivefold.schedules.ring_attention import Turn, turns
from fivefold.sharding.units import FsdpUnit

Move = tuple[int, int, bool]
"""(source, target, whether the target adds)."""
ARROWS = "Blue arrows add, green arrows copy."
MOST_BLOCKS = 6  # units of ZeRO that are shown
MOST_RANKS = 32  # that are shown; circles of more would overlap


@dataclass(frozen=True)
class Frame:
    """cells: by rank, the share of each cell that is filled, 0..1. title: which frame it is. words: what happens.
    moves: what is sent. now: by rank, what it computes, in a few letters. at: the time, if there is a timeline. values:
    the numbers that the ranks have, as lines of text."""

    cells: Sequence[Sequence[float]]
    title: str
    words: str
    moves: Sequence[Move] = ()
    now: Sequence[str] = ()
    at: float = 0.0
    values: str = ""


@dataclass(frozen=True)
class Player:
    """words: what is shown. rows: by rank, (start, end, colour, label) of a timeline under the ranks. Raises
    ValueError: there are no frames."""

    name: str
    words: str
    frames: Sequence[Frame]
    rows: Sequence[Sequence[tuple[float, float, str, str]]] = ()

    def __post_init__(self) -> None:
        if not self.frames:
            raise ValueError(f"player '{self.name}' has no frames; it needs at least one to show")


def page(title: str, kicker: str, players: Sequence[Player]) -> str:
    """The page, with one player under the other."""
    body = header(kicker, title, "Play runs it; the arrow keys step.") + "".join(map(part, players))
    return document(title, body, asset("report.css") + asset("player.css"), asset("player.js"))


def part(player: Player) -> str:
    """The player as HTML, for page/player.js. What is foreign in it is escaped."""
    player = drawn(player)
    data = json.dumps(asdict(player) | {"name": "", "words": ""}).replace("<", "\\u003c")
    name = escape(player.name)
    return f"""<main class="player"><h2>{name}</h2><p class="lead">{escape(player.words)}</p>
<div class="steps"><button class="back" aria-label="step back">‹</button>
<button class="next" aria-label="step on">›</button><button class="play">Play</button>
<input class="at" type="range" min="0" max="{len(player.frames) - 1}" value="0" aria-label="frame">
<span class="where"></span></div><p class="moves"></p>
<div class="shown"><svg class="stage" viewBox="0 0 640 640" role="img" aria-label="{name}"></svg>
<pre class="numbers" tabindex="0"></pre></div>
<script type="application/json" class="data">{data}</script></main>
"""


def drawn(player: Player) -> Player:
    """The player with the first `MOST_RANKS` ranks, and the messages between them."""
    there, ranks = range(MOST_RANKS), len(player.frames[0].cells)
    if ranks <= MOST_RANKS:
        return player
    frames = [
        replace(frame, cells=frame.cells[:MOST_RANKS], now=frame.now[:MOST_RANKS],
                moves=[move for move in frame.moves if move[0] in there and move[1] in there])
        for frame in player.frames
    ]  # fmt: skip
    words = (
        f"{player.words} The first {MOST_RANKS} of {ranks} ranks are drawn, with the messages between them."
    )
    return replace(player, words=words, frames=frames, rows=player.rows[:MOST_RANKS])


def ring(ranks: int, causal: bool) -> Player:
    """Forward and backward of ring attention: a rank's cells are the keys and values that it has, by their owner."""
    way = [turns(ranks, rank, causal) for rank in range(ranks)]
    frames = []
    for backward in (False, True):
        for number in range(ranks):
            here = [turn[number] for turn in way]
            cells = [[turn.keys if owner == turn.owner else 0.0 for owner in range(ranks)] for turn in here]
            moves = [(rank, (rank - 1) % ranks, False) for rank, turn in enumerate(here) if turn.sends]
            said = "each rank computes with the keys that it has"
            said += ", and sends those that the next rank still needs" * bool(moves)
            if backward and number:
                moves += [(rank, turn.owner, True) for rank, turn in enumerate(here) if turn.keys]
                said += "; gradients of the keys go to their owner, who adds them"
            title = f"{'backward' if backward else 'forward'}, turn {number + 1} of {ranks}"
            frames.append(Frame(cells, title, said, moves, [_pair(rank, t) for rank, t in enumerate(here)]))
    words = (
        "Keys and values travel from rank to rank; queries stay. A rank's cells are the keys of each rank."
    )
    words += " Half a cell: only the early half is still needed." * causal
    return Player(f"Ring attention on {ranks} ranks", f"{words} {ARROWS}", frames)


def _pair(rank: int, turn: Turn) -> str:
    """`Q0 x K2`: the queries and keys that a rank multiplies; small letters are halves."""
    return f"{'q' if turn.late else 'Q'}{rank} x {'k' if turn.keys < 1 else 'K'}{turn.owner}"


def zero(units: Sequence[FsdpUnit], ranks: int) -> Player:
    """A microbatch under ZeRO 3: each unit is gathered, computes and is dropped; in backward its gradients are
    scattered as well. units: of one stage, the stage's own last."""
    *blocks, root = units
    left_out = len(blocks) - MOST_BLOCKS
    blocks = blocks[:MOST_BLOCKS]
    order = [root, *blocks]
    names = ["the rest", *(unit.module.rpartition(".")[2] for unit in blocks)]
    whole, frames = set[int](), list[Frame]()

    def frame(title: str, words: str, computes: str, gathers: bool = False, scatters: bool = False) -> None:
        share = [1.0 if i in whole else 1 / ranks for i in range(len(order))]
        round_ = [(rank, (rank + 1) % ranks, adds) for adds, sent in ((False, gathers), (True, scatters))
                  for rank in range(ranks) if sent]  # fmt: skip
        frames.append(Frame([share] * ranks, title, words, round_, [computes] * ranks))

    frame("start", "every rank keeps its part of each unit", "")
    for backward in (False, True):
        kind, letter = ("backward", "B") if backward else ("forward", "F")
        path = list(range(len(blocks), 0, -1)) if backward else list(range(1, len(order)))
        for i in (0, *path):
            if i in whole:
                continue
            whole.add(i)
            said = f"all-gather: {names[i]} is whole on every rank"
            frame(f"{kind}: gather {names[i]}", said, "", gathers=True)
            if i:
                frame(f"{kind}: compute {names[i]}", f"{kind} of block {names[i]}", f"{letter}{names[i]}")
                whole.discard(i)
                said = f"the weights of block {names[i]} are dropped, but for each rank's part"
                if backward:
                    said += "; reduce-scatter: each rank gets the sum of its part of the gradients"
                frame(f"{kind}: drop {names[i]}", said, "", scatters=backward)
    whole.discard(0)
    frame("end", "the last gradients are scattered; each rank updates its parts", "", scatters=True)
    words = (
        f"A microbatch, one unit after the other: what a rank holds of each (the rest is the embedding, the last norm "
        f"and the head). {'Only the first blocks are shown. ' * (left_out > 0)}The trainer gathers the next unit while "
        f"one computes; here each has its turn. {ARROWS}"
    )
    return Player(f"ZeRO 3 on {ranks} ranks", words, frames)


def pipeline(timeline: Timeline, rank_of: Sequence[int], name: str, most: int = 0) -> Player:
    """A simulated schedule: a rank's cells are microbatches, filled while it keeps their activations. most:
    microbatches of the step, if there are more than are shown."""
    events = [(event, rank) for rank, row in enumerate(timeline.rows) for event in row]
    microbatches = 1 + max(event.action.microbatch for event, _ in events)
    own = [max(1, rank_of.count(rank)) for rank in range(timeline.ranks)]
    frames = []
    for at in sorted({time for event, _ in events for time in (event.start, event.end)}):
        cells = [[0.0] * microbatches for _ in own]
        for event, rank in events:
            action, _, end = event
            frees = action.kind in "BW" and end <= at
            cells[rank][action.microbatch] += ((action.kind == "F" and event.start <= at) - frees) / own[rank]
        running = [next((str(e.action) for e in row if e.start <= at < e.end), "") for row in timeline.rows]
        sent = [_sent(event.action, rank_of) for event, _ in events if event.end == at]
        did = "; ".join(f"rank {rank}: {did or 'waits'}" for rank, did in enumerate(running))
        held = [round(sum(row) * parts) for row, parts in zip(cells, own, strict=True)]
        words = f"{did}. Activations kept: {', '.join(map(str, held))}"
        frames.append(Frame(cells, f"at {at:g}", words, [move for move in sent if move], running, at))
    rows = [
        [(e.start, e.end, ACTION_COLORS[e.action.kind], str(e.action)) for e in row] for row in timeline.rows
    ]
    there = {event.action.kind for event, _ in events}
    kinds = ", ".join(f"{kind} {words}" for kind, words in ACTIONS.items() if kind in there)
    words = (
        "Simulated: a forward takes 1, a backward 2, messages nothing. "
        f"2F3: stage 2, forward of microbatch 3 ({kinds}). Green arrows are activations, blue ones gradients."
    )
    of = f" in {microbatches} of {most} microbatches" if most > microbatches else ""
    return Player(f"Pipeline, {name}: {timeline.bubble:.1%} idle{of}", words, frames, rows)


def _sent(action: Action, rank_of: Sequence[int]) -> Move | None:
    """The message of a computation's result, if another rank needs it. Gradients are blue, as if added."""
    if action.kind == "W":
        return None
    target = action.stage + (1 if action.kind == "F" else -1)
    if not 0 <= target < len(rank_of) or rank_of[target] == rank_of[action.stage]:
        return None
    return rank_of[action.stage], rank_of[target], action.kind != "F"
