"""The pictures of a plan: parts of the step's time, roofline and timeline as numbers; with its memory and a search's
frontier as SVG, and for terminals, readable without colour."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.text import Text

from fivefold.draw.canvas import Axes, Canvas, Scale, linear_scale, text_width
from fivefold.host.devices import GIB
from fivefold.models.operations import Operation
from fivefold.models.recomputation import region
from fivefold.observe.format import duration, memory_text
from fivefold.observe.format import size as size_text
from fivefold.observe.memory_picture import COLORS
from fivefold.observe.timelines import pipeline_text
from fivefold.schedules.pipeline import Timeline, simulate
from fivefold.sharding.layout import to_text as layout_text
from fivefold.sharding.parts import stages_of
from fivefold_plan.memory import model_states
from fivefold_plan.memory.memory import Memory
from fivefold_plan.messages import volume
from fivefold_plan.predict import Plan
from fivefold_plan.setting import Setting
from fivefold_plan.time import stage_costs
from fivefold_plan.time.cost import forward_flops, operation, stream


@dataclass(frozen=True)
class Point:
    """An operation's work per step on the busiest rank, with recomputation.

    flops: 0 for element-wise work, which counts bytes only. seconds: on a device of average speed, without messages."""

    name: str
    flops: float
    moved: float
    seconds: float

    @property
    def intensity(self) -> float:
        """FLOPs per byte moved."""
        return self.flops / self.moved

    @property
    def rate(self) -> float:
        """FLOP/s that it reaches."""
        return self.flops / self.seconds


@dataclass(frozen=True)
class Roofline:
    """Operations under the device's roof. peak: data sheet FLOP/s in the compute dtype. bandwidth: memory bytes/s."""

    peak: float
    bandwidth: float
    points: list[Point]

    @property
    def ridge(self) -> float:
        """FLOPs per byte above which an operation is compute-bound."""
        return self.peak / self.bandwidth

    @property
    def ends(self) -> tuple[float, float, float]:
        """Of what pictures show: the lowest and the highest FLOPs per byte, and the lowest FLOP/s."""
        products = [point for point in self.points if point.flops]
        low = min(self.ridge / 10, *(point.intensity for point in products)) / 1.5
        high = max(self.ridge * 10, *(point.intensity for point in products)) * 1.5
        return low, high, min(low * self.bandwidth, *(point.rate for point in products)) / 1.5

    def bound(self, point: Point) -> str:
        """The bound of an operation: "compute" or "memory"."""
        return "compute" if point.intensity >= self.ridge else "memory"


@dataclass(frozen=True)
class Pictures:
    """shares, timeline: see the functions."""

    plan: Plan
    roofline: Roofline
    shares: dict[str, float]
    timeline: Timeline | None


def pictures(plan: Plan) -> Pictures:
    found = roofline(plan)
    return Pictures(plan, found, shares(plan, found), timeline(plan))


def roofline(plan: Plan) -> Roofline:
    """The operations of a step on the pipeline rank that computes longest, in the order of forward, merged by name over
    all blocks."""
    s, layout, costs = plan.setting, plan.layout, plan.step.costs
    position = max(range(layout.pp), key=lambda rank: sum(costs[i].seconds for i in stages_of(layout, rank)))
    first, last = s.ends(position)
    blocks = [(s.card.second[number], s.recompute[number]) for number in s.blocks(position)]
    parts = [(s.work.begin, "none", int(first))]  # operations, recomputation, repeats per microbatch
    for (second, mode), count in Counter(sorted(blocks)).items():
        parts.append((s.work.block[s.kind(second, mode)], mode, count))
    parts.append((s.work.end, "none", int(last)))
    points: dict[str, Point] = {}
    for ops, recompute, count in parts:
        for op in ops if count else ():
            again = 1 + region(recompute, s.software).repeated(op, stage_costs.saves_late(layout))
            forward, backward = operation(op, s).alone
            flops, (read, written) = forward_flops(op), _moved(op, s)
            flops *= again + (2.5 if op.attention else 2.0)
            times, old = count * s.microbatches, points.get(op.name, Point(op.name, 0.0, 0.0, 0.0))
            points[op.name] = Point(
                op.name,
                old.flops + times * flops,
                old.moved + times * (read * again + written),
                old.seconds + times * (forward * again + backward),
            )
    # of each microbatch's gradients
    elements, _, end, tied = model_states.elements(s.model, layout)
    summed = sum(elements[number].computes for number in s.blocks(position))
    summed += (end.computes + tied.computes) * last
    if seconds := s.microbatches * stage_costs.accumulate(summed, s).weight:
        moved = seconds / stream(1.0, s.cluster.device, "copy", s.dtype)
        points["gradient sums"] = Point("gradient sums", 0.0, moved, seconds)
    device, drawn = s.cluster.device, [point for point in points.values() if point.moved]  # others only send
    return Roofline(device.peak[s.rate], device.bandwidth, drawn)


