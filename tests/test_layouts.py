"""Combinations of the axes: each computes what one process computes (the core of `fivefold verify`, fp32, 3 steps).

`tests/sweep.py` goes through all layouts of 8 ranks.
"""

from pathlib import Path
from zlib import crc32

import pytest
from layouts import compared, tiny
from marks import slow_but

from fivefold.schedules.pipeline import SCHEDULES
from fivefold.sharding.layout import Layout, parse

SINGLE = [
    f"{axis}={size}{more}"
    for size in (2, 4)
    for axis, more in (
        ("dp", ""), ("dp", ",zero=1"), ("dp", ",zero=2"), ("dp", ",zero=3"), ("tp", ""), ("tp", ",sp=true"),
        ("cp", ""), ("cp", ",cp_method=ulysses"), ("cp", ",cp_method=all_gather"), ("cp", ",zero=3"), ("pp", ""),
        (f"dp={size},ep", ""),
    )
]  # fmt: skip
SCHEDULED = [
    f"pp=2,schedule={name},virtual_stages={made.stages[0]}{more}"
    for name, made in SCHEDULES.items()
    for more in ("", ",dp=2,zero=1")
]
TOGETHER = [
    "dp_replicate=2,dp_shard=2,zero=1", "dp_replicate=2,dp_shard=2,zero=2", "dp_replicate=2,dp_shard=2,zero=3",
    *(f"dp=2,tp=2,zero={zero}" for zero in range(4)), "dp=2,tp=2,sp=true,zero=3", "cp=2,tp=2",
    "cp=2,tp=2,sp=true", "cp=2,tp=2,sp=true,sp_regather=true",
    "pp=2,tp=2,sp=true,sp_regather=true,schedule=zb_h1", "cp=2,tp=2,cp_method=ulysses",
    "cp=2,tp=2,cp_method=all_gather", "cp=2,tp=2,sp=true,cp_method=all_gather", "dp=2,cp=2,cp_method=all_gather,zero=3",
    "pp=2,cp=2,cp_method=all_gather", "cp=2,cp_method=all_gather,ep=2",
    "dp=2,cp=2", "dp=2,cp=2,zero=2", "dp=2,cp=2,zero=3", "pp=2,tp=2", "pp=2,tp=2,sp=true",
    "pp=2,cp=2", "pp=2,dp=2", "pp=2,dp=2,zero=2", "pp=2,dp=2,zero=3", "dp=4,ep=2",
    "dp=2,ep=2,zero=1", "dp=4,ep=2,zero=1",
    "dp=4,ep=2,zero=3", "dp=2,ep=2,tp=2", "dp=2,ep=2,pp=2", "cp=2,ep=2", "pp=2,dp=2,zero=3,recompute=full",
    "dp=2,tp=2,sp=true,sp_regather=true,zero=3,recompute=full", "cp=2,tp=2,sp=true,recompute=selective",
    "dp=2,tp=2,sp=true,recompute=ops:attention+gate+norm", "dp=2,ep=2,recompute=full",
    "pp=2,schedule=zbv,virtual_stages=2,recompute=full", "pp=2,schedule=zbv,virtual_stages=2,recompute=selective",
]  # fmt: skip
EIGHT = [
    "dp=2,tp=2,pp=2", "dp=2,tp=2,sp=true,pp=2,zero=3", "dp=2,cp=2,tp=2,zero=2", "pp=2,cp=2,tp=2,sp=true",
    "dp=2,ep=2,pp=2,tp=2", "dp_replicate=2,dp_shard=2,tp=2,zero=3,recompute=full",
]  # fmt: skip

FIVE = [
    "pp=2,dp=2,cp=2,tp=2,ep=2", "pp=2,dp=2,cp=2,tp=2,sp=true,ep=2,zero=1",
    "pp=2,dp=2,cp=2,cp_method=ulysses,tp=2,ep=2,zero=2,schedule=zb_h1",
    "pp=2,dp=2,cp=2,cp_method=all_gather,tp=2,sp=true,ep=2,zero=1",
    "pp=2,dp=2,cp=2,tp=2,sp=true,ep=2,zero=3,schedule=zbv,virtual_stages=2,recompute=selective",
    "pp=2,dp=2,cp=2,tp=2,sp=true,ep=4,zero=3,recompute=full",
]  # fmt: skip
"""All five dimensions of parallelism at once, on 16 ranks."""

