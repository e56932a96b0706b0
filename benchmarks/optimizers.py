"""The common work (quickstart) with each optimizer: loss against tokens, and against seconds.

    python benchmarks/optimizers.py --train [--steps 600] [--seeds 5] [--only muon,soap] [--minutes 10]
    python benchmarks/optimizers.py --time          (alone on the machine)
    python benchmarks/optimizers.py                 (the table from what has been measured)
    python benchmarks/optimizers.py --merge FILE    (adds what another --out has)

Training and timing are apart: losses do not depend on what else runs, seconds do. --train adds one row to --out for
each (optimizer, learning rate, seed) that it lacks, so it can be stopped and called again; --minutes ends it early.
Every rate of RATES is tried with seed 0, the best one with the other seeds. --time takes rounds of a few steps of each
optimizer in turn, and keeps the medians. Seconds to a loss are the steps to it times the optimizer's seconds per step.

The measure is AdamW's final validation loss: steps and seconds to it, medians over the seeds. The schedule is the
recipe's, over the whole run, so a run that gets there early has not decayed yet.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

RESULTS = Path(__file__).parent / "results" / "optimizers.json"
RATES = {
    "adamw": (1.25e-3, 2.5e-3, 5e-3),
    "muon": (2.5e-3, 5e-3, 1e-2, 2e-2),
    "soap": (2.5e-3, 5e-3, 1e-2),
    "lion": (3e-4, 6e-4, 1.2e-3),
    "adafactor": (1.25e-3, 2.5e-3, 5e-3, 1e-2),
    "adamw8bit": (2.5e-3,),
    "sophia": (5e-4, 1e-3),
    "sophia_gnb": (5e-4,),
    "nadam": (2.5e-3,),
    "radam": (2.5e-3,),
    "adamsage": (2.5e-3,),
    "adam": (2.5e-3,),
    "rmsprop": (1e-3,),
    "adagrad": (1e-2,),
    "nesterov": (0.1, 0.5),
    "momentum": (0.1,),
    "sgd": (1.0,),
}
"""Learning rates to try. Weight decay that is added to the gradient is off (COUPLED)."""
COUPLED = {"sgd", "momentum", "nesterov", "adagrad", "rmsprop", "adam", "radam", "nadam"}
NAMED = {"sophia_gnb": ["optim.name=sophia", "optim.estimator=gnb"]}
"""Rows that are more than a name of the registry."""
CHECKS = 20  # validations per run


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--train", action="store_true")
    parser.add_argument("--time", action="store_true")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--only", default=",".join(RATES))
    parser.add_argument("--minutes", type=float, default=1e9)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--merge", type=Path)
    args = parser.parse_args()
    found = json.loads(args.out.read_text()) if args.out.exists() else {"runs": [], "step_s": {}}
    if args.merge:
        merge(found, json.loads(args.merge.read_text()))
        save(found, args.out)
    names = args.only.split(",")
    if args.train:
        train(found, names, args)
    if args.time:
        found["step_s"] |= timed(names)
        save(found, args.out)
    print("\n".join(table(found, args.steps)))


def merge(found: dict[str, Any], more: dict[str, Any]) -> None:
    """Adds runs that are missing, and the newer seconds per step."""

    def key(run: dict[str, Any]) -> tuple[Any, ...]:
        return run["optimizer"], run["lr"], run["seed"], run["steps"]

    has = {key(run) for run in found["runs"]}
    found["runs"] += [run for run in more["runs"] if key(run) not in has]
    found["step_s"] |= more["step_s"]


def train(found: dict[str, Any], names: list[str], args: argparse.Namespace) -> None:
    end = time.monotonic() + 60 * args.minutes
    for name, lr, seed in wanted(found, names, args):
        if time.monotonic() > end:
            return
        found["runs"].append(run(name, lr, seed, args.steps))
        save(found, args.out)
        print(json.dumps({k: v for k, v in found["runs"][-1].items() if k != "losses"}), flush=True)


def wanted(found: dict[str, Any], names: list[str], args: argparse.Namespace) -> Any:
    """(optimizer, rate, seed) of the runs that are missing: first all rates, then the best with other seeds."""
    has = {(r["optimizer"], r["lr"], r["seed"]) for r in found["runs"] if r["steps"] == args.steps}
    yield from ((name, lr, 0) for name in names for lr in RATES[name] if (name, lr, 0) not in has)
    for seed in range(1, args.seeds):
        for name in names:
            best = min(of(found, name, args.steps), key=lambda r: (r["seed"] > 0, r["final"]))["lr"]
            if (name, best, seed) not in has:
                yield name, best, seed


def of(found: dict[str, Any], name: str, steps: int) -> list[dict[str, Any]]:
    return [r for r in found["runs"] if r["optimizer"] == name and r["steps"] == steps]


def sets_of(name: str, lr: float) -> list[str]:
    return [
        *NAMED.get(name, [f"optim.name={name}"]),
        f"optim.lr={lr}",
        *(["optim.weight_decay=0.0"] if name in COUPLED else []),
    ]


def run(name: str, lr: float, seed: int, steps: int) -> dict[str, Any]:
    """One run on one core: its validation losses."""
    sets = [*sets_of(name, lr), f"train.seed={seed}", f"train.steps={steps}"]
    sets += [f"train.val_every={max(1, steps // CHECKS)}", "train.val_sequences=128"]
    lines = fivefold(sets)
    losses = [[line["step"], line["tokens"], line["val_loss"]] for line in lines if "val_loss" in line]
    return {
        "optimizer": name, "lr": lr, "seed": seed, "steps": steps, "final": losses[-1][2], "losses": losses,
    }  # fmt: skip


def fivefold(sets: list[str]) -> list[dict[str, Any]]:
    """The metrics of a quickstart run with these settings, on one core."""
    sets = [*sets, "train.sample_every=1000000", "train.sample_tokens=1", "observe.tracker=none"]
    with tempfile.TemporaryDirectory() as folder:
        program = "from fivefold.cli.main import main; main()"
        command = [
            sys.executable,
            "-c",
            program,
            "train",
            "quickstart",
            "--layout",
            "dp=1",
            "--out",
            folder + "/run",
        ]
        for one in sets:
            command += ["--set", one]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        path = Path(folder) / "run" / "metrics.jsonl"
        if done.returncode:
            raise SystemExit(done.stderr[-2000:])
        lines = [json.loads(line) for line in path.read_text().splitlines()]
    found: dict[int, dict[str, Any]] = {}
    for line in lines:  # validation has lines of its own
        found.setdefault(line["step"], {}).update(line)
    return list(found.values())


def timed(names: list[str], rounds: int = 3, steps: int = 8) -> dict[str, float]:
    """Median seconds per step of each optimizer. In each round all take turns."""
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(rounds):
        for name in names:
            sets = [*sets_of(name, RATES[name][0]), f"train.steps={steps}", "train.val_sequences=1"]
            seconds[name] += [line["step_s"] for line in fivefold(sets)[2:] if "step_s" in line]
    return {name: median(some) for name, some in seconds.items()}


def table(found: dict[str, Any], steps: int) -> list[str]:
    """A row per optimizer at its best rate: final loss, steps and seconds to AdamW's."""
    rows = {name: best for name in RATES if (best := best_runs(found, name, steps))}
    if "adamw" not in rows:
        return ["no run of adamw yet"]
    target = median(r["final"] for r in rows["adamw"])
    lines = [f"to AdamW's final validation loss {target:.4f} of {steps} steps", ""]
    lines.append("| Optimizer | lr | Seeds | Final loss | Steps | Seconds per step | Seconds |")
    lines.append("|---|---|---|---|---|---|---|")
    for name, runs in sorted(rows.items(), key=lambda row: median(r["final"] for r in row[1])):
        reached = [first for r in runs if (first := to_loss(r, target)) is not None]
        at = median(reached) if len(reached) == len(runs) else None
        each = found["step_s"].get(name)
        cells = [name, f"{runs[0]['lr']:g}", str(len(runs)), f"{median(r['final'] for r in runs):.4f}"]
        cells += [f"{at:.0f}" if at else "-", f"{each:.3f}" if each else "-"]
        cells.append(f"{at * each:.0f}" if at and each else "-")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def best_runs(found: dict[str, Any], name: str, steps: int) -> list[dict[str, Any]]:
    """The runs at the rate that is best with seed 0."""
    runs = of(found, name, steps)
    first = [r for r in runs if r["seed"] == 0]
    if not first:
        return []
    lr = min(first, key=lambda r: r["final"])["lr"]
    return [r for r in runs if r["lr"] == lr]


def to_loss(run: dict[str, Any], target: float) -> float | None:
    """The step at which a run reaches a loss, interpolated between validations."""
    before = None
    for step, _, loss in run["losses"]:
        if loss <= target:
            if before is None or before[1] == loss:
                return step
            share = (before[1] - target) / (before[1] - loss)
            return before[0] + share * (step - before[0])
        before = (step, loss)
    return None


def save(found: dict[str, Any], out: Path) -> None:
    from fivefold.host.machine import describe

    found["machine"] = describe()
    out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
