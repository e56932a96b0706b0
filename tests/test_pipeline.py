"""Pipeline parallelism: every schedule trains as one process does; stages, ties, memory, order and times are right."""

from __future__ import annotations

import json
from collections import Counter
from itertools import combinations_with_replacement, pairwise
from math import prod
from pathlib import Path
from typing import Any

import pytest
import stored
import torch
from hypothesis import given
from hypothesis import strategies as st
from layouts import compared, tiny
from marks import slow, slow_but
from parity import evaluate
from pool_runs import lines, ranks_of, train_rank
from ranks import run_ranks

from fivefold.checkpoint import store
from fivefold.data import prepare
from fivefold.errors import UserError
from fivefold.models.base import build as build_model
from fivefold.models.base import init_weights
from fivefold.models.card import card_of
from fivefold.models.section import Arch
from fivefold.observe.timelines import write_pipeline_trace
from fivefold.parallel import pipeline as pipeline_
from fivefold.parallel.autograd import Deferred, attach
from fivefold.parallel.parallelize import split
from fivefold.recipe import (
    ModelSection,
    Recipe,
    change,
    count_parameters,
    flops_per_token,
    resolve,
    resolve_model,
)
from fivefold.schedules.pipeline import (
    SCHEDULES,
    Action,
    Event,
    Schedule,
    Timeline,
    build,
    cut,
    peak_live,
    receives_ahead,
    simulate,
    with_transfers,
)
from fivefold.sharding.layout import Layout
from fivefold.sharding.parts import held, size_of, stage_blocks
from fivefold.step.state import build_state
from fivefold.step.step import forward_backward
from fivefold.train.share import batches_of, in_order, rows_of, share_of

STAGES = {name: made.stages[0] for name, made in SCHEDULES.items()}  # a rank


@pytest.fixture(scope="module")
def room(tmp_path_factory) -> Path:
    """Where text, cache and the references stay, which all layouts share."""
    return tmp_path_factory.mktemp("pipeline")


def line(name: str, pp: int, more: str = "") -> str:
    return f"pp={pp},schedule={name},virtual_stages={STAGES[name]}{more}"


def small(arch: Arch = "llama", tied: bool | None = None, layers: int = 8) -> ModelSection:
    section = ModelSection(arch=arch, layers=layers, dim=32, heads=4, seq_len=16, tie_embeddings=tied)
    return resolve_model(section, vocab_size=64)


# Every schedule once by every `make test`: the others by `make test-all`.
QUICK = {
    ("gpipe", 4, "true", 5), ("1f1b", 2, "true", 5), ("interleaved", 4, "true", 5), ("looped_bfs", 2, "false", 8),
    ("zb_h1", 4, "true", 5), ("zbv", 4, "true", 5), ("dualpipev", 2, "true", 5),
    ("v_half", 2, "true", 5), ("zb_h2", 2, "true", 5), ("dualpipe", 2, "true", 5),
}  # fmt: skip


CASES = [(n, p, t, m) for n in SCHEDULES for p in (2, 4) for t in ("true", "false") for m in (5, 6, 8)]


@pytest.mark.parametrize(("name", "pp", "tied", "microbatches"), slow_but(QUICK, CASES))
def test_every_schedule_trains_as_one_process(room, name, pp, tied, microbatches):
    """Loss, gradients, their norm, weights after 3 steps; microbatches that are a multiple of the ranks and others."""
    sets = ["model.layers=8", f"model.tie_embeddings={tied}", f"train.global_batch_size={microbatches}"]
    report = compared(tiny(room, line(name, pp), *sets), folder=room / "-".join(sets))
    assert report.passed, report


@pytest.mark.parametrize(
    ("pp", "virtual", "each", "microbatches"),
    slow_but([(2, 2, 1, 5)], [(2, 2, 1, 5), (4, 2, 2, 7), (4, 2, 3, 8), (2, 4, 5, 8), (2, 2, 40, 6)]),
)
def test_rounds_train_as_one_process(room, pp, virtual, each, microbatches):
    """Rounds of fewer microbatches than ranks, of more, and of all."""
    sets = ["model.layers=8", "model.tie_embeddings=true", f"train.global_batch_size={microbatches}"]
    more = f"pp={pp},schedule=interleaved,virtual_stages={virtual},round_microbatches={each}"
    report = compared(tiny(room, more, *sets), folder=room / "-".join(sets))
    assert report.passed, report


