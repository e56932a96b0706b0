"""Draws the lessons: criteria of layouts as bars, when messages hide as curves, terms of a plan as bars. And the page
"5-D in a nutshell": what each dimension of parallelism divides, sends when and costs, and when its messages hide. It is
one HTML file without scripts that opens offline."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from html import escape

from fivefold.draw.canvas import NAMES, Axes, Canvas, log_scale, text_width
from fivefold.errors import printable
from fivefold.observe.format import asset, document, header, memory_text, short_number, size
from fivefold.observe.layout_picture import icons
from fivefold.observe.memory_picture import COLORS
from fivefold.observe.timelines import pipeline_svg, step_svg
from fivefold.recipe import Recipe, count_parameters
from fivefold.recipe.resolve import in_layout
from fivefold.recipe.rules import contradictions
from fivefold.sharding.layout import to_text
from fivefold.sharding.layout_rules import problems
from fivefold_plan.lessons.compare import DIMENSION_OF, TECHNIQUES, Row, alike
from fivefold_plan.lessons.compare import words as message_words
from fivefold_plan.lessons.overlap import Rule, count_text
from fivefold_plan.pages.pictures import timeline as pipeline_timeline
from fivefold_plan.predict import resolved
from fivefold_plan.time import timeline

WIDTH, LEFT, TOP, ROW = 860, 96, 108, 26  # pixels
PANEL, BAR = 255, 160  # a criterion, its longest bar
REASONS = {"operations": "activations", "recompute": "recompute", "sums": "sums", "update": "updates"}


def criteria(rows: Sequence[Row], title: str) -> str:
    """A line per layout: its redundant computing, memory and bytes sent as bars, what was measured as a ring."""
    canvas = Canvas(f"{title}, planned", width=WIDTH)
    plans = {number: row.plan for number, row in enumerate(rows) if row.plan}
    measured = {number: row.measured for number, row in enumerate(rows) if isinstance(row.measured, dict)}
    limit = next((plan.limit for plan in plans.values()), 0)
    redundant = {number: rows[number].redundant.parts for number in plans}
    held = {n: max(plan.memory, key=lambda rank: rank.total).as_json() for n, plan in plans.items()}
    sent = {number: plan.sent for number, plan in plans.items()}
    held_here = {n: float(figures.get("memory_bytes") or 0) for n, figures in measured.items()}
    sent_here = {n: float(sum((f.get("sent_bytes") or {}).values())) for n, f in measured.items()}
    reasons, axes = (dict(zip(kinds, NAMES, strict=False)) for kinds in (REASONS, DIMENSION_OF))
    for number, (name, colors, values, text, here, line) in enumerate(
        (
            ("Redundant computing", reasons, redundant, "{:.1%}".format, {}, 0),
            ("Peak memory", COLORS, held, memory_text, held_here, limit),
            ("Sent per step", axes, sent, size, sent_here, 0),
        )
    ):
        left = LEFT + number * PANEL
        keys = [(color, REASONS.get(kind, kind)) for kind, color in colors.items()]
        canvas.text(left, 48, name, "name")
        for first in range(0, len(keys), 2):
            canvas.legend(left, 66 + 8 * first, keys[first : first + 2])
        _bars(canvas, left, rows, colors, values, text, here, line)
    for number, row in enumerate(rows):
        y = TOP + number * ROW + 15
        canvas.text(LEFT - 10, y, row.technique, "end")
        if row.plan is None:
            canvas.text(LEFT, y, row.why if len(row.why) <= 110 else f"{row.why[:107]}...", "soft")
    notes = [f"red: memory of a device, {memory_text(limit)}"] * bool(limit)
    notes += ["rings: measured here"] * bool(measured)
    canvas.text(LEFT, TOP + len(rows) * ROW + 16, "; ".join(notes), "soft")
    return canvas.svg()


def _bars(
    canvas: Canvas,
    left: float,
    rows: Sequence[Row],
    colors: Mapping[str, str],
    values: Mapping[int, Mapping[str, float]],
    text: Callable[[float], str],
    measured: Mapping[int, float],
    limit: float,
) -> None:
    """A bar for each row with a plan. values: sizes of its parts, by number of the row. limit: where an upright line
    is, if a bar reaches it; 0: nowhere."""
    parts = {n: {kind: size for kind, size in of.items() if kind in colors} for n, of in values.items()}
    most = max([0, *(sum(sizes.values()) for sizes in parts.values())])
    scale = BAR / (max(most, *measured.values(), 0) or 1.0)
    line = left + scale * limit if 0 < limit <= most else -1.0
    for number, sizes in parts.items():
        name, y = rows[number].technique, TOP + number * ROW
        drawn = [(colors[kind], scale * size, f"{name}: {kind} {text(size)}") for kind, size in sizes.items()]
        canvas.bar(left, y, 20, drawn, text(sum(sizes.values())), line)
        if here := measured.get(number):
            canvas.circle("ring ink", left + scale * here, y + 10, 5, f"measured: {text(here)}")
    if line > 0:
        canvas.line("line limit", [(line, TOP - 4), (line, TOP + len(rows) * ROW + 4)])


CURVE, HIGH, GAP = 400, 190, 30  # pixels: a panel of a rule, with room for its words
KEYS = (("line limit", "the limit"), ("line now", "this recipe"), ("line blue", "planned"))


def overlap(rows: Sequence[Row], title: str) -> str:
    """A panel for each rule, two side by side."""
    canvas = Canvas(f"{title}, planned")
    canvas.legend(20, 48, KEYS)
    for number, rule in enumerate(rule for row in rows if row.plan for rule in row.rules):
        _rule(canvas, rule, 20 + number % 2 * (CURVE + 20), 64 + number // 2 * (HIGH + GAP))
    return canvas.svg()


def rule(one: Rule) -> str:
    canvas = Canvas(about=f"{one.technique}: {one.what}")
    canvas.legend(8, 18, KEYS)
    _rule(canvas, one, 8, 28)
    return canvas.svg()


def _rule(canvas: Canvas, rule: Rule, left: float, top: float) -> None:
    """Messages over computing by the size that decides, both logarithmic, with the limit and the recipe's own size."""
    points = [(x, ratio) for x, ratio in rule.points if ratio > 0]
    sizes, ratios = [x for x, _ in points] + [rule.now], [ratio for _, ratio in points] + [rule.limit]
    across = log_scale(min(sizes) / 1.3, max(sizes) * 1.3)
    across = replace(across, ticks=across.ticks[:: max(1, math.ceil(len(across.ticks) / 7))])
    up = log_scale(min(ratios) / 1.1, max(ratios) * 1.1)
    axes = Axes(left + 64, top + 40, left + CURVE - 14, top + HIGH - 22, across, up)
    canvas.text(left, top + 12, f"{rule.technique}: {rule.what}", "name")
    canvas.text(left, top + 28, f"{rule.variable}: {rule.threshold}; {rule.verdict}", "soft")
    canvas.levels(axes, _labels(up.ticks))
    canvas.columns(axes, _labels(across.ticks), rule.variable, lines=False)
    canvas.line("line limit", [axes.at((x, rule.limit)) for x in (across.low, across.high)])
    canvas.line("line now", [(axes.x(rule.now), axes.top), (axes.x(rule.now), axes.bottom)])
    canvas.line("line blue", map(axes.at, points))
    for x, ratio in points:
        canvas.circle("blue", *axes.at((x, ratio)), 3.5, f"{count_text(x)}: {ratio:.3g}")
    late = "idle" if rule.what.startswith("idle") else "messages"
    middle = (axes.top + axes.bottom) / 2
    canvas.text(left + 10, middle, f"{late} / computing", "soft middle small", turned=True)


