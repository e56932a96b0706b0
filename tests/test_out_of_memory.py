"""Memory that runs out: one message with the planner's numbers and changes that help, no traceback, nothing lost."""

import os
import re
import resource
import shlex
import subprocess
import sys
import uuid
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from launched import Launched, command
from marks import only
from test_predicted_runs import recipe_of

from fivefold import host
from fivefold.checkpoint import store
from fivefold.cli.main import main
from fivefold.errors import UserError
from fivefold.host import machine
from fivefold.kernels.adamw import AdamW
from fivefold.launch import verdict
from fivefold.models.llama.module import Block, Model
from fivefold.recipe import change, load, resolve, to_toml
from fivefold.train import out_of_memory as oom
from fivefold.train.job import Job
from fivefold.train.out_of_memory import advice, out_of_memory
from fivefold.train.start import run_command
from fivefold_plan import predict
from fivefold_plan.advice.explain import remedies
from fivefold_plan.cluster.measured import assumed_table
from fivefold_plan.predict import priced_here

CPU = "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "


def test_errors_of_allocators_are_known() -> None:
    assert out_of_memory(RuntimeError(f"{CPU}4096 bytes. Error code 12 (Cannot allocate memory)"))
    assert out_of_memory(MemoryError())
    assert out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"))
    assert out_of_memory(RuntimeError("CUDA error: out of memory"))  # of the driver, when a context is made
    assert not out_of_memory(RuntimeError("shapes do not match"))
    assert not out_of_memory(RuntimeError("could not create a primitive"))  # without a limit of address space
    with pytest.raises(RuntimeError) as error:
        torch.empty(1 << 60)
    assert out_of_memory(error.value)


@only("forward")
@pytest.mark.parametrize("where", ["forward", "update"])
def test_a_run_saves_what_it_has_and_says_what_helps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """In the third step. An update that breaks off leaves a mixture of two steps, which is not saved."""
    recipe = recipe_of(tmp_path, "dp=1", "train.steps=5", "train.microbatch_size=8", "observe.memory_step=0")
    out, calls = tmp_path / "run", 0
    owner, name, after = (Model, "forward", 2) if where == "forward" else (AdamW, "step", 2)
    plain = getattr(owner, name)

    def fails(self: object, *given: object, **named: object) -> object:
        nonlocal calls
        calls += 1
        if calls > after:
            raise RuntimeError(f"{CPU}{64 * 2**20} bytes. Error code 12 (Cannot allocate memory)")
        return plain(self, *given, **named)

    monkeypatch.setattr(owner, name, fails)
    changes = ["train.val_every=100", "train.sample_every=0"]
    with pytest.raises(UserError) as error:
        run_command(change(recipe, changes), out=out, fork=False)
    said = str(error.value)
    at = "step" if where == "forward" else "the update of step"
    assert said.startswith(
        f"rank 0 ran out of memory in {at} 3, asking for 64.0 MiB more\nTensors of a rank:"
    )
    resumes = re.escape(f"fivefold train {out} --resume")
    changes = re.findall(rf"  [\d.]+ MiB, (\S+) times the step.*, fits: {resumes} --set (\S+)=\S+\n", said)
    assert len(changes) == 3
    assert {"train.microbatch_size", "layout.recompute"} <= {field for _, field in changes}
    if where == "update":
        assert not store.checkpoints(out)
        assert "There is no checkpoint yet." in said
        return
    assert "Step 2 is saved. Resume with a change: fivefold train" in said
    monkeypatch.undo()
    run_command(load(out / "recipe.toml", ["train.microbatch_size=4"]), out=out, resume=True, fork=False)
    assert store.latest(out).name == "step-00000005"  # pyright: ignore[reportOptionalMemberAccess]


CUDA = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB"
PLACES = {"start": (Model, "__init__"), "forward": (Block, "forward"), "backward": (torch.autograd, "backward"),
          "update": (AdamW, "step")}  # fmt: skip
"""Where memory runs out: what fails in a rank's start, or in its second step."""


