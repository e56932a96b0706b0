"""Draws what a command printed as a terminal in which it appears again, faster: an SVG that moves without a script.

All lines are there from the start. A curtain over the later ones moves down, and the text moves up, both in steps and
again and again. Readers who want no motion see the end.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from html import escape
from pathlib import Path

Line = tuple[float, str]
ROWS, COLUMNS = 26, 118
LINE, CHARACTER, EDGE, BAR = 17, 7.25, 16, 30  # pixels
PLAYS, HOLDS = 14.0, 5.0  # seconds: all lines, then the end
EVEN = 0.4  # share of the time that lines have alike; the rest is as they came
KINDS = (("command", r"^[$>] "), ("good", r"^(validation|done|summary)|report\.html"), ("soft", r"^step "))
STYLE = """
.paper { fill: #14191d; } .bar { fill: #232b31; }
text { font: 12px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; fill: #d8dee3; white-space: pre; }
.command { fill: #ffffff; font-weight: 700; } .good { fill: #7fd1a0; } .soft { fill: #9fb0bb; }
"""


def first_run() -> str:
    """The picture of what docs/record_first_run.py has recorded."""
    file = Path(__file__).parents[1] / "benchmarks" / "results" / "first_run.json"
    found = json.loads(file.read_text(encoding="utf-8"))
    title = f"{found['command']}, which took {found['seconds']:.0f} s, played faster"
    return to_svg(found["command"], found["lines"], title)


def talk() -> str:
    """The picture of the conversation that benchmarks/talk.py has recorded."""
    file = Path(__file__).parents[1] / "benchmarks" / "results" / "talk.json"
    said = json.loads(file.read_text(encoding="utf-8"))["runs"][0]["chat"]
    lines = [line for turn in said for line in (f"> {turn['message']}", turn["answer"])]
    command = "fivefold chat runs/talk --temperature 0"
    return to_svg(
        command, [*enumerate(lines)], "A conversation with the model of the recipe talk", len(lines) + 1
    )


def to_svg(command: str, lines: Sequence[Line], title: str, rows: int = ROWS) -> str:
    """The picture. lines: (seconds, text) in their order. rows: lines that it has room for."""
    texts = [f"$ {command}", *(text for _, text in lines)]
    shown = [_moment(number, lines) for number in range(-1, len(lines))]
    width, height = COLUMNS * CHARACTER + 2 * EDGE, BAR + rows * LINE + EDGE
    down = [(at, LINE * (number + 1)) for number, at in enumerate(shown)]
    up = [(at, -LINE * max(0, number + 1 - rows)) for number, at in enumerate(shown)]
    text_rows = "\n".join(
        f'<text class="{_kind(text)}" x="{EDGE}" y="{LINE * number + 12}">{escape(text[:COLUMNS])}</text>'
        for number, text in enumerate(texts)
        if text
    )
    dots = "".join(
        f'<circle cx="{EDGE + 4 + 18 * i}" cy="{BAR / 2}" r="5" fill="#4a5761"/>' for i in range(3)
    )
    return f"""<svg xmlns="http://www.w3.org/2000/svg" role="img" width="{width:.0f}" height="{height:.0f}" \
viewBox="0 0 {width:.0f} {height:.0f}">
<title>{escape(title)}</title>
<style>{STYLE}{_animation("up", up)}{_animation("down", down)}
@media (prefers-reduced-motion: reduce) {{ .up, .down {{ animation: none; }} }}</style>
<rect class="paper" width="100%" height="100%" rx="8"/>
<path class="bar" d="M0 {BAR}V8a8 8 0 0 1 8-8H{width - 8:.0f}a8 8 0 0 1 8 8V{BAR}z"/>{dots}
<svg x="0" y="{BAR + 4}" width="{width:.0f}" height="{rows * LINE}" viewBox="0 0 {width:.0f} {rows * LINE}">
<g class="up">
{text_rows}
<rect class="paper down" width="100%" height="{LINE * (len(texts) + 1)}"/>
</g>
</svg>
</svg>
"""


def _moment(number: int, lines: Sequence[Line]) -> float:
    """When a line appears, as a share of the whole; -1: the command."""
    if number < 0:
        return 0.0
    count, last = len(lines), max(1e-9, lines[-1][0])
    played = EVEN * (number + 1) / count + (1 - EVEN) * lines[number][0] / last
    return played * PLAYS / (PLAYS + HOLDS)


def _animation(name: str, moves: Sequence[tuple[float, float]]) -> str:
    """Steps to a place at each moment. Without animations the last place counts."""
    steps = {f"{100 * at:.2f}": place for at, place in moves}  # the last of several at once
    frames = " ".join(f"{at}% {{ transform: translateY({place}px); }}" for at, place in steps.items())
    end = moves[-1][1]
    return (
        f".{name} {{ transform: translateY({end}px); animation: {name} {PLAYS + HOLDS:g}s step-end infinite; }}\n"
        f"@keyframes {name} {{ {frames} 100% {{ transform: translateY({end}px); }} }}\n"
    )


def _kind(text: str) -> str:
    return next((name for name, pattern in KINDS if re.search(pattern, text)), "plain")
