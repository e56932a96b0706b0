"""Draws memory over a step as text for terminals and as SVG for light and dark themes, and keeps those of a run in
RUN/traces."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence, Set
from html import escape
from itertools import groupby
from pathlib import Path

from fivefold.files import MOST_TRACE, make_folder, read_json, understood, write_atomically
from fivefold.observe.format import size
from fivefold.observe.scale import linear_scale
from fivefold.schedules.memory_timeline import AWAY, CATEGORIES, PHASES, MemoryTimeline, from_json

LETTERS = {"params": "W", "gradients": "G", "optimizer": "S", "activations": "A", "buffers": "b"}
PHASE_LETTERS = {"forward": "F", "backward": "B", "update": "U", "other": "-"}
LEGEND = ", ".join(
    [f"{LETTERS[name]} {words}" for name, words in CATEGORIES.items()]
    + [f"{letter} {kind}" for kind, letter in PHASE_LETTERS.items()]
)
LIGHT = "--params: #1d5b9c; --gradients: #2c7a5b; --optimizer: #9c5410; --activations: #7b4fa3; --buffers: #5d6873;"
DARK = "--params: #7fb2ea; --gradients: #79c9a3; --optimizer: #f0b06a; --activations: #c4a1e6; --buffers: #a3b1bd;"
"""Colours of the categories in light and dark mode, in all pictures of memory."""
WIDTH, LEFT, RIGHT, TOP, HIGH, BAND, GAP = 960, 84, 24, 62, 200, 14, 58  # pixels
STYLE = f"""
.held {{ color-scheme: light dark; font: 12px system-ui, "Segoe UI", Roboto, "Liberation Sans", Arial, sans-serif;
  --paper: #fdfcf9; --ink: #22211f; --soft: #66625b; --rule: #d8d3c8; --on: #ffffff;
  --forward: #6f9ccb; --backward: #77ab94; --update: #ab8cc6; --other: #b9b3a8; --host: #b3262e; --disk: #22211f;
  {LIGHT} }}
