"""Pipeline schedules: every one can run, at any number of ranks and microbatches, and holds what it says."""

from collections.abc import Callable
from dataclasses import replace
from itertools import groupby, product
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from marks import all_but
from message_order import QUEUES, check_transfers, queue_halts
from schedule_texts import parse, read, written

from fivefold.errors import UserError
from fivefold.schedules.pipeline import (
    SCHEDULES,
    Action,
    Schedule,
    build,
    check,
    ends_upwards,
    executed,
    few,
    holds_all,
    live_phases,
    most_live,
    peak_live,
    place,
    with_transfers,
)
from fivefold.schedules.pipeline.schedule import owed_together

RANKS = (1, 2, 3, 4, 8)
MICROBATCHES = (1, 2, 3, 4, 6, 7, 8, 13, 16)
CASES = [
    (name, stages)
    for name, made in SCHEDULES.items()
    if made.copies == 1  # the others: `test_two_copies_of_the_model`
    for stages in range(made.stages[0], (made.stages[1] or 3) + 1)  # per rank
]


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize(("name", "chunks"), CASES)
def test_every_schedule_can_run(name: str, chunks: int, ranks: int) -> None:
    for microbatches in MICROBATCHES:
        schedule = build(name, ranks, microbatches, chunks)
        assert (schedule.name, schedule.ranks, schedule.microbatches) == (name, ranks, microbatches)
        assert schedule.stages == ranks * chunks
        check(schedule)
        check_transfers(schedule, with_transfers(schedule))


@given(st.sampled_from(CASES), st.integers(1, 12), st.integers(1, 40), st.integers(0, 3))
@settings(max_examples=60, deadline=None)
def test_any_size_can_run(case: tuple[str, int], ranks: int, microbatches: int, more: int) -> None:
    name, chunks = case
    any_number = SCHEDULES[name].stages[1] is None
    schedule = build(name, ranks, microbatches, chunks + more * any_number)
    check(schedule)
    check_transfers(schedule, with_transfers(schedule))


