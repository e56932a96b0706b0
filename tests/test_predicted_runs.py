"""A run shows what was predicted beside what came: of the same quantities."""

import json
from pathlib import Path
from statistics import median

import pytest
from marks import only, slow
from pool_runs import lines, train_rank
from ranks import run_ranks

from fivefold.observe import memory_picture
from fivefold.observe.prediction import rows
from fivefold.recipe import Recipe, flops_per_token, load, resolve
from fivefold.train.job import Job
from fivefold_plan.cluster.measured import assumed_table
from fivefold_plan.commands.draw import of_run
from fivefold_plan.forecast import run as prediction

TINY = [
    "model.layers=4", "model.dim=96", "model.heads=4", "model.kv_heads=4", "model.ffn_dim=256", "model.seq_len=64",
    "data.tokenizer=bytes", "train.global_batch_size=8", "train.microbatch_size=1", "train.steps=4",
    "train.sample_every=2", "train.sample_tokens=4", "train.val_every=2", "train.val_sequences=4",
    "optim.warmup_steps=0", "observe.tracker=none", "observe.memory_step=2",
]  # fmt: skip


def recipe_of(folder: Path, layout: str, *overrides: str) -> Recipe:
    text = folder / "text.txt"
    text.write_text("".join(f"{i} squared is {i * i}, and the next one follows. " for i in range(600)))
    sets = [*TINY, f"data.source={text}", f"data.cache={folder / 'cache'}", *overrides]
    return load("quickstart", sets, layout)


def on_a_known_machine(rank: int, world: int, recipe: Recipe, out: Path) -> int | None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prediction, "load", assumed_table)
        return train_rank(rank, world, recipe, out)


@only("dp=2,zero=3-bf16")
@pytest.mark.parametrize("mode", [pytest.param("fp32", marks=pytest.mark.slow), "bf16"])
@pytest.mark.parametrize("layout", ["dp=1", "dp=2,zero=3", *slow("pp=2", "tp=2,sp=true")])
def test_memory_and_bytes_are_those_predicted(tmp_path: Path, layout: str, mode: str) -> None:
    recipe, out = recipe_of(tmp_path, layout, f"precision.mode={mode}"), tmp_path / "run"
    ranks = 1 if layout == "dp=1" else 2
    assert run_ranks(ranks, on_a_known_machine, recipe, out, timeout_s=60) == [None] * ranks
    found = {row.name: row.error for row in rows(json.loads((out / "plan.json").read_text()))}
    assert abs(found.pop("tensors of rank 0")) < 0.05  # the formula's, of a tiny model
    del found["step time"]
    assert all(error == 0 for error in found.values()), found
    assert len(found) == (ranks > 1)
    for rank in range(ranks):
        (_, first), (_, later) = memory_picture.read(out, rank)
        assert (first.step, later.step, later.unit) == (1, 2, "s")
        kinds = [phase.kind for phase in later.phases]
        assert kinds[0] == "forward"
        assert kinds[-1] == "update"
        assert kinds.count("backward") >= (8 if layout == "dp=1" else 4), "one for each microbatch"
        assert later.peak > first.peak - first.at_peak["buffers"], "the optimizer has its states"
        assert first.bytes["optimizer"][0] < later.bytes["optimizer"][0] == later.bytes["optimizer"][-1]
        if rank == 0:
            assert later.peak == json.loads((out / "plan.json").read_text())["measured"]["memory_bytes"]
    assert "step 2, rank 0: peak" in (out / "report.html").read_text()
    text, pictures = of_run(out)
    assert "step 2, rank 0: peak" in text
    assert list(pictures) == ["memory"]


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["full", "none"])
def test_hfu_stands_beside_mfu_where_blocks_are_recomputed(tmp_path: Path, recompute: str) -> None:
    """The blocks' forward runs twice: of 4 blocks with 4/3 of the FLOPs that the model has, and an output layer."""
    small = ["observe.memory_step=0", "train.steps=2", "train.val_sequences=1", "train.sample_tokens=1"]
    recipe, out = recipe_of(tmp_path, f"dp=1,recompute={recompute}", *small), tmp_path / "run"
    assert train_rank(0, 1, recipe, out) is None
    (mfu, _), hfu = lines(out, "mfu"), lines(out, "hfu")
    report = (out / "report.html").read_text()
    if recompute == "none":
        assert hfu == []
        assert ">HFU<" not in report
        return
    seen = flops_per_token(resolve(recipe, vocab_size=257).model)
    head = 6 * 96 * 257
    assert hfu[0] / mfu == pytest.approx(1 + (seen - head) / seen / 3, rel=0.01)
    assert ">HFU<" in report


@pytest.mark.slow
def test_bytes_are_counted_where_tensors_are_not_followed(tmp_path: Path) -> None:
    wanted = ["precision.mode=fp32", "observe.memory_step=0"]
    recipe, out = recipe_of(tmp_path, "tp=2,sp=true", *wanted), tmp_path / "run"
    assert run_ranks(2, on_a_known_machine, recipe, out, timeout_s=60) == [None] * 2
    plan = json.loads((out / "plan.json").read_text())
    assert plan["measured"]["memory_bytes"] is None
    assert [row.error for row in rows(plan) if row.name.startswith("sent")] == [0]


