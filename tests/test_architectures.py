"""An architecture is a folder in models/ and nothing else: nobody outside asks for its name."""

import ast
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from sources import FILES, PACKAGES, SRC, name_of

from fivefold.models import ARCHITECTURES
from fivefold.models.rules import having
from fivefold.models.section import FACTS

OUTSIDE = [file for file in FILES if not name_of(file).startswith("fivefold/models/")]


OF_MIXTURES = {"experts", "experts_per_token", "capacity_factor", "balance_rate", "balance"}
"""Fields that the techniques for experts read, whatever the architecture."""
OWN = FACTS.keys() - OF_MIXTURES


def names_of_architectures(tree: ast.AST) -> list[int]:
    """Lines where an architecture is named as a value, imported, or `arch` is compared with something; where a field
    is used that only some architectures have; where the width of a head is computed."""
    found = []
    for node in ast.walk(tree):
        values = [node.value] if isinstance(node, ast.Constant) and isinstance(node.value, str) else []
        if isinstance(node, ast.ImportFrom | ast.Import):
            modules = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
            values = [part for module in modules for part in module.split(".")]
        compared = isinstance(node, ast.Compare) and any(
            isinstance(side, ast.Attribute) and side.attr == "arch" for side in (node.left, *node.comparators)
        )
        own = (
            isinstance(node, ast.Attribute | ast.keyword) and (getattr(node, "attr", None) or node.arg) in OWN
        )  # type: ignore[union-attr]
        width = (
            isinstance(node, ast.BinOp)
            and isinstance(node.op, ast.Div | ast.FloorDiv)
            and [getattr(side, "attr", None) for side in (node.left, node.right)] == ["dim", "heads"]
        )
        if compared or own or width or any(value in (*ARCHITECTURES, *OWN) for value in values):
            found.append(node.lineno)  # type: ignore[attr-defined]
    return found


@pytest.mark.parametrize("file", OUTSIDE, ids=name_of)
def test_nothing_outside_models_names_an_architecture(file: Path) -> None:
    assert names_of_architectures(ast.parse(file.read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize(
    "line",
    [
        'x = "bert"',
        "model.arch == other",
        "from fivefold.models.moe.module import Model",
        "a in ('gpt2',)",
        "n - model.dense_layers",
        'x = {"shared_experts": 2}',
        "change(rope_theta=1.0)",
        "d = s.model.dim // model.heads",
    ],
)
def test_that_test_finds_them(line: str) -> None:
    assert names_of_architectures(ast.parse(line)) == [1]


def test_a_folder_is_all_that_a_fifth_architecture_takes(tmp_path: Path) -> None:
    """A copy of the package with one folder more builds, counts, plans, traces, steps and exchanges its model."""
    package, ours = tmp_path / "src" / "fivefold", Path(__file__).parent / "tiny_arch"
    for name in PACKAGES:
        shutil.copytree(SRC / name, tmp_path / "src" / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(
        ours, package / "models" / "tiny", ignore=shutil.ignore_patterns("__pycache__", "uses.py")
    )
    ran = subprocess.run(
        [sys.executable, ours / "uses.py", tmp_path],
        env={**os.environ, "PYTHONPATH": str(tmp_path / "src"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert [name for name in ("names", "counted", "exchange", "messages") if not found[name]] == []
    D, F, V, T, L = 32, 64, 320, 16, 2
    assert found["flops"] == 6 * (L * (4 * D * D + 3 * D * F) + V * D) + 6 * L * D * T
    assert found["tp"] == [1, 2, 4]
    assert f"tiny has no rotary positions (model.arch: only {having('rotary')} have them)" in found["refused"]
    assert 0 < found["step_s"] < 1
    first, last = found["losses"][0], found["losses"][-1]
    assert last < first < 7
