"""Pictures of a plan for terminals: memory of each stage, where the step's time goes, the pipeline's timeline, the
roofline, and a search's frontier. Readable without colour."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from rich.text import Text

from fivefold.host.devices import GIB
from fivefold.observe.format import duration, memory_text
from fivefold.observe.timelines import pipeline_text
from fivefold.sharding.layout import to_text as layout_text

if TYPE_CHECKING:
    from fivefold.plan.memory.memory import Memory
    from fivefold.plan.pages.pictures import Pictures, Point, Roofline
    from fivefold.plan.predict import Plan
    from fivefold.plan.setting import Setting
    from fivefold.schedules.pipeline import Timeline

KINDS = {
    "params": ("█", "blue"),
    "gradients": ("▓", "green"),
    "optimizer": ("▒", "yellow"),
    "activations": ("░", "magenta"),
    "buffers": ("∙", "cyan"),
}
SHARES = {"compute": "blue", "memory": "yellow", "wait": "red"}
"""Colours of the shares of a step, by words of their names."""
MARKS = "abcdefghijklmnopqrstuvwxyz"
MOST_ROWS = 8  # of a pipeline's ranks, where not everything is wanted
NARROWEST = 80  # columns; in fewer, lines wrap
HEIGHT = 11  # lines of the roofline


def draw(found: Pictures, width: int, color: bool, full: bool) -> Iterator[Text]:
    """The pictures, line by line, at most `width` columns wide. full: all ranks, and the roofline's picture."""
    width = max(NARROWEST, min(width, 160))
    yield from memory_bars(found.plan.memory, found.plan.limit, width, full)
    yield Text()
    total, room = sum(found.shares.values()), width - 38
    yield Text(f"step of the busiest rank, {duration_text(total)}")
    for name, seconds in found.shares.items():
        if seconds >= 0.0005 * total:
            bar = "█" * max(1, round(room * seconds / total))
            style = next((style for word, style in SHARES.items() if word in name), "")
            yield Text(f"  {name:27}{seconds / total:6.1%} ") + Text(bar, style)
    if found.timeline is not None:
        yield from pipeline(found.plan.setting, found.timeline, width, color, full)
    if full:
        yield Text()
        yield from roofline(found.roofline, found.plan.step.seconds, width)


def memory_bars(stages: Sequence[Memory], limit: float, width: int, full: bool) -> Iterator[Text]:
    """A bar for each pipeline rank, and the device's limit."""
    most = max(limit, *(m.total for m in stages))
    room = width - 21
    legend = Text("memory per device ")
    for name, (fill, style) in KINDS.items():
        legend.append(fill, style).append(f" {name}  ")
    yield legend
    for position in _shown(len(stages), full):
        m, bar, end = stages[position], Text(), 0.0
        for name, (fill, style) in KINDS.items():
            end += getattr(m, name)
            bar.append(fill * (round(room * end / most) - len(bar)), style)
        bar.append(" " * (room - len(bar)))
        at = min(room - 1, round(room * limit / most))
        bar = bar[:at] + Text("┃", "bold red") + bar[at + 1 :]
        yield Text(f"  stage {position:<3}") + bar + Text(f" {memory_text(m.total)}")
    at, words = min(room - 1, round(room * limit / most)), f"limit {memory_text(limit)}"
    before = f"{words} ┘".rjust(at + 1)
    yield Text(" " * 11 + (before if len(before) == at + 1 else f"{'└':>{at + 1}} {words}"), "dim")
    yield from _left_out(len(stages), full)


def pipeline(s: Setting, timeline: Timeline, width: int, color: bool, full: bool) -> Iterator[Text]:
    """The timeline, a line for each rank."""
    few = 1 + max(event.action.microbatch for event in timeline.events())
    count = f"{few} of {s.microbatches}" if few < s.microbatches else f"{few}"
    yield Text()
    words = f"pipeline ({s.layout.schedule}), {count} microbatches, {duration_text(timeline.makespan)}"
    yield Text(f"{words}: F forward, B backward")
    if few < s.microbatches:
        yield Text("  (idle shares of these microbatches; those of the whole step are smaller)", "dim")
    lines = pipeline_text(timeline, max(30, width - 26), color).splitlines()
    for rank in _shown(len(lines), full):
        yield Text("  ") + Text.from_ansi(lines[rank])
    yield from _left_out(len(lines), full)


