"""Loss with compressed gradient sums beside whole ones, bytes on the wire, and seconds of encoding.

    python benchmarks/compression.py [--only int8 topk:0.01] [--seeds 3] [--steps 200] [--out FILE.json]

Work: the quickstart's model and text on two ranks, as bytes, with shorter sequences and a smaller batch, so that a run
takes less than a minute. All runs of a seed see the same batches. Validation losses are means over seeds.

Encoding is timed apart from messages: one rank of two, whose messages are answered at once by what it sent itself.
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
from statistics import fmean, median, stdev
from typing import Any

import torch

from fivefold.comm.axis import Axis, Started
from fivefold.comm.compress import compressed_sum
from fivefold.data import prepare
from fivefold.host.machine import describe
from fivefold.launch.local import start_ranks
from fivefold.launch.ranks import Ranks
from fivefold.plan import volume
from fivefold.plan.clusters import parse
from fivefold.plan.predict import setting
from fivefold.plan.software import FIVEFOLD_CPU
from fivefold.recipe import Recipe, load, resolve
from fivefold.recipe.rules import expected_vocab_size
from fivefold.schedules.compression import compressor
from fivefold.spread.layout import Layout
from fivefold.train.job import Job
from fivefold.train.run import run_rank

SETS = ["model.seq_len=128", "data.tokenizer=bytes", "train.global_batch_size=8", "train.val_sequences=256",
        "train.sample_every=0", "train.sample_tokens=1", "observe.tensorboard=false"]  # fmt: skip
TEXTS = ["none", "int8", "1bit", "topk:0.1", "topk:0.01", "randk:0.1", "randk:0.01", "powersgd:4"]
BUCKET = [(1536, 512), (512, 1536), (1536, 1024), (2048, 2048), (512,)]  # 7.3M elements, 28 MiB


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", default=TEXTS)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=200)
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
            **sent(text),
            **encoding(text),
        }
        print(text, [round(run["val_loss"], 4) for run in runs], file=sys.stderr)
        if args.out:
            rows = {text: found[text] for text in TEXTS if text in found}
            args.out.write_text(json.dumps({"machine": describe(), "rows": rows}, indent=1) + "\n")
    print(table({text: found[text] for text in TEXTS if text in found}))


def recipe_of(text: str, *sets: str) -> Recipe:
    return load("quickstart", [*SETS, *sets], "dp=2" if text == "none" else f"dp=2,compress={text}")


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


def sent(text: str) -> dict[str, float]:
    """Bytes that leave a rank of two per step, and their ratio to fp32's."""

    def leaving(text: str) -> int:
        recipe = recipe_of(text)
        vocabulary = expected_vocab_size(recipe)
        assert vocabulary, "bytes have a vocabulary"
        recipe = resolve(recipe, vocab_size=vocabulary)
        layout = Layout.from_recipe(recipe.layout)
        return volume.sent(setting(recipe.model, layout, parse("h100"), 4, 1, "bf16", FIVEFOLD_CPU))["dp"]

    return {"bytes": leaving(text), "ratio": leaving("none") / leaving(text)}


def encoding(text: str) -> dict[str, float]:
    """Milliseconds of encoding and decoding a bucket, and the passes over its memory that take as long."""

    class Answered(Axis):
        """The first of two ranks; the other one sends the same."""

        def __init__(self) -> None:
            self.index, self.size, self.device = 0, 2, torch.device("cpu")

        def start_all_reduce(self, x: torch.Tensor, op: str = "sum") -> Started:
            return Started(self, "all_reduce", x)

        def start_all_to_all(self, x: torch.Tensor) -> Started:
            return Started(self, "all_to_all", x.clone())

        def start_all_gather(self, x: torch.Tensor, out: torch.Tensor | None = None) -> Started:
            return Started(self, "all_gather", torch.cat([x, x]))

    compress, size = compressor(text), sum(map(math.prod, BUCKET))
    if compress is None:
        return {"encoding_ms": 0.0, "passes": 0.0}
    one = compressed_sum(compress, BUCKET, Answered(), 0)
    gradient, other, times, copies = torch.randn(size), torch.empty(size), [], []
    for _ in range(7):
        given = gradient.clone()
        began = time.perf_counter()
        messages = one.sum(given)
        result = next(messages)()
        try:
            while True:
                result = messages.send(result)()
        except StopIteration:
            times.append(time.perf_counter() - began)
        began = time.perf_counter()
        other.copy_(gradient)
        copies.append((time.perf_counter() - began) / 2)  # it reads, and writes
    return {"encoding_ms": 1e3 * median(times[1:]), "passes": median(times[1:]) / median(copies)}


def table(rows: dict[str, Any]) -> str:
    lines = [
        "| `compress` | bytes per step | fp32 by | validation loss | spread of seeds | to `none` | encoding, ms |",
        "|" + "---|" * 7,
    ]
    losses = {text: [run["val_loss"] for run in row["runs"]] for text, row in rows.items()}
    for text, row in rows.items():
        mean, spread = fmean(losses[text]), stdev(losses[text]) if len(losses[text]) > 1 else 0.0
        to = f"{100 * (mean / fmean(losses['none']) - 1):+.2f}%" if "none" in losses else ""
        lines.append(
            f"| `{text}` | {row['bytes']:,} | {row['ratio']:.1f} | {mean:.4f} | {spread:.4f} | {to} | "
            f"{row['encoding_ms']:.0f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
