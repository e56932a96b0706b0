"""Memory of a rank on GPUs: the planner's formula against the trainer's own step, traced with compiled blocks.

    python benchmarks/planner/gpu_memory.py [--seed 27] [--number 20] [--out benchmarks/results/planner_gpu_memory.json]
    python benchmarks/planner/gpu_memory.py --hard --seed 30 [--out benchmarks/results/planner_gpu_memory_hard.json]

Draws valid settings of the shipped models on H100s by a seed: model, layout, recomputation, sequences per microbatch.
--hard: of models with experts, some of which offload, and of dense ones that offload. --out: rows that are in the file
are planned, but not traced again.
"traced" is the peak of all live tensors on rank 0 (trace/step.py) with the tensors kept for backward that PyTorch's
partitioner chooses (trace/compiled.py); "in Python" is the same without compilation (not with --hard). Nothing runs on
a GPU. About ten minutes on one core, with --hard an hour or two.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean

from fivefold.errors import UserError
from fivefold.host.devices import GIB
from fivefold.recipe import Recipe, load, resolve
from fivefold.sharding.layout import Layout
from fivefold.sharding.tiers import NOT_OFFLOADED, OFFLOADS
from fivefold_plan.cluster.clusters import parse
from fivefold_plan.predict import predict
from fivefold_plan.trace.gpu import on_gpu

MODELS = (
    "gpt2-124m", "gpt2-1.5b", "bert-large-mlm", "llama2-7b", "llama3-8b", "llama2-13b", "llama3-70b", "qwen3-8b",
    "mixtral-8x7b", "qwen3-30b-a3b",
)  # fmt: skip
RANKS = (1, 2, 4, 8, 16, 64)
EXPERTS = {"mixtral-8x7b": (8, 16, 64), "qwen3-30b-a3b": (2, 4, 8, 16, 64), "deepseek-v3": (256, 512, 1024)}
"""The models of --hard, and the numbers of ranks that may hold them."""
OFFLOADED = ("llama3-8b", "qwen3-8b", "llama2-13b", "llama3-70b")
SCHEDULES = ("1f1b", "gpipe", "interleaved", "zbv")


@dataclass
class Row:
    """Bytes on rank 0."""

    model: str
    layout: str
    microbatch: int
    planned: int
    traced: int
    in_python: int | None
    parts: dict[str, dict[str, int]]

    @property
    def error(self) -> float:
        return self.planned / self.traced - 1


def drawn(numbers: random.Random, hard: bool) -> tuple[str, str, int, Recipe]:
    """A setting that is valid and fits its GPUs. hard: with experts, or offloaded, or both."""
    while True:
        name = numbers.choice((*EXPERTS, numbers.choice(OFFLOADED)) if hard else MODELS)
        ranks = numbers.choice(EXPERTS.get(name, RANKS) if hard else RANKS)
        sizes = {axis: numbers.choice((1, 1, 2, 4, 8)) for axis in ("tp", "pp", "cp", "ep")}
        dp = ranks // (sizes["tp"] * sizes["pp"] * sizes["cp"])
        fields: dict[str, object] = {"dp": dp, **{axis: size for axis, size in sizes.items() if size > 1}}
        if sizes["tp"] > 1:
            fields["sp"] = numbers.choice(("true", "false"))
        if sizes["pp"] > 1:
            fields["schedule"] = numbers.choice(SCHEDULES)
            fields["virtual_stages"] = 2 if fields["schedule"] in ("interleaved", "zbv") else 1
        fields["zero"] = numbers.choice((0, 1, 2, 3)) if dp > 1 else 0
        fields["recompute"] = numbers.choice(("none", "none", "selective", "full"))
        if hard:
            offloads = [kind for kind in OFFLOADS if name in EXPERTS or kind != NOT_OFFLOADED]
            kinds = (NOT_OFFLOADED, numbers.choice(offloads)) if name in EXPERTS else offloads
            fields["offload"] = numbers.choice(kinds)
        layout, microbatch = (
            ",".join(f"{key}={value}" for key, value in fields.items()),
            numbers.choice((1, 2, 4)),
        )
        if dp * sizes["tp"] * sizes["pp"] * sizes["cp"] != ranks:
            continue
        try:
            recipe = load(name, ["precision.mode=bf16", f"train.microbatch_size={microbatch}"], layout)
            cluster = parse(f"h100:{ranks}")
            memory = predict(recipe, cluster).memory
        except UserError:
            continue
        if max(one.total for one in memory) < cluster.device.memory:
            return name, layout, microbatch, resolve(recipe, vocab_size=recipe.model.vocab_size or 32_000)


def planned(recipe: Recipe) -> dict[str, int]:
    return predict(recipe, parse(f"h100:{Layout.from_recipe(recipe.layout).ranks}")).memory[0].as_json()


def measure(name: str, layout: str, microbatch: int, recipe: Recipe, in_python: bool = True) -> Row:
    plan = planned(recipe)
    answers = on_gpu([(recipe, 0)], in_python=[(recipe, 0)] if in_python else [])
    for answer in answers:
        if "error" in answer:
            raise RuntimeError(f"{name} {layout}: {answer['error']}")
    memories = [answer["exact"]["memory"] for answer in answers]
    names = ("traced", "in Python")[: len(memories)]
    parts = {"planned": plan} | {n: memory["at_peak"] for n, memory in zip(names, memories, strict=True)}
    peaks = [*(memory["peak_bytes"] for memory in memories), None]
    return Row(name, layout, microbatch, plan["total"], peaks[0], peaks[1], parts)


def table(rows: list[Row]) -> str:
    head = "| model | layout | sequences | planned, GiB | traced | in Python | error |\n|---|---|---|---|---|---|---|"
    lines = [
        f"| {r.model} | `{r.layout}` | {r.microbatch} | {r.planned / GIB:.2f} | {r.traced / GIB:.2f} | "
        f"{f'{r.in_python / GIB:.2f}' if r.in_python else ''} | {100 * r.error:+.1f}% |"
        for r in rows
    ]
    mean, worst = fmean(abs(r.error) for r in rows), max((r.error for r in rows), key=abs)
    return "\n".join([head, *lines, "", f"mean error {100 * mean:.2g}%, worst {100 * worst:+.2g}%"])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=27)
    parser.add_argument("--number", type=int, default=20)
    parser.add_argument("--hard", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    import torch

    numbers, rows = random.Random(args.seed), list[Row]()
    there = json.loads(args.out.read_text())["rows"] if args.out and args.out.exists() else []
    known = {(row["model"], row["layout"], row["microbatch"]): Row(**row) for row in there}
    for _ in range(args.number):
        name, layout, microbatch, recipe = drawn(numbers, args.hard)
        if row := known.get((name, layout, microbatch)):
            plan = planned(recipe)
            row = replace(row, planned=plan["total"], parts=row.parts | {"planned": plan})
        else:
            row = measure(name, layout, microbatch, recipe, not args.hard)
        rows.append(row)
        print(f"{name} {layout} {microbatch}: {100 * row.error:+.2f}%", file=sys.stderr, flush=True)
        if args.out:
            later = [row for row in known.values() if row.layout not in {one.layout for one in rows}]
            written = [
                asdict(row) for row in (*rows, *later)
            ]  # a run that is stopped keeps what it has not reached
            found = {"seed": args.seed, "torch": torch.__version__, "rows": written}
            args.out.write_text(json.dumps(found, indent=1) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
