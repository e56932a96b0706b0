"""Timelines of computing and messages: measured on real ranks, planned, and equal to the planner's step."""

import json
import xml.etree.ElementTree as ET
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from time import sleep
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pool_runs import train_rank
from ranks import run_ranks
from steps import Numbers, _state, recipe_of

from fivefold.cli.main import main
from fivefold.comm.progress import progress
from fivefold.errors import UserError
from fivefold.models.section import ModelSection
from fivefold.observe import timelines
from fivefold.observe.timelines import step_svg, step_text
from fivefold.parallel import context
from fivefold.parallel.offload.disk import Meter
from fivefold.recipe import Recipe, change, load, resolve_model
from fivefold.schedules.timelines import (
    COMPUTE,
    MESSAGE,
    UPDATE,
    WAIT,
    Message,
    Span,
    StepTimeline,
    Work,
    exposed_in_pieces,
    simulate,
)
from fivefold.sharding.layout import Layout
from fivefold.sharding.layout import parse as fields
from fivefold.sharding.layout import to_text as to_text_of
from fivefold.sharding.tiers import OFFLOADS
from fivefold.step.recorder import Recorder
from fivefold.step.step import take_step
from fivefold.train.share import share_of
from fivefold_plan.cluster.clusters import parse
from fivefold_plan.cluster.devices import of_table
from fivefold_plan.cluster.measured import assumed_table
from fivefold_plan.setting import setting, software_of
from fivefold_plan.time import cost, time
from fivefold_plan.time.timeline import timeline

SMALL = [
    "model.layers=4",
    "model.dim=64",
    "model.heads=4",
    "model.kv_heads=4",
    "model.ffn_dim=128",
    "model.seq_len=64",
]


def beside_of(timeline: StepTimeline, message: Span) -> list[Span]:
    """What the rank computes while a message is under way."""
    computed = (span for span in timeline.of(COMPUTE) if span.kind != WAIT)
    return [span for span in computed if message.start < span.end and span.start < message.end]


def measured(rank: int, world: int, recipe: Recipe) -> StepTimeline:
    """The second step. Ring attention also notes each of its turns."""
    state = _state(rank, world, recipe)
    train, numbers = recipe.train, Numbers(recipe)
    attend, hooks = context.attend, [len(stage._forward_hooks) for stage in state.parallel.stages]

    def noted(*arguments, **options):
        if recorder := _Now.recorder:
            recorder.mark("forward", "turn")
        return attend(*arguments, **options)

    context.attend = noted
    try:
        for step in range(2):
            share = share_of(numbers, step, train.global_batch_size, train.microbatch_size or 1, state.mesh)
            _Now.recorder = Recorder(state) if step else None
            take_step(state, recipe, share)
        assert _Now.recorder is not None
        return _Now.recorder.stop(2)
    finally:
        context.attend = attend
        assert progress.watch is None
        assert [len(stage._forward_hooks) for stage in state.parallel.stages] == hooks


class _Now:
    recorder: Recorder | None = None


def between(found: StepTimeline, message: Span) -> list[Span]:
    """What the rank computed after a message began, and before it began to wait for it."""
    waits = [
        s.start
        for s in found.of(COMPUTE)
        if s.kind == WAIT and s.name == message.name and s.end >= message.end
    ]
    until = min(waits, default=found.seconds)
    return [s for s in beside_of(found, message) if s.start >= message.start and s.end <= until]


def names(spans: list[Span]) -> set[tuple[str, str]]:
    return {(span.kind, span.name) for span in spans}


def steps(layout: str, *sets: str) -> list[StepTimeline]:
    recipe = recipe_of("llama", "fp32", layout, *SMALL, *sets)
    return run_ranks(Layout.from_recipe(recipe.layout).ranks, measured, recipe)


@pytest.mark.parametrize("how", ["library", "ring", "compress"])
def test_buckets_are_under_way_while_backward_computes(how) -> None:
    """Each begins in the backward of a block, and is waited for only when other blocks have computed theirs."""
    more = "compress=int8" if how == "compress" else f"all_reduce={how}"
    for found in steps(f"dp=2,bucket_mib=0.05,{more}"):
        buckets = [s for s in found.of("batch") if "bucket" in s.name]
        assert len(buckets) >= 4
        assert all(message.end > message.start for message in found.of("batch"))
        assert {s.kind for s in beside_of(found, buckets[0])} >= {"backward"}
        computed = names(between(found, buckets[0]))
        if how != "compress":  # whose first message may end at once
            assert ("backward", "embedding") in names(found.of(COMPUTE))
        assert computed <= {("backward", f"blocks.{i}") for i in range(4)} | {("backward", "embedding")}
        assert 0 < found.hidden() <= 1


