"""Several hosts: torchrun across network namespaces, with slow links between them. Layouts compute what one process
computes, and nothing stays behind."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hosts_rank import STEPS
from layouts import TINY, tiny
from namespaces import PORT, Hosts, Unavailable, bytes_per_second
from pool_runs import lines

from fivefold.checkpoint import store
from fivefold.data import prepare
from fivefold.recipe import resolve
from fivefold.train.verify import compare_with_one_process

TESTS = Path(__file__).parent
GLOO = {"GLOO_SOCKET_IFNAME": "", "OMP_NUM_THREADS": "1"}  # the ranks find eth0
QUICK = [
    "dp=4",
    "dp=4,all_reduce=library",
    "tp=2,dp=2",
]
SLOW = [
    "dp=4,zero=3,zeropp=hier",
    "dp_replicate=2,dp_shard=2,zero=3",
    "pp=2,tp=2,schedule=zbv",
    "dp=4,zero=1",
    "dp=4,zero=2",
    "dp=4,zero=3",
    "dp_replicate=2,dp_shard=2,zero=1",
    "tp=4,sp=true",
    "tp=2,sp=true,dp=2,zero=3",
    "cp=4",
    "cp=2,dp=2",
    "cp=4,cp_method=ulysses",
    "cp=4,cp_method=all_gather",
    "pp=4",
    "pp=2,dp=2",
    "pp=2,dp=2,schedule=interleaved,virtual_stages=2",
    "ep=4,dp=4",
]


def check(hosts: Hosts, folder: Path, layouts: list[str]) -> list[dict]:
    """Trains the layouts on 2 x 2 ranks, and compares each with one process. Returns what the ranks say."""
    env = GLOO | {"PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, str(TESTS / "hosts_rank.py"), str(folder), *layouts]
    done = hosts.run(command, 2, capture=True, timeout_s=200, env=env)
    assert done.code == 0, str(done)
    for number, layout in enumerate(layouts):
        recipe = tiny(folder, layout, steps=STEPS)
        data = prepare(recipe)
        compared = folder / ("moe" if "ep=" in layout else "dense")  # the reference stays for the next layout
        compared.mkdir(exist_ok=True)
        shutil.rmtree(compared / "layout", ignore_errors=True)
        (folder / str(number)).rename(compared / "layout")
        report = compare_with_one_process(resolve(recipe, vocab_size=data.vocab_size), data, STEPS, compared)
        assert report.passed, report
        assert report.gradients.max_rel > 0, "sums in another order differ by rounding"
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(4)]


@pytest.mark.slow
def test_layouts_across_hosts(hosts, tmp_path):
    found = check(hosts, tmp_path, QUICK)
    for rank, said in enumerate(found):
        byte = f"{1 + rank // 2:02X}"
        assert said["listens"] == [f"{byte}004D0A"], "only on the given interface, 10.77.0.1 or .2"
    sent = found[0]["sent"]
    # Groups inside a host send nothing to the other one.
    library = sent["dp=4,all_reduce=library"]
    assert sent["tp=2,dp=2"] < library
    assert sent["dp=4"] < 0.8 * library, "hierarchical"


@pytest.mark.slow
def test_more_layouts_across_hosts(hosts, tmp_path):
    found = check(hosts, tmp_path, SLOW)
    sent = found[0]["sent"]
    assert sent["tp=2,sp=true,dp=2,zero=3"] < sent["tp=4,sp=true"]
    assert sent["dp_replicate=2,dp_shard=2,zero=3"] < sent["dp=4,zero=3"]


def train(folder: Path, *arguments: str) -> list[str]:
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 200)
    sets = [*TINY, f"data.source={folder / 'text.txt'}", f"data.cache={folder / 'cache'}"]
    return [
        *(sys.executable, "-m", "fivefold.cli.main", "train", *arguments),
        *(f"--set={setting}" for setting in (*sets, "observe.tracker=none", "precision.mode=fp32")),
    ]


def stopped(hosts: Hosts, folder: Path, layout: str, ranks: int) -> Path:
    """A run of so many ranks per host whose second host got SIGTERM in its third step or later."""
    run = folder / "run"

    def stop(launchers: list[subprocess.Popen[bytes]]) -> None:
        deadline = time.monotonic() + 90
        while not (run / "metrics.jsonl").exists() or len(lines(run, "step_s")) < 3:
            assert all(launcher.poll() is None for launcher in launchers)
            assert time.monotonic() < deadline
            time.sleep(0.1)
        hosts.signal(launchers[1], signal.SIGTERM)

    command = train(folder, "quickstart", "--set=train.steps=100000", "--layout", layout, "--out", str(run))
    done = hosts.run(command, ranks, capture=True, timeout_s=120, env=GLOO, meanwhile=stop)
    assert done.code, str(done)
    assert "--resume" in done.out[0] + done.err[0]
    return run


@pytest.mark.slow
def test_train_stops_on_all_hosts_at_one_step(hosts, tmp_path):
    """After a signal on one of them. What is saved is whole."""
    run = stopped(hosts, tmp_path, "dp=2,zero=2", 1)
    saved = store.Reader(next((run / "checkpoints").glob("step-*")))
    assert saved.meta["step"] == lines(run, "step")[-1]
    assert all(saved.read("model", name).isfinite().all() for name in saved.names("model"))


@pytest.mark.slow
def test_resume_across_hosts_and_on_one(hosts, tmp_path):
    """Two hosts, of which each checks the files for itself, go on as one process does."""
    run = stopped(hosts, tmp_path, "pp=2,dp=2", 2)
    steps = lines(run, "step")[-1] + 3
    shutil.copytree(run, tmp_path / "alone")
    more = f"--set=train.steps={steps}"
    done = hosts.run(train(tmp_path, str(run), "--resume", more), 2, capture=True, timeout_s=120, env=GLOO)
    assert done.code == 0, str(done)
    alone = train(tmp_path, str(tmp_path / "alone"), "--resume", more, "--layout", "dp=1")
    subprocess.run(alone, check=True, capture_output=True, timeout=120)
    across, one = (lines(folder, "loss") for folder in (run, tmp_path / "alone"))
    assert len(across) == len(one) == steps
    assert across == pytest.approx(one, rel=1e-5)


@pytest.mark.slow
def test_a_host_joins(hosts, tmp_path):
    """torchrun with one to two hosts (docs/reliability.md): one rank trains alone, a second host comes, and both go on
    after the last checkpoint, with the losses of one process."""
    run, steps = tmp_path / "run", 400
    sets = ("checkpoint.every=50", "optim.lr=1e-5", "optim.eps=1e-4", f"train.steps={steps}")

    def command(layout: str, out: Path) -> list[str]:
        found = train(tmp_path, "quickstart", f"--layout={layout}", f"--out={out}")
        return [*found, *(f"--set={one}" for one in sets)]

    agent = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=9",
        "--rdzv-backend=c10d", f"--rdzv-endpoint={hosts.address(0)}:{PORT + 1}", "--rdzv-id=joins",
        "--rdzv-conf=last_call_timeout=2", "--no-python", *command("dp=2", run), "--resume-from=auto",
    ]  # fmt: skip
    env = {**os.environ, **GLOO, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    agents, said = [], [tmp_path / "host0", tmp_path / "host1"]

    def texts() -> str:
        return "\n".join(file.read_text(errors="replace") for file in said if file.exists())

    try:
        for host, log in enumerate(said):
            with log.open("wb") as file:
                agents.append(hosts.start(host, agent, env=env, stdout=file, stderr=file))
            deadline = time.monotonic() + 90
            while not host and not store.checkpoints(run):
                assert agents[0].poll() is None, texts()
                assert time.monotonic() < deadline, texts()
                time.sleep(0.05)
        assert [agent.wait(150) for agent in agents] == [0, 0], texts()
    finally:
        for process in agents:
            if process.poll() is None:
                hosts.signal(process, signal.SIGKILL)
                process.wait()
    first = said[0].read_text()
    assert "1 rank instead of 2: layout dp=1 for dp=2" in first
    alone, joined = first.index("; 1 rank on CPU"), first.index("; 2 ranks on CPU")
    assert alone < first.index("resuming after step", joined)
    subprocess.run(command("dp=1", tmp_path / "one"), check=True, capture_output=True, timeout=120)
    across, one = lines(run, "loss"), lines(tmp_path / "one", "loss")
    assert len(across) == steps
    assert across == pytest.approx(one, rel=1e-5)


@pytest.mark.slow
def test_a_host_that_is_gone_ends_the_run(tmp_path):
    """With one message of a rank of the other host."""
    try:
        with Hosts(2) as hosts:
            run = tmp_path / "run"

            def kill(launchers: list[subprocess.Popen[bytes]]) -> None:
                while not (run / "metrics.jsonl").exists():
                    assert all(launcher.poll() is None for launcher in launchers)
                    time.sleep(0.1)
                hosts.kill(1)

            command = train(
                tmp_path, "quickstart", "--set=train.steps=100000", "--layout=dp=4", f"--out={run}"
            )
            done = hosts.run(command, 2, capture=True, timeout_s=120, env=GLOO, meanwhile=kill)
    except Unavailable as reason:
        pytest.skip(str(reason))
    assert done.code not in (0, 124), str(done)
    assert "one of these ranks has ended, or cannot be reached" in done.err[0]
    assert "Traceback" not in done.err[0].split("torch/distributed/elastic")[0], (
        "nothing before torchrun's own"
    )


# What stays behind: nothing. And where there are no namespaces, the reason is given.

MAKER = """
import os, sys, time
sys.path.insert(0, sys.argv[1])
from namespaces import Hosts
with Hosts(2) as hosts:
    for host in range(2):
        hosts.start(host, ["sh", "-c", "sleep 1000 & sleep 1000"])
    time.sleep(0.2)
    print(*(os.readlink(f"/proc/{{pid}}/ns/net") for pid in hosts._pids), flush=True)
    {}
