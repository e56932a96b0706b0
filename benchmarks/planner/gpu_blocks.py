"""What a block is on a GPU, for each architecture and family of layouts: graphs, breaks, kernels, bytes, host waits.

    python benchmarks/planner/gpu_blocks.py [--only llama ...] [--layouts tp ...] [--out FILE]

Found without a GPU (trace/compiled.py): graphs by Dynamo, kernels by Inductor's scheduler, tensors kept for backward by
AOTAutograd's partitioner. "unplanned" is what the block takes beyond the plan: the bytes that its element-wise kernels
move, and its launches, at an H100's rates, forward and backward. Host waits are those of a whole step, with two blocks
and one microbatch. About ten minutes on one core.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from fivefold.recipe import Recipe, load, resolve
from fivefold.sharding.layout import Layout
from fivefold_plan.cluster.clusters import parse
from fivefold_plan.memory.memory import kept
from fivefold_plan.predict import predict
from fivefold_plan.setting import Setting
from fivefold_plan.trace.blocks import Block, kinds
from fivefold_plan.trace.gpu import on_gpu

ARCHS = {
    "llama": ("llama3-8b", []),
    "gpt2": ("gpt2-774m", ["model.dropout=0.1"]),
    "bert": ("bert-large-mlm", []),
    "qwen3": ("qwen3-8b", []),
    "olmo2": ("llama2-7b", ["model.arch=olmo2"]),
    "moe": ("mixtral-8x7b", []),
    "deepseek": ("deepseek-v3", ["model.dense_layers=0"]),
}
LAYOUTS = {
    "one GPU": "dp=1",
    "ZeRO-3": "dp=2,zero=3",
    "recompute selective": "dp=1,recompute=selective",
    "recompute full": "dp=1,recompute=full",
    "recompute operations": "dp=1,recompute=ops:attention+gate+norm",
    "tp": "tp=2",
    "tp, sp": "tp=2,sp=true",
    "tp, sp, chunks": "tp=2,sp=true,tp_chunks=4",
    "tp, sp, recompute full": "tp=2,sp=true,recompute=full",
    "ring": "cp=2",
    "Ulysses": "cp=2,cp_method=ulysses",
    "split backward": "pp=2,schedule=zbv,virtual_stages=1",
    "ep": "dp=2,ep=2",
}
FIXED = ["precision.mode=bf16", "model.layers=2", "train.microbatch_size=1", "model.tie_embeddings=false"]


@dataclass
class Row:
    """planned: bytes kept for backward. unplanned: seconds of a block."""

    arch: str
    family: str
    layout: str
    block: Block
    planned: int
    unplanned: float
    waits: int


def jobs(only: list[str], families: list[str]) -> list[tuple[str, str, str]]:
    return [
        (arch, family, layout)
        for arch in only or ARCHS
        for family, layout in LAYOUTS.items()
        if (not families or family in families) and ("ep=" not in layout or arch in ("moe", "deepseek"))
    ]


def recipe_of(arch: str, layout: str) -> Recipe:
    name, sets = ARCHS[arch]
    virtual = ["model.layers=4"] if "zbv" in layout else []
    loaded = load(name, [*FIXED, *virtual, *sets], layout)
    size = Layout.from_recipe(loaded.layout)
    train = loaded.train.model_copy(update={"global_batch_size": size.dp * size.pp})
    return resolve(loaded.model_copy(update={"train": train}), vocab_size=loaded.model.vocab_size or 32_000)


def setting_of(recipe: Recipe) -> Setting:
    return predict(recipe, parse(f"h100:{Layout.from_recipe(recipe.layout).ranks}")).setting


def planned_bytes(s: Setting) -> int:
    """That the last block keeps for backward."""
    return round(kept(s.last_block, s.recompute[-1], s.software))


def measure(arch: str, family: str, layout: str) -> Row:
    recipe = recipe_of(arch, layout)
    s = setting_of(recipe)
    [answer] = on_gpu([(recipe, 0)])
    if "error" in answer:
        raise RuntimeError(f"{arch} {layout}: {answer['error']}")
    found = answer["exact"]["blocks"]
    kind = kinds(recipe)[-1]
    block, ops = Block(**found[kind]), s.last_block
    device, gap = s.cluster.device, s.software.kernel
    launches = sum(op.kernels * 2 + bool(op.matmul) for op in ops)
    moved = sum(block.moved) - sum(op.forward + op.backward for op in ops)
    unplanned = moved / (device.bandwidth * device.streaming) + gap * (sum(block.kernels) - launches)
    waits = sum(sync["times"] for sync in answer["exact"]["host_syncs"])
    return Row(arch, family, layout, block, planned_bytes(s), unplanned, waits)


def table(rows: list[Row]) -> str:
    head = (
        "| model | layout | graphs | breaks | kernels | kept, MiB | planned | unplanned, ms | waits |\n"
        "|---|---|---|---|---|---|---|---|---|"
    )
    lines = []
    for row in rows:
        block = row.block
        kept = f"{sum(block.kept) / 2**20:,.0f}" if block.whole else "-"
        forward, backward = block.kernels
        lines.append(
            f"| {row.arch} | {row.family} | {block.graphs} | {len(block.breaks)} | "
            f"{forward} + {backward} | {kept} | {row.planned / 2**20:,.0f} | "
            f"{1e3 * row.unplanned:.2f} | {row.waits} |"
        )
    reasons = sorted({(one["at"], one["why"]) for row in rows for one in row.block.breaks})
    return "\n".join([head, *lines, "", *(f"- {at}: {why}" for at, why in reasons)])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", default=[], choices=[*ARCHS])
    parser.add_argument("--layouts", nargs="*", default=[], choices=[*LAYOUTS])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = []
    for job in jobs(args.only, args.layouts):
        rows.append(measure(*job))
        print(table(rows[-1:]).splitlines()[2], file=sys.stderr, flush=True)
    print(table(rows))
    if args.out:
        import torch

        lines = ",\n".join(json.dumps(asdict(row)) for row in rows)
        args.out.write_text(f'{{"torch": "{torch.__version__}", "rows": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()