BARE = [
    "pp=4",
    "pp=2,schedule=interleaved,virtual_stages=2",
    "pp=2,schedule=zbv",
    "pp=2,dp=2,zero=2,schedule=zbv",
]
BARE += [
    "pp=4,dp=2,zero=3,recompute=full",
    "pp=4,schedule=zb_h1,dp=2,zero=1",
    "pp=2,dp=2,ep=2,schedule=zbv,tp=2",
]


@pytest.mark.parametrize(
    ("pp", "more"),
    slow_but(
        [(2, "zb_live=1")], [(2, "zb_live=1"), (4, "zb_costs=1:1.2:0.7:0.1"), (4, "zb_live=3,dp=2,zero=2")]
    ),
)
def test_automatic_schedules_train_as_one_process(room, pp, more):
    sets = ["model.layers=8", "train.global_batch_size=8"]
    report = compared(tiny(room, f"pp={pp},schedule=zb_auto,{more}", *sets), folder=room / "-".join(sets))
    assert report.passed, report


@pytest.mark.parametrize("tied", ["true", *slow("false")])
@pytest.mark.parametrize("layout", slow_but(BARE[2:3], BARE))
def test_stages_without_blocks_train_as_one_process(room, layout, tied):
    """Four stages of two blocks: one has the embedding alone, one the head alone. In a V one rank has just these."""
    sets = ["model.layers=2", f"model.tie_embeddings={tied}"]
    recipe = tiny(room, f"{layout},bare_ends=true", *sets)
    blocks = stage_blocks(card_of(recipe.model), Layout.from_recipe(recipe.layout))
    assert list(map(len, blocks)) == [0, 1, 1, 0]
    report = compared(recipe, folder=room / "-".join([*sets, "ep" * ("ep=" in layout)]))
    assert report.passed, report


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["gpt2", "bert", "deepseek"])
def test_stages_without_blocks_of_other_architectures(room, arch):
    sets = ["model.layers=2", f"model.arch={arch}", "model.kv_heads=4"]
    report = compared(tiny(room, "pp=4,bare_ends=true", *(sets if arch != "deepseek" else sets[:2])))
    assert report.passed, report


@pytest.mark.parametrize("arch", [*slow("gpt2"), "bert"])
def test_other_architectures(room, arch):
    sets = [f"model.arch={arch}", "model.kv_heads=4"]
    report = compared(tiny(room, line("zbv", 2), *sets), folder=room / arch)
    assert report.passed, report


@pytest.mark.slow
def test_with_replicas_on_eight_ranks(room):
    report = compared(tiny(room, line("zb_h1", 4, ",dp=2"), "model.layers=8"))
    assert report.passed, report


@pytest.mark.parametrize(
    ("name", "zero"), slow_but([("zbv", 3)], [(n, z) for n in ("1f1b", "zbv", "dualpipe") for z in (1, 2, 3)])
)
def test_with_shared_states(room, name, zero):
    report = compared(tiny(room, line(name, 2, f",dp=2,zero={zero}")), folder=room / "zero")
    assert report.passed, report


def test_shared_states_with_one_microbatch_in_bf16(room):
    """Some gradients come with I and some with W, all in one summing."""
    sets = ["train.global_batch_size=4", "train.microbatch_size=2"]
    report = compared(tiny(room, line("zbv", 2, ",dp=2,zero=2"), *sets, mode="bf16"))
    assert report.passed, report


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        "pp=2,schedule=dualpipe,tp=2,sp=true", "pp=2,schedule=dualpipe,cp=2,dp=2,zero=3,recompute=full",
        "pp=2,schedule=dualpipe_paired,dp=2,ep=2", "pp=4,schedule=dualpipe,dp_replicate=2",
    ],
)  # fmt: skip
def test_two_copies_of_the_model_with_other_axes(room, more):
    report = compared(tiny(room, more), folder=room / f"dual-{'ep=' in more}")
    assert report.passed, report


@pytest.mark.slow
@pytest.mark.parametrize("dp", [1, 2])
def test_a_copy_of_the_model_without_microbatches(room, dp):
    """One microbatch, or two of one replica and one of the other."""
    sets = [f"train.global_batch_size={2 * dp - 1}"]
    report = compared(tiny(room, f"pp=2,dp={dp},schedule=dualpipe", *sets), folder=room / sets[0])
    assert report.passed, report


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ("pp=3,schedule=dualpipe", "pp=3 must be divisible by 2"),
        (
            "pp=2,tp=2,schedule=dualpipe_paired",
            "does not combine with tp=2.* tp=1, or schedule=dualpipe",
        ),
        (
            "pp=2,cp=2,schedule=dualpipe_paired",
            "does not combine with cp=2.* cp=1, or schedule=dualpipe",
        ),
        ("pp=2,schedule=dualpipe,offload=states:disk", "does not combine with offload=states:disk"),
    ],
)
def test_what_two_copies_refuse(room, layout, message):
    with pytest.raises(UserError, match=message):
        tiny(room, layout)


