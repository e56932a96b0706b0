"""Whole runs on the rank pool, as `train/start.py` starts them, and what they leave behind."""

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fivefold.data import DataSet, prepare
from fivefold.launch.ranks import Ranks
from fivefold.recipe import Recipe, resolve
from fivefold.step.state import State
from fivefold.train import loop
from fivefold.train.job import Job
from fivefold.train.run import run_rank
from fivefold.train.user_hooks import WITHOUT, UserHooks


def ranks_of(rank: int, world: int) -> Ranks:
    """One of `world` ranks on this machine's CPU."""
    return Ranks(rank, world, rank, world, torch.device("cpu"))


def train_rank(
    rank: int,
    world: int,
    recipe: Recipe,
    out: Path,
    resume: bool = False,
    data: DataSet | None = None,
    own: UserHooks = WITHOUT,
) -> int | None:
    """A run's part on this rank; None: it is complete. data: None: the recipe's."""
    data = data or prepare(recipe)
    recipe = resolve(recipe, vocab_size=data.vocab_size)
    job = Job(recipe, out, data, resume=resume, own=own)
    return run_rank(job, ranks_of(rank, world))


@contextmanager
def after_each_step(change_: Callable[[State, str], None]) -> Iterator[None]:
    """change_(state, when) runs in each step, when its gradient is whole ("gradient"), and after it ("end")."""
    plain = loop.take_step

    def changed(
        state: State, recipe: Recipe, share: Any, stop: Any, inspect: Callable[[], Any], *more: Any
    ) -> Any:
        def inside() -> Any:
            change_(state, "gradient")
            return inspect()

        done = plain(state, recipe, share, stop, inside, *more)
        change_(state, "end")
        return done

    loop.take_step = changed
    try:
        yield
    finally:
        loop.take_step = plain


def lines(run: Path, key: str) -> list[Any]:
    """What the lines of metrics.jsonl that have this key say."""
    metrics = (json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines())
    return [m[key] for m in metrics if key in m]


def assert_same_tensors(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


def assert_close_tensors(got: dict[str, Tensor], wanted: dict[str, Tensor], what: str = "") -> None:
    """Each within 1e-5 of its norm."""
    assert got.keys() == wanted.keys()
    for name, tensor in wanted.items():
        error = ((got[name] - tensor).norm() / tensor.norm()).item()
        assert error < 1e-5, f"{what} {name}: {error:.1e}"


def mend(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Changes the manifest of a checkpoint, and its own hash with it."""
    path = folder / "manifest.json"
    found = json.loads(path.read_text())
    del found["sha256"]
    change(found)
    text = f'{{"sha256": "{"0" * 64}", {json.dumps(found)[1:]}\n'.encode()
    path.write_bytes(text.replace(b"0" * 64, hashlib.sha256(text).hexdigest().encode(), 1))
