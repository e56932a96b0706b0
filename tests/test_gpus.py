"""What a run finds out about GPUs, and how it starts on them: shown with stand-ins for PyTorch's functions."""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

from fivefold.cli.main import app
from fivefold.errors import UserError
from fivefold.host import gpus
from fivefold.host.machine import has_fast_bf16
from fivefold.kernels.blockwise_attention import Documents
from fivefold.launch import ranks as ranks_
from fivefold.launch.local import start_ranks
from fivefold.launch.ranks import Ranks
from fivefold.parallel.mesh import Mesh, Microbatch, Share
from fivefold.precision import DTYPES, PRECISIONS
from fivefold.recipe import load
from fivefold.sharding.layout import Layout
from fivefold.step.step import Done, moment
from fivefold.train import loop
from fivefold.train import share as share_
from fivefold.train.share import Copies
from fivefold_plan.bench.gpu.trials import PARTS
from fivefold_plan.commands import bench

H100, A100, T4 = "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB", "Tesla T4"
SLICE = "NVIDIA A100-SXM4-80GB MIG 3g.40gb"
CAPABILITIES = {H100: (9, 0), A100: (8, 0), SLICE: (8, 0), T4: (7, 5)}
Seen = Callable[..., None]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Seen:
    """Sets the GPUs that this machine seems to have, and the drivers."""

    def has(*names: str, driver: str = "NVIDIA", visible: str | None = None, hip: str | None = None) -> None:
        for maker in ("NVIDIA", "AMD", "INTEL"):
            path = tmp_path / maker
            path.touch() if maker == driver else path.unlink(missing_ok=True)
            monkeypatch.setattr(gpus, maker, path)
        monkeypatch.delenv(gpus.VISIBLE, raising=False)
        if visible is not None:
            monkeypatch.setenv(gpus.VISIBLE, visible)
        cuda = {
            "is_available": lambda: bool(names),
            "device_count": lambda: len(names),
            "get_device_name": lambda index: names[index],
            "get_device_capability": lambda index: CAPABILITIES[names[index]],
        }
        for name, value in cuda.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(torch.version, "hip", hip)

    return has


def only(found: list[str]) -> str:
    (note,) = found
    return note


# What is said of GPUs


