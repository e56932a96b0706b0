"""The prediction as a whole: its shape, what it reacts to, and the command."""

import json
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fivefold.cli.main import app
from fivefold.errors import UserError
from fivefold.recipe import change, load
from fivefold_plan.cluster.clusters import parse
from fivefold_plan.memory import model_states
from fivefold_plan.messages import volume
from fivefold_plan.predict import Plan, predict

RUNNER = CliRunner()
LLAMA = load("llama-7b", ["train.global_batch_size=512"])


def plan(layout: str, cluster: str, *overrides: str) -> Plan:
    return predict(change(LLAMA, overrides, layout), parse(cluster))


def test_shape_of_the_json() -> None:
    found = plan("dp=16,tp=2,pp=2,zero=1,sp=true", "h100:64").as_json()
    assert found["layout"] == "pp=2,dp=16,tp=2,zero=1,sp=true"
    assert found["ranks"] == 64
    assert [set(m) for m in found["memory"]["per_stage"]] == [
        {"params", "gradients", "optimizer", "activations", "buffers", "total"}
    ] * 2
    times = found["time"]
    parts = times["compute_s"] + times["exposed_comm_s"] + times["bubble_s"]
    assert parts == pytest.approx(times["step_s"], rel=0.01)
    assert found["tokens_per_s"] == pytest.approx(64 * found["tokens_per_s_per_gpu"])
    assert found["tokens_per_s"] == pytest.approx(512 * 4096 / times["step_s"])
    assert found["mfu"] == pytest.approx(found["model_tflops_per_gpu"] / 989.4)
    assert set(found["communication"]["bytes_per_rank"]) == {"tp", "pp", "dp"}


def test_bytes_sent() -> None:
    """2 Psi at ZeRO 0 and 1, (1 + m) Psi at 2, 3 m Psi at 3 (parallel/zero.py), in bf16 weights and fp32 gradients."""
    psi = 6738415616
    share = 7 / 8
    batch = ("train.global_batch_size=64", "train.microbatch_size=2")
    sent = {z: plan(f"dp=8,zero={z}", "h100:8", *batch).sent["dp"] for z in range(4)}
    assert sent[0] == pytest.approx(share * psi * 8)
    assert sent[1] == pytest.approx(share * psi * (2 + 4))
    assert sent[2] == pytest.approx(share * psi * (2 + 4 * 4))
    assert sent[3] == pytest.approx(share * psi * 4 * (2 * 2 + 4))


def test_gradients_sent_in_bf16() -> None:
    batch = ("train.global_batch_size=64", "train.microbatch_size=2")
    whole = plan("dp=8", "h100:8", *batch)
    half = plan("dp=8", "h100:8", *batch, "precision.reduce=bf16")
    assert half.sent["dp"] == pytest.approx(whole.sent["dp"] / 2)
    assert half.memory[0].gradients == whole.memory[0].gradients


def test_bytes_sent_by_tensor_parallelism() -> None:
    """A block sums four activations (1909.08053). With sequence parallelism that is as many gathers and scatters, of
    half the bytes each (2205.05198); with sp_regather the kept pieces are gathered once more; embedding and output,
    whose gradients are made in forward, besides; and the gradients of the norms, which see pieces, are summed once a
    step. A gather more is not faster, but keeps less."""
    whole = plan("tp=2", "h100:2", "train.global_batch_size=2").sent["tp"]
    pieces = plan("tp=2,sp=true", "h100:2", "train.global_batch_size=2")
    again = plan("tp=2,sp=true,sp_regather=true", "h100:2", "train.global_batch_size=2")
    activation = 2 * 4096 * 4096 * 2
    statistics = 3 * 4 * 2 * 4096  # of the loss
    assert whole == (4 * 32 + 2) * activation + statistics
    norms = 4 * (2 * 32 + 1) * 4096
    assert pieces.sent["tp"] == (4 * 32 + 2) * activation + statistics + norms
    assert again.sent["tp"] == (5 * 32 + 2) * activation + statistics + norms
    assert again.step.seconds >= pieces.step.seconds
    kept = 32 * 2 * activation / 2  # half of the inputs of two column layers per block
    assert pieces.memory[0].activations - again.memory[0].activations == pytest.approx(kept, rel=0.02)


