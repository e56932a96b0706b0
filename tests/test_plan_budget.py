"""The field's rules of thumb, by the examples of the papers they come from."""

import json
import random

import pytest
from typer.testing import CliRunner

from fivefold.cli.main import app
from fivefold.errors import UserError
from fivefold.plan.advice import budget
from fivefold.plan.advice.budget import Questions, answer, ask, lines
from fivefold.plan.cluster.clusters import parse
from fivefold.plan.predict import predict
from fivefold.plan.search.search import fewest_devices
from fivefold.recipe import change, count_parameters, load

RUNNER = CliRunner()
LLAMA = load("llama-7b", ["train.global_batch_size=512"], "dp=64,zero=1")
GPT3 = ["model.arch=gpt2", "model.layers=96", "model.dim=12288", "model.heads=96", "model.ffn_dim=none",
        "model.seq_len=2048", "model.vocab_size=51200", "model.norm_eps=none", "train.global_batch_size=1536",
        "train.microbatch_size=1"]  # fmt: skip


def test_gpt3_within_a_month() -> None:
    """GPT-3, 300B tokens, 160 TFLOP/s a device: about 800 devices for a month."""
    devices = budget.devices_for(budget.training_flops(175e9, 300e9), 30 * budget.DAY, 160e12)
    assert devices == pytest.approx(760, abs=1)
    assert round(devices, -2) == 800


def test_end_to_end_examples_of_megatron() -> None:
    """arXiv 2104.04473, section 5.1: 34 days for 175B, 300B tokens, 1024 devices at 140 TFLOP/s; 84 days for 1T, 450B,
    3072 at 163."""
    days = 34 * budget.DAY, 84 * budget.DAY
    work = [budget.training_flops(n, d, recompute=True) for n, d in ((175e9, 300e9), (1e12, 450e9))]
    assert budget.devices_for(work[0], days[0], 140e12) == pytest.approx(1024, rel=0.015)
    assert budget.devices_for(work[1], days[1], 163e12) == pytest.approx(3072, rel=0.012)


def test_chinchilla_itself() -> None:
    """70B parameters and 1.4T tokens for its budget, 5.76e23 FLOPs."""
    optimum = budget.chinchilla(5.76e23)
    assert optimum.parameters == pytest.approx(70e9, rel=0.02)
    assert optimum.tokens == pytest.approx(1.4e12, rel=0.02)
    assert budget.training_flops(optimum.parameters, optimum.tokens) == pytest.approx(5.76e23)
    # equation 10 says 1.94 for it, and more for Gopher, which is larger
    assert budget.HOFFMANN.loss(70e9, 1.4e12) == pytest.approx(1.94, abs=0.01)
    assert budget.HOFFMANN.loss(280e9, 300e9) > budget.HOFFMANN.loss(70e9, 1.4e12)


def test_kaplan_spends_on_the_model() -> None:
    day = 1e15 * budget.DAY
    assert budget.kaplan(day).parameters == pytest.approx(1.3e9)
    assert budget.kaplan(100 * day).parameters / budget.kaplan(day).parameters == pytest.approx(100**0.73)
    assert budget.kaplan(1e24).parameters > budget.chinchilla(1e24).parameters


def test_noise_scale_of_known_noise() -> None:
    """Gradients of mean 1 and variance 4 in each of 50 dims: the scale is 4."""
    draw = random.Random(0)

    def square(batch: int) -> float:
        mean = [sum(draw.gauss(1, 2) for _ in range(batch)) / batch for _ in range(50)]
        return sum(x * x for x in mean)

    small = sum(square(2) for _ in range(400)) / 400
    large = sum(square(32) for _ in range(200)) / 200
    gradient, trace = budget.noise_parts(2, 32, small, large)
    assert trace / gradient == pytest.approx(4, rel=0.1)


def test_critical_batch_grows_as_the_loss_falls() -> None:
    assert budget.critical_batch_tokens(2.0) > 1e6 * budget.critical_batch_tokens(3.0) / 1e6 * 5


@pytest.mark.parametrize(
    ("parameters", "arch", "layers", "dim"),
    [
        (6.74e9, "llama", 32, 4096),  # Llama 7B (arXiv 2302.13971, table 2)
        (13.0e9, "llama", 40, 5120),  # 13B
        (175e9, "gpt2", 96, 12288),  # GPT-3 (arXiv 2005.14165, table 2.1)
        (405e9, "llama", 127, 16256),  # Llama 3 405B has 126, 16384
    ],
)
def test_shape_of_a_size(parameters: float, arch: str, layers: int, dim: int) -> None:
    found = budget.shape(parameters, change(LLAMA, [f"model.arch={arch}"]).model)
    assert (found.layers, found.dim) == (layers, dim)
    assert count_parameters(found) == pytest.approx(parameters, rel=0.01)


