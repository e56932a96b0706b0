"""Sophia's estimates of the curvature (step/curvature.py): beside their definitions, and in every layout."""

import pytest
import torch
from layouts import compared, tiny
from marks import slow
from pool_runs import ranks_of
from steps import planned, recipe_of

from fivefold.errors import UserError
from fivefold.kernels.cross_entropy import drawn
from fivefold.kernels.hashing import keys
from fivefold.parallel.mesh import Microbatch
from fivefold.recipe import change, load, resolve
from fivefold.step import curvature
from fivefold.step.state import build_state
from fivefold.step.step import forward_backward, take_step
from fivefold_plan.cluster.clusters import parse
from fivefold_plan.messages import volume
from fivefold_plan.predict import held, predict
from fivefold_plan.trace.step import trace

SOPHIA = ["optim.name=sophia", "precision.mode=fp32", "optim.estimate_every=2"]


def built(folder, *sets):
    """(resolved recipe, its state at step 0, two microbatches; some targets do not count)."""
    recipe = resolve(tiny(folder, "dp=1", *SOPHIA, *sets, "model.tie_embeddings=false"), vocab_size=256)
    tokens = torch.randint(0, 256, (8, 17), generator=torch.Generator().manual_seed(0))
    inputs, targets = tokens[:, :-1], tokens[:, 1:].clone()
    targets[:, 3] = -100
    halves = [Microbatch(inputs[rows], targets[rows]) for rows in (slice(0, 4), slice(4, 8))]
    return recipe, build_state(recipe, ranks_of(0, 1)), halves


def test_labels_are_drawn_from_the_softmax():
    """100,000 tokens with the same logits, in parts of the vocabulary as ranks have them."""
    logits = torch.tensor([2.0, 0.0, -1.0, 1.0, -30.0, 0.5])
    many, tokens = logits.expand(100_000, 6), torch.arange(100_000)
    _, labels = drawn(many, tokens, keys("a"))
    shares = torch.bincount(labels, minlength=6) / len(tokens)
    deviation = (logits.softmax(0) * (1 - logits.softmax(0)) / len(tokens)).sqrt()
    assert ((shares - logits.softmax(0)).abs() <= 4 * deviation + 1e-9).all()
    parts = [drawn(many[:, 2 * i : 2 * i + 2], tokens, keys("a"), 2 * i) for i in range(3)]
    best = torch.stack([score for score, _ in parts]).argmax(0)
    assert torch.equal(torch.stack([label for _, label in parts])[best, tokens], labels)
    assert not torch.equal(drawn(many, tokens, keys("b"))[1], labels)


def test_gauss_newton_bartlett_by_plain_autograd(tmp_path):
    """B g^2, where g is the gradient of PyTorch's own cross-entropy with labels drawn from whole logits."""
    recipe, state, halves = built(tmp_path, "optim.estimator=gnb")
    curvature.estimate(state, recipe, halves, forward_backward)
    found = state.parallel.replicas[0].updater.rules.estimates
    inputs, targets = (torch.cat([getattr(half, kind) for half in halves]) for kind in ("inputs", "targets"))
    module = state.module
    x = module.begin(inputs, torch.arange(16))
    for block in module.blocks.values():
        x = block(x, *module.context(torch.arange(16)))
    logits = torch.nn.functional.linear(module.norm(x), module.head.weight).flatten(0, 1)
    _, labels = drawn(logits.detach(), torch.arange(8 * 16), keys("0/gnb/0"))
    labels = labels.where(targets.flatten() >= 0, -100)
    loss = torch.nn.functional.cross_entropy(logits, labels)
    params = dict(module.named_parameters())
    for name, gradient in zip(params, torch.autograd.grad(loss, [*params.values()]), strict=True):
        wanted = 8 * 16 * gradient.square()
        torch.testing.assert_close(found[name], wanted, rtol=1e-3, atol=1e-6 * wanted.max().item())


