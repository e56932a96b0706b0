"""Train a small model on text, sample from it, read its metrics.

python examples/train_and_sample.py [FILE_OR_FOLDER]
"""

import sys
from pathlib import Path

import fivefold


def main(source: str) -> None:
    recipe = fivefold.load("quickstart", [f"data.source={source}", "data.tokenizer=bytes"])
    # A recipe never changes; `change` gives a new one. The same texts go after `--set` on the command line.
    small = ["model.layers=2", "model.dim=64", "model.heads=2", "model.seq_len=64", "train.steps=60"]
    recipe = fivefold.change(recipe, [*small, "optim.lr=1e-2", "train.val_every=10"])

    run = fivefold.train(recipe, nproc=1)  # so small a model gains nothing from a second rank

    losses = [line["val_bits_per_byte"] for line in run.metrics() if "val_bits_per_byte" in line]
    print(f"validation: {losses[0]:.2f} -> {losses[-1]:.2f} bits per byte")
    print("def " + run.generate("def ", max_tokens=60, temperature=0.5))
    print(f"open {run.report()}")


if __name__ == "__main__":
    # a part of Fivefold's own source, when you name nothing else
    main(sys.argv[1] if len(sys.argv) > 1 else str(Path(fivefold.__file__).parent / "models"))
