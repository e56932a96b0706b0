"""Loss with compressed gradient sums beside whole ones, bytes on the wire, and seconds of encoding.

    python benchmarks/compression.py [--only int8 topk:0.01] [--seeds 3] [--steps 200] [--out FILE.json]

Work: the quickstart's model and text on two ranks, as bytes, with shorter sequences and a smaller batch, so that a run
takes less than a minute. All runs of a seed see the same batches. Validation losses are means over seeds.

Bytes are those of a step, and of the whole run with the first steps, which are not compressed (`@N` behind a text sets
`compress_after`). Encoding is timed apart from messages: one rank of two, whose messages are answered at once.
`--out` may exist: its other rows are kept, so a long series can be measured in parts.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
import time
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch

from fivefold.data import prepare
from fivefold.host.machine import describe
from fivefold.launch.local import start_ranks
from fivefold.launch.ranks import Ranks
from fivefold.recipe import Recipe, expected_vocab_size, load, resolve
from fivefold.sharding.layout import Layout
from fivefold.train.job import Job
from fivefold.train.run import run_rank
from fivefold_plan.bench.hardware import SHAPES, encoding
from fivefold_plan.cluster.clusters import parse
from fivefold_plan.messages import volume
from fivefold_plan.setting import FIVEFOLD_CPU, setting

SETS = ["model.seq_len=128", "data.tokenizer=bytes", "train.global_batch_size=8", "train.val_sequences=256",
        "train.sample_every=0", "train.sample_tokens=1", "observe.tracker=none"]  # fmt: skip
TEXTS = ["none", "int8", "int4", "1bit", "topk:0.5", "topk:0.1", "topk:0.01", "randk:0.5", "randk:0.1",
         "powersgd:32", "powersgd:16", "powersgd:4"]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", default=TEXTS)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    found: dict[str, Any] = {}
    if args.out and args.out.exists():
        found = json.loads(args.out.read_text(encoding="utf-8"))["rows"]
    for text in args.only:
        began = time.perf_counter()
        runs = trained(text, args.seeds, args.steps)
        seconds = round(time.perf_counter() - began)
        found[text] = {
            "runs": runs,
            "steps": args.steps,
            "seconds": seconds,
            **sent(text, args.steps),
            "encoding_ms_per_mb": encoding_ms(text),
        }
        print(text, [round(run["val_loss"], 4) for run in runs], file=sys.stderr)
        if args.out:
            rows = {text: found[text] for text in TEXTS if text in found}
            args.out.write_text(json.dumps({"machine": describe(), "rows": rows}, indent=1) + "\n")
    print(table({text: found[text] for text in TEXTS if text in found}))


def recipe_of(text: str, *sets: str) -> Recipe:
    compress, _, after = text.partition("@")
    late = f",compress_after={after}" if after else ""
    return load("quickstart", [*SETS, *sets], "dp=2" if text == "none" else f"dp=2,compress={compress}{late}")


def series(text: str, seeds: int, steps: int, out: Path, ranks: Ranks) -> None:
    """Runs on one of two ranks: every seed, one after the other."""
    for seed in range(seeds):
        recipe = recipe_of(text, f"train.steps={steps}", f"train.val_every={steps}", f"train.seed={seed}")
        data = prepare(recipe)
        run_rank(Job(resolve(recipe, vocab_size=data.vocab_size), out / str(seed), data), ranks)


def on_rank(text: str, seeds: int, steps: int, out: Path, ranks: Ranks) -> None:
    """Silences a rank's console."""
    with (
        open(os.devnull, "w", encoding="utf-8") as nowhere,
        redirect_stdout(nowhere),
        redirect_stderr(nowhere),
    ):
        series(text, seeds, steps, out, ranks)


def trained(text: str, seeds: int, steps: int) -> list[dict[str, Any]]:
    """The last validation of each seed's run."""
    with tempfile.TemporaryDirectory() as folder:
        start_ranks(partial(on_rank, text, seeds, steps, Path(folder)), 2, fork=False)
        return [last_of(Path(folder, str(seed), "metrics.jsonl")) for seed in range(seeds)]


def last_of(path: Path) -> dict[str, Any]:
    """The last validation loss, and the mean of what was left out by kind of parameter."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    last = next(line for line in reversed(lines) if "val_loss" in line)
    kinds: dict[str, list[float]] = {}
    for name, error in last.get("compression_errors", {}).items():
        kinds.setdefault(".".join(part for part in name.split(".") if not part.isdigit()), []).append(error)
    errors = {kind: round(fmean(some), 4) for kind, some in kinds.items()}
    return {"val_loss": last["val_loss"], "errors": errors}


def sent(text: str, steps: int) -> dict[str, float]:
    """Bytes that leave a rank of two per compressed step, and the ratios of fp32's to them, per step and per run."""

    def resolved(text: str) -> Recipe:
        recipe = recipe_of(text, f"train.steps={steps}")
        return resolve(recipe, vocab_size=expected_vocab_size(recipe) or 0)

    def leaving(recipe: Recipe) -> int:
        layout = Layout.from_recipe(recipe.layout)
        return volume.sent(setting(recipe.model, layout, parse("h100"), 4, 1, "bf16", FIVEFOLD_CPU))["dp"]

    whole, mine = leaving(resolved("none")), resolved(text)
    size, after = leaving(mine), min(steps, mine.layout.compress_after or 0)
    in_run = after * whole + (steps - after) * size
    return {"bytes": size, "after": after, "ratio": whole / size, "run_ratio": steps * whole / in_run}


def encoding_ms(text: str) -> float:
    """Milliseconds of encoding and decoding per MB of fp32 gradients."""
    if text == "none":
        return 0.0
    return 1e3 * encoding(text.partition("@")[0], torch.device("cpu")) / (4e-6 * sum(map(math.prod, SHAPES)))


def table(rows: dict[str, Any]) -> str:
    lines = [
        "| `compress` | first whole steps | fp32 by, per step | per run | validation loss | spread | to `none` | "
        "not sent | encoding, ms per MB |",
        "|" + "---|" * 9,
    ]
    losses = {text: [run["val_loss"] for run in row["runs"]] for text, row in rows.items()}
    for text, row in rows.items():
        mean, spread = fmean(losses[text]), stdev(losses[text]) if len(losses[text]) > 1 else 0.0
        to = f"{100 * (mean / fmean(losses['none']) - 1):+.2f}%" if "none" in losses else ""
        errors = [fmean(run["errors"].values()) for run in row["runs"] if run["errors"]] or [0.0]
        lines.append(
            f"| `{text.partition('@')[0]}` | {row['after']} | {row['ratio']:.1f} | {row['run_ratio']:.1f} | {mean:.4f} "
            f"| {spread:.4f} | {to} | {100 * fmean(errors):.0f}% | {row['encoding_ms_per_mb']:.1f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
