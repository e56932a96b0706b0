"""Recipes for the tests of `data`: tiny sizes, a cache in the test's own folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fivefold.recipe import DataSection, ModelSection, Recipe, TrainSection


def recipe_of(
    source: str | Path,
    cache: Path,
    *,
    seq_len: int = 8,
    batch: int = 1,
    arch: Any = "llama",
    vocab_size: int | None = None,
    steps: int = 1,
    **data: Any,
) -> Recipe:
    return Recipe(
        model=ModelSection(arch=arch, seq_len=seq_len, vocab_size=vocab_size),
        data=DataSection(source=str(source), cache=str(cache), **({"tokenizer": "bytes"} | data)),
        train=TrainSection(steps=steps, global_batch_size=batch),
    )


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path
