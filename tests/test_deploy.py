"""The files of deploy/: syntax, what they make of exit codes, and that they fit each other and the launcher.

Stand-ins take the place of the clusters' programs. `test_clusters.py` runs the scripts with the real ones.
"""

import os
import re
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from commands import REPO

from fivefold.launch.launchers import LAUNCHERS
from fivefold.launch.verdict import STOPPED, USER
from fivefold.recipe import load

DEPLOY = REPO / "deploy"
YAML = ("kubernetes", "pytorchjob", "jobset", "trainjob")


@pytest.fixture
def bin_(tmp_path: Path) -> Path:
    """A folder of stand-ins: `fivefold` ends with $CODE; `srun`, `torchrun` and `mpirun` run the command after their
    options, and end with 1 if it failed, as torchrun does."""
    folder = tmp_path / "bin"
    folder.mkdir()
    launcher = (
        "#!/bin/bash\n[[ $1 == --version ]] && exit\n"
        'while [[ $1 != */rank.sh ]]; do shift; done\n"$@" || exit 1\n'
    )
    programs = {
        "fivefold": f'#!/bin/bash\necho "$@" >> {tmp_path}/said\nexit $CODE\n',
        "srun": launcher,
        "torchrun": launcher,
        "mpirun": launcher,
        "scontrol": f'#!/bin/bash\necho "$@" > {tmp_path}/requeued\n',
    }
    for name, text in programs.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return folder


STARTED: list[subprocess.Popen[bytes]] = []
"""Shells of a test, each the leader of a group of processes."""


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    """Also if a test waits in vain."""
    yield
    for shell in STARTED:
        if shell.poll() is None:
            os.killpg(shell.pid, signal.SIGKILL)
            shell.wait()
    STARTED.clear()


def start(script: str, bin_: Path, code: int, *more: str, **environment: str) -> subprocess.Popen[bytes]:
    env = os.environ | {
        "PATH": f"{bin_}:{os.environ['PATH']}", "CODE": str(code), "SLURM_JOB_ID": "7", "FIVEFOLD_DEPLOY": str(DEPLOY),
    } | environment  # fmt: skip
    words = ["bash", str(DEPLOY / script), "quickstart", str(bin_.parent / "run"), *more]
    STARTED.append(subprocess.Popen(words, env=env, start_new_session=True))
    return STARTED[-1]


def run(script: str, bin_: Path, code: int, *more: str, **environment: str) -> int:
    return start(script, bin_, code, *more, **environment).wait(60)


@pytest.mark.parametrize(
    ("code", "slurm", "others", "before"),
    [
        (0, 0, 0, 0),
        (75, 75, 75, 99),
        (1, 75, 1, 0),
        (143, 75, 1, 0),
        (74, 75, 1, 0),
        (1, 1, 1, 10),
        (2, 2, 2, 0),
    ],
)
def test_a_saved_stop_is_requeued_and_a_failure_some_times(
    bin_: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    code: int,
    slurm: int,
    others: int,
    before: int,
) -> None:
    monkeypatch.setenv("SLURM_RESTART_COUNT", str(before))
    assert run("slurm.sbatch", bin_, code) == slurm
    assert (tmp_path / "requeued").exists() == (slurm == 75)
    assert run("torchrun.sh", bin_, code) == others
    assert run("torchrun.sh", bin_, code, RETRY="143") == (143 if code == 75 else others)
    before_mpi = (tmp_path / "said").read_text().count("\n")
    assert run("mpirun.sh", bin_, code, "-n", "2", RESTARTS="2") == others
    lines = (tmp_path / "said").read_text().splitlines()
    assert len(lines) - before_mpi == (1 if code in (0, 2, 75) else 3)
    assert set(lines) == {f"train quickstart --out {tmp_path / 'run'} --resume-from auto"}
    assert not [*(tmp_path / "run").iterdir()], "no mark is left"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_reaches_the_rank(tmp_path: Path, number: int) -> None:
    """And its code comes back, though the signal ended the shell's wait."""
    rank = "trap 'sleep 0.2; exit 75' TERM; touch here; while true; do sleep 0.05; done"
    words = [str(DEPLOY / "rank.sh"), "mark", "bash", "-c", rank]
    shell = subprocess.Popen(words, cwd=tmp_path, start_new_session=True)
    STARTED.append(shell)
    while not (tmp_path / "here").exists():
        time.sleep(0.01)
    if number == signal.SIGUSR1:  # Open MPI sends it to the group
        os.killpg(shell.pid, number)
    else:
        shell.send_signal(number)
    assert shell.wait(20) == 75
    assert (tmp_path / "mark").exists()