@pytest.mark.parametrize("arch", ["llama", "gpt2", "bert", "moe", "deepseek"])
@pytest.mark.parametrize("parameters", [3e8, 7e9, 1e12])
def test_shapes_make_models_of_about_their_size(arch: str, parameters: float) -> None:
    like = load("mixtral-8x7b").model if arch == "moe" else change(LLAMA, [f"model.arch={arch}"]).model
    found = budget.shape(parameters, like)
    assert count_parameters(found) == pytest.approx(parameters, rel=0.2 if parameters < 1e9 else 0.03)
    assert found.dim % found.heads == 0


def test_a_critical_batch_takes_twice_of_both() -> None:
    """arXiv 1812.06162, equation 2.11: (S / S_min - 1) (E / E_min - 1) = 1."""
    assert budget.batch_cost(1e6, 1e6) == (2.0, 2.0)
    for batch in (1e4, 3e5, 1e7):
        steps, tokens = budget.batch_cost(batch, 1e6)
        assert (steps - 1) * (tokens - 1) == pytest.approx(1.0)


def test_answers_about_gpt3() -> None:
    """On A100 at the 140 TFLOP/s that arXiv 2104.04473 reached on 1024 of them it takes 34 days with recomputation."""
    recipe = change(LLAMA, GPT3, "pp=8,tp=8,dp=16,recompute=full,schedule=interleaved,virtual_stages=2")
    plan = predict(recipe, parse("a100:1024"))
    found = answer(plan, Questions(300e9, deadline=30 * budget.DAY, price=2.0))
    assert found["parameters"] == pytest.approx(175e9, rel=0.005)
    assert found["flops_6nd"] == pytest.approx(6 * found["parameters"] * 300e9)
    assert found["flops_with_attention"] > found["flops_6nd"]
    assert 25 < found["days"] < 40
    assert found["device_hours"] == pytest.approx(24 * 1024 * found["days"])
    assert found["cost"] == pytest.approx(2 * found["device_hours"])
    assert found["devices_for_deadline"] == pytest.approx(1024 * found["days"] / 30, rel=0.001)
    assert found["optimal_tokens"] == pytest.approx(3.5e12, rel=0.005)
    assert found["kaplan"]["parameters"] > found["chinchilla"]["parameters"] > 5e10


def test_the_measured_noise_scale_is_the_critical_batch() -> None:
    plan = predict(LLAMA, parse("h100:64"))
    measured = answer(plan, Questions(1e12, noise_scale=float(plan.tokens)))
    assert (measured["steps_over_fewest"], measured["tokens_over_fewest"]) == (2.0, 2.0)
    assert measured["critical_batch_from"] == "noise scale"
    assert answer(plan, Questions(1e12))["critical_batch_from"] == "expected loss"


@pytest.mark.slow
def test_devices_are_searched_for_a_deadline() -> None:
    """So many meet it, half as many do not."""
    asked = Questions(1e12, deadline=40 * budget.DAY)
    best = fewest_devices(LLAMA, parse("h100"), asked, 24)
    assert best is not None
    assert asked.tokens / best.tokens_per_s <= asked.deadline  # pyright: ignore[reportOperatorIssue]
    half = fewest_devices(LLAMA, parse("h100"), Questions(1e12, deadline=4000 * budget.DAY), 1)
    assert half is not None
    assert half.layout.ranks == 8


def test_times_of_day() -> None:
    for text, seconds in (("30d", 30 * 86400), ("1.5h", 5400), ("90m", 5400), ("2w", 14 * 86400)):
        assert ask(None, text, None, None, 1e9).deadline == seconds
    for text in ("30", "0d", "1e3d", "-1d"):
        with pytest.raises(UserError, match="such as 30d"):
            ask(None, text, None, None, 1e9)


def test_the_command_answers() -> None:
    options = [
        "plan",
        "llama-7b",
        "--cluster",
        "h100:64",
        "--tokens",
        "1.4e12",
        "--deadline",
        "30d",
        "--price",
        "2.5",
    ]
    text = RUNNER.invoke(app, options).stdout
    for word in (
        "1.4e+12 tokens",
        "device-hours",
        "at this price",
        "30 days need",
        "Chinchilla",
        "critical size",
    ):
        assert word in text
    found = json.loads(RUNNER.invoke(app, [*options, "--json"]).stdout)["budget"]
    assert found["cost"] == pytest.approx(2.5 * found["device_hours"])
    assert lines(found)


@pytest.mark.slow
def test_the_command_searches_for_the_deadline() -> None:
    options = [
        "plan",
        "search",
        "llama-7b",
        "--cluster",
        "h100:8",
        "--top",
        "1",
        "--deadline",
        "60d",
        "--json",
    ]
    found = json.loads(RUNNER.invoke(app, options).stdout)
    assert found["budget"]["searched_devices"] % 8 == 0
    assert f"searched: {found['budget']['searched_devices']} devices finish" in found["budget"]["searched"]


def test_the_command_takes_a_size() -> None:
    options = ["plan", "llama-7b", "--params", "13e9", "--cluster", "h100:64", "--tokens", "1e12", "--json"]
    found = json.loads(RUNNER.invoke(app, options).stdout)
    assert found["budget"]["parameters"] == pytest.approx(13e9, rel=0.01)
