"""The field's rules of thumb, by the examples of the papers they come from."""

import json
import math
import random
import re
from dataclasses import replace
from pathlib import Path

import pytest
from typer import BadParameter
from typer.testing import CliRunner

from fivefold.cli import options
from fivefold.cli.main import app
from fivefold.errors import UserError
from fivefold.optim.noise import noise_parts
from fivefold.recipe import change, count_parameters, load
from fivefold_plan.advice import budget, failures
from fivefold_plan.advice.budget import Questions, answer, ask, lines
from fivefold_plan.cluster.clusters import parse
from fivefold_plan.commands import budgets
from fivefold_plan.predict import Plan, predict
from fivefold_plan.search import search as searching
from fivefold_plan.search.search import fewest_devices, search

RUNNER = CliRunner()
LLAMA = load("llama-7b", ["train.global_batch_size=512"], "dp=64,zero=1")
GPT3 = ["model.arch=gpt2", "model.layers=96", "model.dim=12288", "model.heads=96", "model.ffn_dim=none",
        "model.seq_len=2048", "model.vocab_size=51200", "model.norm_eps=none", "train.global_batch_size=1536",
        "train.microbatch_size=1"]  # fmt: skip

SMALL_RUN = ("train.global_batch_size=64", "model.seq_len=2048", "model.vocab_size=32000")


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
    gradient, trace = noise_parts(2, 32, small, large)
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


def test_a_large_vocabulary_leaves_only_deep_models() -> None:
    """A width of 128 has too many weights in the vocabulary already, and one of 64 too few."""
    found = budget.shape(2.6e7, load("llama3-8b").model)
    assert (found.layers, found.dim) == (180, 64)


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
    assert found["devices_for_deadline"] == 8 * math.ceil(1024 * found["days"] / 30 / 8), "whole nodes"
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
    """So many meet it, one node less does not."""
    asked = Questions(1e12, deadline=40 * budget.DAY)
    best, stride = fewest_devices(LLAMA, parse("h100"), asked)
    assert best is not None
    assert stride == 1
    assert answer(best, asked)["days"] <= 40
    fewer = search(LLAMA, parse(f"h100:{best.layout.ranks - 8}"), 1).plans[0]
    assert asked.tokens / fewer.tokens_per_s > 40 * budget.DAY
    half, _ = fewest_devices(LLAMA, parse("h100"), Questions(1e12, deadline=4000 * budget.DAY))
    assert half is not None
    assert half.layout.ranks == 8


def test_deadlines_count_in_whole_nodes_of_any_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in powers of two: one node less is too slow. Where some numbers are tried first, those between are, too."""
    monkeypatch.setattr(searching, "REACH", 8)
    sets = [
        "model.layers=2",
        "model.dim=256",
        "model.heads=2",
        "model.ffn_dim=1024",
        "train.global_batch_size=144",
    ]
    small = change(LLAMA, [*sets, "train.microbatch_size=1"], "dp=1")
    cluster = replace(parse("h100"), per_node=2)
    speeds = {n: search(small, replace(cluster, devices=n), 1).plans[0].tokens_per_s for n in (4, 6)}
    deadline = 1e12 / (0.3 * speeds[4] + 0.7 * speeds[6])
    asked = Questions(1e12, deadline=deadline)
    best, stride = fewest_devices(small, cluster, asked)
    assert best is not None
    assert (best.layout.ranks, stride) == (6, 1)
    assert best.stalls is not None
    monkeypatch.setattr(searching, "MOST_SEARCHES", 1)
    again, stride = fewest_devices(small, cluster, asked)
    assert again is not None
    assert (again.layout, stride) == (best.layout, 1)
    _, stride = fewest_devices(small, cluster, replace(asked, deadline=deadline / 4))
    assert stride > 1, "none of those tried meets it"


def test_a_node_for_which_no_layout_divides_the_batch_meets_no_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(searching, "REACH", 8)
    sets = ["layers=3", "dim=384", "heads=3", "ffn_dim=1024", "seq_len=255"]
    recipe = change(LLAMA, ["train.global_batch_size=2", *(f"model.{field}" for field in sets)], "dp=1")
    assert fewest_devices(recipe, parse("h100:8"), Questions(1e9, deadline=budget.DAY)) == (None, 1)


def test_the_best_interval_between_checkpoints() -> None:
    """No other has more goodput; Young's is it for cheap ones."""
    for saving, between in ((1.0, 1e5), (60.0, 1e4), (900.0, 3e3)):
        best = failures.best_interval(saving, between)
        grid = [best * (0.5 + 0.001 * number) for number in range(1001)]
        most = max(grid, key=lambda every: failures.goodput(every, saving, between, 300.0))
        assert best == pytest.approx(most, rel=0.004)
        share = failures.goodput(best, saving, between, 300.0)
        assert failures.back_for(share, best, saving, between) == pytest.approx(300.0)
    assert failures.best_interval(1.0, 1e5) == pytest.approx(math.sqrt(2e5), rel=0.002)
    assert failures.best_interval(3.0, 1.0) == 1.0
    assert failures.goodput(1e6, 1.0, 100.0, 0.0) == 0.0


