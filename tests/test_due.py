"""What is due after a step is never lost by a stop or a kill: the resumed run writes the same lines."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from layouts import tiny
from marks import only
from pool_runs import train_rank
from ranks import run_ranks

from fivefold.checkpoint import store
from fivefold.recipe import Recipe, change
from fivefold.sharding.layout import Layout
from fivefold.train.hooks import RunHooks

STEPS = 6
SERVERS = ["sync.method=server", "sync.servers=2"]
SETS = [
    f"train.steps={STEPS}",
    "train.val_every=2",
    "train.sample_every=4",
    "train.sample_tokens=4",
    "train.val_sequences=4",
    "checkpoint.every=2",
    "checkpoint.keep_last=9",
    "observe.tracker=none",
]
LAYOUTS: dict[str, list[str]] = {
    "dp=1": [],
    "dp=2,zero=1": [],
    "pp=2": [],
    "tp=2": [],
    "dp=2": [],
    "diloco": ["sync.method=diloco", "sync.every=2"],
    "server": SERVERS,
}
TIMES = {
    "peak_memory_bytes",
    "data_wait_s",
    "step_s",
    "tokens_per_s",
    "mfu",
    "hfu",
    "peak_share",
    "rank_seconds",
}


def recipe_of(folder: Path, layout: str) -> Recipe:
    given = tiny(folder, layout if "=" in layout else "dp=1", steps=STEPS)
    return change(given, [*SETS, *LAYOUTS[layout]], None if "=" in layout else "dp=2")


def curve(run: Path) -> list[dict[str, Any]]:
    """The lines of a run, without what differs between two runs of the same numbers."""
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in TIMES} for line in found]


def train(recipe: Recipe, out: Path, resume: bool = False, asked: int = 0) -> int | None:
    """Trains on all ranks. asked: rank 0 gets a SIGTERM in this step. Returns what the ranks return."""
    world = Layout.from_recipe(recipe.layout).ranks + recipe.servers.count
    given = recipe, out, resume, asked
    found = [rank_of(0, 1, *given)] if world == 1 else run_ranks(world, rank_of, *given, timeout_s=60)
    (verdict,) = set(found)
    return verdict


def rank_of(rank: int, world: int, recipe: Recipe, out: Path, resume: bool, asked: int) -> int | None:
    record = RunHooks.record

    def recorded(hooks: RunHooks, line: dict[str, Any]) -> None:
        record(hooks, line)
        if line["step"] == asked - 1 and rank == 0:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunHooks, "record", recorded)
        return train_rank(rank, world, recipe, out, resume)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory):
    """A layout's run that nobody disturbed, and its recipe."""
    folder, made = tmp_path_factory.mktemp("due"), dict[str, tuple[Recipe, Path]]()

    def get(layout: str) -> tuple[Recipe, Path]:
        if layout not in made:
            recipe, out = recipe_of(folder, layout), folder / layout
            assert train(recipe, out) is None
            made[layout] = recipe, out
        return made[layout]

    return get


@only("dp=1")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_kill_after_a_save_loses_no_validation_and_no_sample(whole, tmp_path: Path, layout: str) -> None:
    """At each line that a validation or a sample wrote, the run is what a kill before this line leaves behind."""
    recipe, undisturbed = whole(layout)
    lines = (undisturbed / "metrics.jsonl").read_text().splitlines(keepends=True)
    kinds = [(json.loads(line)["step"], "val_loss" in line, '"sample"' in line) for line in lines]
    observed = [(at, step) for at, (step, *due) in enumerate(kinds) if any(due)]
    assert [step for _, step in observed] == [2, 4, 4, 6, 6]
    for at, step in observed if layout == "dp=1" else observed[-2:]:
        run = Path(shutil.copytree(undisturbed, tmp_path / f"{at}"))
        (run / "metrics.jsonl").write_text("".join(lines[:at]))
        for folder in store.checkpoints(run):
            if store.step_in(folder) > step:
                shutil.rmtree(folder)
        assert train(recipe, run, resume=True) is None
        assert curve(run) == curve(undisturbed)


@only("dp=1-4", "dp=1-6")
@pytest.mark.parametrize("step", [3, 4, STEPS])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_signal_loses_no_validation_and_no_sample(whole, tmp_path: Path, layout: str, step: int) -> None:
    """Also at the last step: the run is not complete then, so its launcher starts it again."""
    recipe, undisturbed = whole(layout)
    assert train(recipe, tmp_path, asked=step) == signal.SIGTERM
    assert store.step_in(store.checkpoints(tmp_path)[-1]) == step
    assert train(recipe, tmp_path, resume=True) is None
    assert curve(tmp_path) == curve(undisturbed)
