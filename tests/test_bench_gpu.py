"""`fivefold bench gpu`: its trials on the CPU at tiny sizes, a stop and a resume, its page, the baseline beside our
models, and messages of ranks that share a GPU."""

import json
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from layouts import compared, side, tiny
from marks import slow
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from fivefold.cli.main import main
from fivefold.comm import Axis
from fivefold.errors import UserError
from fivefold.launch import local, ranks
from fivefold.models.base import build
from fivefold.models.section import ModelSection
from fivefold.precision import PRECISIONS
from fivefold.recipe import Recipe, count_parameters, flops_per_token, load, resolve_model
from fivefold.train.verify import verify
from fivefold_plan.bench.gpu import doctor, plain, report, trials
from fivefold_plan.bench.gpu.kernels import both, cases, pairs
from fivefold_plan.bench.gpu.report import Row
from fivefold_plan.bench.gpu.trials import PARTS, measure, recipe_of
from fivefold_plan.cluster.clusters import parse
from fivefold_plan.messages.communication import Group, collective

COMMAND = [sys.executable, "-P", "-m", "fivefold", "bench", "gpu"]


def test_a_trial_on_the_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One trial of each kind of process: of itself, of ranks, of a command."""
    ran = measure(tmp_path, ["links"], 300, print)["parts"]["links"]["collectives"]["rows"]
    assert {row["name"].split(",")[0] for row in ran} > {
        "all_reduce fp32",
        "reduce_scatter bf16",
        "all_gather",
        "send",
    }
    assert all(row["measured"] > 0 and row["unit"] == "GB/s" for row in ran)
    assert "links: collectives\n  all_reduce" in capsys.readouterr().out
    assert json.loads((tmp_path / "gpu.json").read_text())["parts"]["links"]["collectives"]["rows"] == ran
    assert "all_reduce fp32" in (tmp_path / "gpu.html").read_text()


@pytest.mark.slow
def test_all_parts_with_a_stop_and_a_resume(tmp_path: Path) -> None:
    with subprocess.Popen([*COMMAND, "--out", str(tmp_path)], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("kernels: "):
                break
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=120)
    assert process.returncode
    before = json.loads((tmp_path / "gpu.json").read_text())["parts"]
    assert len(before["kernels"]) == 1
    assert not before["verify"]
    assert "SwiGLU" in (tmp_path / "gpu.html").read_text(), "it shows what there is"

    done = subprocess.run(
        [*COMMAND, "--out", str(tmp_path), "--limit", "60"], stderr=subprocess.PIPE, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "links: " not in done.stderr, "it is not measured again"
    after = json.loads((tmp_path / "gpu.json").read_text())["parts"]
    for part, ran in after.items():
        assert [*ran] == PARTS[part].trials(0)
        assert all(found["rows"] and "why" not in found for found in ran.values()), ran
    assert {name: after["kernels"][name] for name in before["kernels"]} == before["kernels"]
    speed, mfu = after["train"]["llama-1b"]["rows"]
    assert (speed["name"], speed["unit"]) == ("speed, beside plain PyTorch's", "tokens/s")
    assert mfu["measured"] / mfu["expected"] == pytest.approx(speed["measured"] / speed["expected"])
    for found in after["memory"].values():
        memory, step = found["rows"]
        assert 0.1 < memory["measured"] < 4, "resident memory, with the libraries"
        assert (memory["expected"], step["expected"]) == (None, None)


ONE = {"rows": [Row("a", 1.0)._asdict()]}
FAILED: dict[str, Any] = {"rows": [], "why": "failed: no"}


def test_what_is_there_is_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither after a stop; what failed is, if there is time."""
    ran: list[str] = []
    answers = iter([ONE, FAILED, KeyboardInterrupt])

    def run(part: str, names: list[str], seconds: float) -> Iterator[Any]:
        ran.extend(names)
        if (answer := next(answers, ONE)) is KeyboardInterrupt:
            raise KeyboardInterrupt
        yield from ((name, answer) for name in names)

    monkeypatch.setattr(trials, "_trials", run)
    with pytest.raises(KeyboardInterrupt):
        measure(tmp_path, ["kernels"], 60, print)
    names = PARTS["kernels"].trials(0)
    assert ran == names[:3]
    assert "failed: no" in (tmp_path / "gpu.html").read_text()
    ran.clear()
    done = measure(tmp_path, ["kernels"], 1, print)["parts"]["kernels"]
    assert not ran, "there is no time"
    assert done[names[1]]["why"] == "failed: no", "why it failed is kept"
    assert done[names[3]]["why"].startswith("no time within --limit")
    done = measure(tmp_path, ["kernels"], 60, print)["parts"]["kernels"]
    assert ran == [names[1], names[2], names[3]]
    assert done[names[0]] == ONE


