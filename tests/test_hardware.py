"""Measuring this machine: what is measured is what it says, in the shapes that the planner reads."""

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from ranks import run_ranks

from fivefold.host import tables
from fivefold.launch.ranks import Ranks
from fivefold.models.operations import Rate
from fivefold.observe.prediction import read, rows, section, step_seconds
from fivefold.parallel.offload.disk import SPAN, File
from fivefold_plan.bench import collectives, hardware, machine
from fivefold_plan.bench.hardware import bandwidth
from fivefold_plan.bench.machine import _axes
from fivefold_plan.cluster import measured
from fivefold_plan.cluster.devices import of_table
from fivefold_plan.cluster.measured import assumed_table
from fivefold_plan.predict import predict

CPU = torch.device("cpu")
ALONE = Ranks(0, 1, 0, 1, CPU)


def test_products_have_a_rate_for_each_role_and_shape() -> None:
    found = hardware.products("fp32", CPU, (16, 64), 16 * 64 * 64)
    assert set(found) == {"forward", "input", "weight"}
    for rates in found.values():
        assert "64x64x64" not in rates
        assert len(rates) == 7
        assert all(1e6 < rate < 1e13 for rate in rates.values())


def test_timed_gives_the_median_of_the_work() -> None:
    import time

    assert 0.01 <= hardware.timed([lambda: time.sleep(0.01)], CPU) < 0.5


def test_streams_cover_what_the_planner_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "ROWS", 64)
    monkeypatch.setattr(hardware, "TOKENS", (16,))
    for dtype in ("fp32", "bf16"):
        found = hardware.streams(dtype, CPU) | {"optimizer": hardware.optimizer(dtype, CPU)}
        assert {*get_args(Rate), "accumulate", "optimizer", "random"} == found.keys()
        assert all(1e5 < rate < 1e13 for pair in found.values() for rate in pair)
        for rates in (hardware.attention(dtype, CPU), hardware.ring(dtype, CPU)):
            assert rates.keys() == {"16x32", "16x128"}
            assert all(1e5 < rate < 1e13 for pair in rates.values() for rate in pair)


def _links(rank: int, world: int) -> tuple[dict[str, Any], float, dict[str, float]]:
    found, free = collectives.links(CPU, {4096: 3, 65536: 3})
    return (
        found,
        free,
        machine.added(Ranks(rank, world, rank, world, CPU), found, steps=5) if world == 2 else {},
    )


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_links_of_all_collectives(world: int) -> None:
    for found, free, extra in run_ranks(world, _links, timeout_s=60):
        assert {"all_reduce fp32", "reduce_scatter bf16", "all_gather", "all_to_all", "send"} < found.keys()
        assert all([size for size, _ in points] == [4096, 65536] for points in found.values())
        # 1e-6 is the floor: a busy machine can take all of three sends' time from the computing before them.
        assert all(1e-6 <= seconds < 5 for points in found.values() for _, seconds in points)
        assert 0 <= free <= 1
        names = {f"zero{z}{step}" for z in (1, 2, 3) for step in ("", " step")}
        names |= {"stage"}
        assert extra.keys() == (names if world == 2 else set())


def _blocks(rank: int, world: int) -> dict[str, list[list[float]]]:
    return machine.blocks(Ranks(rank, world, rank, world, CPU), "fp32", steps=2)


@pytest.mark.slow
def test_what_axes_take_beyond_the_sum_of_a_block_s_parts() -> None:
    """The table with what was found predicts the very seconds that were found; here made-up ones in their place."""
    blocks = run_ranks(2, _blocks, timeout_s=120)[0]
    assert blocks.keys() == measured.AXES.keys()
    blocks = {
        name: [[elements, 1.0 + number] for number, (elements, _) in enumerate(points)]
        for name, points in blocks.items()
    }
    table = assumed_table()
    found = replace(table, axes=_axes(table, {2: {"blocks": blocks}}, "fp32"))
    cluster = of_table(measured.from_json(measured.as_json(found)) or table)
    for name, points in blocks.items():
        for model, (elements, seconds) in zip(machine.MODELS, points, strict=True):
            few, many = machine.recipes(name, 2, model, "fp32")
            assert elements == model[0] * model[1] // few.layout.cp
            said = machine.per_block(*(predict(recipe, cluster).step.seconds for recipe in (few, many)))
            assert said == pytest.approx(seconds, rel=1e-6)


def test_python_of_a_step() -> None:
    found = machine.plain(ALONE, steps=6)
    assert found.keys() == {"block", "microbatch", "block step", "step"}
    assert all(
        seconds >= 0 for seconds in found.values()
    )  # differences: of another's noise, too, on a busy machine
    assert 1e-5 < sum(found.values()) < 5