def test_gpus_that_are_alike_and_machines_without_drivers_need_no_words(
    machine: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(H100, H100, visible="0,1,")
    assert gpus.notes() == []
    machine(driver="")
    monkeypatch.setattr(gpus.sys, "platform", "linux")
    assert gpus.notes() == []
    monkeypatch.setattr(gpus.sys, "platform", "darwin")
    assert only(gpus.notes()) == "the CPU trains: GPUs of Apple are not supported"


def test_hidden_gpus_are_no_trouble_and_unknown_ones_are(machine: Seen) -> None:
    for hidden in ("", "-1"):
        machine(visible=hidden)
        assert only(gpus.notes()) == f"the CPU trains: CUDA_VISIBLE_DEVICES={hidden} hides all GPUs"
    machine(H100, visible="0,9")
    assert "WARNING: CUDA_VISIBLE_DEVICES=0,9 names 2 GPUs, of which 1 can be used" in only(gpus.notes())


def test_a_driver_that_pytorch_cannot_use_is_a_warning_with_its_reason(
    machine: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    def old() -> None:
        raise RuntimeError(
            "The NVIDIA driver on your system is too old (found version 11040).\nPlease update"
        )

    def forked() -> None:
        raise RuntimeError("Cannot re-initialize CUDA in forked subprocess. To use CUDA ...")

    def no_build() -> None:
        raise AssertionError("Torch not compiled with CUDA enabled")

    machine(visible="7")
    monkeypatch.setattr(torch.cuda, "init", old)
    said = "driver for NVIDIA's GPUs: The NVIDIA driver on your system is too old (found version 11040) ("
    assert said in only(gpus.notes())
    assert only(gpus.notes()).startswith("WARNING: the CPU trains, ")
    assert f"({torch.__version__}, with CUDA_VISIBLE_DEVICES=7)" in only(gpus.notes())
    monkeypatch.setattr(torch.cuda, "init", forked)
    assert "NVIDIA's GPUs: `fivefold check` says why (" in only(gpus.notes())
    monkeypatch.setattr(torch.cuda, "init", no_build)
    assert "Torch not compiled with CUDA enabled" in only(gpus.notes())
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    assert "PyTorch finds none" in only(gpus.notes())


def test_other_makers(machine: Seen) -> None:
    machine(driver="AMD")
    assert "need a build of PyTorch for ROCm" in only(gpus.notes())
    machine(driver="AMD", hip="7.1")
    assert only(gpus.notes()) == "the CPU trains: PyTorch's build for ROCm finds no GPU"
    machine(driver="INTEL")
    assert only(gpus.notes()) == "the CPU trains: GPUs of Intel are not supported"
    machine(H100, driver="AMD", hip="7.1")
    assert only(gpus.notes()) == "AMD's GPUs (ROCm 7.1) take the same path as NVIDIA's, untried"


def test_slices_and_different_gpus(machine: Seen) -> None:
    for visible in (None, "MIG-1,MIG-2"):
        machine(SLICE, visible=visible)
        assert only(gpus.notes()) == f"WARNING: {SLICE}: {gpus.SLICES}, so a run has one rank"
    machine(A100, H100)
    assert only(
        gpus.notes()
    ) == f"WARNING: different GPUs ({A100}, {H100}): the slowest sets the pace, and bf16 " + (
        "is used only if all are fast in it"
    )
    assert has_fast_bf16("cuda")
    machine(H100, T4)  # every rank must choose the same
    assert not has_fast_bf16("cuda")


def test_too_few_gpus_are_refused_with_the_reason(machine: Seen) -> None:
    machine(H100, visible="3")
    assert ranks_.device_for(0) == torch.device("cuda", 0)
    with pytest.raises(UserError, match=r"local rank 1 has no GPU.* sees: 1 \(CUDA_VISIBLE_DEVICES=3\)"):
        ranks_.device_for(1)
    with pytest.raises(UserError, match=r"2 ranks .* need 2 GPUs, but it has 1 \(CUDA_VISIBLE_DEVICES=3\)"):
        start_ranks(print, 2, fork=False)
    machine(SLICE)
    with pytest.raises(UserError, match=r"it has 1 \(a process sees one slice \(MIG\) of a GPU only"):
        start_ranks(print, 2, fork=False)


# Variables


def test_variables_that_hurt_are_warnings() -> None:
    def warning(name: str, value: str) -> str:
        (found,) = gpus.variables({name: value, "HOME": "/", "NCCLX": "1"})
        assert (found["name"], found["value"]) == (name, value)
        assert found["does"]
        return found["warning"]

    harmful = {
        "NCCL_P2P_DISABLE": ("1", "0"),
        "NCCL_IB_DISABLE": ("1", "0"),
        "NCCL_SHM_DISABLE": ("1", "0"),
        "NCCL_BLOCKING_WAIT": ("1", "0"),
        "TORCH_NCCL_BLOCKING_WAIT": ("True", "0"),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": ("0", "3"),
        "CUDA_LAUNCH_BLOCKING": ("1", "0"),
        "CUDA_DEVICE_MAX_CONNECTIONS": ("1", "8"),
        "NVIDIA_TF32_OVERRIDE": ("0", "1"),
        "PYTORCH_NO_CUDA_MEMORY_CACHING": ("0", None),
    }
    for name, (hurts, fine) in harmful.items():
        assert warning(name, hurts).startswith(f"{name}={hurts}: "), name
        assert fine is None or warning(name, fine) == "", name
    for name in ("OMP_NUM_THREADS", "PYTORCH_ALLOC_CONF", "CUDA_VISIBLE_DEVICES", "NCCL_DEBUG"):
        assert warning(name, "1") == ""
    (unknown,) = gpus.variables({"NCCL_NEW_THING": "1"})
    assert unknown["does"] == "a setting of NCCL's that this table does not have"


def test_the_page_on_gpus_has_every_variable_that_hurts_and_every_part() -> None:
    page = (Path(__file__).parent.parent / "docs" / "gpu.md").read_text()
    option = Path(bench.__file__).read_text()
    assert not [name for name, one in gpus.VARIABLES.items() if one.harm and f"`{name}=" not in page]
    assert not [part for part in PARTS if f"| `{part}` |" not in page]
    assert f"Some of {','.join(PARTS)}." in option


def test_check_explains_the_environment(machine: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(A100, H100)
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    command = ["check", "quickstart", "--no-data"]
    shown = CliRunner().invoke(app, command).output
    assert "  variable NCCL_DEBUG=INFO: how much NCCL logs\n" in shown
    assert "  WARNING  NCCL_P2P_DISABLE=1: NVLink and PCIe are not used\n" in shown
    assert "  WARNING  different GPUs (" in shown
    found = json.loads(CliRunner().invoke(app, [*command, "--json"]).output)
    assert {"NCCL_DEBUG", "NCCL_P2P_DISABLE"} <= {one["name"] for one in found["environment"]}
    machine(visible="")
    assert (
        "  note     the CPU trains: CUDA_VISIBLE_DEVICES= hides all GPUs\n"
        in CliRunner().invoke(app, command).output
    )


# The CPUs next to a GPU


def tree(root: Path, address: str, node: str, cpus: str) -> None:
    """A part of what Linux shows at /sys."""
    for path, text in (
        (root / "bus/pci/devices" / address / "numa_node", node),
        (root / "devices/system/node" / f"node{node}" / "cpulist", cpus),
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")


def test_cpus_next_to_a_gpu(tmp_path: Path) -> None:
    tree(tmp_path, "0000:dc:00.0", "1", "4-7,12,14-15")
    tree(tmp_path, "0000:3b:00.0", "-1", "0-15")
    assert gpus.cpus_near("0000:dc:00.0", tmp_path) == (1, {4, 5, 6, 7, 12, 14, 15})
    assert gpus.cpus_near("0000:3b:00.0", tmp_path) == (-1, set()), "one node"
    assert gpus.cpus_near("0000:aa:00.0", tmp_path) == (-1, set()), "no such device"
    (tmp_path / "devices/system/node/node1/cpulist").write_text("what")
    assert gpus.cpus_near("0000:dc:00.0", tmp_path) == (-1, set())


def test_a_rank_stays_next_to_its_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bound: list[set[int]] = [set(range(16))]
    place = SimpleNamespace(pci_domain_id=0, pci_bus_id=0xDC, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: place)
    monkeypatch.setattr(gpus, "cpus_near", partial(gpus.cpus_near, root=tmp_path))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: bound[-1])
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cpus: bound.append(cpus))
    tree(tmp_path, "0000:dc:00.0", "1", "8-15")
    with gpus.near(0) as said:
        assert bound[-1] == set(range(8, 16))
        assert said == "ranks stay on the CPUs next to their GPUs: this one on 8, of NUMA node 1"
        with gpus.near(0) as again:  # bound before, as by a launcher
            assert again == ""
            assert len(bound) == 2
    assert bound[-1] == set(range(16))
    bound.append({0, 1})
    with gpus.near(0) as said:
        assert said == "WARNING: the launcher gives this rank no CPU next to its GPU (NUMA node 1)"
        assert bound[-1] == {0, 1}
    with gpus.near(None) as said:  # a CPU
        assert said == ""


# Communicators before the first step


class Options:
    """Stands for ProcessGroupNCCL.Options."""

    def __init__(self, is_high_priority_stream: bool = False):
        self.is_high_priority_stream, self._timeout = is_high_priority_stream, timedelta(minutes=10)


def test_messages_get_streams_of_high_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=Options), raising=False)
    assert ranks_.group_options("gloo", timedelta(seconds=5)) is None
    options = ranks_.group_options("nccl", timedelta(seconds=5))
    assert (options.is_high_priority_stream, options._timeout) == (True, timedelta(seconds=5))


