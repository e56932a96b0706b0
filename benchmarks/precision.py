"""Loss of the common work (quickstart) in each precision mode, with several seeds.

    python benchmarks/precision.py --modes bf16 fp8 --steps 300 --out benchmarks/results/precision.json
    python benchmarks/precision.py --modes fp8:fp8_scaling=tensor,fp8_backward=e4m3 --seeds 0 --steps 300 --out ...

Each run is `fivefold train quickstart --layout dp=1` with `train.seed`, which chooses weights and order of the data. A
mode may have fields of [precision] behind a colon. Results are added to the file: a run that it has is not repeated.
`python docs/make_pictures.py` draws the curves.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import fmean
from typing import Any

EVERY = 10  # steps of a curve's points


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--modes", nargs="+", default=["fp32", "bf16", "fp8"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--out", type=Path, default=Path("precision.json"))
    args = parser.parse_args()
    found: dict[str, Any] = json.loads(args.out.read_text()) if args.out.exists() else {"runs": {}}
    for seed in args.seeds:
        for mode in args.modes:
            name = f"{mode} seed {seed}"
            if name not in found["runs"]:
                found["runs"][name] = trained(mode, seed, args.steps)
                found |= {"steps": args.steps, "every": EVERY, **summary(found["runs"])}
                args.out.write_text(json.dumps(found, indent=1) + "\n")
    for mode, row in found["modes"].items():
        print(mode, row)


def trained(mode: str, seed: int, steps: int) -> dict[str, Any]:
    """One run: its curve, the means of `EVERY` steps, and the final validation loss."""
    name, _, fields = mode.partition(":")
    sets = [f"precision.mode={name}", f"train.seed={seed}", f"train.steps={steps}", "train.sample_every=0"]
    sets += [f"train.val_every={steps}", "observe.tracker=none"]
    sets += [f"precision.{field}" for field in fields.split(",") if field]
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, "run")
        command = [sys.executable, "-m", "fivefold.cli.main", "train", "quickstart", "--layout", "dp=1"]
        subprocess.run(
            [*command, "--out", str(run), *(x for one in sets for x in ("--set", one))], check=True
        )
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    return {
        "val_loss": next(line["val_loss"] for line in reversed(lines) if "val_loss" in line),
        "curve": [round(fmean(losses[i : i + EVERY]), 4) for i in range(0, len(losses), EVERY)],
        "seconds_per_step": round(fmean(line["step_s"] for line in lines if "step_s" in line), 4),
    }


def summary(runs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """By mode: the mean of the final validation losses, and its ratio to bf16's over the same seeds."""
    modes: dict[str, dict[int, float]] = {}
    for name, run in runs.items():
        mode, _, seed = name.partition(" seed ")
        modes.setdefault(mode, {})[int(seed)] = run["val_loss"]
    plain, rows = modes.get("bf16", {}), dict[str, Any]()
    for mode, losses in modes.items():
        rows[mode] = {"seeds": sorted(losses), "val_loss": round(fmean(losses.values()), 5)}
        if common := losses.keys() & plain.keys():
            ratio = fmean(losses[s] for s in common) / fmean(plain[s] for s in common)
            rows[mode]["to_bf16"] = round(ratio, 5)
    return {"modes": rows}


if __name__ == "__main__":
    main()
