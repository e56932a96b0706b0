"""Memory: the published formulas exactly, and the tables of what the trainer keeps."""

import csv
import io

import pytest

from fivefold.layout import Layout
from fivefold.plan import memory, operations
from fivefold.plan.operations import Sizes
from fivefold.plan.software import BF16, FIVEFOLD, FP32, PAPER, Software
from fivefold.recipe import resolve_model
from fivefold.recipe.schema import ModelSection
from fivefold.sharding import held, size_of

# arXiv 1910.02054, table 1: GB of model states by data-parallel size; ZeRO stages 1, 2, 3 of 7.5B, 128B, 1T.
ZERO = """dp,7.5B 1,7.5B 2,7.5B 3,128B 1,128B 2,128B 3,1T 1,1T 2,1T 3
1,120,120,120,2048,2048,2048,16000,16000,16000
4,52.5,41.3,30,896,704,512,7000,5500,4000
16,35.6,21.6,7.5,608,368,128,4750,2875,1000
64,31.4,16.6,1.88,536,284,32,4187,2218,250
256,30.4,15.4,0.47,518,263,8,4046,2054,62.5
1024,30.1,15.1,0.12,513,257,2,4011,2013,15.6
"""
SIZES = {"7.5B": 7.5e9, "128B": 128e9, "1T": 1e12}


@pytest.mark.parametrize("row", list(csv.DictReader(io.StringIO(ZERO))), ids=lambda row: f"dp{row['dp']}")
def test_zero_table(row: dict[str, str]) -> None:
    """To the last digit printed: the paper rounds decimals and cuts off what follows a whole number."""
    shards = int(row.pop("dp"))
    for key, printed in row.items():
        name, zero = key.split()
        found = sum(memory.state_bytes(PAPER, int(zero), SIZES[name], SIZES[name] / shards)) / 1e9
        digits = len(printed.partition(".")[2])
        if digits:
            assert abs(found - float(printed)) <= 0.5 * 10**-digits + 1e-9
        else:
            assert int(found) == int(printed)


MEGATRON = Software(attention="plain", probability_dropout=True, selective="core", loss="plain")


def gpt(
    layers: int = 4, dim: int = 1024, heads: int = 16, seq_len: int = 2048, V: int = 51200
) -> ModelSection:
    model = ModelSection(arch="gpt2", layers=layers, dim=dim, heads=heads, seq_len=seq_len, dropout=0.1)
    return resolve_model(model, vocab_size=V)


@pytest.mark.parametrize("t", [1, 2, 8])
@pytest.mark.parametrize("b", [1, 4])
def test_activations_of_a_layer_are_those_of_the_formulas(t: int, b: int) -> None:
    """arXiv 2205.05198, table 2."""
    model = gpt()
    s, h, a = model.seq_len, model.dim, model.heads

    def layer(recompute: str, sp: bool) -> float:
        ops = operations.block(Sizes(model, b, tp=t, sp=sp and t > 1), MEGATRON)
        return operations.kept(ops, recompute, MEGATRON)

    assert layer("none", False) == s * b * h * (10 + 24 / t + 5 * a * s / (h * t))
    assert layer("none", True) == s * b * h * (34 / t + 5 * a * s / (h * t))
    assert layer("selective", False) == s * b * h * (10 + 24 / t)
    assert layer("selective", True) == s * b * h * 34 / t
    assert layer("full", False) == s * b * h * 2


@pytest.mark.parametrize(("p", "t"), [(1, 8), (1, 2)])
def test_what_comes_besides_the_layers(p: int, t: int) -> None:
    """Section 4.3 there: the mask of the embedding, the last norm, the output layer's input and fp32 logits."""
    model, b = gpt(), 2
    s, h, L, v = model.seq_len, model.dim, model.layers, model.vocab_size or 0
    sizes = Sizes(model, b, tp=t, sp=True)
    extra = sum(
        operations.kept(ops, "none", MEGATRON)
        for ops in (operations.begin(sizes, MEGATRON), operations.end(sizes, MEGATRON))
    )
    assert extra == s * b * h * L / t * (p / L + (4 / L) * (1 + v / h))


