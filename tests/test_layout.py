"""Layouts: ranks and their places, text in and out, errors that help."""

import math
from dataclasses import asdict, fields, replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fivefold.errors import UserError
from fivefold.recipe import LayoutSection
from fivefold.sharding.layout import (
    AXES,
    GROUP_NAMES,
    Layout,
    describe,
    first_names,
    group_of,
    index_in,
    largest,
    parse,
    share,
    to_text,
)
from fivefold.sharding.layout_rules import nearest, problems, validate

sizes = st.integers(1, 4)
layouts = st.builds(
    lambda schedule, **rest: Layout(schedule=schedule[0], virtual_stages=schedule[1], **rest),
    pp=sizes,
    dp_replicate=sizes,
    dp_shard=sizes,
    cp=sizes,
    tp=sizes,
    ep=sizes,
    zero=st.integers(0, 3),
    sp=st.booleans(),
    schedule=st.sampled_from([("1f1b", 1), ("gpipe", 1), ("interleaved", 3), ("zbv", 1), ("zbv", 2)]),
    microbatches=st.none() | st.integers(1, 64),
    recompute=st.sampled_from(["none", "full", "selective", "ops:gate+norm"]),
)


def test_same_fields_and_defaults_as_the_recipe() -> None:
    section = LayoutSection()
    assert asdict(Layout.from_recipe(section)) == asdict(Layout())
    assert {f.name for f in fields(Layout)} == set(LayoutSection.model_fields)


@given(layouts)
def test_ranks_and_places_correspond(layout: Layout) -> None:
    places = [layout.coordinates(rank) for rank in range(layout.ranks)]
    assert [layout.rank(place) for place in places] == list(range(layout.ranks))
    assert (
        len({tuple(place.values()) for place in places}) == layout.ranks == math.prod(layout.sizes.values())
    )
    assert all(list(place) == list(AXES) for place in places)
    # outermost axis first: places are in lexicographic order
    assert [tuple(p.values()) for p in places] == sorted(tuple(p.values()) for p in places)


def test_neighbours_differ_in_the_innermost_axis() -> None:
    layout = Layout(pp=2, dp_replicate=2, tp=2)
    assert layout.coordinates(1) == {"pp": 0, "dp_replicate": 0, "dp_shard": 0, "cp": 0, "tp": 1}
    assert layout.coordinates(4) == {"pp": 1, "dp_replicate": 0, "dp_shard": 0, "cp": 0, "tp": 0}
    assert layout.rank({"pp": 1}) == 4
    assert layout.dp == 2


@given(layouts)
def test_text_is_read_back(layout: Layout) -> None:
    assert Layout(**parse(to_text(layout))) == layout  # pyright: ignore[reportArgumentType]


def test_dp_alone() -> None:
    assert parse("dp=4") == {"dp_replicate": 4}
    assert parse("dp=4,zero=0") == {"dp_replicate": 4, "zero": 0}
    assert parse("zero=1, dp=4") == {"dp_shard": 4, "zero": 1}
    assert parse("dp_replicate=2,dp_shard=4,zero=3") == {"dp_replicate": 2, "dp_shard": 4, "zero": 3}
    assert parse("sp=true,schedule=gpipe,recompute=full") == {
        "sp": True,
        "schedule": "gpipe",
        "recompute": "full",
    }
    assert parse("") == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dp", "'dp' is not of the form key=value"),
        ("tp=", "'tp=' is not of the form"),
        ("tpp=2", "'tpp' is not an axis or option; did you mean 'tp'?"),
        ("tp=two", "'tp=two': must be a whole number"),
        ("tp=-2", "'tp=-2': must be a whole number"),
        ("sp=1", "'sp=1': must be true or false"),
        ("tp=2,tp=4", "'tp' is given twice"),
        ("dp=2 tp=2", "parts are separated by commas: dp=2,tp=2"),
        ("fsdp=2", "did you mean 'dp=2,zero=3'?"),
        ("dp=2,dp_shard=2", "give either dp or those"),
    ],
)
def test_bad_text(text: str, message: str) -> None:
    with pytest.raises(UserError) as error:
        parse(text)
    assert message in str(error.value)


