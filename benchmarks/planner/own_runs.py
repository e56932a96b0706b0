"""Step times of Fivefold's own runs on this machine, predicted and measured.

    python benchmarks/planner/own_runs.py [--steps 9] [--only bf16] [--out benchmarks/results/planner_own_runs.json]

`fivefold bench hardware` measures the machine first, into a cache of its own; nothing else is fitted to anything. Each
layout is then trained by `fivefold train`, which writes its prediction into plan.json before the first step, and the
median of its steps after the second. A run whose machine was disturbed is seen in the spread of its steps. About six
minutes on two cores; nothing else should run.

At the end the table is calibrated on every second run, and the error on the others is shown beside: that is what
`fivefold plan calibrate` can give, and is reported apart.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np

MODEL = {"layers": 8, "dim": 256, "heads": 8, "ffn_dim": 768, "seq_len": 256, "vocab_size": 4096}
BATCH = 8
# layout, sequences in a microbatch
LAYOUTS = [
    ("dp=1", 2),
    ("dp=1,recompute=ops:attention+gate", 2),
    ("dp=1,recompute=full", 2),
    ("dp=2", 2),
    ("dp=2,zero=1", 2),
    ("dp=2,zero=2", 2),
    ("dp=2,zero=3", 2),
    ("tp=2", 2),
    ("tp=2,sp=true", 2),
    ("pp=2", 1),
    ("pp=2,schedule=zbv", 1),
    ("cp=2", 2),
    ("cp=2,cp_method=ulysses", 2),
    ("dp=4", 2),
    ("dp=2,tp=2", 2),
    ("pp=2,dp=2", 1),
    ("pp=4", 1),
]
IN_FP32 = ("dp=1", "dp=2", "dp=2,zero=3", "tp=2", "pp=2", "cp=2", "dp=2,tp=2")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--only", nargs="*", help="words that a run's name must have one of")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = [("bf16", *row) for row in LAYOUTS] + [("fp32", *row) for row in LAYOUTS if row[0] in IN_FP32]
    if args.only:
        rows = [row for row in rows if any(word in f"{row[0]} {row[1]}" for word in args.only)]
    with tempfile.TemporaryDirectory(prefix="fivefold-own-runs-") as name:
        folder = Path(name)
        os.environ["FIVEFOLD_CACHE"] = str(folder / "cache")
        tokens = np.random.default_rng(0).integers(MODEL["vocab_size"], size=200_000, dtype=np.uint16)
        np.save(folder / "tokens.npy", tokens)
        fivefold("bench", "hardware", "--json")
        found = []
        for mode, layout, microbatch in rows:
            found.append(trained(folder, mode, layout, microbatch, args.steps))
            print(line(found[-1]), file=sys.stderr, flush=True)
        result = {"model": MODEL, "batch": BATCH, "summary": summary(found), "runs": found}
        if len(found) > 3:
            result["calibrated"] = calibrated(folder, found)
        table = json.loads((folder / "cache" / "hardware.json").read_text())
    print(report(result))
    if args.out:
        from fivefold.host.machine import describe

        result["runs"] = [{key: value for key, value in row.items() if key != "run"} for row in found]
        args.out.write_text(json.dumps(result | {"machine": describe(), "table": table}, indent=1) + "\n")


def fivefold(*arguments: str) -> str:
    """Runs a command and gives what it prints."""
    command = [sys.executable, "-m", "fivefold.cli.main", *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(arguments)} failed")
    return done.stdout


def trained(folder: Path, mode: str, layout: str, microbatch: int, steps: int) -> dict[str, Any]:
    """Trains, and gives both figures."""
    run = folder / f"{mode} {layout}".replace(" ", "_").replace(",", "_").replace("=", "")
    values = {f"model.{key}": value for key, value in MODEL.items()} | {
        "data.source": f"tokens:{folder / 'tokens.npy'}",
        "data.val_fraction": 0,
        "train.steps": steps,
        "train.global_batch_size": BATCH,
        "train.microbatch_size": microbatch,
        "train.val_every": 0,
        "train.sample_every": 0,
        "precision.mode": mode,
        "model.tie_embeddings": "false",
    }
    sets = [part for key, value in values.items() for part in ("--set", f"{key}={value}")]
    fivefold(
        "train", "quickstart", "--layout", layout, *sets, "--nproc", str(ranks(layout)), "--out", str(run)
    )
    plan = json.loads((run / "plan.json").read_text())
    lines = [json.loads(text) for text in (run / "metrics.jsonl").read_text().splitlines()]
    laps = [step["step_s"] for step in lines if "step_s" in step][2:]
    said, came = plan["predicted"]["time"], plan["measured"]["step_s"]
    return {
        "run": str(run),
        "mode": mode,
        "layout": layout,
        "microbatch": microbatch,
        "predicted_s": said["step_s"],
        "measured_s": came,
        "error": said["step_s"] / came - 1,
        "spread": (max(laps) - min(laps)) / came,
        "predicted": {key: value for key, value in said.items() if isinstance(value, float)},
        "sent": [plan["predicted"]["communication"]["bytes_per_rank"], plan["measured"].get("sent_bytes")],
    }


def ranks(layout: str) -> int:
    from fivefold.sharding.layout import Layout, parse

    return Layout(**parse(layout)).ranks  # type: ignore[arg-type]


def calibrated(folder: Path, found: list[dict[str, Any]]) -> dict[str, Any]:
    """Fits to every second run, and predicts the others again."""
    from fivefold.recipe import load
    from fivefold_plan.cluster.clusters import parse
    from fivefold_plan.predict import predict

    fit = json.loads(fivefold("plan", "calibrate", *(row["run"] for row in found[::2]), "--json"))
    cluster, others = parse("local"), found[1::2]
    errors = [
        predict(load(f"{row['run']}/recipe.toml"), cluster).step.seconds / row["measured_s"] - 1
        for row in others
    ]
    return {
        "factors": fit["factors"],
        "fitted_to": [f"{row['mode']} {row['layout']}" for row in found[::2]],
        "others": {
            "before": fmean(abs(row["error"]) for row in others),
            "after": fmean(map(abs, errors)),
            "worst_after": max(map(abs, errors)),
        },
    }


def summary(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Mean and worst error; and of each dtype how much slower the layout ranked first is than the fastest."""
    errors = [abs(row["error"]) for row in found]
    result: dict[str, Any] = {
        "runs": len(found),
        "mean_error": fmean(errors),
        "median_error": median(errors),
        "worst_error": max(errors),
        "first": {},
    }
    for mode in dict.fromkeys(row["mode"] for row in found):
        mine = [row for row in found if row["mode"] == mode]
        first = min(mine, key=lambda row: row["predicted_s"])
        best = min(mine, key=lambda row: row["measured_s"])
        result["first"][mode] = {
            "ranked_first": first["layout"],
            "fastest": best["layout"],
            "slower": first["measured_s"] / best["measured_s"] - 1,
            "spearman": spearman([row["predicted_s"] for row in mine], [row["measured_s"] for row in mine]),
        }
    return result