def shares(plan: Plan, found: Roofline) -> dict[str, float]:
    """Seconds of the step by activity of the busiest rank. They add up to the step.

    "other computation": time outside the points (the slowest device, host limits, work once per step).
    """
    step, sent, bound = plan.step, plan.step.exposed, {"compute": 0.0, "memory": 0.0}
    for point in found.points:
        bound[found.bound(point)] += point.seconds
    update = dict(step.terms)["optimizer"]
    return {
        "compute-bound operations": bound["compute"],
        "memory-bound operations": bound["memory"],
        "optimizer (memory-bound)": update,
        "other computation": step.compute - bound["compute"] - bound["memory"] - update,
        "communication in the model": sent["model"],
        "gradient and weight traffic": sent["data"] + sent.get("replica_groups", 0.0),
        "waiting for other stages": step.bubble,
    }


def timeline(plan: Plan) -> Timeline | None:
    """The pipeline of a step with each stage's planned times, for the first `shown` microbatches. None without one."""
    s = plan.setting
    if s.layout.pp == 1:
        return None
    price = stage_costs.pipeline_costs([cost.timed for cost in plan.step.costs], stage_costs.transfers(s))
    return simulate(s.schedule(s.layout.shown(s.microbatches)), price)


def _moved(op: Operation, s: Setting) -> tuple[float, float]:
    """Bytes of memory traffic in forward and in backward.

    A matmul reads both factors and writes the result once, and does so twice in backward. Fused attention reads
    queries, keys and values and writes the output."""
    size, m = 0.0, op.matmul
    if m:
        size += m.count * (m.m * m.k + m.k * m.n + m.m * m.n)
    if op.attention:
        queries, context = s.sizes.q, s.sizes.cp  # keys and values of all context ranks are read
        size += s.sizes.N * (2 * queries + (s.sizes.qkv - queries) * context)
    return op.forward + size * s.sizes.e, op.backward + 2 * size * s.sizes.e


WIDTH, LEFT, RIGHT, TOP, FLOOR = 760, 84, 96, 62, 330  # pixels: margins, lower edge of two axes
MOST_ROWS = 8  # of a pipeline's ranks, where not everything is wanted
BOUND = {"compute": "blue", "memory": "orange"}
"""Colours of operations by what bounds them."""


def memory_svg(plan: Plan, title: str, width: int = WIDTH) -> str:
    """A bar for each pipeline rank, and the limit."""
    scale = (width - LEFT - RIGHT) / max(plan.limit, *(m.total for m in plan.memory))
    limit, canvas = LEFT + plan.limit * scale, Canvas(f"{title}, planned", LEFT, width)
    begin = _legend(canvas, [(color, name) for name, color in COLORS.items()], width)
    each = 30 if len(plan.memory) <= MOST_ROWS else 20
    for position, held in enumerate(plan.memory):
        top, sizes = begin + each * position, {name: getattr(held, name) for name in COLORS}
        canvas.text(LEFT - 10, top + each / 2 + 1, f"stage {position}", "soft end")
        parts = [(COLORS[name], size * scale, f"{name} {memory_text(size)}") for name, size in sizes.items()]
        canvas.bar(LEFT, top, each - 8, parts, memory_text(held.total), limit)
    bottom = begin + each * len(plan.memory)
    canvas.line("line limit", [(limit, begin - 6), (limit, bottom)])
    canvas.text(limit, bottom + 16, f"limit {memory_text(plan.limit)}", "soft middle")
    return canvas.svg()


