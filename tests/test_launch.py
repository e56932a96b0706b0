"""Where ranks come from, which layout they get, and that local runs listen on loopback only."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from launched import command
from marks import slow
from ranks import run_ranks
from test_train import TINY

from fivefold.cli.train import train
from fivefold.errors import UserError
from fivefold.launch import launchers, local, ranks, verdict
from fivefold.recipe import Recipe, load, resolve, to_toml
from fivefold.sharding.layout import Layout, to_text
from fivefold.train import start


@pytest.fixture
def clean(monkeypatch):
    for name in list(os.environ):
        if name.startswith(("SLURM_", "TORCHELASTIC_", "OMPI_", "PMI_", "MPI_")) or name in (
            "RANK",
            "WORLD_SIZE",
            "LOCAL_RANK",
            "MASTER_ADDR",
        ):
            monkeypatch.delenv(name)
    monkeypatch.setattr(ranks, "schedule_as_batch", lambda: None)  # not the tests' own process
    return monkeypatch


def test_alone(clean):
    assert ranks.found() is None
    with ranks.join() as mine:
        assert (mine.rank, mine.world, mine.first) == (0, 1, True)


def test_torchrun(clean):
    for name, value in {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}.items():
        clean.setenv(name, value)
    assert ranks.found() == (5, 8, 1, 4)


def test_slurm(clean):
    values = {"PROCID": "5", "NTASKS": "8", "LOCALID": "1", "STEP_ID": "0", "STEP_TASKS_PER_NODE": "4(x2)"}
    for name, value in values.items():
        clean.setenv(f"SLURM_{name}", value)
    assert ranks.found() == (5, 8, 1, 4)
    clean.setenv("SLURM_NTASKS", "1")
    assert ranks.found() is None, "an interactive shell of one task is no launcher"


@pytest.mark.parametrize("by", launchers.LAUNCHERS, ids=lambda by: by.name)
def test_every_launcher_by_its_variables(clean, by):
    """Also inside a job step of Slurm, whose tasks are mpirun's daemons then."""
    if by is not launchers.SLURM:
        for name, value in {"PROCID": "0", "NTASKS": "2", "STEP_ID": "0", "LOCALID": "0"}.items():
            clean.setenv(f"SLURM_{name}", value)
    values = {by.step: "0", by.rank: "5", by.world: "8", by.local_rank: "1", by.local_world[0]: "4"}
    for name, value in values.items():
        if name:
            clean.setenv(name, value)
    assert (ranks.found(), launchers.launcher()) == ((5, 8, 1, 4), by)


def test_mpirun_meets_on_loopback_at_its_own_port(clean):
    """All ranks of a host derive the port from the process of mpirun, which is above them, but no rank."""
    mpi = launchers.MPI[0]
    show = "from fivefold.launch.launchers import master; print(*master())"
    shells = []
    for rank in "01":
        own = {mpi.rank: rank, mpi.world: "2", mpi.local_rank: rank, mpi.local_world[0]: "2"}
        words = ["sh", "-c", f"'{sys.executable}' -c '{show}'; true"]
        shells.append(subprocess.run(words, env=os.environ | own, capture_output=True, text=True, check=True))
    port = 20000 + os.getpid() % 20000 if sys.platform == "linux" else 20000
    assert [shell.stdout for shell in shells] == [f"127.0.0.1 {port}\n"] * 2
    for name, value in (own | {mpi.world: "4"}).items():
        clean.setenv(name, value)
    with pytest.raises(UserError, match=r"several hosts need MASTER_ADDR.* -x MASTER_ADDR=HOST"):
        launchers.master()
    clean.setenv("MASTER_ADDR", "node0")
    assert launchers.master() == ("node0", 29500)


def test_variables_of_a_launcher_that_make_no_sense(clean):
    clean.setenv("RANK", "one")
    clean.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="RANK = 'one' must be a number"):
        ranks.found()
    clean.delenv("RANK")
    for name, value in {"PROCID": "0", "NTASKS": "2", "STEP_ID": "0"}.items():
        clean.setenv(f"SLURM_{name}", value)
    with pytest.raises(UserError, match="SLURM_LOCALID = '' must be a number"):
        ranks.found()