@pytest.mark.parametrize(("name", "layout", "write", "days", "steps"), [
    ("llama3-70b", "dp=8,tp=8", 2e9, 2, 1),  # a step is longer than Daly's interval
    ("llama-7b", "dp=64,zero=1", 2e8, 2, 11),  # as is the writing
    ("llama-7b", "dp=64,zero=1", 2e8, 400, 33),  # Daly's
])  # fmt: skip
def test_the_best_interval_can_be_reached(
    name: str, layout: str, write: float, days: float, steps: int
) -> None:
    """It is a whole number of steps, and no other has more goodput, each as a plan with that interval has it: steps
    wait for what is unwritten when the next checkpoint begins."""
    cluster, asked = parse("h100:64"), Questions(1e12, mtbf=days * budget.DAY)
    disks = replace(cluster, storage=replace(cluster.storage, write=write))
    recipe = load(name, ["train.steps=1000000", "checkpoint.minutes=0"], layout)

    def planned(every: int) -> Plan:
        return predict(change(recipe, [f"checkpoint.every={every}"]), disks)

    plan = planned(steps)
    found, shares = answer(plan, asked), dict[int, float]()
    for every in {1, max(1, steps - 1), steps, steps + 1, 2 * steps}:
        shares[every] = answer(planned(every), asked)["goodput"]
    assert found["best_interval_steps"] == steps
    assert max(shares.values()) == shares[steps] == found["best_goodput"]
    assert found["best_interval_s"] == steps * plan.step.seconds
    assert plan.stalls is not None
    copied = plan.stalls.checkpoint / plan.ranks / plan.setting.cluster.host_link.write
    unwritten = plan.stalls.writing - steps * plan.step.seconds
    assert plan.stalls.saving == pytest.approx(max(copied, unwritten), rel=1e-12)


def test_the_advised_minutes_are_the_best_steps() -> None:
    """They are rounded up to whole steps, so the advice is rounded down."""
    recipe = load("llama3-70b", ["train.steps=1000000", "checkpoint.minutes=10000"], "dp=8,tp=8")
    asked = Questions(1e12, mtbf=2 * budget.DAY)
    with pytest.raises(UserError, match="with a goodput of 75%") as error:
        answer(predict(recipe, parse("h100:64")), asked)
    said = re.search(r"checkpoint.minutes = [\d.]+\d", str(error.value))
    assert said is not None
    plan = predict(change(recipe, [said[0].replace(" ", "")]), parse("h100:64"))
    assert plan.stalls is not None
    assert plan.stalls.every == answer(plan, asked)["best_interval_steps"] == 1


def test_goodput_is_what_a_simulated_run_reaches() -> None:
    """Failures at random, also while a checkpoint is written and while the run restarts."""
    draw, every, saving, between, restart = random.Random(1), 800.0, 60.0, 3000.0, 400.0
    time = kept = 0.0
    while kept < 1e7:
        if (at := draw.expovariate(1 / between)) >= every + saving:
            time, kept = time + every + saving, kept + every
            continue
        time += at + restart
        while (at := draw.expovariate(1 / between)) < restart:
            time += at
    assert kept / time == pytest.approx(failures.goodput(every, saving, between, restart), rel=0.02)


def test_what_llama_3_took_until_training_went_on() -> None:
    """arXiv 2407.21783: 466 interruptions in 54 days and more than 90% effective time. Its file system took 2 TB/s."""
    between, saving = 54 * budget.DAY / 466, 405e9 * 12 / 2e12
    back = failures.back_for(0.9, failures.best_interval(saving, between), saving, between)
    assert (back / 60, (back - saving) / 60) == pytest.approx((13.89, 13.85), abs=0.005)


