"""Training speed of every form of parallelism on the common work, beside plain PyTorch in one process.

    python benchmarks/layout_speed.py [--rounds 2] [--steps 10] [--modes bf16 fp32] [--out FILE.json]

The work, the way of measuring and the machine's limit are those of train_speed.py. All ranks share this machine's
cores, with one thread each, so a layout can at best be as fast as one process: what is lost is the axis's overhead.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from statistics import median
from typing import Any

from train_speed import DEFAULTS, apart, matmul

# layout, sequences in a microbatch
LAYOUTS = {
    "dp=1": 8,
    "dp=2": 8,
    "dp=2,zero=1": 8,
    "dp=2,zero=2": 8,
    "dp=2,zero=3": 8,
    "tp=2": 8,
    "tp=2,sp=true": 8,
    "tp=2,sp=true,sp_regather=true": 8,
    "pp=2": 2,
    "pp=2,schedule=zbv": 2,
    "cp=2": 8,
    "cp=2,cp_method=ulysses": 8,
    "dp=2,tp=2": 8,
}
YARDSTICK = f"plain fp32, {DEFAULTS}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--modes", nargs="*", default=["bf16", "fp32"])
    parser.add_argument("--only", nargs="*", help="layouts, of those listed in this file")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    chosen = {layout: size for layout, size in LAYOUTS.items() if not args.only or layout in args.only}
    rounds = []
    for number in range(args.rounds):
        row: dict[str, Any] = {"matmul bf16": matmul("bf16"), "matmul fp32": matmul("fp32")}
        row[YARDSTICK] = apart(YARDSTICK, args.steps, 8)
        for mode in args.modes:
            for layout, microbatch in chosen.items():
                name = f"fivefold {mode} {layout}"
                row[name] = apart(name, args.steps, microbatch)
                print(
                    f"round {number + 1}  {name:42} {row[name]['tokens_per_s']:7,.0f} tok/s", file=sys.stderr
                )
        rounds.append(row)
    summary = {layout: {mode: summarize(rounds, mode, layout) for mode in args.modes} for layout in chosen}
    print(table(summary, rounds))
    if args.out:
        from fivefold.host.machine import describe

        result = {"machine": describe(), "summary": summary, "rounds": rounds}
        args.out.write_text(json.dumps(result, indent=1) + "\n")


def summarize(rounds: list[dict[str, Any]], mode: str, layout: str) -> dict[str, Any]:
    """Medians over rounds; ratios are taken within a round."""
    name = f"fivefold {mode} {layout}"

    def ratio(other: str) -> float | None:
        found = [r[name]["tokens_per_s"] / r[other]["tokens_per_s"] for r in rounds if other in r]
        return median(found) if found else None

    return {
        "microbatch": LAYOUTS[layout],
        "tokens_per_s": median(r[name]["tokens_per_s"] for r in rounds),
        "to_one_process": ratio(f"fivefold {mode} dp=1"),
        "to_plain_fp32": ratio(YARDSTICK),
        "peak_mib_a_rank": max(r[name]["peak_mib"] for r in rounds),
    }


def table(summary: dict[str, dict[str, dict[str, Any]]], rounds: list[dict[str, Any]]) -> str:
    head = "| mode | layout | tok/s | x one process | x plain fp32 | peak MiB a rank |"
    lines = [head, "|" + "---|" * 6]
    for layout, modes in summary.items():
        for mode, row in modes.items():
            ratios = [
                f"{ratio:.2f}" if (ratio := row[key]) else "" for key in ("to_one_process", "to_plain_fp32")
            ]
            cells = [mode, layout, f"{row['tokens_per_s']:,.0f}", *ratios, f"{row['peak_mib_a_rank']:,}"]
            lines.append(f"| {' | '.join(cells)} |")
    plain = median(r[YARDSTICK]["tokens_per_s"] for r in rounds)
    return "\n".join([*lines, f"\nplain PyTorch, fp32, one process, default allocator: {plain:,.0f} tok/s"])


if __name__ == "__main__":
    main()
