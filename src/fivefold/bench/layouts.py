"""Runs layouts of a recipe on this machine for a few steps, and reads what they took (`fivefold compare --measure`).

Each is a run of `fivefold train` in processes of its own, with real ranks, on random tokens. Its plan.json has the
figures.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fivefold.errors import UserError
from fivefold.files import read_json, write
from fivefold.plan.predict import resolved
from fivefold.recipe import Recipe, change, to_toml
from fivefold.recipe.fit import in_layout
from fivefold.sharding.layout import Layout, to_text


def measure(
    recipe: Recipe, layouts: Sequence[Layout], steps: int
) -> Iterator[tuple[Layout, dict[str, Any] | str]]:
    """(layout, its figures or why there are none) of each layout: step_s, the median step; memory_bytes, most bytes of
    tensors at once on rank 0; sent_bytes by axis, of the rank that sends most."""
    with tempfile.TemporaryDirectory(prefix="fivefold-compare-") as name:
        folder = Path(name)
        tokens = folder / "tokens.bin"
        full = resolved(recipe)
        count = max(2 * full.train.global_batch_size, 64) * (full.model.seq_len + 1)
        ids = np.random.default_rng(0).integers((full.model.vocab_size or 2) - 1, size=count)
        write(tokens, ids.astype("<u4").tobytes())
        for number, layout in enumerate(layouts):
            try:
                short = _short(recipe, layout, tokens, steps)
            except UserError as error:
                yield layout, " ".join(str(error).split())
            else:
                yield layout, _measured(short, folder / f"run-{number}")


def _short(recipe: Recipe, layout: Layout, tokens: Path, steps: int) -> Recipe:
    """The recipe with a few steps on these tokens, and no work besides."""
    vocabulary = resolved(recipe).model.vocab_size
    values = {
        "model.vocab_size": vocabulary,
        "data.source": f"tokens:{tokens}",
        "data.validation": "[]",
        "data.token_dtype": "uint32",
        "data.val_fraction": 0,
        "data.max_epochs": 0,
        "train.steps": steps,
        "train.batch_ramp": '""',
        "train.val_every": 0,
        "train.sample_every": 0,
        "checkpoint.every": 0,
        "launch.restarts": 0,
        "optim.warmup_steps": 1,
        "observe.memory_step": 3,
        "observe.tracker": "none",
    }
    return change(in_layout(recipe, layout), [f"{key}={value}" for key, value in values.items()])


def _measured(recipe: Recipe, run: Path) -> dict[str, Any] | str:
    file = run.with_suffix(".toml")
    text = to_text(Layout.from_recipe(recipe.layout))
    write(file, to_toml(recipe, comment=text))
    command = [sys.executable, "-P", "-m", "fivefold", "train", str(file), "--out", str(run)]
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.startswith(("error:", "failed:"))]
        return (said or done.stderr.strip().splitlines() or ["the run failed"])[-1]
    try:
        return read_json(run / "plan.json")["measured"]
    except (OSError, KeyError, UserError):
        return "the run wrote no figures"