def test_stalls_failures_and_energy_are_counted() -> None:
    recipe = change(LLAMA, ["checkpoint.minutes=30"])
    plan = predict(recipe, parse("h100:64"))
    stalls, step = plan.stalls, plan.step.seconds
    assert stalls is not None
    assert stalls.saving < stalls.writing, "it is written beside the steps"
    quiet = answer(plan, Questions(1e12))
    share = stalls.saving / (stalls.every * step + stalls.saving)
    assert quiet["checkpoint_share"] == pytest.approx(share)
    assert quiet["days"] == pytest.approx(quiet["training_days"] / (1 - share))
    assert quiet["energy_mwh"] == pytest.approx(quiet["days"] * 24 * 64 * 700 / 1e6)
    assert quiet["tokens_per_day"] * quiet["days"] == pytest.approx(1e12)
    assert "not counted" in "".join(lines(quiet))
    bad = answer(plan, Questions(1e12, price=2.0, mtbf=10 * budget.DAY, restart=600.0))
    between, every = 10 * budget.DAY / 64, stalls.every * step
    back = 600.0 + stalls.checkpoint / 8 / 2e9 + stalls.writing - stalls.saving
    assert (bad["failure_every_s"], bad["back_s"]) == pytest.approx((between, back))
    assert bad["goodput"] == pytest.approx(failures.goodput(every, stalls.saving, between, back))
    assert bad["goodput"] == pytest.approx(bad["training_days"] / bad["days"], rel=1e-14)
    assert bad["best_goodput"] > bad["goodput"]
    assert bad["cost_per_1e9_tokens"] == pytest.approx(bad["cost"] / 1000)
    assert "goodput" in "".join(lines(bad))
    with pytest.raises(UserError, match=r"never ends\. Best: checkpoint\.minutes = "):
        answer(plan, Questions(1e12, mtbf=3600.0))


def test_a_cluster_file_has_prices_failures_and_power(tmp_path: Path) -> None:
    file = tmp_path / "lab.toml"
    file.write_text(
        'base = "h100"\nprice_per_hour = 2\nmtbf_hours = 45567\nrestart_minutes = 5\ndevice_watts = 1275\n'
    )
    plan = predict(LLAMA, parse(f"{file}:64"))
    found = answer(plan, Questions(1e12))
    assert found["cost"] == pytest.approx(2 * found["device_hours"])
    assert found["failure_every_s"] == pytest.approx(45567 * 3600 / 64)
    assert found["back_s"] > 300
    assert found["energy_mwh"] == pytest.approx(found["device_hours"] * 1275 / 1e6)
    other = answer(plan, Questions(1e12, price=3.0, mtbf=1e9))
    assert (other["price"], other["mtbf_s"]) == (3.0, 1e9)


def test_several_clusters_side_by_side() -> None:
    options = ["plan", "llama2-7b", "--set", "model.layers=2", "--cluster", "h100:64", "--cluster", "a100:2"]
    prices = ["--price", "2.5", "--price", "1.2", "--tokens", "1T"]
    text = RUNNER.invoke(app, [*options, *prices]).stdout.splitlines()
    assert [line.split()[:2] for line in text[2:]] == [["h100", "64"], ["a100", "2"]]
    assert text[3].endswith("(searched)")
    assert not re.search(r"\de[+]?\d", "".join(text)), "tokens as people write them: 343.2B"
    found = json.loads(RUNNER.invoke(app, [*options, *prices, "--json"]).stdout)["clusters"]
    assert [one["budget"]["price"] for one in found] == [2.5, 1.2]
    assert all(one["budget"]["tokens"] == 1e12 for one in found)
    assert f"{found[1]['budget']['cost']:,.0f}" in text[3]
    one_each = RUNNER.invoke(app, [*options, "--price", "1", "--price", "2", "--price", "3"])
    assert str(one_each.exception) == "3 --price for 2 clusters: give one, or one for each"
    saved = RUNNER.invoke(app, [*options, "--save", "x.toml"])
    assert "--save is for one --cluster" in str(saved.exception)
    top = RUNNER.invoke(app, ["plan", "search", *options[1:], "--top", "3"])
    assert "--top is for one --cluster" in str(top.exception)


def test_a_cluster_without_a_plan_has_a_row_with_the_reason() -> None:
    options = ["plan", "llama2-7b", "--set", "model.layers=2", "--cluster", "t4:8"]
    text = RUNNER.invoke(app, [*options, "--cluster", "h100:64"]).stdout.splitlines()
    assert text[2].split()[:3] == ["t4:8", "-", "-"]
    assert "t4 has no rate of bf16" in text[2]
    assert text[3].split()[:2] == ["h100", "64"]
    found = json.loads(RUNNER.invoke(app, [*options, "--cluster", "h100:64", "--json"]).stdout)["clusters"]
    assert found[0]["cluster"] == "t4:8"
    assert "no rate of bf16" in found[0]["error"]
    assert found[1]["budget"]["days"] > 0
    none = RUNNER.invoke(app, [*options, "--cluster", "t4:16"])
    assert str(none.exception).count("t4 has no rate of bf16") == 1


@pytest.mark.parametrize(
    ("text", "number"),
    [("15T", 15e12), ("1.4e12", 1.4e12), ("300b", 300e9), ("2.5M", 2.5e6), ("4 K", 4e3), ("7", 7)],
)
def test_numbers_have_letters(text: str, number: float) -> None:
    assert options.number(text) == pytest.approx(number)