def test_bf16(room):
    report = compared(tiny(room, line("dualpipev", 2), mode="bf16"))
    assert report.passed, report


# Stages


@given(
    st.lists(st.sampled_from([0.5, 1.0, 2.0, 3.0]), min_size=1, max_size=8),
    st.integers(1, 8), st.sampled_from([0.0, 0.7]), st.sampled_from([0.0, 1.0, 2.6]), st.booleans(),
)  # fmt: skip
def test_no_cut_is_better(costs, stages, first, last, bare):
    stages = min(stages, len(costs) + 2 * bare)

    def judge(ends: tuple[int, ...]) -> tuple[float, float]:
        bounds = [0, *ends, len(costs)]
        sums = [sum(costs[a:b]) for a, b in pairwise(bounds)]
        sums[0] += first
        sums[-1] += last
        return max(sums), sum(x * x for x in sums)

    def valid(ends: tuple[int, ...]) -> bool:
        sizes = [b - a for a, b in pairwise([0, *ends, len(costs)])]
        return all(size or (bare and number in (0, stages - 1)) for number, size in enumerate(sizes))

    found = cut(costs, stages, first, last, bare)
    assert [block for part in found for block in part] == list(range(len(costs)))
    every = combinations_with_replacement(range(len(costs) + 1), stages - 1)
    best = min(judge(ends) for ends in every if valid(ends))
    assert judge(tuple(part.stop for part in found[:-1])) == pytest.approx(best)


def test_the_head_counts():
    """A large vocabulary costs as much as blocks: the last stage gets fewer of them."""
    model = resolve_model(ModelSection(layers=12, dim=64, heads=4), vocab_size=3000)
    sizes = [len(part) for part in stage_blocks(card_of(model), Layout(pp=4))]
    assert sizes[-1] < sizes[0]
    assert sum(sizes) == 12


@pytest.mark.parametrize("arch", ["llama", "gpt2", "bert", "moe", "deepseek"])
def test_costs_are_the_models_flops(arch):
    model = small(arch)
    blocks, _, head = card_of(model).costs
    assert sum(blocks) + head == pytest.approx(flops_per_token(model))


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("pp", "dp", "zero", "tp"), [(2, 1, 0, 1), (4, 2, 0, 1), (2, 2, 1, 1), (2, 2, 3, 2)])
def test_every_parameter_is_owned_once(name, tied, pp, dp, zero, tp):
    model = small(tied=tied)
    replicate, shard = (1, dp) if zero else (dp, 1)
    layout = Layout(
        pp=pp,
        dp_replicate=replicate,
        dp_shard=shard,
        zero=zero,
        tp=tp,
        schedule=name,
        virtual_stages=STAGES[name],
    )
    owned: Counter[str] = Counter()
    for rank in range(layout.ranks):
        for parameter, part in held(card_of(model), layout, rank).items():
            owned[parameter] += size_of(part.keeps) * part.owned
    assert owned == {parameter: prod(shape) for parameter, shape in card_of(model).parameters.items()}
    assert owned.total() == count_parameters(model)


@pytest.mark.parametrize("arch", ["llama", "gpt2", "bert"])
@pytest.mark.parametrize("tied", [False, True])
def test_stages_one_after_the_other_are_the_model(arch, tied):
    model = small(arch, tied)
    layout = Layout(pp=2, schedule="zbv")
    whole = build_model(model, device="cpu", seed=1)
    card, made = card_of(model), lambda: build_model(model, device="meta")
    stages = {n: s for index in range(2) for n, s in split(card, layout, index, made).items()}
    names: list[str] = []
    for stage in stages.values():
        stage.to_empty(device="cpu")
        init_weights(stage, 1, model)
        names += [n for n, _ in stage.named_parameters()]
    assert Counter(names) == Counter([n for n, _ in whole.named_parameters()] + ["embed.weight"] * tied)
    tokens = torch.arange(32).view(2, 16) % 64
    x = tokens
    for number in range(4):
        x = stages[number](x, tokens if stages[number].last else None, positions_T=torch.arange(16))
    assert torch.equal(x, whole(tokens, tokens))


