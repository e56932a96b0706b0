"""Simulated steps: bubbles are those of the closed formulas and of the papers' tables."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_texts import parse, read
from test_schedules_pipeline import CASES

from fivefold.schedules.pipeline import Costs, Event, Timeline, build, peak_live, simulate

RANKS = (1, 2, 3, 4, 8)
COSTS = [(1.0, 1.0, 1.0), (1.0, 1.1, 0.6), (2.0, 2.5, 1.5)]  # F, I, W of a whole rank


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_bubble_of_gpipe_and_1f1b(name: str, ranks: int) -> None:
    for microbatches in (1, 2, 4, 7, 16):
        bubble = simulate(build(name, ranks, microbatches)).bubble
        assert bubble == pytest.approx((ranks - 1) / (microbatches + ranks - 1))


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("name", ["interleaved", "looped_bfs"])
def test_bubble_with_several_stages_a_rank(name: str, ranks: int) -> None:
    for chunks in (2, 3, 4):
        for microbatches in (
            ranks,
            ranks + 1,
            2 * ranks - 1,
            3 * ranks + 2,
            16,
        ):  # multiples of the ranks or not
            bubble = simulate(build(name, ranks, microbatches, chunks)).bubble
            assert bubble == pytest.approx((ranks - 1) / (chunks * microbatches + ranks - 1))


def idle(name: str, ranks: int, microbatches: int, forward: float, inputs: float, weights: float) -> float:
    """Idle seconds of each rank; all ranks have the same."""
    timeline = simulate(build(name, ranks, microbatches), Costs(forward, inputs, weights))
    seconds = {round(timeline.makespan - timeline.busy(rank), 9) for rank in range(ranks)}
    assert len(seconds) == 1
    return seconds.pop()


@pytest.mark.parametrize("costs", COSTS)
@pytest.mark.parametrize("ranks", RANKS)
def test_idle_time_of_zero_bubble(ranks: int, costs: tuple[float, float, float]) -> None:
    """Table 2 of arXiv 2401.10241 and, for 1F1B, table 2 of arXiv 2412.19437: (p-1) (F + B)."""
    forward, inputs, weights = costs
    for microbatches in (ranks, ranks + 1, 2 * ranks, 4 * ranks):
        assert idle("1f1b", ranks, microbatches, *costs) == pytest.approx((ranks - 1) * sum(costs))
        expected = (ranks - 1) * (forward + inputs - weights)
        assert idle("zb_h1", ranks, microbatches, *costs) == pytest.approx(expected)


@pytest.mark.parametrize("ranks", RANKS)
def test_zb_h1_has_a_third_of_the_bubble_and_zbv_none(ranks: int) -> None:
    for microbatches in (2 * ranks - 1, 2 * ranks, 5 * ranks):
        assert 3 * idle("zb_h1", ranks, microbatches, 1, 1, 1) == idle("1f1b", ranks, microbatches, 1, 1, 1)
        timeline = simulate(build("zbv", ranks, microbatches), Costs(0.5, 0.5, 0.5))
        for row in timeline.rows:  # no gap between the first action and the last
            assert row[-1].end - row[0].start == pytest.approx(3 * microbatches)
        assert timeline.makespan == pytest.approx(3 * microbatches + (ranks - 1) / 2)


@pytest.mark.parametrize("ranks", RANKS)
def test_zb_h2_has_no_gap(ranks: int) -> None:
    """Figure 3 of arXiv 2401.10241: a parallelogram. Only the shifted start is left, as long as H1's idle time."""
    for microbatches in (2 * ranks - 1, 2 * ranks, 5 * ranks):
        timeline = simulate(build("zb_h2", ranks, microbatches))
        for rank, row in enumerate(timeline.rows):
            assert (row[0].start, row[-1].end) == (rank, rank + 3 * microbatches)
        assert timeline.makespan - 3 * microbatches == idle("zb_h1", ranks, microbatches, 1, 1, 1)


