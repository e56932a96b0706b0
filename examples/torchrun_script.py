"""Train on torchrun's ranks, with the same plain script on one machine and on many.

torchrun --nproc-per-node 2 examples/torchrun_script.py [RUN_FOLDER]
"""

import os
import sys
from pathlib import Path

import fivefold


def main(out: Path) -> None:
    own_source = f"data.source={Path(fivefold.__file__).parent / 'models'}"
    small = ["model.layers=2", "model.dim=64", "model.heads=2", "model.seq_len=64", "data.tokenizer=bytes"]
    recipe = fivefold.load("quickstart", [*small, own_source, "train.steps=30"])

    # Every rank calls it. The layout is replicas, as many as there are ranks; the run folder must be named.
    go_on = (out / "recipe.toml").exists()
    run = fivefold.resume(out) if go_on else fivefold.train(recipe, out)

    if os.environ.get("RANK", "0") == "0":  # rank 0 writes the run's files
        print(f"trained on {os.environ.get('WORLD_SIZE', 1)} ranks: {run.checkpoints()[-1]}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/torchrun"))