def test_results_of_another_machine_are_not_mixed(tmp_path: Path) -> None:
    (tmp_path / "gpu.json").write_text(
        json.dumps({"machine": {"cpu": "another"}, "parts": {p: {} for p in PARTS}})
    )
    with pytest.raises(UserError, match="another machine or version; choose another folder"):
        measure(tmp_path, ["doctor"], 60, print)


def test_parts_share_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What one part leaves over, the next ones get."""
    given: dict[str, float] = {}
    monkeypatch.setattr(
        trials, "_trials", lambda part, names, s: (given.setdefault(part, s), ((n, ONE) for n in names))[1]
    )
    measure(tmp_path, [*PARTS], 280, print)
    assert given["doctor"] == pytest.approx(280 * 1 / 28, rel=0.05)
    assert given["verify"] == pytest.approx(280 * 9 / 22, rel=0.05)
    assert given["train"] == pytest.approx(280, rel=0.05)


def program(folder: Path, text: str) -> str:
    """A program that runs in place of Python."""
    file = folder / "program"
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(file.stat().st_mode | stat.S_IXUSR)
    return str(file)


def test_a_trial_that_hangs_ends_with_all_its_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child, row = tmp_path / "child", json.dumps(Row("a", 1.0)._asdict())
    hangs = f"echo '{row}'; echo noise; touch $TMPDIR/left; sleep 300 & echo $! $TMPDIR > {child}\nwait"
    monkeypatch.setattr(trials.sys, "executable", program(tmp_path, hangs))
    ((_, found),) = trials._trials("links", ["collectives"], 1.0)
    assert found["why"].startswith("stopped after 1 s")
    assert found["rows"] == ONE["rows"], "what it had found stays"
    number, folder = child.read_text().split()
    assert not Path(folder).exists()
    end = time.monotonic() + 20
    while time.monotonic() < end:
        with suppress(FileNotFoundError):
            if "State:\tZ" not in Path(f"/proc/{number}/status").read_text():
                time.sleep(0.05)
                continue
        return
    raise AssertionError("what it had started runs on")


def test_layouts_are_verified_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of them is timed. Each waits for all others here; parts that are timed run one by one."""
    monkeypatch.setattr(trials, "cores", lambda: 3 * trials.CORES)
    assert [trials._at_once(part) for part in ("verify", "train")] == [3, 1]
    waits = f"touch {tmp_path}/$5; while [ $(ls {tmp_path} | grep -c 'dp') -lt 3 ]; do sleep 0.05; done"
    monkeypatch.setattr(trials.sys, "executable", program(tmp_path, f'{waits}; echo \'{{"name": "a"}}\''))
    names = ["dp=1", "dp=2", "dp=4"]
    assert dict(trials._trials("verify", names, 60.0)) == {name: {"rows": [{"name": "a"}]} for name in names}


def test_a_trial_that_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials.getpass, "getuser", lambda: "ada")
    monkeypatch.setattr(trials.socket, "gethostname", lambda: "node-7")
    says = program(tmp_path, f"echo {Path.home()}/x broke on node-7 in /scratch/ada/canada >&2; exit 3")
    monkeypatch.setattr(trials.sys, "executable", says)
    why = dict(trials._trials("links", ["collectives"], 60.0))["collectives"]["why"]
    assert why == "failed: ~/x broke on HOST in /scratch/USER/canada", "it may be passed on"
    assert report.rows({"rows": [], "why": why}) == [Row("", "no result", advice=why)]