def train_without_memory(where: str, words: list[str]) -> None:
    """The command, on a machine that has been measured, whose allocator fails on every rank."""
    (owner, name), launcher, updates = PLACES[where], os.getpid(), 0
    plain, step = getattr(owner, name), AdamW.step

    def fails(*given: object, **named: object) -> object:
        if os.getpid() != launcher and (updates or where == "start"):
            raise torch.cuda.OutOfMemoryError(CUDA)
        return plain(*given, **named)

    def counted(*given: object, **named: object) -> object:
        nonlocal updates
        found = fails(*given, **named) if where == "update" else step(*given, **named)  # pyright: ignore
        updates += 1
        return found

    setattr(owner, name, fails)
    AdamW.step = counted  # pyright: ignore[reportAttributeAccessIssue]
    predict.load_table = assumed_table
    main(words)


@only("update-pp=2", "forward-dp=2,zero=1")
@pytest.mark.parametrize("layout", ["dp=2,zero=1", "pp=2"])
@pytest.mark.parametrize("where", PLACES)
def test_one_of_several_ranks_says_what_held_the_memory(tmp_path: Path, where: str, layout: str) -> None:
    """A GPU's error, on every rank. The run is not started again, and the first command that fits trains."""
    out, sets = tmp_path / "run", ["train.microbatch_size=2", "train.steps=2", "launch.restarts=5"]
    recipe = recipe_of(
        tmp_path, layout, *sets, "observe.memory_step=0", "train.val_every=0", "train.sample_every=0"
    )
    (tmp_path / "recipe.toml").write_text(to_toml(recipe))
    run = Launched(
        tmp_path / "log",
        train_without_memory,
        where,
        ["train", str(tmp_path / "recipe.toml"), "--out", str(out)],
    )
    assert run.wait() == verdict.USER, run.said
    place = {"start": "before the first step", "update": "in the update of step 2"}.get(where, "in step 2")
    (said,) = re.findall(
        rf"^error: rank \d ran out of memory {place}, asking for 2.00 GiB more\n", run.said, re.M
    )
    assert not re.search("Traceback|Starting|again", run.said)
    found = dict(re.findall(r"^  ([a-z ]+?)  +([\d.]+ [KM]?i?B(?:  [\d.]+ [KM]?i?B)?)$", run.said, re.M))
    if where != "start":  # of the rank that speaks; before, of the one with most
        last = said.startswith("error: rank 1")
        assert ("of these the loss" in found) == (layout != "pp=2" or last)
    for kind in ("weights", "gradients", "optimizer states"):
        planned, *held = found[kind].split("  ")
        if where == "start":
            assert not held
        elif layout == "pp=2" or kind == "optimizer states":
            assert held == [planned], kind
        else:  # of ZeRO's, those that are gathered then, or not scattered yet
            least = 1 if kind == "weights" else 0
            assert least <= bytes_in(held[0]) <= bytes_in(planned), kind
    assert found["all tensors"]
    changes = re.findall(
        r"^  [\d.]+ MiB, ([\d.]+) times the step \((\S+) instead of (\S+) s\), fits: (.+)$", run.said, re.M
    )
    assert len(changes) == 5, run.said
    assert all(
        float(new) / float(old) == pytest.approx(float(times), rel=0.02) for times, new, old, _ in changes
    )
    assert sum(command.count("--layout") for *_, command in changes) == 2
    if where == "start":
        assert "Changes that need less, as planned, for the same command:" in run.said
        assert all(command.startswith("--") for *_, command in changes)
        return
    for *_, line in (changes[0], changes[-1]):
        assert line.startswith(f"fivefold train {out} --resume --")
    again = command(tmp_path / "again", *shlex.split(changes[-1][-1])[1:])
    assert again.wait() == 0, again.said
    assert store.latest(out).name == "step-00000002"


def bytes_in(text: str) -> float:
    number, unit = text.split()
    return float(number) * {"B": 1, "KiB": 2**10, "MiB": 2**20}[unit]


