"""ZeRO's gathers and reduce-scatters by the algorithms of the library of collectives (`layout.all_gather`,
`layout.reduce_scatter`): the weights of one process, the messages that the plan counts, the memory that it adds."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Literal

import pytest
from layouts import compared, side, tiny
from marks import slow_but
from ranks import run_ranks
from steps import counted, planned, recipe_of, tracked
from test_all_reduce import two_nodes

from fivefold.errors import UserError
from fivefold.recipe import change, load
from fivefold.recipe.rules.combinations import notes
from fivefold.schedules.collectives import ALGORITHMS, Primitive, build, shape_of
from fivefold.schedules.collectives.collective import messages_of
from fivefold.schedules.collectives.registry import GATHERS, LIBRARY, SCATTERS
from fivefold.sharding.layout import Layout, describe, parse, to_text
from fivefold.sharding.layout_rules import nearest
from fivefold_plan.cluster.clusters import parse as parse_cluster
from fivefold_plan.memory import memory
from fivefold_plan.messages import communication, volume
from fivefold_plan.messages.communication import Group
from fivefold_plan.predict import predict
from fivefold_plan.trace.step import trace

BOTH: tuple[Literal["all_gather", "reduce_scatter"], ...] = ("all_gather", "reduce_scatter")
BROADCASTS = "dp=4,zero=3,all_gather=broadcasts,reduce_scatter=ring"
LAYOUTS = [
    BROADCASTS,
    "dp=2,zero=1,all_gather=ring",
    "dp=3,zero=2,all_gather=bruck,reduce_scatter=bruck",
    "dp=2,cp=2,zero=3,reduce_scatter=ring",
    "dp=4,zero=3,all_gather=hierarchical,reduce_scatter=hierarchical",
    "dp_replicate=2,dp_shard=2,zero=3,all_gather=doubling,reduce_scatter=halving,all_reduce=ring",
    "dp=2,tp=2,zero=3,all_gather=broadcasts,reduce_scatter=halving",
    "pp=2,dp=2,zero=3,all_gather=broadcasts,reduce_scatter=ring",
    "pp=2,dp=2,schedule=zbv,virtual_stages=2,zero=1,all_gather=bruck,reduce_scatter=ring",
    "dp=4,ep=2,zero=3,all_gather=broadcasts,reduce_scatter=bruck",
    "dp=3,zero=3,all_gather=keys_then_values",
]


@pytest.fixture(scope="module")
def room(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("zero_schedules")


def sized(layout: str) -> list[str]:
    return ["train.global_batch_size=12"] if "dp=3" in layout else []


@pytest.mark.parametrize("layout", slow_but([BROADCASTS], LAYOUTS))
def test_training_is_that_of_one_process(room: Path, layout: str) -> None:
    """Loss, every gradient, the norm, and weights after three steps."""
    part = two_nodes if "hierarchical" in layout else side
    kind = ("moe" if "ep=" in layout else "dense") + ("12" if "dp=3" in layout else "")
    report = compared(tiny(room, layout, *sized(layout)), part=part, folder=room / kind)
    assert report.passed, report


@pytest.mark.parametrize(
    ("layout", "reduce"), slow_but([(BROADCASTS, "fp32")], [*product(LAYOUTS, ("fp32", "bf16"))])
)
def test_messages_are_those_planned(room: Path, layout: str, reduce: str) -> None:
    """Call by call and byte by byte, on every rank. The library sends none of those that a schedule sends."""
    recipe = tiny(room, layout, *sized(layout), f"precision.reduce={reduce}", mode="bf16")
    s = planned(recipe)
    for rank, step in enumerate(run_ranks(s.layout.ranks, counted, recipe, timeout_s=300)):
        assert volume.counted(s, rank) == step.sent, f"rank {rank} of {layout}"
        assert {axis for what, axis in step.sent if what == "send"} & {"shard", "eshard"}
        gone = {"all_gather": s.layout.all_gather, "all_to_all": s.layout.reduce_scatter}
        assert not {(what, "shard") for what, by in gone.items() if by != LIBRARY} & step.sent.keys()


@pytest.mark.parametrize(
    ("by", "more"),
    slow_but(
        [],
        [
            (("broadcasts", "ring"), ""),
            (("doubling", "halving"), ""),
            (("bruck", "bruck"), "precision.reduce=bf16"),
        ],
    ),
)
def test_the_plan_adds_the_memory_that_a_real_rank_takes(by: tuple[str, str], more: str) -> None:
    """A trace sees it, too. A schedule's reduce-scatter works in what it sends, the library's in as much again."""
    layout = f"dp=2,zero=3,all_gather={by[0]},reduce_scatter={by[1]}"
    both = [
        recipe_of("llama", "bf16", text, "model.layers=2", *more.split()) for text in (layout, "dp=2,zero=3")
    ]
    traced, library = (trace(recipe, 0, 3) for recipe in both)
    assert traced.memory.total == run_ranks(2, tracked, both[0], timeout_s=300)[0].peak
    plans = [memory.predict(planned(recipe))[0].total for recipe in both]
    measured = traced.memory.total - library.memory.total
    assert plans[0] - plans[1] == measured
    assert measured > 0


@pytest.mark.parametrize("primitive", BOTH)
@pytest.mark.parametrize("shape", [(2, 2), (4, 4), (4, 2), (8, 4), (6, 3), (5, 5), (12, 4)])
def test_every_rank_sends_as_much(primitive: Primitive, shape: tuple[int, int]) -> None:
    """So a plan counts one of them (`volume.sent`)."""
    for name, made in ALGORITHMS[primitive].items():
        if made.fits(shape_of(*shape)):
            collective = build(primitive, name, shape_of(*shape))
            sizes = {
                sum(
                    m.size for step in messages_of(collective, rank, 840 * shape[0]).steps for m in step.sends
                )
                for rank in range(shape[0])
            }
            assert len(sizes) == 1, (name, sizes)


def test_time_of_each_algorithm() -> None:
    """The library has NCCL's choice. Broadcasts one after the other take longest; large groups have a line."""
    cluster = parse_cluster("h100:8x2")
    for primitive, names in zip(BOTH, (GATHERS, SCATTERS), strict=True):
        times = {
            name: communication.share_states(primitive, 1e8, Group(16, 8), cluster, name) for name in names
        }
        assert times[LIBRARY] <= 1.000001 * min(times.values())
        assert len(set(times.values())) > 3
    gathered = communication.share_states("all_gather", 1e8, Group(16, 8), cluster, "broadcasts")
    assert gathered > 2 * communication.share_states("all_gather", 1e8, Group(16, 8), cluster, "ring")
    many = parse_cluster("h100:8x16")
    one, two = (
        communication.share_states("all_gather", s, Group(128, 8), many, "broadcasts") for s in (1e8, 2e8)
    )
    assert one < two < 2 * one
    assert [key for key in many.lines if "broadcasts" in key[0]] == [
        ("all_gather by broadcasts in 1", 128, 8)
    ]
    recipe = load("quickstart", ["train.global_batch_size=16"], "dp=4,zero=3")
    plans = [
        predict(change(recipe, [f"layout.{field}={how}"]), parse_cluster("h100"))
        for field, how in (
            ("all_gather", "library"),
            ("all_gather", "broadcasts"),
            ("reduce_scatter", "ring"),
        )
    ]
    assert plans[0].step.seconds < min(plan.step.seconds for plan in plans[1:])