def test_what_is_not_possible_is_done(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One GPU sends nothing: that is neither short of anything, nor worth another try."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    trials.main("links", "collectives")
    (row,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert Row(**row) == Row("not possible", "one GPU sends nothing")


def test_the_exit_code_is_that_of_verify(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for advice, code in (("", 0), ("largest at step 1", 1)):
        found = {"rows": [Row("loss", 1e-3, "", 1e-6, advice)._asdict()]}
        monkeypatch.setattr(trials, "_trials", lambda _, names, s, found=found: ((n, found) for n in names))
        for part, wanted in (("verify", code), ("kernels", 0)):
            with pytest.raises(SystemExit) as ended:
                main(["bench", "gpu", "--part", part, "--out", str(tmp_path / f"{part}{code}")])
            assert (ended.value.code or 0) == wanted


def test_a_layout_that_fails_is_no_users_error(monkeypatch: pytest.MonkeyPatch) -> None:
    said = json.dumps({"error": {"message": "rank 1 failed"}})
    for code, kind in ((2, UserError), (1, RuntimeError)):
        done = subprocess.CompletedProcess([], code, said)
        monkeypatch.setattr(trials.subprocess, "run", lambda *_, done=done, **__: done)
        with pytest.raises(kind, match="rank 1 failed"):
            list(trials.verify(0, "dp=2 fp32"))


def test_the_page_begins_with_what_fell_short() -> None:
    fine, slow = Row("copy", 3.0, "GB/s", 3.1), Row("<norm>", 2.0, "ms", 1.0, "buy another")
    made = {"machine": {"gpus": [{"name": "GPU <X>"}], "cpu": "c"}, "parts": {part: {} for part in PARTS}}
    made["parts"]["kernels"] = {"llama-1b bf16": {"rows": [fine._asdict(), slow._asdict()]}}
    page = report.page(made, {part: PARTS[part].about for part in PARTS})
    short = page[page.index("Short of what was expected") : page.index(PARTS["kernels"].about)]
    assert "&lt;norm&gt;" in short
    assert "buy another" in short
    assert "GB/s" not in short
    picture = page[page.index("<svg") : page.index("</svg>")]
    assert picture.count('class="green"') == 1
    assert picture.count('class="orange"') == 1
    assert ">0.968<" in picture
    assert ">0.5<" in picture, "twice the time is half of what was expected"
    assert "GPU &lt;X&gt;" in page
    assert "<norm>" not in page
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "").replace("http-equiv", "")


def test_doctor_says_what_is_wrong_with_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a driver for GPUs that PyTorch does not see, as nvidia-smi prints it."""
    links = "\n\t Link 0: 26.562 GB/s" * 17
    script = f"""case "$*" in
"--query-gpu=driver_version,power.limit,power.default_limit --format=csv,noheader,nounits")
printf '580.1, 700.00, 700.00\n580.1, 300.00, 700.00\n580.1, [N/A], [N/A]\n';;
"nvlink --status") cat <<END
GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-1){links}
GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-2){links[: len(links) // 2]}
GPU 2: Tesla T4 (UUID: GPU-3)
END
;; *) exit 1;; esac"""
    Path(program(tmp_path, script)).rename(tmp_path / "nvidia-smi")
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(doctor.gpus, "notes", lambda: ["WARNING: the CPU trains, though", "AMD's"])
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    rows = [row for row in doctor.doctor(0, "machine") if row.name != "OMP_NUM_THREADS"]
    found = {row.name: row for row in rows}
    assert found["nvidia-smi 0: NVLink"].measured == pytest.approx(451.554)
    assert found["nvidia-smi 0: NVLink"].expected == 450
    assert found["nvidia-smi 1: power limit"].measured == 300
    assert not any(row.name == "nvidia-smi 2: NVLink" for row in rows)
    assert {row.name: row.advice.partition(":")[0] for row in rows if row.advice} == {
        "GPUs": "docs/gpu.md says more, under `What check and the run say`",
        "NCCL_P2P_DISABLE": "NCCL_P2P_DISABLE=1",
        "nvidia-smi 1: power limit": "a power cap slows matmuls",
        "nvidia-smi 1: NVLink": "links are down",
    }
    assert [row.measured for row in rows if row.name == "GPUs"] == ["the CPU trains, though", "AMD's"]
    assert found["NCCL_DEBUG"].measured == "INFO"


@pytest.mark.parametrize("shape", trials.SHAPES)
def test_plain_pytorch_has_the_parameters_of_the_real_shape(shape: str) -> None:
    model = recipe_of(shape, "dp=1", 1).model
    assert sum(p.numel() for p in plain.plain_model(model, False).parameters()) == count_parameters(model)


@pytest.mark.parametrize("shape", ["gpt2-124m", "llama-1b"])
def test_plain_pytorch_computes_the_same_loss(shape: str) -> None:
    """The baseline is the same work: the loss and every gradient, from weights that are large enough to matter."""
    model = recipe_of(shape, "dp=1", 0).model.model_copy(update={"init_std": 0.3})
    ours, own = build(model, device=torch.device("cpu"), seed=3), plain.plain_model(model, True)
    own.to_empty(device="cpu")

    def name_of(name: str) -> str:
        for old, new in {"attention.": "", "mlp.gate_up": "up", "mlp.": ""}.items():
            name = name.replace(old, new)
        return name

    own.load_state_dict({name_of(name): weight for name, weight in ours.state_dict().items()})
    tokens = torch.randint(512, (2, 64), generator=torch.Generator().manual_seed(0))
    targets = tokens.roll(1, 1)
    losses = [ours(tokens, targets), F.cross_entropy(own(tokens).flatten(0, 1), targets.flatten())]
    assert losses[1].item() == pytest.approx(losses[0].item(), rel=1e-5)
    for loss in losses:
        loss.backward()
    theirs = dict(own.named_parameters())
    for name, p in ours.named_parameters():
        gradient = theirs[name_of(name)].grad
        assert p.grad is not None
        assert gradient is not None
        assert (gradient - p.grad).norm() <= 1e-4 * p.grad.norm() + 1e-7, name


def test_kernels_in_triton_and_what_stands_beside_them_compute_the_same() -> None:
    """By the kernels' twins here: each tile straight, turned and both, and what has several results."""
    section = ModelSection(layers=1, dim=256, heads=2, seq_len=128)
    made = pairs(resolve_model(section, vocab_size=300), torch.float32, torch.device("cpu"))
    counts = list[tuple[str, int]]()
    for _, shape, calls in made:
        mine, other = (call() for call in calls)
        counts.append((shape.partition(" by ")[2], len(mine)))
        for a, b in zip(mine, other, strict=True):
            assert a.shape == b.shape
            assert (a.float() - b.float()).norm() <= 1e-5 * b.float().norm()
    tiles = "1 x 128", "128 x 128", "the whole tensor"
    ways = (("", 2), (", turned", 2), (", both", 4))
    assert counts == [("", 3), *((tile + way, n) for tile in tiles for way, n in ways), ("", 3)]


def test_kernels_and_pytorchs_own_compute_the_same() -> None:
    """Forward and backward; and the FLOPs are those that PyTorch counts."""
    made = cases(recipe_of("llama-1b", "dp=1", 0).model, torch.device("cpu"))
    for name, (ours, own, shapes, flops) in made.items():
        torch.manual_seed(0)
        inputs = [torch.randn(shape).requires_grad_() for shape in shapes]
        found = []
        for call in (ours, own):
            out = call(*inputs)
            outputs = out if isinstance(out, tuple) else (out,)
            outputs = [one.flatten(2) if name == "attention" and one.dim() == 3 else one for one in outputs]
            if name == "attention" and outputs[0].dim() == 4:
                outputs = [outputs[0].transpose(1, 2).flatten(2)]
            gradients = torch.autograd.grad(outputs, inputs, [torch.ones_like(one) for one in outputs])
            found.append([*outputs, *gradients])
        for a, b in zip(*found, strict=True):
            torch.testing.assert_close(a, b, rtol=2e-4, atol=2e-4)
        if name.startswith("matmul") or name.startswith("output"):
            with FlopCounterMode(display=False) as counted:
                torch.autograd.grad((out := own(*inputs)), inputs, torch.ones_like(out))
            assert counted.get_total_flops() == flops, name
    x, w = torch.randn(3, 5), torch.randn(2, 5)
    inputs = [x.requires_grad_(), w.requires_grad_()]
    assert both(F.linear, inputs) == 4 * (3 * (15 + 10) + 2 * 6), "read twice, with gradients"


def test_ranks_that_share_a_gpu_send_by_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    attempts: list[local.Attempt] = []
    monkeypatch.setattr(local, "launch", lambda attempt, fork: attempts.append(attempt) or local.Outcome())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    local.start_ranks(lambda ranks: None, 4, fork=True, share_gpus=True)
    local.start_ranks(lambda ranks: None, 4, fork=True)
    assert [list(attempt.slots) for attempt in attempts] == [[0, 1, 0, 1], [0, 1, 2, 3]]
    monkeypatch.delenv(ranks.STORE_FILE, raising=False)
    assert ranks._backend(4) == "nccl", "each rank may see its own GPU only"
    monkeypatch.setenv(ranks.STORE_FILE, "store")
    assert ranks._backend(4) == "gloo"
    assert ranks._backend(2) == "nccl"


def test_ranks_of_a_launcher_share_no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "found", lambda: (0, 2, 0, 2))
    with pytest.raises(UserError, match="--share-gpus is for ranks that"):
        verify(load("quickstart"), "dp=2", share_gpus=True)


