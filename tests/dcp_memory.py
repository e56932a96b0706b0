"""A model goes out of a run and in again, in both formats: what that takes of memory. Prints JSON: bytes of the weights
and of the largest one, and by step the most bytes of this process that are not a file's, beyond those before it."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

import fivefold.checkpoint.dcp.write  # noqa: F401  what it imports is no part of the measurement
from fivefold.checkpoint import store, write
from fivefold.checkpoint.source import export_run, import_folder
from fivefold.models.card import card_of
from fivefold.models.weights import Weight
from fivefold.recipe import ModelSection, Recipe, TrainSection, resolve, to_toml


def anonymous() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


def most(step: Callable[[], object]) -> int:
    found, done, before = [0], threading.Event(), anonymous()

    def look() -> None:
        while not done.is_set():
            found[0] = max(found[0], anonymous() - before)
            time.sleep(0.002)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        step()
    finally:
        done.set()
        thread.join()
    return found[0]


def main(home: Path, layers: int) -> None:
    section = ModelSection(layers=layers, dim=512, heads=8, ffn_dim=2048, vocab_size=4096, seq_len=64)
    recipe = resolve(Recipe(model=section, train=TrainSection(steps=1)), vocab_size=4096)
    run = home / "run"
    run.mkdir(parents=True)
    (run / "recipe.toml").write_text(to_toml(recipe))
    shapes = card_of(recipe.model).parameters
    weights = {
        name: Weight(shape, torch.float32, lambda shape=shape, n=n: torch.full(shape, 1.0 + n))
        for n, (name, shape) in enumerate(shapes.items())
    }
    saved = store.folder_of(run, 1)
    sizes = [4 * torch.Size(shape).numel() for shape in shapes.values()]
    found = {
        "weights": sum(sizes),
        "largest": max(sizes),
        "save": most(lambda: write.save(saved, write.unread(weights), None, {"step": 1, "tokens": 64})),
        "export": most(lambda: export_run(run, home / "hf")),
        "import": most(lambda: import_folder(home / "hf", home / "from-hf")),
        "export --dcp": most(lambda: export_run(run, home / "dcp", dcp=True)),
        "import DCP": most(lambda: import_folder(home / "dcp", home / "from-dcp")),
    }
    for name in ("from-hf", "from-dcp"):
        reader = store.Reader(store.folder_of(home / name, 0))
        for n, weight in enumerate(shapes):
            assert bool((reader.read("model", weight) == 1.0 + n).all()), (name, weight)
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
