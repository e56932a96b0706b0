"""Offload: the same bits as in memory, whatever lies in host memory or on disk."""

import errno
import os
import threading
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import stored
import torch
from layouts import tiny
from marks import all_but, only, slow
from pool_runs import assert_same_tensors, lines, ranks_of, train_rank
from ranks import run_ranks
from steps import counted, planned

from fivefold.checkpoint import store
from fivefold.data import prepare
from fivefold.errors import UserError
from fivefold.parallel.offload import activations
from fivefold.parallel.offload.activations import Activations
from fivefold.parallel.offload.disk import THREADS, Disk, File
from fivefold.parallel.offload.pages import Pages
from fivefold.parallel.offload.update import SLOTS, StreamedUpdater
from fivefold.parallel.parallelize import Parallel
from fivefold.recipe import change, resolve
from fivefold.schedules.timelines import UPDATE
from fivefold.sharding import tiers
from fivefold.sharding.layout import Layout
from fivefold.step.recorder import Recorder
from fivefold.step.state import build_state
from fivefold.step.step import take_step
from fivefold.train.faults import judged, note
from fivefold.train.share import batches_of, share_of
from fivefold_plan.messages import volume
from fivefold_plan.time.offload import streams
from fivefold_plan.trace.memory import Tracker

STEPS = 3