def test_bad_text_tells_all_at_once() -> None:
    with pytest.raises(UserError) as error:
        parse("zeo=1,tp=x,sp=maybe")
    assert all(part in str(error.value) for part in ("'zeo'", "'tp=x'", "'sp=maybe'"))


def test_wrong_number_of_ranks_shows_equation_and_nearest() -> None:
    with pytest.raises(UserError) as error:
        validate(Layout(dp_replicate=2, tp=2), ranks=8)
    message = str(error.value)
    assert "pp 1 x dp_replicate 2 x dp_shard 1 x cp 1 x tp 2 = 4, but there are 8 ranks" in message
    assert "dp=4,tp=2" in message
    assert "dp=2,tp=4" in message


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (
            Layout(dp_shard=2),
            "dp_shard=2 shards states between ranks: it needs zero=1, 2 or 3. Nearest valid: dp=2",
        ),
        (
            Layout(tp=2, zero=1),
            "zero=1 shards states between ranks: it needs dp_shard > 1 (or cp > 1). Nearest valid: tp=2 or",
        ),
        (
            Layout(dp_replicate=2, zero=3),
            "zero=3 shards states between ranks: it needs dp_shard > 1 (or cp > 1). Nearest valid: dp=2 or",
        ),
        (Layout(dp_replicate=2, ep=4), "ep=4 must divide dp_replicate x dp_shard x cp = 2"),
        (
            Layout(tp=2, sp=True, ep=2),
            "ep=2 must divide dp_replicate x dp_shard x cp = 1 (ep_fold=true counts tp=2, too)",
        ),
        (
            Layout(tp=2, ep=2, ep_fold=True),
            "ep_fold=true sends tokens of each tensor-parallel rank: it needs sp=true",
        ),
        (Layout(tp=2, sp=True, ep=4, ep_fold=True), "ep=4 must divide dp_replicate x dp_shard x cp x tp = 2"),
        (Layout(dp_replicate=2, sp=True), "it needs tp > 1"),
        (Layout(dp_replicate=2, schedule="1f2b"), "schedule: '1f2b' is unknown; did you mean '1f1b'?"),
        (Layout(pp=2, virtual_stages=2), "virtual_stages=1, or schedule=interleaved"),
        (Layout(pp=2, schedule="interleaved"), "virtual_stages=2, or schedule=1f1b"),
    ],
)
def test_contradictions(layout: Layout, message: str) -> None:
    with pytest.raises(UserError) as error:
        validate(layout, ranks=2)
    assert message in str(error.value)


@pytest.mark.parametrize(("microbatches", "ranks"), [(7, 3), (8, 4), (2, 5), (13, 4)])
def test_every_microbatch_has_one_rank(microbatches: int, ranks: int) -> None:
    parts = [share(microbatches, index, ranks) for index in range(ranks)]
    assert [i for part in parts for i in part] == [*range(microbatches)]
    assert max(map(len, parts)) == largest(microbatches, ranks) <= min(map(len, parts)) + 1


def test_valid_layouts_pass() -> None:
    validate(Layout(), 1)
    validate(Layout(zero=2), 1)  # one rank keeps all
    validate(Layout(cp=2, zero=1), 2)
    validate(Layout(pp=2, dp_shard=4, tp=2, zero=3, sp=True, schedule="zbv", virtual_stages=2, ep=4), 16)
    validate(Layout(pp=2, dp_shard=4, tp=2, zero=3, sp=True, ep=8, ep_fold=True), 16)


@given(layouts, st.integers(1, 48))
@settings(max_examples=50, deadline=None)
def test_nearest_are_valid(layout: Layout, ranks: int) -> None:
    for candidate in nearest(layout, ranks):
        validate(candidate, ranks)


@given(layouts)
@settings(max_examples=50, deadline=None)
def test_a_valid_layout_is_nearest_to_itself(layout: Layout) -> None:
    assume(not any(problems(layout)))
    assert nearest(layout, layout.ranks, count=1) == [layout]