"""


def networks() -> set[str]:
    """The networks that there are on this machine, each with a process in it."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            found.add(os.readlink(process / "ns/net"))
        except OSError:
            continue
    return found


@pytest.mark.parametrize(
    ("end", "number"),
    [("raise KeyError", 0), ("time.sleep(1000)", signal.SIGKILL), ("time.sleep(1000)", signal.SIGTERM)],
)
def test_nothing_is_left(hosts, end, number):
    command = [sys.executable, "-c", MAKER.format(end), str(TESTS)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as maker:
        assert maker.stdout
        made = set(maker.stdout.readline().decode().split())
        assert len(made) == 3, "of the switch and two hosts"
        if number:
            assert made <= networks()
            maker.send_signal(number)
        maker.wait(20)
    deadline = time.monotonic() + 20
    while left := made & networks():
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


def test_links_have_the_rate(hosts):
    shown = hosts.start(0, ["tc", "qdisc", "show", "dev", "eth0"], stdout=subprocess.PIPE)
    assert "tbf" in (said := shown.communicate()[0].decode())
    assert "rate 200Mbit" in said


@pytest.mark.parametrize(("rate", "found"), [("200mbit", 25e6), ("1.5gbit", 187.5e6), ("8bit", 1)])
def test_rates(rate, found):
    assert bytes_per_second(rate) == found


@pytest.mark.parametrize("rate", ["fast", "0mbit", "200", "-1mbit", "200mbps"])
def test_rates_that_are_none(rate):
    with pytest.raises(ValueError, match="must be a number with kbit, mbit or gbit"):
        Hosts(2, rate)


@pytest.mark.skipif(sys.platform != "linux", reason="the first reason elsewhere is another one")
def test_refused(tmp_path, monkeypatch):
    """Without the programs, and without permission: the benchmark says so and skips."""
    benchmark = [sys.executable, str(TESTS.parent / "benchmarks" / "hosts.py"), "--", "true"]
    env = {**os.environ, "PATH": str(tmp_path)}
    done = subprocess.run(benchmark, env=env, capture_output=True, text=True)
    assert done.returncode == 0
    assert "skipped: hosts need the program unshare" in done.stderr
    program = tmp_path / "unshare"
    program.write_text("#!/bin/sh\necho 'unshare: unshare failed: Operation not permitted' >&2\nexit 1\n")
    program.chmod(0o755)
    done = subprocess.run(benchmark, env=env, capture_output=True, text=True)
    assert done.returncode == 0
    assert "skipped: Linux namespaces are not permitted here: unshare: unshare failed" in done.stderr
