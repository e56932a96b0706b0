"""Time: published measurements with nothing fitted to them, and how single prices behave."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import published  # benchmarks/planner
import pytest
import torch
from typer.testing import CliRunner

from fivefold.cli.main import app
from fivefold.errors import UserError
from fivefold.kernels.adamw import AdamW
from fivefold.models.card import card_of, flops_per_token
from fivefold.models.operations import Matmul, Operation, TensorWay
from fivefold.models.section import ModelSection
from fivefold.optim import OPTIMIZERS
from fivefold.optim.updater import Updater
from fivefold.recipe import count_parameters, load, resolve_model
from fivefold.sharding.layout import Layout
from fivefold_plan.cluster.clusters import parse
from fivefold_plan.cluster.devices import Cluster
from fivefold_plan.memory import model_states
from fivefold_plan.messages import communication, volume
from fivefold_plan.messages.communication import collective, group
from fivefold_plan.predict import predict
from fivefold_plan.setting import FIVEFOLD, Setting, Software, setting
from fivefold_plan.software import PROGRAMS, PUBLISHED, evidence, program
from fivefold_plan.time import cost, stage_costs, time
from fivefold_plan.time.cost import message, operation

TABLES = Path(published.__file__).with_name("tables")


def test_iterations_of_megatron() -> None:
    """Ten models of 1.7B to 1T on 32 to 3072 A100."""
    found = published.sc21(TABLES)
    assert found["rows"] == 10
    assert found["mean"] < 0.07
    assert found["worst"] < 0.12


def test_a_layer_of_22b() -> None:
    """Forward and backward, by what is computed again."""
    found = published.layer_times(TABLES)
    assert found["rows"] == 5
    assert found["forward"]["worst"] < 0.04
    assert found["backward"]["worst"] < 0.07


def test_the_committed_figures_are_those_of_the_committed_tables() -> None:
    """What docs/planner.md says of published runs can be repeated from the repository."""
    committed = (TABLES.parents[1] / "results/planner_published.json").read_text(encoding="utf-8")
    results, kinds = published.compare(TABLES)
    same, expected = (
        json.loads(text, parse_float=lambda x: f"{float(x):.5g}") for text in (json.dumps(results), committed)
    )
    assert same == expected
    assert kinds == json.loads(PUBLISHED.read_text(encoding="utf-8"))


def test_a_plan_says_how_far_published_runs_of_its_kind_were_off() -> None:
    def said(recipe: str, cluster: str, layout: str, *sets: str) -> str:
        found = evidence(predict(load(recipe, [*sets], layout), parse(cluster)).setting, "time")
        return found.says("time") if found else ""

    dense = said("llama3-8b", "h100:8", "dp=8,zero=3")
    assert dense.endswith(" devices: torchtitan, KempnerForge, Fivefold)")
    assert " published runs of this kind on 1 to " in dense
    assert "on 8 to 2,048 devices: NeMo)" in said("llama3-8b", "h100:8", "dp=8,zero=3", "precision.mode=fp8")
    assert "on 8 devices: SimuMax)" in said("mixtral-8x7b", "b200:64", "dp=64,ep=8,zero=1")
    assert said("mixtral-8x7b", "h100:64", "dp=64,ep=8,zero=1") == ""


def test_programs_of_others(tmp_path: Path) -> None:
    """By name, and by a file that changes one."""
    h100, file = parse("h100:8"), tmp_path / "mine.toml"
    file.write_text('base = "nemo"\npieces = 8\nfused = false\n')
    mine = program(str(file), h100)
    assert mine == replace(
        PROGRAMS["nemo"], name="mine", fused=False, tensor=PROGRAMS["nemo"].tensor._replace(pieces=8)
    )
    assert program("fivefold", h100) is FIVEFOLD
    for text, words in {
        'loss = "none"': 'loss = "none": must be one of "chunks", "fused", "plain"',
        "fp8_skips = 1": "fp8_skips = 1: unknown key",
        "fusd = true": "did you mean 'fused'?",
        "host = -1": "host = -1: must be a number >= 0",
        "pieces = true": "pieces = true: must be a whole number >= 0 and <= 64",
        'base = "mine"': "base: must be one of fivefold, megatron-2021",
        "fused =": "not valid TOML",
        f"host = {'9' * 5000}": "not valid TOML",
    }.items():
        file.write_text(text + "\n")
        with pytest.raises(UserError, match=re.escape(words)):
            program(str(file), h100)
    with pytest.raises(UserError, match="did you mean 'nemo'"):
        program("nemoo", h100)
    text = CliRunner().invoke(app, ["plan", "--help"]).output
    assert all(name in text for name in PROGRAMS)


def test_ways_of_tensor_parallelism() -> None:
    """Each projection's own gathers, copies, whole logits; pieces hide messages and copy nothing."""
    layout = Layout(dp_shard=2, tp=4, sp=True, zero=3)

    def block(**way: Any) -> tuple[int, float, float]:
        software = replace(FIVEFOLD, loss="plain", batch_first=False, tensor=TensorWay(**way))
        s = llama_setting(layout, software, B=8)
        ops = s.work.block[s.kind(False, "none")]
        gathers = sum(m.what == "all_gather" for op in ops for m in (*op.sent_forward, *op.sent_backward))
        return gathers, sum(op.forward for op in ops), time.step(s).seconds

    gathers, moved, seconds = block()
    assert gathers == 4
    assert block(each=True)[0] == gathers + 3
    copied = block(copied=True)
    s = llama_setting(layout, FIVEFOLD, B=8)
    assert copied[1] - moved == pytest.approx(4 * 2 * s.sizes.N * s.model.dim * s.sizes.e)
    assert seconds < copied[2] < block(each=True, copied=True)[2]
    assert block(each=True, copied=True, whole_logits=True)[2] > block(each=True, copied=True)[2]
    pieces = block(pieces=4)
    assert pieces[:2] == (gathers, moved)
    assert pieces[2] < seconds


