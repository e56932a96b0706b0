"""The page "5-D in a nutshell": what each dimension of parallelism divides, what it sends when, what it costs, and when
its messages hide. One HTML file without scripts that opens offline."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from fivefold.errors import printable
from fivefold.lessons import pictures
from fivefold.lessons.compare import TECHNIQUES, Row, Technique, alike, by_dimension
from fivefold.lessons.criteria import words
from fivefold.observe.format import asset, document, short_number, size
from fivefold.observe.layout_picture import icons
from fivefold.observe.timelines import pipeline_svg, step_svg
from fivefold.plan.pages.pictures import timeline as pipeline_timeline
from fivefold.plan.predict import resolved
from fivefold.plan.time import timeline
from fivefold.recipe import Recipe, count_parameters
from fivefold.recipe.fit import in_layout
from fivefold.recipe.rules import contradictions
from fivefold.sharding.layout import Layout
from fivefold.sharding.layout_rules import problems
from fivefold.sharding.layout_text import to_text

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
    sections = "".join(_section(full, name, found) for name, found in by_dimension(rows) if found)
    body = f"""<header>
<p class="kicker">5-D in a nutshell</p>
<h1>{escape(title)}</h1>
<p class="lead">{escape(lead)}</p>
</header>
<main>
<section aria-labelledby="h-criteria"><h2 id="h-criteria">Three criteria</h2>
<div class="wide">{pictures.criteria(rows, "")}</div>
{_costs(rows)}
<p class="aside">Redundant: work that one process would not do, as a share of its work. Sent: bytes that leave a
device per step. Exposed, idle: shares of the step that wait for messages, or for other stages.</p></section>
{sections}</main>"""
    return document(f"{title}: 5-D in a nutshell", body, asset("report.css") + asset("nutshell.css"), "")


def _section(recipe: Recipe, name: str, rows: Sequence[Row]) -> str:
    title, words = WORDS[name]
    there = [row for row in rows if row.plan]
    parts = [f"<p>{escape(words)}</p>", *_notes(rows), *_divided(recipe, rows)]
    if there:
        parts += ["<h3>What it costs</h3>", _costs(there), "<h3>What is sent when</h3>", *_sent(there)]
        parts += ["<h3>When it hides</h3>", _hides(there)]
    inside = "".join(parts)
    return f'<section aria-labelledby="h-{name}"><h2 id="h-{name}">{title} parallelism</h2>\n{inside}</section>\n'


def _notes(rows: Sequence[Row]) -> Iterator[str]:
    for row in rows:
        if row.why:
            shown = f" Shown: {row.short}." if row.plan else ""
            yield f'<p class="aside">{escape(f"{row.technique}: {row.why}.{shown}")}</p>'


def _divided(recipe: Recipe, rows: Sequence[Row]) -> Iterator[str]:
    """Pictures of what a few ranks have."""
    names = [row.technique for row in rows]
    for technique in TECHNIQUES:
        if technique.name in names and technique.name in DRAWN and (found := _few(recipe, technique)):
            layout = to_text(found[1])
            yield f'<h3>What {escape(technique.name)} divides, on {layout}</h3><div class="picture">'
            yield f"{icons(*found, technique.name)}</div>"


def _few(recipe: Recipe, technique: Technique) -> tuple[Recipe, Layout] | None:
    """The recipe and a layout of the technique for a picture; None if the model has none."""
    for ranks in FEW:
        layout = technique.layout(ranks, 1)
        if layout.ep > 1 and not recipe.model.experts:
            return None
        changed = in_layout(recipe, layout)
        if not any(problems(layout)) and not any(contradictions(changed)):
            return changed, layout
    return None


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
    cells = [[row.technique, row.short.replace(",", ", "), *_criteria(row)] for row in rows]
    return _table(head, cells, (1,))


def _criteria(row: Row) -> list[str]:
    if row.plan is None:
        return ["–"] * 8
    return [*row.words().values(), size(sum(row.plan.sent.values()))]


def _sent(rows: Sequence[Row]) -> Iterator[str]:
    cells = [
        [row.technique, moment.when, words(moment), size(moment.size), f"{moment.times:,}"]
        for row in rows
        for moment in row.moments
    ]
    head = ("", "When", "Messages", "Bytes", "?Times per step")
    yield _table(head, cells, (1, 2))
    if drawn := _timeline(rows[-1]):
        yield f'<div class="wide">{drawn}</div>'


def _timeline(row: Row) -> str:
    """A step of the technique: computing and messages of one microbatch, or the pipeline."""
    assert row.plan is not None
    s = row.plan.setting
    if s.layout.pp > 1:
        found = pipeline_timeline(row.plan)
        return pipeline_svg(found, f"{row.technique}: {row.short}") if found else ""
    found = timeline.timeline(s, 1)
    title = f"{row.technique}: {row.short}"
    words = "one microbatch and the update" if s.microbatches > 1 else "a step"
    return step_svg([(words, found)], title) if found else ""


def _hides(rows: Sequence[Row]) -> str:
    panels = "".join(f"<div>{pictures.rule(rule)}</div>" for row in rows for rule in row.rules)
    return (
        '<p class="aside">Seconds of messages over seconds of the computing beside them, by the planner. Red: the '
        f'limit. Dashed: this recipe.</p><div class="panels">{panels}</div>'
    )
