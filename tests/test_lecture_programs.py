"""The lectures' programs (examples/lectures) that import Fivefold: each by hand and by Fivefold, with the same result.
test_programs_by_hand.py has the others."""

import os
import re
import runpy
import shutil
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist
from commands import REPO
from launched import Launched
from namespaces import Hosts, Unavailable

PROGRAMS = {
    path.stem: path
    for path in sorted((REPO / "examples" / "lectures").glob("*.py"))
    if re.search(r"^(import|from) fivefold", path.read_text(encoding="utf-8"), re.MULTILINE)
}
FARTHEST = {"bert_classifier": 1e-5}  # AdamW divides by small numbers
RANKS = re.compile(r"^torchrun --nproc-per-node (\d) examples/lectures/(\w+)\.py", re.MULTILINE)
CLASSIFIER = PROGRAMS["bert_classifier"]


def as_rank(rank: int, world: int, port: int, program: Path) -> None:
    """A rank of torchrun, whose agent holds the store."""
    os.chdir(program.parent)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "GLOO_SOCKET_IFNAME": "lo"}
    sys.argv = [str(program)]
    runpy.run_path(str(program), run_name="__main__")


def differences(said: str) -> list[float]:
    return [float(found) for found in re.findall(r"largest difference .*: (\S+)$", said, re.MULTILINE)]


def started(name: str, tmp_path: Path) -> tuple[list[int], str]:
    """A program on its ranks: their exit codes, and what they said."""
    text = PROGRAMS[name].read_text(encoding="utf-8")
    program = tmp_path / f"{name}.py"
    program.write_text(text.replace("= 30522,", "= 302,"), encoding="utf-8")  # whole in the slow tests
    [(ranks, named)] = RANKS.findall(text)
    assert named == name
    store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    world = int(ranks)
    ranks_of = [
        Launched(tmp_path / f"{rank}.log", as_rank, rank, world, store.port, program) for rank in range(world)
    ]
    codes = [rank.wait() for rank in ranks_of]
    return codes, "".join(rank.said for rank in ranks_of)


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_by_hand_and_by_fivefold(name: str, tmp_path: Path) -> None:
    assert len(PROGRAMS[name].read_text(encoding="utf-8").splitlines()) < 80
    codes, said = started(name, tmp_path)
    assert set(codes) == {0}, said
    found = differences(said)
    assert found, said
    assert max(found) < FARTHEST.get(name, 1e-6), said
    for first, last in re.findall(r"loss (\S+) -> (\S+) in", said):
        assert float(last) < float(first) - 0.5


def test_the_page_has_the_shapes_of_backward(tmp_path: Path) -> None:
    """Those that the program prints, in the order of backward."""
    page = (REPO / "docs" / "lectures" / "03_tensor_parallelism.md").read_text(encoding="utf-8")
    table = re.findall(r"^\| \$(d[A-Z]).*?\| `(\(.*?\))` \| (.*) \|$", page, re.MULTILINE)
    codes, said = started("tensor_parallel", tmp_path)
    assert codes == [0, 0], said
    shapes = " ".join(f"{name} {shape}" for name, shape, _ in table)
    assert [f"rank {rank}: {shapes}" in said for rank in range(2)] == [True, True], said
    assert [name for name, _, message in table if "all-reduce" in message] == ["dX"]


def classify(hosts: Hosts, folder: Path, steps: int, **options):
    """Trains the classifier on two hosts of two ranks; what they print."""
    command = [sys.executable, str(CLASSIFIER), str(folder), str(steps)]
    env = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0"}
    return hosts.run(command, 2, capture=True, timeout_s=400, env=env, **options)


@pytest.mark.slow
def test_the_classifier_on_two_machines(tmp_path: Path) -> None:
    try:
        with Hosts(2, None) as hosts:
            done = classify(hosts, tmp_path, 6)
    except Unavailable as reason:
        pytest.skip(str(reason))
    assert done.code == 0, str(done)
    assert max(differences(done.out[0])) < FARTHEST["bert_classifier"]


@pytest.mark.slow
@pytest.mark.parametrize("saved", ["by_hand.pt", "run/checkpoints"])
def test_the_classifier_without_one_of_two_machines(tmp_path: Path, saved: str) -> None:
    """One is gone after the first checkpoint, by hand or by Fivefold. The other one's ranks go on from there."""
    if shutil.which("nsenter") is None:
        pytest.skip("no hosts without nsenter")
    there = tmp_path / saved
    try:
        with Hosts(2, None) as hosts:

            def kill(launchers) -> None:
                while not there.exists() or (there.is_dir() and not any(there.glob("step-*"))):
                    assert all(launcher.poll() is None for launcher in launchers)
                    time.sleep(0.05)
                hosts.kill(1)

            # A restart that is not the ranks' own fault keeps the old addresses; the next one meets anew. A busy
            # machine takes some more.
            options = ["--nnodes=1:2", "--max-restarts=10", "--rdzv-conf=last_call_timeout=2"]
            done = classify(hosts, tmp_path, 16, options=options, meanwhile=kill)
    except Unavailable as reason:
        pytest.skip(str(reason))
    assert max(differences(done.out[0]), default=1.0) < FARTHEST["bert_classifier"], str(done)