def test_products_come_in_waves() -> None:
    """A product of one tile more than the device has processors takes twice as long as one that fills them."""
    device = parse("a100").device
    full = cost.matmul(Matmul(256 * 108, 128, 8192), device, "bf16", 2)
    more = cost.matmul(Matmul(256 * 109, 128, 8192), device, "bf16", 2)
    assert more / full > 1.3
    large = Matmul(8192, 8192, 8192)
    rate = 2 * 8192**3 / cost.matmul(large, device, "bf16", 2)
    assert 0.9 * 271e12 < rate <= 271.3e12


def test_thin_products_move_bytes() -> None:
    device = parse("h100").device
    thin = Matmul(16, 8192, 8192)
    seconds = cost.matmul(thin, device, "bf16", 2)
    assert seconds == pytest.approx(cost.stream((16 * 8192 * 2 + 8192**2) * 2, device), rel=0.01)


def test_the_slowest_of_many() -> None:
    assert cost.slowest(1, 0.015) == 1
    assert 1 < cost.slowest(8, 0.015) < cost.slowest(128, 0.015) < cost.slowest(16384, 0.015) < 1.07


def alone(name: str) -> Cluster:
    """The cluster without contention: a hidden message costs nothing."""
    cluster = parse(name)
    return replace(cluster, device=replace(cluster.device, contended=0.0))


def llama(layout: Layout, microbatches: int = 16, software: Software = FIVEFOLD) -> time.Step:
    return time.step(llama_setting(layout, software, microbatches))


def llama_setting(layout: Layout, software: Software, microbatches: int = 16, B: int = 1) -> Setting:
    section = ModelSection(layers=32, dim=4096, heads=32, ffn_dim=11008, seq_len=4096)
    model = resolve_model(section, vocab_size=32000)
    return setting(model, layout, parse("h100"), B, microbatches, "bf16", software)