def test_a_signal_after_which_nothing_is_saved_is_no_failure_to_try_again(bin_: Path, tmp_path: Path) -> None:
    began = tmp_path / "began"
    (bin_ / "mpirun").write_text(
        f"#!/bin/bash\n[[ $1 == --version ]] && exit\necho >> {began}\nexec sleep 60\n"
    )
    shell = start("mpirun.sh", bin_, 0, "-n", "2")
    while not (began.exists() and began.read_text()):  # made, then written
        time.sleep(0.01)
    shell.send_signal(signal.SIGTERM)
    assert shell.wait(20) == 128 + signal.SIGTERM
    assert began.read_text() == "\n", "one start"


# Kubernetes


def documents(name: str) -> list[dict[str, Any]]:
    yaml = pytest.importorskip("yaml", reason="needs PyYAML: make docs installs it")
    return [*yaml.safe_load_all((DEPLOY / f"{name}.yaml").read_text())]


def read(name: str) -> dict[str, Any]:
    return documents(name)[0]


def job(name: str) -> dict[str, Any]:
    """The part with the pods: {"template": {"spec": pod}, ...}."""
    spec = read(name)["spec"]
    return {
        "kubernetes": lambda: spec,
        "pytorchjob": lambda: spec["pytorchReplicaSpecs"]["Worker"],
        "jobset": lambda: spec["replicatedJobs"][0]["template"]["spec"],
        "trainjob": lambda: spec["template"]["spec"]["replicatedJobs"][0]["template"]["spec"],
    }[name]()


def environment(name: str) -> dict[str, str]:
    (container,) = job(name)["template"]["spec"]["containers"]
    return {one["name"]: one["value"] for one in container["env"]}


@pytest.mark.parametrize("name", YAML)
def test_a_pod_runs_what_the_image_has_and_has_time_to_save(name: str) -> None:
    pod = job(name)["template"]["spec"]
    (container,) = pod["containers"]
    assert container["image"] in {f"fivefold:{target}" for target in stages() if target != "base"}
    assert "command" not in container, "it would take the place of the image's entry point"
    program, *arguments = container["args"]
    load(arguments[0])
    if program != "train":
        assert program.startswith("/opt/fivefold/deploy/"), "where the image has them"
        assert os.access(DEPLOY / Path(program).name, os.X_OK)
    out = arguments[-1] if program != "train" else arguments[arguments.index("--out") + 1]
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert out.startswith(mounts["runs"])
    assert mounts["shm"] == "/dev/shm"
    assert mounts.keys() == {volume["name"] for volume in pod["volumes"]}
    safe = pod["securityContext"]
    assert safe["runAsNonRoot"]
    users = {safe["runAsUser"], safe["runAsGroup"], safe["fsGroup"]}
    assert users == {int(re.findall(r"^trainer=(\d+)$", (DEPLOY / "entry.sh").read_text(), re.MULTILINE)[0])}
    assert f"useradd --uid {users.pop()} " in dict(stages()["base"])["RUN"]
    grace = int(environment(name).get("GRACE", 0))
    assert load("quickstart").launch.grace < max(grace, 31) < pod["terminationGracePeriodSeconds"]


