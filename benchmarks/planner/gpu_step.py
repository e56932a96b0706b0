"""What a step on a GPU reads, writes and launches outside of its blocks: loss, sums and norm of gradients, update.

    python benchmarks/planner/gpu_step.py [--out benchmarks/results/gpu_step.json]

Found in traces, without a GPU (trace/step.py): bytes of all arguments and results of each operator, and one launch for
each. Matmuls launch, and their bytes do not count. A compiled pass of ours is one operator. Shapes are those of
`fivefold bench gpu`, with one microbatch. gpu_blocks.py has the blocks.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from fivefold_plan.bench.gpu.trials import SHAPES

MODELS = {"Llama 1B": "llama-1b", "Llama 8B": "llama3-8b"}
LAYOUTS = {
    "Llama 1B": ["dp=1", "dp=8", "dp=8,zero=3", "tp=2,sp=true"],
    "Llama 8B": ["dp=8,zero=3", "tp=8,sp=true"],
}
PARTS = {  # the innermost function of the package
    "loss": (
        "kernels/matmul.py",
        "kernels/cross_entropy.py",
        "parallel/tensor.py:_Loss",
        "parallel/tensor.py:chunk",
    ),
    "sums of gradients": ("add_gradient", "parallel/data.py", "parallel/zero.py"),
    "norm": ("optim/scaling.py", "parallel/replica.py:gradient_square"),
    "update": ("optim/", "kernels/adamw.py"),
}
BLOCKS = "blocks and the rest"
LOADING = """
import ctypes, os, sys
job, *libraries = sys.argv[1:]
for library in libraries:
    ctypes.CDLL(library, ctypes.RTLD_GLOBAL)
sys.path[:0] = [os.path.dirname(os.environ["SCRIPT"])]
import json, gpu_step
print(json.dumps(gpu_step.traced(*json.loads(job))))
sys.stdout.flush()
os._exit(0)
"""


def traffic(func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> int:
    """Bytes that an operator reads and writes: what it changes twice, unless it only writes there."""
    from fivefold_plan.trace.traffic import size_of

    total, given = 0, [*args, *kwargs.values()]
    for argument, value in zip(func._schema.arguments, given, strict=False):
        changed = argument.alias_info is not None and argument.alias_info.is_write
        only = argument.name in ("working", "out") or (
            changed and func.__name__.split(".")[0] in ("copy_", "zero_")
        )
        total += size_of(value) * (1 if only else 1 + changed)
    made = all(returned.alias_info is None for returned in func._schema.returns)
    return total + (size_of(out) if made and out is not None else 0)


def traced(model: str, layout: str) -> dict[str, Any]:
    """{part: [bytes, launches]} of a step, in a process with the stand-in for a GPU."""
    from fivefold.models.card import card_of
    from fivefold.recipe import load, resolve
    from fivefold.sharding.layout import Layout
    from fivefold.sharding.parts import parts, size_of
    from fivefold_plan.trace import step
    from fivefold_plan.trace.memory import is_free
    from fivefold_plan.trace.streams import PACKAGE, place
    from fivefold_plan.trace.traffic import formula_of

    found: Counter[str] = Counter()
    launches: Counter[str] = Counter()

    class Counting(step.Probe):
        def execute(self, func: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
            out = super().execute(func, types, args, kwargs)
            where = place()
            if where is not None and func.namespace in ("aten", "fivefold") and not is_free(func):
                name = f"{where.code.co_filename.removeprefix(PACKAGE).lstrip('/')}:{where.code.co_qualname}"
                part = next((part for part, names in PARTS.items() if any(n in name for n in names)), BLOCKS)
                found[part] += 0 if formula_of(func) else traffic(func, args, kwargs, out)
                launches[part] += 1
            return out

    step.Probe = Counting
    name, sets = SHAPES[MODELS[model]]
    recipe = load(
        name, [*sets, "train.microbatch_size=1", "precision.mode=bf16", "train.global_batch_size=8"], layout
    )
    recipe = resolve(recipe, vocab_size=recipe.model.vocab_size or 128_256)
    step.trace(recipe, 0, 1, step.DEVICE)
    layout_ = Layout.from_recipe(recipe.layout)
    card = card_of(recipe.model)
    updated = sum(size_of(p.keeps) for p in parts(card, layout_, 0).values() if p.keeps is not None)
    tokens = recipe.model.seq_len * (recipe.train.microbatch_size or 1)
    return {
        "updated": updated,
        "logits": tokens * (recipe.model.vocab_size or 0) // layout_.tp,
        "parts": {part: [found[part], launches[part]] for part in (*PARTS, BLOCKS)},
    }


def table(rows: list[dict[str, Any]]) -> str:
    """As Markdown: bytes a logit of the loss, and a parameter that the rank updates of the others; launches."""
    lines = [f"| model | layout | {' | '.join(PARTS)} | launches |", "|" + "---|" * (len(PARTS) + 3)]
    for row in rows:
        each = [
            f"{row['parts'][part][0] / row['logits' if part == 'loss' else 'updated']:.1f}" for part in PARTS
        ]
        launches = " + ".join(str(row["parts"][part][1]) for part in PARTS)
        lines.append(f"| {row['model']} | `{row['layout']}` | {' | '.join(each)} | {launches} |")
    return "\n".join(lines)


def main() -> None:
    from fivefold_plan.trace import gpu

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = []
    for model, layouts in LAYOUTS.items():
        for layout in layouts:
            done = subprocess.run(
                [sys.executable, "-c", LOADING, json.dumps([model, layout]), *gpu.libraries()],
                env=os.environ | {"SCRIPT": __file__}, stdout=subprocess.PIPE, text=True, check=True,
            )  # fmt: skip
            rows.append({"model": model, "layout": layout, **json.loads(done.stdout)})
    print(table(rows))
    if args.out:
        args.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