def test_many_microbatches_as_if_all_were_simulated() -> None:
    """What is added for microbatches that are not simulated is what they would take."""
    for name, v in (("1f1b", 1), ("interleaved", 2), ("zb_h1", 1), ("zb_h2", 1), ("zbv", 1), ("dualpipe", 1)):
        layout = Layout(pp=4, schedule=name, virtual_stages=v)
        few, many = llama(layout, 12).seconds, llama(layout, 24).seconds
        section = ModelSection(layers=32, dim=4096, heads=32, ffn_dim=11008, seq_len=4096)
        s = setting(resolve_model(section, vocab_size=32000), layout, parse("h100"), 1, 24)
        costs = stage_costs.stage_costs(s)
        parts = tuple((c.forward, c.input, c.weight) for c in costs)
        exact, _ = stage_costs._simulated(layout, 24, parts, tuple(stage_costs.transfers(s).items()))
        assert stage_costs.pipeline(s, costs)[0] == pytest.approx(exact, rel=2e-3)
        assert few < many


def test_overlap_hides_messages() -> None:
    layout = Layout(dp_shard=64, zero=3)
    hidden, shown = (
        time.step(replace(llama_setting(layout, each, 4), cluster=alone("h100:64")))
        for each in (FIVEFOLD, replace(FIVEFOLD, overlap_data=False))
    )
    assert hidden.exposed["model"] < 0.1 * shown.exposed["model"]
    assert hidden.seconds < shown.seconds


def test_the_check_of_an_update_reads_the_weights() -> None:
    """4 bytes per weight that a rank updates, once, also where an optimizer's passes are many. AdamW over masters in
    one buffer finds the largest on its way."""
    device, section = parse("h100").device, ModelSection(layers=4, dim=1024, heads=8, seq_len=1024)
    model = resolve_model(section, vocab_size=32000)
    weights = count_parameters(model)
    for optimizer in ("adamw", "adamw8bit"):
        for layout, share in ((Layout(), 1), (Layout(dp_replicate=4), 1), (Layout(dp_shard=4, zero=1), 4)):
            checked = replace(FIVEFOLD, optimizer=optimizer)
            seconds = [
                time.step(setting(model, layout, parse("h100"), 1, 1, "bf16", software)).seconds
                for software in (checked, replace(checked, checked=False))
            ]
            read = 0 if optimizer == "adamw" and not layout.zero else 4 * weights / share
            assert seconds[0] - seconds[1] == pytest.approx(cost.stream(read, device), rel=1e-3)


def test_which_kernels_check_on_their_way() -> None:
    """The planner's word on each optimizer is the updater's."""
    for card in OPTIMIZERS.values():
        updater = Updater(card, {"w": torch.zeros(4, 4)}, 1e-3, 0.0, card.fields)
        assert card.finds_largest == (updater.rules is None and isinstance(updater.optimizer, AdamW)), (
            card.name
        )
        assert card.check_traffic(one_pass=False) == 4
    assert OPTIMIZERS["adamw"].check_traffic(one_pass=True) == 0
    assert OPTIMIZERS["adam"].check_traffic(one_pass=True) == 4


def test_small_work_waits_for_the_processor() -> None:
    slow = replace(FIVEFOLD, host=20e-3)
    assert llama(Layout(), 4, slow).seconds == pytest.approx(4 * 32 * 2 * 20e-3, rel=0.1)


def test_experts_are_gathered_over_their_own_groups() -> None:
    """Of 64 devices, 8 a node, each node has every expert once: what is gathered of one crosses the network, in a group
    with one device a node: of every microbatch twice the weights in bf16 and once the gradients in fp32, without
    padding. No step is shorter than these bytes take there."""
    cluster = parse("h100")
    s = setting(load("mixtral-8x7b").model, Layout(dp_shard=64, ep=8, zero=3), cluster, 1, 16)
    messages = volume.counted(s)
    crossed = sum(messages[what, "edp"][1] * 7 / 8 for what in ("all_gather", "reduce_scatter"))
    model = s.model
    one = 3 * model.dim * (model.expert_ffn_dim or 0) * model.layers  # an expert of every block
    assert crossed == 7 / 8 * one * 16 * (2 * 2 + 4)
    assert time.step(s).seconds > crossed / cluster.inter.bandwidth


