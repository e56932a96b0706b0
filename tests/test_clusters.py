"""The scripts of deploy/ with real launchers on this machine: Slurm and mpirun, stopped by signals and resumed."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import REPO
from slurm import Slurm, Unavailable

DEPLOY = REPO / "deploy"
RECIPE = """
[model]
layers = 1
dim = 16
heads = 2
seq_len = 16
[data]
source = "{folder}/text.txt"
tokenizer = "bytes"
cache = "{folder}/cache"
[train]
steps = {steps}
global_batch_size = 4
val_every = 0
[layout]
dp_replicate = 2
[observe]
tracker = "none"
"""
pytestmark = pytest.mark.slow


def write(folder: Path, steps: int) -> Path:
    (folder / "text.txt").write_text("To be, or not to be: that is the question.\n" * 400)
    (folder / "recipe.toml").write_text(RECIPE.format(folder=folder, steps=steps))
    return folder / "recipe.toml"


def steps(run: Path) -> list[int]:
    try:
        lines = (run / "metrics.jsonl").read_text().splitlines()
    except OSError:
        return []
    found = [json.loads(line) for line in lines if line.endswith("}")]
    return [line["step"] for line in found if "loss" in line]


def until(there: Callable[[], object], what: str, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not there():
        assert time.monotonic() < deadline, what
        time.sleep(0.2)


def environment() -> dict[str, str]:
    """With `fivefold` of this environment in PATH, and without a terminal's variables of another launcher."""
    programs = Path(sys.executable).parent
    return os.environ | {"PATH": f"{programs}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}


def test_a_job_of_slurm_saves_at_its_time_limit_and_goes_on(tmp_path: Path) -> None:
    """A minute of time, SIGTERM half a minute before its end; then requeued, resumed and completed."""
    recipe, run = write(tmp_path, 10**6), tmp_path / "run"
    text = (DEPLOY / "slurm.sbatch").read_text()
    for old, new in (
        ("--nodes=2", "--nodes=1"),
        ("--ntasks-per-node=8", "--ntasks-per-node=2"),
        ("--time=24:00:00", "--time=00:01:00"),
        ("--signal=TERM@120", "--signal=TERM@30"),
    ):
        assert old in text
        text = text.replace(old, new)
    script = tmp_path / "job.sbatch"
    script.write_text(re.sub(r"#SBATCH --gpus-per-node=8\n", "", text))
    try:
        with Slurm(tmp_path_of(tmp_path)) as slurm:
            slurm.env |= {"PATH": f"{Path(sys.executable).parent}:{slurm.env['PATH']}"}
            slurm.env |= {"FIVEFOLD_DEPLOY": str(DEPLOY), "OMP_NUM_THREADS": "1"}
            log = tmp_path / "job.log"
            words = ["sbatch", "--parsable", f"--output={log}", str(script), str(recipe), str(run)]
            number = slurm.run(*words).strip()
            until(lambda: slurm.job(number)["Restarts"] == "1", f"no requeue: {slurm.job(number)}")
            saved = max(int(folder.name.split("-")[1]) for folder in (run / "checkpoints").glob("step-*"))
            write(tmp_path, saved + 20)
            until(lambda: slurm.job(number)["JobState"] == "COMPLETED", f"{log.read_text()[-2000:]}")
    except Unavailable as reason:
        pytest.skip(str(reason))
    assert steps(run) == [*range(1, saved + 21)]
    said = log.read_text()
    assert f"resuming after step {saved}" in said
    assert said.count("stopping: finishing the steps under way") == 1
    assert "Traceback" not in said
    (restart,) = (json.loads(line) for line in (run / "restarts.jsonl").read_text().splitlines())
    assert "Slurm" in json.dumps(restart)


def tmp_path_of(folder: Path) -> Path:
    """A folder with a short name: those of sockets are bounded."""
    made = folder / "slurm"
    made.mkdir()
    return made


@pytest.mark.skipif(
    not shutil.which("mpirun"),
    reason="no mpirun in PATH: apt install openmpi-bin, or mpich; or pip install mpich",
)
def test_mpirun_stops_and_goes_on(tmp_path: Path) -> None:
    recipe, run = write(tmp_path, 10**6), tmp_path / "run"
    env = environment() | {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    env["OMPI_MCA_rmaps_base_oversubscribe"] = "1"
    words = [str(DEPLOY / "mpirun.sh"), str(recipe), str(run), "-n", "2"]
    log = tmp_path / "log"
    with log.open("wb") as out, subprocess.Popen(words, env=env, stdout=out, stderr=out) as script:
        until(lambda: len(steps(run)) > 5 or script.poll() is not None, "no steps")
        assert script.poll() is None, log.read_text()
        script.send_signal(signal.SIGTERM)
        assert script.wait(60) == 75, log.read_text()
    saved = steps(run)[-1]
    write(tmp_path, saved + 5)
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"resuming after step {saved}" in done.stdout
    assert steps(run) == [*range(1, saved + 6)]
    assert "Traceback" not in log.read_text() + done.stderr