def test_one_message_behind_backward() -> None:
    for found in steps("dp=2,bucket_mib=0"):
        (message,) = (s for s in found.of("batch") if "bucket" in s.name)
        assert not between(found, message)
        assert names(beside_of(found, message)) <= {("backward", "embedding")}


def test_weights_are_gathered_ahead() -> None:
    """Of a block under ZeRO 3, while the block before it computes; in backward, the one behind it."""
    for found in steps("dp=2,zero=3"):
        for number in range(1, 4):
            message = next(s for s in found.of("shard") if s.name == f"all_gather, blocks.{number}")
            assert ("forward", f"blocks.{number - 1}") in names(beside_of(found, message))
        again = [s for s in found.of("shard") if s.name == "all_gather, blocks.1"][1]
        assert ("backward", "blocks.2") in names(beside_of(found, again))


def test_replicas_of_shards_are_summed_while_backward_computes() -> None:
    """In the last microbatch: the sum of a block's rows begins behind its scatter, and is waited for at the end."""
    for found in steps("dp_replicate=2,dp_shard=2,zero=1"):
        computed = [s for s in found.of(COMPUTE) if s.kind == "backward"]
        for number in range(1, 4):
            (message,) = (s for s in found.of("replicate") if s.name.endswith(f", blocks.{number}"))
            (wait,) = (s for s in found.of(COMPUTE) if s.name == message.name)
            between = {s.name for s in computed if message.start < s.start and s.end <= wait.start}
            assert between >= {*(f"blocks.{i}" for i in range(number)), "embedding"}


def test_keys_travel_while_a_turn_computes() -> None:
    """Every exchange begins before a turn and is waited for behind it. (Most also end within or behind it: of a small
    message that depends on when the system runs which rank, so a busy machine gets more tries.)"""
    for _ in range(5):
        beside = 0
        for found in steps("cp=2", "model.seq_len=512"):
            for number in range(4):
                message = next(s for s in found.of("cp") if s.name == f"receive, blocks.{number} forward")
                turn = next(s for s in found.of(COMPUTE) if s.name == "turn" and s.start > message.start)
                wait = next(s for s in found.of(COMPUTE) if s.name == message.name)
                assert message.start < turn.start < turn.end <= wait.start
                beside += turn in beside_of(found, message)
        if beside:
            return
    pytest.fail("no message travelled beside a turn")


def test_activations_are_waited_for() -> None:
    """In forward, tensor parallelism overlaps with nothing."""
    for found in steps("tp=2"):
        messages = [
            s for s in found.of("tp") if s.name in {f"all_reduce, blocks.{i} forward" for i in range(4)}
        ]
        assert len(messages) == 3 * 2 * 4  # microbatches, sublayers, blocks
        assert not any(between(found, message) for message in messages)


def test_a_run_writes_and_draws_its_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "text.txt"
    source.write_text("the quick brown fox jumps over the lazy dog\n" * 400)
    sets = [*SMALL, f"data.source={source}", "data.tokenizer=bytes", "train.steps=2", "observe.trace_step=2"]
    sets += [
        "train.global_batch_size=4",
        "train.sample_every=0",
        "train.val_sequences=4",
        "observe.tracker=none",
    ]
    run = tmp_path / "run"
    run_ranks(2, train_rank, load("quickstart", sets, "dp=2,zero=3"), run)
    other = tmp_path / "other"
    other.mkdir()
    (other / "recipe.toml").touch()
    found = timelines.read(run)
    assert [name for name, _ in found][:2] == ["rank 0, measured", "rank 1, measured"]
    one = found[0][1]
    assert one.step == 2
    assert {"forward", "backward", "update", WAIT} <= {s.kind for s in one.of(COMPUTE)}
    assert StepTimeline.from_json(json.loads(json.dumps(one.as_json()))) == one
    spans = one.of(COMPUTE)
    assert all(a.end <= b.start + 1e-9 for a, b in pairwise(spans)), "one thing at a time"
    assert "Computing and messages" in (run / "report.html").read_text()
    for arguments in (
        [str(run)],
        [str(run), "--out", str(tmp_path)],
        [str(other)],
        [str(run), "--layout", "dp=2"],
    ):
        with pytest.raises(SystemExit):
            main(["draw", *arguments])
        out, error = capsys.readouterr()
        if arguments[0] == str(other):
            assert "no step was measured" in error
        elif "--layout" in arguments:
            assert "leave --set, --layout, --cluster and --html out" in error
        else:
            assert "rank 1, measured: " in out
            assert "shard" in out
    ET.parse(tmp_path / "timeline.svg")