def test_exact_figures_are_added_after_a_run(tmp_path: Path) -> None:
    """They are the measured ones, to the byte; of a large model there is the command that makes them."""
    recipe, out = recipe_of(tmp_path, "dp=1", "train.microbatch_size=4"), tmp_path / "run"
    assert run_ranks(1, on_a_known_machine, recipe, out) == [None]
    prediction.add_exact(Job(load(out / "recipe.toml"), out))
    plan = json.loads((out / "plan.json").read_text())
    assert [found["memory"]["peak_bytes"] for found in plan["exact"]] == [plan["measured"]["memory_bytes"]]
    assert {row.name: row.error for row in rows(plan)}["tensors of rank 0"] == 0
    large = load(out / "recipe.toml", ["model.layers=24"])
    prediction.add_exact(Job(large, out))
    plan = json.loads((out / "plan.json").read_text())
    assert "exact" not in plan
    assert f"{out / 'recipe.toml'} --cluster local:1" in plan["exact_why"]
    assert rows(json.loads((out / "plan.json").read_text())), "the formula's again"


@pytest.mark.parametrize("broken", ["exact", "write_report", "read"])
@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_exact_figures_that_fail_do_not_fail_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str, error: BaseException
) -> None:
    def fails(*_: object) -> None:
        raise error

    (tmp_path / "plan.json").write_text('{"predicted": {"memory": {"per_stage": [{"total": 1}]}}}')
    monkeypatch.setattr(prediction.prediction if broken == "read" else prediction, broken, fails)
    prediction.add_exact(Job(recipe_of(tmp_path, "dp=1", "train.microbatch_size=4"), tmp_path))
    failed = json.loads((tmp_path / "plan.json").read_text()).get("exact_why")
    assert broken != "exact" or failed == (
        None if isinstance(error, KeyboardInterrupt) else "The trace failed: disk full"
    )


@only("2")
@pytest.mark.parametrize("step", [1, 2])
def test_a_step_whose_timeline_is_drawn_is_not_watched(tmp_path: Path, step: int) -> None:
    memory = 3 * (step > 1)  # the first step's memory is tracked, too
    traced = ["precision.mode=fp32", f"observe.trace_step={step}", f"observe.memory_step={memory}"]
    recipe, out = recipe_of(tmp_path, "pp=2", *traced), tmp_path / "run"
    assert run_ranks(2, on_a_known_machine, recipe, out, timeout_s=60) == [None] * 2
    plan = json.loads((out / "plan.json").read_text())
    assert (plan["measured"]["memory_bytes"] is None) == (memory == 0)
    found = {row.name: row.error for row in rows(plan)}
    assert [found[name] for name in found if name.startswith("sent")] == [0]


def test_a_plan_of_an_older_version_has_fewer_rows() -> None:
    predicted = {"time": {"step_s": 1.0}, "memory": {"per_stage": [{"total": 2**20}]}}
    plan = {
        "predicted": predicted,
        "measured": {"step_s": 2.0, "memory_bytes": None, "sent_bytes": {"dp": 4}},
    }
    assert [row.name for row in rows(plan)] == ["step time"]


def test_a_run_of_one_step_knows_no_peak(tmp_path: Path) -> None:
    """The optimizer has no states in the first step."""
    recipe, out = recipe_of(tmp_path, "dp=1", "train.steps=1"), tmp_path / "run"
    run_ranks(1, on_a_known_machine, recipe, out)
    plan = json.loads((out / "plan.json").read_text())
    assert plan["measured"]["memory_bytes"] is None
    assert rows(plan) == [], "nor a time"
    assert len(lines(out, "loss")) == 1


def test_a_machine_without_a_table_is_predicted_from_the_first_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Memory at once, the time per step after ten; what came later is compared with it."""
    monkeypatch.setattr(prediction, "load", lambda: None)
    sets = [
        "train.steps=14",
        "observe.memory_step=0",
        "train.val_every=14",
        "train.sample_every=0",
        "train.sample_tokens=4",
    ]
    train_rank(0, 1, recipe_of(tmp_path, "dp=1", *sets), tmp_path / "run")
    said = capsys.readouterr().out
    assert (
        "of tensors per rank; the time per step follows after step 10, because this machine has not" in said
    )
    (line,) = (line for line in said.splitlines() if line.startswith("predicted from steps 3 to 10: "))
    assert line.endswith(" for 14 steps")
    found = json.loads((tmp_path / "run" / "plan.json").read_text())
    seconds = lines(tmp_path / "run", "step_s")
    assert found["predicted"]["time"]["step_s"] == pytest.approx(median(seconds[2:10]), rel=0.02)
    assert found["measured"]["step_s"] == pytest.approx(median(seconds[12:]))
    assert "mfu" not in found["predicted"]  # the machine's peak is not known
    assert [row.name for row in rows(found)] == ["step time"]
    assert "was fitted to steps 3 to 10" in prediction.prediction.section(found)
    train_rank(0, 1, recipe_of(tmp_path, "dp=1", *TINY[-1:], "observe.memory_step=0"), tmp_path / "short")
    assert "of tensors per rank; no time per step, because" in capsys.readouterr().out


def test_a_run_that_the_assumed_table_does_not_price_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(prediction, "load", lambda: None)
    sets = ["precision.mode=fp16", "train.steps=11", "train.val_every=11", "train.sample_every=0"]
    train_rank(0, 1, recipe_of(tmp_path, "dp=1", *sets, "model.layers=1"), tmp_path / "run")
    assert "no prediction: precision.mode = fp16: " in capsys.readouterr().out
    assert len(lines(tmp_path / "run", "loss")) == 11