def _legend(canvas: Canvas, items: Sequence[tuple[str, str]], width: float) -> float:
    """The legend, on as many lines as it needs. Returns where the picture goes on."""
    x, y = float(LEFT), 46
    for kind, words in items:
        if x > LEFT and x + 18 + text_width(words) > width:
            x, y = float(LEFT), y + 17
        x = canvas.legend(x, y, [(kind, words)])
    return y + 16.0


def shares_svg(found: Pictures, title: str, width: int = WIDTH) -> str:
    """A bar for each part of the step's time, and its share."""
    canvas, left, total = Canvas(f"{title}, planned", 12, width), 198, sum(found.shares.values())
    rows = [(name, seconds) for name, seconds in found.shares.items() if seconds >= 0.0005 * total]
    scale = (width - left - 60) / max(seconds for _, seconds in rows)
    for number, (name, seconds) in enumerate(rows):
        y, color = 40 + 24 * number, next(color for word, color in SHARE_COLORS.items() if word in name)
        canvas.text(left - 10, y + 13, name, "soft end")
        tip = f"{name} {duration_text(seconds)}"
        canvas.bar(left, y, 17, [(color, seconds * scale, tip)], f"{seconds / total:.1%}")
    return canvas.svg()


def messages_svg(plan: Plan, title: str, width: int = WIDTH) -> str:
    """A bar for the bytes of each axis that leave the rank that sends most, with the operations of rank 0; "" if none
    do."""
    s, most = plan.setting, max(plan.sent.values(), default=0)
    if not most or plan.service:
        return ""
    calls: dict[str, Counter[str]] = {}
    for (what, group), (times, _) in volume.counted(s).items():
        calls.setdefault("dp" if group in volume.DATA else group, Counter())[what] += times
    canvas = Canvas(f"{title}, planned", LEFT, width)
    for number, (axis, sent) in enumerate(plan.sent.items()):
        y, long = 40 + 42 * number, (width - LEFT - RIGHT) * sent / most
        canvas.text(LEFT - 10, y + 13, axis, "soft end")
        canvas.bar(LEFT, y, 17, [("orange", long, f"{axis} {size_text(sent)}")], size_text(sent))
        words = ", ".join(f"{times:,} {what}" for what, times in calls.get(axis, {}).items())
        canvas.text(LEFT, y + 32, words, "soft small")
    return canvas.svg()


def roofline_svg(found: Roofline, step: float, title: str, width: int = WIDTH) -> str:
    """A circle for each operation, as large as its share of the step; work of which only bytes are counted at the left.

    step: its seconds.
    """
    by_share = sorted(found.points, key=lambda p: -p.seconds)
    (low, high, bottom), top = found.ends, found.peak * 1.6
    axes = Axes(LEFT + 60, TOP, width - 24, FLOOR, _decades(low, high), _decades(bottom, top))
    canvas = Canvas(f"{title}, planned", LEFT, width)
    canvas.legend(LEFT, 46, [(color, f"{name}-bound") for name, color in BOUND.items()])
    canvas.levels(replace(axes, left=LEFT), [_quantity(rate, "FLOP/s") for rate in axes.up.ticks])
    canvas.columns(axes, [f"{value:,g}" for value in axes.across.ticks], "FLOP per byte moved")
    canvas.text(LEFT + 26, FLOOR + 17, "bytes only", "soft middle")
    start = max(low, bottom / found.bandwidth)
    roof = [(start, start * found.bandwidth), (found.ridge, found.peak), (high, found.peak)]
    canvas.line("line ink", map(axes.at, roof))
    canvas.text(axes.right, axes.y(found.peak) - 7, _quantity(found.peak, "FLOP/s"), "soft end")
    level = FLOOR - 6.0
    for p in by_share:
        radius, bound = max(2.5, 50 * math.sqrt(p.seconds / step / math.pi)), found.bound(p)
        if p.flops:
            center = axes.at((p.intensity, p.rate))
        else:
            center = LEFT + 26, level - radius
            level -= 2 * radius + 3
        tip = f"{p.name}: {p.seconds / step:.1%} of the step, bound by {bound}"
        canvas.circle(f"{BOUND[bound]} pale", *center, radius, tip)
    for p in [p for p in by_share if p.flops]:
        canvas.name(axes.x(p.intensity), axes.y(p.rate) + 30, p.name, "middle")
    return canvas.svg()