def through_host_memory(rank: int, world: int, recipe: Recipe, steps: int, folder: Path) -> None:
    """A rank whose axes take its tensors for those of a GPU that it shares: copies to the host are other tensors."""
    start = Axis.__init__

    def staged(axis: Axis, *arguments: object, **options: object) -> None:
        start(axis, *arguments, **options)  # type: ignore[arg-type]
        axis.staged = axis.group is not None

    with (
        mock.patch.object(Axis, "__init__", staged),
        mock.patch.object(torch.Tensor, "cpu", lambda x: x.detach().clone()),
        mock.patch.object(dist, "isend", wraps=dist.isend) as send,
    ):
        side(rank, world, recipe, steps, folder)
    assert send.called


@pytest.mark.parametrize("layout", ["pp=2", *slow("cp=2")])
def test_messages_go_through_host_memory(tmp_path: Path, layout: str) -> None:
    assert compared(tiny(tmp_path, layout), part=through_host_memory).passed


@pytest.fixture
def h100(monkeypatch: pytest.MonkeyPatch) -> None:
    """What trials ask of GPUs, as eight H100 answer."""
    answers: dict[str, Any] = {
        "get_device_name": lambda *_: "NVIDIA H100 80GB HBM3",
        "get_device_capability": lambda *_: (9, 0),
        "mem_get_info": lambda gpu=0: (10 << 30 if gpu == 1 else 79 << 30, 80 << 30),
        "can_device_access_peer": lambda a, b: (a, b) != (0, 1),
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    monkeypatch.setattr(doctor.nccl, "version", lambda: (2, 29, 2))


@pytest.mark.usefixtures("h100")
def test_doctor_says_what_is_wrong_with_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.gpus, "notes", list)
    monkeypatch.setattr(doctor.os, "environ", {"PATH": ""})
    monkeypatch.setattr(doctor, "find_spec", lambda name: None)
    rows = {row.name: row for row in doctor.doctor(2, "machine")}
    assert rows["CUDA, NCCL"].measured == "not in this build, 2.29.2"
    assert (
        rows["GPU 1: free memory"].advice == "another process holds memory of this GPU; nvidia-smi lists it"
    )
    assert not rows["GPU 0: free memory"].advice
    wrong = {name for name, row in rows.items() if row.advice}
    assert wrong == {"Triton", "GPU 1: free memory", "peer access from GPU 0 to 1"}