def spearman(a: list[float], b: list[float]) -> float:
    """Correlation of the ranks."""
    places = [[sorted(x).index(value) for value in x] for x in (a, b)]
    return float(np.corrcoef(np.array(places))[0, 1]) if len(a) > 2 else float("nan")


def line(row: dict[str, Any]) -> str:
    return (
        f"{row['mode']} {row['layout']:26} predicted {row['predicted_s']:.4f} s  measured {row['measured_s']:.4f} s  "
        f"{100 * row['error']:+6.1f}%  (steps within {100 * row['spread']:.0f}%)"
    )


def report(result: dict[str, Any]) -> str:
    lines = ["| dtype | layout | microbatch | predicted s | measured s | error |", "|" + "---|" * 6]
    for row in result["runs"]:
        lines.append(
            f"| {row['mode']} | {row['layout']} | {row['microbatch']} | {row['predicted_s']:.3f} | "
            f"{row['measured_s']:.3f} | {100 * row['error']:+.1f}% |"
        )
    total = result["summary"]
    lines += [
        "",
        f"{total['runs']} runs: mean error {100 * total['mean_error']:.1f}%, "
        f"median {100 * total['median_error']:.1f}%, worst {100 * total['worst_error']:.1f}%",
    ]
    for mode, first in total["first"].items():
        lines.append(
            f"{mode}: ranked first {first['ranked_first']}, fastest {first['fastest']} "
            f"({100 * first['slower']:.1f}% slower), Spearman {first['spearman']:.2f}"
        )
    if "calibrated" in result:
        fit = result["calibrated"]
        lines.append(
            f"calibrated on every second run: mean error of the others {100 * fit['others']['before']:.1f}% -> "
            f"{100 * fit['others']['after']:.1f}%; factors "
            + ", ".join(f"{name} {factor:.3f}" for name, factor in fit["factors"].items())
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