def as_rows(plans: Sequence[Plan]) -> list[dict[str, Any]]:
    """Rows of `frontier_svg`, one per plan."""
    return [
        {
            "peak": plan.peak_bytes,
            "tokens_per_s": plan.tokens_per_s,
            "words": f"{layout_text(plan.layout)}, microbatch {plan.setting.sizes.B}",
        }
        for plan in plans
    ]


def frontier_svg(rows: Sequence[Mapping[str, Any]], limit: float, title: str) -> str:
    """Throughput against memory, with a list of the layouts. rows: {peak, tokens_per_s, words}, by memory."""
    up = linear_scale(0, max(row["tokens_per_s"] for row in rows), True)
    axes = Axes(LEFT, TOP, WIDTH - 24, FLOOR, linear_scale(0, limit / GIB, True), up)
    canvas = Canvas(f"{title}, planned", LEFT, WIDTH)
    canvas.axes(axes, "GiB per device", "tokens/s")
    edge = axes.x(limit / GIB)
    canvas.line("line limit", [(edge, TOP), (edge, FLOOR)])
    canvas.text(edge - 6, FLOOR - 6, "limit", "soft end")
    places = [axes.at((row["peak"] / GIB, row["tokens_per_s"])) for row in rows]
    steps = "".join(f"H{x:.1f}V{y:.1f}" for x, y in places[1:])
    canvas.path("line blue", f"M{places[0][0]:.1f} {places[0][1]:.1f}{steps}")
    for number, (row, (x, y)) in enumerate(zip(rows, places, strict=True), 1):
        words = f"{memory_text(row['peak'])}, {row['tokens_per_s']:,.0f}/s: {row['words']}"
        canvas.circle("blue", x, y, 4.5)
        canvas.text(x, y - 9, str(number), "middle")
        canvas.text(30, FLOOR + 44 + 17 * number, str(number), "soft end")
        canvas.text(38, FLOOR + 44 + 17 * number, words, "small")
    return canvas.svg()


def _decades(low: float, high: float) -> Scale:
    """A logarithmic scale from end to end, with ticks at powers of ten."""
    powers = range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1)
    return Scale(low, high, [10.0**power for power in powers], log=True)


KINDS = {
    "params": ("█", "blue"),
    "gradients": ("▓", "green"),
    "optimizer": ("▒", "yellow"),
    "activations": ("░", "magenta"),
    "buffers": ("∙", "cyan"),
}
SHARE_COLORS = {
    "compute": "blue", "memory": "orange", "other": "grey", "communication": "purple", "traffic": "purple",
    "waiting": "red",
}  # fmt: skip
"""Of the shares of a step in pictures, by words of their names."""
SHARES = {"compute": "blue", "memory": "yellow", "wait": "red"}
"""Colours of the shares of a step, by words of their names."""
MARKS = "abcdefghijklmnopqrstuvwxyz"
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
        yield from timeline_lines(found.plan, found.timeline, width, color, full)
    if full:
        yield Text()
        yield from roofline_lines(found.roofline, found.plan.step.seconds, width)