@pytest.mark.parametrize("costs", [(1.0, 1.0, 1.0, 0.0), (1.0, 1.1, 0.6, 0.1), (1.0, 1.2, 0.8, 0.3)])
@pytest.mark.parametrize("ranks", RANKS[1:])
def test_the_automatic_schedule_is_as_good_as_those_by_hand(ranks: int, costs: tuple[float, ...]) -> None:
    """With H1's memory and with H2's, at the costs that it was made for; no rank holds more than it may."""
    price = Costs(*costs[:3], transfer=costs[3])
    for microbatches in (2 * ranks, 4 * ranks + 1):
        for live, name in ((ranks, "zb_h1"), (2 * ranks - 1, "zb_h2")):
            text = ":".join(map(str, costs))
            automatic = build("zb_auto", ranks, microbatches, zb_costs=text, zb_live=live)
            assert max(peak_live(automatic)) <= live
            best = simulate(build(name, ranks, microbatches), price).makespan
            assert simulate(automatic, price).makespan <= best + 1e-9


@pytest.mark.parametrize("costs", [(1.0, 1.0, 1.0), (1.0, 1.0, 0.6), (2.0, 2.0, 1.5)])
@pytest.mark.parametrize("ranks", RANKS)
def test_idle_time_of_dualpipev(ranks: int, costs: tuple[float, float, float]) -> None:
    forward, inputs, weights = costs  # of one stage
    for microbatches in (2 * ranks, 2 * ranks + 1, 5 * ranks):
        expected = (ranks - 1) * (forward + inputs - weights)
        assert idle("dualpipev", ranks, microbatches, *costs) == pytest.approx(expected)
        paper = (ranks - 1) * (forward + (inputs + weights) + (inputs + weights) - 3 * weights)
        assert idle("dualpipev_paired", ranks, microbatches, *costs) == pytest.approx(paper)


@pytest.mark.parametrize("costs", [(1.0, 1.0, 1.0), (1.0, 1.0, 0.6), (2.0, 2.0, 1.5)])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_idle_time_of_dualpipe(ranks: int, costs: tuple[float, float, float]) -> None:
    """Table 2 of arXiv 2412.19437, with F&B = F + B: (p/2-1) (F&B + B - 3W)."""
    forward, inputs, weights = costs  # of one stage
    for microbatches in (2 * ranks, 2 * ranks + 2, 5 * ranks):
        expected = (ranks / 2 - 1) * (forward + inputs - weights)
        assert idle("dualpipe", ranks, microbatches, *costs) == pytest.approx(expected)
        paper = (ranks / 2 - 1) * (forward + 2 * (inputs + weights) - 3 * weights)
        assert idle("dualpipe_paired", ranks, microbatches, *costs) == pytest.approx(paper)


@pytest.mark.parametrize("ranks", RANKS)
def test_pairs_hide_messages(ranks: int) -> None:
    """Of a forward behind the other's backward, and the other way round, as far as that computes."""
    schedule, stages = build("dualpipev_paired", ranks, 5 * ranks), 2 * ranks
    plain, hidden, most = (
        simulate(schedule, Costs(1, 1, 1, messages=[messages] * stages))
        for messages in ((0.0, 0.0), (0.3, 0.5), (1.0, 2.0))
    )
    pairs = len(schedule.pairs)
    assert pairs > 5 * ranks
    assert sum(map(plain.busy, range(ranks))) - sum(map(hidden.busy, range(ranks))) == pytest.approx(
        0.8 * pairs
    )
    assert sum(map(most.busy, range(ranks))) == sum(map(plain.busy, range(ranks))), (
        "nothing computes meanwhile"
    )
    alone = build("dualpipev", ranks, 5 * ranks)
    assert not alone.pairs
    assert simulate(alone, Costs(1, 1, 1, messages=[(0.3, 0.5)] * stages)) == simulate(alone, Costs(1, 1, 1))


@pytest.mark.parametrize("ranks", RANKS)
def test_v_half_idles_little_more_than_half_as_much_as_1f1b(ranks: int) -> None:
    for microbatches in (ranks, ranks + 1, 5 * ranks):
        expected = (7 * ranks - 8) // 2 if ranks > 1 else 0  # slots of one stage
        assert idle("v_half", ranks, microbatches, 1, 1, 1) == expected
        assert expected <= 7 / 12 * idle("1f1b", ranks, microbatches, 2, 2, 2)


