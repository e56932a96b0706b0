"""`fivefold compare RECIPE --cluster h100:64`: three criteria of each form of parallelism side by side, and when their
communication hides."""

from __future__ import annotations

import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from fivefold.cli.compare_tables import criteria_table, overlap_table
from fivefold.cli.local import ensure_measured
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
ClusterOption = Annotated[
    str | None,
    option(
        "NAME:DEVICES",
        "Cluster, as for `fivefold plan`. [default: h100, or local with --measure]",
        "--cluster",
    ),
]
RanksOption = Annotated[
    int | None,
    option("N", "Ranks. [default: the cluster's, else a node]", min=1),
]
LayoutsOption = Annotated[
    list[str] | None,
    option("'L L ...'", "Layouts instead of one per technique, separated by spaces. Repeatable."),
]
OverlapOption = Annotated[bool, flag("Print when communication hides behind computing.", "--overlap")]
PictureOption = Annotated[
    Path | None,
    option("FILE.svg", "Draw the criteria; with --overlap, its curves."),
]
PageOption = Annotated[
    Path | None,
    option("FILE.html", 'Write "5-D in a nutshell": what each dimension divides, sends and costs.'),
]
MeasureOption = Annotated[bool, flag("Also run each layout here for a few steps.", "--measure")]
# At least 4 steps: the first two warm up, one is tracked and slower, and one is left
StepsOption = Annotated[int, option("N", "Steps that --measure runs.", min=4, max=1000)]


def compare(
    recipe: RecipeArgument,
    set_: SetOption = None,
    cluster: ClusterOption = None,
    ranks: RanksOption = None,
    layouts: LayoutsOption = None,
    overlap: OverlapOption = False,
    picture: PictureOption = None,
    page: PageOption = None,
    measure: MeasureOption = False,
    steps: StepsOption = 6,
    json: JsonOption = False,
) -> None:
    """Compare forms of parallelism by redundant computing, peak memory and communication.

    There is a row for one device and for each technique at the cluster's size. Where a technique does not divide the
    model, its row says why and shows the most ranks that do. Time and MFU are predicted, too.
    """
    from fivefold.lessons import compare as compared
    from fivefold.lessons import nutshell, pictures
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
        save_as("--page", page, nutshell.page(loaded, rows, title))
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
    from fivefold.bench.layouts import measure
    from fivefold.sharding.layout_text import to_text

    wanted = [row.plan.layout for row in rows if row.plan]
    found = {}
    for layout, figures in measure(recipe, list(dict.fromkeys(wanted)), steps):
        print(f"ran {to_text(layout)}", file=sys.stderr)
        found[layout] = figures
    return [replace(row, measured=found[row.plan.layout]) if row.plan else row for row in rows]