def test_the_layout_says_it() -> None:
    layout = Layout(**parse(BROADCASTS))  # type: ignore[arg-type]
    assert to_text(layout) == BROADCASTS
    assert describe(layout).endswith("weights gathered by broadcasts, gradients scattered by ring")
    assert not any("all_gather" in note for note in notes(load("quickstart", [], BROADCASTS)))
    assert any(
        "layout.all_gather" in n for n in notes(load("quickstart", ["layout.all_gather=ring"], "dp=2"))
    )
    six = nearest(Layout(**parse("dp=4,zero=3,all_gather=doubling")), 6)[0]  # type: ignore[arg-type]
    assert (six.ranks, six.zero, six.all_gather) == (6, 3, LIBRARY)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ("dp=3,zero=3,all_gather=doubling", r"all_gather: all_gather 'doubling' needs a power of two .* not 3; the "
         r"nearest: 2 or 4; for 3 ranks: library, .*bruck"),
        ("dp=2,zero=3,reduce_scatter=rnig", r'reduce_scatter = "rnig": must be one of "library", .*did you mean'),
        ("dp=2,zero=3,zeropp=hier,ranks_per_node=1,all_gather=ring",
         r"zeropp=hier sends messages of its own in place of all_gather=ring: it needs all_gather=library"),
        ("dp=2,zero=3,zeropp=gradients,ranks_per_node=1,reduce_scatter=ring", r"in place of reduce_scatter=ring"),
    ],
)  # fmt: skip
def test_what_is_refused(layout: str, message: str) -> None:
    more = ["train.global_batch_size=12"] if "dp=3" in layout else []
    with pytest.raises(UserError, match=message):
        load("quickstart", more, layout)
