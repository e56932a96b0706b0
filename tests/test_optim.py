"""Learning-rate schedules, clipping, AdamW."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fivefold.optim import build_adamw, learning_rate, load_state, state_tensors

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


def test_adamw_decays_matrices_only_and_its_state_travels():
    master = {"matrix": torch.ones(2, 2), "norm": torch.ones(2)}
    grads = {name: torch.zeros_like(w) for name, w in master.items()}
    optimizer = build_adamw(master, lr=0.1, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.5)
    for name, weight in master.items():
        weight.grad = grads[name]
    optimizer.step()
    assert master["matrix"].eq(0.95).all()
    assert master["norm"].eq(1).all()
    grads["norm"].fill_(1.0)
    optimizer.step()
    saved = {k: v.clone() for k, v in state_tensors(optimizer, master).items()}
    assert set(saved) == {f"{m}.{n}" for m in ("exp_avg", "exp_avg_sq") for n in master}
    copies = {name: w.clone() for name, w in master.items()}
    other = build_adamw(copies, lr=0.1, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.5)
    for name, weight in copies.items():
        weight.grad = grads[name]
    load_state(other, copies, saved, steps=2)
    optimizer.step()
    other.step()
    assert all(torch.equal(copies[name], master[name]) for name in master)
