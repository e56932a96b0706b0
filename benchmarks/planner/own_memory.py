"""Memory of every rank, predicted and tracked, over this program's own runs on CPUs.

    python benchmarks/planner/own_memory.py [--only zero=3 ...] [--out benchmarks/results/planner_own_memory.json]

Each layout runs two steps on real ranks (gloo, random tokens, even load of experts). In the second every storage is
followed from its making to its end (observe/tracking.py): its peak is what is tracked. The prediction
(`fivefold.plan`, no torch) is made from the recipe alone, for every rank. About four minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
from steps import CASES, MODEL, job, planned, recipe_of, tracked  # pyright: ignore[reportMissingImports]

from fivefold.layout import Layout
from fivefold.parallel.ranks import Ranks
from fivefold.plan.rehearsal import rehearse
from fivefold.recipe import Recipe
from fivefold.train.launch import start_ranks
from fivefold.train.verify import alone


@dataclass
class Row:
    """One layout: bytes at the peak of each rank."""

    arch: str
    mode: str
    layout: str
    predicted: list[int]
    tracked: list[int]
    parts: list[dict[str, dict[str, int]]]

    @property
    def errors(self) -> list[float]:
        return [p / t - 1 for p, t in zip(self.predicted, self.tracked, strict=True)]

    @property
    def worst(self) -> float:
        return max(self.errors, key=abs)


def measure(arch: str, mode: str, layout: str) -> Row:
    recipe = recipe_of(arch, mode, layout)
    s, world = planned(recipe), Layout.from_recipe(recipe.layout).ranks
    found = on_ranks(recipe, world)
    said = [rehearse(job(s), rank) for rank in range(world)]
    parts = [
        {"predicted": dict(p.at_peak), "tracked": f["at_peak"]} for p, f in zip(said, found, strict=True)
    ]
    return Row(arch, mode, layout, [p.peak for p in said], [f["peak"] for f in found], parts)


def on_ranks(recipe: Recipe, world: int) -> list[dict[str, Any]]:
    """Runs `tracked` on so many processes."""
    if world == 1:
        alone()
        return [asdict(tracked(0, 1, recipe))]
    with tempfile.TemporaryDirectory(prefix="fivefold-own-memory-") as name:
        stopped = start_ranks(partial(_rank, recipe, Path(name)), world, fork=True)
        if stopped is not None:
            raise SystemExit(128 + stopped)
        return [json.loads((Path(name) / str(rank)).read_text()) for rank in range(world)]


def _rank(recipe: Recipe, folder: Path, ranks: Ranks) -> None:
    found = asdict(tracked(ranks.rank, ranks.world, recipe))
    found.pop("sent")
    (folder / str(ranks.rank)).write_text(json.dumps(found))


def summary(rows: list[Row]) -> dict[str, Any]:
    errors = [error for row in rows for error in row.errors]
    return {
        "layouts": len(rows),
        "ranks": len(errors),
        "mean": fmean(map(abs, errors)),
        "worst": max(errors, key=abs),
        "bias": fmean(errors),
    }


def table(rows: list[Row]) -> str:
    head = (
        "| model | dtype | layout | tracked, MB | predicted | error, worst rank |\n|---|---|---|---|---|---|"
    )
    lines = [
        f"| {r.arch} | {r.mode} | `{r.layout}` | {max(r.tracked) / 1e6:.2f} | {max(r.predicted) / 1e6:.2f} | "
        f"{100 * r.worst:+.2f}% |"
        for r in rows
    ]
    found = summary(rows)
    words = (
        f"{found['layouts']} layouts, {found['ranks']} ranks: error {100 * found['mean']:.2f}% in the mean, "
        f"{100 * found['worst']:+.2f}% at worst"
    )
    return "\n".join([head, *lines, "", words])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", help="words that a run's name must have one of")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = []
    for case in CASES:
        if args.only and not any(word in " ".join(case) for word in args.only):
            continue
        rows.append(measure(*case))
        print(
            f"{' '.join(case)}: {100 * rows[-1].worst:+.2f}%, {rows[-1].parts[0]}",
            file=sys.stderr,
            flush=True,
        )
    print(table(rows))
    if args.out:
        from fivefold.observe.machine import describe

        found = {"machine": describe(), "model": MODEL, "summary": summary(rows)}
        args.out.write_text(json.dumps(found | {"rows": [asdict(row) for row in rows]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
