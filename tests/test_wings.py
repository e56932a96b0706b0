"""The trainer alone, and what it says of packages that are missing, broken or made for another version."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest
from sources import PACKAGES, SRC

from fivefold import wings
from fivefold.cli.main import COMMANDS
from fivefold.recipe import load
from fivefold.train import out_of_memory
from fivefold.train.forecast import Forecast
from fivefold.train.job import Job

TINY = [
    "model.layers=1", "model.dim=16", "model.heads=2", "model.kv_heads=2", "model.ffn_dim=32", "model.seq_len=16",
    "model.vocab_size=none", "data.tokenizer=bytes", "train.steps=2", "train.global_batch_size=4",
    "train.microbatch_size=2", "train.val_every=0", "train.sample_every=0", "train.sample_tokens=1",
    "checkpoint.every=1",
]  # fmt: skip
NAMED = (
    tomllib.loads((SRC.parent / "pyproject.toml").read_text())
    if (SRC.parent / "pyproject.toml").exists()
    else {}
)


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the trainer's package, and a text to train on."""
    folder = tmp_path_factory.mktemp("core")
    shutil.copytree(SRC / "fivefold", folder / "fivefold", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "text.txt").write_text("".join(f"{i} squared is {i * i}. " for i in range(800)))
    return folder


def said(core: Path, *words: object, beside: Path | None = None, code: int = 0) -> str:
    """What a command prints where only the trainer's package is on the path, and what is `beside` it."""
    packages = [path for path in sys.path if path.endswith("-packages")]  # their .pth files are not read
    path = os.pathsep.join(map(str, filter(None, [core, beside, *packages])))
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-S", "-m", "fivefold", *map(str, words)]
    done = subprocess.run(command, cwd=core, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout + done.stderr


def sets(core: Path) -> list[str]:
    return [f"--set={one}" for one in (*TINY, f"data.source={core / 'text.txt'}")]


def test_the_trainer_alone_trains_and_says_what_is_missing(core: Path) -> None:
    text = said(core, "train", "quickstart", "--layout=dp=1", "--out", core / "one", *sets(core))
    assert "no prediction: the package fivefold_plan is missing" in text
    for name, package in (("plan", "fivefold_plan"), ("play", "fivefold_play")):
        text = said(core, name, "quickstart", "--cluster", "h100:8", code=2)
        missing = f"the package {package} is missing; a whole installation of fivefold has it"
        assert text == f"error: `fivefold {name}` cannot run: {missing}\n"


@pytest.mark.slow
def test_the_trainer_alone_resumes_verifies_generates_and_exports(core: Path) -> None:
    run, two = core / "two", ["--layout=dp=2,zero=2", *sets(core)]
    said(core, "train", "quickstart", "--out", run, *two)
    said(core, "train", run, "--resume", "--set=train.steps=4")
    assert "computes the same as one process" in said(core, "verify", "quickstart", *two)
    assert said(core, "generate", run, "--prompt", "1 squared", "--max-tokens", 3)
    said(core, "export", run, core / "exported")
    assert (core / "exported" / "model.safetensors").is_file()
    for asked in ("layout.recompute=budget:1GiB", "layout.offload_window=0"):
        text = said(core, "train", "quickstart", "--out", core / "asked", *two, f"--set={asked}", code=2)
        assert "the package fivefold_plan is missing" in text
    shutil.copytree(run, core / "same")
    assert "fivefold_play is missing" in said(core, "report", run, core / "same", code=2)
    assert "fivefold_plan is missing" in said(
        core, "sweep", "quickstart", "--over=train.steps=1,2", *two, code=2
    )


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("INTERFACE = 0\n", "was made for another version of fivefold (interface 0, here 1)"),
        ("import nothing_of_this_name\n", "cannot be imported: No module named 'nothing_of_this_name'"),
    ],
)
def test_a_package_that_cannot_be_used_is_named(core: Path, tmp_path: Path, content: str, words: str) -> None:
    (tmp_path / "fivefold_plan").mkdir()
    (tmp_path / "fivefold_plan" / "__init__.py").write_text(content)
    text = said(core, "clusters", beside=tmp_path, code=2)
    assert text.startswith("error: `fivefold clusters` cannot run: the package fivefold_plan ")
    assert words in text
    assert text.count("\n") == 1


def test_another_distribution_may_bring_a_part(core: Path, tmp_path: Path) -> None:
    (tmp_path / "other_plan.py").write_text(
        "INTERFACE = 1\nCOMMANDS = {}\n\n\ndef clusters() -> None:\n    print('a list')\n\n\n"
        "for _name in ('plan', 'plan search', 'plan terms', 'plan trace', 'plan calibrate', 'compare', 'draw',\n"
        "              'collectives', 'clusters', 'optimizers', 'bench'):\n    COMMANDS[_name] = clusters\n"
    )
    facts = tmp_path / "other_plan-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: other-plan\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text("[fivefold.wings]\nplan = other_plan\n")
    assert said(core, "clusters", beside=tmp_path) == "a list\n"


def test_every_part_is_there_and_named_in_the_distribution() -> None:
    for name, home in wings.PARTS.items():
        assert wings.part(name) is import_module(home)
    for package in PACKAGES[1:]:
        assert import_module(package).INTERFACE == wings.INTERFACE
    if NAMED:
        assert NAMED["project"]["entry-points"][wings.GROUP] == wings.PARTS


def test_every_command_is_in_its_part() -> None:
    asked = {part: {name for name, at in COMMANDS.items() if at == part} for part in ("plan", "play")}
    assert {part: set(wings.part(part).COMMANDS) for part in asked} == asked


def test_the_planner_has_all_functions_that_the_trainer_asks() -> None:
    functions = [name for name in vars(Forecast) if not name.startswith("_")]
    assert len(functions) == 6
    for name in functions:
        assert callable(getattr(wings.part("forecast"), name))


def test_memory_that_runs_out_without_the_planner_is_still_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> Forecast:
        raise wings.Missing("the package fivefold_plan is missing")

    monkeypatch.setattr(out_of_memory, "forecast", missing)
    job = Job(load("quickstart"), tmp_path)
    assert out_of_memory.advice(job, 1) == ["(no advice: the package fivefold_plan is missing)"]
