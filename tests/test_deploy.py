"""The scripts of deploy/: their syntax, and what they make of exit codes, with stand-ins for the clusters' programs."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from commands import REPO

DEPLOY = REPO / "deploy"


@pytest.fixture
def bin_(tmp_path: Path) -> Path:
    """A folder of stand-ins: `fivefold` ends with $CODE; `srun` and `torchrun` run the command after their options, and
    end with 1 if it failed, as torchrun does."""
    folder = tmp_path / "bin"
    folder.mkdir()
    launcher = '#!/bin/bash\nwhile [[ $1 != */rank.sh ]]; do shift; done\n"$@" || exit 1\n'
    programs = {
        "fivefold": f'#!/bin/bash\necho "$@" >> {tmp_path}/said\nexit $CODE\n',
        "srun": launcher,
        "torchrun": launcher,
        "scontrol": f'#!/bin/bash\necho "$@" > {tmp_path}/requeued\n',
    }
    for name, text in programs.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return folder


def run(script: str, bin_: Path, code: int) -> int:
    env = os.environ | {
        "PATH": f"{bin_}:{os.environ['PATH']}", "CODE": str(code), "SLURM_JOB_ID": "7", "FIVEFOLD_DEPLOY": str(DEPLOY),
    }  # fmt: skip
    words = ["bash", str(DEPLOY / script), "quickstart", str(bin_.parent / "run")]
    return subprocess.run(words, env=env, timeout=60).returncode


@pytest.mark.parametrize(
    ("code", "slurm", "torchrun", "before"),
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
    torchrun: int,
    before: int,
) -> None:
    monkeypatch.setenv("SLURM_RESTART_COUNT", str(before))
    assert run("slurm.sbatch", bin_, code) == slurm
    assert (tmp_path / "requeued").exists() == (slurm == 75)
    assert run("torchrun.sh", bin_, code) == torchrun
    assert set((tmp_path / "said").read_text().splitlines()) == {
        f"train quickstart --out {tmp_path / 'run'} --resume-from auto"
    }
    assert not [*(tmp_path / "run").iterdir()], "no mark is left"


def test_a_signal_reaches_the_rank(tmp_path: Path) -> None:
    """And its code comes back, though the signal ended the shell's wait."""
    rank = "trap 'sleep 0.2; exit 75' TERM; touch here; while true; do sleep 0.05; done"
    shell = subprocess.Popen([str(DEPLOY / "rank.sh"), "mark", "bash", "-c", rank], cwd=tmp_path)
    while not (tmp_path / "here").exists():
        time.sleep(0.01)
    shell.send_signal(signal.SIGTERM)
    assert shell.wait(20) == 75
    assert (tmp_path / "mark").exists()


def test_the_job_of_kubernetes_maps_our_codes() -> None:
    yaml = pytest.importorskip("yaml")
    from fivefold.launch.exits import STOPPED, USER

    spec = yaml.safe_load((DEPLOY / "kubernetes.yaml").read_text())["spec"]
    codes = {
        rule["action"]: rule["onExitCodes"]["values"]
        for rule in spec["podFailurePolicy"]["rules"]
        if "onExitCodes" in rule
    }
    assert codes == {"FailJob": [USER], "Ignore": [STOPPED]}
    pod = spec["template"]["spec"]
    assert pod["restartPolicy"] == "Never", "or Kubernetes refuses the policy"
    assert pod["containers"][0]["command"][:2] == ["fivefold", "train"]