def memory_bars(stages: Sequence[Memory], limit: float, width: int, full: bool) -> Iterator[Text]:
    """A bar for each pipeline rank, and the device's limit."""
    most = max(limit, *(m.total for m in stages))
    room = width - 21
    at, words = min(room - 1, round(room * limit / most)), f"limit {memory_text(limit)}"
    legend = Text("memory per device ")
    for name, (fill, style) in KINDS.items():
        legend.append(fill, style).append(f" {name}  ")
    yield legend
    for position in shown(len(stages), full):
        m, bar, end = stages[position], Text(), 0.0
        for name, (fill, style) in KINDS.items():
            end += getattr(m, name)
            bar.append(fill * (round(room * end / most) - len(bar)), style)
        bar.append(" " * (room - len(bar)))
        bar = bar[:at] + Text("┃", "bold red") + bar[at + 1 :]
        yield Text(f"  stage {position:<3}") + bar + Text(f" {memory_text(m.total)}")
    before = f"{words} ┘".rjust(at + 1)
    yield Text(" " * 11 + (before if len(before) == at + 1 else f"{'└':>{at + 1}} {words}"), "dim")
    yield from _left_out(len(stages), full)


def idle_words(plan: Plan, timeline: Timeline) -> str:
    """Idle shares of the microbatches that are drawn, and of the pipeline over the whole step."""
    takes = dict(plan.step.terms)["pipeline, first start to last end"]
    busy = (
        sum(map(timeline.busy, range(timeline.ranks)))
        * plan.setting.microbatches
        / drawn_microbatches(timeline)
    )
    whole = 1 - busy / (timeline.ranks * takes)
    return f"{timeline.bubble:.1%} idle in these, {whole:.1%} in the step"


def drawn_microbatches(timeline: Timeline) -> int:
    return 1 + max(event.action.microbatch for event in timeline.events())


def timeline_lines(plan: Plan, timeline: Timeline, width: int, color: bool, full: bool) -> Iterator[Text]:
    s, few = plan.setting, drawn_microbatches(timeline)
    count = f"{few} of {s.microbatches}" if few < s.microbatches else f"{few}"
    yield Text()
    words = f"pipeline ({s.layout.schedule}), {count} microbatches, {duration_text(timeline.makespan)}"
    yield Text(f"{words}: F forward, B backward")
    if few < s.microbatches:
        yield Text(f"  ({idle_words(plan, timeline)})", "dim")
    lines = pipeline_text(timeline, max(30, width - 26), color).splitlines()
    for rank in shown(len(lines), full):
        yield Text("  ") + Text.from_ansi(lines[rank])
    yield from _left_out(len(lines), full)


def roofline_lines(found: Roofline, step: float, width: int) -> Iterator[Text]:
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
    axes = Axes(0, 0, room - 1, HEIGHT - 1, _decades(low, high), _decades(bottom, found.peak))
    rows = [[Text(" ") for _ in range(room)] for _ in range(HEIGHT)]
    for x in range(room):
        intensity = low * (high / low) ** (x / (room - 1))
        y = round(axes.y(min(found.peak, intensity * found.bandwidth)))
        if y < HEIGHT:
            rows[y][x] = Text("─" if intensity >= found.ridge else "╱", "dim")
    for p in reversed([p for p in points if p.flops]):  # the largest on top
        x, y = map(round, axes.at((p.intensity, p.rate)))
        rows[y][x] = Text(marks.get(p.name, "+"), "bold")
    for number, row in enumerate(rows):
        rate = found.peak / (found.peak / bottom) ** (number / (HEIGHT - 1))
        label = _quantity(rate, "FLOP/s") if number % 5 == 0 else ""
        yield Text(f"{label:>12} │") + Text().join(row)
    left, middle, right = f"{low:,.3g}", f"{found.ridge:.0f}", f"{high:,.0f} FLOP/byte"
    at = round(axes.x(found.ridge)) - len(middle) // 2 - len(left)
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


def shown(count: int, full: bool) -> list[int]:
    """The ranks that are drawn."""
    if full or count <= MOST_ROWS:
        return list(range(count))
    return sorted({round(i * (count - 1) / (MOST_ROWS - 1)) for i in range(MOST_ROWS)})


def _left_out(count: int, full: bool) -> Iterator[Text]:
    if not full and count > MOST_ROWS:
        yield Text(f"  {MOST_ROWS} of {count}; --pictures draws all")
