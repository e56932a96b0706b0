"""Time: published measurements with nothing fitted to them, and how single prices behave."""

from dataclasses import replace

import pytest

from fivefold.layout import Layout
from fivefold.plan import operations, rates, time
from fivefold.plan.clusters import parse
from fivefold.plan.operations import Matmul
from fivefold.plan.predict import setting
from fivefold.plan.software import FIVEFOLD, PAPER, Software
from fivefold.recipe import resolve_model
from fivefold.recipe.schema import ModelSection

# arXiv 2104.04473, table 1 (A100, T 2048, V 51200, full recomputation): layers, dim, heads; tp, pp, dp, virtual stages;
# sequences a microbatch and a step; seconds of a step (of its TFLOP/s by its equation 3).
SC21 = [
    (24, 2304, 24, 1, 1, 32, 1, 16, 512, 3.528),
    (30, 3072, 32, 2, 1, 32, 1, 16, 512, 3.697),
    (36, 4096, 32, 4, 1, 32, 1, 16, 512, 3.696),
    (40, 6144, 48, 8, 1, 32, 1, 8, 1024, 9.399),
    (48, 8192, 64, 8, 2, 32, 1, 4, 1536, 14.453),
    (60, 10240, 80, 8, 4, 32, 3, 2, 1792, 16.058),
    (80, 12288, 96, 8, 8, 24, 2, 2, 2304, 24.817),
    (96, 16384, 128, 8, 16, 15, 2, 1, 2160, 37.614),
    (105, 20480, 128, 8, 35, 9, 3, 1, 2520, 54.085),
    (128, 25600, 160, 8, 64, 6, 1, 1, 3072, 102.63),
]
MEGATRON = Software(
    attention="plain",
    probability_dropout=True,
    selective="core",
    loss="plain",
    overlap_data=False,
    overlap_pipeline=False,
    scatters_transfers=True,
    optimizer_passes=2,
    partition="even",
    host=0,
    step=0,
    states={"fp16": PAPER},
)


def gpt(layers: int, dim: int, heads: int) -> ModelSection:
    section = ModelSection(arch="gpt2", layers=layers, dim=dim, heads=heads, seq_len=2048, dropout=0.1)
    return resolve_model(section, vocab_size=51200)


def test_iterations_of_megatron() -> None:
    errors = []
    for layers, dim, heads, tp, pp, dp, virtual, B, batch, measured in SC21:
        layout = Layout(
            pp=pp,
            dp_replicate=dp,
            tp=tp,
            recompute="full",
            schedule="interleaved" if virtual > 1 else "1f1b",
            virtual_stages=virtual,
        )
        s = setting(gpt(layers, dim, heads), layout, parse("a100"), B, batch // dp // B, "fp16", MEGATRON)
        errors.append(abs(time.step(s).seconds / measured - 1))
    assert sum(errors) / len(errors) < 0.07
    assert max(errors) < 0.12


@pytest.mark.parametrize(
    ("sp", "recompute", "forward", "backward"),
    [
        (False, "none", 7.7, 11.9),
        (True, "none", 7.2, 11.8),
        (False, "full", 7.7, 19.5),
        (False, "selective", 7.7, 13.2),
        (True, "selective", 7.2, 13.1),
    ],
)
def test_a_layer_of_22b(sp: bool, recompute: str, forward: float, backward: float) -> None:
    """arXiv 2205.05198, table 4: milliseconds."""
    layout = Layout(tp=8, sp=sp, recompute=recompute)
    s = setting(gpt(48, 6144, 64), layout, parse("a100"), 4, 1, "fp16", MEGATRON)
    cost = time.part(operations.block(s.sizes, MEGATRON), s, recompute)
    assert 1e3 * cost.forward == pytest.approx(forward, rel=0.04)
    assert 1e3 * (cost.input + cost.weight) == pytest.approx(backward, rel=0.07)


def test_products_come_in_waves() -> None:
    """A product of one tile more than the device has processors takes twice as long as one that fills them."""
    device = parse("a100").device
    full = rates.matmul(Matmul(256 * 108, 128, 8192), device, "bf16", 2)
    more = rates.matmul(Matmul(256 * 109, 128, 8192), device, "bf16", 2)
    assert more / full > 1.3
    large = Matmul(8192, 8192, 8192)
    rate = 2 * 8192**3 / rates.matmul(large, device, "bf16", 2)
    assert 0.9 * 271e12 < rate <= 271.3e12


def test_thin_products_move_bytes() -> None:
    device = parse("h100").device
    thin = Matmul(16, 8192, 8192)
    seconds = rates.matmul(thin, device, "bf16", 2)
    assert seconds == pytest.approx(rates.stream((16 * 8192 * 2 + 8192**2) * 2, device), rel=0.01)


def test_the_slowest_of_many() -> None:
    assert rates.slowest(1) == 1
    assert 1 < rates.slowest(8) < rates.slowest(128) < rates.slowest(16384) < 1.07


def llama(layout: Layout, microbatches: int = 16, software: Software = FIVEFOLD) -> time.Step:
    section = ModelSection(layers=32, dim=4096, heads=32, ffn_dim=11008, seq_len=4096)
    model = resolve_model(section, vocab_size=32000)
    return time.step(setting(model, layout, parse("h100"), 1, microbatches, "bf16", software))


def test_many_microbatches_as_if_all_were_simulated() -> None:
    """What is added for microbatches that are not simulated is what they would take."""
    for name, v in (("1f1b", 1), ("interleaved", 2), ("zb_h1", 1), ("zbv", 1)):
        layout = Layout(pp=4, schedule=name, virtual_stages=v)
        few, many = llama(layout, 12).seconds, llama(layout, 24).seconds
        section = ModelSection(layers=32, dim=4096, heads=32, ffn_dim=11008, seq_len=4096)
        s = setting(resolve_model(section, vocab_size=32000), layout, parse("h100"), 1, 24)
        costs = time.stage_costs(s)
        parts = tuple((c.forward, c.input, c.weight) for c in costs)
        exact, _ = time._simulated(name, 4, 24, v, parts, tuple(time._transfers(s).items()))
        assert time.pipeline(s, costs)[0] == pytest.approx(exact, rel=2e-3)
        assert few < many


def test_overlap_hides_messages() -> None:
    layout = Layout(dp_shard=64, zero=3)
    hidden = llama(layout, 4)
    shown = llama(layout, 4, replace(FIVEFOLD, overlap_data=False))
    assert hidden.exposed["model"] < 0.1 * shown.exposed["model"]
    assert hidden.seconds < shown.seconds


def test_small_work_waits_for_the_processor() -> None:
    slow = replace(FIVEFOLD, host=20e-3)
    assert llama(Layout(), 4, slow).seconds == pytest.approx(4 * 32 * 2 * 20e-3, rel=0.1)