def test_what_is_no_number_is_refused() -> None:
    for text in ("15Q", "T", "1e", "1,000", "15TB"):
        with pytest.raises(BadParameter, match=r"write 1\.4e12, 300B or 15T"):
            options.number(text)
    result = RUNNER.invoke(app, ["plan", "llama-7b", "--tokens", "15Q"])
    assert result.exit_code == 2


def test_times_of_day() -> None:
    for text, seconds in (("30d", 30 * 86400), ("1.5h", 5400), ("90m", 5400), ("2w", 14 * 86400)):
        assert ask(None, text, None, None, 1e9).deadline == seconds
    for text in ("30", "0d", "1e3d", "-1d"):
        with pytest.raises(UserError, match="such as 30d"):
            ask(None, text, None, None, 1e9)


def test_a_restart_may_take_no_time(tmp_path: Path) -> None:
    assert ask(None, None, None, None, 1e9, "1d", "0m").restart == 0
    with pytest.raises(UserError, match="--mtbf 0m: must be a number above 0"):
        ask(None, None, None, None, 1e9, "0m", "0m")
    file = tmp_path / "lab.toml"
    for text, refused in (("0", ""), ("-1e-10", "restart_minutes: must be a number of at least 0")):
        file.write_text(f'base = "h100"\nrestart_minutes = {text}\n')
        if refused:
            with pytest.raises(UserError, match=refused):
                parse(f"{file}:64")
        else:
            assert parse(f"{file}:64").restart == 0


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
        "1.4T tokens",
        "device-hours",
        "at this price",
        "30 days: ",
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


def planned_text(*options: str, sets: tuple[str, ...] = SMALL_RUN) -> str:
    words = [word for text in sets for word in ("--set", text)]
    return RUNNER.invoke(app, ["plan", "quickstart", *words, *options]).output


def failed(*options: str) -> str:
    with pytest.raises(UserError) as caught:
        RUNNER.invoke(app, ["plan", "quickstart", *options], catch_exceptions=False)
    return str(caught.value)


@pytest.mark.slow
def test_a_deadline_without_a_number_of_devices_plans_the_fewest(monkeypatch: pytest.MonkeyPatch) -> None:
    """They fit and meet it; one node less does not."""
    options = ("--params", "1B", "--tokens", "100B", "--deadline", "1d", "--json", "--cluster")
    found = json.loads(planned_text(*options, "h100"))
    assert found["fits"]
    assert found["budget"]["days"] <= 1
    assert "devices are the fewest, in whole nodes, that fit and meet the deadline" in found["searched"]
    ranks = found["ranks"]
    assert ranks % 8 == 0
    fewer = json.loads(planned_text(*options, f"h100:{ranks - 8}"))
    assert fewer["ranks"] == ranks - 8
    assert fewer["budget"]["days"] > 1
    monkeypatch.setattr(searching, "fewest_devices", lambda *asked: (None, 1))
    text = failed(*options, "h100")
    assert "no tried number of whole nodes of h100 fits and meets it" in text
    assert "train.global_batch_size" in text


def test_a_plan_that_does_not_fit_has_no_days() -> None:
    options = ("--params", "13B", "--layout", "dp=8", "--tokens", "2T", "--deadline", "60d", "--price", "2")
    text = planned_text(*options, "--cluster", "h100:8")
    assert "DOES NOT FIT" in text
    assert "budget        none: the layout does not fit" in text
    assert not any(word in text for word in ("days", "device-hours", "deadline  "))
    assert "budget" not in json.loads(planned_text(*options, "--cluster", "h100:8", "--json"))
    both = planned_text(*options, "--cluster", "h100:8", "--cluster", "a100:8")
    assert both.count("(DOES NOT FIT)") == 2
    assert "tokens, predicted" not in both


def test_the_command_takes_a_size() -> None:
    options = ["plan", "llama-7b", "--params", "13e9", "--cluster", "h100:64", "--tokens", "1e12", "--json"]
    found = json.loads(RUNNER.invoke(app, options).stdout)
    assert found["budget"]["parameters"] == pytest.approx(13e9, rel=0.01)


def test_a_deadline_below_the_fixed_seconds_of_a_step_is_not_searched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No number of devices makes a step shorter than that, so no number is tried."""
    monkeypatch.setattr(searching, "space_of", lambda *_: pytest.fail("a number was tried"))
    text = failed("--params", "1B", "--tokens", "15T", "--deadline", "1h", "--cluster", "h100")
    assert "no tried number of whole nodes of h100 fits and meets it" in text


def test_fewer_devices_are_explained_by_their_shares() -> None:
    assert "648 have no even share of 512 sequences" in budgets.uneven(LLAMA, 688, 648)
    assert not budgets.uneven(LLAMA, 688, 688)
    assert not budgets.uneven(LLAMA, 512, 256)