def test_a_pipeline_scatters_gradients_once() -> None:
    """Under ZeRO 2 as under ZeRO 1 (parallel/zero.py), so that both take equally long."""
    shown = replace(FIVEFOLD, overlap_data=False)
    once, same = (llama(Layout(pp=4, dp_shard=16, zero=zero), software=shown) for zero in (1, 2))
    assert same.seconds == pytest.approx(once.seconds, rel=1e-9)
    alone = [llama(Layout(dp_shard=64, zero=zero), software=shown).seconds for zero in (1, 2)]
    assert alone[1] > 1.1 * alone[0]  # without a pipeline every microbatch scatters


def with_experts(
    F: int, shared: int, layout: Layout, microbatches: int = 1
) -> tuple[Setting, dict[str, Operation]]:
    """And the operations of a block."""
    section = ModelSection(
        arch="moe",
        layers=8,
        dim=2048,
        heads=16,
        seq_len=2048,
        experts=32,
        expert_ffn_dim=F,
        shared_experts=shared,
    )
    s = setting(resolve_model(section, vocab_size=32000), layout, alone("h100:4x8"), 4, microbatches)
    return s, {op.name: op for op in s.last_block}


@pytest.mark.parametrize("chunks", [1, 2, 8])
@pytest.mark.parametrize("F", [256, 8192])
@pytest.mark.parametrize("shared", [0, 1])
@pytest.mark.parametrize(("schedule", "splits"), [("1f1b", False), ("zb_h1", True)])
def test_chunks_hide_rows(chunks: int, F: int, shared: int, schedule: str, splits: bool) -> None:
    """All rows travel beside the shared expert. The last results always are exposed, and so is what takes longer than
    the computing. Under a split backward the shared expert's weight gradients are computed too late to hide rows;
    those of experts are not deferred."""
    layout = Layout(pp=2, dp_replicate=16, ep=16, schedule=schedule, expert_chunks=chunks)
    assert layout.splits_backward == splits
    s, ops = with_experts(F, shared, layout, 8)
    costs = {name: operation(op, s) for name, op in ops.items()}
    whole = s.sizes.N * 2 * 2048 * 2
    one = collective("all_to_all", whole / chunks, group(layout, s.cluster, "ep"), s.cluster, s.dtype)
    counts = message(ops["dispatch"].sent_forward[0], s, False)
    ways = [costs[name] for name in ("dispatch", "arrival", "combine") if name in costs]
    seconds = {
        (name, backward): sum(
            c.input + c.weight * (not (splits and name == "shared")) if backward else c.forward
            for c in (costs[f"{name} {part}"] for part in ("up", "gate", "down"))
        )
        for name in ("shared", "experts")[not shared :]
        for backward in (False, True)
    }
    for backward in (False, True):
        before, work = seconds.get(("shared", backward), 0.0), seconds["experts", backward]
        exposed = one + max(0.0, one - before), chunks * one - work * (1 - 1 / chunks)
        if chunks > 1:  # both ways' messages one after the other
            exposed = *exposed, 2 * chunks * one - work - before
        found = sum(c.rows_backward if backward else c.rows_forward - counts * (c is ways[0]) for c in ways)
        assert found == pytest.approx(max(exposed), abs=1e-12)


