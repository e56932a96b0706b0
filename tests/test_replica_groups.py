"""Training on replica groups that synchronise every few steps: equals a simulation in one process, resumes exactly,
counted."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import stored
import torch
from layouts import tiny
from marks import all_but, only
from parity import joined, pieces, share, state_of
from pool_runs import assert_close_tensors, assert_same_tensors, lines, ranks_of, train_rank
from ranks import run_ranks
from steps import planned
from torch import Tensor

from fivefold.checkpoint import store
from fivefold.data import prepare
from fivefold.errors import UserError
from fivefold.models.base import build
from fivefold.optim import OPTIMIZERS, learning_rate
from fivefold.parallel.diloco import sum_int8
from fivefold.parallel.mesh import Mesh
from fivefold.recipe import Recipe, change, load, resolve
from fivefold.recipe.rules.combinations import notes
from fivefold.schedules.compression import INT8
from fivefold.sharding.layout import Layout
from fivefold.sharding.sync import ReplicaGroups, outer_messages
from fivefold.step.step import take_step
from fivefold.train.share import batches_of
from fivefold_plan.cluster.clusters import parse
from fivefold_plan.cluster.devices import Cluster
from fivefold_plan.messages import volume
from fivefold_plan.predict import Plan, predict
from fivefold_plan.trace.depth import depths, exact
from fivefold_plan.trace.traffic import Collectives

DILOCO = ["sync.method=diloco", "sync.every=3"]


@pytest.fixture(scope="module")
def room(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("replica_groups")


def resolved(room: Path, layout: str, *overrides: str) -> Recipe:
    """verify's tiny model on replica groups: 9 steps."""
    recipe = sited(room, layout, "train.steps=9", "optim.schedule=constant", *overrides)
    return resolve(recipe, vocab_size=prepare(recipe).vocab_size)


def sited(room: Path, layout: str, *overrides: str) -> Recipe:
    """The same, not resolved, with fields of [sync]: verify itself trains all ranks together."""
    return change(tiny(room, layout), overrides)


def source_of(recipe: Recipe):
    data = prepare(recipe)
    return batches_of(recipe, data)


def trained(rank: int, world: int, recipe: Recipe, count: int) -> dict[str, Any]:
    """Loss and norm of each step, the replica group's weights and the common ones after the last."""
    state, source = state_of(rank, world, recipe), source_of(recipe)
    outer, replica_groups = state.mesh.axis("outer"), state.mesh.axis("replica_groups")
    assert (outer.group is replica_groups.group) == (not recipe.replica_groups.overlap), (
        "sums that overlap share no group with others"
    )
    done = [take_step(state, recipe, share(state, recipe, source, step)) for step in range(count)]
    common = state.outer.weights if state.outer else state.masters()
    return {
        "replica_group": state.mesh.index("replica_groups"),
        "loss": [d.loss for d in done],
        "norm": [d.norm for d in done],
        "own": pieces(state, state.masters()),
        "common": pieces(state, common),
    }


