"""Learning-rate schedules, clipping, optimizers."""

import json
import math
from itertools import product
from typing import Any
from unittest.mock import patch
from xml.etree import ElementTree

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from layouts import compared, side, tiny
from marks import only, slow, slow_but
from pool_runs import ranks_of
from ranks import run_ranks
from torch.utils._python_dispatch import TorchDispatchMode

from fivefold.cli.main import main
from fivefold.errors import UserError
from fivefold.models.card import card_of, resolve_model
from fivefold.models.section import ModelSection
from fivefold.optim import OPTIMIZERS, learning_rate
from fivefold.optim.card import gathered, places, planned_ways, state_bytes, ways
from fivefold.optim.muon import orthogonal
from fivefold.optim.scaling import clip_scale, sum_of_squares
from fivefold.optim.small_states import decode, encode
from fivefold.optim.updater import Updater
from fivefold.parallel.mesh import Mesh
from fivefold.parallel.replica import Gathered
from fivefold.recipe import load, resolve
from fivefold.schedules.compression import dynamic
from fivefold.sharding.layout import Layout, parse
from fivefold.sharding.matrices import exchanges, sizes_sent
from fivefold.sharding.parts import Sections, boxes, held, local_shape
from fivefold.step import step as steps_of
from fivefold.step.state import build_state
from fivefold.step.step import NORM, judge, outlier
from fivefold_plan.lessons.optimizer_paths import FAMILIES, SURFACES, contours, path, to_svg, to_text, tuned
from fivefold_plan.trace.memory import is_free

SCHEDULES = ["cosine", "linear", "wsd", "constant"]


def curve(schedule, total=100, warmup=10, **options):
    return [
        learning_rate(s, total=total, warmup=warmup, lr=1.0, min_lr=0.1, schedule=schedule, **options)
        for s in range(total)
    ]


@given(st.sampled_from(SCHEDULES), st.integers(1, 200), st.integers(0, 200), st.floats(0.01, 1))
def test_schedules_stay_between_their_bounds(schedule, total, warmup, fraction):
    warmup = min(warmup, total)
    values = curve(schedule, total, warmup, decay_fraction=fraction)
    assert all(0 < v <= 1 + 1e-12 for v in values)
    assert values[:warmup] == sorted(values[:warmup])
    assert values[warmup:] == sorted(values[warmup:], reverse=True)
    if schedule != "constant" and warmup < total:
        assert values[-1] == pytest.approx(0.1), "the last step has min_lr"


def test_schedule_shapes():
    for schedule in SCHEDULES:
        assert curve(schedule)[:10] == pytest.approx([0.1 * (s + 1) for s in range(10)])
    assert curve("cosine")[54] == pytest.approx(0.55)
    assert curve("linear")[54] == pytest.approx(0.55)
    assert curve("wsd", decay_fraction=0.2)[10:80] == [1.0] * 70
    assert curve("wsd", decay_fraction=0.2)[89] == pytest.approx(0.55)
    assert curve("constant")[10:] == [1.0] * 90


def updater(name, masters, sections=None, **changes):
    card = OPTIMIZERS[name]
    fields = {**card.fields, **changes}
    return Updater(card, masters, lr=0.1, weight_decay=0.5, fields=fields, sections=sections)


def test_adamw_decays_matrices_only():
    masters = {"matrix": torch.ones(2, 2), "norm": torch.ones(2)}
    updater("adamw", masters).step({name: torch.zeros_like(w) for name, w in masters.items()}, lr=0.1)
    assert masters["matrix"].eq(0.95).all()
    assert masters["norm"].eq(1).all()


@pytest.mark.parametrize(
    ("name", "changes", "steps"),
    [
        ("sgd", {}, [1.0, 1.0, 1.0]),
        ("momentum", {"momentum": 0.5}, [1.0, 1.5, 1.75]),
        ("nesterov", {"momentum": 0.5}, [1.5, 1.75, 1.875]),
    ],
)
def test_momentum_by_hand(name, changes, steps):
    """The gradient is always 1: what the weight moves by in each step, in learning rates."""
    masters = {"norm": torch.zeros(3)}
    optimizer, before = updater(name, masters, **changes), 0.0
    for wanted in steps:
        optimizer.step({"norm": torch.ones(3)}, lr=0.1)
        assert (before - masters["norm"]).tolist() == pytest.approx([0.1 * wanted] * 3)
        before = masters["norm"].clone()


@pytest.mark.parametrize("name", ["sgd", "momentum", "nesterov"])
def test_sgd_adds_the_decay_to_the_gradient(name):
    masters = {"matrix": torch.ones(2, 2), "norm": torch.ones(2)}
    optimizer = updater(name, masters)
    optimizer.step({key: torch.zeros_like(w) for key, w in masters.items()}, lr=0.1)
    factor = 1.9 if name == "nesterov" else 1.0
    assert masters["matrix"].flatten().tolist() == pytest.approx([1 - 0.1 * 0.5 * factor] * 4)
    assert masters["norm"].eq(1).all()