def test_what_the_allocator_of_a_gpu_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU: the figures are those that PyTorch documents."""
    stats = {f"{kind}_bytes.all.{when}": size << 30 for kind, when, size in (
        ("allocated", "current", 70), ("allocated", "peak", 72), ("reserved", "current", 76))}  # fmt: skip
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: stats)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 29, 79 << 30))
    assert oom.allocator(torch.device("cuda:0")) == [
        "The allocator has 70.0 GiB of tensors (72.0 GiB at most) in 76.0 GiB. The device has 512 MiB of 79.0 GiB free"
    ]


def test_the_rest_of_a_gpu_is_beside_the_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU the planner knows, of which all but the runtime, fragments and the margin may be planned."""
    recipe = resolve(recipe_of(tmp_path, "dp=1"), vocab_size=260)
    monkeypatch.setattr(
        oom, "_room", lambda ranks: (79 << 30, "NVIDIA H100 80GB HBM3", 1, "NVIDIA H100 80GB HBM3")
    )
    held = {"params": 1 << 20, "gradients": 2 << 20, "optimizer": 3 << 20, "buffers": 70 << 30}
    said = "\n".join(advice(Job(recipe, tmp_path / "run"), 1, base=1 << 30, held=(0, held)))
    assert re.search(r"^  weights +\S+ KiB  1\.00 MiB$", said, re.M)
    assert re.search(r"^  messages and other buffers +\S+ [KM]iB  70\.0 GiB with activations$", said, re.M)
    assert re.search(r"^  all tensors +\S+ MiB  70\.0 GiB$", said, re.M)
    assert "There are 79.0 GiB (NVIDIA H100 80GB HBM3)\n" in said, "a process's own memory is not the GPU's"
    assert " s), fits: --set " in said
    two = resolve(recipe_of(tmp_path, "pp=2"), vocab_size=260)
    ends = ["\n".join(advice(Job(two, tmp_path / "run"), 2, held=(place, held))) for place in (0, 1)]
    assert ["of these the loss" in text for text in ends] == [False, True], "only the last stage computes it"
    monkeypatch.setattr(oom, "_room", lambda ranks: (79 << 30, "Another", 1, "Another"))
    assert " s)" not in "\n".join(advice(Job(recipe, tmp_path / "run"), 1)), "another device's seconds"


def test_changes_are_predicted_and_ordered() -> None:
    sets = [
        "model.vocab_size=32000",
        "train.global_batch_size=64",
        "train.microbatch_size=8",
        "precision.mode=bf16",
    ]
    recipe = load("llama-7b", sets, "dp=8")
    own, found = remedies(recipe, *priced_here("NVIDIA H100 80GB HBM3"), 75 * 2**30, gpu=True)
    assert len(found) == 3
    assert all(one.peak < own.peak_bytes for one in found)
    assert [one.peak <= 75 * 2**30 for one in found] == sorted(
        [one.peak <= 75 * 2**30 for one in found], reverse=True
    )
    fitting = [one.slower for one in found if one.peak <= 75 * 2**30]
    assert fitting
    assert fitting == sorted(fitting)
    _, found = remedies(recipe, *priced_here("NVIDIA H100 80GB HBM3"), 0, gpu=True)
    assert [one.peak for one in found] == sorted(one.peak for one in found), (
        "what needs least, if nothing fits"
    )


