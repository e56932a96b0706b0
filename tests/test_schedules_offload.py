"""Ways to order updates on the host: what each waits for, and that a step takes what its resources need."""

from dataclasses import replace

import pytest

from fivefold.schedules.offload import WAYS, Unit, simulate
from fivefold.schedules.timelines import COMPUTE, WAIT

UNITS = [Unit(forward=1, backward=2, out=1, update=1, back=0.5)] * 6


def seconds(name: str, units=UNITS) -> float:
    return simulate(units, WAYS[name]).seconds


def test_after_waits_for_the_update_and_for_the_weights():
    """Forward 6, backward 12, the last gradients 1, six updates, the last weights 0.5."""
    assert seconds("after") == pytest.approx(6 + 12 + 1 + 6 + 0.5)


def test_beside_waits_for_the_first_unit_only():
    """Its update and weights take 1.5; the others' keep pace with forward."""
    assert seconds("beside") == pytest.approx(6 + 12 + 1 + 1.5)


def test_early_waits_for_the_last_gradients_only():
    """Units are ready in backward's order, so the first one is the last: 1 out, 1 update, 0.5 in."""
    assert seconds("early") == pytest.approx(6 + 12 + 1 + 1 + 0.5)
    slow = [Unit(1, 2, 1, 3, 0.5)] * 6
    assert seconds("early", slow) == pytest.approx(6 + 2 + 1 + 6 * 3 + 0.5), "updates begin beside backward"
    assert seconds("early", slow) < seconds("beside", slow) < seconds("after", slow)


def test_a_window_fetches_twice_and_no_sooner_than_there_is_room():
    timeline = simulate(UNITS, WAYS["window"])
    fetched = timeline.of("in")
    assert len(fetched) == 6 + 3
    wide = simulate(UNITS, replace(WAYS["window"], width=6))
    assert len(wide.of("in")) == 6
    narrow = simulate([Unit(1, 2, 1, 0.1, 3.0)] * 6, replace(WAYS["window"], width=1))
    assert narrow.waited > 0


@pytest.mark.parametrize("name", WAYS)
def test_a_step_computes_everything_once(name):
    timeline = simulate(UNITS, WAYS[name])
    computed = [span for span in timeline.of(COMPUTE) if span.kind != WAIT]
    assert sum(span.seconds for span in computed) == pytest.approx(18)
    assert timeline.busy == pytest.approx(18 / timeline.seconds)
    ends = [span.end for span in timeline.of(COMPUTE)]
    assert ends == sorted(ends)
