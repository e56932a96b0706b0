"""Memory from going through a step with sizes only: beside what is tracked in a real step, and by itself."""

import gc
from statistics import fmean

import pytest
from ranks import run_ranks
from steps import CASES, job, planned, recipe_of, tracked

from fivefold.plan import memory
from fivefold.plan.predict import price
from fivefold.plan.rehearsal import rehearse
from fivefold.plan.tape import Memory, Meter, Tape, Value

FAST = [
    ("llama", "bf16", "dp=1"), ("llama", "fp32", "dp=2,zero=3"), ("llama", "bf16", "tp=2,sp=true,recompute=selective"),
    ("llama", "bf16", "cp=2"), ("llama", "bf16", "pp=2"), ("gpt2", "bf16", "dp=1"),
]  # fmt: skip


MIXTURES = [
    ("moe", "bf16", "dp=2,zero=1", "model.shared_experts=1"),  # a block's experts are shared with the rest of it
    ("moe", "fp32", "dp=4,ep=2,zero=2", "model.experts=2"),  # one on two ranks: by its rows
    ("moe", "bf16", "dp=4,zero=3", "model.experts=2"),
    ("moe", "bf16", "dp=4,zero=1", "model.experts=6"),
    ("moe", "fp32", "dp=8,ep=4,zero=2"),
]  # fmt: skip


def errors(case: tuple[str, ...]) -> list[float]:
    """Of every rank, by the tracked bytes."""
    recipe = recipe_of(*case)
    s = planned(recipe)
    world = s.layout.ranks
    found = [tracked(0, 1, recipe)] if world == 1 else run_ranks(world, tracked, recipe, timeout_s=120)
    return [rehearse(job(s), rank).peak / step.peak - 1 for rank, step in enumerate(found)]


@pytest.mark.parametrize("case", FAST, ids=" ".join)
def test_peak_is_the_tracked_one(case: tuple[str, str, str]) -> None:
    assert max(map(abs, errors(case))) <= 0.03


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=[pytest.mark.slow] * (i > 1)) for i, c in enumerate(MIXTURES)]
)
def test_experts_are_shared_as_by_the_trainer(case: tuple[str, ...]) -> None:
    """Few of them between many ranks by the rows of each, which costs copies but no padding."""
    assert max(map(abs, errors(case))) <= 0.01


@pytest.mark.slow
def test_all_cases() -> None:
    found = {" ".join(case): errors(case) for case in CASES}
    every = [error for row in found.values() for error in row]
    assert len(found) >= 20
    assert fmean(map(abs, every)) <= 0.01, found
    assert max(map(abs, every)) <= 0.03, found


@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_what_a_step_makes_is_freed(case: tuple[str, str, str]) -> None:
    """But for the states: by reference counts alone, as tensors are."""
    s = job(planned(recipe_of(*case)))
    gc.disable()
    try:
        meter = rehearse(s)
    finally:
        gc.enable()
    assert meter.total == 0, "with the rank its states go, too"
    assert meter.peak == sum(meter.at_peak.values())


def test_a_checkpoint_keeps_its_input_only() -> None:
    meter = Meter()
    tape = Tape(meter, lambda name, gradient: None)
    x = Value(tape.new(10))

    def square(x: Value) -> Value:
        inner, out = Value(tape.new(100)), Value(tape.new(10))
        tape.node([x], [inner], [x.there], lambda saved, outs: ([tape.new(10)], []))
        tape.node([inner], [out], [inner.there], lambda saved, outs: ([tape.new(100)], []))
        return out

    y = tape.checkpoint(square, x)
    assert meter.total == 20
    assert meter.peak == 120
    gradient = tape.backward(y, tape.new(10))
    assert meter.peak == 20 + 10 + 100 + 100, "backward makes the inner value again, and then its gradient"
    assert gradient[x.key].size == 10
    del gradient
    assert meter.total == 20


def test_two_uses_are_added_in_place() -> None:
    meter = Meter()
    tape = Tape(meter, lambda name, gradient: None)
    x, y = Value(tape.new(8)), Value(tape.new(8))
    for _ in range(2):
        tape.node([x], [y], [], lambda saved, outs: ([tape.new(8)], []))
    assert list(tape.backward(y, Memory(meter, 8, "buffers"))) == [x.key]
    assert meter.peak == 16 + 8 + 8


def test_a_plan_on_cpus_is_a_rehearsal() -> None:
    s = planned(recipe_of("llama", "bf16", "pp=2,dp=2,zero=1"))
    found = memory.predict(s.model, s.layout, s.sizes, s.software, s.dtype, s.microbatches)
    peaks = [rehearse(job(s), s.layout.rank({"pp": position})) for position in range(2)]
    assert [round(m.total) for m in found] == [meter.peak for meter in peaks]
    assert price(s).peak_bytes == max(meter.peak for meter in peaks)
