"""Memory of every rank, predicted, traced and tracked, over this program's own runs on CPUs.

    python benchmarks/planner/own_memory.py [--only zero=3 ...] [--out benchmarks/results/planner_own_memory.json]

Each layout runs two steps on real ranks (gloo, random tokens, even load of experts). In the second every storage is
tracked from its allocation until it is freed (trace/memory.py): "tracked" is the peak of their sum. "traced" is the
peak of the same step on tensors without memory (trace/depth.py), "predicted" that of the planner's formula
(memory/memory.py). About five minutes on two cores.
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
from steps import CASES, MODEL, planned, recipe_of, tracked  # pyright: ignore[reportMissingImports]

from fivefold.launch.local import start_ranks
from fivefold.launch.ranks import Ranks
from fivefold.recipe import Recipe
from fivefold.sharding.layout import Layout
from fivefold.train.verify import alone
from fivefold_plan.predict import held
from fivefold_plan.trace.depth import exact


@dataclass
class Row:
    """One layout: bytes at the peak of each rank, and what they consist of."""

    arch: str
    mode: str
    layout: str
    predicted: list[int]
    traced: list[int]
    tracked: list[int]
    parts: list[dict[str, dict[str, int]]]

    def errors(self, of: str = "predicted") -> list[float]:
        """Of "predicted" or "traced", by the tracked peak."""
        return [p / t - 1 for p, t in zip(getattr(self, of), self.tracked, strict=True)]

    @property
    def worst(self) -> float:
        return max(self.errors(), key=abs)


def measure(arch: str, mode: str, layout: str) -> Row:
    recipe = recipe_of(arch, mode, layout)
    s, world = planned(recipe), Layout.from_recipe(recipe.layout).ranks
    found = on_ranks(recipe, world)
    positions = held(s)
    said = [positions[s.layout.coordinates(rank)["pp"]].as_json() for rank in range(world)]
    traced = [exact(recipe, rank, kept=False).step.memory for rank in range(world)]
    parts = [
        {"predicted": p, "traced": dict(t.at_peak), "tracked": f["at_peak"]}
        for p, t, f in zip(said, traced, found, strict=True)
    ]
    predicted = [p.pop("total") for p in said]
    return Row(arch, mode, layout, predicted, [t.total for t in traced], [f["peak"] for f in found], parts)


def on_ranks(recipe: Recipe, world: int) -> list[dict[str, Any]]:
    """Runs `tracked` on so many processes."""
    if world == 1:
        alone()
        return [asdict(tracked(0, 1, recipe))]
    with tempfile.TemporaryDirectory(prefix="fivefold-own-memory-") as name:
        start_ranks(partial(_rank, recipe, Path(name)), world, fork=True)
        return [json.loads((Path(name) / str(rank)).read_text()) for rank in range(world)]


def _rank(recipe: Recipe, folder: Path, ranks: Ranks) -> None:
    found = asdict(tracked(ranks.rank, ranks.world, recipe))
    found.pop("sent")
    (folder / str(ranks.rank)).write_text(json.dumps(found))


def summary(rows: list[Row]) -> dict[str, Any]:
    found: dict[str, Any] = {"layouts": len(rows), "ranks": sum(len(row.tracked) for row in rows)}
    for name in ("predicted", "traced"):
        errors = [error for row in rows for error in row.errors(name)]
        worst = max(errors, key=abs)
        found[name] = {"mean": fmean(map(abs, errors)), "worst": worst, "bias": fmean(errors)}
    return found


def table(rows: list[Row]) -> str:
    head = "| model | dtype | layout | tracked, MB | traced | predicted | error, worst rank |"
    head += "\n|---|---|---|---|---|---|---|"
    lines = [
        f"| {r.arch} | {r.mode} | `{r.layout}` | {max(r.tracked) / 1e6:.2f} | {max(r.traced) / 1e6:.2f} | "
        f"{max(r.predicted) / 1e6:.2f} | {100 * r.worst:+.1f}% |"
        for r in rows
    ]
    found = summary(rows)
    errors = [
        f"{name}: mean error {100 * found[name]['mean']:.2g}%, worst {100 * found[name]['worst']:+.2g}%"
        for name in ("predicted", "traced")
    ]
    return "\n".join([head, *lines, "", f"{found['layouts']} layouts, {found['ranks']} ranks", *errors])


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
        from fivefold.host.machine import describe

        found = {"machine": describe(), "model": MODEL, "summary": summary(rows)}
        args.out.write_text(json.dumps(found | {"rows": [asdict(row) for row in rows]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
