"""`fivefold compare RECIPE --cluster h100:64`: three criteria of each form of parallelism side by side, and when their
communication hides."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from fivefold.cli.bench import ensure_measured
from fivefold.cli.options import (
    JsonOption,
    RecipeArgument,
    SetOption,
    flag,
    option,
    print_json,
    require_writable,
    save_as,
)
from fivefold.errors import UserError
from fivefold.observe.format import aligned, memory_text, size

if TYPE_CHECKING:
    from fivefold.lessons.compare import Row
    from fivefold.plan.cluster.devices import Cluster
    from fivefold.recipe import Recipe

EXAMPLES = [
    "fivefold compare llama-7b --cluster h100:8",
    "fivefold compare llama-7b --cluster h100:64 --layouts 'dp=64,zero=3 dp=8,tp=8,sp=true pp=8,dp=8'",
    "fivefold compare llama-7b --cluster h100:8 --overlap --picture overlap.svg",
    "fivefold compare mixtral-8x7b --cluster h100:8 --page nutshell.html",
    "fivefold compare quickstart --ranks 2 --measure",
]


def compare(
    recipe: RecipeArgument,
    set_: SetOption = None,
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
    json: JsonOption = False,
) -> None:
    """Compare forms of parallelism by redundant computing, peak memory and communication.

    There is a row for one device and for each technique at the cluster's size. Where a technique does not divide the
    model, its row says why and shows the most ranks that do. Time and MFU are predicted, too.
    """
    from fivefold.lessons import compare as compared
    from fivefold.lessons import pictures
    from fivefold.recipe import load

    for name, path in (("--picture", picture), ("--page", page)):
        require_writable(name, path)
    named = _named(cluster, measure)
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
        drawn = pictures.overlap if overlap else pictures.criteria
        save_as("--picture", picture, drawn(rows, title))
    if page is not None:
        save_as("--page", page, pictures.page(loaded, rows, title))
    if json:
        print_json({"recipe": recipe, "cluster": machine.name, "ranks": machine.devices,
                    "rows": [row.as_json(overlap) for row in rows]})  # fmt: skip
        return
    print("\n".join(overlap_table(rows, title) if overlap else criteria_table(rows, title)))
    for path in (picture, page):
        if path is not None:
            print(path)


def _named(cluster: str | None, measure: bool) -> str:
    """The cluster that --cluster and --measure ask for."""
    if not measure:
        return cluster or "h100"
    if cluster is not None and cluster.partition(":")[0].lower() != "local":
        raise UserError(
            f"--measure runs the layouts here; leave --cluster {cluster} out, or write --cluster local"
        )
    return cluster or "local"


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
    from fivefold.plan.cluster.clusters import parse

    machine = parse(named)
    if ranks and machine.devices and ranks != machine.devices:
        raise UserError(
            f"--ranks {ranks}: --cluster {named} has {machine.devices} devices; leave one of them out"
        )
    count = machine.devices or ranks or (max(2, cores()) if machine.machine else machine.per_node)
    return replace(machine.for_ranks(count), devices=count)


def _run(recipe: Recipe, rows: list[Row], steps: int) -> list[Row]:
    """The rows with what was measured of their layouts."""
    from fivefold.bench.machine import measure_layouts
    from fivefold.sharding.layout import to_text

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
    if any(row.plan for row in rows):
        lines.append(f"  {_setting(rows)}")
    return [*lines, "", *_table([head, *(_cells(row, measured) for row in rows)], 2), "", *_notes(rows)]


def _table(rows: list[list[str]], words: int) -> list[str]:
    """Lines of a table. words: columns at the left that are text; the others are numbers. Rows may be short."""
    filled = [row + [""] * (len(rows[0]) - len(row)) for row in rows]
    return [f"  {line}".rstrip() for line in aligned(filled, range(words))]


def _setting(rows: list[Row]) -> str:
    """What the layouts have in common, or several values of it."""
    settings = [row.plan.setting for row in rows if row.plan]
    sizes = sorted({s.sizes.B for s in settings})
    words = f"microbatches of {' or '.join(map(str, sizes))} sequence{'s' * (sizes != [1])}"
    words += "".join({f" of {s.model.seq_len:,} tokens in {s.mode}" for s in settings})
    again = {s.layout.recompute for s in settings}
    return words + (f", recompute {again.pop()}" if len(again) == 1 else "")


def _cells(row: Row, measured: bool) -> list[str]:
    if row.plan is None:
        return [row.technique, row.short, "not possible"]
    words = row.words()
    reason, most = max(row.redundant.parts.items(), key=lambda part: part[1])
    redundant = words["redundant"] + f" {REASONS[reason]}" * (most >= 0.0005)
    cells = [row.technique, row.short, redundant, words["memory"], _sent(row.sent(measured))]
    cells += [words[name] for name in ("exposed", "idle", "step", "mfu", "fits")]
    if measured:
        cells += _here(row.measured) if isinstance(row.measured, dict) else ["-", "-", "-"]
    return cells


def _sent(by_axis: Mapping[str, int]) -> str:
    return " + ".join(f"{axis} {size(most)}" for axis, most in by_axis.items()) or "nothing"


def _here(figures: dict[str, Any]) -> list[str]:
    """What was measured, as cells."""
    held, seconds, sent = (figures.get(name) for name in ("memory_bytes", "step_s", "sent_bytes"))
    return [memory_text(held) if held else "-", _sent(sent or {}), f"{seconds:.4g}" if seconds else "-"]


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
                f"  {row.technique}: tp does not divide {share:.1%} of the parameters ({', '.join(modules)}): "
                "with sp its ranks have different tokens there"
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
    """The rules of all layouts as a table."""
    from fivefold.lessons.overlap import count_text

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
