"""What quantised gradients lose, with levels that are equally far apart and with others.

    python benchmarks/quantisation.py [--steps 20]

Trains the quickstart in fp32 on one rank. Encodes the whole gradient of the first and of the last step as
`layout.compress` does, a scale per 256 elements, and decodes it. Error: the norm of what is lost, as a share of the
gradient's. Zeros: the elements that become 0, as a share of those that are not.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path

import torch

from fivefold.data import prepare
from fivefold.kernels.rounded import Quantizer
from fivefold.launch.ranks import Ranks
from fivefold.recipe import load, resolve
from fivefold.schedules.compression import Blocks, compressor
from fivefold.step.state import build_state
from fivefold.step.step import take_step
from fivefold.train.share import batches_of, share_of

TEXTS = ("int4", "nf4", "int8", "dynamic8")
RESULTS = Path(__file__).parent / "results" / "quantisation.json"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    recipe = load("quickstart", ["precision.mode=fp32", f"train.steps={args.steps}"], "dp=1")
    data = prepare(recipe)
    recipe = resolve(recipe, vocab_size=data.vocab_size)
    state = build_state(recipe, Ranks(0, 1, 0, 1, torch.device("cpu")))
    batches, found = batches_of(recipe, data), {}
    for step in range(args.steps):
        share = share_of(
            batches, step, recipe.train.global_batch_size, recipe.train.microbatch_size or 1, state.mesh
        )
        wanted = step in (0, args.steps - 1)

        def inspect(step: int = step, wanted: bool = wanted) -> None:
            if wanted:
                found[step + 1] = errors(state.gradients())

        take_step(state, recipe, share, inspect=inspect)
    args.out.write_text(json.dumps(found, indent=1) + "\n")
    for step, rows in found.items():
        print(f"step {step}\n| Parameters | " + " | ".join(TEXTS) + " |\n|---|" + "---|" * len(TEXTS))
        for kind, row in rows.items():
            cells = [f"{100 * row[text]['error']:.2g}% ({100 * row[text]['zeros']:.2g}%)" for text in TEXTS]
            print(f"| {kind} | {' | '.join(cells)} |")


def kind_of(name: str) -> str:
    if not name.startswith("blocks."):
        return "embedding and output" if "norm" not in name else "norms"
    return "norms" if "norm" in name else name.split(".")[2]


def errors(gradients: dict[str, torch.Tensor]) -> dict[str, dict[str, dict[str, float]]]:
    """By kind of parameter and compressor."""
    sums: dict[str, dict[str, list[float]]] = defaultdict(lambda: {text: [0.0] * 4 for text in TEXTS})
    for name, gradient in gradients.items():
        row = gradient.flatten()[None].clone()
        for text in TEXTS:
            blocks = compressor(text)
            assert isinstance(blocks, Blocks)
            quantizer = Quantizer(blocks.bits, blocks.block, [row.numel()], row.device, blocks.levels)
            back = torch.empty_like(row)
            quantizer.decode(quantizer.encoded(row), back)
            figures = (
                (back - row).double().square().sum(),
                row.double().square().sum(),
                ((back == 0) & (row != 0)).sum(),
                (row != 0).sum(),
            )
            for kind in (kind_of(name), "all"):
                for number, figure in enumerate(figures):
                    sums[kind][text][number] += figure.item()
    return {
        kind: {
            text: {"error": (lost / whole) ** 0.5, "zeros": zeros / there}
            for text, (lost, whole, zeros, there) in row.items()
        }
        for kind, row in sums.items()
    }


if __name__ == "__main__":
    main()