def trained(rank: int, world: int, recipe):
    """Losses and norms of some steps, and weights, moments and gradients after them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(activations, "SMALLEST", 64)
        patch.setattr(tiers, "CHUNK", 2048)  # several chunks per parameter; slots stay larger
        return _trained(rank, world, recipe)


def _trained(rank: int, world: int, recipe):
    data = prepare(recipe)
    recipe, train = resolve(recipe, vocab_size=data.vocab_size), recipe.train
    state = build_state(recipe, ranks_of(rank, world))
    batches = batches_of(recipe, data)
    figures = []
    for step in range(STEPS):
        share = share_of(batches, step, train.global_batch_size, train.microbatch_size or 1, state.mesh)
        done = take_step(state, recipe, share)
        figures += [done.loss, done.norm]
    kept = {
        **state.masters(),
        **state.moments(),
        **{f"gradient of {n}": t for n, t in state.gradients().items()},
    }
    found = {name: t.clone() for name, t in kept.items()}
    if isinstance(state.parallel.activations, Activations):
        assert state.parallel.activations.moved > 0
        assert state.parallel.activations.held == 0, "every copy is given back"
    state.parallel.close()
    return figures, found


def compared(recipe, offload: str, folder: Path) -> None:
    world = Layout.from_recipe(recipe.layout).ranks
    away = change(recipe, [f"layout.offload={offload}", f"layout.offload_dir={folder / 'away'}"])
    for (one, kept), (other, same) in zip(
        *(
            run_ranks(world, trained, r, timeout_s=60) if world > 1 else [trained(0, 1, r)]
            for r in (recipe, away)
        ),
        strict=True,
    ):
        assert one == other
        assert kept.keys() == same.keys()
        for name in kept:
            if not (
                name.startswith("gradient") and offload in ("all:disk", "states:host")
            ):  # there not clipped
                assert torch.equal(kept[name], same[name]), name
    assert not (folder / "away").exists() or not [*(folder / "away").iterdir()]


QUICK = [
    ("states:disk", "bf16", "dp=1", []),
    ("states:disk", "fp32", "dp=1", ["optim.name=momentum", "optim.lr=0.05", "optim.grad_clip=0.1"]),
    ("all:disk", "bf16", "dp=2,ep=2", []),
    ("states:host", "bf16", "tp=2", []),
    ("activations", "bf16", "tp=2,recompute=full", []),
    ("activations:tp", "bf16", "tp=2,recompute=full", []),
    ("states:disk", "fp32", "dp=2,zero=1", ["optim.name=sophia", "optim.estimate_every=2"]),
    ("states:host", "bf16", "dp=2,zero=2", ["optim.grad_clip=0.1"]),
    ("all:disk", "bf16", "dp=2,zero=3", ["optim.grad_clip=0.1"]),
    ("all:disk", "bf16", "pp=2", []),
    ("all:disk", "bf16_pure", "dp=1", ["precision.rounding=kahan", "optim.grad_clip=0.1"]),
]
NO_SKIPS = ["optim.grad_clip=0", "faults.on_nonfinite=abort"]
EARLY = ",offload_update=early"
STRONGHOLD = f"{EARLY},offload_window=3"
QUICK += [
    ("all:host", "bf16", f"dp=1{STRONGHOLD}", NO_SKIPS),
    ("states:host", "bf16", f"dp=2,zero=2{EARLY}", NO_SKIPS),
]
SLOW = [
    ("all:host", "fp32", f"dp=1,recompute=full{STRONGHOLD}", [*NO_SKIPS, "optim.name=nadam"]),
    ("all:disk", "bf16_pure", f"dp=1{STRONGHOLD}", [*NO_SKIPS, "precision.rounding=kahan"]),
    ("all:host", "bf16", f"dp=2{STRONGHOLD}", [*NO_SKIPS, "optim.name=sophia"]),
    ("all:host", "bf16", f"dp=2,zero=1{STRONGHOLD}", NO_SKIPS),
    ("all:host", "bf16", f"dp=2,zero=2{STRONGHOLD}", NO_SKIPS),
    ("all:host", "bf16", f"dp=2,zero=3{STRONGHOLD}", NO_SKIPS),
    ("all:host", "bf16", f"cp=2{STRONGHOLD}", NO_SKIPS),
    ("all:host", "bf16", f"pp=2{STRONGHOLD}", NO_SKIPS),
    ("all:host", "bf16", f"pp=2,schedule=zbv,virtual_stages=2{STRONGHOLD}", NO_SKIPS),
    ("all:disk", "bf16", f"dp=2,pp=2,zero=1{STRONGHOLD}", NO_SKIPS),
    ("all:disk", "bf16", f"dp_replicate=2,dp_shard=2,zero=3{STRONGHOLD}", NO_SKIPS),
    ("all:disk", "bf16", f"dp=2,ep=2{STRONGHOLD}", NO_SKIPS),
    ("all:host", "bf16", "tp=2,offload_window=4", []),
    ("states:host", "bf16", f"dp=1{EARLY}", [*NO_SKIPS, "optim.name=sgd", "optim.lr=0.05"]),
    ("states:host", "bf16", f"dp=2,pp=2,schedule=zb_h1{EARLY}", NO_SKIPS),
    ("all:disk", "fp32", "dp=1,recompute=full", []),
    ("states:host", "bf16", "dp=1", []),
    ("states:disk", "bf16", "dp=2,zero=1", ["optim.name=nesterov"]),
    ("activations", "bf16", "dp=1", []),
    ("all:disk", "bf16", "dp=1", ["optim.name=adamsage", "optim.grad_clip=0.1"]),
    ("states:disk", "bf16_pure", "dp=2,zero=1", []),
    ("states:host", "bf16_pure", "tp=2", []),
    ("all:disk", "bf16", "dp=1", ["optim.grad_clip=0.1"]),
    ("states:host", "bf16", "pp=2", []),
    ("activations:tp", "fp32", "tp=2,pp=2,recompute=full", []),
    ("activations:tp", "bf16", "tp=2,dp=2,zero=3,recompute=full", ["model.dropout=0.1"]),
    ("activations", "bf16", "pp=2", []),
    ("activations", "fp32", "dp=1,recompute=full", []),
    ("activations", "bf16", "dp=1,recompute=ops:attention+gate+norm", []),
    ("activations", "bf16", "tp=2,sp=true", []),
    ("activations", "bf16", "dp=2,zero=3", []),
    ("activations", "bf16", "cp=2", []),
    ("activations", "bf16", "dp=2,ep=2", []),
    ("states:disk", "bf16", "dp=2,zero=3", []),
    ("all:disk", "bf16", "dp=2", []),
    ("all:disk", "bf16", "tp=2", []),
    ("all:disk", "bf16", "cp=2", []),
    ("states:disk", "bf16", "pp=2", []),
    ("states:disk", "bf16", "tp=2,sp=true", []),
    ("states:host", "bf16", "dp=2,zero=1", []),
    ("states:host", "bf16", "dp=2,zero=3", []),
    ("states:host", "fp32", "dp=2,zero=3,recompute=full", []),
    ("states:host", "bf16_pure", "dp=2,zero=2", []),
    ("states:host", "bf16", "dp_replicate=2,dp_shard=2,zero=1", []),
    ("states:host", "bf16", "dp_replicate=2,dp_shard=2,zero=2", ["optim.grad_clip=0.1"]),
    ("states:host", "bf16", "dp=2,tp=2,zero=2", []),
    ("states:host", "bf16", "dp=2,pp=2,zero=2", []),
    ("states:disk", "bf16", "dp=2,pp=2,zero=1,schedule=zbv,virtual_stages=2", []),
    ("states:host", "bf16", "dp=4,ep=2,zero=2", []),
    ("states:host", "bf16", "dp=2,zero=3,zeropp=weights,hier,gradients,ranks_per_node=1", []),
    ("states:disk", "bf16", "dp_replicate=2,dp_shard=2,zero=3", []),
    ("all:host", "bf16", "dp=1", []),
    ("all:host", "bf16", "dp=2,zero=1", []),
    ("all:host", "bf16", "dp=2,zero=3", []),
    ("all:disk", "bf16", "dp=2,zero=1", []),
    ("all:disk", "bf16", "dp=2,zero=2", []),
    ("all:disk", "fp32", "dp=2,zero=3,recompute=full", []),
    ("all:disk", "bf16_pure", "dp=2,zero=3", ["precision.rounding=kahan"]),
    ("all:disk", "bf16", "dp=2,tp=2,zero=3", []),
    ("all:disk", "bf16", "cp=2,zero=3", []),
    ("all:disk", "bf16", "dp=4,ep=2,zero=3", []),
    ("all:disk", "bf16", "dp_replicate=2,dp_shard=2,zero=3", []),
    ("all:disk", "bf16", "dp=2,pp=2,zero=3", []),
    ("all:disk", "bf16", "dp=2,pp=2,zero=1,schedule=zbv,virtual_stages=2", []),
    ("all:disk", "bf16", "pp=2,recompute=full", []),
    ("all:disk", "bf16", "pp=2,schedule=zbv,virtual_stages=2", []),
    ("all:host", "bf16", "pp=2,schedule=interleaved,virtual_stages=2", []),
    ("states:host", "bf16", "pp=2,schedule=zbv,virtual_stages=2", []),
    ("states:host", "bf16", "dp=2,pp=2,schedule=zb_h1", ["model.tie_embeddings=false"]),
    ("states:host", "bf16", "dp=2,pp=2,schedule=zbv,virtual_stages=2", []),
    ("states:disk", "bf16", "dp=2,ep=2", []),
    ("states:disk", "bf16", "dp=2,ep=2,zero=3", []),
    ("states:host", "bf16", "dp=1", ["optim.name=adagrad", "optim.lr=0.05"]),
    ("all:disk", "fp32", "dp=1", ["optim.name=adagrad", "optim.lr=0.05"]),
    ("states:disk", "fp32", "dp=1", ["optim.name=rmsprop", "optim.lr=1e-4"]),
    ("all:disk", "bf16", "tp=2", ["optim.name=rmsprop", "optim.lr=1e-4"]),
    ("states:host", "bf16", "pp=2", ["optim.name=radam"]),
    ("all:disk", "bf16", "dp=2", ["optim.name=radam"]),
    ("states:disk", "bf16", "dp=2,zero=3", ["optim.name=nadam"]),
    ("all:disk", "bf16", "dp=1", ["optim.name=nadam"]),
    ("states:host", "bf16", "tp=2", ["optim.name=adamsage"]),
    ("states:disk", "bf16", "dp=2,zero=3", ["optim.name=lion"]),
    ("all:disk", "bf16", "cp=2", ["optim.name=lion"]),
    ("states:host", "fp32", "dp=1", ["optim.name=sophia"]),
    ("all:disk", "bf16", "dp=2,ep=2", ["optim.name=sophia", "optim.estimate_every=2"]),
    ("states:disk", "bf16", "dp=1", ["optim.name=adam"]),
    ("states:host", "bf16", "dp=1", ["optim.name=sgd", "optim.lr=0.05"]),
    ("states:disk", "fp8", "dp=2", []),
    ("all:disk", "fp8", "dp=1", []),
    ("states:disk", "bf16_pure", "dp=1", ["optim.grad_clip=0.1"]),
    ("states:disk", "bf16_pure", "tp=2,dp=2,zero=3", ["precision.rounding=kahan"]),
    ("states:host", "bf16_pure", "dp=1", ["precision.rounding=nearest", "optim.name=sophia"]),
    ("states:host", "bf16_pure", "pp=2", ["optim.name=radam"]),
    ("all:disk", "bf16_pure", "dp=2,ep=2", ["optim.name=sgd", "optim.lr=0.05"]),
    ("all:disk", "bf16_pure", "tp=2,recompute=full", ["optim.name=lion", "precision.rounding=kahan"]),
]
CASES = [*QUICK, *slow(*SLOW)]


@all_but(
    "activations:tp-bf16-tp=2,recompute=full*",
    "states:host-bf16-tp=2*",
    "states:host-bf16-dp=2,zero=2-*",
)
@pytest.mark.parametrize(("offload", "mode", "layout", "sets"), CASES)
def test_equals_in_memory_bit_for_bit(tmp_path, offload, mode, layout, sets):
    compared(tiny(tmp_path, layout, f"precision.mode={mode}", *sets, mode=mode), offload, tmp_path)


RULES = ("adagrad", "rmsprop", "radam", "nadam", "adamsage", "lion")
PURE = "precision.mode=bf16_pure"


@only("optimizer0")
@pytest.mark.parametrize(
    "optimizer",
    [
        ["optim.name=adamw"],
        [PURE, "precision.rounding=kahan", "optim.name=momentum"],
        *slow(([PURE],), (["optim.name=sophia", "optim.estimate_every=2"],)),
        *slow(*(([f"optim.name={name}"],) for name in RULES)),
    ],
)
@pytest.mark.slow
def test_a_run_resumes_exactly_whatever_its_tier(tmp_path, optimizer):
    """Saved in memory, resumed on disk, saved there, resumed in host memory: the bits of a run that never stopped."""
    sets = [
        "train.steps=3",
        "optim.schedule=constant",
        "observe.tracker=none",
        "train.val_every=2",
        *optimizer,
    ]
    base = change(tiny(tmp_path, "dp=1", mode="bf16"), sets)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train_rank(0, 1, base, whole)
    for steps, offload in ((1, "none"), (2, "all:disk"), (3, "states:host")):
        one = change(
            base, [f"train.steps={steps}", f"layout.offload={offload}", f"layout.offload_dir={tmp_path}/x"]
        )
        train_rank(0, 1, one, parts, steps > 1)
    assert lines(parts, "loss") == lines(whole, "loss")
    assert lines(parts, "val_loss")[-1] == lines(whole, "val_loss")[-1]
    left, right = (stored.load(store.latest(run)) for run in (parts, whole))
    assert_same_tensors(left.model, right.model)
    assert_same_tensors(left.optimizer, right.optimizer)


def watched(rank: int, world: int, recipe):
    """(what was updated before a step's norm was known and what behind it, the most units with weights here)."""
    seen, most = list[list[str]](), [0]
    with pytest.MonkeyPatch.context() as patch:
        start, load = StreamedUpdater._start, Pages._fetch

        def starts(self, units, *given, **more):
            seen.append([*units])
            start(self, units, *given, **more)

        def fetches(self, unit, wait=True):
            load(self, unit, wait)
            most[0] = max(most[0], sum(one.here for one in self.pages.values() if one.paged))

        patch.setattr(StreamedUpdater, "_start", starts)
        patch.setattr(Pages, "_fetch", fetches)
        _trained(rank, world, recipe)
    return seen, most[0]


BLOCKS = [f"blocks.{number}" for number in range(4)]


@all_but("*zero=*", "*pp=*")
@pytest.mark.parametrize(
    ("layout", "window", "early", "left"),
    [
        ("dp=1", 3, [[unit] for unit in (*BLOCKS[::-1], "")], []),
        ("dp=2,zero=2", 2, [[unit] for unit in (*BLOCKS[::-1], "")], []),
        ("pp=2", 2, [["blocks.1"], ["blocks.0"]], [""]),
    ],
)
def test_updates_run_early_and_a_window_has_so_many_blocks(tmp_path, layout, window, early, left):
    """Each block's as soon as its gradients are complete, in backward's order. A tied embedding's are not until the
    stages of a pipeline have summed them."""
    layout += f"{EARLY},offload=all:host,offload_window={window}"
    recipe = tiny(tmp_path, layout, *NO_SKIPS, "train.microbatch_size=1", mode="bf16")
    world = Layout.from_recipe(recipe.layout).ranks
    found = run_ranks(world, watched, recipe, timeout_s=60) if world > 1 else [watched(0, 1, recipe)]
    assert found[0] == ([*early, left] * STEPS, window)


def test_no_step_may_be_skipped_under_early_updates(tmp_path):
    """The message names what has to change, and a gradient that is not finite leaves no good weights."""
    for wrong, right in {
        "optim.grad_clip=1": "or grad_clip = 0",
        "precision.mode=fp16": 'or mode = "bf16"',
        "faults.on_nonfinite=skip": 'or on_nonfinite = "abort"',
        "faults.on_spike=rollback": 'or on_spike = "tell"',
    }.items():
        with pytest.raises(UserError, match="no step may be clipped, scaled or skipped") as error:
            tiny(tmp_path, f"dp=1,offload=all:host{EARLY}", *NO_SKIPS, wrong)
        assert right in str(error.value)
    recipe, figures = tiny(tmp_path, f"dp=1,offload=all:host{EARLY}", *NO_SKIPS), {"step": 3, "nonfinite": 1}
    fault = judged(recipe, figures, 1)
    assert fault is not None
    assert not fault.good
    assert "may have used it" in note(recipe, figures)


@pytest.mark.parametrize(
    ("layout", "sets", "message"),
    [
        (
            "dp=1",
            ["layout.offload=states:disk", "layout.offload_update=early", *NO_SKIPS],
            "offload=states:disk, which leaves gradients on the device",
        ),
        (f"tp=2{EARLY}", ["layout.offload=all:host", *NO_SKIPS], "tp=2, with which no gradient is complete"),
        ("dp=1", ["layout.offload=all:host", "layout.offload_window=1"], "Nearest valid: offload_window=2"),
        ("dp=1,recompute=budget:1GiB,offload_window=0", ["layout.offload=all:host"], "offload_window = 2"),
        ("dp=1", ["layout.offload=states:disk", "optim.name=muon"], 'Nearest valid: optim.name = "adamw"'),
        ("dp=2", ["layout.offload=activations:tp"], "Nearest valid: offload=none"),
        ("tp=2", ["layout.offload=activations:tp"], "it needs recompute=full and tp > 1 without sp"),
        ("tp=2,sp=true,recompute=full", ["layout.offload=activations:tp"], "Nearest valid: offload=none"),
        ("dp=2,compress=int8", ["layout.offload=states:host"], "Nearest valid: offload=states:disk"),
        (
            "dp=2",
            ["layout.offload=states:disk", "sync.method=local"],
            'Nearest valid: layout.offload = "activations"',
        ),
    ],
)
def test_refuses_what_does_not_combine(tmp_path, layout, sets, message):
    with pytest.raises(UserError, match=message):
        tiny(tmp_path, layout, *sets)


@pytest.mark.parametrize("update", ["beside", "early"])
def test_a_disk_that_fails_ends_the_run(tmp_path, monkeypatch, update):
    """More units are left than there is memory for chunks under way; none of them may wait for it."""
    layout = f"dp=1,offload=all:disk,offload_update={update},offload_dir={tmp_path}"
    recipe = tiny(tmp_path, layout, *NO_SKIPS, f"model.layers={SLOTS + 3}", mode="bf16")
    data = prepare(recipe)
    recipe = resolve(recipe, vocab_size=data.vocab_size)
    state, batches = build_state(recipe, ranks_of(0, 1)), batches_of(recipe, data)

    def steps(*numbers: int) -> None:
        for number in numbers:
            take_step(state, recipe, share_of(batches, number, recipe.train.global_batch_size, 1, state.mesh))

    def fails(file, offset, memory, out):
        if file.what == "masters" and not out:
            raise OSError(errno.EIO, "Input/output error")
        return moves(file, offset, memory, out)

    steps(0)
    state.parallel.settle()
    moves = File.move
    monkeypatch.setattr(File, "move", fails)
    with pytest.raises(UserError, match="Input/output error, so the update of this step is lost"):
        steps(1, 2)


def test_says_where_it_cannot_write(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    recipe = change(
        tiny(tmp_path, "dp=1"), ["layout.offload=states:disk", f"layout.offload_dir={tmp_path}/file"]
    )
    with pytest.raises(UserError, match=r"layout.offload_dir = .*/file: cannot make a file there"):
        trained(0, 1, recipe)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    recipe = change(recipe, [f"layout.offload_dir={tmp_path}/away"])
    with pytest.raises(UserError, match=r"layout.offload_dir = .*need .* GiB, and .* GiB are free"):
        trained(0, 1, recipe)


def crossed(recipe, away, microbatches: int) -> Counter[str]:
    """Bytes that `tiers.flows` lets cross the slow link each way in a step, by their lanes in a measured timeline."""
    arena, link = away.arena, away.tiers.states
    outside = arena.spans.get("", (0, 0))[1]
    found = Counter[str]()
    for flow in streams(planned(recipe)):
        times, size = 1 if flow.phase == "update" else microbatches, arena.total
        if flow.kind == "working" and away.tiers.working == "device":
            size = sum(arena.sizes.values())  # without the ends of pages
        elif flow.kind == "working":  # only blocks are paged
            size -= outside
        if flow.link == link:
            found[tiers.lane_of(flow.link, flow.out)] += round(times * flow.bytes * size)
    return found


def crosses(rank: int, world: int, recipe):
    """(what `tiers.flows` says, bytes in the lanes of a measured step, bytes that the disk counts)."""
    state, train, data = build_state(recipe, ranks_of(rank, world)), recipe.train, prepare(recipe)
    batches = batches_of(recipe, data)
    disk, (away,) = state.parallel.disk, state.parallel.offloads.values()
    for step in range(2):
        before, recorder = disk.meter.figures(), Recorder(state)
        take_step(state, recipe, share_of(batches, step, 8, train.microbatch_size, state.mesh))
        state.parallel.settle()
        timeline = recorder.stop(0)
    after = disk.meter.figures()
    assert len(timeline.of(UPDATE)) == len(list(away.arena.chunks()))
    microbatches = 8 // train.microbatch_size // state.mesh.layout.dp
    wanted, lanes = crossed(recipe, away, microbatches), Counter[str]()
    for span in timeline.spans:
        lanes[span.lane] += span.bytes
    state.parallel.close()
    return wanted, +lanes, (after["read"] - before["read"], after["written"] - before["written"])


@all_but("*zero=*", "*pp=*")
@pytest.mark.parametrize(
    ("offload", "layout", "microbatches", "sets"),
    [
        ("states:disk", "dp=1", 1, []),
        ("states:disk", "dp=1", 4, []),
        ("states:host", "dp=1", 4, []),
        ("all:disk", "dp=1", 1, []),
        ("all:disk", "dp=1", 4, []),
        ("states:disk", "dp=1", 1, [PURE]),
        ("all:disk", "dp=1", 4, [PURE, "precision.rounding=kahan"]),
        ("states:host", "dp=2,zero=1", 2, []),
        ("states:host", "dp=2,zero=2", 2, []),
        ("all:disk", "dp=2,zero=1", 2, []),
        ("all:disk", "dp=2,zero=3", 2, []),
        ("all:disk", "pp=2", 4, []),
        ("all:host", f"dp=1{STRONGHOLD}", 2, NO_SKIPS),
    ],
)
def test_reads_and_writes_what_the_table_says(tmp_path, offload, layout, microbatches, sets):
    """`tiers.flows`, by which the planner prices I/O, is what crosses to the disk and back on each rank in a step, by
    its counts and by the lanes of its measured timeline."""
    recipe = change(
        tiny(tmp_path, layout, mode="bf16"),
        [
            *sets,
            f"train.microbatch_size={8 // microbatches // (2 if 'dp=2' in layout else 1)}",
            f"layout.offload={offload}",
            f"layout.offload_dir={tmp_path}",
        ],
    )
    recipe = resolve(recipe, vocab_size=prepare(recipe).vocab_size)
    world = Layout.from_recipe(recipe.layout).ranks
    found = run_ranks(world, crosses, recipe, timeout_s=60) if world > 1 else [crosses(0, 1, recipe)]
    for wanted, lanes, disk in found:
        assert lanes == wanted
        if "disk" in offload:
            assert disk == (wanted["read disk"], wanted["write disk"])


@only("all:disk-dp=2,zero=1")
@pytest.mark.parametrize(
    ("offload", "layout"),
    [("all:disk", "dp=2,zero=1"), ("states:host", "dp=2,zero=2"), ("all:host", "dp=2,zero=3")],
)
def test_sends_the_messages_of_the_plan(tmp_path, offload, layout):
    """Where rows leave the device, weights are gathered for each use under every stage."""
    recipe = change(
        tiny(tmp_path, layout, mode="bf16"), [f"layout.offload={offload}", f"layout.offload_dir={tmp_path}"]
    )
    assert run_ranks(2, sent, recipe, timeout_s=60) == [volume.counted(planned(recipe))] * 2


def test_an_error_of_one_update_waits_for_the_others():
    """Else they would run on in files that are closed. The first one's error is raised."""
    done = []

    def fails(said):
        raise RuntimeError(said)

    settles = [lambda: fails("lost"), lambda: done.append(True), lambda: fails("lost, too")]
    updaters = [SimpleNamespace(updater=SimpleNamespace(settle=settle)) for settle in settles]
    parallel = Parallel([], [], offloads=dict(enumerate(updaters)))
    with pytest.raises(RuntimeError, match=r"lost$"):
        parallel.settle()
    assert done


def test_backward_is_no_forward_where_activations_leave(tmp_path):
    """Hooks of autograd save activations all the time. A recomputation's hooks alone mean that forward runs again."""
    disk, seen = Disk(tmp_path), []
    away, leaf = Activations(disk, torch.device("cpu"), []), torch.randn(1 << 16, requires_grad=True)
    with Tracker() as tracker, away.saving():
        y = (leaf * 2).sin()
        y.register_hook(lambda g: (g * 2, seen.append(tracker.forward))[0])
        y.sum().backward()
    disk.close()
    assert seen == [False]


def sent(rank: int, world: int, recipe):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(activations, "SMALLEST", 64)
        return counted(rank, world, recipe).sent


@only("activations")
@pytest.mark.parametrize("offload", ["activations", "activations:tp"])
def test_inputs_of_recomputed_blocks_are_divided(tmp_path, offload):
    """Tensor-parallel ranks gather them before a block runs again: the messages that the planner counts."""
    recipe = change(tiny(tmp_path, "tp=2,recompute=full", mode="bf16"), [f"layout.offload={offload}"])
    assert run_ranks(2, sent, recipe, timeout_s=60) == [volume.counted(planned(recipe))] * 2


def test_the_buffer_of_a_dropped_graph_is_not_used_again_while_it_is_copied(tmp_path):
    disk, gate = Disk(tmp_path), threading.Event()
    away = Activations(disk, torch.device("cpu"), [])
    for _ in range(THREADS):
        disk.submit(gate.wait)
    leaf = torch.randn(1 << 16, requires_grad=True)
    with away.saving():
        y = (leaf * 2).sin()  # saves its input
    assert away.held > 0
    del y
    assert away.held == 0
    assert not any(away._pool.values()), "its copy has not begun"
    gate.set()
    disk.close()
    assert any(away._pool.values())
