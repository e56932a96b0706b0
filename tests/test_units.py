"""Tables of what is gathered and summed together: every parameter once, in the group that the layout says."""

from typing import Any

import pytest

from fivefold.models.card import Card, card_of
from fivefold.recipe import load, resolve
from fivefold.sharding.layout import Layout, buckets, parse
from fivefold.sharding.parts import held, kept_elements, size_of, stages_of, summed_over_tp
from fivefold.sharding.units import keepings, scattered_once, syncs

SIZES = ["model.layers=4", "model.dim=32", "model.heads=4", "model.ffn_dim=64", "model.seq_len=16"]
MOE = ["model.arch=moe", "model.experts=4", "model.experts_per_token=2", "model.dense_layers=1"]
BERT = ["model.arch=bert", "model.kv_heads=4", "train.sample_every=0"]


def card(*sets: str) -> Card:
    return card_of(resolve(load("quickstart", [*SIZES, *sets]), vocab_size=61).model)


def test_buckets_are_whole_parameters_in_order() -> None:
    assert buckets([3, 3, 3, 3, 3], 20) == [range(2), range(2, 4), range(4, 5)]
    assert buckets([100, 1, 1], 20) == [range(1), range(1, 3)]
    assert buckets([1]) == [range(1)]
    one = (25 << 20) // 4
    assert buckets([one - 1, 1, 1]) == [range(2), range(2, 3)], "25 MiB of fp32"


@pytest.mark.parametrize(
    ("layout", "modules"),
    [
        (Layout(dp_shard=2, zero=3), ["blocks.0", "blocks.1", "blocks.2", "blocks.3", ""]),
        (
            Layout(dp_shard=4, ep=2, zero=1),
            [*(f"blocks.{i}.mlp.experts" for i in (1, 2, 3)), *(f"blocks.{i}" for i in range(4)), ""],
        ),
        (Layout(dp_shard=2, ep=2, zero=1), ["blocks.0", "blocks.1", "blocks.2", "blocks.3", ""]),
        (Layout(dp_replicate=2), []),
    ],
)
def test_units_and_buffers_have_every_parameter_once(layout: Layout, modules: list[str]) -> None:
    model = card(*MOE)
    (keeping,) = keepings(model, layout, [0])
    assert [unit.module for unit in keeping.units] == modules, "inner ones first"
    names = [name for kept in (*keeping.units, *keeping.buffers) for name in kept.names]
    assert sorted(names) == sorted(model.parameters)
    if layout.ep > 1:
        assert all((".experts." in n) == (u.group == "eshard") for u in keeping.units for n in u.names)
    groups = {name: buffer.group for buffer in keeping.buffers for name in buffer.names}
    if not modules:
        assert set(groups.values()) == {"batch"}, "nothing divides experts"
    elif layout.ep == layout.dp_shard:  # nobody shares an expert: they stay whole
        assert set(groups) == {name for name in names if ".experts." in name}
        assert set(groups.values()) == {"edp"}


@pytest.mark.parametrize(
    "layout", [Layout(dp_shard=3, zero=2), Layout(dp_shard=4, ep=2, zero=3), Layout(tp=2)]
)
def test_kept_elements_are_those_of_the_parts(layout: Layout) -> None:
    """And rows that do not come out even are padded in a unit."""
    model = card(*MOE)
    for rank in range(layout.ranks):
        wanted = sum(size_of(part.keeps) for part in held(model, layout, rank).values())
        assert kept_elements(model, layout, rank, model.parameters) == wanted
    (keeping,) = keepings(model, layout, [0])
    for unit in keeping.units:
        ranks = layout.dp_shard // (layout.ep if unit.group == "eshard" else 1)
        assert unit.padded % ranks == 0


def test_two_ends_that_share_an_embedding_are_kept_together() -> None:
    model, layout = card("model.tie_embeddings=true"), Layout(pp=2, schedule="zbv", virtual_stages=2)
    assert [stages_of(layout, index) for index in (0, 1)] == [(0, 3), (1, 2)]
    (both,) = keepings(model, layout, [0, 3])
    assert both.stages == (0, 3)
    (buffer,) = both.buffers
    assert buffer.names.count("embed.weight") == 1
    assert [keeping.stages for keeping in keepings(model, layout, [1, 2])] == [(1,), (2,)]
    untied = card("model.tie_embeddings=false")
    assert [keeping.stages for keeping in keepings(untied, layout, [0, 3])] == [(0,), (3,)]


def test_what_sees_pieces_of_the_sequence_is_summed_over_tp() -> None:
    model, layout = card(*BERT), Layout(tp=2, sp=True)
    found = summed_over_tp(model, layout, model.parameters)
    assert "blocks.0.norm1.weight" in found
    assert "embed_positions.weight" in found
    assert not {"norm.weight", "transform.weight", "blocks.0.mlp.up.weight"} & set(found)
    assert summed_over_tp(model, Layout(tp=2), model.parameters) == []


@pytest.mark.parametrize(
    ("zero", "pp", "once"), [(0, 1, False), (0, 2, False), (1, 1, True), (2, 1, False), (3, 2, True)]
)
def test_gradients_are_scattered_once_under_zero_1_and_in_pipelines(zero: int, pp: int, once: bool) -> None:
    assert scattered_once(zero, pp) == once


@pytest.mark.parametrize(
    ("text", "expert", "found"),
    [
        ("dp=4", False, [("sum", "batch", 0)]),
        ("dp=4,ep=2", True, [("sum", "edp", 0)]),
        ("dp=4,zero=1", False, [("gather", "shard", 0), ("scatter", "shard", 0)]),
        ("dp=4,zero=2", False, [("gather", "shard", 0), ("scatter", "shard", 1)]),
        ("dp=4,zero=3", False, [("gather", "shard", 2), ("scatter", "shard", 1)]),
        ("dp=4,pp=2,zero=3", False, [("gather", "shard", 2), ("scatter", "shard", 0)]),
        ("dp=4,zero=3,ep=2", True, [("gather", "eshard", 2), ("scatter", "eshard", 1)]),
        ("dp=4,zero=3,ep=4", True, [("sum", "edp", 0)]),
        (
            "dp_replicate=2,dp_shard=2,zero=2",
            False,
            [("gather", "shard", 0), ("scatter", "shard", 1), ("sum", "replicate", 0)],
        ),
    ],
)
def test_messages_of_data_parallelism(text: str, expert: bool, found: list[tuple[str, str, int]]) -> None:
    fields: dict[str, Any] = parse(text)
    messages = syncs(Layout(**fields), expert)
    assert [(one.what, one.group, one.each) for one in messages] == found
    assert [one.rows for one in messages] == [one.group == "replicate" for one in messages]
