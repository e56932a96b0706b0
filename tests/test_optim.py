"""Learning-rate schedules, clipping, optimizers."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from layouts import compared, tiny

from fivefold.optim import OPTIMIZERS, learning_rate
from fivefold.optim.clip import clip_scale, sum_of_squares
from fivefold.optim.updater import Updater

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


def updater(name, masters, **changes):
    card = OPTIMIZERS[name]
    return Updater(card, masters, lr=0.1, weight_decay=0.5, fields={**card.fields, **changes})


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
        ("momentum", {"momentum": 0.5, "dampening": 0.5}, [1.0, 1.0, 1.0]),
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


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_states_travel_and_weigh_what_the_card_says(name):
    generator = torch.Generator().manual_seed(0)
    masters = {
        "matrix": torch.randn(3, 2, generator=generator),
        "norm": torch.ones(2),
        "none": torch.ones(0, 2),
    }
    grads = {key: torch.randn(w.shape, generator=generator) for key, w in masters.items()}
    first = updater(name, masters)
    assert first.states() == {}
    for _ in range(2):
        first.step(grads, lr=0.1)
    card, saved = OPTIMIZERS[name], {k: v.clone() for k, v in first.states().items()}
    assert set(saved) == {f"{s.name}.{key}" for s in card.states for key in masters}
    elements = sum(w.numel() for w in masters.values())
    assert sum(t.nbytes for t in saved.values()) == card.bytes * elements
    assert sum(t.nbytes for t in first.kept()) == card.bytes * elements + 4 * card.counts * len(masters)
    copies = {key: w.clone() for key, w in masters.items()}
    second = updater(name, copies)
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
    masters = {"matrix": torch.randn(3, 2, generator=generator), "norm": torch.ones(2)}
    copies = {key: w.clone() for key, w in masters.items()}
    changes = {"dampening": 0.25} if name == "momentum" else {}
    one, other = updater(name, masters, **changes), updater(name, copies, **changes)
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


LAYOUTS = ["dp=2", "dp=2,zero=1", "dp=2,zero=2", "dp=2,zero=3", "tp=2", "pp=2", "dp=2,ep=2,zero=3"]
QUICK = {
    ("nesterov", "dp=2,zero=1"), ("momentum", "dp=2,zero=2"), ("nesterov", "dp=2,zero=3"), ("momentum", "tp=2"),
    ("nesterov", "pp=2"), ("sgd", "dp=2,ep=2,zero=3"), ("sgd", "dp=2"),
}  # fmt: skip
CASES = [
    pytest.param(name, layout, marks=[] if (name, layout) in QUICK else pytest.mark.slow)
    for name in OPTIMIZERS
    for layout in LAYOUTS
]


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_equals_one_process(tmp_path, name, layout):
    """Losses, every gradient, its norm, and weights after three steps."""
    sets = ["optim.dampening=0.25"] if name == "momentum" else []
    report = compared(tiny(tmp_path, layout, f"optim.name={name}", *sets, "optim.lr=0.05"))
    assert report.passed, report.figures


def test_the_norm_of_a_large_gradient_loses_nothing() -> None:
    """Adding five million squares in fp32 loses 1e-4 of them."""
    large = torch.randn(5_000_003, generator=torch.Generator().manual_seed(0))
    wanted = large.double().square().sum()
    assert torch.allclose(
        sum_of_squares([large, large[:5]]), wanted + large[:5].double().square().sum(), rtol=1e-7
    )