def test_predicted_beside_measured(tmp_path: Path) -> None:
    assert rows(read(tmp_path)) == []
    predicted = {
        "time": {"step_s": 1.1},
        "memory": {"per_stage": [{"total": 2**30}]},
        "sent_as_counted": {"dp": 1000},
    }
    came = {"step_s": 1.0, "memory_bytes": 2**31, "sent_bytes": {"dp": 1000, "tp": 4}}
    (tmp_path / "plan.json").write_text(json.dumps({"predicted": predicted, "measured": came}))
    found = {row.name: row.error for row in rows(read(tmp_path))}
    assert found == pytest.approx(
        {"step time": 0.1, "tensors of rank 0": -0.5, "sent per step, dp": 0.0, "sent per step, tp": -1.0}
    )
    assert "+10.0%" in section(read(tmp_path))
    assert "because &lt;" in section({"predicted": None, "why": "because <x>"})


def test_the_first_steps_do_not_count() -> None:
    lines = [{"step": i, "step_s": 9.0 if i < 2 else 1.0 + i} for i in range(7)]
    assert step_seconds(lines) == 5.0
    assert step_seconds(lines[:2]) is None


def test_the_disk_is_measured_by_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of the file both ways, then a half of it each way at once; nothing is left behind."""
    seen: list[tuple[str, int, int]] = []

    move = File.move

    def slower(file: File, at: int, data: torch.Tensor, out: bool) -> None:
        time.sleep(0.01 if out else 0.04)
        seen.append(("write" if out else "read", at, len(data)))
        move(file, at, data, out)

    monkeypatch.setattr(File, "move", slower)
    found = bandwidth(tmp_path, 9 * SPAN)
    spans = [at * SPAN for at in range(8)]
    rows = [("read", at) for at in spans + spans[:4]] + [("write", at) for at in spans + spans[4:]]
    assert sorted((name, at) for name, at, _ in seen) == sorted(rows)
    assert {size for *_, size in seen} == {SPAN}
    for what, seconds in (("read", 0.08), ("write", 0.02), ("both", 0.05)):  # 8 spans by 4 threads
        assert 0 < found[what] < 8 * SPAN / seconds
    assert [*tmp_path.iterdir()] == []
    monkeypatch.setattr(machine, "bandwidth", lambda folder: bandwidth(tmp_path / "text" / "below"))
    (tmp_path / "text").write_text("not a folder")
    said: list[str] = []
    assert set(machine._disk(said.append).values()) == {2e9}
    assert said[0].startswith("the disk is assumed, not measured: ")


@pytest.mark.slow
def test_bench_hardware_then_a_run_that_was_predicted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FIVEFOLD_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("OMP_NUM_THREADS")
    command = [sys.executable, "-m", "fivefold.cli.main"]
    done = subprocess.run(
        [*command, "bench", "hardware", "--busy", "--json"],
        check=True,
        capture_output=True,
        text=True,
        timeout=600,
    )
    found = json.loads(done.stdout)
    assert found["machine"] == tables.key()
    assert min(found["disk"], found["disk_read"], found["disk_both"]) > 0
    (tmp_path / "text.txt").write_text("To be, or not to be: that is the question.\n" * 400, encoding="utf-8")
    sets = [
        f"data.source={tmp_path / 'text.txt'}",
        "data.tokenizer=bytes",
        "train.steps=5",
        "train.val_every=0",
        "observe.memory_step=2",
    ]
    options = [part for text in sets for part in ("--set", text)]
    run = tmp_path / "run"
    subprocess.run([*command, "train", "quickstart", *options, "--nproc", "2", "--out", str(run)], check=True)
    plan = json.loads((run / "plan.json").read_text())
    assert plan["predicted"]["cluster"] == "local:2"
    assert plan["measured"]["sent_bytes"] == plan["predicted"]["sent_as_counted"]
    assert plan["predicted"]["memory"]["per_stage"][0]["total"] == pytest.approx(
        plan["measured"]["memory_bytes"], rel=0.05
    )
    assert [found["rank"] for found in plan["exact"]] == [0]
    assert plan["exact"][0]["memory"]["peak_bytes"] == pytest.approx(
        plan["measured"]["memory_bytes"], rel=0.001
    )
    assert 0.2 < plan["predicted"]["time"]["step_s"] / plan["measured"]["step_s"] < 5
    assert "Predicted and measured" in (run / "report.html").read_text()
    subprocess.run([*command, "plan", "calibrate", str(run)], check=True)
    table = measured.load()
    assert table is not None
    assert [fitted["run"] for fitted in table.fitted] == ["run"]
    subprocess.run([*command, "plan", "calibrate", "reset"], check=True)
    assert (measured.load() or table).fitted == []