def test_first_host_of_a_slurm_job(clean, tmp_path):
    clean.setenv("SLURM_JOB_NODELIST", "n[3-4]")
    clean.setenv("SLURM_JOB_ID", "20007")
    clean.setenv("PATH", str(tmp_path))
    with pytest.raises(
        UserError, match=r"scontrol show hostnames n\[3-4\]` does not name .*: set MASTER_ADDR"
    ):
        launchers.master()
    scontrol = tmp_path / "scontrol"
    scontrol.write_text("#!/bin/sh\necho n3; echo n4\n")
    scontrol.chmod(0o755)
    assert launchers.master() == ("n3", 20007)
    scontrol.write_text("#!/bin/sh\necho invalid node name >&2; exit 1\n")
    with pytest.raises(UserError, match=r"first host \(invalid node name\)"):
        launchers.master()


def test_threads_of_a_rank(clean):
    clean.setattr(ranks, "cores", lambda: 8)
    for said, threads in (("3", 3), ("", 4), ("0", 4), ("2,1", 4)):
        clean.setenv("OMP_NUM_THREADS", said)
        assert ranks.threads_of(2) == threads, said


def test_groups_are_freed_once_at_the_end(clean, tmp_path):
    """However often a process joins."""
    registered, batch = [], []
    clean.setattr(ranks, "schedule_as_batch", lambda: batch.append(True))
    clean.setattr(ranks.atexit, "register", registered.append)
    clean.setattr(ranks.atexit, "unregister", lambda hook: hook in registered and registered.remove(hook))
    clean.setattr(ranks.dist, "init_process_group", lambda *a, **k: None)
    clean.setattr(ranks, "connect", lambda group, device: None)
    clean.setattr(ranks.dist, "destroy_process_group", lambda: None)
    clean.setattr(ranks.torch, "set_num_threads", lambda count: None)
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", ranks.STORE_FILE: str(tmp_path / "store")}.items():
        clean.setenv(name, value)
    for _ in range(3):
        with ranks.join():
            pass
    assert registered == [ranks._free_groups]
    assert len(batch) == 3


def policy(rank: int, world: int) -> int:
    ranks.schedule_as_batch()
    return os.sched_getscheduler(0)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="scheduling policies are Linux's")
def test_ranks_do_not_interrupt_each_other():
    assert run_ranks(2, policy) == [os.SCHED_BATCH] * 2


def launched_on_two_hosts(clean) -> None:
    """The variables of torchrun for the first of two ranks on two hosts."""
    values = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    for name, value in values.items():
        clean.setenv(name, value)
    clean.setattr(ranks.torch, "set_num_threads", lambda count: None)
    clean.setattr(launchers, "addresses", lambda: {"eth0": "10.0.0.5", "ib0": "10.1.0.5"})


def test_a_host_whose_name_is_loopback_is_refused(clean):
    """As on Debian, where the host's name is 127.0.1.1: no other host could reach it. Ranks that are all on this
    machine can, and those that are told to listen there."""
    clean.setattr(launchers, "own_address", lambda host: "127.0.1.1")
    clean.setattr(launchers, "addresses", lambda: {"eth0": "10.0.0.5", "ib0": "10.1.0.5"})
    clean.delenv("GLOO_SOCKET_IFNAME", raising=False)
    own = socket.gethostname()
    with pytest.raises(UserError, match=r"from 127.0.1.1.* Set GLOO_SOCKET_IFNAME .*: eth0, ib0\)"):
        launchers.name_interface("gloo", own)
    with pytest.raises(UserError, match=r"127.0.1.1 stands for the loopback interface"):
        launchers.listening("127.0.1.1", 0)
    launchers.name_interface("gloo", own, one_machine=True)
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
    assert launchers.reachable(own, "gloo") == own
    clean.delenv("GLOO_SOCKET_IFNAME")
    launchers.name_interface("gloo", "localhost")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"