def test_a_run_that_offloads_draws_what_it_reads_writes_and_waits_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lanes of reads, writes, waits and updates, and the share of the step in which the device computes."""
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 400)
    sets = [
        *SMALL, f"data.source={tmp_path}/text.txt", "data.tokenizer=bytes", "train.steps=3", "observe.trace_step=3",
        "train.global_batch_size=4", "train.sample_every=0", "train.val_sequences=4", "observe.tracker=none",
        "layout.offload=all:disk", f"layout.offload_dir={tmp_path}/away",
    ]  # fmt: skip
    run, read, moved = tmp_path / "run", set[str](), Meter.moved

    def noted(meter: Meter, link: str, out: bool, what: str, *rest: Any) -> None:
        read.update([what] * (link == "disk" and not out))
        if link == "disk" and out and what == "masters":
            sleep(0.05)  # so that an update takes longer than the pause between steps, also on a busy machine
        moved(meter, link, out, what, *rest)

    monkeypatch.setattr(Meter, "moved", noted)
    train_rank(0, 1, load("quickstart", sets, "dp=1"), run)
    one = timelines.read(run)[0][1]
    assert {"read disk", "write disk", UPDATE} < {*one.lanes}
    assert {"masters", "gradients", "working"} <= read
    # An update ends behind its step, so of two of them one's end and the other's begin may be in the measured step.
    seen = {span.name for span in one.of("read disk")}
    assert "working" in seen <= read
    assert seen - {"working"}, "of an update"
    assert all(span.bytes > 0 for span in one.of("read disk") + one.of("write disk"))
    blocks = {f"blocks.{number}" for number in range(4)}
    assert {span.name for span in one.waits} & {"gradients", *blocks, *(f"update of {n}" for n in blocks)}
    spans = one.of(COMPUTE)
    assert all(a.end <= b.start + 1e-9 for a, b in pairwise(spans)), "one thing at a time"
    computed = sum(span.seconds for span in spans if span.kind != WAIT)
    assert one.busy == pytest.approx(computed / one.seconds)
    assert sum(one.utilisation(10)) == pytest.approx(10 * one.busy)
    with pytest.raises(SystemExit):
        main(["draw", str(run), "--out", str(tmp_path)])
    out = capsys.readouterr().out
    assert f"device busy {one.busy:.0%}" in out
    assert "read disk  │" in out
    picture = (tmp_path / "timeline.svg").read_text()
    assert all(f">{lane}</text>" in picture for lane in ("wait", "read disk", "write disk", UPDATE))
    ET.parse(tmp_path / "utilisation.svg")


@given(
    st.integers(1, 9),
    st.sampled_from([1.0, 0.25, 0.6]),
    st.floats(0.01, 3),
    st.floats(0.01, 3),
    st.booleans(),
)
def test_pieces_are_hidden_as_the_formula_says(
    pieces: int, free: float, seconds: float, beside: float, backwards: bool
) -> None:
    """Each piece is made ready by a part of the work, or needed by one."""
    work = [Work("backward", str(i), beside / pieces) for i in range(pieces)]
    done = [sum(one.seconds for one in work[:i]) for i in range(pieces + 1)]
    spans = [(0.0, done[i]) if backwards else (done[i + 1], done[-1]) for i in range(pieces)]
    held = 1 - free
    found = simulate(work, [Message("batch", "", seconds / pieces, *span, "", held) for span in spans])
    wanted = exposed_in_pieces(seconds, held * seconds, beside, pieces)
    assert found.seconds - beside == pytest.approx(wanted, abs=1e-9)
    assert found.under_way() == pytest.approx(seconds)


def test_messages_wait_for_their_turn() -> None:
    """Two of one axis go one after the other; two of two axes at once; the rank waits for what it needs."""
    work = [Work("forward", "a", 1.0), Work("forward", "b", 1.0)]
    same = simulate(work, [Message("tp", "x", 2.0, 0.0, 1.0), Message("tp", "y", 2.0, 0.0, 2.0)])
    assert [(s.start, s.end) for s in same.of("tp")] == [(0, 2), (2, 4)]
    assert (same.seconds, same.waited, same.hidden()) == (4.0, 2.0, 0.5)
    assert [s.name for s in same.of(COMPUTE) if s.kind == WAIT] == ["x", "y"]
    two = simulate(work, [Message("tp", "x", 2.0, 0.0, 1.0), Message("cp", "y", 2.0, 0.0, 2.0)])
    assert (two.seconds, two.waited, two.hidden("cp")) == (3.0, 1.0, 0.5)


LAYOUTS = [
    "dp=1", "dp=2", "dp=2,bucket_mib=0", "dp=2,bucket_mib=1", "dp=2,zero=1", "dp=2,zero=2", "dp=2,zero=3", "cp=2",
    "cp=2,cp_method=ulysses", "cp=2,cp_method=all_gather",
    "tp=2", "tp=2,sp=true", "tp=2,sp=true,sp_regather=true", "tp=2,recompute=full",
    "tp=2,sp=true,tp_chunks=4", "tp=2,sp=true,sp_regather=true,tp_chunks=4,recompute=full",
    "dp=2,zero=3,recompute=full", "dp=2,compress=int8", "dp=2,compress=topk:0.01", "dp=2,all_reduce=ring",
]  # fmt: skip
TOGETHER = [
    "dp=8,tp=2,zero=3",
    "dp_replicate=2,dp_shard=2,zero=1",
    "dp_replicate=2,dp_shard=2,zero=3",
    "dp=8,cp=2,zero=3",
    "dp=8,zero=3,zeropp=weights,hier,gradients,ranks_per_node=2",
]


def layout_of(text: str) -> Layout:
    values: dict[str, Any] = dict(fields(text))
    return Layout(**values)


@pytest.mark.parametrize("device", ["gpu", "cpu"])
@pytest.mark.parametrize("microbatches", [1, 3])
def test_the_planned_timeline_is_the_planned_step(device: str, microbatches: int) -> None:
    """Its seconds and its exposed messages. Equal devices: a slower one computes longer beside the same messages. Also
    where messages contend with computing, but for one layout: the step counts all of ZeRO's messages as beside
    computing, and what is drawn beside a wait for a tensor-parallel message slows nothing (0.05%)."""
    if device == "gpu":
        cluster, sizes = (
            parse("h100"),
            ModelSection(layers=8, dim=4096, heads=32, ffn_dim=11008, seq_len=4096),
        )
        cluster = replace(cluster, device=replace(cluster.device, spread=0.0, contended=0.0))
    else:
        cluster, sizes = (
            of_table(assumed_table()),
            ModelSection(layers=6, dim=192, heads=6, ffn_dim=512, seq_len=256),
        )
    model = resolve_model(sizes, vocab_size=2048)
    for text in LAYOUTS + TOGETHER * (device == "gpu"):
        s = setting(model, layout_of(text), cluster, 2, microbatches, software=software_of(cluster))
        step, drawn = time.step(s), timeline(s)
        assert drawn is not None
        assert drawn.seconds == pytest.approx(step.seconds, rel=1e-9), text
        if device == "gpu" and "compress" not in text:  # what is encoded is computing that counts as exposed
            assert drawn.waited == pytest.approx(sum(step.exposed.values()), abs=1e-12), text
        ET.fromstring(step_svg([("planned", drawn)], text))
        assert step_text(drawn, 60).count("│") == 2 * len(drawn.lanes)
        if device == "gpu":
            s = replace(s, cluster=replace(s.cluster, device=replace(s.cluster.device, contended=0.2)))
            drawn = timeline(s)
            assert drawn is not None
            both = s.layout.zero == 3 and s.layout.tp > 1
            assert drawn.seconds == pytest.approx(time.step(s).seconds, rel=1e-3 if both else 1e-9), text
            assert (drawn.seconds < time.step(s).seconds * (1 - 1e-9)) == both, text


@pytest.mark.parametrize("device", ["gpu", "cpu"])
@pytest.mark.parametrize("microbatches", [1, 3])
def test_the_planned_timeline_has_what_offload_waits_for(device: str, microbatches: int) -> None:
    """It takes the planned step, and waits as long. Gradient sums of replicas hide a little more than in the plan,
    which adds them to a phase that waits."""
    cluster = parse("h100") if device == "gpu" else of_table(assumed_table())
    cluster = replace(cluster, device=replace(cluster.device, spread=0.0))
    sizes = ModelSection(layers=8, dim=1024, heads=8, ffn_dim=4096, seq_len=1024)
    model, waits = resolve_model(sizes, vocab_size=2048), 0
    for away in OFFLOADS:
        parts = ("tp=2,recompute=full",)  # activations:tp needs them
        for axes in parts if away == "activations:tp" else ("dp=1", "tp=2", "dp=2", "dp=2,zero=2"):
            s = setting(
                model,
                layout_of(f"{axes},offload={away}"),
                cluster,
                2,
                microbatches,
                software=software_of(cluster),
            )
            step, drawn = time.step(s), timeline(s)
            assert drawn is not None
            exact = axes in ("dp=1", "tp=2", *parts)
            assert drawn.seconds == pytest.approx(step.seconds, rel=1e-6 if exact else 0.05), (away, axes)
            if exact and device == "gpu":
                assert drawn.waited == pytest.approx(sum(step.exposed.values()), rel=1e-6, abs=1e-6), (
                    away,
                    axes,
                )
            waits += step.exposed.get("offload", 0) > 0
            lanes = {"host", "link", "disk"} & {*drawn.lanes}
            none = OFFLOADS[away].stays or (
                away.endswith(":host") and device == "cpu"
            )  # whose host is the device
            assert bool(lanes) != none, (away, axes)
    assert waits >= (8 if device == "gpu" else 1), "not everything is hidden"


def test_buckets_hide_what_one_message_does_not() -> None:
    model = resolve_model(ModelSection(layers=8, dim=4096, heads=32, seq_len=4096), vocab_size=32000)
    drawn = {
        text: timeline(setting(model, layout_of(text), parse("h100"), 2, 1))
        for text in ("dp=8", "dp=8,bucket_mib=0", "pp=2")
    }
    many, one = drawn["dp=8"], drawn["dp=8,bucket_mib=0"]
    assert many is not None
    assert one is not None
    assert drawn["pp=2"] is None
    assert one.hidden("batch") == 0 < 0.8 < many.hidden("batch")
    assert one.seconds > many.seconds
    assert len([s for s in many.spans if s.kind == MESSAGE]) == 8


def test_a_planned_timeline_is_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = [
        "draw",
        "quickstart",
        "--layout",
        "dp=8,zero=3",
        "--cluster",
        "h100:8",
        "--out",
        str(tmp_path),
        "--json",
    ]
    with pytest.raises(SystemExit):
        main(command)
    found = json.loads(capsys.readouterr().out)
    assert "planned on h100:8" in found["text"]
    ET.parse(found["pictures"]["timeline"])


def test_bucket_sizes_in_a_layout() -> None:
    recipe = load("quickstart", [], "dp=2,bucket_mib=0.5")
    assert recipe.layout.bucket_mib == 0.5
    assert change(recipe, layout="dp=2").layout.bucket_mib == 25
    assert to_text_of(Layout.from_recipe(recipe.layout)) == "dp=2,bucket_mib=0.5"
    for wrong, said in (("-1", "must be a number >= 0"), ("few", "must be a number")):
        with pytest.raises(UserError, match=said):
            load("quickstart", [], f"dp=2,bucket_mib={wrong}")


WAITED = {(512, 1, False), (512, 1, True)}
"""Widths of an expert, chunks, and forward or backward, in which rows take longer than the shared expert."""


@pytest.mark.parametrize("width", [512, 16384])
@pytest.mark.parametrize("chunks", [1, 4])
def test_rows_travel_beside_the_shared_expert(width: int, chunks: int) -> None:
    """The drawn step is the planned one, and only what takes longer than the shared expert is waited for."""
    model = resolve_model(
        ModelSection(
            arch="moe", layers=4, dim=2048, heads=16, seq_len=4096, experts=16, experts_per_token=4, shared_experts=1,
            expert_ffn_dim=width,
        ),
        vocab_size=2048,
    )  # fmt: skip
    cluster = parse("h100:8")
    cluster = replace(cluster, device=replace(cluster.device, spread=0.0))
    s = setting(model, layout_of(f"dp=8,ep=8,expert_chunks={chunks}"), cluster, 2, 3)
    step, drawn = time.step(s), timeline(s)
    assert drawn is not None
    assert drawn.seconds == pytest.approx(step.seconds, rel=1e-9)
    assert drawn.waited == pytest.approx(sum(step.exposed.values()), abs=1e-12)
    ops = {op.name: cost.operation(op, s) for op in s.last_block}
    for arrival, backward in product((op for op in s.last_block if op.name == "arrival"), (False, True)):
        (sent,) = arrival.sent_backward if backward else arrival.sent_forward
        shared = [ops[f"shared {name}"] for name in ("up", "gate", "down")]
        beside = sum(one.input + one.weight if backward else one.forward for one in shared)
        waits = ops["arrival"].sent_backward if backward else ops["arrival"].sent_forward
        assert waits == pytest.approx(max(0.0, cost.message(sent, s, backward) - beside), abs=1e-15)
        assert (waits > 0) == ((width, chunks, backward) in WAITED)