TORCH = {
    "adagrad": lambda w: torch.optim.Adagrad(w, lr=0.1),
    "rmsprop": lambda w: torch.optim.RMSprop(w, lr=0.1, alpha=0.99),
    "radam": lambda w: torch.optim.RAdam(w, lr=0.1),
    "nadam": lambda w: torch.optim.NAdam(w, lr=0.1),
    "muon": lambda w: torch.optim.Muon(w, lr=0.1, adjust_lr_fn="match_rms_adamw"),
}


@pytest.mark.parametrize("name", TORCH)
def test_rules_are_those_of_torch(name):
    """Where torch has an optimizer of this name, but no fused kernel of it."""
    generator = torch.Generator().manual_seed(0)
    masters = {
        f"blocks.{i}.w": torch.randn(shape, generator=generator) for i, shape in enumerate([(6, 4), (4, 9)])
    }
    theirs = [w.clone() for w in masters.values()]
    card = OPTIMIZERS[name]
    mine = Updater(card, masters, 0.1, 0.0, dict(card.fields), compute=torch.bfloat16)
    oracle = TORCH[name](theirs)
    for group in oracle.param_groups:
        group["weight_decay"] = 0.0
    for _ in range(9):  # RAdam adapts from the sixth step on
        for w, other in zip(masters.values(), theirs, strict=True):
            other.grad = torch.randn(w.shape, generator=generator)
        mine.step({key: t.grad.clone() for key, t in zip(masters, theirs, strict=True)}, 0.1)
        oracle.step()
    for w, other in zip(masters.values(), theirs, strict=True):
        torch.testing.assert_close(w, other, rtol=1e-5, atol=1e-6 if name != "muon" else 5e-3)