@pytest.mark.parametrize("name", ["kubernetes", "jobset", "trainjob"])
def test_the_policy_of_a_job_maps_our_codes(name: str) -> None:
    (container,) = job(name)["template"]["spec"]["containers"]
    rules = [rule for rule in job(name)["podFailurePolicy"]["rules"] if "onExitCodes" in rule]
    assert {rule["action"]: rule["onExitCodes"]["values"] for rule in rules} == {
        "FailJob": [USER],
        "Ignore": [STOPPED],
    }
    assert {rule["onExitCodes"]["containerName"] for rule in rules} == {container["name"]}
    assert job(name)["template"]["spec"]["restartPolicy"] == "Never", "or Kubernetes refuses the policy"


def test_a_jobset_s_ranks_meet_at_its_first_pod() -> None:
    whole, hosts = read("jobset"), environment("jobset")
    (group,) = whole["spec"]["replicatedJobs"]
    first = f"{whole['metadata']['name']}-{group['name']}-0-0.{whole['metadata']['name']}"
    assert hosts["RENDEZVOUS"].split(":")[0] == first
    (container,) = job("jobset")["template"]["spec"]["containers"]
    assert [port["containerPort"] for port in container["ports"]] == [int(hosts["RENDEZVOUS"].split(":")[1])]
    assert int(hosts["HOSTS"]) == job("jobset")["completions"] == job("jobset")["parallelism"]
    assert int(hosts["RANKS"]) == container["resources"]["limits"]["nvidia.com/gpu"]
    assert job("jobset")["completionMode"] == "Indexed", "or its pods have no names"


def test_a_trainjob_has_the_names_that_trainer_looks_for() -> None:
    runtime, started = documents("trainjob")
    (group,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    (container,) = job("trainjob")["template"]["spec"]["containers"]
    assert (group["name"], container["name"]) == ("node", "node")
    steps = group["template"]["metadata"]["labels"]
    assert steps == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    assert started["spec"]["runtimeRef"] == {
        "kind": runtime["kind"],
        "name": runtime["metadata"]["name"],
    }
    trainer = started["spec"]["trainer"]
    assert trainer["numNodes"] == runtime["spec"]["mlPolicy"]["numNodes"]
    assert trainer["numProcPerNode"] == trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"]


@pytest.mark.parametrize("name", YAML)
def test_kubernetes_knows_every_field(name: str) -> None:
    """By its own schema, strictly: jobs as such, and the pods of those that operators start."""
    validate = pytest.importorskip(
        "kubernetes_validate", reason="needs kubernetes-validate of PyPI (100 MB)"
    ).validate
    spec = job(name)
    if name == "kubernetes":
        whole = read(name)
    elif name == "pytorchjob":
        whole = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, **spec["template"]}
    else:
        whole = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, "spec": spec}
    validate(whole, "1.31", strict=True)


@pytest.mark.parametrize("name", ["jobset", "trainjob"])
def test_trainer_and_jobset_know_every_field(name: str) -> None:
    """By Kubeflow's own models. They leave out what they do not know, so what comes back is compared."""
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="needs kubeflow-trainer-api of PyPI")
    for one in documents(name):
        prefix = "JobsetV1alpha2" if name == "jobset" else "TrainerV1alpha1"
        assert getattr(models, prefix + one["kind"]).from_dict(one).to_dict() == one


def test_a_pytorchjob_retries_our_code() -> None:
    """The operator retries codes from 128 on, and needs the name of the container."""
    spec = read("pytorchjob")["spec"]
    (container,) = job("pytorchjob")["template"]["spec"]["containers"]
    assert container["name"] == "pytorch"
    assert job("pytorchjob")["restartPolicy"] == "ExitCode"
    assert int(environment("pytorchjob")["RETRY"]) >= 128
    elastic, hosts = spec["elasticPolicy"], job("pytorchjob")["replicas"]
    assert elastic["minReplicas"] == elastic["maxReplicas"] == hosts
    assert elastic["nProcPerNode"] == container["resources"]["limits"]["nvidia.com/gpu"]


