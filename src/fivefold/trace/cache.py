"""Keeps exact figures in the cache folder, keyed by everything they depend on: recipe, rank, and the code of Fivefold
and PyTorch. A missing, broken or unwritable file is not an error: the step is traced again."""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch

from fivefold.errors import UserError
from fivefold.files import cache_folder, writable, write_atomically
from fivefold.host.machine import has_cpu_bf16, has_cpu_fp16
from fivefold.kernels import native
from fivefold.launch.ranks import threads_of
from fivefold.recipe import Recipe
from fivefold.spread.layout import Layout
from fivefold.step.state import compute_mode

SECTIONS = ("model", "optim", "layout", "sync", "precision")
FIELDS = ("global_batch_size", "microbatch_size", "z_loss")  # of [train]


class CachedFigures:
    """The figures of one rank of a resolved recipe. device: "cpu" or "cuda", whose path of the code is traced."""

    def __init__(self, recipe: Recipe, rank: int, device: str = "cpu") -> None:
        world, sites = Layout.from_recipe(recipe.layout).ranks, recipe.sites
        steps = recipe.train.steps or 1
        key = {
            "recipe": {name: getattr(recipe, name).model_dump(mode="json") for name in SECTIONS},
            "train": {name: getattr(recipe.train, name) for name in FIELDS},
            # "auto" depends on the processor
            "mode": compute_mode(recipe, torch.device("cpu")).name
            if device == "cpu"
            else recipe.precision.mode,
            "rank": rank,
            "outer": sites.due(sites.traced(steps), steps),  # what the traced step sends
            "device": device,
            "threads": threads_of(world),  # some kernels have workspace per thread
            "native": not native.why_not(),
            "fp16": has_cpu_fp16(),  # else it is multiplied in fp32
            "bf16": has_cpu_bf16(),  # else PyTorch adds biases
            "code": [_source(), torch.__version__],
        }
        name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]
        self.path = cache_folder(recipe.data.cache) / "traces" / f"{name}.json"

    def read(self) -> dict[str, Any] | None:
        try:
            found = json.loads(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return found if isinstance(found, dict) else None

    def write(self, figures: dict[str, Any]) -> None:
        with suppress(UserError), writable(self.path.parent):
            write_atomically(self.path, json.dumps(figures))


@cache
def _source() -> str:
    """A hash of the package's code."""
    folder, found = Path(__file__).parents[1], hashlib.sha256()
    for path in sorted([*folder.rglob("*.py"), *folder.rglob("*.c"), *folder.rglob("*.cpp")]):
        found.update(path.read_bytes())
    return found.hexdigest()
