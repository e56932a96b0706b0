"""All layouts of 8 ranks, each compared with one process: a table of what `fivefold verify` finds.

    python tests/sweep.py [--only N] [--out docs/layouts_verified.md] [--results benchmarks/results]

Every way to divide 8 ranks among the axes, with every ZeRO stage, with and without sequence parallelism, and for a
mixture of experts with every ep, also over the tensor axis. Gathered keys and values run in each layout with cp; the
other options take turns: schedule, cp_method, recompute. fp32, a tiny model, 2 steps; the tolerances are verify's. Exit
code 1 if a layout fails. `--results` writes the largest differences, in a file for each kind of processor, because they
round differently.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle, product
from pathlib import Path

import torch
from layouts import compared, tiny
from ranks import RankFailed

from fivefold import host
from fivefold.errors import UserError
from fivefold.schedules.pipeline import SCHEDULES
from fivefold.sharding.layout import AXES, Layout, to_text
from fivefold.sharding.layout_rules import problems
from fivefold.sharding.sequence import METHODS
from fivefold.train.differences import TOLERANCE
from fivefold.train.verify import Report

RANKS = 8
MODEL = ["model.heads=8", "model.kv_heads=8"]
STEPS = 2
SIZES = (1, 2, 4, 8)
EVERYWHERE = "all_gather"
"""The cp_method that each layout with cp has, besides the one whose turn it is."""


def candidates() -> Iterator[Layout]:
    """Every layout of 8 ranks that makes sense whatever the model."""
    ways = {pp: cycle(_schedules(pp)) for pp in SIZES}
    methods, recomputes = cycle(METHODS), cycle(("none", "full", "selective"))
    for sizes in product(SIZES, repeat=len(AXES)):
        axes = dict(zip(AXES, sizes, strict=True))
        if Layout(**axes).ranks != RANKS:
            continue
        shared = axes["dp_shard"] * axes["cp"] > 1
        zeros = [zero for zero in (range(4) if shared else (0,)) if zero or axes["dp_shard"] == 1]
        for zero, sp, ep, fold in product(zeros, (False, True), SIZES, (False, True)):
            if (sp and axes["tp"] == 1) or (fold and not (sp and ep > 1)):
                continue
            options = {"cp_method": next(methods)} if axes["cp"] > 1 else {}
            shape = Layout(**axes, zero=zero, sp=sp, ep=ep, ep_fold=fold)
            if any(problems(shape)):
                continue
            way = next(way for way in next(ways[axes["pp"]]) if not any(problems(replace(shape, **way))))
            others = {"recompute": next(recomputes), **way}
            yield replace(shape, **options, **others)
            if options and options["cp_method"] != EVERYWHERE:
                yield replace(shape, cp_method=EVERYWHERE, **others)


def _schedules(pp: int) -> list[list[dict]]:
    """By turn, schedules with the fewest stages that they allow, for which 8 blocks are enough: the one whose turn it
    is, and those that follow, for layouts with which it does not combine."""
    if pp == 1:
        return [[{}]]
    fewest = {name: made.stages[0] for name, made in SCHEDULES.items()}
    ways = [{"schedule": n, "virtual_stages": stages} for n, stages in fewest.items() if pp * stages <= 8]
    return [ways[turn:] + ways[:turn] for turn in range(len(ways))]


def sizes(layout: Layout) -> tuple[int, int]:
    """Blocks, and sequences in a microbatch: of the 8 of a step one where a pipeline wants many, else half a rank's."""
    if layout.pp == 1:
        return 2, max(1, 8 // layout.dp // 2)
    return (8 if layout.stages_per_rank * layout.pp > 4 else 4), 1


def sweep(folder: Path, only: int | None = None) -> Iterator[tuple[str, Report | str]]:
    """(layout, what verify found) of every layout; instead of a report why the layout is refused, or how a rank failed.

    only: so many layouts, spread evenly over all.
    """
    everything = list(candidates())
    step = max(1, len(everything) // only) if only else 1
    for layout in everything[::step]:
        text = to_text(layout)
        try:
            layers, rows = sizes(layout)
            shape = [f"model.layers={layers}", f"train.microbatch_size={rows}"]
            recipe = tiny(folder, text, *MODEL, *shape)
        except UserError as error:
            yield text, f"refused: {error}"
            continue
        try:
            # the balance loss of experts is that of a microbatch: the reference has to share them
            reference = folder / f"{recipe.model.arch}-{layers}-{rows}"
            yield text, compared(recipe, STEPS, folder=reference, timeout_s=300)
        except RankFailed as error:
            yield text, f"failed: {str(error).strip().splitlines()[-1]}"


def processor() -> str:
    """The kind of this machine's processor, for the name of a file."""
    fields = host.cpuinfo()
    vendor, family, model = (fields.get(key, "") for key in ("vendor_id", "cpu family", "model"))
    if vendor == "AuthenticAMD" and family == "26":
        return "zen5"
    if vendor == "AuthenticAMD" and family == "25":
        return "zen4" if 16 <= int(model) < 32 or int(model) >= 96 else "zen3"
    return "_".join(filter(None, [vendor.lower(), family, model])) or platform.machine()


def write_results(folder: Path, only: int | None, found: dict[str, Report | str]) -> None:
    """The largest difference of each kind, its place, and how many layouts failed."""
    reports = {layout: one for layout, one in found.items() if isinstance(one, Report)}
    largest = {}
    for kind in TOLERANCE:
        layout, figure = max(
            ((layout, one.figures[kind]) for layout, one in reports.items()), key=lambda pair: pair[1].max_rel
        )
        largest[kind] = {
            "max_rel": figure.max_rel,
            "allowed": figure.allowed,
            "layout": layout,
            "at": figure.worst,
        }
    wrong = [layout for layout, one in found.items() if isinstance(one, str) or not one.passed]
    facts = {
        "command": "python tests/sweep.py" + (f" --only {only}" if only else ""),
        "processor": host.cpu_model(), "torch": torch.__version__, "layouts": len(found),
        "of": len(list(candidates())), "wrong": wrong, "largest": largest,
    }  # fmt: skip
    path = folder / f"layouts_{processor()}.json"
    path.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", type=int, metavar="N", help="so many layouts, spread over all")
    parser.add_argument("--out", type=Path, help="write the table there, too")
    parser.add_argument(
        "--results", type=Path, metavar="FOLDER", help="write layouts_PROCESSOR.json there, too"
    )
    arguments = parser.parse_args()
    began, lines, refused, wrong, every = time.monotonic(), [], 0, [], {}
    print(HEAD)
    with tempfile.TemporaryDirectory(prefix="fivefold-sweep-") as name:
        for layout, found in sweep(Path(name), arguments.only):
            if isinstance(found, str) and found.startswith("refused"):
                refused += 1
                print(f"{layout}: {found}", file=sys.stderr)
                continue
            lines.append(row(layout, found))
            every[layout] = found
            print(lines[-1], flush=True)
            if isinstance(found, str) or not found.passed:
                wrong.append(layout)
    minutes = (time.monotonic() - began) / 60
    words = f"{len(lines)} layouts, {len(wrong)} wrong; {refused} more are refused as invalid; {minutes:.0f} minutes."
    print(f"\n{words}")
    if arguments.results:
        write_results(arguments.results, arguments.only, every)
    if arguments.out:
        arguments.out.write_text("\n".join([INTRODUCTION, words, "", HEAD, *lines, ""]), encoding="utf-8")
    sys.exit(1 if wrong else 0)


INTRODUCTION = f"""# Layouts that are verified

`python tests/sweep.py --out docs/layouts_verified.md` wrote this table (`make test-all` runs it). It takes every way to
divide {RANKS} ranks among the axes and compares it with one process, as `fivefold verify` does, in fp32, over {STEPS}
steps of a tiny model (2, 4 or 8 blocks; with `ep`, 8 experts per block). The columns are the largest relative
differences of the loss (allowed: 1e-6), of a gradient (1e-5), of the gradient norm, and of a weight after the last
step. The last column says whether everything that `verify` compares is within its limit. Schedule, `cp_method` and
`recompute` take turns, but that each layout with cp also gathers keys and values.
"""
COLUMNS = ("loss", "gradients", "grad_norm", "weights")
HEAD = "| layout | loss | gradients | gradient norm | weights | |\n|---|---|---|---|---|---|"


def row(layout: str, found: Report | str) -> str:
    if isinstance(found, str):
        return f"| `{layout}` | | | | | {found} |"
    figures = " | ".join(f"{found.figures[kind].max_rel:.1e}" for kind in COLUMNS)
    return f"| `{layout}` | {figures} | {'ok' if found.passed else 'WRONG'} |"


if __name__ == "__main__":
    main()
