"""What teaches. `fivefold compare RECIPE --cluster h100:64`: three criteria of each form of parallelism side by side,
and when their communication hides. `fivefold plan terms RECIPE --as paper`: what a plan's totals are made of, as papers
and courses count it."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from fivefold.cli import options
from fivefold.cli.options import flag, option, print_json
from fivefold.errors import UserError
from fivefold.observe.format import aligned, memory_text, size
from fivefold_plan.commands import budgets
from fivefold_plan.commands import plan as shared
from fivefold_plan.commands.bench import ensure_measured

if TYPE_CHECKING:
    from fivefold.recipe import Recipe
    from fivefold_plan.cluster.devices import Cluster
    from fivefold_plan.lessons.compare import Row
    from fivefold_plan.lessons.terms import Asked, Term


def compare(
    recipe: options.RecipeArgument,
    set_: options.SetOption = None,
    cluster: Annotated[
        str | None,
        option("NAME:DEVICES", "Cluster, as for `fivefold plan`. [default: h100, or local with --measure]"),
    ] = None,
    ranks: Annotated[int | None, option("N", "Ranks. [default: the cluster's, else a node]", min=1)] = None,
    layouts: Annotated[
        list[str] | None,
        option("'L L ...'", "Layouts instead of one per technique, separated by spaces. Repeatable."),
    ] = None,
    overlap: Annotated[bool, flag("Print when communication hides behind computing.", "--overlap")] = False,
    picture: Annotated[
        Path | None, option("FILE.svg", "Draw the criteria; with --overlap, its curves.")
    ] = None,
    page: Annotated[
        Path | None,
        option("FILE.html", 'Write "5-D in a nutshell": what each dimension divides, sends and costs.'),
    ] = None,
    measure: Annotated[bool, flag("Also run each layout here for a few steps.", "--measure")] = False,
    # At least 4 steps: the first two warm up, one is tracked and slower, and one is left
    steps: Annotated[int, option("N", "Steps that --measure runs.", min=4, max=1000)] = 6,
    json: options.JsonOption = False,
) -> None:
    """Compare forms of parallelism by redundant computing, peak memory and communication.

    There is a row for one device and for each technique at the cluster's size. Where a technique does not divide the
    model, its row says why and shows the most ranks that do. Time and MFU are predicted, too.
    """
    from fivefold.recipe import load
    from fivefold_plan.lessons import compare as compared
    from fivefold_plan.lessons import pictures

    options.require_writable(picture=picture, page=page)
    again = "none"  # of the recipe's layout only this counts, which may not go with --set, or not be whole without it
    for sets in ([], set_ or []):
        with suppress(UserError):
            again = load(recipe, sets).layout.recompute
    loaded = load(recipe, set_ or [], f"dp=1,recompute={again}")
    machine = _machine(cluster, ranks, measure)
    texts = [text for given in layouts or [] for text in given.split()]
    if layouts is not None and not texts:
        raise UserError("--layouts: no layout is named; write --layouts 'dp=8 tp=8', for example")
    rows = compared.compare(loaded, machine, machine.devices, texts)
    if measure:
        rows = _run(compared.alike(loaded), rows, steps)
    title = f"{Path(recipe).stem} on {machine.name}:{machine.devices}"
    if picture is not None:
        drawn = pictures.overlap if overlap else pictures.criteria
        options.save_as("--picture", picture, drawn(rows, title))
    if page is not None:
        options.save_as("--page", page, pictures.page(loaded, rows, title))
    if json:
        print_json({"recipe": recipe, "cluster": machine.name, "ranks": machine.devices,
                    "rows": [row.as_json(overlap) for row in rows]})  # fmt: skip
        return
    lines = overlap_table(rows, title) if overlap else criteria_table(rows, title)
    print("\n".join([*lines, *map(str, filter(None, (picture, page)))]))


def _machine(cluster: str | None, ranks: int | None, measure: bool) -> Cluster:
    """The cluster that the options ask for, with its number of devices: its own, `ranks`, or a node."""
    from fivefold.host import cores
    from fivefold_plan.cluster.clusters import parse

    named = cluster or ("local" if measure else "h100")
    if measure and named.partition(":")[0].lower() != "local":
        raise UserError(
            f"--measure runs the layouts here; leave --cluster {cluster} out, or write --cluster local"
        )
    ensure_measured(named)
    machine = parse(named)
    if ranks and machine.devices and ranks != machine.devices:
        raise UserError(
            f"--ranks {ranks}: --cluster {named} has {machine.devices} devices; leave one of them out"
        )
    count = machine.devices or ranks or (max(2, cores()) if machine.machine else machine.per_node)
    return replace(machine.for_ranks(count), devices=count)


def _run(recipe: Recipe, rows: list[Row], steps: int) -> list[Row]:
    """The rows with what was measured of their layouts."""
    from fivefold.sharding.layout import to_text
    from fivefold_plan.bench.machine import measure_layouts

    wanted = [row.plan.layout for row in rows if row.plan]
    found = {}
    for layout, figures in measure_layouts(recipe, list(dict.fromkeys(wanted)), steps):
        print(f"ran {to_text(layout)}", file=sys.stderr)
        found[layout] = figures
    return [replace(row, measured=found[row.plan.layout]) if row.plan else row for row in rows]


REASONS = {"operations": "norms", "recompute": "recompute", "sums": "sums", "update": "updates"}


def criteria_table(rows: list[Row], title: str) -> list[str]:
    """The criteria of each layout as a table, and what is to be said of some of them."""
    measured = any(row.measured for row in rows)
    head = ["", "layout", "redundant", "memory", "sent", "exposed", "idle", "step s", "MFU", "fits"]
    head += ["memory here", "sent here", "step s here"] * measured
    lines = [f"{title}: three criteria of each layout, predicted per device and step"]
    # What they have in common, or several values
    if settings := [row.plan.setting for row in rows if row.plan]:
        sizes = sorted({s.sizes.B for s in settings})
        words = f"microbatches of {' or '.join(map(str, sizes))} sequence{'s' * (sizes != [1])}"
        words += "".join({f" of {s.model.seq_len:,} tokens in {s.mode}" for s in settings})
        again = {s.layout.recompute for s in settings}
        lines.append(f"  {words}" + (f", recompute {again.pop()}" if len(again) == 1 else ""))
    table = [head]
    for row in rows:
        if row.plan is None:
            table.append([row.technique, row.short, "not possible"])
            continue
        words, (reason, most) = row.words(), max(row.redundant.parts.items(), key=lambda part: part[1])
        redundant = words["redundant"] + f" {REASONS[reason]}" * (most >= 0.0005)
        cells = [row.technique, row.short, redundant, words["memory"], _sent(row.sent(measured))]
        cells += [words[name] for name in ("exposed", "idle", "step", "mfu", "fits")]
        if measured:
            figures = row.measured if isinstance(row.measured, dict) else {}
            held, seconds = figures.get("memory_bytes"), figures.get("step_s")
            cells += [memory_text(held) if held else "-"]
            cells += [_sent(figures.get("sent_bytes") or {}) if figures else "-"]
            cells += [f"{seconds:.4g}" if seconds else "-"]
        table.append(cells)
    return [*lines, "", *_table(table, 2), "", *_notes(rows)]


def _table(rows: list[list[str]], words: int) -> list[str]:
    """Lines of a table. words: columns at the left that are text; the others are numbers. Rows may be short."""
    filled = [row + [""] * (len(rows[0]) - len(row)) for row in rows]
    return [f"  {line}".rstrip() for line in aligned(filled, range(words))]


def _sent(by_axis: Mapping[str, int]) -> str:
    return " + ".join(f"{axis} {size(most)}" for axis, most in by_axis.items()) or "nothing"


def _notes(rows: list[Row]) -> list[str]:
    """Sentences behind the table: what does not divide, what a word means."""
    lines = []
    for row in rows:
        if row.why:
            instead = f"; {row.short} is shown" if row.plan else ""
            lines.append(f"  {row.technique}: {row.why}{instead}")
        share, modules = row.undivided if row.plan else (0.0, [])
        if share:
            lines.append(
                f"  {row.technique}: {', '.join(modules)} ({share:.1%} of the parameters) are not cut by tp, so with "
                "sp each rank computes other tokens through them whole and keeps whole states"
            )
        if isinstance(row.measured, str):
            lines.append(f"  {row.technique}: was not measured: {row.measured}")
    return [
        *lines,
        "  redundant: work that one process would not do, as a share of its work, and the largest cause: norms and",
        "  other activations that all ranks have, recompute, sums of gradients, updates",
        "  sent: bytes that leave a device, by axis; exposed, idle: shares of the step that wait for messages, or for "
        "other stages",
    ]


def overlap_table(rows: list[Row], title: str) -> list[str]:
    from fivefold_plan.lessons.overlap import count_text

    cells = [["", "what hides", "by the size of", "from", "has", "now", ""]]
    for rule in (rule for row in rows if row.plan for rule in row.rules):
        now = [rule.threshold, count_text(rule.now), f"{rule.planned:.2g}", rule.verdict]
        cells.append([rule.technique, rule.what, rule.variable, *now])
    return [
        f"{title}: when communication hides behind computing",
        "",
        *_table(cells, len(cells[0])),
        "",
        "  from: the size from which messages take less time than the computing beside them, by the planner; has: the",
        "  recipe's; now: seconds of messages over those of computing",
    ]


FORMATS = {"parameters": ",.0f", "elements": ",.0f", "devices": ",.0f", "days": ",.1f", "FLOPs": ".3g"}
"""How values of other units than bytes are written."""


def terms(
    recipe: options.RecipeArgument,
    set_: options.SetOption = None,
    layout: options.LayoutOption = None,
    cluster: shared.ClusterOption = "h100",
    convention: Annotated[
        str,
        option(
            "CONVENTION",
            "paper: 2 + 2 + 12 bytes of states (arXiv 1910.02054), activations 34sbh + 5abs^2 (arXiv 2205.05198); "
            "fivefold: what the recipe really has.",
            "--as",
        ),
    ] = "fivefold",
    only: Annotated[
        str | None,
        option(
            "SECTIONS",
            "Of parameters, states, activations, flops, messages, bubble, by commas. [default: all]",
        ),
    ] = None,
    psi: Annotated[
        float | None, option("N", "Count with N parameters, such as 175e9, instead of the recipe's.")
    ] = None,
    flops: Annotated[
        float | None, option("RATE", "FLOP/s of a device, such as 160e12. [default: as predicted]")
    ] = None,
    tokens: budgets.TokensOption = None,
    deadline: budgets.DeadlineOption = None,
    svg: Annotated[
        Path | None, option("FILE", "Draw the states by ZeRO stage, the activations of a block.")
    ] = None,
    json: options.JsonOption = False,
) -> None:
    """Print what the totals of a plan are made of: name, formula, value and a remark of each term."""
    from fivefold_plan.asked import Typed
    from fivefold_plan.lessons import terms as counting
    from fivefold_plan.lessons.terms import CONVENTIONS
    from fivefold_plan.predict import predict

    sections = only.split(",") if only is not None else list(counting.SECTIONS)
    options.require_known("--as", [convention], CONVENTIONS)
    options.require_known("--only", sections, counting.SECTIONS)
    for name, number in (("flops", flops), ("psi", psi)):
        if number is not None and not 0 < number < float("inf"):
            raise UserError(f"--{name} {number:g}: must be above 0 and finite")
    options.require_writable(svg=svg)
    loaded, machine, software = shared.read(Typed(recipe, set_ or [], cluster), layout)
    run = budgets.Asked(tokens, deadline).of(loaded)
    budget = (run.tokens, run.deadline) if run else (budgets.run_tokens(loaded), None)
    asked = counting.Asked(predict(loaded, machine, software), convention, *budget, psi, flops)
    found = counting.terms(asked, sections)
    if svg is not None:
        options.save_as("--svg", svg, _drawn(asked, sections, Path(recipe).stem))
    if json:
        values = {name: {term.name: term.as_json() for term in some} for name, some in found.items()}
        print_json({"recipe": recipe, "convention": convention, "psi": psi, "svg": svg} | values)
        return
    print("\n".join([f"{recipe}: terms, as {convention}", *_lines(found), *([str(svg)] if svg else [])]))


def _lines(found: dict[str, list[Term]]) -> Iterator[str]:
    for section, its_terms in found.items():
        yield from ("", f"  {section}")
        rows = [[term.name, term.formula, _value(term), term.note] for term in its_terms]
        yield from (f"    {line}" for line in aligned(rows, (0, 1, 3)))


def _value(term: Term) -> str:
    """A value with its unit. Bytes are decimal, as in the papers, and binary, as in the rest of a plan."""
    from fivefold_plan.lessons.pictures import scaled

    value = term.value
    match term.unit:
        case "bytes":
            return f"{scaled(value)} ({scaled(value, 1024, 'iB')})"
        case "share":
            return f"{100 * value:.1f}%"
        case "FLOP/s":
            return f"{value / 1e12:,.4g} TFLOP/s"
        case unit:
            return f"{value:{FORMATS.get(unit, '.4g')}} {unit}"


def _drawn(asked: Asked, sections: list[str], name: str) -> str:
    """The pictures of these sections, one under the other."""
    from fivefold.draw.canvas import stacked
    from fivefold.observe.format import short_number
    from fivefold_plan.lessons import pictures
    from fivefold_plan.lessons.terms import activations_by_way, sharing, states_by_stage

    drawn = []
    if "states" in sections:
        of = f"{short_number(asked.symbols['Psi'])} parameters, n = {sharing(asked.setting.layout)}"
        title = f"{name}: states of {of} by formula, as {asked.convention}"
        drawn.append(pictures.terms(states_by_stage(asked), pictures.STATES, title))
    if "activations" in sections:
        sizes = ", ".join(f"{key} {asked.symbols[key]:g}" for key in "sbhat")
        rows = {words: {"activations": size} for words, size in activations_by_way(asked).items()}
        title = f"{name}: activations of a block by formula, {sizes}, as {asked.convention}"
        drawn.append(pictures.terms(rows, pictures.ACTIVATIONS, title))
    if not drawn:
        raise UserError("--svg draws states and activations; add one of them to --only")
    return stacked(drawn) if len(drawn) > 1 else drawn[0]
