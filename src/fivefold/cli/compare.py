"""`fivefold compare RECIPE --cluster h100:64`: three criteria of each form of parallelism side by side, and when their
communication hides."""

from __future__ import annotations

import math
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fivefold.cli.local import ensure_measured
from fivefold.cli.options import JsonOption, RecipeArgument, SetOption, print_json, require_writable
from fivefold.errors import UserError
from fivefold.files import write

if TYPE_CHECKING:
    from fivefold.plan.compare import Row
    from fivefold.plan.devices import Cluster
    from fivefold.plan.overlap_rules import Rule
    from fivefold.recipe import Recipe

EXAMPLES = [
    "fivefold compare llama-7b --cluster h100:8",
    "fivefold compare llama-7b --cluster h100:64 --layouts 'dp=64,zero=3 dp=8,tp=8,sp=true pp=8,dp=8'",
    "fivefold compare llama-7b --cluster h100:8 --overlap --picture overlap.svg",
    "fivefold compare mixtral-8x7b --cluster h100:8 --page nutshell.html",
    "fivefold compare quickstart --ranks 2 --measure",
]
REASONS = {"operations": "norms", "recompute": "recompute", "sums": "sums", "update": "updates"}


def compare(
    recipe: RecipeArgument,
    set_: SetOption = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            "--cluster",
            metavar="NAME:DEVICES",
            help="Cluster, as for `fivefold plan`. [default: h100, or local with --measure]",
            show_default=False,
        ),
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option(
            min=1, help="Number of ranks. [default: the cluster's, else a node]", show_default=False
        ),
    ] = None,
    layouts: Annotated[
        list[str] | None,
        typer.Option(
            metavar="'L L ...'",
            help="Layouts instead of one per technique, separated by spaces. Repeatable.",
            show_default=False,
        ),
    ] = None,
    overlap: Annotated[
        bool, typer.Option("--overlap", help="Print when communication hides behind computing.")
    ] = False,
    picture: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.svg", help="Draw the criteria; with --overlap, its curves.", show_default=False
        ),
    ] = None,
    page: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.html",
            help='Write "5-D in a nutshell": what each dimension divides, sends and costs.',
            show_default=False,
        ),
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Also run each layout here for a few steps.")
    ] = False,
    steps: Annotated[int, typer.Option(min=4, max=1000, help="Steps that --measure runs.")] = 6,
    json: JsonOption = False,
) -> None:
    """Compare forms of parallelism by redundant computing, peak memory and communication.

    There is a row for one device and for each technique at the cluster's size. Where a technique does not divide the
    model, its row says why and shows the most ranks that do. Time and MFU are predicted, too.
    """
    from fivefold.plan import compare as compared
    from fivefold.recipe import load

    for option, path in (("--picture", picture), ("--page", page)):
        require_writable(option, path)
    named = cluster or ("local" if measure else "h100")
    if measure and named.partition(":")[0].lower() != "local":
        raise UserError(
            f"--measure runs the layouts here; leave --cluster {named} out, or write --cluster local"
        )
    ensure_measured(named)
    again = _recompute(recipe, set_ or [])  # of the recipe's layout, only this counts
    loaded, machine = load(recipe, set_ or [], f"dp=1,recompute={again}"), _sized(named, ranks)
    texts = [text for given in layouts or [] for text in given.split()]
    if layouts is not None and not texts:
        raise UserError("--layouts: no layout is named; write --layouts 'dp=8 tp=8', for example")
    rows = compared.compare(loaded, machine, machine.devices, texts)
    if measure:
        rows = _run(compared.alike(loaded), rows, steps)
    title = f"{Path(recipe).stem} on {machine.name}:{machine.devices}"
    if picture is not None:
        _write("--picture", picture, _drawn(rows, title, overlap))
    if page is not None:
        from fivefold.plan.pages.nutshell import page as nutshell

        _write("--page", page, nutshell(loaded, rows, title))
    if json:
        print_json({"recipe": recipe, "cluster": machine.name, "ranks": machine.devices,
                    "rows": [row.as_json(overlap) for row in rows]})  # fmt: skip
        return
    print("\n".join(_overlap(rows, title) if overlap else _table(rows, title)))
    for path in (picture, page):
        if path is not None:
            print(path)