@pytest.mark.usefixtures("h100")
def test_links_stand_beside_the_clusters_description(monkeypatch: pytest.MonkeyPatch) -> None:
    size = 256 << 20
    planned = collective("all_reduce", size, Group(8, 8), parse("h100:8"))
    found = {
        "all_reduce fp32": [[1 << 20, 1.0], [size, planned / 0.79]],
        "all_gather": [[size, 1e-6]],
        "send": [[size, 1e-6]],
    }
    monkeypatch.setattr(trials, "returned", lambda work, ranks, fork: found if ranks == 8 else {})
    small, large, gather, send = trials.links(8, "collectives")
    assert not small.advice, "latency is not judged"
    assert large.measured == pytest.approx(0.79 * (large.expected or 0))
    assert "nvidia-smi topo" in large.advice
    assert gather.advice == send.advice == ""
    with pytest.raises(UserError, match="one GPU sends nothing"):
        list(trials.links(1, "collectives"))


@pytest.mark.usefixtures("h100")
def test_memory_and_time_stand_beside_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    plans: list[Any] = []
    predict = trials.predict
    monkeypatch.setattr(trials, "predict", lambda *arguments: plans.append(predict(*arguments)) or plans[-1])

    def measured(work: Any, ranks: int, fork: bool) -> Any:
        return {"memory_bytes": 1.06 * plans[-1].peak_bytes, "step_s": 1.09 * plans[-1].step.seconds}

    monkeypatch.setattr(trials, "returned", measured)
    memory, step = trials.memory(8, "llama-1b")
    assert plans[-1].layout.zero == 1
    assert plans[-1].setting.cluster.device.memory == 79 << 30
    assert plans[-1].peak_bytes <= plans[-1].limit < plans[-2].peak_bytes, "the largest microbatch that fits"
    assert memory.advice.startswith("+6.0% of the plan")
    assert step.advice == ""
    assert step.measured == pytest.approx(1.09 * (step.expected or 0))
    with pytest.raises(UserError, match=r"llama3-8b, dp=1: needs .* GiB per rank; 79.0 GiB are free"):
        list(trials.memory(1, "llama3-8b"))


