"""Memory over a step: the timeline's peak is the exact instrument's, on any rank; its picture and its phases."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_trace import recipe_of
from typer.testing import CliRunner

from fivefold.cli.main import app
from fivefold.launch.ranks import Ranks
from fivefold.observe.memory_picture import to_svg, to_text
from fivefold.recipe import load, microbatches_per_step
from fivefold.schedules.timelines import BINS, Change, MemoryTimeline, Phase, of_changes
from fivefold.train.job import Job
from fivefold.train.memory_watch import HISTORY, MemoryWatch
from fivefold_plan.trace import gpu
from fivefold_plan.trace.depth import timelines
from fivefold_plan.trace.step import trace


@pytest.mark.parametrize(
    ("layout", "rank"),
    [("dp=1", 0), ("dp=4,tp=2,zero=3", 5), ("pp=4,schedule=1f1b", 0), ("pp=4,schedule=1f1b", 3)],
)
def test_peak_of_the_timeline_is_exact(layout: str, rank: int) -> None:
    recipe = recipe_of(layout, "bf16")
    (_, first), (_, later) = timelines(recipe, rank)
    exact = trace(recipe, rank, microbatches_per_step(recipe)).memory
    assert later.peak == exact.total
    assert later.at_peak == exact.at_peak
    assert all(max(sizes) <= exact.highest[name] for name, sizes in later.bytes.items())
    assert first.bytes["optimizer"][0] < first.bytes["optimizer"][-1] == later.bytes["optimizer"][0]
    backwards = [phase.kind for phase in later.phases].count("backward")
    assert backwards > microbatches_per_step(recipe) // 2, "those of a pipeline's end follow each other"
    assert later.phases[-1].kind == "update"
    assert MemoryTimeline.from_json(json.loads(json.dumps(later.as_json()))) == later


def test_live_microbatches_of_a_pipeline_show() -> None:
    """1F1B: the first stage keeps four microbatches, the last one."""
    recipe = recipe_of("pp=4,schedule=1f1b", "bf16", "train.microbatch_size=1")
    most = [max(timelines(recipe, rank)[1][1].bytes["activations"]) for rank in (0, 3)]
    assert most[0] > 3 * most[1] - most[0], "the last one also keeps the loss"


def test_timeline_of_changes_keeps_peaks_between_bins() -> None:
    changes = [Change(0.0, "params", 100), Change(1.0, "buffers", 50), Change(1.0, "buffers", -50)]
    changes += [Change(2.5, "activations", 7), Change(9.9, "activations", -7)]
    found = of_changes(changes, [Phase("forward", 0, 5), Phase("backward", 5, 10)], 10.0, "s")
    assert found.peak == 150
    assert found.at_peak["buffers"] == 50
    assert found.peak_phase == "forward"
    assert found.totals.count(150) == 1
    assert found.totals[BINS // 2] == 107
    assert found.totals[0] == 100
    text = to_text([("a step", found)], 40, 10)
    assert "a step: peak 150 B in forward: weights 100 B, messages and other buffers 50 B" in text
    assert text.count("W") >= 40
    svg = to_svg([("a <step>", found)], "x & y")
    assert "a &lt;step&gt;" in svg
    assert "x &amp; y" in svg


@pytest.mark.slow
def test_plan_draws_memory_over_a_step(tmp_path: Path) -> None:
    picture = tmp_path / "memory.svg"
    sizes = ["model.vocab_size=96", "model.layers=2", "train.microbatch_size=8"]
    command = ["plan", "trace", "quickstart", "--cluster", "h100:2", "--layout", "tp=2", "--rank", "1"]
    command += ["--memory-timeline", str(picture), *(x for one in sizes for x in ("--set", one))]
    result = CliRunner().invoke(app, [*command, "--json"])
    assert result.exit_code == 0, result.output
    first, later = json.loads(result.output)["memory_timeline"]
    assert later["name"] == "a later step, rank 1"
    assert later["peak_bytes"] == max(map(sum, zip(*later["bytes"].values(), strict=True)))
    assert first["bytes"]["optimizer"][0] < later["bytes"]["optimizer"][0]
    assert ("a GPU" if not gpu.why_not() else "a CPU") in picture.read_text()


def test_snapshots_of_gpus_are_written_and_recording_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a GPU: PyTorch's functions are called by the names that it has."""
    said = []
    assert callable(torch.cuda.memory._record_memory_history)
    assert callable(torch.cuda.memory._dump_snapshot)
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **given: said.append(given))
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", lambda path: said.append(path))
    recipe = load("quickstart", ["observe.memory_step=2"])  # a module of the user's own, too
    job = Job(recipe, tmp_path, None, module=torch.nn.Linear(1, 1))
    watch = MemoryWatch(job, Ranks(0, 1, 0, 1, torch.device("cuda")), 0)
    state: Any = SimpleNamespace(step=1)
    watch.begin_step(state, [])
    state.step = 2
    written = tmp_path / "traces" / "memory-snapshot-step-00000002-rank-0.pickle"
    assert watch.end_step(state) == f"memory over step 2: {written}"
    recorded = {"max_entries": HISTORY, "stacks": "python"}
    assert said == [recorded, str(written), {"enabled": None}]
    said.clear()
    state.step = 1
    watch.begin_step(state, [])
    watch.close()  # an error in the step
    assert said == [recorded, {"enabled": None}]