def _recompute(recipe: str, sets: list[str]) -> str:
    """The recipe's mode of recomputation. Its layout may not go with --set, or the recipe not be whole without it."""
    from fivefold.recipe import load

    for some in (sets, []):
        with suppress(UserError):
            return load(recipe, some).layout.recompute
    return "none"


def _sized(named: str, ranks: int | None) -> Cluster:
    """The cluster with its number of devices: its own, `ranks`, or a node."""
    from fivefold.host import cores
    from fivefold.plan.clusters import parse

    machine = parse(named)
    if ranks and machine.devices and ranks != machine.devices:
        raise UserError(
            f"--ranks {ranks}: --cluster {named} has {machine.devices} devices; leave one of them out"
        )
    count = machine.devices or ranks or (max(2, cores()) if machine.machine else machine.per_node)
    return replace(machine.for_ranks(count), devices=count)


def _run(recipe: Recipe, rows: list[Row], steps: int) -> list[Row]:
    """The rows with what was measured of their layouts."""
    from fivefold.bench.layouts import measure
    from fivefold.spread.layout_text import to_text

    wanted = [row.plan.layout for row in rows if row.plan]
    found = {}
    for layout, figures in measure(recipe, list(dict.fromkeys(wanted)), steps):
        print(f"ran {to_text(layout)}", file=sys.stderr)
        found[layout] = figures
    return [replace(row, measured=found[row.plan.layout]) if row.plan else row for row in rows]


def _drawn(rows: list[Row], title: str, overlap: bool) -> str:
    from fivefold.plan.pages import criteria_svg

    return criteria_svg.overlap(rows, title) if overlap else criteria_svg.criteria(rows, title)


def _write(option: str, path: Path, text: str) -> None:
    try:
        write(path, text)
    except OSError as error:
        raise UserError(f"{option} {path}: cannot be written: {error.strerror}") from None


def _table(rows: list[Row], title: str) -> list[str]:
    """The criteria of each layout as a table, and what is to be said of some of them."""
    measured = any(row.measured for row in rows)
    head = ["", "layout", "redundant", "memory", "sent", "exposed", "idle", "step s", "MFU", "fits"]
    if measured:
        head += ["memory here", "sent here", "step s here"]
    cells = [head, *(_cells(row, measured) for row in rows)]
    widths = [max(len(row[i]) for row in cells if i < len(row)) for i in range(len(head))]
    lines = [f"{title}: three criteria of each layout, predicted per device and step"]
    if any(row.plan for row in rows):
        lines.append(f"  {_setting(rows)}")
    lines.append("")
    for row in cells:
        aligned = (
            f"{cell:{width}}" if i < 2 else f"{cell:>{width}}"
            for i, (cell, width) in enumerate(zip(row, widths, strict=False))
        )
        lines.append(f"  {'  '.join(aligned)}".rstrip())
    return [*lines, "", *_notes(rows)]


def _setting(rows: list[Row]) -> str:
    """What the layouts have in common, or several values of it."""
    settings = [row.plan.setting for row in rows if row.plan]
    sizes = sorted({s.sizes.B for s in settings})
    words = f"microbatches of {' or '.join(map(str, sizes))} sequence{'s' * (sizes != [1])}"
    words += "".join({f" of {s.model.seq_len:,} tokens in {s.mode}" for s in settings})
    again = {s.layout.recompute for s in settings}
    return words + (f", recompute {again.pop()}" if len(again) == 1 else "")


