"""Training speed of every form of parallelism on the common work, beside plain PyTorch in one process.

    python benchmarks/layout_speed.py [--rounds 2] [--steps 10] [--modes bf16 fp32] [--out FILE.json]

The work, the way of measuring and the machine's limit are those of train_speed.py. All ranks share this machine's
cores, with one thread each, so a layout can at best be as fast as one process: what is lost is the axis's overhead.

Peers' figures (tokens/s in fp32, their best, each measured once on another machine of this kind) are carried here by
the ratio to plain PyTorch: there plain fp32 with the default allocator ran at 1,826.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from statistics import median
from typing import Any

from train_speed import DEFAULTS, apart, matmul

PEER_PLAIN = 1826
# layout, sequences in a microbatch, the best peer's tokens/s (fp32), who
LAYOUTS: list[tuple[str, int, int | None, str]] = [
    ("dp=1", 8, None, ""),
    ("dp=2", 8, 2065, "nanoGPT"),
    ("dp=2,zero=1", 8, 1856, "DeepSpeed"),
    ("dp=2,zero=2", 8, 1673, "DeepSpeed"),
    ("dp=2,zero=3", 8, 1766, "HF Llama, FSDP"),
    ("tp=2", 8, 1487, "nanotron"),
    ("tp=2,sp=true", 8, 1487, "nanotron"),
    ("tp=2,sp=true,sp_regather=true", 8, 1487, "nanotron"),
    ("pp=2", 2, 1503, "picotron"),
    ("pp=2,schedule=zbv", 2, 1503, "picotron"),
    ("cp=2", 8, 1576, "picotron"),
    ("cp=2,cp_method=ulysses", 8, 1576, "picotron"),
    ("dp=2,tp=2", 8, 1345, "picotron"),
]
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
    chosen = [row for row in LAYOUTS if not args.only or row[0] in args.only]
    rounds = []
    for number in range(args.rounds):
        row: dict[str, Any] = {"matmul bf16": matmul("bf16"), "matmul fp32": matmul("fp32")}
        row[YARDSTICK] = apart(YARDSTICK, args.steps, 8)
        for mode in args.modes:
            for layout, microbatch, *_ in chosen:
                name = f"fivefold {mode} {layout}"
                row[name] = apart(name, args.steps, microbatch)
                print(
                    f"round {number + 1}  {name:42} {row[name]['tokens_per_s']:7,.0f} tok/s", file=sys.stderr
                )
        rounds.append(row)
    summary = [summarize(rounds, mode, *row) for mode in args.modes for row in chosen]
    print(table(summary, rounds))
    if args.out:
        from fivefold.host.machine import describe

        result = {"machine": describe(), "summary": summary, "rounds": rounds}
        args.out.write_text(json.dumps(result, indent=1) + "\n")


def summarize(
    rounds: list[dict[str, Any]], mode: str, layout: str, microbatch: int, peer: int | None, who: str
) -> dict[str, Any]:
    """Medians over rounds; ratios are taken within a round."""
    name = f"fivefold {mode} {layout}"

    def ratio(other: str) -> float | None:
        found = [r[name]["tokens_per_s"] / r[other]["tokens_per_s"] for r in rounds if other in r]
        return median(found) if found else None

    to_plain = ratio(YARDSTICK)
    assert to_plain is not None
    return {
        "mode": mode,
        "layout": layout,
        "microbatch": microbatch,
        "tokens_per_s": median(r[name]["tokens_per_s"] for r in rounds),
        "to_one_process": ratio(f"fivefold {mode} dp=1"),
        "to_plain_fp32": to_plain,
        "to_best_peer": to_plain / (peer / PEER_PLAIN) if peer else None,
        "peer": who,
        "peak_mib_a_rank": max(r[name]["peak_mib"] for r in rounds),
    }


def table(summary: list[dict[str, Any]], rounds: list[dict[str, Any]]) -> str:
    head = "| mode | layout | tok/s | x one process | x plain fp32 | x best peer (fp32) | peak MiB a rank |"
    lines = [head, "|" + "---|" * 7]
    for row in summary:
        ratios = [row[key] for key in ("to_one_process", "to_plain_fp32", "to_best_peer")]
        cells = [row["mode"], row["layout"], f"{row['tokens_per_s']:,.0f}"]
        cells += [f"{ratio:.2f}" if ratio else "" for ratio in ratios] + [f"{row['peak_mib_a_rank']:,}"]
        lines.append(f"| {' | '.join(cells)} |")
    plain = median(r[YARDSTICK]["tokens_per_s"] for r in rounds)
    return "\n".join([*lines, f"\nplain PyTorch, fp32, one process, default allocator: {plain:,.0f} tok/s"])


if __name__ == "__main__":
    main()
