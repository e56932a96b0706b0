"""What the planner says is sent, beside what a counter sees in a real step: equal, call by call and byte by byte."""

from pathlib import Path

import own_bytes
import pytest
from layouts import tiny
from marks import all_but, only, slow, slow_but
from ranks import run_ranks
from steps import counted, planned
from sweep import candidates

from fivefold.models.card import card_of
from fivefold.recipe import Recipe, change, load, resolve
from fivefold.sharding.layout import Layout, to_text
from fivefold.sharding.parts import local_parameters
from fivefold.sharding.units import keepings
from fivefold_plan.messages import volume

TWO = [
    "dp=2,zero=2", "cp=2,cp_method=ulysses", "pp=2", "tp=2,sp=true,sp_regather=true",
    "tp=2,sp=true,recompute=ops:attention+gate+norm", "cp=2,recompute=full",
    "dp=2,ep=2,expert_chunks=3,recompute=full", "cp=2,cp_method=all_gather,recompute=ops:attention",
]  # fmt: skip
SLOW = [
    "dp=2", "dp=2,zero=1", "tp=2", "tp=2,sp=true,recompute=selective", "cp=2,ep=2,zero=1", "cp=4",
    "pp=2,dp=2,zero=3", "pp=2,tp=2,sp=true", "dp_replicate=2,dp_shard=2,ep=2,zero=1", "pp=4,schedule=zb_h1",
    "pp=2,dp=2,zero=3,schedule=dualpipe", "pp=4,schedule=dualpipe",
    "dp=2,zero=3", "tp=2,sp=true", "cp=2", "dp=2,ep=2", "pp=2,schedule=zbv,virtual_stages=2", "tp=2,recompute=full",
    "tp=2,recompute=selective", "cp=2,recompute=selective", "tp=2,recompute=ops:gate", "cp=2,recompute=ops:attention",
    "cp=4,cp_method=all_gather", "cp=2,tp=2,sp=true,cp_method=all_gather,recompute=full",
    "pp=2,cp=2,cp_method=all_gather,zero=2", "dp=2,ep=2,expert_buffer=1.75",
    "tp=2,sp=true,tp_chunks=2", "tp=2,sp=true,sp_regather=true,tp_chunks=4,recompute=full",
]  # fmt: skip
FOUR = [
    "dp_replicate=2,dp_shard=2,zero=3", "dp=2,tp=2,sp=true,sp_regather=true,zero=2", "cp=2,tp=2,sp=true",
    "pp=2,schedule=zbv,virtual_stages=2,dp=2,zero=1", "dp=4,ep=2,zero=3", "dp=2,ep=2,tp=2,sp=true",
    "dp=2,ep=2,tp=2,sp=true,ep_fold=true,zero=2",
]  # fmt: skip
OTHERS = [
    ("gpt2", "tp=2,sp=true"), ("gpt2", "pp=2"), ("bert", "tp=2"), ("bert", "tp=2,sp=true,sp_regather=true"),
    ("qwen3", "tp=2,sp=true"), ("olmo2", "tp=2"), ("olmo2", "tp=2,sp=true,recompute=selective"),
    ("olmo2", "tp=2,dp=2,zero=3,recompute=full"), ("moe", "tp=2,recompute=full"), ("moe", "dp=2,tp=2,sp=true,zero=2"),
]  # fmt: skip
OTHERS_QUICK = {
    ("gpt2", "pp=2"), ("bert", "tp=2,sp=true,sp_regather=true"), ("qwen3", "tp=2,sp=true"),
    ("olmo2", "tp=2,sp=true,recompute=selective"), ("moe", "dp=2,tp=2,sp=true,zero=2"),
}  # fmt: skip