@pytest.mark.parametrize("tp", [2, 8])
@pytest.mark.parametrize("regather", [False, True])
def test_chunks_hide_messages_of_tensor_parallelism(tp: int, regather: bool) -> None:
    """The first gather and the last scatter of a linear layer are always exposed; the others where they take longer
    than the products beside them. What is gathered again is beside the same product, before the scatters. In chunks
    products and messages take longer, too."""
    model, chunks = resolve_model(load("llama-7b").model, vocab_size=32000), 4
    layouts = [Layout(tp=tp, sp=True, sp_regather=regather, tp_chunks=n) for n in (1, chunks)]
    whole, cut = (setting(model, layout, parse("h100:2x8"), 1, 1) for layout in layouts)
    ops = [
        {op.name: op for op in card_of(s.model).block_operations(s.sizes, s.software, False)}
        for s in (whole, cut)
    ]
    for name in ("qkv", "attention out", "up", "down"):
        (once, now), (before, after) = (
            [side[name] for side in ops],
            [operation(o[name], s) for o, s in zip(ops, (whole, cut), strict=True)],
        )
        again = [one for one in now.sent_backward if one.hidden]
        assert len(again) == (regather and name in ("qkv", "up"))
        (ahead,), (back,) = now.sent_forward, [one for one in now.sent_backward if not one.hidden]
        assert (ahead.calls, ahead.size, back.calls) == (chunks, once.sent_forward[0].size, chunks)
        forward, computed = message(ahead, cut, False), after.forward - after.sent_forward
        others = 1 - 1 / chunks
        assert after.sent_forward == pytest.approx(max(forward / chunks, forward - computed * others))
        backward, computed = message(back, cut, True), after.input - after.sent_backward
        first = sum(message(one, cut, True) for one in again)
        exposed = max(backward / chunks, backward - computed * others, first + backward - computed)
        assert after.sent_backward == pytest.approx(exposed)
        if again:  # recomputation runs it before, beside nothing, and the scatters are hidden as without it
            software = replace(cut.software, selective="operations")
            repeated = cost.part([now], replace(cut, software=software), "selective").sent_backward
            exposed = max(backward / chunks, backward - computed * others)
            assert repeated == pytest.approx(first + exposed)
        assert after.alone[0] > before.alone[0]
        assert forward > message(once.sent_forward[0], whole, False)


def test_pairs_hide_rows() -> None:
    """A pipeline of pairs takes less time than the same one without them where rows take long, and more where they take
    none; further microbatches as long as if they were simulated."""
    section = ModelSection(
        arch="moe", layers=8, dim=2048, heads=16, seq_len=2048, experts=32, expert_ffn_dim=1024
    )
    model = resolve_model(section, vocab_size=32000)

    def s(name: str, ep: int, count: int = 16):
        layout = Layout(pp=4, dp_replicate=16, ep=ep, schedule=name)
        return setting(model, layout, parse("h100:8x8"), 1, count)

    for ep, faster in ((16, True), (1, False)):
        plain, pairs = (time.step(s(name, ep)).seconds for name in ("dualpipev", "dualpipev_paired"))
        assert (pairs < plain) == faster
    many = s("dualpipev_paired", 16, 40)
    costs = stage_costs.stage_costs(many)
    priced = tuple(c.timed for c in costs)
    exact, _ = stage_costs._simulated(many.layout, 40, priced, tuple(stage_costs.transfers(many).items()))
    assert stage_costs.pipeline(many, costs)[0] == pytest.approx(exact, rel=2e-3)


def test_full_recomputation_repeats_a_third() -> None:
    """Forward is a third of forward and backward. All blocks are repeated, the loss is not."""
    card = resolve_model(load("llama-7b").model, vocab_size=32000)
    shares = []
    for mode in ("none", "full", "full*16/none*16"):
        shares.append(stage_costs.recomputed(setting(card, Layout(recompute=mode), parse("h100:1"), 1, 1)))
    head = 2 * 4096 * 32000 / (flops_per_token(card) / 3)
    assert shares == pytest.approx([0.0, (1 - head) / 3, (1 - head) / 6], rel=2e-3)


def test_a_named_all_reduce_takes_as_long_as_its_bytes() -> None:
    cluster = parse("h100:8x8")
    ranks = group(Layout(dp_replicate=64), cluster, "dp")
    small, large = (communication.sum_gradients(size, ranks, cluster, "ring") for size in (1e10, 2e10))
    assert large == pytest.approx(2 * small, rel=0.02)


