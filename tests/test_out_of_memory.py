"""Memory that runs out: one message with the planner's numbers and changes that help, no traceback, nothing lost."""

import os
import re
import resource
import subprocess
import sys
import uuid
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from marks import only
from test_predicted_runs import recipe_of

from fivefold import host
from fivefold.checkpoint import store
from fivefold.errors import UserError
from fivefold.host import machine
from fivefold.kernels.elementwise import AdamW
from fivefold.models.llama.module import Model
from fivefold.plan.advice.explain import remedies
from fivefold.plan.predict import priced_here
from fivefold.recipe import change, load, resolve
from fivefold.train.hooks import out_of_memory
from fivefold.train.job import Job
from fivefold.train.prediction import advice
from fivefold.train.start import run_command

CPU = "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "


def test_errors_of_allocators_are_known() -> None:
    assert out_of_memory(RuntimeError(f"{CPU}4096 bytes. Error code 12 (Cannot allocate memory)"))
    assert out_of_memory(MemoryError())
    assert out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"))
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
    assert said.startswith(
        "rank 0 ran out of memory in step 3, asking for 64.0 MiB more\nPredicted for a rank: weights"
    )
    assert said.count("  --set ") == 3
    assert re.search(r"--set train\.microbatch_size=\d+ +[\d.]+ MiB, 1\.\d\d times the step: fits", said)
    assert "--set layout.recompute=" in said
    if where == "update":
        assert not store.checkpoints(out)
        assert "There is no checkpoint yet." in said
        return
    assert "Step 2 is saved. Resume with the change: fivefold train" in said
    monkeypatch.undo()
    run_command(load(out / "recipe.toml", ["train.microbatch_size=4"]), out=out, resume=True, fork=False)
    assert store.latest(out).name == "step-00000005"  # pyright: ignore[reportOptionalMemberAccess]


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
    assert len(said) == 2
    assert said[1].startswith(
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


def command(tmp_path: Path, layout: str) -> list[str]:
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
        command(tmp_path, layout), capture_output=True, text=True, check=False, preexec_fn=limited, timeout=120,
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
            command(tmp_path, "dp=2"),
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
    assert "Predicted for a rank: weights" in done.stderr
    assert "--set train.microbatch_size=" in done.stderr
