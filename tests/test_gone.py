"""A run whose folder is taken away says so at its next step, ends, and makes nothing anew."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from launched import Launched, command, last_step
from marks import slow
from test_supervisor import recipe_of, text  # noqa: F401, the text of whole runs

from fivefold.errors import UserError
from fivefold.files import Lines, owned, require_owned
from fivefold.launch.verdict import USER, Failure
from fivefold.recipe import load
from fivefold.train.job import Job
from fivefold.train.restart import Restarts

LONG = ("train.steps=100000", "train.val_every=0", "train.sample_every=0", "checkpoint.every=5")


def removed(run: Path) -> None:
    """At once, whatever is written meanwhile."""
    run.rename(run.with_name("aside"))
    shutil.rmtree(run.with_name("aside"), ignore_errors=True)


def renamed(run: Path) -> None:
    run.rename(run.with_name("elsewhere"))


def replaced(run: Path) -> None:
    """Another run has the name now."""
    renamed(run)
    shutil.copytree(run.with_name("elsewhere"), run)


def emptied(run: Path) -> None:
    """`rm -r run/*`"""
    for path in run.iterdir():
        shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)


def below(folder: Path) -> set[str]:
    """Its files, but for the owner's mark."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()} - {".lock"}


def started(text: Path, tmp_path: Path, *more: str, ranks: int = 1) -> tuple[Launched, Path]:  # noqa: F811
    out = tmp_path / "run"
    sets = [f"--set={one}" for one in recipe_of(text, *LONG, *more)]
    run = command(tmp_path / "log", "train", "quickstart", *sets, f"--nproc={ranks}", f"--out={out}")
    run.until(lambda: last_step(out) >= 3)
    return run, out


@pytest.mark.parametrize(
    ("how", "ranks", "sets"),
    [
        (removed, 1, ("checkpoint.every=0",)),  # no save would notice
        *slow((removed, 2, ()), (renamed, 1, ()), (renamed, 2, ()), (replaced, 1, ()), (emptied, 2, ())),
        *slow((removed, 3, ("sync.method=server",))),
    ],
)
def test_a_run_without_its_folder_ends(
    text: Path,  # noqa: F811
    tmp_path: Path,
    how: Callable[[Path], None],
    ranks: int,
    sets: tuple[str, ...],
) -> None:
    run, out = started(text, tmp_path, *sets, ranks=ranks)
    how(out)
    there = below(out) if out.exists() else set()
    assert run.wait() == USER, run.said
    assert run.said.count("was removed, renamed or replaced") == 1, run.said
    assert not set(run.said.split()) & {"Traceback", "Starting", "saved;"}
    assert out.exists() == (how in (replaced, emptied))
    assert how is emptied or (below(out) if out.exists() else set()) == there


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_signal_says_nothing_untrue(text: Path, tmp_path: Path, ranks: int) -> None:  # noqa: F811
    run, out = started(text, tmp_path, ranks=ranks)
    run.send(signal.SIGSTOP)
    for rank in run.ranks() if ranks > 1 else ():
        run.send(signal.SIGSTOP, rank)
    removed(out)
    run.send(signal.SIGTERM)
    for rank in run.ranks() if ranks > 1 else ():
        run.send(signal.SIGCONT, rank)
    run.send(signal.SIGCONT)
    assert run.wait() in (USER, 128 + signal.SIGTERM), run.said
    assert "was removed, renamed or replaced" in run.said
    assert "is saved" not in run.said
    assert not out.exists()


@pytest.mark.slow
def test_a_sweep_without_its_folder_ends(text: Path, tmp_path: Path) -> None:  # noqa: F811
    folder = tmp_path / "sweep"
    sets = [f"--set={one}" for one in recipe_of(text, "train.steps=300", "train.val_every=0")]
    words = ["sweep", "quickstart", *sets, "--over", "optim.lr=1e-3,2e-3,3e-3", f"--out={folder}"]
    run = command(tmp_path / "log", *words)
    run.until(lambda: any(last_step(row) >= 3 for row in folder.glob("*") if row.is_dir()))
    removed(folder)
    assert run.wait(120) == USER, run.said
    assert f"{folder}/.lock was removed, renamed or replaced" in run.said
    assert not folder.exists()


def test_a_launcher_starts_no_ranks_in_a_folder_that_is_gone(tmp_path: Path) -> None:
    out, killed = tmp_path / "run", Failure(1, "killed", "rank 1 was killed (SIGKILL)")
    restarts = Restarts(Job(load("quickstart"), out, None), lambda job: pytest.fail("it starts"))
    with owned(out):
        require_owned(out)
        removed(out)
        with pytest.raises(UserError, match=r"run/\.lock was removed, renamed or replaced"):
            restarts.again(killed)
    assert not out.exists()


def test_lines_that_nobody_finds(tmp_path: Path) -> None:
    lines = Lines(tmp_path / "run.jsonl")
    lines.require()
    os.rename(lines.path, tmp_path / "other")
    for _ in range(2):
        with pytest.raises(UserError, match=r"run\.jsonl was removed"):
            lines.require()
        (tmp_path / "run.jsonl").write_text("of another run")