def test_attention_of_a_library(tmp_path: Path) -> None:
    """cuDNN's is faster on Hopper, where it was measured. A cluster's file says what any library reaches there."""
    layout, cudnn = Layout(dp_shard=2, zero=3), replace(FIVEFOLD, library="cudnn")
    flash = llama_setting(layout, FIVEFOLD)
    assert time.step(llama_setting(layout, cudnn)).seconds < time.step(flash).seconds
    a100 = parse("a100").device
    assert a100.attends("cudnn") == a100.attends("flash")
    (tmp_path / "mine.toml").write_text('base = "h100"\nattention_backward_share = 0.5\n')
    mine = parse(str(tmp_path / "mine.toml")).device
    assert mine.attends("cudnn") == mine.attends("flash") == (flash.cluster.device.attention[0], 0.5)


def test_hidden_messages_between_nodes_cost_a_part_on_hopper() -> None:
    """Of as many seconds as they take; nothing within a node, nothing on A100."""
    layout, B = Layout(dp_shard=64, zero=3), 8

    def exposed(name: str, **changed: Any) -> float:
        cluster = parse(f"{name}:64")
        cluster = replace(cluster, device=replace(cluster.device, **changed))
        section = ModelSection(layers=32, dim=4096, heads=32, ffn_dim=11008, seq_len=4096)
        s = setting(resolve_model(section, vocab_size=32000), layout, cluster, B, 4)
        return time.step(s).exposed["model"]

    free, part = exposed("h100", contended=0.0), exposed("h100")
    s = llama_setting(layout, FIVEFOLD, 4, B)
    own = model_states.elements(s.model, layout).blocks[0]
    once, each, alone = stage_costs.sent(own, s)
    assert (once, alone) == (stage_costs.Sent(), 0.0)
    assert part - free == pytest.approx(4 * 32 * (2 * each.gathering + each.scattering))
    assert exposed("a100") == exposed("a100", contended=0.0)
    within = replace(layout, dp_shard=8)
    assert stage_costs.sent(own, llama_setting(within, FIVEFOLD))[1][4:] == (0.0, 0.0)


def test_delayed_scales_round_less() -> None:
    """Weights once per step under ZeRO 1, too; activations and gradients once, each read once."""
    layout = Layout(dp_shard=2, zero=1)

    def block(software: Software) -> float:
        s = setting(llama_setting(layout, software).model, layout, parse("h100"), 1, 16, "fp8", software)
        return sum(operation(op, s).seconds for op in s.work.block[s.kind(False, "none")])

    ours, delayed = block(FIVEFOLD), block(replace(FIVEFOLD, delayed=True))
    s = llama_setting(layout, FIVEFOLD)
    products = [op.matmul for op in s.work.block[s.kind(False, "none")] if op.matmul]
    weights, inputs, outputs = (
        sum(a * b for a, b in pairs)
        for pairs in zip(*(((m.n, m.k), (m.m, m.k), (m.m, m.n)) for m in products), strict=True)
    )
    before = (2 * 2 + 1) * 2 * (weights + inputs + outputs)
    after = (2 + 2 * 1) * (inputs + outputs)
    assert ours - delayed == pytest.approx(cost.stream(before - after, s.cluster.device))

    def update(software: Software) -> float:
        own = setting(s.model, layout, parse("h100"), 1, 16, "fp8", software)
        return time.update(own, model_states.rank_elements(own)[0])

    bare = replace(FIVEFOLD, states={"fp8": replace(FIVEFOLD.states["fp8"], rounded=0.0)}, delayed=True)
    matrices = model_states.rank_elements(s)[0].matrices
    moved = update(replace(FIVEFOLD, delayed=True)) - update(FIVEFOLD)
    assert update(bare) == update(replace(FIVEFOLD, delayed=True))
    assert moved == pytest.approx(cost.stream(4 * matrices, s.cluster.device))