def test_a_host_whose_own_name_is_loopback_is_called_by_its_interface(clean):
    """As on Debian, where a host's own name is 127.0.1.1 on itself. Other hosts' names stay."""
    there = {"eth0": "10.0.0.5", "ib0": "10.1.0.5"}
    clean.setattr(launchers.socket, "gethostname", lambda: "node0.cluster")
    clean.setattr(launchers, "own_address", lambda host: "127.0.0.1" if "node0" in host else "10.0.0.5")
    clean.setattr(launchers, "addresses", lambda: there)
    clean.delenv("GLOO_SOCKET_IFNAME", raising=False)
    with pytest.raises(UserError, match=r"node0 .*, and several other interfaces .* Set GLOO_SOCKET_IFNAME"):
        launchers.reachable("node0", "gloo")
    for value, address in {
        "ib0": "10.1.0.5",
        "eth": "10.0.0.5",
        "=eth0": "10.0.0.5",
        "^ib": "10.0.0.5",
    }.items():
        clean.setenv("NCCL_SOCKET_IFNAME", value)
        assert launchers.reachable("node0", "nccl") == address
    del there["ib0"]
    assert launchers.reachable("node0", "gloo") == "10.0.0.5"
    assert launchers.reachable("node1", "gloo") == "node1"


MEETS = """
import torch, torch.distributed
from fivefold.launch import ranks
with ranks.join(meet_s=60) as own:
    torch.distributed.all_reduce(found := torch.ones(1))
    print("sum", int(found.item()))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("host", "agents"),
    [("localhost", 2), *slow(("127.0.0.1", 3), (socket.gethostname(), 2), ("localhost", 3))],
)
def test_agents_of_torchrun_meet_on_one_machine(tmp_path, host, agents):
    program, environment = (
        tmp_path / "meets.py",
        {k: v for k, v in os.environ.items() if "SOCKET_IFNAME" not in k},
    )
    program.write_text(MEETS)
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nnodes",
        f"{agents}",
        "--nproc-per-node",
        "1",
    ]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{host}:{port}", str(program)]
    started = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(agents)
    ]
    said = [process.communicate(timeout=120)[0] for process in started]
    assert [process.returncode for process in started] == [0] * agents
    assert said == [f"sum {agents}\n"] * agents


def test_a_rank_that_waits_to_meet_leaves_on_a_signal(tmp_path, clean):
    """The others may never come: it would outlive its agent, for launch.meet = 600 s."""
    store = torch.distributed.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 200)
    sets = [f"--set={o}" for o in (*TINY, f"data.source={tmp_path}/text.txt", f"data.cache={tmp_path}")]
    run = command(
        tmp_path / "log", "train", "quickstart", *sets, "--layout=dp=2", f"--out={tmp_path / 'run'}",
        RANK="1", WORLD_SIZE="2", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1",
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(store.port), TORCHELASTIC_USE_AGENT_STORE="True",
    )  # fmt: skip
    run.until(lambda: store.check(["fivefold/hello/1"]))
    run.send(signal.SIGTERM)
    assert run.wait(20) == 75, run.said
    assert "before training; nothing is lost" in run.said


def test_signals_come_while_nobody_listens():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    with pytest.raises(RuntimeError, match=r"nobody listens at 127\.0\.0\.1, port"):
        launchers.wait_for("127.0.0.1", port, 0.1)
    before = signal.signal(signal.SIGALRM, lambda *_: sys.exit(75))
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        with pytest.raises(SystemExit):
            launchers.wait_for("127.0.0.1", port, 60)
    finally:
        signal.signal(signal.SIGALRM, before)


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_a_store_listens_at_one_address_only(clean):
    """PyTorch's own listens on every interface."""
    before = listening({os.getpid()})
    descriptor = launchers.listening("127.0.0.1", 0, alone=True)
    with socket.socket(fileno=os.dup(descriptor)) as copy:
        port = copy.getsockname()[1]
    values = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": "0", "WORLD_SIZE": "1"}
    for name, value in values.items():
        clean.setenv(name, value)
    os.close(descriptor)
    store = ranks._store(0, 1, 10)
    store.set("key", "value")
    found = listening({os.getpid()}) - before
    assert found == {"0100007F"}, found


@pytest.mark.skipif(sys.platform != "linux", reason="all of 127.0.0.0/8 is there")
def test_a_name_that_stands_for_another_loopback_address():
    """As on Debian: who connects to the name must find the store."""
    descriptor = launchers.listening("127.0.1.1", 0, alone=True)
    with socket.socket(fileno=descriptor) as found, socket.socket() as client:
        client.connect(("127.0.1.1", found.getsockname()[1]))


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_the_interface_towards_another_host(clean):
    assert launchers.interface_of("127.0.0.1") == ""
    try:
        address = launchers.own_address("192.0.2.1")  # nothing is sent
    except UserError:
        pytest.skip("no way to other hosts")
    name = launchers.interface_of(address)
    assert name in [name for _, name in socket.if_nameindex()]
    clean.setenv("NCCL_SOCKET_IFNAME", "")
    launchers.name_interface("nccl", "192.0.2.1")
    assert os.environ["NCCL_SOCKET_IFNAME"] == f"={name}"