@pytest.mark.parametrize(
    "layout",
    [
        "tp=2,sp=true",
        *slow(
            "dp=2,tp=2,sp=true", "dp=2,zero=3", "dp=1", "dp=2", "dp=2,zero=1", "dp=2,zero=2", "dp=3", "tp=2",
            "pp=2", "cp=2", "pp=2,tp=2", "pp=2,schedule=zb_h1", "dp=2,zero=3,recompute=full",
        ),
    ],
)  # fmt: skip
def test_layouts_estimate_the_same(tmp_path, layout):
    """Three steps, of which two have an estimate: weights, and the estimate by which they moved."""
    report = compared(tiny(tmp_path, layout, *SOPHIA, "optim.estimator=gnb", "optim.lr=1e-4"))
    assert report.passed, report.figures


def test_an_estimate_is_averaged_every_so_many_steps(tmp_path):
    """Steps 0 and 2 change the average, step 1 does not; what is not finite leaves it as it is."""
    recipe, state, halves = built(tmp_path, "optim.estimator=gnb")
    seen = []
    for _ in range(3):
        take_step(state, recipe, halves)
        seen.append({n: t.clone() for n, t in state.moments().items() if n.startswith("hessian")})
    assert all(torch.equal(t, seen[1][n]) for n, t in seen[0].items())
    assert not all(torch.equal(t, seen[2][n]) for n, t in seen[1].items())
    rules = state.parallel.replicas[0].updater.rules
    assert rules.estimates == {}
    estimates = {name: torch.full_like(w, torch.inf) for name, w in rules.masters.items()}
    rules.estimates = estimates
    state.step = 1
    take_step(state, recipe, halves)
    assert all(torch.equal(t, state.moments()[n]) for n, t in seen[2].items())


def test_the_first_update_has_an_estimate(tmp_path):
    """Also behind a step that was skipped, and is no step of an estimate itself."""
    recipe, state, halves = built(tmp_path, "optim.estimator=gnb")
    state.step = 1
    take_step(state, recipe, halves)
    averages = [t for n, t in state.moments().items() if n.startswith("hessian")]
    assert averages
    assert all(bool(t.any()) for t in averages)


@pytest.mark.parametrize(
    ("sets", "layout", "why"),
    [
        ([], "dp=1,offload=states:host", "layout.offload"),
        ([], "dp=2,compress=int8", "layout.compress"),
        (["precision.mode=bf16_pure"], "dp=1", "precision.mode"),
        (["optim.name=adamw"], "dp=1", "no such field"),
    ],
)
def test_what_cannot_estimate_is_refused(sets, layout, why):
    with pytest.raises(UserError, match=why):
        load("quickstart", [*SOPHIA[:2], "optim.estimator=gnb", *sets], layout)


def test_an_estimate_is_planned():
    """A forward and backward every 10 steps (the default, which a recipe leaves out), their messages, and 4 bytes per
    parameter until the update."""
    recipe = load("llama2-7b", ["optim.name=sophia"], "dp=8,zero=3")
    cluster = parse("h100:8")
    fisher, drawn_ = (predict(change(recipe, [f"optim.estimator={e}"]), cluster) for e in ("fisher", "gnb"))
    terms = dict(drawn_.step.terms)
    assert drawn_.step.seconds - fisher.step.seconds == pytest.approx(
        terms["estimates of the curvature, mean"]
    )
    assert terms["estimates of the curvature, mean"] > 0.09 * terms["pipeline, first start to last end"]
    assert drawn_.sent["dp"] == pytest.approx(1.1 * fisher.sent["dp"], rel=1e-6)
    more = drawn_.memory[0].total - fisher.memory[0].total
    assert more == pytest.approx(4 * 6_738_415_616 / 8, rel=1e-3)


@pytest.mark.slow
def test_a_step_with_an_estimate_is_traced_as_it_is_planned():
    """Every message twice, but for what ranks agree on at its end; the memory of the formula."""
    sets = ["model.layers=4", "model.dim=256", "model.heads=4", "model.kv_heads=4", "model.seq_len=64"]
    recipe = recipe_of("llama", "fp32", "dp=2,zero=3", *sets, *SOPHIA, "optim.estimator=gnb")
    s = planned(recipe)
    step, counted = trace(recipe, 0, s.microbatches), volume.counted(s, 0)
    twice = {key: (2 * calls, 2 * size) for key, (calls, size) in counted.items() if key[0] != "all_reduce"}
    assert {key: sent for key, sent in step.sent.items() if key[0] != "all_reduce"} == twice
    assert held(s)[0].total == pytest.approx(step.memory.total, rel=0.02)