def test_more_of_it_takes_longer() -> None:
    base = plan("dp=8,zero=1", "h100:8").step.seconds
    assert plan("dp=8,zero=1", "a100:8").step.seconds > 2 * base
    assert plan("dp=8,zero=1,recompute=full", "h100:8").step.seconds == pytest.approx(4 / 3 * base, rel=0.1)
    assert plan("dp=8,zero=1", "h100:8", "train.global_batch_size=1024").step.seconds == pytest.approx(
        2 * base, rel=0.02
    )
    over_network = plan("tp=16,dp=1,sp=true", "h100:16x1").step.exposed["model"]
    within = plan("tp=16,dp=1,sp=true", "h100:1x16").step.exposed["model"]
    assert over_network > 2 * within


def test_bubble_is_the_schedules() -> None:
    """With as many microbatches as stages 1F1B idles nearly half the time; zero bubble much less."""
    few = ("train.global_batch_size=16", "train.microbatch_size=2")
    plain = plan("pp=8", "h100:8", *few).step
    vee = plan("pp=8,schedule=zbv", "h100:8", *few).step
    assert plain.bubble / plain.seconds == pytest.approx(7 / 15, abs=0.05)
    assert vee.bubble < 0.5 * plain.bubble


def test_mixture_of_experts() -> None:
    moe = ("model.arch=moe", "model.experts=8", "train.global_batch_size=64")
    dense = plan("dp=8,zero=1", "h100:8", "train.global_batch_size=64")
    mixed = plan("dp=8,zero=1", "h100:8", *moe)
    spread = plan("dp=8,zero=1,ep=8", "h100:8", *moe)
    assert mixed.memory[0].params > 4 * dense.memory[0].params
    assert spread.memory[0].params < 0.3 * mixed.memory[0].params
    assert spread.sent["ep"] > 0
    assert 1.3 < mixed.step.seconds / dense.step.seconds < 3


def test_experts_are_summed_over_fewer_ranks() -> None:
    """Of 8 ranks with ep=4 two have the same experts; gradients of the rest are summed over all 8."""
    options = ("model.arch=moe", "model.experts=8", "train.global_batch_size=64")
    found = plan("dp=8,ep=4", "h100:8", *options)
    own = model_states.rank_elements(found.setting)[0]
    assert own.experts == 32 * 2 * 3 * 4096 * 11008
    assert found.sent["dp"] == int(2 * 4 * (7 / 8 * (own.computes - own.experts) + 1 / 2 * own.experts))


