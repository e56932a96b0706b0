"""What each technique of the recipe `speedrun` is worth: with all of them and without each, in pairs of one seed.

    python benchmarks/speedrun.py --train [--seeds 5] [--minutes 60] [--only muon,skips] [--steps 400]
    python benchmarks/speedrun.py --time            (alone on the machine)
    python benchmarks/speedrun.py                   (the tables from what has been measured)

The measures are bits per byte on quickstart_quality.py's test split, tests of Python's standard library that the source
`stdlib` leaves out, and the validation loss at the end. A technique stays in the recipe if leaving it out costs test
bits in the mean of the pairs, by more than twice its standard error. `quickstart` is the recipe that is to be reached,
with its 600 steps.

--train adds one row to --out for each run that it lacks, on one core, so it can be stopped and called again. Losses do
not depend on what else runs, seconds do: --time takes a few steps of each form in turns, on the `machine` of the file.
--steps changes the length of all runs but quickstart's; runs of another length have rows of their own.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

from quickstart_quality import test_files

from fivefold.host.machine import describe

RESULTS = Path(__file__).parent / "results" / "speedrun.json"
PROGRAM = [sys.executable, "-c", "from fivefold.cli.main import main; main()"]
WHOLE, GOAL, STEPS, GOAL_STEPS = "speedrun", "quickstart", 400, 600
EARLIER = ["model.sliding_window=0", "model.window_ramp=", "model.skips=true"]
WITHOUT = {
    "windows": [],
    "muon": ["optim.name=adamw", "optim.lr=2.5e-3"],
    "squared_relu": ["model.squared_relu=false"],
    "value_embeddings": ["model.value_embeddings=false"],
    "skips": ["model.skips=false"],
    "zero_init": ["model.zero_init=false"],
    "tied": ["model.tie_embeddings=false"],
    "long_decay": ["optim.decay_fraction=0.2"],
}
"""The techniques, and the recipe as it was without each. Its windows came last, and its skips went then: all parts but
the windows' were measured without windows, and all but the skips' with skips. (QK-clip is none: norms limit its
scores.)"""
WITHOUT["all_but_muon"] = [
    one for name, sets in WITHOUT.items() if name not in ("muon", "tied") for one in sets
]
ADDED = {
    "with_skips": ["model.skips=true"],
}
"""What the recipe does not have, and how it would."""
FORMS = ADDED | {name: [*EARLIER, *sets] for name, sets in WITHOUT.items()}
BASES = dict.fromkeys(ADDED, WHOLE) | {"windows": "with_skips"}
"""What a form is compared with, if not with `windows`."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--train", action="store_true")
    parser.add_argument("--time", action="store_true")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--minutes", type=float, default=1e9)
    parser.add_argument("--only", default=",".join([GOAL, WHOLE, *FORMS]))
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    found = json.loads(args.out.read_text()) if args.out.exists() else {"runs": [], "step_s": {}}
    if args.train:
        train(found, args)
    if args.time:
        found["machine"], found["step_s"] = describe(), timed()
        save(found, args.out)
    found["summary"] = summary(found, args.steps)
    save(found, args.out)
    print("\n".join(table(found, args.steps)))


def train(found: dict[str, Any], args: argparse.Namespace) -> None:
    end, done = time.monotonic() + 60 * args.minutes, {key_of(run) for run in found["runs"]}
    for seed in range(args.seeds):
        for form in args.only.split(","):
            steps = GOAL_STEPS if form == GOAL else args.steps
            if (form, seed, steps) in done:
                continue
            if time.monotonic() > end:
                return
            found["runs"].append(run(form, seed, steps))
            save(found, args.out)
            print(json.dumps(found["runs"][-1]), flush=True)


def key_of(run: dict[str, Any]) -> tuple[str, int, int]:
    return run["form"], run["seed"], run["steps"]


def run(form: str, seed: int, steps: int) -> dict[str, Any]:
    """One run on one core, and its bits per byte on the test split."""
    with tempfile.TemporaryDirectory() as folder:
        settings = [
            f"train.seed={seed}",
            f"train.steps={steps}",
            "train.sample_tokens=1",
            "observe.tracker=none",
        ]
        lines = trained(Path(folder), form, [*settings, f"train.val_every={max(1, steps // 10)}"])
        command = [*PROGRAM, "eval", Path(folder, "run"), *test_files(), "--json"]
        printed = subprocess.run(command, check=True, capture_output=True, text=True, env=alone()).stdout
    texts = json.loads(printed)["texts"]
    nats, size = (sum(text[key] for text in texts) for key in ("nats", "bytes"))
    losses = [[line["step"], line["val_loss"]] for line in lines if line.get("val_loss")]
    return {
        "form": form, "seed": seed, "steps": steps, "val_loss": losses[-1][1], "losses": losses,
        "test_bits_per_byte": nats / math.log(2) / size,
    }  # fmt: skip