# The runner


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 5), (4, 8)])
def test_receives_ahead_changes_nothing_else(name, ranks, microbatches):
    schedule = build(name, ranks, microbatches, STAGES[name])
    for actions in with_transfers(schedule):
        ahead = receives_ahead(actions)
        is_receive = [a.kind.startswith("RECV") for a in ahead]
        assert [a for a, r in zip(ahead, is_receive, strict=True) if not r] == [
            a for a in actions if not a.kind.startswith("RECV")
        ]
        assert [a for a, r in zip(ahead, is_receive, strict=True) if r] == [
            a for a in actions if a.kind.startswith("RECV")
        ]
        for action in actions:
            if action.kind.startswith("RECV"):
                passed = actions[ahead.index(action) : actions.index(action)]
                assert sum(a.computes for a in passed) <= 1, "one computation ahead, no more"


def record(rank: int, world: int, recipe: Recipe) -> tuple[Schedule, Timeline, float, list[float]]:
    """A recorded step: schedule, timeline, most microbatches held at once, loss of two equal steps."""
    data = prepare(recipe)
    recipe = resolve(recipe, vocab_size=data.vocab_size)
    state = build_state(recipe, ranks_of(rank, world))
    batches = batches_of(recipe, data)
    share = share_of(
        batches, 0, recipe.train.global_batch_size, recipe.train.microbatch_size or 1, state.mesh
    )
    assert state.parallel.pipeline is not None
    most = 0

    def counting(self: pipeline_._Run, action: Action) -> None:
        nonlocal most
        forward(self, action)
        most = max(most, len(self.kept) + len(self.owed))

    def on_one_clock(events: Any, began: float, *more: Any) -> Timeline:
        """In seconds of the machine's clock, which its processes share; they leave the barrier one by one."""
        return gather(events, 0.0, *more)

    forward, gather = pipeline_._Run._forward, pipeline_._gather
    pipeline_._Run._forward, pipeline_._gather = counting, on_one_clock
    try:
        state.parallel.pipeline.recording, losses = True, []
        for in_order in (False, True):  # as on CPUs, and as on GPUs
            state.parallel.pipeline.in_order = in_order
            pipeline_.Pipeline._actions.cache_clear()
            losses.append(forward_backward(state, share, 0).item())
    finally:
        pipeline_._Run._forward, pipeline_._gather = forward, gather
    assert state.parallel.pipeline.recorded is not None
    return *state.parallel.pipeline.recorded, most, losses


ROUNDS = "interleaved,round_microbatches=2"


@pytest.mark.parametrize("name", slow_but(["1f1b", "dualpipev"], [*SCHEDULES, ROUNDS]))
def test_what_runs_is_what_was_planned(room, name):
    """The measured timeline has the schedule's actions in its order, each after what it needs; never more microbatches
    are held than it says; with dropout, the same step has the same loss, in either order of messages."""
    name, _, more = name.partition(",")
    recipe = tiny(room, line(name, 4, f",{more}"), "model.layers=8")  # (verify's recipes have no dropout)
    answers = run_ranks(4, record, change(recipe, ["model.dropout=0.1"]))
    schedule, timeline = answers[0][:2]
    assert schedule == Layout.from_recipe(recipe.layout).pipeline(recipe.train.global_batch_size)
    for rank, (_, other, most, losses) in enumerate(answers):
        assert other == timeline, "all ranks know the whole"
        assert [event.action for event in timeline.rows[rank]] == list(schedule.rows[rank])
        assert most == peak_live(schedule)[rank]
        assert losses[0] == losses[1]
        ends = {owner for stage, owner in enumerate(schedule.rank_of) if (stage + 1) % schedule.length == 0}
        assert (losses[0] > 0) == (rank in ends), "only the last stage has the loss"
    ends = {event.action: event.end for event in timeline.events()}
    for action, start, _ in timeline.events():
        if action.kind == "F" and action.stage % schedule.length:
            assert start > ends[Action(action.stage - 1, "F", action.microbatch)]