@pytest.mark.parametrize(
    "variables",
    [
        {"HOSTS": "2", "RANKS": "4", "RENDEZVOUS": "node0:1234"},
        {
            "PET_NNODES": "2:2",
            "PET_NPROC_PER_NODE": "4",
            "PET_RDZV_ENDPOINT": "node0:1234",
            "PET_MAX_RESTARTS": "3",
        },
        {
            "PET_NNODES": "2",
            "PET_NPROC_PER_NODE": "4",
            "PET_NODE_RANK": "1",
            "PET_MASTER_ADDR": "node0",
            "PET_MASTER_PORT": "1234",
        },
    ],
    ids=["ours", "operator", "trainer"],
)
def test_torchrun_gets_what_the_pods_say(bin_: Path, variables: dict[str, str]) -> None:
    """By torchrun's own parser."""
    said = bin_.parent / "words"
    (bin_ / "torchrun").write_text(f'#!/bin/bash\nprintf "%s\\0" "$@" > {said}\n')
    assert run("torchrun.sh", bin_, 0, **variables, GRACE="50") == 0
    from torch.distributed.run import get_args_parser

    found = get_args_parser().parse_args(said.read_text().split("\0")[:-1])
    assert (found.nnodes.split(":")[0], found.nproc_per_node, found.rdzv_endpoint) == ("2", "4", "node0:1234")
    assert (found.max_restarts, found.shutdown_timeout) == (int(variables.get("PET_MAX_RESTARTS", 10)), 50)
    assert (found.rdzv_backend, found.no_python) == ("c10d", True)
    assert found.training_script == str(DEPLOY / "rank.sh")


# The image


def instructions() -> list[tuple[str, str]]:
    """(instruction, its text) of the Dockerfile."""
    text = re.sub(r"(?m)^\s*#.*\n", "", (DEPLOY / "Dockerfile").read_text()).replace("\\\n", " ")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return [(line.split(maxsplit=1)[0], line.split(maxsplit=1)[1]) for line in lines]


def stages() -> dict[str, list[tuple[str, str]]]:
    found: dict[str, list[tuple[str, str]]] = {}
    for name, text in instructions():
        if name == "FROM":
            found[text.split()[-1]] = []
        found[text.split()[-1] if name == "FROM" else [*found][-1]].append((name, text))
    return found


def test_the_images() -> None:
    found = stages()
    assert set(found) == {"base", "cpu", "cuda"}
    known = {"FROM", "RUN", "WORKDIR", "ENV", "COPY", "VOLUME", "ARG", "USER", "ENTRYPOINT", "CMD"}
    assert {name for name, _ in instructions()} <= known
    base = dict(found["base"])
    python = base["FROM"].split()[0].removeprefix("python:").removesuffix("-slim")
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    assert tuple(map(int, python.split("."))) >= (3, 11)
    assert project["requires-python"] == ">=3.11"
    copied = [shlex.split(text)[:-1] for name, text in found["base"] if name == "COPY"]
    assert all((REPO / path).exists() for paths in copied for path in paths)
    assert {"README.md", "setup.py", *project["license-files"], "src", "deploy", "pyproject.toml"} <= {
        path for paths in copied for path in paths
    }, "what an installation reads"
    assert base["WORKDIR"] == "/opt/fivefold"
    for target in ("cpu", "cuda"):
        stage = dict(found[target])
        assert stage["FROM"] == f"base AS {target}"
        assert stage["ENTRYPOINT"] == '["/opt/fivefold/deploy/entry.sh"]'
        assert stage["WORKDIR"] == "/", "where runs/ is the volume"
        assert "pip install --constraint constraints.txt ." in stage["RUN"]


@pytest.fixture
def mounted() -> Iterator[Path]:
    """A folder to mount, in one that every user may enter."""
    if os.geteuid() or not shutil.which("setpriv"):
        pytest.skip("needs root and setpriv, to run as another user")
    if Path("/proc/self/uid_map").read_text().split()[1] != "0":
        pytest.skip("needs the machine's own root: the entry point leaves no other")
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        Path(folder).chmod(0o755)
        runs = Path(folder, "runs")
        runs.mkdir()
        yield runs