def test_adafactor_is_that_of_torch():
    """torch's rate is relative to the weights' size; ours is not."""
    generator = torch.Generator().manual_seed(0)
    masters = {"matrix": torch.randn(6, 4, generator=generator), "norm": torch.randn(5, generator=generator)}
    for _ in range(4):
        grads = {key: torch.randn(w.shape, generator=generator) for key, w in masters.items()}
        if not (copies := locals().get("copies")):
            copies = {key: w.clone() for key, w in masters.items()}
            mine = updater("adafactor", masters)
            mine.rules.decays = dict.fromkeys(masters, 0.0)
            theirs = {key: torch.optim.Adafactor([w], lr=0.01, weight_decay=0.0) for key, w in copies.items()}
        for key, w in copies.items():
            w.grad, before = grads[key].clone(), w.clone()
            theirs[key].step()
            rate = 0.01 * before.square().mean().sqrt()
            w.copy_(before + (w - before) * (0.01 / rate))
        mine.step(grads, 0.01)
    for key, w in masters.items():
        torch.testing.assert_close(w, copies[key], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("sizes", [(6,), (5, 3, 2)])
def test_soap_is_that_of_the_paper(sizes):
    """Algorithm 3 of arXiv 2409.11321 in fp64, of one matrix or of several in one parameter. Its first step only makes
    the bases, which have no order and, where eigenvalues are equal, no direction: they are checked, and taken over."""
    generator, name, whole = torch.Generator().manual_seed(0), "blocks.0.w", (sum(sizes), 4)
    masters = {name: torch.randn(whole, generator=generator)}
    (b1, b2), eps, lr, decay, every = (0.9, 0.95), 1e-8, 0.1, 0.5, 2
    sections = {name: Sections(0, sizes)} if len(sizes) > 1 else None
    mine = updater("soap", masters, sections, betas=(b1, b2), eps=eps, basis_every=every)
    kept = [(w.double(), 0.0, 0.0) for w in masters[name].clone().split(sizes)]
    bases = {}
    for step in range(8):
        gradient = torch.randn(whole, generator=generator)
        mine.step({name: gradient.clone()}, lr=lr)
        for number, g in enumerate(gradient.double().split(sizes)):
            w, m, v = kept[number]
            own = f"{name}.{number}" if sections else name
            if step == 0:
                left, right = (1 - b2) * g @ g.T, (1 - b2) * g.T @ g
                ql, qr = (mine.states()[f"{side}_basis.{own}"].double() for side in ("left", "right"))
                for average, basis in ((left, ql), (right, qr)):
                    values = torch.diag(basis.T @ average @ basis)
                    torch.testing.assert_close(
                        basis @ torch.diag(values) @ basis.T, average, rtol=0, atol=1e-6
                    )
                w = w - lr * decay * w
            else:
                left, right, ql, qr = bases[number]
                m = b1 * m + (1 - b1) * g
                v = b2 * v + (1 - b2) * (ql.T @ g @ qr) ** 2
                turned = (ql.T @ m @ qr) / (1 - b1**step)
                w = w - lr * (ql @ (turned / ((v / (1 - b2**step)).sqrt() + eps)) @ qr.T + decay * w)
                left, right = b2 * left + (1 - b2) * g @ g.T, b2 * right + (1 - b2) * g.T @ g
                if step % every == 0:
                    ql, qr = torch.linalg.qr(left @ ql).Q, torch.linalg.qr(right @ qr).Q
            kept[number], bases[number] = (w, m, v), (left, right, ql, qr)
            now = masters[name].split(sizes)[number]
            torch.testing.assert_close(now.double(), w, rtol=1e-5, atol=1e-5)


def test_adamw_of_eight_bits_is_adamw_up_to_its_codes():
    """A code is at most half the widest gap of its map off, in shares of the block's largest value (below 1 here); a
    moment inherits these errors, shrunk by its beta. So they stay in bounds, and so does what a weight moves by."""
    generator = torch.Generator().manual_seed(0)
    masters = {"blocks.0.w": torch.randn(3, 300, generator=generator)}
    theirs = masters["blocks.0.w"].double()
    start = theirs.clone()
    mine = updater("adamw8bit", masters)
    (b1, b2), eps, lr = (0.9, 0.95), 1e-8, 0.1
    oracle = torch.optim.AdamW([theirs], lr=lr, betas=(b1, b2), eps=eps, weight_decay=0.5)
    half_gaps = [0.9 / 64 / 2, 0.9 / 128 / 2]  # of 64 and 128 equal parts of [0.1, 1]
    off_mean = off_square = 0.0
    off = torch.full_like(theirs, 1e-6)
    for t in range(1, 6):
        signs = (
            torch.randint(0, 4, theirs.shape, generator=generator).clamp(max=1) * 2 - 1
        )  # most are positive
        g = signs * (0.5 + 0.5 * torch.rand(theirs.shape, generator=generator))
        mine.step({"blocks.0.w": g.clone()}, lr=lr)
        theirs.grad = g.double()
        oracle.step()
        mean, square = (oracle.state[theirs][key] for key in ("exp_avg", "exp_avg_sq"))
        lowest, step = square - off_square, mean / (1 - b1**t) / (square / (1 - b2**t)).sqrt()
        assert lowest.min() > 0
        step_off = off_mean / (1 - b1**t) / (lowest / (1 - b2**t)).sqrt()
        step_off = step_off + step.abs() * ((square / lowest).sqrt() - 1)
        off = off + lr * step_off
        assert step_off.mean() < 0.2 * step.abs().mean()
        assert ((masters["blocks.0.w"] - theirs).abs() <= off).all(), t
        off_mean, off_square = b1 * (off_mean + half_gaps[0]), b2 * (off_square + half_gaps[1])
    ours, moved = masters["blocks.0.w"] - start, theirs - start
    assert (ours - moved).abs().max() > 1e-4, "codes round"
    spread = (
        off * moved
    ).norm() / moved.square().sum()  # of independent roundings, added up over all elements
    assert abs((ours * moved).sum() / moved.square().sum() - 1) < 3 * spread < 0.03


def test_lion_and_sage_by_hand():
    """Lion moves by its sign. Where |w g| stays the same, the sensitivity varies by nothing, and SAGE hardly moves."""
    masters = {"norm": torch.full((3,), 2.0)}
    lion = updater("lion", masters)
    for g, wanted in ((1.0, 1.9), (-0.01, 1.8), (-3.0, 1.9)):
        lion.step({"norm": torch.full((3,), g)}, lr=0.1)
        assert masters["norm"].tolist() == pytest.approx([wanted] * 3)
    masters = {"norm": torch.tensor([2.0, 0.0])}
    sage = updater("adamsage", masters)
    sage.step({"norm": torch.ones(2)}, lr=0.1)
    assert masters["norm"].tolist() == pytest.approx([2.0, -0.1]), "a weight of 0 moves as in Adam"
    sage.step({"norm": torch.tensor([3.0, 1.0])}, lr=0.1)
    mean, square = 0.9 * 0.1 + 0.1 * 3, 0.95 * 0.05 + 0.05 * 9
    usual = (0.75 * 0.25 * 2 + 0.25 * 6) / (1 - 0.75**2)
    step = abs(6 - usual) / usual * (mean / (1 - 0.9**2)) / (square / (1 - 0.95**2)) ** 0.5
    assert masters["norm"][0].item() == pytest.approx(2 - 0.1 * step)


def test_sophia_by_hand():
    """Curvature 100 tokens x g^2; what is flat moves by the whole rate."""
    masters = {"norm": torch.zeros(2)}
    card = OPTIMIZERS["sophia"]
    fields = card.fields | {"estimate_every": 2}
    sophia = Updater(card, masters, 0.1, 0.0, fields, tokens=100)
    for g in ([1.0, 1e-4], [1.0, 1e-4]):
        sophia.step({"norm": torch.tensor(g)}, lr=0.1)
    curvature = 0.05 * 100 * 0.01
    moved = sum(min(1.0, (1 - 0.965**n) / curvature) for n in (1, 2))
    assert masters["norm"].tolist() == pytest.approx([-0.1 * moved, -0.2])
    assert sophia.states()["hessian.norm"].tolist() == pytest.approx([1.0, 1e-8]), "the first of two steps"


def test_orthogonal_matrices():
    """Muon's updates have singular values about 1; SOAP's bases are orthogonal."""
    generator = torch.Generator().manual_seed(0)
    stack = torch.randn(2, 8, 5, generator=generator)
    values = torch.linalg.svdvals(orthogonal(stack, 5, torch.float32))
    assert values.min() > 0.6
    assert values.max() < 1.3
    soap = updater("soap", {"blocks.0.w": torch.randn(6, 4, generator=generator)}, basis_every=1)
    for _ in range(3):
        soap.step({"blocks.0.w": torch.randn(6, 4, generator=generator)}, lr=0.1)
    basis = soap.states()["left_basis.blocks.0.w"]
    torch.testing.assert_close(basis @ basis.T, torch.eye(6), rtol=0, atol=1e-5)


def test_moments_of_eight_bits():
    """Codes round by at most an eighth of a value near the largest of its block; the smallest stay above 0."""
    x = torch.randn(3, 700, generator=torch.Generator().manual_seed(0))
    for signed in (True, False):
        values = x if signed else x.square()
        assert len(set(dynamic(signed))) == 256
        codes, scales = torch.zeros(3, 700, dtype=torch.uint8), torch.zeros(3, 3)
        numbers = torch.tensor(dynamic(signed))
        encode(values, codes, scales, numbers, lowest=0 if signed else 1)
        found = decode(codes, scales, numbers)
        assert ((found - values).norm() / values.norm()).item() < 0.02
        assert signed or found.min() > 0
    assert torch.equal(decode(torch.zeros_like(codes), scales, numbers), torch.zeros(3, 700))


def test_codes_of_eight_bits_reach_the_device_once(monkeypatch):
    """A later step copies nothing from the host: a GPU would be waited for."""
    card = OPTIMIZERS["adamw8bit"]
    updater = Updater(card, {"blocks.0.w": torch.ones(2, 300)}, 0.1, 0.0, card.fields)
    updater.step({"blocks.0.w": torch.ones(2, 300)}, lr=0.1)
    monkeypatch.setattr(torch, "tensor", lambda *_, **__: pytest.fail("made from numbers of the host"))
    updater.step({"blocks.0.w": torch.ones(2, 300)}, lr=0.1)


def test_sophia_counts_predicted_tokens(tmp_path):
    """Its estimate is that of one token's gradient. A masked model predicts few of them."""
    sets = ["model.layers=1", "model.dim=16", "model.heads=1", "model.ffn_dim=32", "model.seq_len=20"]
    recipe = load(
        "bert-tiny", [*sets, "train.global_batch_size=4", "optim.name=sophia", "train.steps=1"], "dp=1"
    )
    state = build_state(resolve(recipe, vocab_size=300), ranks_of(0, 1))
    assert state.parallel.replicas[0].updater.rules.tokens == 4 * round(0.15 * 20)


def masters_of(generator):
    return {
        "embed.weight": torch.randn(3, 2, generator=generator),
        "blocks.0.w": torch.randn(3, 2, generator=generator),
        "blocks.0.experts": torch.randn(2, 3, 2, generator=generator),
        "norm": torch.ones(2),
        "none": torch.ones(0, 2),
    }


SECTIONS = {
    "blocks.0.w": Sections(0, (2, 1)),
    "blocks.0.experts": Sections(1, (1, 2)),
    "norm": Sections(0, (1, 1)),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_states_travel_and_weigh_what_the_card_says(name):
    generator = torch.Generator().manual_seed(0)
    masters = masters_of(generator)
    if name == "adafactor":
        del masters["none"]
    grads = {key: torch.randn(w.shape, generator=generator) for key, w in masters.items()}
    first = updater(name, masters, SECTIONS)
    assert first.states() == {}
    for _ in range(2):
        first.step(grads, lr=0.1)
    card, saved = OPTIMIZERS[name], {k: v.clone() for k, v in first.states().items()}
    shapes = {key: tuple(w.shape) for key, w in masters.items()}
    each = [(key, shape, SECTIONS.get(key)) for key, shape in shapes.items()]
    assert set(saved) == {f"{s.name}.{own}" for one in each for s, own, _ in card.states_of(*one)}
    weigh = sum(card.state_bytes(*one) for one in each)
    counts = sum(card.of(key, shape).counts * len(card.matrices(key, shape, one)) for key, shape, one in each)
    assert sum(t.nbytes for t in saved.values()) == weigh
    assert sum(t.nbytes for t in first.kept()) == weigh + 4 * counts
    copies = {key: w.clone() for key, w in masters.items()}
    second = updater(name, copies, SECTIONS)
    second.load(saved, steps=2)
    for optimizer in (first, second):
        optimizer.step(grads, lr=0.1)
    assert all(torch.equal(copies[key], masters[key]) for key in masters)
    assert all(torch.equal(second.states()[key], t) for key, t in first.states().items())


def test_a_scale_is_applied_to_the_gradient():
    masters, copies = {"w": torch.ones(2, 2)}, {"w": torch.ones(2, 2)}
    updater("momentum", masters).step({"w": torch.full((2, 2), 4.0)}, lr=0.1, scale=torch.tensor(0.25))
    updater("momentum", copies).step({"w": torch.ones(2, 2)}, lr=0.1)
    assert torch.equal(masters["w"], copies["w"])


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("when", [0, 1, 2])
def test_a_skipped_step_changes_nothing(name, when):
    """Neither weights nor states nor counts, wherever it comes; a step that is not skipped keeps its bits."""
    generator = torch.Generator().manual_seed(0)
    masters = {"blocks.0.w": torch.randn(3, 2, generator=generator), "norm": torch.ones(2)}
    copies = {key: w.clone() for key, w in masters.items()}
    one, other = updater(name, masters), updater(name, copies)
    no, yes = torch.zeros(()), torch.ones(())
    for step in range(3):
        grads = {key: torch.randn(w.shape, generator=generator) for key, w in masters.items()}
        if step == when:
            before = [t.clone() for t in (*masters.values(), *one.kept())]
            one.step({key: torch.full_like(g, torch.nan) for key, g in grads.items()}, lr=0.1, skip=yes)
            assert all(map(torch.equal, before, (*masters.values(), *one.kept())))
            assert bool(one.states()) == (when > 0 and name != "sgd")
        one.step({key: g.clone() for key, g in grads.items()}, lr=0.1, skip=no)
        other.step(grads, lr=0.1)
    assert all(torch.equal(copies[key], masters[key]) for key in masters)
    assert all(map(torch.equal, one.kept(), other.kept()))


def test_clipping():
    square = sum_of_squares(
        [torch.full((2, 2), 3.0), torch.zeros(0), torch.full((8,), 4.0).bfloat16().float()]
    )
    assert square.item() == pytest.approx(4 * 9 + 8 * 16)
    assert sum_of_squares([torch.zeros(0)]).item() == 0
    for norm, scale in ((4.0, 0.25), (0.5, 1.0), (float("inf"), 1.0), (float("nan"), 1.0)):
        assert clip_scale(torch.tensor(norm, dtype=torch.float64), 1.0) == scale
    assert clip_scale(torch.tensor(4.0), 0.0) is None


LAYOUTS = [
    "dp=2", "dp=2,zero=1", "dp=2,zero=2", "dp=2,zero=3", "tp=2", "tp=2,sp=true", "pp=2", "cp=2", "dp=2,ep=2,zero=3",
    "dp=2,tp=2,zero=1", "dp=4,ep=2,zero=2", "dp_replicate=2,dp_shard=2,zero=3",
]  # fmt: skip
QUICK = {
    ("momentum", "dp=2,zero=2"), ("nesterov", "pp=2"), ("adafactor", "tp=2"), ("lion", "cp=2"),
    ("muon", "dp=2,tp=2,zero=1"),
}  # fmt: skip
CASES = [(name, layout) for name, card in OPTIMIZERS.items() for layout in LAYOUTS if not card.jumps]


LR = dict.fromkeys(("sgd", "momentum", "nesterov", "adagrad"), 0.05) | {"rmsprop": 1e-4}
"""Learning rates that train the model: RMSprop's first steps are ten times as long."""


@pytest.fixture(scope="module")
def room(tmp_path_factory):
    """Where text, cache and the references stay."""
    return tmp_path_factory.mktemp("optim")


@pytest.mark.parametrize(("name", "layout"), slow_but(QUICK, CASES))
def test_equals_one_process(room, name, layout):
    """Losses, every gradient, its norm, and weights after three steps."""
    recipe = tiny(room, layout, f"optim.name={name}", f"optim.lr={LR.get(name, 1e-3)}")
    report = compared(recipe, folder=room / f"{'moe' if 'ep=' in layout else 'llama'}-{name}")
    assert report.passed, report.figures


STACKS = {"gate_up": (4, 6, 3), "gate_up_bias": (4, 6), "down": (4, 3, 6), "filter_vectors": (4, 3)}
"""Parameters whose first dim numbers experts, or channels: matrices and vectors of their own."""


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("leaf", STACKS)
def test_what_a_stack_holds_is_updated_apart(name, leaf):
    """Each member by itself, so that it does not matter which of them a rank has: weights and states are those of
    updates of two halves of the stack."""
    generator = torch.Generator().manual_seed(0)
    key = f"blocks.0.mlp.experts.{leaf}"
    whole = torch.randn(STACKS[leaf], generator=generator)
    halves = [{key: half.clone()} for half in whole.chunk(2)]
    together, apart = updater(name, {key: whole}), [updater(name, half) for half in halves]
    for _ in range(3):
        g = torch.randn(STACKS[leaf], generator=generator)
        g[0] *= 100  # what its members share would show
        together.step({key: g.clone()}, lr=0.1)
        for one, half in zip(apart, g.chunk(2), strict=True):
            one.step({key: half.clone()}, lr=0.1)
    torch.testing.assert_close(whole, torch.cat([half[key] for half in halves]), rtol=1e-4, atol=1e-5)
    for state, value in together.states().items():
        parts = [one.states()[state] for one in apart]
        torch.testing.assert_close(value, torch.cat(parts), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "layout"),
    slow_but(
        {("adafactor", "dp=2,ep=2")},
        [
            *product(("adafactor", "adamw8bit", "muon"), ("dp=2,ep=2", "dp=4,ep=2,zero=2", "tp=2")),
            ("adafactor", "dp=2,ep=2,zero=3"),
        ],
    ),
)
def test_experts_with_biases_equal_one_process(tmp_path, name, layout):
    """gpt_oss, whose experts have stacks of vectors. verify weighs elements by no moment that Adafactor has."""
    sets = "model.arch=gpt_oss", "model.experts=4", "model.experts_per_token=2", "model.tie_embeddings=false"
    report = compared(tiny(tmp_path, layout, *sets, f"optim.name={name}", "optim.lr=1e-3"))
    assert report.passed, report.figures


OPTIONS = [
    "train.z_loss=0.05", "optim.lr_embeddings=0.02", "optim.lr_vectors=0.1", "train.batch_ramp=4:1",
    "optim.schedule=restarts", "optim.restart_steps=2", "faults.on_spike=skip",
]  # fmt: skip


def judge_an_outlier(usual, loss, norm, *more):
    """Judges the second step's norm beside sixty steps with a thousandth of it."""
    verdict = judge(usual, loss, norm, *more)
    if usual[NORM, 0] == 1:
        before = usual.clone()
        before[NORM] = torch.tensor([60.0, norm.log() - 7, 0.0])
        verdict = judge(before, loss, norm, *more)._replace(usual=verdict.usual)
        assert verdict.skip == 1
    return verdict


def side_with_an_outlier(rank, world, recipe, steps, folder):
    with patch.object(steps_of, "judge", judge_an_outlier):
        side(rank, world, recipe, steps, folder)


@pytest.mark.parametrize("layout", ["dp=2,tp=2", *slow("pp=2", "tp=2,sp=true", "dp=2,zero=3")])
def test_options_equal_one_process(tmp_path, layout, monkeypatch):
    """z-loss, also with a divided vocabulary, rates of their own, a batch that grows, a schedule with restarts, and a
    step that is skipped."""
    monkeypatch.setattr(steps_of, "judge", judge_an_outlier)
    report = compared(tiny(tmp_path, layout, *OPTIONS), part=side_with_an_outlier)
    assert report.passed, report.figures


def test_outliers_are_skipped():
    """Norms that jump are skipped until they are the usual ones; a norm that is not finite changes nothing."""
    norms, skipped = torch.zeros(3, dtype=torch.float64), []
    generator = torch.Generator().manual_seed(0)
    values = (1 + 0.1 * torch.rand(60, generator=generator)).tolist()
    for number in range(60):
        value = 50.0 if number in (3, 40) or number >= 50 else values[number]
        found, norms = outlier(norms, torch.tensor(value), 4.0)
        skipped.append(bool(found))
    assert [number for number, one in enumerate(skipped) if one][:1] == [40], "not the first 20"
    assert not any(skipped[41:50])
    assert skipped[50]
    for _ in range(200):
        found, norms = outlier(norms, torch.tensor(50.0), 4.0)
    assert not found, "the norm stays high"
    for value in (math.nan, math.inf, 0.0):
        found, after = outlier(norms, torch.tensor(value), 4.0)
        assert not found
        assert torch.equal(after, norms)


def test_restarts_by_hand():
    """Cosines of 4 and 8 steps after a warm-up of 2; each ends at min_lr and the next starts near lr."""
    values = curve("restarts", total=20, warmup=2, cycle=4, growth=2.0)
    assert values[:2] == pytest.approx([0.5, 1.0])
    assert values[2:6] == pytest.approx(
        [0.1 + 0.9 * (1 + math.cos(math.pi * k / 4)) / 2 for k in (1, 2, 3, 4)]
    )
    assert values[6:14] == pytest.approx(
        [0.1 + 0.9 * (1 + math.cos(math.pi * k / 8)) / 2 for k in range(1, 9)]
    )
    assert values[14] > 0.9


def test_paths_over_surfaces(tmp_path):
    """Momentum needs fewer steps along the ravine; of all pictures the points are inside, and their files are XML."""
    ravine = SURFACES["ravine"]
    rates = (0.05, 0.1, 0.2)
    found = {name: tuned(name, ravine, 40, rates) for name in ("sgd", "momentum", "muon")}
    assert found["momentum"][1][-1][2] < found["sgd"][1][-1][2] / 2
    assert path("sgd", ravine, 0.3)[-1][2] > ravine.height(*ravine.start), (
        "above 2 / 10 it swings ever further"
    )
    for surface in SURFACES.values():
        assert len(list(contours(surface))) > 200
    root = ElementTree.fromstring(to_svg({"ravine": found}))
    assert len([tip for tip in root.iter() if ", learning rate" in (tip.text or "")]) == 3
    text = to_text(ravine, found, 60, 16)
    assert "b momentum" in text
    assert text.count("a") > 10
    assert path("sgd", SURFACES["local"], 0.05)[-1][0] > 1, "it stays in the valley where it begins"


def test_rates_per_weight_leave_the_saddle_first():
    """As the surface's text says: steps until y, which starts beside the saddle, is half a unit away."""

    def steps(name):
        return next(i for i, (_, y, _) in enumerate(tuned(name, SURFACES["saddle"])[1]) if abs(y) > 0.5)

    adaptive = max(map(steps, ("adagrad", "rmsprop", "adam", "adamw", "nadam")))
    assert adaptive <= 2 < 8 <= min(map(steps, ("sgd", "momentum", "nesterov")))


def test_the_command(capsys):
    """It lists all, draws some, and names what there is."""
    for arguments, code, text in (
        ([], 0, "muon "),
        (["--draw", "ravine", "--only", "sgd"], 0, "a sgd"),
        (["--draw", "hill"], 2, "must be contours or ravine or saddle or local"),
    ):
        with pytest.raises(SystemExit) as stop:
            main(["optimizers", *arguments])
        assert (stop.value.code or 0) == code
        printed = capsys.readouterr()
        assert text in printed.out + printed.err


def test_every_optimizer_is_drawn() -> None:
    assert sorted(name for family in FAMILIES.values() for name in family) == sorted(OPTIMIZERS)


def test_the_command_writes_a_picture_and_json(tmp_path, capsys):
    file = tmp_path / "paths.svg"
    with pytest.raises(SystemExit) as stop:
        main(["optimizers", "--only", "sgd,adamw8bit", "--svg", str(file), "--json"])
    assert not stop.value.code
    found = json.loads(capsys.readouterr().out)
    assert found["picture"] == str(file)
    assert [row["name"] for row in found["optimizers"]] == ["sgd", "adamw8bit"]
    assert [row["bytes_per_parameter"] for row in found["optimizers"]] == [0, 2 + 2 * 4 / 256]
    assert found["paths"].keys() == SURFACES.keys()
    best = tuned("sgd", SURFACES["saddle"])
    assert found["paths"]["saddle"]["sgd"] == {"lr": best[0], "points": [list(point) for point in best[1]]}
    tips = [tip for tip in ElementTree.parse(file).iter() if ", learning rate" in (tip.text or "")]
    assert len(tips) == 2 * len(SURFACES)


PLACED = {
    4: ["dp=4", "dp=4,zero=1", "dp=2,tp=2,zero=3", "tp=2,dp=2", "tp=4,sp=true", "dp=4,ep=2,zero=2", "dp=4,ep=4,zero=1",
        "tp=2,dp=2,ep=2,zero=2", "tp=2,dp=2,sp=true,ep=2,ep_fold=true,zero=2",
        "dp_replicate=2,dp_shard=2,zero=3", "pp=2,tp=2", "pp=2,dp=2,zero=1"],
}  # fmt: skip


MIXED = {"experts": 4, "experts_per_token": 2, "shared_experts": 1, "expert_ffn_dim": 16}
ARCHS = {
    "dp=2,tp=2,zero=3": {"arch": "deepseek", "kv_heads": 8, **MIXED},
    "tp=2,dp=2": {"arch": "qwen3_next", "full_every": 2, "linear_key_heads": 2, **MIXED},
    "pp=2,tp=2": {"arch": "olmo2"},
    "dp=4,zero=1": {"arch": "gpt2", "kv_heads": 8},
}
"""Models other than llama, by the layouts that have them. Those that divide experts have moe."""


def same_bits(rank, world, name, layouts):
    """Updates of a rank's parts by parts of the same gradients, against those of whole parameters, some of which
    consist of several matrices. Returns (layout, largest difference of weights, of states, bytes of states, bytes by
    the card)."""
    card, found = OPTIMIZERS[name], []
    fields = card.fields | {"basis_every": 2} if name == "soap" else dict(card.fields)
    for text in layouts:
        layout = Layout(**parse(text))
        # PyTorch's fused kernels round the last elements, fewer than 8, their own way: parts are whole eights
        dim = 128 if card.build is not None else 32
        sizes = {"layers": 2, "dim": dim, "heads": 8, "kv_heads": 4, "ffn_dim": 64, "seq_len": 16}
        of = {"arch": "moe", **MIXED} if layout.ep > 1 else ARCHS.get(text, {"attention_bias": True})
        model = resolve_model(ModelSection(**sizes | of), vocab_size=50)
        spec, mesh = card_of(model), Mesh(layout, ranks_of(rank, world))
        generator = torch.Generator().manual_seed(0)
        whole = {key: torch.randn(shape, generator=generator) for key, shape in spec.parameters.items()}
        table, routes = held(spec, layout, rank), ways(card, spec, layout, rank)
        mine = {key: cut(whole[key], part) for key, part in table.items()}
        gathering = Gathered(routes, mesh) if routes else None
        one = Updater(card, whole, 0.1, 0.1, fields, sections=spec.sections)
        other = Updater(card, mine, 0.1, 0.1, fields, gathering=gathering, sections=spec.sections)
        for _ in range(4):
            grads = {key: torch.randn(shape, generator=generator) for key, shape in spec.parameters.items()}
            other.step({key: cut(grads[key], part) for key, part in table.items()}, 0.1)
            one.step(grads, 0.1)
        outlined = planned_ways(card, spec, layout, rank)
        assert {key: way.whole for key, way in outlined.items()} == gathered(routes)
        sizes = [(e.group, max(sum(e.given), sum(e.taken))) for e in exchanges(routes, layout, rank)]
        assert sizes_sent(outlined) == sizes
        weights = max(difference(mine[key], cut(whole[key], part)) for key, part in table.items())
        has, wanted = other.states(), one.states()
        parts = {f"{s.name}.{key}": part for s, key, part in places(card, table, gathered(routes))}
        assert has.keys() == parts.keys()
        states = max(
            (difference(has[key], cut(wanted[key], part)) for key, part in parts.items()), default=0.0
        )
        kept = sum(t.nbytes for t in has.values())
        found.append((text, weights, states, kept, state_bytes(card, spec, layout, rank)))
    return found


def cut(tensor, part):
    out = torch.empty(local_shape(part.keeps), dtype=tensor.dtype)
    for where, box in boxes(part.keeps):
        out[where] = tensor[tuple(slice(a, b) for a, b in box)]
    return out


def difference(a, b):
    return (a.double() - b.double()).abs().max().item() if a.numel() else 0.0


@only("adamw", "adamw8bit", "soap")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_same_gradients_give_the_same_bits(name):
    """In every layout: weights, and states as the card places them, which weigh what the planner says."""
    for rank, found in enumerate(run_ranks(4, same_bits, name, PLACED[4])):
        for layout, weights, states, kept, planned in found:
            assert weights == 0, f"rank {rank} of {layout}"
            assert states == 0, f"rank {rank} of {layout}"
            assert kept == planned, f"rank {rank} of {layout}"


def test_the_norm_of_a_large_gradient_loses_nothing() -> None:
    """Adding five million squares in fp32 loses 1e-4 of them."""
    large = torch.randn(5_000_003, generator=torch.Generator().manual_seed(0))
    wanted = large.double().square().sum()
    assert torch.allclose(
        sum_of_squares([large, large[:5]]), wanted + large[:5].double().square().sum(), rtol=1e-7
    )


@pytest.mark.parametrize("shape", [(6, 4), (2, 4, 6)])
def test_muon_iterates_by_three_matmuls(shape: tuple[int, ...]) -> None:
    """With nothing between them: matmuls add what an iteration adds (docs/gpu.md counts the bytes)."""

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found.extend([] if is_free(func) else [func.__name__.split(".")[0]])
            return func(*args, **kwargs or {})

    counted, found = list[list[str]](), list[str]()
    for steps in (1, 3):
        found.clear()
        with Counting():
            orthogonal(torch.ones(shape), steps, torch.bfloat16)
        counted.append([*found])
    once = ["bmm", "baddbmm", "baddbmm"] if len(shape) > 2 else ["mm", "addmm", "addmm"]
    assert sorted(counted[1]) == sorted(counted[0] + 2 * once)


def test_muon_keeps_small_gradients_in_fp16() -> None:
    """Gradients are unscaled when it gets them; in fp16 the smallest are nothing."""
    g = torch.randn(32, 48, generator=torch.Generator().manual_seed(0)) * 1e-8
    exact = orthogonal(g, 5, torch.float32)
    assert (orthogonal(g, 5, torch.float16) - exact).norm() < 0.05 * exact.norm()


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (["train.batch_ramp=16:10"], "16 sequences are more than train.global_batch_size = 8"),
        (["train.batch_ramp=4:10", "optim.name=sophia"], "is not supported with optim.name"),
    ],
)
def test_a_ramp_is_refused(sets: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        load("quickstart", ["train.global_batch_size=8", *sets], "dp=1")
