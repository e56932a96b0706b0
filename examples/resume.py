"""A resumed run gives the same bits as an uninterrupted one.

python examples/resume.py
"""

from pathlib import Path

import fivefold

SMALL = ["model.layers=1", "model.dim=32", "model.heads=2", "model.seq_len=32", "data.tokenizer=bytes"]


def losses(run: fivefold.Run) -> list[float]:
    return [line["loss"] for line in run.metrics() if "loss" in line]


def main() -> None:
    own_source = f"data.source={Path(fivefold.__file__).parent / 'models'}"
    schedule = ["optim.schedule=constant", "optim.warmup_steps=5"]  # the same, however long the run is
    recipe = fivefold.load("quickstart", [*SMALL, *schedule, own_source, "train.steps=20"])
    longer = fivefold.change(recipe, ["train.steps=40"])

    whole = fivefold.train(longer, nproc=1)

    parts = fivefold.train(recipe, nproc=1)
    parts = fivefold.resume(parts.path, longer, nproc=1)

    print(f"step 40: loss {losses(whole)[-1]!r} in one go, {losses(parts)[-1]!r} in two parts")
    assert losses(whole) == losses(parts)


if __name__ == "__main__":
    main()
