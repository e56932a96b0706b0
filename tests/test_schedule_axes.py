"""Every schedule with every ZeRO stage, kind of offload and number of microbatches, beside one process.

A rank builds a layout once, and takes a step with each number of microbatches: from one to more than fill a pipeline,
and one that ranks share unevenly. The same steps of one process say what loss, gradients, norm and weights are.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import combinations, product
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
from layouts import tiny
from marks import only
from pool_runs import ranks_of
from ranks import RankFailed, run_ranks

from fivefold.data import prepare
from fivefold.errors import UserError
from fivefold.launch.ranks import Ranks
from fivefold.optim import OPTIMIZERS
from fivefold.recipe import Recipe, resolve
from fivefold.schedules.pipeline import SCHEDULES
from fivefold.sharding.tiers import OFFLOADS
from fivefold.step.state import State, build_state
from fivefold.step.step import forward_backward, take_step
from fivefold.train.saver import owned_pieces
from fivefold.train.share import batches_of, share_of
from fivefold.train.verify import alone, reference_state

PP, DP = 2, 2
SIZES = (*(DP * microbatches for microbatches in range(1, 2 * PP + 2)), 2 * DP + 1)
"""Microbatches of a step, on all ranks."""
ARCHS = {
    "llama": ["model.tie_embeddings=true"],
    "gpt2": [],  # it has more vectors than matrices
    "moe": ["model.experts=4", "model.experts_per_token=2", "model.tie_embeddings=false"],
}
SMALL = [
    "model.dim=16", "model.heads=2", "model.kv_heads=2", "model.ffn_dim=16", "model.seq_len=8", "train.steps=9",
    f"train.global_batch_size={max(SIZES)}",
    "optim.eps=1e-4",  # a bias of keys has no gradient but rounding, which a tiny eps would blow up
]  # fmt: skip
QUICK_SCHEDULES = ("1f1b", "interleaved", "zb_h1", "dualpipev", "dualpipe")
"""Of each kind one: a whole backward, with one stage or several; a split one, with one stage, with both ends of the
model, and with two copies of it."""
QUICK_OFFLOADS = ("none", "activations", "states:host", "all:disk")
ALLOWED = {"loss": 1e-6, "norm": 1e-5, "gradient": 1e-5, "weight": 1e-5}
Pieces = dict[str, list[tuple[Any, np.ndarray]]]
Build = Callable[[Recipe, Ranks], State]


class Case(NamedTuple):
    schedule: str
    zero: int
    offload: str
    arch: str
    sizes: tuple[int, ...] = SIZES


def recipe_of(folder: Path, case: Case) -> Recipe:
    """Raises UserError: the rules refuse the layout."""
    stages = SCHEDULES[case.schedule].stages[0]
    how = f"schedule={case.schedule},virtual_stages={stages},zero={case.zero},offload={case.offload}"
    sets = [*SMALL, f"model.arch={case.arch}", *ARCHS[case.arch]]
    return tiny(folder, f"dp={DP},pp={PP},{how}", *sets)


def taken(recipe: Recipe, sizes: Sequence[int], ranks: Ranks, build: Build) -> Iterator[tuple[str, int, Any]]:
    """Yields (kind, step, value) of what a rank has: numbers, and its pieces of tensors, {name: [(box, values)]}."""
    data = prepare(recipe)
    recipe = resolve(recipe, vocab_size=data.vocab_size)
    batches, state = batches_of(recipe, data), build(recipe, ranks)

    def pieces(tensors: dict[str, torch.Tensor]) -> Pieces:
        found: Pieces = {}
        for piece in owned_pieces(state, tensors):
            found.setdefault(piece.name, []).append((piece.box, piece.tensor.float().numpy().copy()))
        return found

    try:
        for step, size in enumerate(sizes):
            share, first = share_of(batches, step, size, 1, state.mesh), Pieces()
            done = take_step(
                state, recipe, share, inspect=lambda first=first: first.update(pieces(state.gradients()))
            )
            yield from (("loss", step, done.loss), ("norm", step, done.norm), ("gradient", step, first))
        yield "weight", len(sizes), pieces(state.masters())
    finally:
        state.parallel.close()


def on_a_rank(rank: int, world: int, recipe: Recipe, sizes: tuple[int, ...]) -> list[tuple[str, int, Any]]:
    return list(taken(recipe, sizes, ranks_of(rank, world), build_state))


@cache
def reference(folder: Path, arch: str, sizes: tuple[int, ...]) -> list[tuple[str, int, Any]]:
    recipe = recipe_of(folder, Case("1f1b", 0, "none", arch))
    return list(taken(recipe, sizes, alone(), reference_state))


def differences(folder: Path, case: Case) -> dict[str, tuple[float, str]]:
    """By kind the largest relative difference, and where it is."""
    by_rank = run_ranks(DP * PP, on_a_rank, recipe_of(folder, case), case.sizes, timeout_s=60)
    worst = dict.fromkeys(ALLOWED, (0.0, ""))
    for (kind, step, wanted), *found in zip(reference(folder, case.arch, case.sizes), *by_rank, strict=True):
        values = [value for _, _, value in found]
        if not isinstance(wanted, dict):
            off, where = max(abs(value - wanted) / abs(wanted) for value in values), ""
        else:
            off, where = max((apart(whole, name, values), name) for name, [(_, whole)] in wanted.items())
        worst[kind] = max(worst[kind], (off, f"step {step} {where}"))
    return worst


def apart(whole: np.ndarray, name: str, by_rank: list[Pieces]) -> float:
    """The difference of what the ranks have together, relative to the whole."""
    pieces, found, times = [one for rank in by_rank for one in rank.get(name, [])], whole * np.nan, 0
    for box, values in pieces:
        found[tuple(slice(a, b) for a, b in box)] = values
        times += values.size
    assert times == whole.size, f"{name}: {times} of {whole.size} elements"
    return float(np.linalg.norm(found - whole) / np.linalg.norm(whole))


@cache
def allowed(folder: Path, schedule: str, zero: int, offload: str, arch: str = "llama") -> bool:
    try:
        recipe_of(folder, Case(schedule, zero, offload, arch))
    except UserError:
        return False
    return True


def right(folder: Path, case: Case) -> bool:
    """False if the rules refuse the case; fails if it computes anything else than one process."""
    if not allowed(folder, *case[:4]):
        return False
    found = differences(folder, case)
    assert all(off <= ALLOWED[kind] for kind, (off, _) in found.items()), (case, found)
    return True


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("schedule_axes")


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_all_are_those_of_one_process(room: Path, schedule: str) -> None:
    """The architectures take turns: each kind of offload meets all of them. Two copies of the model allow no offload,
    and none of these layouts has tensor ranks to divide inputs over."""
    turns = [*ARCHS]
    ran = [
        right(room, Case(schedule, zero, offload, turns[(zero + number) % len(turns)]))
        for zero, (number, offload) in product(range(4), enumerate(OFFLOADS))
    ]
    assert sum(ran) == 4 * (1 if schedule in ("dualpipe", "dualpipe_paired") else len(OFFLOADS) - 1)


def pairwise(room: Path) -> list[Case]:
    """Few cases, with one number of microbatches each, in which any two values that the rules allow together meet."""
    numbers = [(DP * microbatches,) for microbatches in range(1, 2 * PP + 2)]
    values = product(QUICK_SCHEDULES, range(4), QUICK_OFFLOADS, ARCHS, numbers)
    left = {
        case: {*combinations(enumerate(case), 2)}
        for case in map(Case._make, values)
        if allowed(room, *case[:3])
    }
    chosen = []
    while any(left.values()):
        best = max(left, key=lambda case: len(left[case]))
        chosen.append(best)
        met = left.pop(best)
        for pairs in left.values():
            pairs -= met
    return chosen


ONCE_WRONG = [
    Case("dualpipev", 1, "none", "llama", (4,)), Case("dualpipe", 1, "none", "llama", (6,)),
    Case("dualpipe", 2, "none", "gpt2", (2,)), Case("zb_h1", 0, "all:host", "gpt2", (8,)),
]  # fmt: skip
"""Lost gradients, a copy of the model without microbatches, and weights that were freed while they computed."""


def test_any_two_values_are_those_of_one_process(room: Path) -> None:
    chosen = [*ONCE_WRONG, *pairwise(room)]
    assert len(chosen) == 31
    assert all(right(room, case) for case in chosen)


def without_a_block(rank: int, world: int, recipe: Recipe, conditional: bool) -> list[float] | str:
    """A step in which a block does not compute. Returns the norms of its gradients, or the error."""
    data = prepare(recipe)
    recipe = resolve(recipe, vocab_size=data.vocab_size)
    state = build_state(recipe, ranks_of(rank, world))
    for replica in state.parallel.replicas:
        replica.conditional = conditional
    state.parallel.stages[0].blocks["1"].forward = lambda x, *_, **__: x
    try:
        forward_backward(state, share_of(batches_of(recipe, data), 0, 2, 1, state.mesh), 0)
        return [g.norm().item() for name, g in state.gradients().items() if name.startswith("blocks.1.")]
    except RuntimeError as error:
        return str(error)
    finally:
        state.parallel.close()


@only("none-0", "none-2", "states:host-0", "all:host-1")
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("offload", ["none", "states:host", "all:host"])
def test_a_gradient_that_is_missing_is_an_error(room: Path, zero: int, offload: str) -> None:
    """Of a recipe's model. A user's own module may leave out a part in a step: its gradient is 0."""
    recipe = tiny(room, f"dp=2,zero={zero},offload={offload}", *SMALL)
    assert run_ranks(2, without_a_block, recipe, True) == [[0.0] * 6] * 2
    for said in run_ranks(2, without_a_block, recipe, False):
        assert re.match(r"blocks\.1\.\S+ and 5 more: no gradient in this step, though", said)


def test_the_reference_needs_all_gradients_too(room: Path) -> None:
    recipe = recipe_of(room, Case("1f1b", 0, "none", "llama"))

    def without_a_norm(recipe: Recipe, one: Ranks) -> State:
        state = reference_state(recipe, one)
        state.module.norm.forward = lambda x: x
        return state

    with pytest.raises(RuntimeError, match=r"norm\.weight: no gradient in this step"):
        list(taken(recipe, (2,), alone(), without_a_norm))


def with_averages_over_experts(rank: int, world: int, recipe: Recipe) -> None:
    card = OPTIMIZERS["adafactor"]
    wrong = [
        replace(one, applies=lambda name, shape, one=one: (one.name == "variance") == (len(shape) < 2))
        for one in card.states
    ]
    with mock.patch.dict(OPTIMIZERS, adafactor=replace(card, states=wrong)):
        build_state(resolve(recipe, vocab_size=prepare(recipe).vocab_size), ranks_of(rank, world))


def test_states_that_no_checkpoint_could_hold_are_seen_before_the_first_step(room: Path) -> None:
    """Columns that are averages over experts, of which a rank has some."""
    sets = [*SMALL, "model.arch=gpt_oss", *ARCHS["moe"], "optim.name=adafactor", "optim.eps=none"]
    wrong = (
        r"no whole checkpoint: columns\.blocks\.0\.mlp\.experts\.\w+bias[.\d]*, shape \[1, \d+\]: they own"
    )
    with pytest.raises(RankFailed, match=wrong):
        run_ranks(2, with_averages_over_experts, tiny(room, "dp=2,ep=2", *sets))