def test_live_microbatches_of_the_first_stage() -> None:
    """1F1B keeps p microbatches of L/p layers: L layers; interleaved 1 + (p-1)/(pm) times as much."""
    model, p = gpt(layers=16), 4
    per_layer = operations.kept(operations.block(Sizes(model, 1), MEGATRON), "none", MEGATRON)
    plain = memory.live_schedule(Layout(pp=p), 32)
    looped = memory.live_schedule(Layout(pp=p, schedule="interleaved", virtual_stages=2), 32)
    assert plain is not None
    assert looped is not None
    assert memory.peak_live(plain, [per_layer * 4] * 4)[0] == per_layer * 16
    assert memory.peak_live(looped, [per_layer * 2] * 8)[0] == per_layer * 16 * (1 + (p - 1) / (p * 2))


@pytest.mark.parametrize(
    "layout",
    [
        Layout(),
        Layout(tp=2),
        Layout(pp=2, tp=2),
        Layout(dp_shard=4, zero=1),
        Layout(pp=2, dp_shard=3, zero=3, schedule="interleaved", virtual_stages=2),
        Layout(pp=2, dp_shard=2, cp=2, tp=2, zero=2, schedule="zbv"),
        Layout(dp_replicate=2),
    ],
    ids=str,
)
@pytest.mark.parametrize("arch", ["llama", "gpt2", "bert", "moe"])
def test_elements_are_those_of_the_sharding_table(layout: Layout, arch: str) -> None:
    section = ModelSection(arch=arch, layers=7, dim=64, heads=4, seq_len=32, ffn_dim=96)  # pyright: ignore[reportArgumentType]
    model = resolve_model(section, vocab_size=256)
    for position, own in enumerate(memory.rank_elements(model, layout)):
        rank = layout.rank({"pp": position})
        parts = held(model, layout, rank).values()
        assert own.computes == sum(size_of(part.computes) for part in parts)
        assert own.keeps == sum(size_of(part.keeps) for part in parts)


def test_parts_of_a_prediction_add_up() -> None:
    model = resolve_model(ModelSection(layers=8, dim=512, heads=8, seq_len=1024), vocab_size=32000)
    layout = Layout(pp=2, dp_shard=4, zero=1)
    first, last = memory.predict(model, layout, Sizes(model, 2), FIVEFOLD, "bf16", microbatches=8)
    for found, own in zip((first, last), memory.rank_elements(model, layout), strict=True):
        assert found.params == 2 * own.computes
        assert found.gradients == 4 * (own.computes + own.keeps)  # whole while microbatches add up
        assert found.optimizer == 12 * own.keeps
        parts = [v for k, v in found.as_json().items() if k != "total"]
        assert found.total == pytest.approx(sum(parts), abs=5)
    assert first.activations > last.activations  # two live microbatches against one


def test_recomputation_takes_less() -> None:
    model = resolve_model(ModelSection(layers=8, dim=512, heads=8, seq_len=1024), vocab_size=32000)
    sizes = Sizes(model, 4)
    none, selective, full = (
        memory.predict(model, Layout(recompute=how), sizes, FIVEFOLD, "bf16", 1)[0].activations
        for how in ("none", "selective", "full")
    )
    assert none > selective > full


def test_states_of_the_trainer() -> None:
    """bf16: 18 bytes a parameter (weights 2, masters 4, gradients 4, moments 8). Under ZeRO as FSDP2 has them: masters,
    moments and gradients of the own rows, weights whole while they are gathered."""
    psi, n = 1000.0, 4
    assert sum(memory.state_bytes(BF16, 0, psi, psi)) == 18 * psi
    assert sum(memory.state_bytes(BF16, 1, psi, psi / n)) == (2 + 4) * psi + 16 * psi / n
    assert sum(memory.state_bytes(BF16, 1, psi, psi / n, microbatches=1)) == 2 * psi + 16 * psi / n
    assert sum(memory.state_bytes(BF16, 2, psi, psi / n)) == 2 * psi + 16 * psi / n
    assert sum(memory.state_bytes(BF16, 3, psi, psi / n)) == 16 * psi / n
    for zero, weights in ((1, 2), (2, 2), (3, 0)):  # in a pipeline gradients add up whole under every stage
        whole = sum(memory.state_bytes(BF16, zero, psi, psi / n, pipeline=True))
        assert whole == (weights + 4) * psi + 16 * psi / n
    assert sum(memory.state_bytes(FP32, 0, psi, psi)) == 16 * psi
    assert sum(memory.state_bytes(FP32, 3, psi, psi / n)) == 16 * psi / n