def _labels(ticks: Sequence[float]) -> list[str]:
    return [f"{value / 1000:g}k" if value >= 1000 else f"{value:g}" for value in ticks]


STATES = {"params": "weights", "gradients": "gradients", "optimizer": "masters, moments"}
"""Words for each kind of state."""
ACTIVATIONS = {"activations": ""}
TERM, RIGHT = 28, 80  # pixels: a row of terms, room for a sum behind its bar


def terms(rows: Mapping[str, Mapping[str, float]], kinds: Mapping[str, str], title: str) -> str:
    """A bar for each row: its bytes of each kind side by side, and their sum. kinds: `STATES` or `ACTIVATIONS`."""
    width = 760
    canvas, left = Canvas(title, width=width), 32 + max(map(text_width, rows))
    scale = (width - left - RIGHT) / max(sum(row.values()) for row in rows.values())
    if len(kinds) > 1:
        canvas.legend(20, 46, [(COLORS[kind], words) for kind, words in kinds.items()])
    for number, (name, row) in enumerate(rows.items()):
        y = (60 if len(kinds) > 1 else 40) + TERM * number
        canvas.text(20, y + 15, name)
        parts = [
            (COLORS[kind], row[kind] * scale, f"{name}: {words} {scaled(row[kind])}")
            for kind, words in kinds.items()
        ]
        canvas.bar(left, y, 20, parts, scaled(sum(row.values())))
    return canvas.svg()


