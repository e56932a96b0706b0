"""The recipe `talk` on its held-out questions, a table by kind beside two guesses.

    python benchmarks/talk.py --train [--seeds 0 1 2] [--minutes 60] [--layout dp=1] [--out FILE.json]
    python benchmarks/talk.py     (the table of what has been measured)

Each run is `fivefold train talk` with another seed, then `fivefold eval RUN --task talk`. A reply is right if the model
would write all of it. The guesses know the kind of a question, and count as right if they hit the end of the reply:
`nearest` is the answer of the training question that shares most pairs of letters, `frequent` the most frequent one.

The aims, in every run: FACTS of the facts, TIMES the better guess of every other kind, ALL of all questions. --train
adds one row to --out for each seed that it lacks, so it can be stopped and called again. `cpu_seconds` is the time of
all processors from the command's start to its end, preparing the data and validating included.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import fmean
from typing import Any

from fivefold.data import talk

RESULTS = Path(__file__).parent / "results" / "talk.json"
FACTS, TIMES, ALL = 0.9, 2.0, 0.6
ASKED = (
    "what is 48 + 33", "Subtract 48 from 63.", "Spell orchard.", "How many a are in banana?",
    "How many minutes are 27 hours?", "Do you know the capital of Norway?", "What is a baby kangaroo called?",
    "Who is Ada?", "What is 18 minus?",
)  # fmt: skip
"""A conversation, which the README shows. None of its questions is trained on as it stands here."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--train", action="store_true")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--minutes", type=float, default=1e9)
    parser.add_argument("--layout", default="dp=1", help="one rank with one thread by default")
    parser.add_argument("--keep", type=Path, help="folder for the runs")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    found: dict[str, Any] = json.loads(args.out.read_text()) if args.out.exists() else {"runs": []}
    end = time.monotonic() + 60 * args.minutes
    for seed in args.seeds if args.train else ():
        if (seed, args.layout) in {(run["seed"], run["layout"]) for run in found["runs"]}:
            continue
        if time.monotonic() > end:
            break
        found["runs"].append(run(seed, args.layout, args.keep))
        from fivefold.host.machine import describe

        found["machine"] = describe()
        found["summary"] = summary(found["runs"])
        args.out.write_text(json.dumps(found, indent=1) + "\n")
    print("\n".join(table(found["runs"])) if found["runs"] else "nothing has been measured")


def run(seed: int, layout: str, keep: Path | None) -> dict[str, Any]:
    """Trains and evaluates one run."""
    with tempfile.TemporaryDirectory() as folder:
        out = (keep or Path(folder)) / f"talk-{seed}"
        began, before = time.monotonic(), _used()
        _fivefold("train", "talk", "--layout", layout, "--out", out, "--set", f"train.seed={seed}")
        row = {"seed": seed, "layout": layout, "cpu_seconds": round(_used() - before, 1)}
        return row | {"seconds": round(time.monotonic() - began, 1)} | figures(out)


def figures(out: Path) -> dict[str, Any]:
    """What a run answers: shares of right replies by kind, of third questions in a conversation, and ASKED."""
    held_out = [question for kind in talk.KINDS for question in talk.questions(kind, held_out=True)]
    random.Random(0).shuffle(held_out)
    threes = [
        [m for question in three for m in question.messages]
        for three in zip(*[iter(held_out)] * 3, strict=True)
    ]
    with tempfile.TemporaryDirectory() as folder:
        thirds, found = Path(folder) / "thirds.jsonl", Path(folder) / "figures.json"
        thirds.write_text("".join(json.dumps({"messages": three}) + "\n" for three in threes))
        _fivefold("eval", out, "--task", "talk", "--task", thirds, "--out", found)
        first, third = json.loads(found.read_text())["tasks"]
    answers = _fivefold("chat", out, "--temperature", 0, "--json", said="\n".join(ASKED)).splitlines()
    metrics = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return {
        "accuracy": first["accuracy"],
        "thirds": third["accuracy"],
        "kinds": first["kinds"],
        "val_bits": next(row["val_bits"] for row in reversed(metrics) if "val_bits" in row),
        "chat": [json.loads(line) for line in answers],
    }


def _fivefold(*words: object, said: str | None = None) -> str:
    """What a command prints, given what is said to it; otherwise it prints itself. One thread per rank."""
    return subprocess.run(
        [sys.executable, "-m", "fivefold", *map(str, words)], input=said, text=True, check=True,
        stdout=None if said is None else subprocess.PIPE, env=os.environ | {"OMP_NUM_THREADS": "1"},
    ).stdout  # fmt: skip


def _used() -> float:
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return children.ru_utime + children.ru_stime


def summary(runs: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Of each kind, and of all questions: the mean and the least share of right replies, and those of the guesses."""
    shares = {kind: [run["kinds"][kind]["accuracy"] for run in runs] for kind in runs[0]["kinds"]}
    shares["all"] = [run["accuracy"] for run in runs]
    rows = {kind: {"mean": fmean(of_runs), "least": min(of_runs)} for kind, of_runs in shares.items()}
    for name in ("nearest", "frequent"):
        guessed = {kind: figures[name] for kind, figures in runs[0]["kinds"].items()}
        for kind, share in (guessed | {"all": fmean(guessed.values())}).items():
            rows[kind][name] = share
    return rows


def wanted(kind: str, row: dict[str, float]) -> float:
    return {"facts": FACTS, "all": ALL}.get(kind, TIMES * max(row["nearest"], row["frequent"]))


def table(runs: list[dict[str, Any]]) -> list[str]:
    """A row for each kind; below, what falls short."""
    rows = summary(runs)
    lines = [f"| {len(runs)} runs | mean | least | wanted | nearest | frequent |", "|---" * 6 + "|"]
    for kind, row in rows.items():
        cells = [row["mean"], row["least"], wanted(kind, row), row["nearest"], row["frequent"]]
        lines.append(f"| {kind} | {' | '.join(f'{cell:.3f}' for cell in cells)} |")
    missed = [kind for kind, row in rows.items() if row["least"] < wanted(kind, row)]
    thirds = ", ".join(f"{run['thirds']:.3f}" for run in runs)
    used = ", ".join(f"{run['cpu_seconds']:.0f}" for run in runs)
    said = f"missed: {', '.join(missed)}" if missed else "reached"
    return [
        *lines,
        "",
        f"third questions of a conversation: {thirds}",
        f"processor seconds: {used}",
        f"the aims: {said}",
    ]


if __name__ == "__main__":
    main()
