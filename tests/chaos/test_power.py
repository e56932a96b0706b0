"""Power loss: for every prefix of a run's writes, and what a disk may hold of it, the run resumes from the newest
flushed checkpoint or a newer one, never from a wrong one."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import power
import pytest
import stored
from pool_runs import assert_same_tensors, train_rank
from ranks import run_ranks

from fivefold.checkpoint import store
from fivefold.data import prepare
from fivefold.files import writing
from fivefold.recipe import Recipe, change, load

STEPS = 3
TINY = [
    "model.layers=1", "model.dim=16", "model.heads=2", "model.kv_heads=2", "model.ffn_dim=16", "model.seq_len=8",
    "data.tokenizer=bytes", "data.val_fraction=0", "train.global_batch_size=4", f"train.steps={STEPS}",
    "train.sample_every=0", "checkpoint.every=1", "checkpoint.keep_last=2", "observe.tracker=none",
    "optim.warmup_steps=0", "precision.mode=fp32", "layout.dp_replicate=1",
]  # fmt: skip


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    folder = tmp_path_factory.mktemp("data")
    (folder / "text.txt").write_text("".join(f"{i} and {i * i % 89}; " for i in range(300)))
    return load("quickstart", [*TINY, f"data.source={folder / 'text.txt'}", f"data.cache={folder / 'cache'}"])


def train_logged(rank: int, world: int, recipe: Recipe, out: Path, log: Path) -> None:
    writing.watch = power.Log(out.parent, log)
    try:
        train_rank(rank, world, recipe, out)
    finally:
        writing.watch = lambda *_: None


def truth(recipe: Recipe, out: Path) -> dict[int, stored.Checkpoint]:
    """All checkpoints of an undisturbed run."""
    train(change(recipe, [f"checkpoint.keep_last={STEPS}"]), out)
    found = [stored.load(folder) for folder in store.checkpoints(out)]
    return {checkpoint.meta["step"]: checkpoint for checkpoint in found}


def train(recipe: Recipe, out: Path, resume: bool = False) -> None:
    ranks = recipe.layout.dp_shard * recipe.layout.dp_replicate
    if ranks == 1:
        train_rank(0, 1, recipe, out, resume)
    else:
        run_ranks(ranks, train_rank, recipe, out, resume, timeout_s=60)


def newest(run: Path, wanted: dict[int, stored.Checkpoint]) -> int:
    """The step from which a run would resume; 0 if there is none. Its tensors are checked."""
    if not store.checkpoints(run):
        return 0
    found = stored.load(store.latest(run))
    step = found.meta["step"]
    assert_same_tensors(found.model, wanted[step].model)
    assert_same_tensors(found.optimizer, wanted[step].optimizer)
    return step


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "how", "every"),
    [
        ("dp=1", ("flushed", "names", "some"), 150),
        pytest.param("dp=1", power.HOW, 5, marks=pytest.mark.chaos),
        pytest.param("dp=2,zero=3", power.HOW, 5, marks=pytest.mark.chaos),
    ],
)
def test_power_loss_at_any_write(
    recipe: Recipe, tmp_path: Path, layout: str, how: tuple[str, ...], every: int
) -> None:
    """every: which of the states are also resumed to the end."""
    recipe = change(recipe, [], layout)
    wanted = truth(recipe, tmp_path / "truth")
    log = tmp_path / "log"
    if layout == "dp=1":
        train_logged(0, 1, recipe, tmp_path / "runs" / "run", log)
    else:
        (tmp_path / "runs").mkdir()
        run_ranks(2, train_logged, recipe, tmp_path / "runs" / "run", log, timeout_s=60)
    events = power.Log(tmp_path / "runs", log).events()
    folder, safe, checked, steps = tmp_path / "after", 0, 0, set()
    for number, kind, state in power.states(events, how):
        power.write_out(state, folder)
        run = folder / "run"
        step = newest(run, wanted)
        if kind == "flushed":
            assert step >= safe, f"after {events[number - 1]} a flushed checkpoint is lost"
            safe = step
            steps.add(step)
        assert step >= safe, f"{kind} after {events[number - 1]}: resumes at {step}, {safe} was flushed"
        checked += 1
        if step:
            assert (run / "recipe.toml").is_file()
            if checked % every == 0:
                train(recipe, run, resume=True)
                assert newest(run, wanted) == STEPS
        shutil.rmtree(folder)
    assert steps == set(range(STEPS + 1)), "each checkpoint is flushed before the next step's"
    assert checked > 50


@pytest.mark.chaos
def test_power_loss_while_data_is_prepared(recipe: Recipe, tmp_path: Path) -> None:
    """A cache that lost writes is read as the same tokens, or made again."""
    cache = tmp_path / "all" / "cache"
    here = change(recipe, [f"data.cache={cache}"])
    wanted = prepare(recipe).train[0:1000]
    events = power.logged(tmp_path / "all", tmp_path / "log", lambda: prepare(here))
    assert any(event.what == "rename" for event in events)
    for _, how, state in power.states(events, ("flushed", "names", "some")):
        shutil.rmtree(tmp_path / "all", ignore_errors=True)
        power.write_out(state, tmp_path / "all")
        assert np.array_equal(prepare(here).train[0:1000], wanted), how