def test_limits_of_control_groups_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inside = tmp_path / "memory" / "jobs" / "one"
    inside.mkdir(parents=True)
    (inside.parent / "memory.limit_in_bytes").write_text("1000000\n")
    (inside / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    (inside / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 3\n")
    for module in (host, machine):
        monkeypatch.setattr(module, "control_groups", lambda controller: [inside, inside.parent])
    found = machine.limit()
    if sys.platform.startswith("linux"):
        assert found is not None
        assert (found.bytes, found.shared) == (1000000, True)
    assert machine.oom_kills() == 3


def test_what_is_left_is_that_of_the_narrowest_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "memory.current").write_text("600000\n")
    (tmp_path / "memory.stat").write_text("anon 500000\ninactive_file 50000\n")
    monkeypatch.setattr(machine, "memory_limits", lambda: [(tmp_path / "memory.max", 1_000_000)])
    assert machine.available() == 1_000_000 - 600_000 + 50_000


def test_a_limit_of_address_space_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the tensors fit no layout helps: the libraries, stacks and arenas do not."""
    recipe, room = resolve(recipe_of(tmp_path, "dp=1"), vocab_size=260), 1 << 30
    monkeypatch.setattr(machine, "address_space", lambda: room)
    monkeypatch.setattr(machine, "limit", lambda: machine.Limit(room, "ulimit -v", False, 0))
    job = Job(recipe, tmp_path / "run")
    assert out_of_memory(RuntimeError("could not create a primitive"))
    said = advice(job, 1, base=room * 3 // 4)
    assert not any("--set " in line for line in said)
    assert said[-1].startswith(
        "The tensors fit, and the limit of address space (ulimit -v) is too low: 1,024 MiB."
    )
    assert any("--set " in line for line in advice(job, 1, base=room - (1 << 10)))


@pytest.mark.skipif(sys.platform != "linux", reason="needs a limit of the address space")
@pytest.mark.parametrize("mib", [250, 450])
def test_too_little_address_space_for_torch(mib: int) -> None:
    """Loading it would end in an ImportError, or in an abort of the C++ library."""
    command = f"ulimit -v {mib * 1024}; exec {sys.executable} -m fivefold generate nowhere"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("error: the limit of address space (ulimit -v) is too low")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("own", [{}, {"PYTORCH_ALLOC_CONF": "own"}, {"PYTORCH_CUDA_ALLOC_CONF": "own"}])
def test_segments_grow_unless_the_user_says_otherwise(monkeypatch, own):
    found = dict(own)
    monkeypatch.setattr(machine.os, "environ", found)
    machine.let_segments_grow()
    assert found == (own or {"PYTORCH_ALLOC_CONF": "expandable_segments:True"})


def test_few_compiled_matmuls_are_kept_unless_the_user_says_how_many(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "ONEDNN_PRIMITIVE_CACHE_CAPACITY"
    monkeypatch.setenv(name, "7")
    machine.keep_few_primitives()
    assert os.environ[name] == "7"
    monkeypatch.delenv(name)
    machine.keep_few_primitives()
    assert os.environ[name] == "128"
    monkeypatch.delenv(name)


TRAIN = """
import resource, sys
from fivefold.cli.main import main
sys.argv[0] = "fivefold"
main()
"""


def words(tmp_path: Path, layout: str) -> list[str]:
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{i} squared is {i * i}, and the next one follows. " for i in range(6000)))
    sets = [
        f"data.source={text}", "data.tokenizer=bytes", f"data.cache={tmp_path / 'cache'}", "train.steps=3",
        "train.global_batch_size=64", "train.microbatch_size=32", "model.seq_len=512", "observe.tracker=none",
    ]  # fmt: skip
    chosen = [word for one in sets for word in ("--set", one)]
    return [
        sys.executable,
        "-c",
        TRAIN,
        "train",
        "quickstart",
        "--layout",
        layout,
        "--out",
        str(tmp_path / "run"),
        *chosen,
    ]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs a limit of the address space")
@pytest.mark.parametrize("layout", ["dp=1", "dp=2"])
def test_a_real_limit_of_the_address_space(tmp_path: Path, layout: str) -> None:
    size = 1_250_000 * 1024

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (size, size))

    done = subprocess.run(
        words(tmp_path, layout), capture_output=True, text=True, check=False, preexec_fn=limited, timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 2, done.stderr[-2000:]
    assert "Traceback" not in done.stderr
    assert re.search(r"error: rank \d ran out of memory", done.stderr)
    assert "(ulimit -v)" in done.stderr
    assert "--set train.microbatch_size=" in done.stderr


def group_of(size: int) -> Path | None:
    """A new control group with a limit of memory, of cgroup v1 or v2; None if none can be made here."""
    name = f"fivefold-{uuid.uuid4().hex[:8]}"
    for home, limit in ((host.CGROUPS / "memory", "memory.limit_in_bytes"), (host.CGROUPS, "memory.max")):
        with suppress(OSError):
            (home / name).mkdir()
            try:
                if not (home / name / limit).exists():  # in v2 the parent may not have handed it on
                    raise OSError
                (home / name / limit).write_text(str(size))
            except OSError:
                (home / name).rmdir()
                continue
            with suppress(OSError):
                (home / name / "memory.swap.max").write_text("0")
            return home / name
    return None


@pytest.mark.slow
def test_ranks_that_the_system_kills(tmp_path: Path) -> None:
    """In a control group of this test's own."""
    group = group_of(1_000 * 2**20)
    if group is None:
        pytest.skip("control groups of memory cannot be made here")

    def enter() -> None:
        (group / "cgroup.procs").write_text(str(os.getpid()))

    try:
        done = subprocess.run(
            words(tmp_path, "dp=2"),
            capture_output=True,
            text=True,
            check=False,
            preexec_fn=enter,
            timeout=120,
        )
    finally:
        for pid in (group / "cgroup.procs").read_text().split():
            os.kill(int(pid), 9)
        group.rmdir()
    assert re.search(r"rank \d was killed by the system \(SIGKILL\), because memory ran out", done.stderr)
    assert "Tensors of a rank: " in done.stderr
    assert "--set train.microbatch_size=" in done.stderr