WORDS = {
    "data": (
        "Data",
        "Each rank has the whole model and its own sequences of the batch. Gradients are summed. ZeRO also divides "
        "what is kept: optimizer states (stage 1), gradients (2), weights (3).",
    ),
    "tensor": (
        "Tensor",
        "Each rank has a part of every matrix: columns of the first of two matmuls, rows of the second. All ranks "
        "compute the same tokens. With sequence parallelism they divide the tokens where no matrix is divided.",
    ),
    "context": (
        "Context",
        "Each rank has the whole model and a part of every sequence. Keys and values travel round a ring, so that each "
        "query meets all of them.",
    ),
    "pipeline": (
        "Pipeline",
        "Each rank has some of the blocks. Microbatches flow through the ranks, and gradients flow back.",
    ),
    "expert": (
        "Expert",
        "Each rank has some experts of every block. Tokens travel to their experts and back.",
    ),
}
DRAWN = ("DDP", "ZeRO-3", "TP", "CP", "PP", "EP")
"""Techniques of which ranks are drawn: others divide model and batch as one of these."""
FEW = (4, 2)
"""Ranks of a picture: the first number that divides the model."""


def page(recipe: Recipe, rows: Sequence[Row], title: str) -> str:
    """The page as HTML. rows: of `compare`. title: recipe and cluster."""
    title, full = printable(title), resolved(alike(recipe))
    lead = (
        f"A {full.model.arch} model of {short_number(count_parameters(full.model))} parameters: the five dimensions of "
        "parallelism, each alone, with the planner's predictions."
    )
    sections = ""
    for name in WORDS:
        if one_dimension := [row for row in rows if row.dimension == name]:
            sections += _section(full, name, one_dimension)
    body = f"""{header("5-D in a nutshell", title, lead)}<main>
<section aria-labelledby="h-criteria"><h2 id="h-criteria">Three criteria</h2>
<div class="wide">{criteria(rows, "Each layout")}</div>
{_costs(rows)}
<p class="aside">Redundant: work that one process would not do, as a share of its work. Sent: bytes that leave a
device per step. Exposed, idle: shares of the step that wait for messages, or for other stages.</p></section>
{sections}</main>"""
    return document(f"{title}: 5-D in a nutshell", body, asset("report.css") + asset("nutshell.css"), "")