def _cells(row: Row, measured: bool) -> list[str]:
    from fivefold.observe.format import memory_text, size

    plan = row.plan
    if plan is None:
        return [row.technique, row.short, "not possible"]
    most = max(row.redundant.parts.items(), key=lambda part: part[1])
    reason = f" {REASONS[most[0]]}" if most[1] >= 0.0005 else ""
    cells = [
        row.technique,
        row.short,
        f"{row.redundant.share:.1%}{reason}",
        memory_text(plan.peak_bytes),
        " + ".join(f"{axis} {size(most)}" for axis, most in row.sent(measured).items()) or "nothing",
        f"{row.exposed:.1%}",
        f"{row.idle:.1%}",
        f"{plan.step.seconds:.4g}",
        f"{plan.mfu:.1%}",
        "yes" if plan.fits else "no",
    ]
    if not measured:
        return cells
    if not isinstance(row.measured, dict):
        return [*cells, "-", "-", "-"]
    return cells + _here(row.measured)


def _here(figures: dict[str, Any]) -> list[str]:
    """What was measured, as cells."""
    from fivefold.observe.format import memory_text, size

    held, seconds, sent = (figures.get(name) for name in ("memory_bytes", "step_s", "sent_bytes"))
    return [
        memory_text(held) if held else "-",
        " + ".join(f"{axis} {size(most)}" for axis, most in (sent or {}).items()) or "nothing",
        f"{seconds:.4g}" if seconds else "-",
    ]


def _notes(rows: list[Row]) -> list[str]:
    """Sentences behind the table: what does not divide, what a word means."""
    lines = []
    for row in rows:
        if row.why:
            instead = f"; {row.short} is shown" if row.plan else ""
            lines.append(f"  {row.technique}: {row.why}{instead}")
        if isinstance(row.measured, str):
            lines.append(f"  {row.technique}: was not measured: {row.measured}")
    return [
        *lines,
        "  redundant: computing that one process would not do, beside what it does, with its largest reason: norms and",
        "  other activations that all ranks have, recompute, sums of gradients, updates",
        "  sent: bytes that leave a device, by axis; exposed, idle: shares of the step that wait for messages, or for "
        "other stages",
    ]


def _overlap(rows: list[Row], title: str) -> list[str]:
    """The rules of all layouts as a table, and their formulas."""
    from fivefold.observe.format import short_number

    cells = [("", "what hides", "needs", "planner", "has", "now", "")]
    for row in rows:
        for rule in row.rules if row.plan else ():
            cells.append(
                (
                    rule.technique,
                    rule.what,
                    f"{rule.variable} >= {_count(rule.needed)}",
                    _crossing(rule),
                    _count(rule.now),
                    f"{rule.planned:.2g}",
                    rule.verdict,
                )
            )
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    lines = [f"{title}: when communication hides behind computing", ""]
    for row in cells:
        lines.append("  " + "  ".join(f"{c:{w}}" for c, w in zip(row, widths, strict=True)).rstrip())
    lines += ["", "  formulas with the numbers of this cluster, and where they come from:"]
    for rule in (rule for row in rows if row.plan for rule in row.rules):
        symbols = ", ".join(f"{name} {short_number(value)}" for name, value in rule.inputs.items())
        lines.append(f"    {rule.technique}: {rule.formula}; {symbols}; {rule.source}")
    return [
        *lines,
        "  needs: by the formula; planner: with all that it prices; now: seconds of messages over those of computing",
        "  F: FLOP/s of matmuls (CP: of attention). W, W': bytes/s of the collectives of weights and of gradients.",
        "  e, g: bytes of a number, of a gradient. P: parameters sent. A: those that multiply a token. n: ranks.",
    ]


def _crossing(rule: Rule) -> str:
    """The planner's threshold, or the end of the sizes that it was asked for."""
    sizes = [size for size, _ in rule.points]
    if not rule.crossing:
        return f"< {_count(min(sizes))}"
    return _count(rule.crossing) if math.isfinite(rule.crossing) else f"> {_count(max(sizes))}"


def _count(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