QUICK = {
    "cp=2,tp=2,sp=true,sp_regather=true", "dp=2,tp=2,pp=2", "pp=2,dp=2,zero=3,recompute=full",
}  # fmt: skip
"""Pairs of axes, run by every `make test`; the others by `make test-all`. Each axis has a file of its own, too."""


@pytest.fixture(scope="module")
def room(tmp_path_factory) -> Path:
    """Where text, cache and the references stay, which all layouts share."""
    return tmp_path_factory.mktemp("layouts")


def passes(room: Path, layout: str, *overrides: str, mode: str = "fp32") -> None:
    model = "moe" if "ep=" in layout else "dense"
    recipe = tiny(room, layout, *overrides, mode=mode)
    report = compared(recipe, folder=room / f"{model}-{mode}-{crc32(repr(overrides).encode()):x}")
    assert report.ranks == Layout.from_recipe(recipe.layout).ranks
    assert report.passed, report


@pytest.mark.parametrize("layout", slow_but(QUICK, SINGLE + SCHEDULED + TOGETHER + EIGHT + FIVE))
def test_layouts(room, layout):
    passes(room, layout)


NORMED = [
    "dp=2", *(f"dp=2,zero={zero}" for zero in (1, 2, 3)), "tp=2", "tp=2,sp=true", "pp=2", "cp=2",
    "cp=2,cp_method=ulysses", "cp=2,cp_method=all_gather",
    "dp=1,recompute=selective", "dp=1,recompute=full", "tp=2,sp=true,recompute=selective",
    "dp=2,tp=2,pp=2",
]  # fmt: skip


NORMED_QUICK = {"tp=2,sp=true,recompute=selective"}


@pytest.mark.parametrize("layout", slow_but(NORMED_QUICK, NORMED))
@pytest.mark.parametrize(
    "overrides",
    [
        ("model.arch=qwen3", "model.kv_heads=2", "model.head_dim=10"),
        ("model.arch=olmo2", "model.kv_heads=2", "model.tie_embeddings=false"),
    ],
    ids=["qwen3", "olmo2"],
)
def test_norms_of_queries_and_keys(room, layout, overrides):
    """Of each head, and of all heads together, which tensor parallelism cuts."""
    passes(room, layout, *overrides)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        "dp=2,ep=2,tp=2,sp=true",
        *(
            pytest.param(text, marks=pytest.mark.slow)
            for text in ("dp=2,ep=2", "pp=2,dp=2,ep=2,zero=3", "cp=2,ep=2", "tp=2,sp=true,ep=2,ep_fold=true")
        ),
    ],
)
def test_norms_of_queries_and_keys_beside_experts(room, layout):
    passes(room, layout, "model.arch=qwen3_moe", "model.kv_heads=2", "model.head_dim=16")


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["gpt2", "bert"])
@pytest.mark.parametrize("layout", ["tp=2", "tp=2,sp=true", "pp=2", "dp=2,zero=3", "cp=2"])
def test_other_architectures(room, layout, arch):
    passes(room, layout, f"model.arch={arch}")


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        "tp=2",
        "tp=2,sp=true",
        "cp=2",
        "pp=2",
        "dp=2,zero=3",
        "dp=2,tp=2,zero=2",
        "cp=2,tp=2,sp=true",
        "dp=2,ep=2",
    ],
)
def test_bf16_is_no_worse_than_one_process(room, layout):
    passes(room, layout, mode="bf16")


def test_the_list_is_of_layouts():
    """Nothing is left out because it is misspelt."""
    layouts = {*SINGLE, *SCHEDULED, *TOGETHER, *EIGHT, *FIVE}
    for layout in layouts:
        assert parse(layout), layout
    assert layouts >= QUICK
