"""Steps under PyTorch's profiler: `observe.profile_steps`."""

import gzip
import json
import re
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pool_runs import ranks_of, train_rank
from ranks import run_ranks
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity

from fivefold.comm.progress import message, progress, span
from fivefold.errors import UserError
from fivefold.launch.ranks import Ranks
from fivefold.observe import timelines as profile
from fivefold.recipe import Recipe, load
from fivefold.recipe.resolve import warnings
from fivefold.train.instruments import ProfileWatch, TimelineWatch, operators
from fivefold.train.job import Job

TINY = [
    "model.layers=2", "model.dim=32", "model.heads=2", "model.ffn_dim=64", "model.seq_len=16",
    "data.tokenizer=bytes", "train.global_batch_size=4", "train.microbatch_size=2", "train.val_sequences=2",
    "train.sample_every=0", "train.sample_tokens=4", "observe.tracker=none", "precision.mode=fp32",
]  # fmt: skip


def recipe_of(folder: Path, layout: str, *sets: str) -> Recipe:
    source = folder / "text.txt"
    source.write_text("the quick brown fox jumps over the lazy dog\n" * 100)
    return load("quickstart", [*TINY, f"data.source={source}", *sets], layout)


def events(path: Path) -> list[dict[str, Any]]:
    return json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]


def names(found: list[dict[str, Any]]) -> set[str]:
    return {event["name"] for event in found if event.get("cat") == "user_annotation"}


SHARDS = {
    "forward, microbatch 0", "backward, microbatch 1", "all_gather over shard, FSDP2 unit blocks.1",
    "wait for all_gather over shard, FSDP2 unit blocks.1",
}  # fmt: skip
STAGES = {
    "forward, stage {rank}, microbatch 0", "weight gradients, stage {rank}, microbatch 1", "send over pp",
    "wait for receive over pp",
}  # fmt: skip


@pytest.mark.parametrize(
    ("layout", "there"),
    [
        ("dp=2,zero=3", SHARDS),
        pytest.param("pp=2,schedule=zb_h1", STAGES, marks=pytest.mark.slow),
    ],
)
def test_every_rank_writes_a_trace_with_named_parts(tmp_path: Path, layout: str, there: set[str]) -> None:
    """The range ends beyond the run: what there is of it is written."""
    run = tmp_path / "run"
    sets = ["train.steps=3", "observe.profile_steps=2-9", "train.global_batch_size=8"]
    run_ranks(2, train_rank, recipe_of(tmp_path, layout, *sets), run, timeout_s=90)
    for rank in range(2):
        path = run / "traces" / profile.trace_name(2, 3, rank)
        found = events(path)
        wanted = {name.format(rank=rank) for name in there}
        assert wanted | {"step 2", "step 3", "update", "all_reduce over all"} <= names(found)
        assert "step 1" not in names(found)
        (step,) = (e for e in found if e["name"] == "step 3")
        inside = [e for e in found if "dur" in e and 0 <= e["ts"] - step["ts"] <= step["dur"] - e["dur"]]
        assert wanted | {"update"} <= names(inside)
        assert any(e.get("cat") == "cpu_op" and e["name"].startswith("aten::") for e in inside)
        text = gzip.decompress(path.read_bytes()).decode()
        assert f'"{socket.gethostname()}"' not in text
        assert str(tmp_path) not in text
    page = (run / "report.html").read_text()
    assert "recorded steps 2 to 3 on 2 ranks" in page
    row = r'<tr><th scope="row">[^<]+</th><td>[\d,]+</td><td>[\d.,]+ ms</td>'
    assert len(re.findall(row, page)) == profile.LONGEST
    assert sorted(path.name for path in (run / "traces").iterdir()) == [
        "profile-step-00000002-00000003-rank-0.json.gz",
        "profile-step-00000002-00000003-rank-1.json.gz",
        "profile-step-00000002-00000003.json",
    ]


def state_at(step: int, begins: bool = False) -> Any:
    return SimpleNamespace(step=step - begins)


def test_a_recording_that_breaks_off_leaves_no_profiler(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, "dp=1", "train.steps=9", "observe.profile_steps=3-4")
    watch = ProfileWatch(Job(recipe, tmp_path, None), ranks_of(0, 1))
    for broken in (
        watch.close,
        lambda: watch.begin_step(state_at(1, begins=True), []),
    ):  # an error; the run goes back
        watch.begin_step(state_at(3, begins=True), [])
        assert progress.profiling
        assert not watch.end_step(state_at(3))
        watch.begin_step(state_at(4, begins=True), [])
        broken()
        assert not progress.profiling
        assert not (tmp_path / "traces").exists()
    watch.begin_step(state_at(4, begins=True), [])  # resumed in the middle
    with span("own"):
        torch.ones(2).sum()
    assert "profile of steps 4 to 4" in watch.end_step(state_at(4))
    assert {"own", "step 4"} <= names(events(tmp_path / "traces" / profile.trace_name(4, 4, 0)))