def simulated(
    recipe: Recipe,
    replica_groups: int,
    count: int,
    away: Callable[[int, int], bool] = lambda replica_group, step: False,
) -> dict[str, Any]:
    """The same in one process, written out: replica group after replica group in plain PyTorch, then an outer step by
    hand. away: True if a replica group does not take this step, nor part in the outer step after it."""
    source, optim, sync = source_of(recipe), recipe.optim, recipe.sync
    modules = [
        build(recipe.model, device="cpu", seed=recipe.train.seed).train() for _ in range(replica_groups)
    ]
    inner = []
    for module in modules:
        decayed = [p for p in module.parameters() if p.dim() >= 2]
        others = [p for p in module.parameters() if p.dim() < 2]
        groups = [
            {"params": decayed, "weight_decay": optim.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
        card = OPTIMIZERS[optim.name]
        inner.append(card.build(groups, optim.lr, **{name: getattr(optim, name) for name in card.fields}))
    common = {name: p.detach().clone() for name, p in modules[0].named_parameters()}
    velocity: dict[str, Tensor] = {}
    sent: dict[str, Tensor] = {}
    found: dict[str, Any] = {"loss": [], "norm": []}
    rows = recipe.train.global_batch_size // replica_groups
    last = recipe.train.steps or 0
    for step in range(count):
        losses, norms = [], []
        for replica_group, module in enumerate(modules):
            if away(replica_group, step):
                continue
            x, y = (
                torch.as_tensor(t)
                for t in source.batch(step, range(replica_group * rows, (replica_group + 1) * rows))[:2]
            )
            loss = module(x, y)
            inner[replica_group].zero_grad()
            loss.backward()
            norm = torch.nn.utils.get_total_norm([p.grad for p in module.parameters() if p.grad is not None])
            if optim.grad_clip and norm > optim.grad_clip:
                for p in module.parameters():
                    p.grad *= optim.grad_clip / norm
            lr = learning_rate(
                step, total=last, warmup=0, lr=optim.lr, min_lr=optim.lr, schedule=optim.schedule
            )
            for group in inner[replica_group].param_groups:
                group["lr"] = lr
            inner[replica_group].step()
            losses.append(loss.item())
            norms.append(norm.item())
        found["loss"].append(sum(losses) / replica_groups)
        found["norm"].append(sum(norms) / replica_groups)
        parts = [[n for names in some for n in names] for some in outer_messages(common, sync.fragments)]
        ends = step + 1 == last
        with torch.no_grad():
            for fragment in recipe.replica_groups.due(step + 1, last):
                there = [
                    module for replica_group, module in enumerate(modules) if not away(replica_group, step)
                ]
                sent |= outer_gradients(there, common, parts[fragment])
            for fragment in recipe.replica_groups.arriving(step + 1, last):
                own = 0.5 if sync.overlap and not ends else 0.0
                due = {name: sent.pop(name) for name in parts[fragment]}
                outer_step(modules, common, velocity, due, sync.outer_lr, sync.outer_momentum, own)
    found["own"] = [dict(module.named_parameters()) for module in modules]
    return found | {"common": common}


def outer_gradients(modules, common, names: list[str]) -> dict[str, Tensor]:
    own = [dict(module.named_parameters()) for module in modules]
    return {name: sum(common[name] - w[name] for w in own) / len(own) for name in names}


def outer_step(modules, common, velocity, sent: dict[str, Tensor], lr, momentum, share: float) -> None:
    """share: of a replica group's own weights that it keeps."""
    for name, gradient in sent.items():
        weight = common[name]
        if momentum is not None:
            velocity[name] = momentum * velocity.get(name, 0) + gradient
            gradient = gradient + momentum * velocity[name]
        weight -= lr * gradient
        for module in modules:
            w = dict(module.named_parameters())[name]
            w.copy_(share * w + (1 - share) * weight)


def assert_simulated(answers: list[dict[str, Any]], wanted: dict[str, Any]) -> None:
    for answer in answers:
        assert answer["loss"] == pytest.approx(wanted["loss"], rel=1e-5)
        assert answer["norm"] == pytest.approx(wanted["norm"], rel=1e-4)
    for replica_group, own in enumerate(wanted["own"]):
        mine = [answer for answer in answers if answer["replica_group"] == replica_group]
        assert_close_tensors(joined(mine, "own"), own, f"replica group {replica_group}:")
        assert_close_tensors(
            joined(mine, "common"), wanted["common"], f"common weights in replica group {replica_group}:"
        )


@only("dp=2-sync0", "dp=2-sync2", "dp_replicate=*", "dp=2,pp=2*")
@pytest.mark.parametrize(
    ("layout", "sync"),
    [
        ("dp=2", DILOCO),
        ("dp=2", ["sync.method=local", "sync.every=2"]),
        ("dp=2", [*DILOCO, "sync.fragments=3"]),  # streaming
        ("dp=2", [*DILOCO, "sync.fragments=3", "sync.overlap=2"]),  # a sum is always under way
        ("dp_replicate=2,dp_shard=2,zero=2", DILOCO),  # a replica group shards its states
        ("dp=4", [*DILOCO, "sync.replica_groups=2"]),  # a replica group has two replicas
        ("dp=2,pp=2", DILOCO),  # its ranks are not neighbours
        pytest.param("dp=2,tp=2,sp=true", DILOCO, marks=pytest.mark.slow),
        pytest.param("dp=4", DILOCO, marks=pytest.mark.slow),
    ],
)
def test_equals_the_simulation(room: Path, layout: str, sync: list[str]) -> None:
    """Seven steps: the last outer step lies behind, and the replica groups have parted again."""
    recipe = resolved(room, layout, *sync, "optim.eps=1e-4", "optim.weight_decay=0.05")
    answers = run_ranks(Layout.from_recipe(recipe.layout).ranks, trained, recipe, 7)
    assert_simulated(answers, simulated(recipe, recipe.replica_groups.count, 7))


@pytest.mark.parametrize("mode", ["fp32", "fp8"])
def test_local_sgd_in_every_step_is_data_parallelism(room: Path, mode: str) -> None:
    """Plain SGD is linear in the gradient: the mean of the updated weights is the update by the mean gradient."""
    sgd = ["optim.name=sgd", "optim.lr=0.1", "optim.grad_clip=0", f"precision.mode={mode}"]
    apart = resolved(room, "dp=2", "sync.method=local", "sync.every=1", *sgd)
    (one, other), (wanted, _) = (
        run_ranks(2, trained, recipe, 3) for recipe in (apart, resolved(room, "dp=2", *sgd))
    )
    assert_same_tensors(joined([one], "own"), joined([one], "common"))
    assert_same_tensors(joined([one], "own"), _pieces(other))
    assert one["loss"] == pytest.approx(wanted["loss"], rel=1e-6)
    assert_close_tensors(joined([one], "own"), joined([wanted], "own"))


def _pieces(answer: dict[str, Any]) -> dict[str, Tensor]:
    return joined([answer], "own")


def test_what_is_due_when() -> None:
    one, four = ReplicaGroups(2, 10), ReplicaGroups(2, 10, 4)
    assert [step for step in range(1, 36) if one.due(step, 35)] == [10, 20, 30, 35]
    assert {step: four.due(step, 99) for step in range(1, 21) if four.due(step, 99)} == {
        2: (0,), 5: (1,), 7: (2,), 10: (3,), 12: (0,), 15: (1,), 17: (2,), 20: (3,),
    }  # fmt: skip
    assert four.due(21, 21) == (0, 1, 2, 3)
    assert one.aligned(0, 35)
    assert one.aligned(10, 35)
    assert not one.aligned(11, 35)
    assert not four.aligned(10, 99)
    assert four.aligned(99, 99)
    late = ReplicaGroups(2, 10, overlap=4)
    assert [(step, late.due(step, 22), late.arriving(step, 22)) for step in (10, 14, 20, 22)] == [
        (10, (0,), ()), (14, (), (0,)), (20, (), ()), (22, (0,), (0,)),
    ], "what starts at 20 would arrive after the end"  # fmt: skip
    assert not late.aligned(14, 22)
    assert [replace(four, overlap=tau).at_once for tau in (0, 2, 3, 9)] == [1, 1, 2, 4]


def test_fragments_divide_the_parameters() -> None:
    names = [
        "embed.weight",
        *(f"blocks.{i}.{leaf}" for i in range(5) for leaf in "ab"),
        "norm.weight",
        "head.weight",
    ]
    assert outer_messages(names, 2) == [
        [
            ("embed.weight",),
            ("blocks.0.a", "blocks.0.b"),
            ("blocks.2.a", "blocks.2.b"),
            ("blocks.4.a", "blocks.4.b"),
        ],
        [("blocks.1.a", "blocks.1.b"), ("blocks.3.a", "blocks.3.b"), ("norm.weight", "head.weight")],
    ]
    for fragments in (1, 2, 3, 5):
        sent = [
            name for fragment in outer_messages(names, fragments) for message in fragment for name in message
        ]
        assert sorted(sent) == sorted(names)


def test_streaming_leaves_fragments_that_are_not_due(room: Path) -> None:
    """After step 1 of 2 only the first of two fragments is common to both replica groups."""
    recipe = resolved(room, "dp=2", "sync.method=diloco", "sync.every=2", "sync.fragments=2")
    one, other = (_pieces(answer) for answer in run_ranks(2, trained, recipe, 1))
    first = {name for message in outer_messages(one, 2)[0] for name in message}
    assert {name for name in one if torch.equal(one[name], other[name])} == first


def summed(rank: int, world: int, size: int) -> tuple[Tensor, Tensor]:
    """(the int8 sum, this rank's summand)."""
    axis = Mesh(Layout(dp_replicate=world), ranks_of(rank, world), world).axis("replica_groups")
    x = torch.randn(size, generator=torch.Generator().manual_seed(rank))
    return sum_int8(x.clone(), axis), x


@pytest.mark.parametrize("size", [1, 700, 2048])
def test_int8_sums_have_the_same_bits_on_all_ranks(size: int) -> None:
    answers = run_ranks(4, summed, size)
    sums, wanted = [found for found, _ in answers], sum(x for _, x in answers)
    assert all(torch.equal(found, sums[0]) for found in sums)
    assert ((sums[0] - wanted).abs().max() <= (4 * 0.5 * 4.5 + 0.5 * 9) / 127).all(), "two roundings"
    assert (sums[0] - wanted).norm() < 0.02 * wanted.norm()


@pytest.mark.parametrize("dtype", ["bf16", "int8"])
def test_outer_gradients_may_be_rounded(room: Path, dtype: str) -> None:
    """The outer step is off by what rounding the outer gradient allows, and replica groups stay equal."""
    recipe = resolved(room, "dp=2", "sync.method=diloco", "sync.every=2")
    exact = run_ranks(2, trained, recipe, 2)[0]
    rounded, other = run_ranks(2, trained, change(recipe, [f"sync.outer_dtype={dtype}"]), 2)
    assert_same_tensors(_pieces(rounded), _pieces(other))
    first = run_ranks(2, trained, recipe, 0)[0]
    for name, start in _pieces(first).items():
        moved, off = _pieces(exact)[name] - start, _pieces(rounded)[name] - _pieces(exact)[name]
        assert 0 < off.norm() < 0.01 * moved.norm(), name


def poisoned(rank: int, world: int, recipe: Recipe) -> dict[str, Any]:
    """A step in which only the second replica group's gradient is not finite, then a good one."""
    state, source = state_of(rank, world, recipe), source_of(recipe)

    def poison() -> None:
        if state.step == 0 and rank == 1:
            next(iter(state.gradients().values())).fill_(float("nan"))

    before = [w.clone() for w in state.masters().values()]
    first = take_step(state, recipe, share(state, recipe, source, 0), inspect=poison)
    kept = all(torch.equal(a, b) for a, b in zip(before, state.masters().values(), strict=True))
    second = take_step(state, recipe, share(state, recipe, source, 1))
    return {"kept": kept, "norms": [first.norm, second.norm], "updates": state.updates}


def test_all_replica_groups_skip_a_step_that_one_cannot_take(room: Path) -> None:
    for answer in run_ranks(2, poisoned, resolved(room, "dp=2", *DILOCO)):
        assert answer["kept"]
        assert answer["norms"][0] != answer["norms"][0], "not a number"
        assert answer["norms"][1] > 0
        assert answer["updates"] == 1


def test_the_run_ends_with_an_outer_step(room: Path) -> None:
    one, other = run_ranks(2, trained, resolved(room, "dp=2", "sync.method=diloco", "sync.every=5"), 9)
    assert_same_tensors(_pieces(one), _pieces(other))
    assert_same_tensors(_pieces(one), joined([one], "common"))


def counted(rank: int, world: int, recipe: Recipe, steps: int) -> list[dict]:
    """What each step sends, and at last what the optimizer and the outer loop keep (bytes)."""
    state, source, found = state_of(rank, world, recipe), source_of(recipe), []
    for step in range(steps):
        with Collectives(state.mesh) as sent:
            take_step(state, recipe, share(state, recipe, source, step))
            assert state.outer
            state.outer.states()  # waits for sums under way
        assert not sent.other
        found.append({key: tuple(entry) for key, entry in sent.found.items()})
    return [*found, {"kept": sum(t.nbytes for t in state.outer.kept())}]


@all_but("dp_replicate=*")
@pytest.mark.parametrize(
    ("layout", "sync"),
    [
        ("dp=2", DILOCO),
        ("dp=2", [*DILOCO, "sync.outer_dtype=int8", "sync.fragments=2", "sync.overlap=1"]),
        ("dp=4", [*DILOCO, "sync.outer_dtype=bf16", "sync.replica_groups=2"]),
        ("dp_replicate=2,dp_shard=2,zero=3", [*DILOCO, "sync.outer_dtype=int8"]),
        ("dp=2,pp=2", ["sync.method=local", "sync.every=3"]),
    ],
)
def test_bytes_are_those_counted(room: Path, layout: str, sync: list[str]) -> None:
    """Of every step: inner ones, and those that synchronise. And of the states that the outer loop keeps."""
    recipe = resolved(room, layout, *sync)
    s = planned(recipe)
    for rank, steps in enumerate(run_ranks(s.layout.ranks * s.replica_groups.count, counted, recipe, 4)):
        own = rank % s.layout.ranks
        for step, found in enumerate(steps[:-1], 1):
            between = volume.outer_counted(s, own, recipe.replica_groups.due(step, 9))
            wanted = dict(volume.counted(s, own))
            for key, (calls, size) in between.items():
                before = wanted.get(key, (0, 0))
                wanted[key] = before[0] + calls, before[1] + size
            assert found == wanted, f"rank {rank}, step {step}"
        elements = sum(sum(volume.outer_elements(s, own, f)) for f in range(recipe.replica_groups.fragments))
        assert steps[-1]["kept"] == elements * s.replica_groups.kept


def test_a_trace_has_the_outer_step(room: Path) -> None:
    """`fivefold plan trace`: its messages, and the states that the outer loop keeps."""
    recipe = resolved(room, "dp=2", *DILOCO, "sync.fragments=2")
    s, found = planned(recipe), exact(recipe, 1, kept=False).step
    (key, (calls, size)), between = volume.counted(s, 0).popitem(), volume.outer_counted(s, 0, (1,))
    assert found.sent == {key: (calls + between[key][0], size + between[key][1])}
    alone = exact(resolved(room, "dp=1"), kept=False).step
    elements = sum(sum(volume.outer_elements(s, 0, f)) for f in range(2))
    more = found.memory.highest["optimizer"] - alone.memory.highest["optimizer"]
    assert more == elements * s.replica_groups.kept
    assert depths(load("llama-7b", []).model, Layout(), 0, 5) == (7, 12)


def test_an_average_step_sends_its_share(room: Path) -> None:
    """Two replica groups: a ring sends as many bytes as it sums. Fragments change when, and int8 how much."""
    s = planned(resolved(room, "dp=2", "sync.method=diloco", "sync.every=8"))
    every = planned(resolved(room, "dp=2"))
    size, control = 4 * sum(volume.outer_elements(s, 0, 0)), 32
    assert volume.sent(every)["dp"] == size
    assert volume.sent(s) == {"replica_groups": control + size // 8}
    assert volume.sent(replace(s, replica_groups=replace(s.replica_groups, fragments=4))) == volume.sent(s)
    int8 = volume.sent(replace(s, replica_groups=replace(s.replica_groups, dtype="int8")))
    assert int8["replica_groups"] == pytest.approx(size / 4 / 8 * INT8.per_element, rel=0.05)


def plan_of(*sets: str, cluster: Cluster | None = None) -> Plan:
    common = ["model.vocab_size=4096", "train.global_batch_size=64", "train.microbatch_size=4", *sets]
    recipe = load("quickstart", common, "dp_replicate=2,dp_shard=8,zero=1")
    return predict(recipe, cluster or parse("h100:16"))


def test_the_planner_names_the_link_from_which_on_it_wins() -> None:
    together, apart = plan_of(), plan_of("sync.method=diloco")
    found = apart.slow_links
    assert found
    assert together.slow_links is None
    assert found.together == together.step.seconds
    assert found.apart == apart.step.seconds
    assert apart.layout == together.layout
    assert apart.tokens == together.tokens
    assert found.even
    for part, low, high in ((1.0, 1.049, 1.051), (0.05, 1.2, 100)):
        wire = replace(apart.setting.cluster.inter, bandwidth=part * found.even)
        cluster = replace(apart.setting.cluster, inter=wire)
        all_, diloco = (plan_of(f"sync.method={method}", cluster=cluster) for method in ("all", "diloco"))
        assert low < all_.step.seconds / diloco.step.seconds < high


def test_the_planner_prices_how_often_and_what_is_kept() -> None:
    together, apart = plan_of(), plan_of("sync.method=diloco")
    often = plan_of("sync.method=diloco", "sync.every=10")
    assert apart.slow_links
    more = apart.slow_links.outer * (1 / 10 - 1 / 50)
    assert often.step.seconds - apart.step.seconds == pytest.approx(more, rel=1e-6)
    kept = [plan.memory[0].optimizer for plan in (together, apart, plan_of("sync.method=local"))]
    assert kept[1] - kept[0] == 2 * (kept[2] - kept[0]) > 0, "without momentum half as much"


RUN = ["train.val_every=4", "train.val_sequences=6", "observe.tracker=none", "optim.eps=1e-4"]


def run(recipe: Recipe, layout: str, out: Path, steps: int, *sets: str, resume: bool = False) -> None:
    recipe = change(recipe, [f"train.steps={steps}", *sets], layout)
    ranks = Layout.from_recipe(recipe.layout).ranks
    if ranks == 1:
        assert train_rank(0, 1, recipe, out, resume) is None
    else:
        assert run_ranks(ranks, train_rank, recipe, out, resume, timeout_s=60) == [None] * ranks


def saved(run: Path, step: int) -> dict[str, Tensor]:
    found = stored.load(store.folder_of(run, step))
    return {**found.model, **found.optimizer}


@pytest.fixture(scope="module")
def whole(room: Path, tmp_path_factory) -> tuple[Recipe, Path]:
    """A run of two streaming replica groups to its end, saved on its way."""
    sync = [
        "sync.method=diloco",
        "sync.every=4",
        "sync.fragments=2",
        "sync.overlap=1",
        "checkpoint.every=3",
        "checkpoint.keep_last=9",
    ]
    recipe, out = (
        sited(room, "dp=2", *RUN, "optim.schedule=constant", *sync),
        tmp_path_factory.mktemp("whole") / "run",
    )
    run(recipe, "dp=2", out, 10)
    return recipe, out


def cut_off(out: Path, step: int, to: Path) -> Path:
    """A copy of a run that was killed after it had saved this step."""
    shutil.copytree(out, to)
    for folder in store.checkpoints(to):
        if folder != store.folder_of(to, step):
            shutil.rmtree(folder)
    return to


@only("9")
@pytest.mark.parametrize("step", [3, 9])
def test_resumes_with_the_same_bits(whole: tuple[Recipe, Path], tmp_path: Path, step: int) -> None:
    """Between outer steps: every replica group has weights and moments of its own, and one fragment may have no
    momentum yet."""
    recipe, out = whole
    again = cut_off(out, step, tmp_path / "run")
    run(recipe, "dp=2", again, 10, resume=True)
    assert_same_tensors(saved(again, 10), saved(out, 10))
    assert lines(again, "val_loss")[-1] == lines(out, "val_loss")[-1]
    names = saved(out, 3)
    assert {
        "replica_group0.weight.embed.weight",
        "replica_group1.weight.embed.weight",
        "replica_group1.exp_avg.embed.weight",
    } <= names.keys()
    assert "outer.momentum_buffer.embed.weight" in names
    assert "outer.momentum_buffer.norm.weight" not in names
    assert "replica_group0.weight.embed.weight" not in saved(out, 10), "the last step makes them equal"


def test_resumes_in_another_layout_of_the_replica_groups(whole: tuple[Recipe, Path], tmp_path: Path) -> None:
    recipe, out = whole
    again = cut_off(out, 9, tmp_path / "run")
    run(recipe, "dp=2,tp=2", again, 10, resume=True)
    assert_close_tensors(stored.load(store.latest(again)).model, stored.load(store.latest(out)).model)


@pytest.mark.slow
def test_replica_groups_join_and_leave_at_an_outer_step_only(room: Path, tmp_path: Path) -> None:
    """A checkpoint in which all replica groups are equal resumes with any number of them, also with all ranks as
    one."""
    recipe, out = sited(room, "dp=2", *RUN, "optim.schedule=constant", *DILOCO), tmp_path / "run"
    run(recipe, "dp=2", out, 4, "checkpoint.every=3", "checkpoint.keep_last=9")
    aligned = cut_off(out, 3, tmp_path / "aligned")
    run(recipe, "dp=4", aligned, 6, resume=True)  # two join
    meta = store.Reader(store.latest(aligned)).meta
    assert meta["replica_groups"] == {"count": 4, "every": 3, "fragments": 1, "aligned": True}
    run(recipe, "dp=2", aligned, 8, resume=True)  # two leave
    run(recipe, "dp=1", aligned, 9, resume=True)
    assert len(lines(aligned, "loss")) == 9
    run(change(recipe, ["sync.method=all", "sync.every=50"]), "dp=2", aligned, 10, resume=True)
    run(recipe, "dp=2", aligned, 12, resume=True)  # from a run that had no replica groups
    assert store.Reader(store.latest(aligned)).meta["replica_groups"]["count"] == 2


def refused(rank: int, world: int, recipe: Recipe, out: Path) -> str:
    try:
        train_rank(rank, world, recipe, out, True)
    except UserError as error:
        return str(error)
    return ""


def test_other_replica_groups_cannot_resume_between_outer_steps(
    whole: tuple[Recipe, Path], room: Path, tmp_path: Path
) -> None:
    recipe, out = whole
    again = cut_off(out, 9, tmp_path / "run")
    for message in run_ranks(4, refused, change(recipe, ["train.steps=10"], "dp=4"), again):
        wanted = "its 2 replica groups have different weights, so it resumes with as many only, and now there are 4"
        assert wanted in message
        assert "Nearest valid: 2 replica groups, or a checkpoint of step 0 or the last" in message
    plain, out = (
        sited(room, "dp=2", *RUN, *DILOCO, "checkpoint.every=4", "checkpoint.keep_last=9"),
        tmp_path / "plain",
    )
    run(plain, "dp=2", out, 5)
    again = cut_off(out, 4, tmp_path / "again")
    message = refused(0, 1, change(plain, ["train.steps=6"], "dp=1"), again)
    assert message.endswith(
        "Nearest valid: 2 replica groups, or a checkpoint of step 3 or 6 (multiples of sync.every = 3)"
    )


def test_validation_means_the_common_weights(room: Path, tmp_path: Path) -> None:
    """Between outer steps it is the loss of the model that a checkpoint of that step has, and training goes on as if
    nobody had looked."""
    sets = ["optim.schedule=constant", "optim.warmup_steps=0"]
    recipe = sited(room, "dp=2", *RUN, *sets, *DILOCO)
    looked, blind = tmp_path / "looked", tmp_path / "blind"
    run(recipe, "dp=2", looked, 6, "train.val_every=2")
    run(recipe, "dp=2", blind, 6, "train.val_every=3")
    assert lines(looked, "loss") == lines(blind, "loss")
    at = dict(zip((2, 4, 6), lines(looked, "val_loss"), strict=True))
    then = dict(zip((3, 6), lines(blind, "val_loss"), strict=True))
    assert at[4] == then[3], "no outer step between them"
    assert at[6] == then[6] != at[4]


def test_recipes(room: Path) -> None:
    base = tiny(room, "dp=2")
    for sets, words in (
        (["sync.every=4"], "sync.every = 4 has no effect: every step sums gradients"),
        (["sync.method=local", "sync.outer_momentum=0.5"], 'sync.method = "local": it takes the mean weights'),
        (["sync.method=diloco", "sync.replica_groups=3"], "must divide layout.dp_replicate = 2"),
        (["sync.method=diloco", "sync.fragments=5"], "sync.fragments = 5 must be at most sync.every = 50"),
        (["sync.method=diloco", "sync.overlap=50"], "sync.overlap = 50 must be less than sync.every = 50"),
        (["sync.method=diloco", "observe.noise_scale=true"], "no step has the gradient of the whole batch"),
        (["sync.method=dilocco"], "did you mean 'diloco'"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=words.replace("(", r"\(")):
            change(base, sets)
    with pytest.raises(UserError, match="balance its experts"):
        tiny(room, "dp=2", "model.arch=moe", "sync.method=local")
    one = change(base, ["sync.method=diloco"], "dp=1")
    assert notes(one) == [
        'sync.method = "diloco" has no effect in this layout: one replica group has nobody to synchronise with'
    ]
    assert notes(change(base, ["sync.method=diloco"])) == []
    assert resolved(room, "dp=2", "sync.method=local").sync.outer_lr == 1.0
    diloco = resolved(room, "dp=2", "sync.method=diloco").sync
    assert (diloco.outer_lr, diloco.outer_momentum) == (0.7, 0.6)