MESHES: list[tuple[Layout, int, list[list[int]]]] = [
    (Layout(dp_replicate=2, tp=2), 1, [[0, 1], [0, 2]]),
    (Layout(pp=2, tp=2), 1, [[0, 2], [0, 1], [0, 2]]),  # and those of neighbours in the pipeline
    (Layout(pp=4), 1, [[0, 1], [0, 3]]),
    (Layout(dp_replicate=2, tp=2), 2, [[0, 2], [0, 1], [0, 2]]),  # outer sums overlap
]
"""Layout, replica groups, and the groups in which rank 0 makes a communicator; that of all ranks it made before."""


def connected(folder: Path, ranks: Ranks) -> None:
    """Writes the groups of each mesh in which this rank makes a communicator, in order. gloo acts as NCCL."""
    made, options, new = list[list[int]](), list[Any](), dist.new_group
    all_reduce, isend, irecv = dist.all_reduce, dist.isend, dist.irecv

    def sum_(x: torch.Tensor, *_: Any, group: Any) -> Any:
        assert x.numel() == 1
        made.append(dist.get_process_group_ranks(group))
        return all_reduce(x, group=group)

    def new_group(members: Any, timeout: Any, _: Any, given: Any, **more: Any) -> Any:
        options.append(given)
        return new(members, timeout, "gloo", **more)

    def pair(function: Callable[..., Any], x: Any, _: Any, group: Any, tag: int, peer: int) -> Any:
        made.append(sorted([ranks.rank, dist.get_process_group_ranks(group)[peer]]))
        return function(x, None, group, tag, peer)

    torch.cuda.synchronize = lambda device=None: None
    dist.ProcessGroupNCCL = SimpleNamespace(Options=Options)  # type: ignore[misc]
    dist.all_reduce, dist.new_group = sum_, new_group  # type: ignore[assignment]
    dist.isend, dist.irecv = partial(pair, isend), partial(pair, irecv)
    found, backend = [], dist.get_backend
    for layout, groups, _ in MESHES:
        dist.get_backend = lambda group=None: "nccl"  # type: ignore[assignment]
        Mesh(layout, ranks, groups, overlap=groups > 1)
        dist.get_backend = backend  # for the barrier at the end
        found.append(made.copy())
        made.clear()
    assert all(one.is_high_priority_stream for one in options)
    (folder / f"{ranks.rank}.json").write_text(json.dumps(found))