def test_a_backend_s_error_is_one_short_line():
    """Without its source file, its advice and its emoji."""
    text = (
        "[/__w/pytorch/gloo/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:64146. This is typically "
        "caused by a remote worker crashing. Check the logs of the remote worker before reporting an error. GLHF!\nx"
    )
    assert verdict.backend_words(RuntimeError(text)) == "Connection closed by peer [127.0.0.1]:64146"
    assert verdict.lost(RuntimeError(text))
    assert verdict.backend_words(RuntimeError("")) == "RuntimeError('')"


def test_ranks_that_cannot_be_reached_are_one_message(clean, tmp_path):
    launched_on_two_hosts(clean)
    clean.setenv("GLOO_SOCKET_IFNAME", "lo")
    clean.setenv(ranks.STORE_FILE, str(tmp_path / "store"))

    def lost(*_: Any, **__: Any) -> None:
        raise RuntimeError("[/gloo/transport/tcp/pair.cc:1] no way")

    clean.setattr(ranks.dist, "init_process_group", lost)
    with pytest.raises(UserError, match=r"rank 0 cannot reach .*no way.*: eth0, ib0\)"), ranks.join():
        pass


@pytest.mark.skipif(sys.platform != "linux", reason="names of interfaces")
@pytest.mark.parametrize(
    ("backend", "setting", "missing"),
    [
        ("gloo", "nope0", "nope0"),
        ("gloo", "lo,nope0", "nope0"),
        ("gloo", "et", "et"),  # no beginning of a name
        ("gloo", "bare0", "bare0"),  # an interface without an address
        ("gloo", "lo", ""),
        ("gloo", "eth0,lo", ""),
        ("gloo", "", ""),
        ("nccl", "nope0", "nope0"),
        ("nccl", "=et", "et"),
        ("nccl", "et", ""),
        ("nccl", "=eth0", ""),
        ("nccl", "nope0,ib", ""),  # one of them is enough
        ("nccl", "^lo", ""),
        ("nccl", "^lo,eth,ib", "^lo,eth,ib"),
    ],
)
def test_an_interface_that_is_not_there(clean, backend, setting, missing):
    """A user's error, before the backend fails."""
    clean.setattr(launchers, "addresses", lambda: {"eth0": "10.0.0.5", "ib0": "10.1.0.5"})
    clean.setattr(launchers, "Path", lambda _: SimpleNamespace(read_text=lambda: ""))
    clean.setenv(f"{backend.upper()}_SOCKET_IFNAME", setting)
    if not missing:
        launchers.require_interface(backend)
        return
    with pytest.raises(UserError) as caught:
        launchers.require_interface(backend)
    name = f"{backend.upper()}_SOCKET_IFNAME = {setting!r}"
    assert f"{name}: this machine has no network interface {missing} with an address. Set" in str(
        caught.value
    )


def test_a_wrong_interface_is_said_once(tmp_path):
    """The ranks are not started again."""
    log, text = tmp_path / "log", tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 200)
    sets = [f"--set={o}" for o in (*TINY, f"data.source={text}", f"data.cache={tmp_path / 'cache'}")]
    words = "train", "quickstart", *sets, "--nproc=2", f"--out={tmp_path / 'run'}"
    run = command(log, *words, GLOO_SOCKET_IFNAME="nope0")
    assert run.wait(60) == 2
    said = log.read_text()
    assert said.count("nope0 with an address") == 1, said
    assert "again" not in said, said


