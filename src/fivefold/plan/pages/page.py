"""The page of a plan: one HTML file that opens offline, with sliders over a grid of predictions (plan/pages/grid.py).

Everything from outside (the recipe's name, messages) is escaped; see `document`. Without scripts the page shows
pictures of the recipe's own plan.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from fivefold.errors import printable
from fivefold.observe.format import asset, document, header, memory_text
from fivefold.plan.predict import Plan
from fivefold.sharding.layout import to_text

FIGURES = (("step", "Step"), ("speed", "Tokens per second"), ("mfu", "MFU"), ("peak", "Memory per device"))


def page(name: str, words: str, data: Mapping[str, Any], pictures: Sequence[str]) -> str:
    """The page as HTML.

    name: the recipe's. words: the plan in a sentence. data: from `grid.as_data`; its `search` has the limit and the
    rows of a search's frontier, or is None. pictures: SVG documents for browsers without scripts.
    """
    name, words = printable(name), printable(words)
    # JSON that cannot end the HTML element around it
    embedded = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    sliders = "".join(
        f'<div class="slider"><label for="s-{axis["key"]}">{escape(axis["label"])}</label>'
        f'<output id="o-{axis["key"]}" for="s-{axis["key"]}">{axis["values"][axis["at"]]:,}</output>'
        f'<input type="range" id="s-{axis["key"]}" min="0" max="{len(axis["values"]) - 1}" value="{axis["at"]}" '
        f'autocomplete="off"{" disabled" * (len(axis["values"]) == 1)}></div>\n'
        for axis in data["axes"]
    )
    figures = "".join(
        f'<div><dt>{label}</dt><dd><span id="{key}">–</span>'
        f"{'<small id=room></small>' if key == 'peak' else ''}</dd></div>\n"
        for key, label in FIGURES
    )
    body = f"""{header("Plan", name, words)}<main>
<form class="sliders" aria-label="Sizes" autocomplete="off">
{sliders}<button type="button" id="own">As in the recipe</button></form>
<div>
<div class="now"><dl class="figures">
{figures}</dl></div>
<p class="alarm" id="problem" role="alert" hidden></p>
<p class="layout needs" id="layout"></p>
<noscript><p>The sliders need this page's own script. Below is the recipe as it is.</p>
{"".join(f'<div class="wide">{picture}</div>' for picture in pictures)}</noscript>
<div class="needs">
{_sections(data)}</div>
</div>
</main>
<script type="application/json" id="data">{embedded}</script>"""
    style = asset("report.css") + asset("plan.css")
    return document(f"{name}: plan", body, style, asset("plan.js"))


def _section(title: str, note: str, body: str) -> str:
    name = title.lower().replace(" ", "-")
    words = f'<p class="aside">{note}</p>\n' if note else ""
    return f'<section aria-labelledby="h-{name}"><h2 id="h-{name}">{title}</h2>\n{words}{body}\n</section>\n'


def _sections(data: Mapping[str, Any]) -> str:
    kinds = [("F", "forward"), ("B", "backward"), ("I", "input gradient"), ("W", "weight gradient")]
    timeline = f'{_keys(kinds)}<div class="picture" id="timeline"></div><p class="note" id="drawn"></p>'
    parts = [
        _section(
            "Memory",
            "One bar per place in the pipeline, for one device. Red: usable memory.",
            _keys([(kind, kind) for kind in data["memory"]]) + '<div class="rows" id="memory"></div>',
        ),
        _section(
            "Time of a step",
            "For the rank that computes longest.",
            '<div class="rows shares" id="shares"></div>',
        ),
        f'<div id="pipeline">{_section("Timeline", "", timeline)}</div>',
        _section(
            "Roofline",
            "Each circle is an operation of the model. Its size is its share of the step. Left of the bend operations "
            "are memory-bound, right of it compute-bound. Both limits come from the data sheet, or for this machine "
            "from measurements.",
            _keys([("compute", "compute-bound"), ("memory", "memory-bound")])
            + '<div class="picture" id="roofline"></div>'
            + _table(("Operation", "FLOP per byte", "?Reached", "Share of step", "Bound by"), "operations"),
        ),
        _section(
            "Throughput against memory",
            "Each dot is a layout with a microbatch. The line joins the fastest layout for each memory. The ring marks "
            "the sliders' position.",
            '<div class="picture" id="frontier"></div><p class="note" id="reach"></p>'
            + _table(("Layout", "Tokens/s", "Memory", '<span class="sr">Show</span>'), "best"),
        ),
    ]
    if data["search"]:
        rows = "".join(
            f'<tr><td class="words">{escape(row["words"]).replace(",", ",<wbr>")}</td>'
            f"<td>{row['tokens_per_s']:,.0f}</td><td>{memory_text(row['peak'])}</td></tr>\n"
            for row in reversed(data["search"]["rows"])
        )
        note = (
            "Valid layouts of the recipe's sizes. No other layout beats one of them in both memory and speed."
        )
        table = _table(("Layout", "Tokens/s", "Memory"), "found", rows)
        parts.append(_section("Found by the search", note, f'<div class="picture" id="search"></div>{table}'))
    command = '<pre id="command" tabindex="0"></pre>'
    parts.append(_section("The same in the terminal", "", command))
    values = "".join(
        f"<dt>{escape(axis['label'])}</dt><dd>{', '.join(f'{v:,}' for v in axis['values'])}</dd>\n"
        for axis in data["axes"]
    )
    valid = sum(not message for message in data["index"])
    grid = (
        f"<p>All {len(data['index']):,} combinations of these values were predicted when this page was written; "
        f"{valid:,} are valid. Nothing is interpolated. Heads and the feed-forward width grow with the width. Data "
        f'parallelism uses the remaining devices.</p>\n<dl class="facts">\n{values}</dl>'
    )
    return "".join([*parts, _section("What the sliders show", "", grid)])


def _keys(kinds: Sequence[tuple[str, str]]) -> str:
    keys = "".join(f'<li><i class="{kind}"></i>{escape(words)}</li>' for kind, words in kinds)
    return f'<ul class="keys">{keys}</ul>'


def _table(columns: Sequence[str], body: str, rows: str = "") -> str:
    """A table. columns: names; those starting with `?` are left out on a phone. rows: HTML."""
    head = "".join(
        f'<th scope="col"{" class=optional" * name.startswith("?")}>{name.removeprefix("?")}</th>'
        for name in columns
    )
    return f'<table><thead><tr>{head}</tr></thead><tbody id="{body}">{rows}</tbody></table>'


def as_rows(plans: Sequence[Plan]) -> list[dict[str, Any]]:
    """Rows of the page's table, one per plan."""
    return [
        {
            "peak": plan.peak_bytes,
            "tokens_per_s": plan.tokens_per_s,
            "words": f"{to_text(plan.layout)}, microbatch {plan.setting.sizes.B}",
        }
        for plan in plans
    ]