def entry(runs: Path, user: int, *words: str) -> subprocess.CompletedProcess[str]:
    """The image's entry point, copied to where other users can read it, started as this user in an environment that
    is not theirs."""
    script = shutil.copy(DEPLOY / "entry.sh", runs.parent)
    started = ["setpriv", "--reuid", str(user), "--regid", str(user), "--clear-groups", script, *words]
    env = {"PATH": "/usr/bin:/bin", "HOME": "/root", "RUNS": str(runs), "FIVEFOLD_CACHE": str(runs / "cache")}
    return subprocess.run(started, env=env, capture_output=True, text=True, cwd="/", timeout=60)


@pytest.mark.parametrize(
    ("owner", "user", "writes"),
    [(0, 0, 1000), (23456, 0, 23456), (12345, 12345, 12345)],
    ids=["docker made the folder", "another's folder", "--user, own folder"],
)
def test_the_image_writes_to_a_mounted_folder(mounted: Path, owner: int, user: int, writes: int) -> None:
    os.chown(mounted, owner, owner)
    script = (
        'mkdir "$RUNS/first" "$FIVEFOLD_CACHE" && touch "$HOME" && echo "$(id -u) $(id -g) $(id -G) $USER"'
    )
    done = entry(mounted, user, "/bin/sh", "-c", script)
    assert (done.stdout, done.stderr) == (f"{writes} {writes} {writes} trainer\n", "")
    assert {path.stat().st_uid for path in (mounted, *mounted.iterdir())} == {writes}


@pytest.mark.parametrize("owner", [0, 23456], ids=["root's", "another's"])
def test_the_image_says_what_it_cannot_write(mounted: Path, owner: int) -> None:
    os.chown(mounted, owner, owner)
    for words in (
        ("train", "quickstart"),
        ("/bin/mkdir", f"{mounted}/first"),
        ("plan", f"--html={mounted}/x"),
    ):
        done = entry(mounted, 12345, *words)
        assert (done.returncode, done.stdout) == (USER, "")
        assert done.stderr.startswith(
            f"error: user 12345 cannot write to {mounted}, which belongs to user {owner}."
        )
        assert "chown 12345" in done.stderr
        assert done.stderr.count("\n") == 1
    done = entry(mounted, 12345, "/bin/sh", "-c", 'mkdir -p "$FIVEFOLD_CACHE" && echo "$HOME"')
    assert (done.stdout, done.stderr) == ("/tmp\n", ""), "what writes nothing there goes on"
    done = entry(mounted, 12345, "/bin/echo", "train", "quickstart", "--out", "/data/first")
    assert done.stdout == "train quickstart --out /data/first\n", "so does a run that goes to another folder"


@pytest.mark.parametrize("script", ["torchrun.sh", "mpirun.sh", "slurm.sbatch"])
def test_a_run_folder_that_cannot_be_written_ends_a_script_at_once(
    bin_: Path, script: str, capfd: pytest.CaptureFixture[str]
) -> None:
    (bin_.parent / "run").write_text("in the way")
    assert run(script, bin_, 0) == USER
    assert "error: user " in capfd.readouterr().err
    assert not (bin_.parent / "said").exists()


# The pages


def test_the_page_lists_every_launcher_s_variables() -> None:
    rows = (REPO / "docs" / "launching" / "README.md").read_text().splitlines()
    for launcher in LAUNCHERS:
        (row,) = (row for row in rows if row.startswith(f"| {launcher.name} |"))
        for name in (launcher.rank, launcher.world, launcher.local_rank, launcher.local_world[0]):
            assert f"`{name}`" in row
    named = [row.split(" | ")[0].removeprefix("| ") for row in rows if " | `" in row]
    order = [name for name in named if not name.startswith("`")]
    assert order == [launcher.name for launcher in LAUNCHERS], "the first one counts"