@pytest.mark.usefixtures("h100")
def test_training_stands_beside_plain_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Recipe] = []

    def run(work: Any, ranks: int, fork: bool) -> Any:
        asked.append(work.args[0])
        return {"step_s": 1.0 if work.func is plain.plain else 2.0}

    monkeypatch.setattr(trials, "returned", run)
    monkeypatch.setattr(trials, "compute_mode", lambda recipe, device: PRECISIONS["bf16"])
    speed, mfu = trials.train(8, "llama-1b")
    assert asked[0] == asked[1]
    tokens = asked[0].train.global_batch_size * asked[0].model.seq_len
    assert asked[0].layout.zero == 3
    assert (speed.measured, speed.expected) == (tokens / 2, tokens)
    assert speed.advice.startswith("0.50 times plain PyTorch")
    flops = flops_per_token(asked[0].model)
    assert mfu.measured == pytest.approx(100 * flops * tokens / 2 / 8 / 989.4e12)


@pytest.mark.usefixtures("h100")
def test_whole_logits_need_room() -> None:
    (ours, plan), (both_, smaller) = (trials._fitting(8, "llama-1b", 3, whole) for whole in (0, trials.WHOLE))
    assert both_.model == ours.model
    logits = 12 * (both_.train.microbatch_size or 1) * 8192 * 128256
    assert smaller.peak_bytes + logits <= smaller.limit
    assert smaller.tokens < plan.tokens


@pytest.mark.slow
def test_make_gpu_takes_an_environment_that_is_there(tmp_path: Path) -> None:
    """Whose packages may be found by PYTHONPATH, in a checkout that is not installed."""
    (tmp_path / "sitecustomize.py").write_text("print('found')")
    root = Path(__file__).parent.parent
    words = ["make", "-s", "gpu", f"PYTHON={sys.executable}", f"ARGS=--part doctor --out {tmp_path / 'gpu'}"]
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "PYTHONSAFEPATH": "1"}
    done = subprocess.run(words, cwd=root, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("found") >= 2, "by the check and by the command"
    assert "doctor: machine" in done.stderr
    assert json.loads((tmp_path / "gpu" / "gpu.json").read_text())["parts"]["doctor"]["machine"]["rows"]