@pytest.mark.slow
def test_every_communicator_is_made_at_the_start(tmp_path: Path) -> None:
    """By ranks that wait for each other: an order in which they cannot meet would hang."""
    start_ranks(partial(connected, tmp_path), 4, fork=False)
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(4)]
    assert ranks[0] == [wanted for *_, wanted in MESHES]
    for meshes in zip(*ranks, strict=True):
        for rank, made in enumerate(meshes):
            for members in made:
                assert rank in members
                assert all(members in meshes[other] for other in members), "all members make it"


def test_all_ranks_are_connected_when_they_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    """What fails then is no rank that cannot be reached: a full GPU, for example. The group is left all the same."""
    said = list[Any]()

    def connect(group: Any, device: torch.device) -> None:
        said.append((group, device))
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(ranks_, "connect", connect)
    monkeypatch.setattr(ranks_, "abort_groups", lambda: said.append("left"))
    monkeypatch.setattr(ranks_, "found", lambda: (0, 2, 0, 2))
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
    monkeypatch.setattr(ranks_, "schedule_as_batch", lambda: None)
    monkeypatch.setattr(ranks_, "_store", lambda *_: None)
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **given: said.append((backend, given)))
    monkeypatch.setenv(ranks_.STORE_FILE, "")
    with pytest.raises(torch.OutOfMemoryError), ranks_.join(5, 5):
        raise AssertionError("it has not joined")
    (backend, given), *rest = said
    assert (backend, given["rank"], given["world_size"], given["pg_options"]) == ("gloo", 0, 2, None)
    assert given["timeout"] == timedelta(seconds=5)
    assert rest == [(None, torch.device("cpu")), "left"]


# Batches


class Queue:
    """Stands for a stream or an event, and writes down what happens on it."""

    log: ClassVar[list[tuple[str, ...]]] = []

    def __init__(self, name: str = "copies"):
        self.name = name

    def wait_stream(self, other: "Queue") -> None:
        self.log.append((self.name, "waits for", other.name))

    wait_event = wait_stream

    def record(self, stream: "Queue") -> None:
        self.log.append((stream.name, "event"))


