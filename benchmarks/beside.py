"""Training speed of this checkout beside another one, such as an older commit: the same work, the same minutes.

    git worktree add ../before COMMIT
    python benchmarks/beside.py ../before [--rounds 5] [--modes bf16 fp32] [--only tp=2 pp=2] [--out FILE.json]

The work and the layouts are those of layout_speed.py. Within a round each layout runs in both checkouts, one directly
after the other, and the order changes from round to round. The ratio is this checkout's tokens/s over the other's,
taken within each pair. Its spread says what the machine's noise is.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

from layout_speed import LAYOUTS
from train_speed import apart

HERE = Path(__file__).resolve().parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("other", type=Path, help="the other checkout")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--modes", nargs="*", default=["bf16", "fp32"])
    parser.add_argument("--only", nargs="*", help="layouts, of those in layout_speed.py")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    other = args.other.resolve()
    pairs: dict[str, list[dict[str, float]]] = {}
    for number in range(args.rounds):
        for mode in args.modes:
            for layout, microbatch in LAYOUTS.items():
                if not args.only or layout in args.only:
                    name = f"fivefold {mode} {layout}"
                    pairs.setdefault(name, []).append(
                        pair(name, args.steps, microbatch, other, number % 2 > 0)
                    )
                    print(
                        f"round {number + 1}  {name:42} {pairs[name][-1]['ratio']:.3f}",
                        file=sys.stderr,
                        flush=True,
                    )
        save(pairs, other, args.out)
    print(table({name: summarize(found) for name, found in pairs.items()}))


def save(pairs: dict[str, list[dict[str, float]]], other: Path, out: Path | None) -> None:
    """Writes what there is after a round, so that a run that is stopped loses only its last one."""
    if out:
        from fivefold.host.machine import describe

        summary = {name: summarize(found) for name, found in pairs.items()}
        commits = {"this": commit(HERE), "other": commit(other)}
        result = {"commits": commits, "machine": describe(), "summary": summary, "pairs": pairs}
        out.write_text(json.dumps(result, indent=1) + "\n")


def pair(name: str, steps: int, microbatch: int, other: Path, other_first: bool) -> dict[str, float]:
    """Tokens/s in both checkouts, and their ratio."""
    found: dict[str, float] = {}
    order = {"other": other, "this": HERE} if other_first else {"this": HERE, "other": other}
    for which, checkout in order.items():
        run = apart(name, steps, microbatch, checkout)
        found |= {which: run["tokens_per_s"], f"{which} peak_mib": run["peak_mib"]}
    return found | {"ratio": found["this"] / found["other"]}


def summarize(pairs: list[dict[str, float]]) -> dict[str, Any]:
    ratios = sorted(found["ratio"] for found in pairs)
    peaks = {f"{which}_peak_mib": max(p[f"{which} peak_mib"] for p in pairs) for which in ("this", "other")}
    return {
        "tokens_per_s": median(p["this"] for p in pairs),
        "ratio": median(ratios),
        "lowest": ratios[0],
        "highest": ratios[-1],
    } | peaks


def table(summary: dict[str, dict[str, Any]]) -> str:
    lines = ["| layout | tok/s | x the other | lowest | highest | peak MiB | the other's |", "|" + "---|" * 7]
    for name, row in summary.items():
        ratios = " | ".join(f"{row[key]:.3f}" for key in ("ratio", "lowest", "highest"))
        peaks = f"{row['this_peak_mib']:,.0f} | {row['other_peak_mib']:,.0f}"
        lines.append(
            f"| {name.removeprefix('fivefold ')} | {row['tokens_per_s']:,.0f} | {ratios} | {peaks} |"
        )
    every = [row["ratio"] for row in summary.values()]
    return "\n".join([*lines, f"\nmedian of the ratios {median(every):.3f}, lowest {min(every):.3f}"])


def commit(checkout: Path) -> str:
    found = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=checkout, capture_output=True, text=True, check=True
    )
    return found.stdout.strip()


if __name__ == "__main__":
    main()