def _section(recipe: Recipe, name: str, rows: Sequence[Row]) -> str:
    title, words = WORDS[name]
    planned = [row for row in rows if row.plan]
    parts = [f"<p>{escape(words)}</p>"]
    for row in rows:
        if row.why:
            shown = f" Shown: {row.short}." if row.plan else ""
            parts.append(f'<p class="aside">{escape(f"{row.technique}: {row.why}.{shown}")}</p>')
    parts += _divided(recipe, [row.technique for row in rows])
    if planned:
        parts += ["<h3>What it costs</h3>", _costs(planned), "<h3>What is sent when</h3>"]
        cells = [
            [row.technique, moment.when, message_words(moment), size(moment.size), f"{moment.times:,}"]
            for row in planned
            for moment in row.moments
        ]
        parts.append(_table(("", "When", "Messages", "Bytes", "?Times per step"), cells, (1, 2)))
        if drawn := _timeline(planned[-1]):
            parts.append(f'<div class="wide">{drawn}</div>')
        panels = "".join(f"<div>{rule(each)}</div>" for row in planned for each in row.rules)
        parts.append(
            '<h3>When it hides</h3><p class="aside">Seconds of messages over seconds of the computing beside them, by '
            f'the planner. Red: the limit. Dashed: this recipe.</p><div class="panels">{panels}</div>'
        )
    inside = "".join(parts)
    return f'<section aria-labelledby="h-{name}"><h2 id="h-{name}">{title} parallelism</h2>\n{inside}</section>\n'


def _divided(recipe: Recipe, names: Sequence[str]) -> Iterator[str]:
    """Pictures of what a few ranks have, on the first number of them that divides the model."""
    for technique in TECHNIQUES:
        if technique.name not in names or technique.name not in DRAWN:
            continue
        for ranks in FEW:
            layout = technique.layout(ranks, 1)
            changed = in_layout(recipe, layout)
            if layout.ep > 1 and not recipe.model.experts:
                continue
            if not any(problems(layout)) and not any(contradictions(changed)):
                yield f'<h3>What {escape(technique.name)} divides, on {to_text(layout)}</h3><div class="picture">'
                yield f"{icons(changed, layout, technique.name)}</div>"
                break


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], words: Sequence[int] = ()) -> str:
    """A table. Names that start with `?` are left out on a phone. words: columns of text."""

    def cell(tag: str, number: int, text: str) -> str:
        kinds = ["optional"] * head[number].startswith("?") + ["words"] * (number in words)
        kind = f' class="{" ".join(kinds)}"' if kinds else ""
        scope = ' scope="col"' if tag == "th" else ""
        return f"<{tag}{scope}{kind}>{escape(text)}</{tag}>"

    top = "".join(cell("th", number, name.removeprefix("?")) for number, name in enumerate(head))
    body = "".join(
        f"<tr>{''.join(cell('td', number, text) for number, text in enumerate(row))}</tr>\n" for row in rows
    )
    return f"<table><thead><tr>{top}</tr></thead><tbody>\n{body}</tbody></table>"


def _costs(rows: Sequence[Row]) -> str:
    head = ("", "?Layout", "Redundant", "Memory", "Fits", "?Exposed", "?Idle", "?Step, s", "?MFU", "Sent")
    cells = []
    for row in rows:
        figures = [*row.words().values(), size(sum(row.plan.sent.values()))] if row.plan else ["–"] * 8
        cells.append([row.technique, row.short.replace(",", ", "), *figures])
    return _table(head, cells, (1,))


def _timeline(row: Row) -> str:
    """A step of the technique: computing and messages of one microbatch, or the pipeline."""
    assert row.plan is not None
    s, title = row.plan.setting, f"{row.technique}: {row.short}, planned"
    if s.layout.pp > 1:
        stages = pipeline_timeline(row.plan)
        return pipeline_svg(stages, title) if stages else ""
    step = timeline.timeline(s, 1)
    words = "one microbatch and the update" if s.microbatches > 1 else "a step"
    return step_svg([(words, step)], title) if step else ""


def scaled(size: float, base: int = 1000, unit: str = "B") -> str:
    """Bytes with a prefix, decimal (base 1000, unit "B") or binary (1024, "iB"). Giga stays until ten tera: the papers'
    states are thousands of GB."""
    for prefix, power, least in (("T", 4, 10), ("G", 3, 1), ("M", 2, 0.1), ("K", 1, 0)):
        if size >= least * base**power:
            return f"{size / base**power:,.1f} {prefix}{unit}"
    raise AssertionError(size)