# arXiv 2401.10241, tables 3 to 6, 8 ranks: stages a rank of 1F1B-I (one for each layer of a rank), microbatches;
# milliseconds of F, B (our I), W and transfer; bubble rates of 1F1B, 1F1B-I and ZB-H1.
ZERO_BUBBLE = [
    (3, 24, 18.522, 18.086, 9.337, 0.601, 0.2431, 0.1055, 0.1585),
    (3, 32, 18.513, 18.086, 9.331, 0.626, 0.1985, 0.0818, 0.1242),
    (3, 64, 18.546, 18.097, 9.321, 0.762, 0.1240, 0.0443, 0.0674),
    (4, 24, 29.718, 29.444, 19.927, 0.527, 0.2347, 0.0808, 0.1323),
    (4, 32, 29.802, 29.428, 19.530, 0.577, 0.1898, 0.0628, 0.1045),
    (4, 64, 29.935, 29.621, 19.388, 0.535, 0.1091, 0.0320, 0.0554),
]


@pytest.mark.parametrize("row", ZERO_BUBBLE)
def test_bubble_rates_of_the_zero_bubble_paper(row: tuple) -> None:
    """1F1B and ZB-H1 to the last digit printed. The paper does not say how 1F1B-I's chunks were timed: 0.004."""
    chunks, microbatches, *costs, transfer, plain, interleaved, zb_h1 = row

    def bubble(name: str, stages: int) -> float:
        forward, inputs, weights = (cost / stages for cost in costs)
        schedule = build(name, 8, microbatches, stages)
        return simulate(schedule, Costs(forward, inputs, weights, transfer=transfer)).bubble

    assert bubble("1f1b", 1) == pytest.approx(plain, abs=1e-4)
    assert bubble("zb_h1", 1) == pytest.approx(zb_h1, abs=1e-4)
    assert bubble("interleaved", chunks) == pytest.approx(interleaved, abs=0.004)


def test_the_zero_bubble_v_idles_less_than_half_as_much_as_1f1b() -> None:
    """The setting of the measured figure: 4 ranks, 8 microbatches."""
    whole, half = Costs(2, 2, 2), Costs(1, 1, 1)
    assert simulate(build("zbv", 4, 8), half).bubble < 0.5 * simulate(build("1f1b", 4, 8), whole).bubble


def test_times_follow_from_costs_by_stage() -> None:
    costs = Costs(
        forward=[1.0, 2.0], input=[0.5, 1.0], weight=[0.25, 4.0], backward=[3.0, 5.0], transfer=0.125
    )
    timeline = simulate(read("0F0,0B0\n1F0,1I0,1W0\n"), costs)
    assert timeline.rows[0] == (Event(parse("0F0"), 0, 1), Event(parse("0B0"), 4.25, 7.25))
    assert [(event.start, event.end) for event in timeline.rows[1]] == [
        (1.125, 3.125),
        (3.125, 4.125),
        (4.125, 8.125),
    ]
    assert timeline.makespan == 8.125
    assert timeline.idle_share(0) == pytest.approx(1 - 4 / 8.125)
    assert timeline.bubble == pytest.approx((timeline.idle_share(0) + timeline.idle_share(1)) / 2)


def test_transfers_by_pair_of_ranks() -> None:
    timeline = simulate(build("1f1b", 2, 1), Costs(transfer={(0, 1): 10.0, (1, 0): 100.0}))
    assert [(event.start, event.end) for row in timeline.rows for event in row] == [
        (0, 1),
        (114, 116),
        (11, 12),
        (12, 14),
    ]


def test_a_result_needs_no_transfer_within_a_rank() -> None:
    assert simulate(build("zbv", 1, 1), Costs(transfer=100.0)).makespan == 6


@given(
    st.sampled_from(CASES),
    st.integers(1, 6),
    st.integers(1, 12),
    st.lists(st.floats(0, 10), min_size=4, max_size=4),
)
@settings(max_examples=60, deadline=None)
def test_each_rank_does_its_actions_in_order(
    case: tuple[str, int], ranks: int, microbatches: int, costs: list[float]
) -> None:
    schedule = build(case[0], ranks, microbatches, case[1])
    timeline = simulate(schedule, Costs(*costs[:3], transfer=costs[3]))
    for row, events in zip(schedule.rows, timeline.rows, strict=True):
        assert tuple(event.action for event in events) == row
        assert all(one.end <= two.start for one, two in pairwise(events))
    assert timeline.makespan >= max(map(timeline.busy, range(ranks)))


def test_a_timeline_of_nothing() -> None:
    empty = Timeline(((), ()))
    assert (empty.makespan, empty.bubble) == (0, 0)