LEFT = {  # variables that some launcher has left, and what is said
    "RANK=5 WORLD_SIZE=2": "RANK = 5 and WORLD_SIZE = 2: ranks are 0 to 1",
    "RANK=0 WORLD_SIZE=0": "WORLD_SIZE = '0' must be a number from 1 on",
    "RANK=-1 WORLD_SIZE=1": "RANK = '-1' must be a number",
    "RANK=0 WORLD_SIZE=2 LOCAL_WORLD_SIZE=0": "LOCAL_WORLD_SIZE = '0' must be a number from 1 on",
    "RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=99999": "MASTER_PORT = '99999' must be a number from 0 to",
    "OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=2": "OMPI_COMM_WORLD_SIZE = 2: ranks are 0 to 1",
    "OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=1": "OMPI_COMM_WORLD_LOCAL_RANK = '' must be a number",
    "PMI_RANK=2 PMI_SIZE=2 PMI_LOCAL_SIZE=1": "PMI_SIZE = 2: ranks are 0 to 1",
    "SLURM_PROCID=7 SLURM_NTASKS=2 SLURM_STEP_ID=0": "SLURM_NTASKS = 2: ranks are 0 to 1",
}


@pytest.mark.parametrize("left", LEFT)
def test_variables_that_a_launcher_has_left(clean, left):
    clean.delenv("LOCAL_WORLD_SIZE", raising=False)
    for setting in left.split():
        clean.setenv(*setting.split("="))
    with pytest.raises(UserError) as caught:
        ranks.found() and launchers.master()
    assert LEFT[left] in str(caught.value)
    assert "Unset them if no launcher has started this process" in str(caught.value)


# The layout for the ranks that there are

SMALL = ["train.global_batch_size=16", "train.microbatch_size=4", "model.heads=4", "model.kv_heads=4"]


@pytest.fixture
def machine(monkeypatch):
    """Sets how many cores and GPUs this machine seems to have."""

    def has(cores: int = 2, gpus: int = 0) -> None:
        monkeypatch.setattr(start, "cores", lambda: cores)
        monkeypatch.setattr(start.torch.cuda, "is_available", lambda: gpus > 0)
        monkeypatch.setattr(start.torch.cuda, "device_count", lambda: gpus)
        monkeypatch.setattr(start.torch.cuda, "get_device_name", lambda index=0: "NVIDIA H100 80GB HBM3")

    return has


def fit(layout: str, nproc: int | None = None, launched: int | None = None) -> Recipe:
    return start._fit_layout(load("quickstart", SMALL, layout), nproc, launched)


def text_of(recipe: Recipe) -> str:
    return to_text(Layout.from_recipe(recipe.layout))


@pytest.mark.parametrize(
    ("layout", "nproc", "launched", "fitted"),
    [
        ("dp=2", None, None, "dp=2"),
        ("dp=2", 4, None, "dp=4"),
        ("dp=4", 1, None, "dp=1"),
        ("dp=2", None, 4, "dp=4"),
        ("dp=2,zero=2", 4, None, "dp=4,zero=2"),
        ("dp_replicate=2,dp_shard=2,zero=3", 8, None, "dp_replicate=4,dp_shard=2,zero=3"),
        ("dp=2,tp=2", 8, None, "dp=4,tp=2"),
        ("dp=2,pp=2", 2, None, "pp=2"),
        ("cp=2,zero=1", 4, None, "dp=2,cp=2,zero=1"),
        ("dp=2", None, 1, "dp=1"),
        ("dp=2", None, 2, "dp=2"),
        ("dp=2,zero=3", None, 1, "zero=3"),
        ("dp=2,pp=2", None, 2, "pp=2"),
        ("dp=2,tp=2", None, 8, "dp=4,tp=2"),
        ("cp=2,zero=1", None, 4, "dp=2,cp=2,zero=1"),
    ],
)
def test_data_parallel_ranks_are_added_or_left_out(machine, capsys, layout, nproc, launched, fitted):
    machine()
    assert text_of(fit(layout, nproc, launched)) == fitted
    asked = to_text(Layout.from_recipe(load("quickstart", SMALL, layout).layout))
    changed = f"layout {asked} on the launcher's {launched} rank{'s' * (launched != 1)}: {fitted}\n"
    assert capsys.readouterr().err == (changed if launched and layout != fitted else "")


@pytest.mark.parametrize(
    ("layout", "nproc", "says"),
    [
        ("tp=2", 3, "tp 2 = 2, but there are 3 ranks"),
        ("tp=2", 1, "tp 2 = 2, but there are 1 rank"),
        ("dp=2,tp=2", 3, "tp 2 = 4, but there are 3 ranks"),
        (
            "dp=2,tp=2,zero=1",
            2,
            "zero=1 shards states between ranks: it needs dp_shard > 1 .*Nearest valid: tp=2",
        ),
        ("dp=2", 17, "at least one"),
    ],
)
def test_ranks_that_a_layout_cannot_fill_are_refused(machine, layout, nproc, says):
    machine()
    with pytest.raises(UserError, match=says):
        fit(layout, nproc)


