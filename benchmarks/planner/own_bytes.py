"""Calls and bytes of every collective, predicted and counted, over all layouts of 8 ranks of tests/sweep.py.

    OMP_NUM_THREADS=1 python benchmarks/planner/own_bytes.py [--only zero=3 ...] \\
        [--out benchmarks/results/planner_own_bytes.json]

Each layout trains a tiny model for two steps on real ranks (gloo; even load of experts); a counter
(fivefold_plan/trace/traffic.py) notes every collective of the second step by operation and axis. The prediction
(`plan.volume.counted`, no torch) is made from the recipe alone. Equal means: the same operations on the same axes, the
same calls and the same bytes, on every rank. Exit code 1 if a layout differs. About a quarter of an hour on two cores.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
from layouts import tiny  # pyright: ignore[reportMissingImports]
from ranks import run_ranks  # pyright: ignore[reportMissingImports]
from steps import counted, planned  # pyright: ignore[reportMissingImports]
from sweep import MODEL, candidates, sizes  # pyright: ignore[reportMissingImports]

from fivefold.sharding.layout import Layout, to_text
from fivefold_plan.messages import volume


@dataclass
class Row:
    """One layout: calls and bytes that its ranks counted, together, and on which ranks the prediction differs."""

    layout: str
    calls: int
    bytes: int
    differ: dict[int, dict[str, str]] = field(default_factory=dict)


def compare(folder: Path, layout: Layout) -> Row:
    layers, rows = sizes(layout)
    recipe = tiny(folder, to_text(layout), *MODEL, f"model.layers={layers}", f"train.microbatch_size={rows}")
    s = planned(recipe)
    found = [step.sent for step in run_ranks(layout.ranks, counted, recipe, timeout_s=600)]
    calls, size = (sum(entry[i] for sent in found for entry in sent.values()) for i in (0, 1))
    row = Row(to_text(layout), calls, size)
    for rank, sent in enumerate(found):
        said = volume.counted(s, rank)
        wrong = {key: (said.get(key), sent.get(key)) for key in said | sent if said.get(key) != sent.get(key)}
        if wrong:
            row.differ[rank] = {" ".join(key): f"predicted {p}, counted {c}" for key, (p, c) in wrong.items()}
    return row


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", help="words that a layout must have one of")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    began, found = time.monotonic(), []
    with tempfile.TemporaryDirectory(prefix="fivefold-own-bytes-") as name:
        for layout in candidates():
            if args.only and not any(word in to_text(layout) for word in args.only):
                continue
            row = compare(Path(name), layout)
            found.append(row)
            words = "equal" if not row.differ else f"DIFFERS: {row.differ}"
            print(f"{row.layout}: {row.calls} calls, {row.bytes} bytes, {words}", flush=True)
    summary = {
        "layouts": len(found),
        "equal": sum(not row.differ for row in found),
        "calls": sum(row.calls for row in found),
        "bytes": sum(row.bytes for row in found),
    }
    minutes = (time.monotonic() - began) / 60
    print(
        f"\n{summary['equal']} of {len(found)} layouts equal in every call and byte of every rank: "
        f"{summary['calls']:,} calls, {summary['bytes']:,} bytes; {minutes:.0f} minutes"
    )
    if args.out:
        from fivefold.host.machine import describe

        result = {"machine": describe(), "summary": summary, "rows": [asdict(row) for row in found]}
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    sys.exit(0 if summary["equal"] == len(found) else 1)


if __name__ == "__main__":
    main()