def test_describe() -> None:
    assert describe(Layout()) == "1 rank"
    assert describe(Layout(dp_replicate=2)) == "2 ranks: dp_replicate 2"
    folded = Layout(tp=2, sp=True, ep=2, ep_fold=True)
    assert describe(folded) == "2 ranks: tp 2, ep 2 folded with tp, sequence parallel"
    text = describe(Layout(pp=2, dp_shard=4, tp=2, zero=3, sp=True, recompute="full"))
    assert text.startswith("16 ranks: pp 2 x dp_shard 4 x tp 2, ZeRO 3")
    assert "recompute full" in text


@pytest.mark.parametrize(
    "layout",
    [
        "dp_replicate=2,dp_shard=2,cp=2,tp=2,ep=4,zero=1",
        "pp=2,dp=4,ep=2",
        "cp=4,tp=2",
        "dp_replicate=2,dp_shard=2,cp=2,tp=2,sp=true,ep=8,ep_fold=true,zero=1",
        "pp=2,dp=2,tp=4,sp=true,ep=2,ep_fold=true",
    ],
)
def test_groups_divide_the_ranks(layout):
    layout = Layout(**parse(layout))
    for group in GROUP_NAMES:
        found = members(layout, group)
        assert sorted(rank for ranks in found for rank in ranks) == list(range(layout.ranks))
        assert len({len(ranks) for ranks in found}) == 1
        for ranks in found:
            assert [index_in(layout, group, rank) for rank in ranks] == list(range(len(ranks)))


def members(layout: Layout, group: str) -> list[list[int]]:
    """All groups of this name."""
    found = {tuple(group_of(layout, group, rank)): None for rank in range(layout.ranks)}
    return [list(ranks) for ranks in found]


@settings(deadline=None, max_examples=30)
@given(layouts)
def test_groups_are_ranks_that_differ_in_some_axes(layout: Layout) -> None:
    assume(not any(problems(layout)))
    differ = {
        "pp": {"pp"}, "tp": {"tp"}, "cp": {"cp"}, "replicate": {"dp_replicate"}, "dp": {"dp_replicate", "dp_shard"},
        "shard": {"dp_shard", "cp"}, "batch": {"dp_replicate", "dp_shard", "cp"}, "all": set(AXES),
    }  # fmt: skip
    places = [layout.coordinates(rank) for rank in range(layout.ranks)]
    for group, axes in differ.items():
        for rank in {0, layout.ranks // 2, layout.ranks - 1}:
            others = [axis for axis in AXES if axis not in axes]
            same = [all(place[a] == places[rank][a] for a in others) for place in places]
            assert group_of(layout, group, rank) == [other for other, here in enumerate(same) if here]


def test_groups_of_the_same_ranks_go_by_one_name() -> None:
    names = first_names(Layout(dp_shard=2, zero=1, tp=2))
    assert names["batch"] == names["dp"] == names["shard"] == "shard"
    assert names["all"] == "all"
    assert first_names(Layout(tp=4))["all"] == "tp"


def test_experts_divide_data_and_context_again():
    layout = Layout(dp_replicate=2, dp_shard=2, cp=2, ep=2, zero=1)
    assert members(layout, "ep") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert members(layout, "edp") == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert members(layout, "eshard") == [[0, 2], [1, 3], [4, 6], [5, 7]]


def test_experts_divide_the_tensor_axis_too_where_it_is_folded():
    layout = Layout(dp_replicate=2, dp_shard=2, tp=2, sp=True, ep=2, ep_fold=True, zero=1)
    assert members(layout, "ep") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert members(layout, "edp") == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert members(layout, "eshard") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert members(replace(layout, ep=4), "ep") == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert (
        layout.expert_shards,
        replace(layout, ep=4).expert_shards,
        replace(layout, zero=0).expert_shards,
    ) == (2, 1, 1)
    wide = Layout(dp_replicate=2, tp=4, sp=True, ep=2, ep_fold=True)
    assert members(wide, "ep") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert members(wide, "edp") == [[0, 2, 4, 6], [1, 3, 5, 7]]
