"""A few steps of a resolved recipe on given batches, on the rank pool and by one process: are they the same?

Closer to the engine than `layouts.py`: a test brings its own batches and sees every tensor.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from pool_runs import assert_close_tensors, ranks_of
from torch import Tensor

from fivefold.parallel.mesh import Microbatch
from fivefold.recipe import Recipe
from fivefold.step.state import State, build_state
from fivefold.step.step import take_step
from fivefold.step.validation import ValidationSet, validate
from fivefold.train.job import BatchSource
from fivefold.train.saver import owned_pieces
from fivefold.train.share import share_of


def state_of(rank: int, world: int, recipe: Recipe) -> State:
    return build_state(recipe, ranks_of(rank, world))


def evaluate(
    state: State, microbatches: list[Microbatch], token_bytes: torch.Tensor | None = None
) -> dict[str, float]:
    """Validates on one set."""
    return validate(state, [ValidationSet("", True, microbatches, token_bytes)])


def share(state: State, recipe: Recipe, source: BatchSource, i: int) -> list[Microbatch]:
    """This rank's share of batch i."""
    train = recipe.train
    return share_of(source, i, train.global_batch_size, train.microbatch_size or 1, state.mesh)


def steps(
    rank: int,
    world: int,
    recipe: Recipe,
    source: BatchSource,
    count: int = 3,
    prepare: Callable[[State], None] = lambda state: None,
) -> dict[str, Any]:
    """Loss and norm of each step, gradients of the first, weights and validation after the last. Tensors come as the
    pieces that this rank owns. prepare: changes the state before the first step."""
    state = state_of(rank, world, recipe)
    prepare(state)
    found: dict[str, Any] = {"loss": [], "norm": []}

    def keep_first_gradient() -> None:
        if state.step == 0:
            found["gradients"] = pieces(state, state.gradients())

    for step in range(count):
        done = take_step(state, recipe, share(state, recipe, source, step), inspect=keep_first_gradient)
        found["norm"].append(done.norm)
        found["loss"].append(done.loss)
    found["weights"] = pieces(state, state.masters())
    token_bytes = torch.arange(recipe.model.vocab_size or 0)
    found["validation"] = evaluate(state, share(state, recipe, source, count), token_bytes)
    return found


def pieces(state: State, tensors: dict[str, Tensor]) -> list[tuple]:
    return [(p.name, p.shape, p.box, p.tensor.clone()) for p in owned_pieces(state, tensors)]


def joined(answers: list[dict[str, Any]], key: str) -> dict[str, Tensor]:
    """The whole tensors of the pieces of all ranks; NaN where nobody has one."""
    whole: dict[str, Tensor] = {}
    for name, shape, box, tensor in (piece for answer in answers for piece in answer[key]):
        out = whole.setdefault(name, torch.full(shape, float("nan")))
        out[tuple(slice(*span) for span in box)] = tensor
    return whole


def assert_equal(answers: list[dict[str, Any]], wanted: dict[str, Any]) -> None:
    """Every rank's losses, norms and validation, and all tensors, are those of one process (to rounding)."""
    for answer in answers:
        assert answer["loss"] == pytest.approx(wanted["loss"], rel=1e-6)
        assert answer["norm"] == pytest.approx(wanted["norm"], rel=1e-5)
        assert answer["validation"] == pytest.approx(wanted["validation"], rel=1e-6)
    for key in ("gradients", "weights"):
        assert_close_tensors(joined(answers, key), joined([wanted], key), f"{key} of")
