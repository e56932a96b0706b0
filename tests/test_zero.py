"""ZeRO 1, 2, 3 and hybrids compute what one process computes, keep what the paper says, and send what it says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from layouts import compared, tiny
from marks import only
from parity import evaluate
from ranks import run_ranks
from steps import counted, planned
from torch import Tensor

from fivefold.launch.ranks import Ranks
from fivefold.models.card import card_of
from fivefold.recipe import Recipe, change, count_parameters, load, resolve
from fivefold.sharding.layout import Layout
from fivefold.sharding.parts import boxes, parts
from fivefold.step.state import State, build_state
from fivefold.step.step import forward_backward, take_step, update
from fivefold.train.share import rows_of, share_of
from fivefold_plan.messages import volume
from fivefold_plan.trace.traffic import Collectives

V, T, B = 61, 16, 12  # 61 rows do not divide evenly between ranks
TINY = [
    "model.layers=2", "model.dim=24", "model.heads=4", "model.ffn_dim=36", f"model.seq_len={T}",
    f"train.global_batch_size={B}", "train.microbatch_size=1", "train.steps=10", "optim.lr=1e-2",
    "optim.warmup_steps=0", "layout.dp_replicate=1", "precision.mode=fp32",
    "optim.eps=1e-4",  # a bias of keys has no gradient but rounding, which a tiny eps would blow up
]  # fmt: skip
ARCHS = {
    "llama": ["model.kv_heads=2"],
    "untied": ["model.kv_heads=2", "model.tie_embeddings=false"],
    "gpt2": ["model.arch=gpt2", "model.kv_heads=4"],
    "bert": ["model.arch=bert", "model.kv_heads=4", "train.sample_every=0"],
}
LAYOUTS = {
    "dp2": ["layout.dp_shard=2"],
    "dp4": ["layout.dp_shard=4"],
    "hybrid": ["layout.dp_replicate=2", "layout.dp_shard=2"],
}


def recipe_of(arch: str, *sets: str) -> Recipe:
    return resolve(load("quickstart", [*TINY, *ARCHS[arch], *sets]), vocab_size=V)


class Tokens:
    """Random batches."""

    def batch(self, i: int, rows: range) -> tuple[np.ndarray, np.ndarray]:
        tokens = np.random.default_rng(i).integers(0, V, (B, T + 1))[rows.start : rows.stop]
        return tokens[:, :-1], tokens[:, 1:]


def state_on(rank: int, world: int, recipe: Recipe) -> State:
    return build_state(recipe, Ranks(rank, world, rank, world, torch.device("cpu")))


def share(state: State, recipe: Recipe, microbatches: int) -> list[tuple[Tensor, Tensor]]:
    return share_of(Tokens(), state.step, B, B // state.mesh.size("dp") // microbatches, state.mesh)


def steps(rank: int, world: int, recipe: Recipe, microbatches: int, count: int = 3) -> dict[str, Any]:
    """Losses and norms of some steps, this rank's gradients of the first and weights after the last."""
    state = state_on(rank, world, recipe)
    found: dict[str, Any] = {"losses": [], "norms": []}

    def keep_first_gradient() -> None:
        if state.step == 0:
            found["gradients"] = {n: g.float().numpy().copy() for n, g in state.gradients().items()}

    for _ in range(count):
        done = take_step(state, recipe, share(state, recipe, microbatches), inspect=keep_first_gradient)
        found["losses"].append(done.loss)
        found["norms"].append(done.norm)
    found["weights"] = {n: w.float().numpy().copy() for n, w in state.masters().items()}
    return found


def joined(answers: list[dict[str, Any]], recipe: Recipe, kind: str) -> dict[str, np.ndarray]:
    """The whole tensors of what ranks keep. Where several keep the same, they must have the same bits."""
    layout, shapes = Layout.from_recipe(recipe.layout), card_of(recipe.model).parameters
    found = {name: np.full(shape, np.nan, np.float32) for name, shape in shapes.items()}
    for rank, answer in enumerate(answers):
        for name, part in parts(card_of(recipe.model), layout, rank).items():
            for where, box in boxes(part.keeps):
                place = tuple(slice(*span) for span in box)
                there, new = found[name][place], answer[kind][name][where]
                assert np.isnan(there).all() or np.array_equal(there, new), f"{name} differs between ranks"
                found[name][place] = new
    return found