def test_a_full_disk_does_not_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = recipe_of(tmp_path, "dp=1", "train.steps=9", "observe.profile_steps=1")
    watch = ProfileWatch(Job(recipe, tmp_path / "run", None), ranks_of(0, 1))
    watch.begin_step(state_at(1, begins=True), [])

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("fivefold.train.instruments._compress", full)
    assert "not written: No space left" in watch.end_step(state_at(1))
    assert not list((tmp_path / "run" / "traces").iterdir())


def test_kernels_of_a_gpu_count_once() -> None:
    """PyTorch gives an operator the time of its kernels, too."""

    def average(name: str, device: DeviceType, cpu: float, gpu: float, span: bool = False) -> Any:
        return SimpleNamespace(
            key=name, count=2, device_type=device, self_cpu_time_total=cpu, self_device_time_total=gpu,
            is_user_annotation=span,
        )  # fmt: skip

    averages = [
        average("aten::mm", DeviceType.CPU, 10, 3e6),
        average("gemm", DeviceType.CUDA, 0, 3e6),
        average("fill", DeviceType.CUDA, 0, 1e6),
        average("step 3", DeviceType.CUDA, 0, 4e6, span=True),
    ]
    assert operators(averages, cuda=True) == [("gemm", 2, 3.0, 0.75), ("fill", 2, 1.0, 0.25)]
    assert operators(averages, cuda=False) == [("aten::mm", 2, 1e-5, 1.0)]


def test_a_profile_on_a_gpu_has_its_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shown with a stand-in: it starts when earlier steps are done, and asks for kernels."""
    said = list[Any]()

    class Recorder:
        def __init__(self, activities: list[ProfilerActivity], record_shapes: bool):
            said.append({*activities})

        def start(self) -> None:
            said.append("starts")

        def stop(self) -> None:
            said.append("stops")

    monkeypatch.setattr("fivefold.train.instruments.profile", Recorder)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: said.append(device))
    recipe, gpu = (
        recipe_of(tmp_path, "dp=1", "train.steps=9", "observe.profile_steps=1"),
        torch.device("cuda", 0),
    )
    watch = ProfileWatch(Job(recipe, tmp_path / "run", None), Ranks(0, 1, 0, 1, gpu))
    watch.begin_step(state_at(1, begins=True), [])
    watch.close()
    assert said == [gpu, {ProfilerActivity.CPU, ProfilerActivity.CUDA}, "starts", "stops"]


def test_a_timeline_of_messages_is_not_silent_on_gpus(tmp_path: Path) -> None:
    recipe, gpu = recipe_of(tmp_path, "dp=1", "observe.trace_step=4"), torch.device("cuda", 0)
    watch = TimelineWatch(Job(recipe, tmp_path / "run", None), Ranks(0, 1, 0, 1, gpu), lambda step: None)
    state: Any = SimpleNamespace(parallel=SimpleNamespace(pipeline=None), step=3)
    watch.begin_step(state, [])
    state.step = 4
    assert "observe.profile_steps records the kernels of GPUs" in watch.end_step(state)
    state.step = 5
    assert watch.end_step(state) == ""


def test_without_a_profiler_spans_are_nothing() -> None:
    assert span("a", 1) is span("b") is message("all_reduce", None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("0", "must be a step"),
        ("12-10", "must be a step"),
        ("a", "must be a step"),
        ("1-101", 'Nearest valid: "1-100"'),
        ("true", "observe.profile_steps"),
    ],
)
def test_refused_steps(value: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        load("quickstart", [f"observe.profile_steps={value}"])


def test_steps_that_are_measured_otherwise() -> None:
    with pytest.raises(UserError, match=r"memory_step measures step 1.*profile_steps = 6"):
        load("quickstart", ["observe.profile_steps=1", "observe.memory_step=5"])
    with pytest.raises(UserError, match="trace_step measures step 3"):
        load("quickstart", ["observe.profile_steps=2-3", "observe.trace_step=3"])
    recipe = load("quickstart", ["observe.profile_steps=20", "train.steps=10"])
    assert recipe.observe.profile_steps == "20"
    assert any("profile_steps" in text for text in warnings(recipe))