def test_one_core_runs_replicas_in_one_process(machine, capsys):
    """They would only wait for each other. What divides the model stays."""
    machine(cores=1)
    for layout in ("dp=4", "dp=4,zero=1"):
        assert fit(layout).layout.dp_replicate * fit(layout).layout.dp_shard == 1
        assert "needs 4 devices; running on one" in capsys.readouterr().err
    for layout in ("tp=2", "dp=2,tp=2"):
        assert text_of(fit(layout)) == layout
        assert not capsys.readouterr().err


def test_a_microbatch_that_no_longer_fits_is_chosen_anew(machine):
    """16 rows over 8 ranks are 2 each: 4 at a time do not fit; over 2 ranks they do. Over 3 ranks, 4 at a time would
    give one of them 8 rows, and 2 at a time 6."""
    machine()
    for nproc, rows in ((8, 2), (2, 4), (3, 2)):
        assert fit("dp=4", nproc).train.microbatch_size == rows


def test_fewer_gpus_than_ranks_are_refused(machine):
    machine(gpus=2)
    with pytest.raises(UserError, match=r"needs 4 GPUs, but this machine has 2. Use --layout dp=2"):
        fit("dp=4")
    machine(gpus=1)
    with pytest.raises(
        UserError, match=r"2 ranks on this machine need 2 GPUs, but it has 1.*CUDA_VISIBLE_DEVICES="
    ):
        local.start_ranks(print, 2, fork=True)


@pytest.mark.parametrize(("layout", "rows"), [("dp=4", None), ("dp=2", 8), (None, 8)])
def test_resuming_on_more_ranks_forgets_the_saved_microbatch(tmp_path, monkeypatch, layout, rows):
    """A run's recipe says microbatches of 8 rows: where a rank's share is 4, they are chosen anew; else they stay."""
    recipe = resolve(
        load("quickstart", ["train.global_batch_size=16", "train.microbatch_size=8"], "dp=1"), vocab_size=300
    )
    (tmp_path / "recipe.toml").write_text(to_toml(recipe))
    asked = []
    monkeypatch.setattr(start, "run_command", lambda recipe, *_, **__: asked.append(recipe))
    train(str(tmp_path), layout=layout, resume=True)
    assert asked[0].train.microbatch_size == rows
    assert asked[0].train.global_batch_size == 16


def listening(pids: set[int]) -> set[str]:
    """Addresses (hex, as the kernel prints them) on which processes listen for TCP connections."""
    inodes = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").glob("*"):
            try:
                target = os.readlink(link)
            except OSError:
                continue
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                found.add(fields[1].split(":")[0])
    return found


def family(pid: int) -> set[int]:
    """A process and all its descendants."""
    found, new = {pid}, [pid]
    while new:
        children = Path(f"/proc/{new.pop()}/task")
        for task in children.glob("*/children"):
            for child in map(int, task.read_text().split()):
                if child not in found:
                    found.add(child)
                    new.append(child)
    return found


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="needs Linux's /proc")
def test_local_runs_listen_on_loopback_only_and_leave_no_process(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 200)
    sets = [
        f"--set={o}"
        for o in (*TINY, "train.steps=100000", f"data.source={text}", f"data.cache={tmp_path / 'cache'}")
    ]
    out = tmp_path / "run"
    run = command(tmp_path / "log", "train", "quickstart", *sets, "--nproc=2", f"--out={out}")
    run.until(lambda: (out / "metrics.jsonl").exists() and (out / "metrics.jsonl").stat().st_size >= 1000)
    everyone = family(run.pid)
    addresses = listening(everyone)
    run.send(signal.SIGTERM)
    code = run.wait(60)
    assert len(everyone) >= 3, "the command and two ranks"
    assert addresses, "gloo's ranks listen somewhere"
    assert addresses <= {"0100007F", "0" * 24 + "01000000"}, addresses  # 127.0.0.1 and ::1
    assert code == 75, "stopped by SIGTERM, after saving"
    assert list((out / "checkpoints").glob("step-*/manifest.json"))
    time.sleep(0.2)
    assert not any(Path(f"/proc/{pid}").exists() for pid in everyone - {run.pid})