def worst(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> tuple[float, str]:
    """The largest relative difference of a tensor, by norms, and its name."""
    assert found.keys() == wanted.keys()

    def error(name: str) -> float:
        return float(np.linalg.norm(found[name] - wanted[name]) / (np.linalg.norm(wanted[name]) or 1.0))

    return max((error(name), name) for name in wanted)


_wanted: dict[str, dict[str, Any]] = {}


def one_process(arch: str) -> dict[str, Any]:
    """What one process computes with the whole batch at once."""
    if arch not in _wanted:
        _wanted[arch] = steps(0, 1, recipe_of(arch), 1)
    return _wanted[arch]


@only("dp2-*", "dp4-3", "hybrid-2")
@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_computes_what_one_process_computes(layout: str, zero: int) -> None:
    check("llama", layout, zero, (1, 3))


@only("*-3")
@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize(
    ("arch", "layout"),
    [("untied", "dp4"), ("gpt2", "hybrid"), ("bert", "dp4")]
    + [pytest.param(arch, layout, marks=pytest.mark.slow) for arch in ARCHS for layout in LAYOUTS],
)
def test_other_models(arch: str, layout: str, zero: int) -> None:
    """bert has a table of two rows, of which the last of four ranks have none."""
    check(arch, layout, zero, (3,))


def check(arch: str, layout: str, zero: int, accumulations: tuple[int, ...]) -> None:
    """Loss, gradients, norm and weights after three steps, against one process with the whole batch at once."""
    recipe, wanted = recipe_of(arch, f"layout.zero={zero}", *LAYOUTS[layout]), one_process(arch)
    for microbatches in accumulations:
        answers = run_ranks(Layout.from_recipe(recipe.layout).ranks, steps, recipe, microbatches)
        for answer in answers:
            assert answer["losses"] == pytest.approx(wanted["losses"], rel=1e-6)
            assert answer["norms"] == pytest.approx(wanted["norms"], rel=1e-6)
        assert worst(joined(answers, recipe, "gradients"), wanted["gradients"]) < (1e-5, "")
        assert worst(joined(answers, recipe, "weights"), wanted["weights"]) < (1e-5, "")


@only("dp4-*")
@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_bf16_differs_from_replicas_by_rounding_in_fp32(layout: str, zero: int) -> None:
    """Stage 0 on as many ranks computes the same bf16 numbers; the sums of them are in fp32 in both.

    But for one sum: the two gradients of a tied embedding. Autograd adds them in bf16, unless the parameter's
    `grad_dtype` is fp32. Since torch 2.15 FSDP2 sets that while gradients stay from microbatch to microbatch (stage 1),
    and both are added in fp32. So there an untied model is compared.
    """
    for microbatches in (1, 3):
        added_in_fp32 = zero == 1 and microbatches > 1 and torch.__version__ >= (2, 15)
        bf16 = recipe_of("untied" if added_in_fp32 else "llama", "precision.mode=bf16")
        recipe = change(bf16, [f"layout.zero={zero}", *LAYOUTS[layout]])
        ranks = Layout.from_recipe(recipe.layout).ranks
        replicas = change(bf16, [f"layout.dp_replicate={ranks}"])
        found = run_ranks(ranks, steps, recipe, microbatches, 1)
        wanted = run_ranks(ranks, steps, replicas, microbatches, 1)
        assert [a["losses"] for a in found] == [a["losses"] for a in wanted]
        assert found[0]["norms"] == pytest.approx(wanted[0]["norms"], rel=1e-6)
        assert worst(joined(found, recipe, "gradients"), wanted[0]["gradients"]) < (1e-6, "")


def test_gradients_sent_in_bf16() -> None:
    """Each rank's sum is rounded once, on its way."""
    recipe = recipe_of("llama", "layout.zero=2", "layout.dp_shard=2", "precision.reduce=bf16")
    error, name = worst(
        joined(run_ranks(2, steps, recipe, 1, 1), recipe, "gradients"), one_process("llama")["gradients"]
    )
    assert 1e-4 < error < 2**-8, f"{name}: {error}"


def sent(rank: int, world: int, recipe: Recipe, microbatches: int) -> dict[tuple[str, str], list[int]]:
    """What the second step sends, without clipping."""
    state = state_on(rank, world, recipe)

    def step() -> None:
        forward_backward(state, share(state, recipe, microbatches), 0)
        update(state, recipe.optim, torch.ones(()), torch.zeros(()), 10)

    step()
    with Collectives(state.mesh) as counter:
        step()
    return counter.found


@only("*-3-fp32")
@pytest.mark.parametrize("mode", ["fp32", "bf16"])
@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_sends_what_the_paper_says(zero: int, microbatches: int, mode: str) -> None:
    """In gathers and scatters of the whole model: stage 1: 1 + 1; stage 2: 1 + m; stage 3: 2 m + m (arXiv 1910.02054).

    With replicas, each shard is summed over them once a step. Sizes divide evenly here: else padding is sent, too."""
    sizes = ["model.vocab_size=64", "model.dim=32", f"layout.zero={zero}", f"precision.mode={mode}"]
    gathers, scatters = {1: (1, 1), 2: (1, microbatches), 3: (2 * microbatches, microbatches)}[zero]
    units = 3  # two blocks, and the rest
    recipe = recipe_of("llama", *sizes, *LAYOUTS["dp2"])
    psi, width = count_parameters(recipe.model), 2 if mode == "bf16" else 4
    wanted = {
        ("all_gather", "shard"): [units * gathers, gathers * width * psi],
        ("all_to_all", "shard"): [units * scatters, scatters * 4 * psi],
    }
    assert run_ranks(2, sent, recipe, microbatches) == [wanted] * 2
    if mode == "fp32":
        hybrid = change(recipe, LAYOUTS["hybrid"])
        wanted["all_reduce", "replicate"] = [units, 4 * psi // 2]
        assert run_ranks(4, sent, hybrid, microbatches) == [wanted] * 4


def validation(rank: int, world: int, recipe: Recipe, size: int) -> float:
    """Validation loss of `size` sequences of batch 0, in microbatches of 2; and a step still works after it."""
    state = state_on(rank, world, recipe)
    microbatches = rows_of(Tokens(), size, 2, state.mesh, equal=world > 1)
    assert world == 1 or all(inputs.shape == (2, T) for inputs, *_ in microbatches)
    found = evaluate(state, microbatches, None)["val_loss"]
    forward_backward(state, share(state, recipe, 1), 0)
    return found


@pytest.mark.parametrize("zero", [1, 3])
@pytest.mark.parametrize("size", [1, 7, 12])
def test_validation_of_any_number_of_sequences(zero: int, size: int) -> None:
    recipe = recipe_of("llama")
    wanted = validation(0, 1, recipe, size)
    shared = change(recipe, [f"layout.zero={zero}", "layout.dp_shard=4"])
    assert run_ranks(4, validation, shared, size) == pytest.approx([wanted] * 4, rel=1e-6)


def whole_masters(rank: int, world: int, recipe: Recipe) -> tuple[int, int, int]:
    """Elements of masters, moments and gradients that a rank has after a step."""
    state = state_on(rank, world, recipe)
    forward_backward(state, share(state, recipe, 1), 0)
    update(state, recipe.optim, torch.ones(()), torch.zeros(()), 10)
    kinds = (state.masters(), state.gradients(), state.moments())
    masters, gradients, moments = (sum(t.numel() for t in kind.values()) for kind in kinds)
    return masters, gradients, moments // 2


def test_a_rank_keeps_its_share() -> None:
    recipe = recipe_of("llama", "model.vocab_size=64", "model.dim=32", "layout.zero=1", "layout.dp_shard=4")
    share = count_parameters(recipe.model) // 4
    assert run_ranks(4, whole_masters, recipe) == [(share,) * 3] * 4


@only("3")
@pytest.mark.parametrize("zero", [1, 3])
def test_pipeline_whose_first_and_last_stage_share_an_embedding(tmp_path: Path, zero: int) -> None:
    """zbv leaves weight gradients for later, and puts both users of the tied embedding on one rank."""
    layout = f"dp=2,zero={zero},pp=2,schedule=zbv,virtual_stages=2"
    report = compared(tiny(tmp_path, layout, "model.dim=40", "model.ffn_dim=63"))
    assert report.passed, report.figures


def test_a_pipeline_gathers_nothing_in_vain(tmp_path: Path) -> None:
    """Stages of two blocks with several microbatches under way. Where no unit is left, FSDP2 would gather the one that
    ran before in forward: a block of another microbatch, which nobody uses."""
    recipe = tiny(tmp_path, "dp=2,zero=3,pp=2,schedule=interleaved,virtual_stages=2", "model.layers=8")
    report = compared(recipe)
    assert report.passed, report.figures
    s = planned(recipe)
    for rank, step in enumerate(run_ranks(4, counted, recipe)):
        gathers = ("all_gather", "shard")
        assert step.sent[gathers] == volume.counted(s, rank)[gathers]