def roofline(found: Roofline, step: float, width: int) -> Iterator[Text]:
    """Operations by FLOPs per byte and FLOP/s under the device's roof, with each one's share of the step."""
    by_share = sorted(found.points, key=lambda p: -p.seconds)
    marks = dict(zip((p.name for p in by_share), MARKS, strict=False))
    yield Text(
        f"roofline: {_quantity(found.peak, 'FLOP/s')}, {_quantity(found.bandwidth, 'B/s')}; memory-bound "
        f"below {found.ridge:.0f} FLOP per byte"
    )
    yield from _plot(found, by_share, marks, width)
    yield Text(f"    {'operation':18}{'FLOP/byte':>10}{'reached':>15}{'share of step':>15}  bound by")
    for point in by_share:
        bound, intensity = found.bound(point), f"{point.intensity:,.0f}" if point.flops else "-"
        reached = _quantity(point.moved / point.seconds, "B/s")
        if point.flops:
            reached = _quantity(point.rate, "FLOP/s")
        row = f"  {marks.get(point.name, ' ')} {point.name:18.18}{intensity:>10}{reached:>15}"
        style = "blue" if bound == "compute" else "yellow"
        yield Text(f"{row}{point.seconds / step:15.1%}  ") + Text(bound, style)


def _plot(found: Roofline, points: Sequence[Point], marks: Mapping[str, str], width: int) -> Iterator[Text]:
    """The roofline's plot. Both axes are logarithmic: FLOPs per byte to the right, FLOP/s upwards."""
    (low, high, bottom), room = found.ends, width - 14

    def column(intensity: float) -> int:
        return round((room - 1) * math.log(intensity / low) / math.log(high / low))

    def line(rate: float) -> int:
        return round((HEIGHT - 1) * math.log(found.peak / rate) / math.log(found.peak / bottom))

    rows = [[Text(" ") for _ in range(room)] for _ in range(HEIGHT)]
    for x in range(room):
        intensity = low * (high / low) ** (x / (room - 1))
        flat = intensity >= found.ridge
        y = line(min(found.peak, intensity * found.bandwidth))
        if y < HEIGHT:
            rows[y][x] = Text("─" if flat else "╱", "dim")
    for p in reversed([p for p in points if p.flops]):  # the largest on top
        rows[line(p.rate)][column(p.intensity)] = Text(marks.get(p.name, "+"), "bold")
    for number, row in enumerate(rows):
        rate = found.peak / (found.peak / bottom) ** (number / (HEIGHT - 1))
        label = _quantity(rate, "FLOP/s") if number % 5 == 0 else ""
        yield Text(f"{label:>12} │") + Text().join(row)
    left, middle, right = f"{low:,.3g}", f"{found.ridge:.0f}", f"{high:,.0f} FLOP/byte"
    at = column(found.ridge) - len(middle) // 2 - len(left)
    yield Text(f"{'':12} └" + "─" * room)
    yield Text(f"{'':14}{left}{' ' * at}{middle}" + right.rjust(room - len(left) - at - len(middle)))


def frontier(plans: Sequence[Plan], width: int) -> Iterator[Text]:
    """The fastest layout for each memory. A text that does not fit beside its bar follows below."""
    most, left, room = max(plan.tokens_per_s for plan in plans), 22, width // 4
    yield Text("frontier: no other layout is both smaller and faster than one of these")
    yield Text(f"  {'GiB':>6} {'tokens/s':>12}")
    for plan in plans:
        bar = "█" * max(1, round(room * plan.tokens_per_s / most))
        words = f"{layout_text(plan.layout)}, microbatch {plan.setting.sizes.B}"
        figures = Text(f"  {plan.peak_bytes / GIB:6.3g} {plan.tokens_per_s:12,.0f} ")
        line = figures + Text(f"{bar:{room}}", "blue")
        if left + room + 1 + len(words) <= width:
            yield line + Text(f" {words}")
            continue
        yield line
        folded = ""  # after commas
        for part in re.findall("[^,]+,?", words):
            if folded and len(folded) + len(part) > width - left:
                yield Text(" " * left + folded)
                folded = part.lstrip()
            else:
                folded += part
        yield Text(" " * left + folded)


def _quantity(value: float, unit: str) -> str:
    """Three digits with the letter of the thousands: 989 TFLOP/s."""
    for factor, letter in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M")):
        if value >= factor:
            return f"{float(f'{value / factor:.3g}'):g} {letter}{unit}"
    return f"{value:.3g} {unit}"


def duration_text(seconds: float) -> str:
    """Short times with their unit: 12.3 ms, 4.56 s."""
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 100 else duration(seconds)


def _shown(count: int, full: bool) -> list[int]:
    """The ranks that are drawn."""
    if full or count <= MOST_ROWS:
        return list(range(count))
    return sorted({round(i * (count - 1) / (MOST_ROWS - 1)) for i in range(MOST_ROWS)})


def _left_out(count: int, full: bool) -> Iterator[Text]:
    if not full and count > MOST_ROWS:
        yield Text(f"  {MOST_ROWS} of {count}; --pictures draws all")