@media (prefers-color-scheme: dark) {{ .held {{ --paper: #171614; --ink: #e9e6df; --soft: #a49f95; --rule: #45423b;
  --on: #171614; --forward: #47729f; --backward: #437460; --update: #715490; --other: #5d594f; --host: #ff8a85;
  --disk: #e9e6df; {DARK} }} }}
.held .paper {{ fill: var(--paper); }} .held text {{ fill: var(--ink); font-variant-numeric: tabular-nums; }}
.held .soft {{ fill: var(--soft); }} .held .title {{ font-size: 15px; font-weight: 600; }}
.held .end {{ text-anchor: end; }} .held .middle {{ text-anchor: middle; }}
.held .grid {{ stroke: var(--rule); fill: none; }}
.held .peak {{ stroke: var(--ink); stroke-dasharray: 3 3; fill: none; }}
.held .host {{ stroke: var(--host); stroke-width: 2; fill: none; }}
.held .disk {{ stroke: var(--disk); stroke-width: 2; fill: none; }}
""" + "\n".join(f".held .{name} {{ fill: var(--{name}); }}" for name in (*CATEGORIES, *PHASES))
Named = Sequence[tuple[str, MemoryTimeline]]


def summary(timeline: MemoryTimeline) -> str:
    """`peak 84.6 MiB in backward: weights 12.1 MiB, ...; beside it, host memory 96.0 MiB`."""
    parts = ", ".join(f"{CATEGORIES[name]} {size(held)}" for name, held in timeline.at_peak.items() if held)
    away = "".join(f"; beside it, {AWAY[name]} {size(max(sizes))}" for name, sizes in timeline.away.items())
    return f"peak {size(timeline.peak)} in {timeline.peak_phase}: {parts}{away}"


def to_text(timelines: Named, columns: int = 100, rows: int = 12) -> str:
    """Timelines under each other on one scale, in the letters of `LEGEND`."""
    most = max(timeline.peak for _, timeline in timelines) or 1
    lines = []
    for name, timeline in timelines:
        lines.append(f"{name}: {summary(timeline)}")
        stacks = [_stack(timeline, column, columns, rows / most) for column in range(columns)]
        for row in range(rows, 0, -1):
            label = size(most * row / rows) if row in (rows, rows // 2) else ""
            lines.append(f"{label:>9} │" + "".join(stack[row - 1 : row] or " " for stack in stacks).rstrip())
        phases = "".join(PHASE_LETTERS[timeline.phase_at((i + 0.5) / columns)] for i in range(columns))
        lines += [f"{'':9} └{phases}", ""]
    return "\n".join([*lines, LEGEND, ""])


def _stack(timeline: MemoryTimeline, column: int, columns: int, scale: float) -> str:
    """The letters of a column from the bottom up: of the largest sum in it."""
    totals = timeline.totals
    bins = len(totals)
    first = column * bins // columns
    number = max(range(first, max(first + 1, (column + 1) * bins // columns)), key=totals.__getitem__)
    text, height = "", 0.0
    for name, sizes in timeline.bytes.items():
        height += sizes[number] * scale
        text += LETTERS[name] * (round(height) - len(text))
    return text


def to_svg(timelines: Named, title: str = "") -> str:
    """Timelines under each other on one scale of bytes. What is offloaded is a line: it is not part of the sum."""
    most = max((max(t.peak, *map(max, t.away.values()), 0) for _, t in timelines), default=0) or 1
    parts, top = [_legend({name for _, timeline in timelines for name in timeline.away})], TOP
    for name, timeline in timelines:
        parts.append(f'<text x="{LEFT}" y="{top + 12}">{escape(f"{name}: {summary(timeline)}")}</text>\n')
        parts.append(_timeline(timeline, top + 22, most))
        top += 22 + HIGH + BAND + GAP
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="held" role="img" width="{WIDTH}" height="{top}" '
        f'viewBox="0 0 {WIDTH} {top}">\n<title>{escape(title)}</title><style>{STYLE}</style>\n'
        f'<rect class="paper" width="100%" height="100%"/>\n'
        f'<text class="title" x="{LEFT}" y="22">{escape(title)}</text>{"".join(parts)}</svg>\n'
    )


def _timeline(timeline: MemoryTimeline, top: float, most: int) -> str:
    unit = next(u for u in (2**40, 2**30, 2**20, 2**10, 1) if most >= u)
    scale = linear_scale(0.0, most / unit, zero=True)
    wide, bottom = WIDTH - LEFT - RIGHT, top + HIGH

    def y(held: float) -> float:
        return bottom - HIGH * scale.height(held / unit)

    parts = []
    for tick in scale.ticks:
        at = y(tick * unit)
        parts.append(f'<path class="grid" d="M{LEFT} {at:.1f}H{LEFT + wide}"/>')
        parts.append(f'<text class="soft end" x="{LEFT - 8}" y="{at + 4:.1f}">{size(tick * unit)}</text>')
    below = [0] * len(timeline.totals)
    for name, sizes in timeline.bytes.items():
        above = [a + b for a, b in zip(below, sizes, strict=True)]
        if any(sizes):
            there = _edge(above, y, wide)
            back = _edge(below, y, wide)[::-1]
            points = "L".join(f"{x:.1f} {at:.1f}" for x, at in (*there, *back))
            parts.append(
                f'<path class="{name}" d="M{points}Z"><title>{CATEGORIES[name]}: at most {size(max(sizes))}'
                "</title></path>\n"
            )
        below = above
    for name, sizes in timeline.away.items():
        points = "L".join(f"{x:.1f} {at:.1f}" for x, at in _edge(sizes, y, wide))
        parts.append(f'<path class="{name}" d="M{points}"><title>{AWAY[name]}</title></path>\n')
    parts.append(f'<path class="peak" d="M{LEFT} {y(timeline.peak):.1f}H{LEFT + wide}"/>')
    for phase in timeline.phases:
        x, end = (LEFT + wide * at / timeline.length for at in (phase.start, phase.end))
        name = phase.kind if end - x > 8 * len(phase.kind) else ""
        parts.append(
            f'<g><title>{phase.kind}</title><rect class="{phase.kind}" x="{x:.1f}" y="{bottom + 3}" '
            f'width="{max(0.2, end - x):.1f}" height="{BAND}"/>'
            f'<text class="middle" x="{(x + end) / 2:.1f}" y="{bottom + BAND}">{name}</text></g>\n'
        )
    words = f"{timeline.length:.3g} s" if timeline.unit == "s" else f"{timeline.length:,.0f} {timeline.unit}"
    parts.append(f'<text class="soft end" x="{LEFT + wide}" y="{bottom + BAND + 17}">{words}</text>')
    return "".join(parts)


def _edge(values: Sequence[float], y: Callable[[float], float], wide: float) -> list[tuple[float, float]]:
    """Corners of the steps at these heights."""
    points, at = [], 0
    for value, equal in groupby(values):
        end = at + len(list(equal))
        points += [(LEFT + wide * at / len(values), y(value)), (LEFT + wide * end / len(values), y(value))]
        at = end
    return points


def _legend(away: Set[str]) -> str:
    """The categories, and what is offloaded."""
    left, parts = LEFT, []
    shown = CATEGORIES | {name: words for name, words in AWAY.items() if name in away}
    for name, words in shown.items():
        if name in AWAY:
            parts.append(f'<path class="{name}" d="M{left} 39h12"/>')
        else:
            parts.append(f'<rect class="{name}" x="{left}" y="33" width="12" height="12"/>')
        parts.append(f'<text class="soft" x="{left + 18}" y="43">{words}</text>')
        left += 42 + 6.5 * len(words)
    return "".join(parts) + "\n"


def write(run: Path, timeline: MemoryTimeline) -> Path:
    """Writes RUN/traces/memory-step-N-rank-R.json."""
    folder = run / "traces"
    make_folder(folder)
    path = folder / f"memory-step-{timeline.step:08d}-rank-{timeline.rank}.json"
    write_atomically(path, json.dumps(timeline.as_json()) + "\n")
    return path


def read(run: Path, rank: int = 0) -> list[tuple[str, MemoryTimeline]]:
    """The measured steps of a rank: the run's first one, and the last that was measured."""
    paths = sorted((run / "traces").glob(f"memory-step-*-rank-{rank}.json"))
    return list(_named(paths[:1] + paths[1:][-1:]))


def _named(paths: Sequence[Path]) -> Iterator[tuple[str, MemoryTimeline]]:
    for path in paths:
        with understood(path):
            found = from_json(read_json(path, MOST_TRACE))
        yield f"step {found.step:,}, rank {found.rank}", found


def section(run: Path) -> str:
    """The picture for the report's page; "" if no step was measured."""
    found = read(run)
    return to_svg(found, "Bytes of the tensors of rank 0 over a step") if found else ""