@pytest.mark.parametrize("ranks", RANKS[1:])
def test_live_activations(ranks: int) -> None:
    """The most microbatches times stages on each rank, as the papers say."""
    enough, every = 4 * ranks, range(ranks)
    live = {name: check(build(name, ranks, enough, chunks)) for name, chunks in CASES if chunks < 3}
    assert live["gpipe"] == [enough] * ranks
    assert live["1f1b"] == [ranks - rank for rank in every]
    assert live["interleaved"] == [ranks + 1 + 2 * (ranks - rank - 1) for rank in every]
    assert live["looped_bfs"] == [2 * enough] * ranks
    assert live["zb_h1"] == [ranks] * ranks
    assert live["zb_h2"] == live["zb_auto"] == [2 * ranks - 1] * ranks
    assert live["zbv"] == [2 * ranks] * ranks  # of stages half as large: as rank 0 in 1F1B
    assert live["dualpipev"] == [2 * ranks + 1] * ranks
    assert (
        live["v_half"] == [2 * ((ranks + 2) // 2)] * ranks
    )  # stages of half the size: half of 1F1B's rank 0


@given(st.sampled_from(CASES), st.integers(2, 9), st.integers(1, 40), st.data())
@settings(max_examples=80, deadline=None)
def test_what_the_search_reads_from_few_microbatches(
    case: tuple[str, int], ranks: int, microbatches: int, data: st.DataObject
) -> None:
    """No rank needs less than `most_live` says, whatever a stage keeps; the other facts are those of all rows."""
    name, chunks = case
    assume(not SCHEDULES[name].varies)
    schedule = build(name, ranks, microbatches, chunks)
    kept, owed = (data.draw(st.lists(st.floats(0, 9), min_size=n, max_size=n)) for n in [schedule.stages] * 2)
    live = [most_live(name, rank, ranks, microbatches, chunks) for rank in range(ranks)]
    for rank, peak in enumerate(peak_live(schedule, kept, owed)):
        sizes = [
            size[stage]
            for size in (kept, owed)
            for stage, owner in enumerate(schedule.rank_of)
            if owner == rank
        ]
        assert sum(n * size for n, size in zip(sum(live[rank], ()), sizes, strict=True)) <= peak + 1e-9
    if microbatches % ranks == 0 and not name.startswith(
        "dualpipev"
    ):  # which holds one stage more from 2p + 1 microbatches on
        assert [sum(map(sum, counts)) for counts in live] == peak_live(schedule)
    if microbatches > 2 * ranks:
        assert holds_all(name, ranks, chunks) == (max(peak_live(schedule)) == microbatches * chunks)
    last = [row[-1] for row in schedule.rows]
    upwards = not schedule.splits_backward and all(a.kind == "B" and a.stage < ranks for a in last)
    assert ends_upwards(name, ranks, microbatches, chunks) == upwards


@all_but("*-8")
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize(("name", "chunks"), CASES)
def test_messages_in_order_never_deadlock(name: str, chunks: int, ranks: int) -> None:
    """The lists that run on GPUs, whatever messages share a communicator. Those that run on CPUs, whose receives begin
    early, would halt there, unless no receive shares a communicator with a send."""
    for microbatches in MICROBATCHES:
        schedule = build(name, ranks, microbatches, chunks)
        for which, queue in QUEUES.items():
            assert queue_halts(schedule, executed(schedule, in_order=True), queue) == []
            early = queue_halts(schedule, executed(schedule, in_order=False), queue)
            assert bool(early) == (ranks > 1 and which != "direction")


@given(st.sampled_from(CASES), st.integers(1, 12), st.integers(1, 40), st.integers(0, 3), st.data())
@settings(max_examples=60, deadline=None)
@pytest.mark.slow
def test_messages_in_order_never_deadlock_at_any_size(
    case: tuple[str, int], ranks: int, microbatches: int, more: int, data: st.DataObject
) -> None:
    """Forwards alone, too (validation); and with any messages of a rank in any of several communicators."""
    name, chunks = case
    schedule = build(name, ranks, microbatches, chunks + more * (SCHEDULES[name].stages[1] is None))
    number = data.draw(st.lists(st.integers(0, 3), min_size=2 * ranks, max_size=2 * ranks))
    rows = tuple(tuple(action for action in row if action.kind == "F") for row in schedule.rows)
    forwards = Schedule(schedule.name, schedule.microbatches, schedule.rank_of, rows)
    for passes in (schedule, forwards):
        lists = executed(passes, in_order=True)
        assert queue_halts(passes, lists, lambda other, sends: number[2 * other + sends]) == []


@given(st.sampled_from(["dualpipe", "dualpipe_paired"]), st.integers(1, 5), st.integers(1, 40))
@settings(max_examples=40, deadline=None)
def test_two_copies_of_the_model(name: str, half: int, microbatches: int) -> None:
    """Each microbatch passes all stages of one copy, on the ranks in one direction or in the other."""
    schedule = build(name, 2 * half, microbatches)
    check(schedule)
    check_transfers(schedule, with_transfers(schedule))
    for queue in QUEUES.values():
        assert queue_halts(schedule, executed(schedule, in_order=True), queue) == []
    assert schedule.rank_of == (*range(2 * half), *reversed(range(2 * half)))
    passed = {
        action.microbatch: [] for row in schedule.rows for action in row
    }  # stages, in order of the microbatch
    for action in sorted(action for row in schedule.rows for action in row if action.kind == "F"):
        passed[action.microbatch].append(action.stage)
    first = -(-microbatches // 2)
    for microbatch, stages in passed.items():
        assert stages == list(range(2 * half) if microbatch < first else range(2 * half, 4 * half))
    assert max(peak_live(schedule)) <= 2 * half + 1
    if microbatches >= 4 * half:
        assert peak_live(schedule) == [2 * half + 1] * (2 * half)


def test_two_copies_need_pairs_of_ranks() -> None:
    with pytest.raises(
        UserError, match=r"layout.pp=3 must be divisible by 2, .* 'dualpipe'. Nearest valid: pp=4"
    ):
        build("dualpipe", 3, 6)
    moved = build("dualpipe", 2, 4)
    rows = [tuple(a._replace(microbatch=3 - a.microbatch) for a in row) for row in moved.rows]
    with pytest.raises(UserError, match="this microbatch passes another copy of the model"):
        check(replace(moved, rows=tuple(rows)))


def test_live_bytes_by_stage() -> None:
    schedule = read("0F0,0F1,1F0,1I0,1W0,0B0,1F1,1B1,0B1\n")
    assert peak_live(schedule) == [3]
    assert peak_live(schedule, [10, 7]) == [27]
    assert peak_live(read("0F0,0I0,0F1,0I1,0W0,0W1\n"), [10], after_input=[4]) == [14]


def test_phases_of_gradients() -> None:
    """A stage's gradients add up from its first backward until its last; the most is held before, in and behind."""
    schedule = read("0F0,0F1,1F0,1F1,1B0,1B1,0B0,0B1\n")
    none, first, second = frozenset[int](), frozenset({0}), frozenset({1})
    assert live_phases(schedule, [10, 7]) == [[(none, 34), (second, 27), (none, 20), (first, 10), (none, 0)]]
    assert live_phases(schedule, [10, 7], together=(0, 1))[0][1:] == [
        (second, 27),
        (first | second, 10),
        (none, 0),
    ]
    assert live_phases(schedule, [10, 7], sooner=True)[0][1][1] == 34
    split = live_phases(read("0F0,0F1,0I0,0I1,0W0,0W1\n"), [10], [4])[0]
    assert split == [(none, 20), (first, 14), (none, 0)]


def test_stages_that_owe_weight_gradients_at_once() -> None:
    """A stage counts once, for however many microbatches; a whole backward owes nothing."""
    sizes = [10.0, 7.0, 5.0]
    for text, most in (("0F0,0F1,0I0,0I1,0W0,1F0,1I0,1W0,0W1,2F0,2B0\n", 17), ("0I0,0W0,1I0,1W0,2B0\n", 10)):
        [row] = read(text).rows
        assert owed_together(row, sizes) == most


def test_placements() -> None:
    assert place("loop", 3, 2) == (0, 1, 2, 0, 1, 2)
    assert place("v", 3, 2) == (0, 1, 2, 2, 1, 0)


def test_known_orders() -> None:
    """Small enough to be written down by hand; of ZB-H1 the last rank, which puts W off the longest."""
    assert written(build("1f1b", 2, 3).rows) == "0F0,0F1,0B0,0F2,0B1,0B2\n1F0,1B0,1F1,1B1,1F2,1B2\n"
    assert written(build("gpipe", 2, 2).rows) == "0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1\n"
    assert written(build("zb_h1", 3, 4).rows[2:]) == "2F0,2I0,2F1,2I1,2F2,2I2,2W0,2F3,2I3,2W1,2W2,2W3\n"


def test_a_round_is_never_shorter_than_the_ranks() -> None:
    """Llama 3: 7 microbatches on 4 ranks are one round of 7; 11 are rounds of 6 and 5."""
    first = [action.stage for action in build("interleaved", 4, 7, 2).rows[0] if action.kind == "F"]
    assert first == [0] * 7 + [4] * 7
    second = [action.stage for action in build("interleaved", 4, 11, 2).rows[0] if action.kind == "F"]
    assert second == [0] * 6 + [4] * 6 + [0] * 5 + [4] * 5


@given(st.integers(1, 9), st.integers(1, 40), st.integers(2, 4), st.integers(1, 41))
@settings(max_examples=60, deadline=None)
def test_rounds_of_any_length(ranks: int, microbatches: int, chunks: int, each: int) -> None:
    """They run, with messages in order; fewer microbatches are held as all are; no round is shorter than asked for."""
    schedule = build("interleaved", ranks, microbatches, chunks, round_microbatches=each)
    check(schedule)
    assert queue_halts(schedule, executed(schedule, in_order=True), QUEUES["pair"]) == []
    some = few(microbatches, ranks, each)
    assert peak_live(build("interleaved", ranks, some, chunks, round_microbatches=each)) == peak_live(
        schedule
    )
    stages = [action.stage for action in schedule.rows[0] if action.kind == "F"]
    rounds = [len(list(run)) for _, run in groupby(stages)]
    assert min(rounds) >= min(each, microbatches)
    assert sum(rounds) == microbatches * chunks


def test_rounds_between_depth_first_and_breadth_first() -> None:
    """By hand, of 2 ranks with rounds of 1; by what ranks hold: more in longer rounds, up to all of them."""
    rows = written(build("interleaved", 2, 2, 2, round_microbatches=1).rows)
    assert rows == "0F0,2F0,0F1,2B0,2F1,0B0,2B1,0B1\n1F0,3F0,3B0,1F1,1B0,3F1,3B1,1B1\n"
    assert build("interleaved", 4, 16, 2, round_microbatches=4) == build("interleaved", 4, 16, 2)
    most = [
        max(peak_live(build("interleaved", 4, 16, 2, round_microbatches=each)))
        for each in (1, 2, 3, 4, 8, 16)
    ]
    assert most == [4, 6, 8, 11, 15, 23]
    depth, breadth = build("interleaved", 4, 16, 2, round_microbatches=16), build("looped_bfs", 4, 16, 2)
    for row, other in zip(depth.rows, breadth.rows, strict=True):
        assert [a for a in row if a.kind == "F"] == [a for a in other if a.kind == "F"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("zvb", 4, 8), "did you mean 'zbv'"),
        (("gpipe", 4, 8, 2), "virtual_stages=1, or schedule=looped_bfs"),
        (("interleaved", 4, 8, 1), "virtual_stages=2, or schedule=1f1b"),
        (("zbv", 4, 8, 3), r"needs exactly 2 .*Nearest valid: virtual_stages=2"),
        (("1f1b", 4, 0), "layout.microbatches: 0"),
        (("1f1b", 0, 4), "layout.pp: 0"),
    ],
)
def test_what_build_refuses(arguments: tuple, message: str) -> None:
    with pytest.raises(UserError, match=message):
        build(*arguments)


def test_what_build_refuses_of_fields_that_some_schedules_take() -> None:
    with pytest.raises(
        UserError, match=r"round_microbatches=2: schedule '1f1b' does not .*schedule=interleaved"
    ):
        build("1f1b", 4, 8, round_microbatches=2)
    with pytest.raises(UserError, match=r"zb_live=4: schedule 'zb_h2' does not take it.*schedule=zb_auto"):
        build("zb_h2", 4, 8, zb_live=4)
    for costs in ("1:1:1", "1:0:1:0", "1:1:1:-1", "nan:1:1:0", "1:1:inf:0", "a:b:c:d"):
        with pytest.raises(
            UserError, match=rf"zb_costs: '{costs}' must be the times .* Nearest valid: 1:1:1:0"
        ):
            build("zb_auto", 4, 8, zb_costs=costs)


def test_a_v_has_two_stages_a_rank_whether_said_or_not() -> None:
    assert build("zbv", 3, 4) == build("zbv", 3, 4, 1) == build("zbv", 3, 4, 2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0F0,0B0\n", "0F0 is there twice"),
        ("0F0\n", "0B0 is missing"),
        ("0B0\n", "0F0 is missing"),
        ("0F0,0I0\n", "0W0 is missing: 0I0"),
        ("0F0,0W0\n", "0I0 is missing: 0W0"),
        ("0F0,0W0,0I0\n", "0W0 comes before 0I0"),
        ("0F0,0B0,0W0\n", "0W0 is there beside 0B0"),
        ("0F1,0F0,0B0,0B1\n", "0F1 comes before 0F0"),
        ("0B0,0F0\n", "rank 0 at 0B0 for the output of stage 0 for microbatch 0"),
        (
            "0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n",
            "rank 0 at 0B0 for .*; rank 1 at 1F1 for the output of stage 0",
        ),
    ],
)
def test_what_check_refuses(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        check(read(text))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": ((Action(0, "SEND_F", 0),),)}, "0SEND_F0 on rank 0 is a transfer"),
        ({"microbatches": 1}, "the last of 1 microbatches is 0"),
        ({"rank_of": (0,)}, "the last of 1 stages is 0"),
        ({"rank_of": (1, 0)}, "0F0 is on rank 0, but stage 0 is on rank 1"),
    ],
)
def test_what_check_refuses_of_a_schedule_made_by_hand(change: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        check(replace(build("1f1b", 2, 2), **change))


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_check_finds_any_action_that_is_lost(data: st.DataObject) -> None:
    name, chunks = data.draw(st.sampled_from(CASES))
    schedule = build(name, 3, 4, chunks)
    rank = data.draw(st.integers(0, 2))
    lost = data.draw(st.sampled_from(schedule.rows[rank]))
    rows = [tuple(action for action in row if action != lost) for row in schedule.rows]
    with pytest.raises(UserError, match=r"is missing|comes before"):
        check(replace(schedule, rows=tuple(rows)))


def swapped(schedule: Schedule, rank: int, first: str, second: str) -> list[list[Action]]:
    """The lists with transfers, two actions of one rank exchanged."""
    lists = with_transfers(schedule)
    i, j = (lists[rank].index(parse(text)) for text in (first, second))
    lists[rank][i], lists[rank][j] = lists[rank][j], lists[rank][i]
    return lists


@pytest.mark.parametrize(
    ("rank", "first", "second", "halted"),
    [
        (1, "1RECV_F0", "1RECV_F1", None),  # another order than the sender
        (1, "1RECV_F1", "1SEND_B0", "call 1SEND_B0"),  # it needs what comes later
        (0, "0SEND_F1", "0RECV_B0", "end 0RECV_B0"),  # both receive first
        (0, "0F0", "0SEND_F0", "call 0SEND_F0"),  # sends what is not there
    ],
)
def test_lists_in_another_order_halt(rank: int, first: str, second: str, halted: str | None) -> None:
    schedule = build("1f1b", 2, 3)
    lists = swapped(schedule, rank, first, second)
    with pytest.raises(AssertionError):
        check_transfers(schedule, lists)
    for which in ("group", "pair"):
        if halted is None:
            with pytest.raises(AssertionError):
                queue_halts(schedule, lists, QUEUES[which])
        else:
            steps = queue_halts(schedule, lists, QUEUES[which])
            assert halted in [f"{what} {action}" for what, action in steps]


def test_transfers_of_a_small_schedule() -> None:
    lists = with_transfers(build("1f1b", 2, 1))
    assert written(lists) == "0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n"


def test_nothing_is_sent_within_a_rank() -> None:
    """The bottom of the V: stages p-1 and p are on one rank."""
    sent = {
        str(action) for row in with_transfers(build("zbv", 3, 4)) for action in row if not action.computes
    }
    assert {"1SEND_F0", "2RECV_F0", "3SEND_F0", "4RECV_F0"} <= sent
    assert not {"2SEND_F0", "3RECV_F0", "3SEND_B0", "2RECV_B0"} & sent


@pytest.mark.parametrize("name", SCHEDULES)
def test_few_microbatches_hold_as_much_as_many(name: str) -> None:
    """With any remainder, which interleaved schedules spread over their rounds; unless all microbatches are held."""
    least, most = SCHEDULES[name].stages
    copies = SCHEDULES[name].copies
    for ranks, chunks in product((2, 4, 8, *[3] * (copies == 1)), {least, min(most or 4, 4)}):
        if SCHEDULES[name].varies or holds_all(name, ranks, chunks):
            continue
        for microbatches in (
            2 * ranks + 1,
            6 * ranks - 1,
            9 * ranks + ranks // 2,
            14 * ranks - 1,
            17 * ranks,
        ):
            some = few(microbatches, ranks)
            assert some < microbatches or microbatches // ranks <= max(2, microbatches % ranks)
            whole = peak_live(build(name, ranks, microbatches, chunks))
            assert peak_live(build(name, ranks, some, chunks)) == whole


@pytest.mark.parametrize(
    "change",
    [
        lambda lists: [lists[0][:1] + lists[0][2:], lists[1]],  # 0SEND_F0 is missing
        lambda lists: [lists[0], [*lists[1], Action(1, "SEND_B", 0)]],  # it is there twice
        lambda lists: [lists[0], [*lists[1], Action(1, "SEND_F", 0)]],  # nobody needs it
        lambda lists: [lists[0][1:], lists[1]],  # other computations
    ],
    ids=["missing", "twice", "not needed", "other computations"],
)
def test_transfers_missing_or_too_many(change: Callable[[Any], Any]) -> None:
    schedule = build("1f1b", 2, 1)
    lists = with_transfers(schedule)
    check_transfers(schedule, lists)
    with pytest.raises(AssertionError):
        check_transfers(schedule, change(lists))