@pytest.mark.parametrize(
    ("layout", "cluster", "overrides", "message"),
    [
        ("dp=8", "h100:64", (), "= 8, but there are 64 ranks.*Nearest valid"),
        ("dp=8", "h100:8", ("model.vocab_size=none", "data.tokenizer=chars"), "set model.vocab_size"),
    ],
)
def test_errors(layout: str, cluster: str, overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        plan(layout, cluster, *overrides)


def command(*arguments: str) -> str:
    result = RUNNER.invoke(app, ["plan", *arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_command(tmp_path: Path) -> None:
    file = tmp_path / "best.toml"
    options = ["--cluster", "a100:64", "--top", "3", "--json", "--save", str(file)]
    found = json.loads(command("search", "llama-7b", *options))
    assert len(found["plans"]) == 3
    assert found["plans"][0]["fits"]
    assert tomllib.loads(file.read_text())["layout"]
    again = json.loads(command(str(file), "--cluster", "a100:64", "--json"))
    assert again["time"]["step_s"] == pytest.approx(found["plans"][0]["time"]["step_s"])


def test_a_layout_for_another_number_of_devices_is_searched() -> None:
    """The first line says so. A layout that was typed is refused."""
    options = ["llama2-7b", "--set", "model.layers=2", "--cluster", "h100:2"]
    text = command(*options)
    first, second = text.splitlines()[:2]
    assert first.startswith("searched: the layout of llama2-7b, dp=64,")
    assert "is for 64 ranks and not for 2" in first
    assert second == "llama2-7b: predicted"
    found = json.loads(command(*options, "--json"))
    best = json.loads(command("search", *options, "--top", "1", "--json"))["plans"][0]
    assert (found["layout"], found["ranks"], found["searched"]) == (best["layout"], 2, first)
    assert found["time"]["stalls"]["checkpoint_bytes"] > 0
    assert "searched" not in json.loads(command("llama2-7b", "--cluster", "h100:64", "--json"))
    for typed in (["--layout", "dp=8"], ["--set", "layout.tp=4"]):
        result = RUNNER.invoke(app, ["plan", *options, *typed])
        assert "but there are 2 ranks" in str(result.exception)


def test_command_explains_every_term() -> None:
    text = command("llama-7b", "--cluster", "h100", "--layout", "dp=8,zero=1", "--explain")
    for word in (
        "qkv",
        "attention",
        "gate",
        "optimizer",
        "stage 0",
        "MFU",
        "DOES NOT FIT",
        "exposed gradient sums",
        "reduce_scatter",
    ):
        assert word in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cluster", "h10:8"], "did you mean"),
        (["--cluster", "h100:0"], "0 devices"),
    ],
)
def test_command_errors(arguments: list[str], message: str) -> None:
    result = RUNNER.invoke(app, ["plan", "llama-7b", *arguments])
    assert isinstance(result.exception, UserError)
    assert message in str(result.exception)


def test_a_search_where_nothing_fits_without_offload_says_so() -> None:
    none = RUNNER.invoke(app, ["plan", "search", "llama-7b"])
    assert "needs a number of devices" in str(none.exception)
    result = RUNNER.invoke(app, ["plan", "search", "llama-7b", "--cluster", "h100:1"])
    assert result.exit_code == 0, result.output
    for words in ("without offload no layout fits", "would be enough", "offload=states:host"):
        assert words in result.output


@pytest.mark.parametrize("option", ["--save", "--html"])
def test_where_nothing_can_be_written_is_said_first(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before a machine is measured or a layout searched."""

    def long(*_: object) -> None:
        raise AssertionError("the long work has begun")

    monkeypatch.setattr("fivefold_plan.commands.plan.ensure_measured", long)
    (tmp_path / "file").write_text("")
    for path, why in (
        ("none/plan", "there is no folder"),
        (".", "it is a folder"),
        ("file/plan", "no folder"),
    ):
        arguments = ["search", "llama-7b", "--cluster", "h100:64", option, str(tmp_path / path)]
        with pytest.raises(UserError, match=f"{option} .*: cannot be written: .*{why}"):
            RUNNER.invoke(app, ["plan", *arguments], catch_exceptions=False)


def test_an_uneven_load_of_experts() -> None:
    options = ["mixtral-8x7b", "--cluster", "h100:8", "--layout", "dp=8,ep=8,zero=3"]
    even, uneven = (json.loads(command(*options, *more, "--json")) for more in ([], ["--expert-load", "1.3"]))
    assert (even["expert_load"], uneven["expert_load"]) == (1.0, 1.3)
    assert uneven["time"]["step_s"] > even["time"]["step_s"]
    assert uneven["memory"]["peak_bytes"] > even["memory"]["peak_bytes"]
    assert "relative to an even split: 1 (assumed" in command(*options, "--explain")
    assert "relative to an even split: 1.3\n" in command(*options, "--explain", "--expert-load", "1.3")
    assert "expert_load" not in json.loads(
        command("llama-7b", "--cluster", "h100", "--layout", "dp=8", "--json")
    )


@pytest.mark.parametrize(
    ("name", "load", "message"),
    [
        ("mixtral-8x7b", "0.9", "must be from 1, the even share, to 8"),
        ("mixtral-8x7b", "9", "Nearest valid: 8"),
        ("mixtral-8x7b", "nan", "must be from 1"),
        ("llama-7b", "1.3", "llama has no experts"),
    ],
)
def test_no_such_load(name: str, load: str, message: str) -> None:
    result = RUNNER.invoke(
        app, ["plan", name, "--cluster", "h100:8", "--layout", "dp=8", "--expert-load", load]
    )
    assert isinstance(result.exception, UserError)
    assert message in str(result.exception)


def test_volume_counts_recomputed_messages() -> None:
    base = plan("tp=2", "h100:2", "train.global_batch_size=2").setting
    again = replace(base, layout=replace(base.layout, recompute="full"))
    assert volume.sent(again)["tp"] == pytest.approx(1.5 * volume.sent(base)["tp"], rel=0.02)
