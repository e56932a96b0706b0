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


def test_direct_reads_in_place_what_would_be_late():
    """With a link that takes three times as long as forward each unit waits for the link alone, not for both in turn;
    with a fast one nothing but the first unit is late, and it is the window."""
    slow = [Unit(1, 2, 0.1, 0.1, 3.0)] * 6
    found = {name: simulate(slow, replace(WAYS[name], width=1)) for name in ("window", "direct")}
    assert found["direct"].seconds < found["window"].seconds
    assert found["direct"].seconds == pytest.approx(6 * 3 + 2 + 5 * 3 + 0.1 + 0.1)
    for timeline in found.values():
        assert sum(span.seconds for span in timeline.of("in")) == pytest.approx((6 + 5) * 3.0), (
            "once for each use"
        )
    fast = [Unit(1, 2, 0.1, 0.1, 0.01)] * 6
    late = [s.name for s in simulate(fast, WAYS["direct"]).of("in") if "in place" in s.name]
    assert late == ["weights 0, read in place"]


@pytest.mark.parametrize("name", WAYS)
def test_a_step_computes_everything_once(name):
    timeline = simulate(UNITS, WAYS[name])
    computed = [span for span in timeline.of(COMPUTE) if span.kind != WAIT]
    assert sum(span.seconds for span in computed) == pytest.approx(18)
    assert timeline.busy == pytest.approx(18 / timeline.seconds)
    ends = [span.end for span in timeline.of(COMPUTE)]
    assert ends == sorted(ends)