def test_a_step_waits_for_its_batch_and_keeps_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    log, now = Queue.log, [Queue("step")]
    log.clear()

    @contextmanager
    def on(queue: Queue) -> Iterator[None]:
        now.append(queue)
        yield
        now.pop()

    cuda = {
        "Stream": lambda device: Queue(),
        "Event": lambda: Queue("the event"),
        "stream": on,
        "current_stream": lambda device=None: now[-1],
    }
    for name, value in cuda.items():
        monkeypatch.setattr(torch.cuda, name, value)
    kept = dict[int, str]()
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda x, queue: kept.update({id(x): queue.name}))
    documents = Documents(np.zeros((1, 4), np.int64))
    rows = Microbatch(torch.zeros(1, 4), torch.zeros(1, 4), documents)

    def read(step: int) -> Share:
        log.append((now[-1].name, f"reads {step}"))
        return Share([rows, Microbatch(torch.ones(1, 4), torch.ones(1, 4))], 2, 2)

    copies = Copies(torch.device("cuda", 0))
    share, copied = copies.begin(read, 3)
    assert log == [("copies", "waits for", "step"), ("copies", "reads 3"), ("copies", "event")]
    log.clear()
    assert copies.wait(share, copied) is share
    assert log == [("step", "waits for", "the event")]
    tensors = [x for row in share for x in (row.inputs, row.targets)]
    wanted = [*tensors, documents.first, documents.cumulative]
    assert kept == dict.fromkeys(map(id, wanted), "step")


def test_on_cpus_nothing_is_copied() -> None:
    copies = Copies(torch.device("cpu"))
    share, copied = copies.begin(lambda: Share([], 0, 0))
    assert copied is None
    assert copies.wait(share, copied) is share


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_batches_are_copied_from_pinned_memory(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    said = list[Any]()
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda x: said.append("pinned") or x)
    monkeypatch.setattr(torch.Tensor, "to", lambda x, *how, **more: said.append((*how, more)) or x)
    batch = np.arange(8).reshape(2, 4), np.arange(8).reshape(2, 4)
    source: Any = SimpleNamespace(batch=lambda i, rows: batch)
    mesh: Any = SimpleNamespace(device=torch.device(device), size=lambda name: 1, further=0)
    found, counted = share_._rows(source, 0, range(2), mesh)
    widened, sent = (torch.int64, {}), (torch.device(device), {"non_blocking": True})
    assert said == [widened, *(["pinned"] if device == "cuda" else []), sent] * 2
    assert (found.inputs.tolist(), counted) == (batch[0].tolist(), 8)


# TF32


def test_tf32_is_what_pytorch_is_told() -> None:
    """By the one setting whose meaning has stayed: the newer ones by back end must not be mixed with the older."""
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        assert (torch.backends.cuda.matmul.fp32_precision, torch.backends.cuda.matmul.allow_tf32) == (
            "tf32",
            True,
        )
        torch.set_float32_matmul_precision("highest")
        assert (torch.backends.cuda.matmul.fp32_precision, torch.backends.cuda.matmul.allow_tf32) == (
            "ieee",
            False,
        )
    finally:
        torch.set_float32_matmul_precision(before)
    assert [name for name, mode in PRECISIONS.items() if not DTYPES[mode.rate].stored] == ["tf32"]


def test_steps_take_as_long_as_on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """However late the host looks: at the end of a run it reads two steps at once."""
    now = [0.0]  # on the GPU's clock, in ms

    class Event:
        def __init__(self, enable_timing: bool = False) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = now[0]

        def synchronize(self) -> None: ...

        def elapsed_time(self, later: "Event") -> float:
            return later.at - self.at

    monkeypatch.setattr(torch.cuda, "Event", Event)
    lines: list[dict[str, Any]] = []
    hooks: Any = SimpleNamespace(end_step=dict, record=lines.append)
    figures = {name: torch.zeros(()) for name in ("loss", "norm", "asked", "skipped")}
    late = loop._Late(hooks, 1, load("quickstart"), torch.device("cuda", 0))
    for step, ms in enumerate((300.0, 50.0, 40.0, 70.0), 1):
        late.start()
        now[0] += ms
        done = Done(0.1, figures)
        done._arrived = moment(torch.device("cuda", 0))  # what a figure on the GPU makes
        late.add(step, done, 0.0, at_once=step == 4)
    assert [line["step_s"] for line in lines] == pytest.approx([0.3, 0.05, 0.04, 0.07])