@pytest.fixture(scope="module")
def room(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("volume")


def equal(recipe: Recipe) -> None:
    s = planned(recipe)
    found = run_ranks(s.layout.ranks, counted, recipe, timeout_s=300)
    for rank, step in enumerate(found):
        assert volume.counted(s, rank) == step.sent, f"rank {rank} of {to_text(s.layout)}"


@all_but(
    "dp=2,ep=2,expert_chunks=3,recompute=full",
    "dp=2,tp=2,sp=true,sp_regather=true,zero=2",
    "tp=2,sp=true,recompute=ops*",
    "cp=2,recompute=full",
    "cp=2,tp=2,sp=true",
    "dp=2,ep=2,tp=2,sp=true",
)
@pytest.mark.parametrize("layout", [*TWO, *FOUR])
def test_bytes_are_those_counted(room: Path, layout: str) -> None:
    equal(tiny(room, layout))


@pytest.mark.slow
@pytest.mark.parametrize("layout", SLOW)
def test_bytes_of_more_layouts(room: Path, layout: str) -> None:
    equal(tiny(room, layout))


@only("bert*", "gpt2*", "qwen3*")
@pytest.mark.parametrize(("arch", "layout"), slow_but(OTHERS_QUICK, OTHERS))
def test_of_other_models(room: Path, arch: str, layout: str) -> None:
    equal(tiny(room, layout, f"model.arch={arch}"))


@pytest.mark.slow
def test_of_experts_whose_router_has_no_loss_of_its_own(room: Path) -> None:
    """Recomputation ends before the sum of their results."""
    equal(tiny(room, "tp=2,recompute=full", "model.arch=moe", "model.balance=bias"))


@pytest.mark.slow
@pytest.mark.parametrize("overrides", [
    ("model.tie_embeddings=false",),
    ("model.dim=40", "model.ffn_dim=63", "model.kv_heads=2"),  # rows do not divide evenly
    ("precision.reduce=bf16",),
    ("train.microbatch_size=2",),
    ("optim.qk_clip=1", "model.kv_heads=2"),
])  # fmt: skip
def test_of_other_sizes(room: Path, overrides: tuple[str, ...]) -> None:
    for layout in ("dp=2,zero=2", "dp=2", "pp=2"):
        equal(tiny(room, layout, *overrides, mode="bf16"))


def test_of_uneven_rows_in_bf16(room: Path) -> None:
    equal(tiny(room, "dp=2,zero=2", "model.dim=40", "model.ffn_dim=63", "precision.reduce=bf16", mode="bf16"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "experts"),
    [
        ("dp=4,ep=2,zero=3", 2),
        pytest.param("dp=4,ep=2,zero=2", 2, marks=pytest.mark.slow),
        pytest.param("dp=4,zero=1", 6, marks=pytest.mark.slow),
        pytest.param("dp_replicate=2,dp_shard=4,ep=2,zero=1", 2, marks=pytest.mark.slow),
    ],
)
def test_of_experts_that_are_shared_by_their_rows(room: Path, layout: str, experts: int) -> None:
    """And nothing of them is padding."""
    recipe = tiny(room, layout, "model.arch=moe", f"model.experts={experts}", "model.experts_per_token=2")
    equal(recipe)
    s = planned(recipe)
    ranks = s.layout.dp_shard // s.layout.ep
    (keeping,) = keepings(card_of(s.model), s.layout, [0])
    shared = [name for unit in keeping.units for name in unit.across]
    assert len(shared) == 2 * s.model.layers
    for local in (local_parameters(card_of(s.model), s.layout)[name] for name in shared):
        assert local.share(ranks) * ranks == local.size


def test_of_experts_as_they_are_chosen(room: Path) -> None:
    """Rows go where the router sends them: calls are equal, and bytes of all else."""
    recipe = tiny(room, "dp=4,ep=2")
    s, rows = planned(recipe), ("all_to_all", "ep")
    for rank, step in enumerate(run_ranks(4, counted, recipe, False)):
        wanted = volume.counted(s, rank)
        assert wanted[rows][0] == step.sent[rows][0]
        assert wanted[rows][1] <= step.sent[rows][1] <= 2 * wanted[rows][1], "at most all rows to one rank"
        assert {k: v for k, v in wanted.items() if k != rows} == {
            k: v for k, v in step.sent.items() if k != rows
        }


@pytest.mark.parametrize(
    "layout", ["dp=2,ep=2", *slow("dp=2,ep=2,expert_chunks=3", "dp=4,ep=4,zero=1,recompute=full")]
)
def test_of_rows_that_travel_in_fp8(room: Path, layout: str) -> None:
    """To experts, and the gradients of their results; the other ways in the working dtype."""
    equal(change(tiny(room, layout, mode="fp8"), ["precision.fp8_dispatch=true"]))


def test_what_is_sent_follows_from_what_is_counted(room: Path) -> None:
    """Rings: of S bytes an all-reduce sends 2 (n-1)/n, a gather or a scatter half of that; a receive nothing."""
    s = planned(tiny(room, "dp=4,zero=1"))
    found = volume.counted(s)
    assert {axis for _, axis in found} == {"shard"}
    size = {what: size for (what, _), (_, size) in found.items()}
    assert size["all_reduce"] == 32, "four numbers on which all agree"
    states = int(3 / 4 * size["all_gather"]) + int(3 / 4 * size["all_to_all"])
    assert volume.sent(s) == {"dp": states}
    assert volume.sent(s, as_counted=True) == {"dp": states + 48}, "all ranks are those of the axis"


@pytest.mark.parametrize(("tp", "V"), [(2, 256), (8, 1024)])
def test_parts_of_activations_add_a_twelfth(tp: int, V: int) -> None:
    """ZeRO-R's Pa: one all-gather of an activation, beside six all-reduces, of which each sends twice as much (arXiv
    1910.02054, section 8: less than 10% of Megatron's messages)."""
    sizes = [
        "model.heads=8",
        "model.kv_heads=8",
        f"model.vocab_size={V}",
        "train.microbatch_size=2",
        "precision.mode=bf16",
    ]

    def of_blocks(offload: str) -> tuple[float, float]:
        recipe = resolve(load("quickstart", sizes, f"tp={tp},recompute=full,offload={offload}"), vocab_size=V)
        sent = dict[str, float]()
        for one in volume.moments(planned(recipe)):
            if one.axis == "tp" and "block" in one.when:
                sent[one.what] = sent.get(one.what, 0) + volume.SENT[one.what](tp) * one.size * one.times
        return sent["all_reduce"], sent.get("all_gather", 0.0)

    before, none = of_blocks("none")
    assert none == 0
    assert of_blocks("activations:tp") == (before, pytest.approx(before / 12))


EIGHT = list(candidates())


@pytest.mark.slow
@pytest.mark.parametrize("layout", EIGHT, ids=to_text)
def test_bytes_of_every_layout_of_eight_ranks(room: Path, layout: Layout) -> None:
    assert not own_bytes.compare(room, layout).differ