def trained(folder: Path, form: str, settings: list[str]) -> list[dict[str, Any]]:
    """The metrics of a run of a form."""
    recipe = GOAL if form == GOAL else WHOLE
    every = [f"--set={one}" for one in (*FORMS.get(form, []), *settings)]
    command = [*PROGRAM, "train", recipe, "--quiet", "--layout", "dp=1", "--out", folder / "run", *every]
    subprocess.run(command, check=True, env=alone())
    return [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]


def alone() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1"}


def timed(rounds: int = 3, steps: int = 8) -> dict[str, float]:
    """Median seconds per step of each form. In each round all take turns."""
    seconds: dict[str, list[float]] = {}
    for _ in range(rounds):
        for form in (GOAL, WHOLE, *FORMS):
            with tempfile.TemporaryDirectory() as folder:
                settings = [f"train.steps={steps}", "train.val_sequences=1", "train.sample_tokens=1"]
                lines = trained(Path(folder), form, settings)
            seconds.setdefault(form, []).extend(line["step_s"] for line in lines[2:] if "step_s" in line)
    return {form: median(some) for form, some in seconds.items()}


def summary(found: dict[str, Any], steps: int) -> dict[str, Any]:
    """Both recipes, and each technique: how much longer the test's text is without it, in pairs of one seed."""
    runs = {key_of(run): run for run in found["runs"]}
    made: dict[str, Any] = {"recipes": {}, "techniques": {}}
    for form, length in ((GOAL, GOAL_STEPS), (WHOLE, steps)):
        if rows := [run for key, run in runs.items() if (key[0], key[2]) == (form, length)]:
            each = found["step_s"].get(form)
            means = {key: fmean(row[key] for row in rows) for key in ("val_loss", "test_bits_per_byte")}
            made["recipes"][form] = {
                "seeds": len(rows),
                "steps": length,
                **means,
                "seconds": each and length * each,
            }
    for form in FORMS:
        base = BASES.get(form, "windows")
        gains = [
            run["test_bits_per_byte"] - runs[whole]["test_bits_per_byte"]
            for key, run in runs.items()
            if (key[0], key[2]) == (form, steps) and (whole := (base, *key[1:])) in runs
        ]
        if len(gains) > 1:
            sign, pair = (-1, (base, form)) if form in ADDED else (1, (form, base))
            gain, error = sign * fmean(gains), stdev(gains) / math.sqrt(len(gains))
            step_s = [found["step_s"].get(one) for one in pair]
            made["techniques"][form] = {
                "pairs": len(gains), "gain": gain, "error": error, "helps": "yes" if gain > 2 * error else "no",
                "without_s": step_s[0], "with_s": step_s[1],
            }  # fmt: skip
    return made


def table(found: dict[str, Any], steps: int) -> list[str]:
    made = summary(found, steps)
    lines = ["| Recipe | Seeds | Steps | Validation loss | Test bits per byte | Time |", "|---" * 6 + "|"]
    for form, row in made["recipes"].items():
        cells = f"{row['seeds']} | {row['steps']} | {row['val_loss']:.3f} | {row['test_bits_per_byte']:.3f}"
        lines.append(f"| `{form}` | {cells} | {shown(row['seconds'], '.0f')} |")
    head = (
        "| Technique | Pairs | Test bits that it saves | Standard error | Step without it | With it | Helps |"
    )
    lines += ["", head, "|---" * 7 + "|"]
    for form, row in made["techniques"].items():
        cells = f"{row['pairs']} | {row['gain']:+.4f} | {row['error']:.4f} | {shown(row['without_s'], '.3f')}"
        lines.append(f"| `{form}` | {cells} | {shown(row['with_s'], '.3f')} | {row['helps']} |")
    return lines


def shown(seconds: float | None, form: str) -> str:
    return "-" if seconds is None else f"{seconds:{form}} s"


def save(found: dict[str, Any], out: Path) -> None:
    out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