def test_weight_gradients_later():
    """I leaves the products of the linear layers, and nothing else; W makes them; together they are B."""
    model = small("gpt2", layers=2)
    module = build_model(model, device="cpu")
    tokens = torch.arange(32).view(2, 16) % 64
    module(tokens, tokens).backward()
    wanted = {name: p.grad for name, p in module.named_parameters()}
    module.zero_grad()
    deferred = Deferred()
    attach(module, deferred)
    module(tokens, tokens).backward()
    for name, p in module.named_parameters():  # B
        assert p.grad is not None
        torch.testing.assert_close(p.grad, wanted[name], rtol=1e-5, atol=1e-7)
    module.zero_grad()
    queue = deferred.collect(module(tokens, tokens).backward)
    missing = {name for name, p in module.named_parameters() if p.grad is None}
    assert missing == {
        n for n in wanted if n.startswith("blocks.") and n.endswith("weight") and "norm" not in n
    }
    assert len(queue) == len(missing)
    seen = []
    for name, p in module.named_parameters():
        p.register_post_accumulate_grad_hook(lambda p, name=name: seen.append(name))
    while queue:
        queue.popleft()()
    assert set(seen) == missing, "hooks on the parameters see what comes later"
    for name, p in module.named_parameters():
        torch.testing.assert_close(p.grad, wanted[name], rtol=1e-5, atol=1e-7)


# Runs


def validate(rank: int, world: int, recipe: Recipe, sequences: int) -> dict[str, float]:
    data = prepare(recipe)
    recipe = resolve(recipe, vocab_size=data.vocab_size)
    state = build_state(recipe, ranks_of(rank, world))
    batches = in_order(recipe, data, data.train, sequences)
    return evaluate(state, rows_of(batches, sequences, 2, state.mesh), None)


@pytest.mark.parametrize(
    ("name", "sequences"),
    slow_but(
        [("1f1b", 7), ("interleaved", 1), ("zbv", 24)],
        [(n, s) for n in ("1f1b", "interleaved", "zbv", "dualpipe") for s in (1, 7, 24)],
    ),
)
def test_validation_is_that_of_one_process(room, name, sequences):
    """Also of a last microbatch that is smaller, and of more microbatches than sends may be under way."""
    recipe = tiny(room, line(name, 2))
    one = validate(
        0, 1, change(recipe, ["layout.pp=1", "layout.schedule=1f1b", "layout.virtual_stages=1"]), sequences
    )
    for got in run_ranks(2, validate, recipe, sequences):
        assert got == pytest.approx(one, rel=1e-6)


@pytest.mark.parametrize("name", ["zbv", *slow("dualpipe")])
def test_a_run_moves_between_pipelines(room, tmp_path, name):
    """Saved at pp 2, gone on with at pp 4 and in one process: the losses are those of one process all along. On the
    way the timeline of a step is drawn."""
    sets = ["model.layers=8", "optim.schedule=constant", "observe.tracker=none", "train.val_sequences=4"]
    recipe = tiny(room, "dp=1", *sets, "train.val_every=100", "data.val_fraction=0.1")
    train_rank(0, 1, change(recipe, ["train.steps=6"]), tmp_path / "one")
    run = tmp_path / "run"
    first = change(recipe, ["train.steps=2", "observe.trace_step=2"], line(name, 2))
    run_ranks(2, train_rank, first, run)
    run_ranks(4, train_rank, change(recipe, ["train.steps=4"], line("1f1b", 4)), run, True)
    train_rank(0, 1, change(recipe, ["train.steps=6"]), run, True)

    one = tmp_path / "one"
    assert lines(run, "loss") == pytest.approx(lines(one, "loss"), rel=1e-5)
    assert lines(run, "grad_norm") == pytest.approx(lines(one, "grad_norm"), rel=1e-4)
    a, b = stored.load(store.latest(one)), stored.load(store.latest(run))
    assert a.model.keys() == b.model.keys()
    picture = run / "traces" / "pipeline-step-00000002.svg"
    assert picture.read_text().count("</svg>") == 3
    assert all("step-00000002" in file.name for file in picture.parent.iterdir()), "of no other step"
    facts = json.loads(picture.with_suffix(".json").read_text())
    assert [len(row) for row in facts["measured"]["rows"]] == [len(row) for row in facts["planned"]["rows"]]
    assert facts["planned"]["makespan_s"] <= facts["measured"]["makespan_s"]


def test_the_picture_plans_with_measured_costs(tmp_path):
    schedule = build("zb_h1", 2, 3)
    rows = [
        [Event(a, 2 * s, 2 * e) for a, s, e in row] for row in simulate(schedule).rows
    ]  # all takes 2 s, B 4 s
    measured = Timeline(tuple(map(tuple, rows)))
    facts = json.loads(write_pipeline_trace(tmp_path, 1, schedule, measured).with_suffix(".json").read_text())
    assert facts["planned"] == facts["measured"]
