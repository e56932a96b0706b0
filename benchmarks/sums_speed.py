"""Training speed of two replicas by how their gradients are summed: the library, the default, and our own algorithms.

    fivefold bench collectives --ranks 2          # what the default, `auto`, goes by
    python benchmarks/sums_speed.py [--rounds 3] [--steps 8] [--out benchmarks/results/sums_speed.json]

The work is that of train_speed.py, in fp32. The variants take turns, each in processes of its own. Ratios to the
library are taken within a round.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from statistics import median

from train_speed import apart

VARIANTS = ("library", "auto", "ring", "butterfly")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--layout", default="dp=2")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rounds: list[dict[str, float]] = []
    for number in range(args.rounds):
        order = VARIANTS if number % 2 == 0 else VARIANTS[::-1]
        rounds.append({})
        for name in order:
            variant = f"fivefold fp32 {args.layout},all_reduce={name}"
            rounds[-1][name] = apart(variant, args.steps, 8)["tokens_per_s"]
            print(
                f"round {number + 1}  {name:10} {rounds[-1][name]:7,.0f} tok/s", file=sys.stderr, flush=True
            )
    summary = {
        name: {
            "tokens_per_s": median(row[name] for row in rounds),
            "ratios": [row[name] / row["library"] for row in rounds],
        }
        for name in VARIANTS
    }
    print(
        f"| {args.layout}, gradients summed by | tok/s | x the library | lowest | highest |\n|" + "---|" * 5
    )
    for name, row in summary.items():
        cells = [f"{value:.3f}" for value in (median(row["ratios"]), min(row["ratios"]), max(row["ratios"]))]
        print(f"| {name} | {row['tokens_per_s']:,.0f} | {' | '.join(cells)} |")
    if args.out:
        from fivefold.host import tables
        from fivefold.host.machine import describe

        found = {"machine": describe(), "best": tables.best_all_reduce(2, "cpu"), "summary": summary}
        args.out.write_text(json.dumps(found | {"rounds": rounds}, indent=1) + "\n")


if __name__ == "__main__":
    main()
