"""How many files of the program a reader meets between the request for a batch and its backward."""

from __future__ import annotations

import sys
import threading
from contextlib import suppress
from pathlib import Path
from types import FrameType

import pytest
from pool_runs import ranks_of
from torch import Tensor

import fivefold
from fivefold.data import prepare
from fivefold.recipe import load, resolve
from fivefold.step.state import build_state
from fivefold.step.step import take_step
from fivefold.train.job import Job
from fivefold.train.share import reader

ROOT = Path(fivefold.__file__).parent
MOST = 18
AHEAD = 4  # batches, of which 3 may have been read before they are asked for


class _Reached(Exception):
    pass


def test_a_batch_goes_through_few_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of quickstart, on one rank, after a first step. The thread that reads ahead counts, too."""
    text = tmp_path / "text.txt"
    text.write_text("some words of a text\n" * 4000)
    shape = ["model.dim=32", "model.heads=2", "model.kv_heads=2", "model.layers=2", "model.seq_len=64"]
    sets = [f"data.source={text}", "data.tokenizer=bytes", f"data.cache={tmp_path}", "train.steps=9", *shape]
    recipe = load("quickstart", [*sets, "train.global_batch_size=4", "train.microbatch_size=2"], "dp=1")
    data = prepare(recipe)
    recipe = resolve(recipe, vocab_size=data.vocab_size)
    job, state = Job(recipe, tmp_path / "run", data), build_state(recipe, ranks_of(0, 1))
    entered: set[str] = set()
    counts = False

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and counts:
            entered.add(frame.f_code.co_filename)

    def reached(*arguments: object, **options: object) -> None:
        raise _Reached

    threading.setprofile(note)
    try:
        with reader(job, state.mesh, 0) as next_batch:
            take_step(state, recipe, next_batch()[0])
            monkeypatch.setattr(Tensor, "backward", reached)
            counts = True
            sys.setprofile(note)
            microbatches = [next_batch()[0] for _ in range(AHEAD)][-1]
            with suppress(_Reached):
                take_step(state, recipe, microbatches)
            counts = False
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    own = sorted(str(Path(name).relative_to(ROOT)) for name in entered if Path(name).is_relative_to(ROOT))
    assert "kernels/matmul.py" in own
    assert len(own) <= MOST, "\n".join([str(len(own)), *own])
