"""Every layout resumes from the checkpoint of every other, as one process would go on."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import stored
from pool_runs import lines
from test_resume_layouts import TINY, train

from fivefold.checkpoint import store
from fivefold.recipe import Recipe, change, load

LAYOUTS = (
    "dp=1", "dp=2", "dp=4", "dp=4,zero=1", "dp=4,zero=3", "dp_replicate=2,dp_shard=2,zero=2", "tp=2", "tp=4",
    "dp=2,tp=2", "pp=2", "pp=4", "pp=2,dp=2,zero=1", "pp=2,tp=2,schedule=zbv", "cp=2", "cp=2,dp=2,zero=3",
)  # fmt: skip
EXPERTS = ("dp=1", "dp=2,zero=2", "dp=2,ep=2", "dp=4,ep=2,zero=3", "dp=4,ep=4")
MOE = ["model.arch=moe", "model.experts=4", "model.experts_per_token=2", "model.expert_ffn_dim=32"]
HALF, STEPS = 2, 4


def base(folder: Path) -> Recipe:
    (folder / "text.txt").write_text(
        "".join(f"{i} and {i * i % 89} make {i + i * i % 89}; " for i in range(900))
    )
    sets = [
        "model.layers=4",
        "model.kv_heads=4",
        f"data.source={folder / 'text.txt'}",
        f"data.cache={folder}/cache",
    ]
    return load("quickstart", [*TINY, *sets])


def row(number: int, folder: Path) -> dict[str, Any]:
    """The number-th layout's checkpoint, resumed by all layouts: for each the largest relative differences of losses
    and weights from one process."""
    layouts, recipe = LAYOUTS, base(folder)
    if number >= len(LAYOUTS):
        layouts, recipe = EXPERTS, change(recipe, MOE)
    first = layouts[number % len(LAYOUTS)]
    train(recipe, "dp=1", folder / "one", STEPS)
    losses, wanted = lines(folder / "one", "loss"), stored.load(store.latest(folder / "one"))
    found: list[dict[str, Any]] = []
    train(recipe, first, folder / "first", HALF)
    for second in layouts:
        shutil.copytree(folder / "first", folder / "second")
        train(recipe, second, folder / "second", STEPS, resume=True)
        now, came = lines(folder / "second", "loss"), stored.load(store.latest(folder / "second"))
        assert len(now) == STEPS
        assert came.model.keys() == wanted.model.keys()
        errors = [
            ((came.model[name] - tensor).norm() / tensor.norm()).item()
            for name, tensor in wanted.model.items()
        ]
        loss = max(abs(a - b) / abs(b) for a, b in zip(now, losses, strict=True))
        found.append({"second": second, "loss": loss, "weights": max(errors)})
        shutil.rmtree(folder / "second")
    return {"first": first, "model": recipe.model.arch, "resumed": found}


def figures(rows: list[dict[str, Any]]) -> dict[str, Any]:
    pairs = [
        (one["loss"], one["weights"], f"{row['first']} -> {one['second']}")
        for row in rows
        for one in row["resumed"]
    ]
    return {
        "layouts": len(rows),
        "pairs": len(pairs),
        "worst_loss": max(pair[0] for pair in pairs),
        "worst_weights": max(pair[1] for pair in pairs),
        "worst_pair": max(pairs)[2],
    }
