"""The part "Machine": what a recipe takes and costs on a cluster, at each place of the page's sliders.

The answer has the plan, in figures and pictures, or why there is none with the nearest that can be.
`play/recorded.py` writes answers of a grid into a page that opens offline.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import product
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from fivefold.draw.canvas import STYLE
from fivefold.errors import UserError, did_you_mean, several
from fivefold.observe.format import duration, memory_text, short_number
from fivefold.observe.timelines import pipeline_svg, step_svg
from fivefold.observe.timelines import summary as step_words
from fivefold.recipe import Recipe, change, shipped, to_toml, tokens_before, total_steps
from fivefold.recipe.dial import SETTINGS, origin
from fivefold.recipe.load import FIRST
from fivefold.recipe.rules import allows
from fivefold.sharding.layout import Layout, to_text
from fivefold.sharding.layout_rules import nearest
from fivefold_plan.advice.budget import DAY, Questions
from fivefold_plan.advice.budget import answer as budget
from fivefold_plan.advice.explain import remedies, summary
from fivefold_plan.asked import read
from fivefold_plan.cluster import measured
from fivefold_plan.cluster.clusters import LOCAL, PRESETS
from fivefold_plan.cluster.devices import Cluster
from fivefold_plan.pages import pictures as drawn
from fivefold_plan.predict import Plan, predict, resolved
from fivefold_plan.search.search import apply
from fivefold_plan.setting import Software
from fivefold_plan.time.timeline import timeline
from fivefold_play.position import FIELDS, OPEN, Position, controls, layout_moved, moved, other, whole

if TYPE_CHECKING:
    from starlette.routing import Route

    from fivefold_play.state import Params, State

HERE = "This machine"
ROWS, MANY = 2, 8
"""Microbatches of a timeline. Of more context ranks, with their many messages, only one is shown."""
NARROW, WIDE = 330, 960  # pixels of a picture
MOST_WORDS = 2000  # characters of a request's field
SET = (*FIELDS.values(), *(setting.key for setting in SETTINGS))
"""Fields that a request may set."""
Near = dict[str, Any]
"""words: what a position changes. position: to go there."""


def answer(
    at: Position,
    moves: Mapping[str, str],
    width: int = WIDE,
    known: dict[Any, Any] | None = None,
    nearby: bool = True,
) -> dict[str, Any]:
    """What the page shows at a position behind moves (what: its value). known: as for `predict`. Without a plan it has
    a `problem`; without a `position` the moves lead nowhere. nearby: with the nearest positions that are valid and
    fit."""
    try:
        at, layout, base, machine = moved(at, moves)
    except UserError as error:
        return {"problem": _words(error), "nearest": []}
    here = at.device == LOCAL
    title = f"{HERE}, {several(at.devices, 'rank')}" if here else f"{at.devices:,} x {at.device}"
    found: dict[str, Any] = {"position": at.as_json(), "title": title, "here": here}
    found |= {"devices": at.devices, "measure": _rough(at)}
    found["controls"] = controls(at, base, machine, layout)
    try:
        recipe, machine, software = read(at.typed, at.layout)
        plan = predict(recipe, machine, software, known)
        if plan.service is not None:
            raise UserError('no pictures are drawn of a plan with sync.method = "server"')
        shown = _shown(at, recipe, plan, max(NARROW, min(width, WIDE)))
    except UserError as error:
        valid = _valid(at, base, layout, error) if nearby else []
        return found | {"problem": _words(error), "nearest": valid} | _said(at)
    near, problem = list[Near](), ""
    if not plan.fits:
        near = _smaller(at, recipe, plan, machine, software) if nearby else []
        problem = f"It does not fit: {memory_text(plan.peak_bytes)} of {memory_text(plan.limit)} per device."
        problem += (
            "" if near or not nearby else " Nothing near it does. More devices may, or the fastest that fits."
        )
    return found | shown | {"problem": problem, "nearest": near} | _said(at, apply(recipe, plan))


def _rough(at: Position) -> bool:
    """True for this machine, if it was not measured: its times are round numbers, and nobody knows its peak."""
    return at.device == LOCAL and measured.load() is None


def _words(error: UserError) -> str:
    return str(error).removeprefix("recipe: ")


def _shown(at: Position, recipe: Recipe, plan: Plan, width: int) -> dict[str, Any]:
    """Figures, pictures and tables of a plan."""
    s, found = plan.setting, drawn.pictures(plan)
    sequences, style = several(s.sizes.B, "sequence"), f"<style>{STYLE}</style>"
    fits = f"of {memory_text(plan.limit)}: {'fits' if plan.fits else 'does not fit'}"
    figures = [
        ("Step", drawn.duration_text(plan.step.seconds), f"{s.microbatches:,} x {sequences} per rank"),
        ("Tokens per second", f"{plan.tokens_per_s:,.0f}", f"{plan.tokens_per_s / plan.ranks:,.0f} per device"),
        ("MFU", "–" if _rough(at) else f"{plan.mfu:.1%}", f"in {s.mode}"),
        ("Memory per device", memory_text(plan.peak_bytes), fits),
        *_run(at, recipe, plan),
    ]  # fmt: skip
    return {
        "fits": plan.fits,
        "figures": figures,
        "pictures": [(n, note, svg.replace(style, "")) for n, note, svg in _pictures(found, width) if svg],
        "summary": summary(plan),
        "dial": _dial(recipe),
    }


def _run(at: Position, recipe: Recipe, plan: Plan) -> Iterator[tuple[str, str, str]]:
    """The whole run: its time, and what it costs."""
    tokens = float(tokens_before(recipe, total_steps(recipe)))
    price = float(at.price) if at.price else None
    costs = budget(plan, Questions(tokens, price=price))
    yield "Whole run", duration(costs["days"] * DAY), f"{short_number(tokens)} tokens"
    if "cost" in costs:
        hours = f"{short_number(costs['device_hours'])} device-hours"
        each = f"{hours}, {short_number(costs['cost_per_1e9_tokens'])} per 1B tokens"
        yield "Cost", short_number(costs["cost"]), each


def _pictures(found: drawn.Pictures, width: int) -> Iterator[tuple[str, str, str]]:
    """(name, what it shows, SVG)."""
    plan, wide = found.plan, max(width, 520)
    yield (
        "Memory per device",
        "A bar per place in the pipeline.",
        drawn.memory_svg(plan, "Memory per device", width),
    )
    yield (
        "Time of a step",
        "Of the rank that computes longest.",
        drawn.shares_svg(found, "Time of a step", width),
    )
    many = plan.setting.microbatches
    if found.timeline is not None:
        few = drawn.drawn_microbatches(found.timeline)
        ranks = drawn.shown(plan.layout.pp, False)
        note = f"{few} of {many} microbatches: {drawn.idle_words(plan, found.timeline)}."
        note += f" {len(ranks)} of {plan.layout.pp} ranks are drawn." * (len(ranks) < plan.layout.pp)
        yield "Timeline", note, pipeline_svg(found.timeline, "Timeline, planned", wide, shown=ranks)
    elif (line := timeline(plan.setting, rows := 1 if plan.layout.cp > MANY else ROWS)) is not None:
        note = f"A rank, {min(rows, many)} of {many} microbatches: {step_words(line)}."
        yield "Timeline", note, step_svg([("", line)], "Timeline of a step, planned", wide)
    yield (
        "Messages per step",
        "Bytes that leave a rank on each axis.",
        drawn.messages_svg(plan, "Messages", width),
    )
    roof = drawn.roofline_svg(found.roofline, plan.step.seconds, "Roofline", wide)
    yield "Roofline", "Each circle is an operation. Its size is its share of the step.", roof


def _dial(recipe: Recipe) -> list[tuple[str, str, str]]:
    """What the dial sets: field, value, where the value comes from."""
    full, rows = resolved(recipe), list[tuple[str, str, str]]()
    for key, *_ in SETTINGS:
        if (value := attrgetter(key)(full)) is not None:
            text = f"{value:,}" if isinstance(value, int) else f"{value:g}"
            rows.append((key, text, origin(recipe, key) or "the recipe"))
    return rows


def _said(at: Position, recipe: Recipe | None = None) -> dict[str, Any]:
    """The commands of a position, and its recipe."""
    words = [at.recipe, *(word for text in at.sets for word in ("--set", text))]
    words += ["--layout", at.layout]
    options = [word for name, value in at.given.items() for word in (name, f"{value:.12g}")]
    options += ["--software", at.software] if at.software else []
    options += ["--price", at.price] if at.price else []
    return {
        "command": shlex.join(["fivefold", "plan", *words, "--cluster", at.cluster, *options]),
        "train": shlex.join(["fivefold", "train", *words]),
        "toml": to_toml(recipe, comment=f"{at.layout}, planned for {at.cluster}") if recipe else "",
    }


def _difference(before: Layout, after: Layout) -> str:
    """What another layout changes, as `tp=2, dp=32`."""
    names = [name for name in vars(after) if getattr(before, name) != getattr(after, name)]
    shards = {"dp_replicate", "dp_shard"} & {*names} and "dp" not in names
    if shards and 1 in (after.dp_replicate, after.dp_shard):
        names = ["dp"] * (before.dp != after.dp) + [name for name in names if not name.startswith("dp_")]
    return ", ".join(f"{name}={str(getattr(after, name)).lower()}" for name in names)


def _valid(at: Position, base: Recipe, layout: Layout, error: UserError) -> list[Near]:
    """The nearest positions with a plan: other layouts, and fields that the message names."""
    near = nearest(layout, at.devices, 3, partial(allows, base))
    found = [(_difference(layout, one), replace(at, layout=to_text(one))) for one in near]
    for key, value in re.findall(r"([a-z]+\.[a-z_]+) = (\w+)", error.problems[0].nearest or ""):
        if name := next((name for name, own in FIELDS.items() if own == key), ""):
            found.append((f"{key} = {value}", at.to(name, value)))
    return [{"words": words, "position": one.as_json()} for words, one in found if one != at and _plan(one)]


def _plan(at: Position) -> Plan | None:
    with suppress(UserError):
        recipe, machine, software = read(at.typed, at.layout)
        return predict(recipe, machine, software)
    return None


def _smaller(at: Position, recipe: Recipe, plan: Plan, machine: Cluster, software: Software) -> list[Near]:
    """The nearest positions that fit: one thing changed (`remedies`), else more tensor or pipeline ranks. The fastest
    comes first."""
    own, there = plan.layout, list[tuple[str, Position]]()
    with suppress(UserError):
        for one in remedies(resolved(recipe), machine, software, plan.limit, not machine.on_cpu)[1]:
            if one.peak > plan.limit or one.layout:
                continue
            layout = Layout.from_recipe(change(recipe, list(one.sets)).layout)
            near = replace(at, layout=to_text(layout))
            fields = [text for text in one.sets if not text.startswith("layout.")]
            for text in fields:
                field, _, value = text.partition("=")
                near = near.to(next(name for name, own in FIELDS.items() if own == field), value)
            there.append((", ".join([*fields, *filter(None, [_difference(own, layout)])]), near))
    if not there:
        for axis, times in product(("tp", "pp"), (2, 4, 8)):
            size, full = times * getattr(own, axis), replace(own, recompute="full")
            layout, _ = layout_moved(full, plan.ranks, axis, str(size), recipe)
            there.append((_difference(own, layout), replace(at, layout=to_text(layout))))
    plans = [(words, near, found) for words, near in there if (found := _plan(near)) and found.fits]
    plans.sort(key=lambda one: one[2].step.seconds)
    return [
        {
            "words": f"{words} ({found.step.seconds / plan.step.seconds - 1:+.0%} time)",
            "position": near.as_json(),
        }
        for words, near, found in plans[:4]
    ]


def asked(given: Params, state: State) -> Position:
    """The position that a request names: of shipped recipes, runs of the page's folders, named devices, and the fields
    of the sliders. So no request reaches another file. Raises UserError: it names something else."""
    words = {
        key: str(given.get(key, ""))[:MOST_WORDS] for key in ("recipe", "sets", "layout", "cluster", "price")
    }
    recipe, sets = words["recipe"], tuple(filter(None, words["sets"].split("\n")))
    if recipe not in shipped():
        state.run(recipe.removesuffix("/recipe.toml"))
    for text in sets:
        if (key := text.partition("=")[0]) not in SET:
            raise UserError(f"--set {key[:60]}: the page sets {', '.join(SET)} only{did_you_mean(key, SET)}")
    if (device := words["cluster"].rpartition(":")[0]) not in (LOCAL, *PRESETS):
        raise UserError(f"cluster '{device[:60]}' is no device of the page{did_you_mean(device, PRESETS)}")
    at = Position(recipe, sets, words["layout"], words["cluster"])
    return other(at, "price", words["price"], 0)[0]


def searched(at: Position, state: State) -> dict[str, Any]:
    """The fastest layouts that `fivefold plan search` finds, as positions."""
    at = at.to("microbatch", OPEN)
    words = [word for text in at.sets for word in ("--set", text)]
    words = ["plan", "search", at.recipe, *words, "--cluster", at.cluster, "--top", "10"]
    found = state.commands.start("machine", words).result()
    rows = []
    for plan in found["plans"]:
        near = replace(at.to("microbatch", str(plan["microbatch_size"])), layout=plan["layout"])
        figures = f"{plan['tokens_per_s']:,.0f} tokens/s", memory_text(plan["memory"]["peak_bytes"])
        rows.append({"words": [plan["layout"], *figures], "position": near.as_json()})
    return {
        "words": f"The fastest of {found['considered']:,} layouts.",
        "nothing": found["nothing"],
        "rows": rows,
    }


def routes(state: State) -> list[Route]:
    from fivefold_play.state import get, post

    def start(given: Params) -> dict[str, Any]:
        """What the page begins with."""
        return {"recipe": FIRST, "measured": measured.load() is not None, "local": LOCAL}

    def plan(given: Params) -> dict[str, Any]:
        moves = {str(given["move"]): str(given.get("to", ""))[:MOST_WORDS]} if given.get("move") else {}
        width = whole("width", str(given.get("width") or WIDE))
        at = asked(given, state)
        if "recipe" in moves:
            there = {"recipe": moves["recipe"], "cluster": at.cluster, "price": at.price}
            at, moves = asked(there, state), {}
        return answer(at, moves, width)

    def measure(given: Params) -> dict[str, Any]:
        state.commands.start("machine", ["bench", "hardware"]).result()
        return {}

    return [
        get("/api/machine/start", start),
        get("/api/machine/plan", plan),
        post("/api/machine/search", lambda given: searched(asked(given, state), state)),
        post("/api/machine/measure", measure),
        post("/api/machine/stop", lambda given: state.commands.stop("machine") or {}),
    ]
