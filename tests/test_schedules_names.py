"""What must be known of a schedule is asked of its rows or its entry in the registry: nobody else names one."""

import ast
from pathlib import Path

import pytest

import fivefold
from fivefold.schedules.pipeline import DEFAULT, SCHEDULES

SRC = Path(fivefold.__file__).parent
FILES = [file for file in sorted(SRC.rglob("*.py")) if (SRC / "schedules") not in file.parents]
ALLOWED = {"recipe/schema.py": [DEFAULT]}  # the recipe's default


def named(text: str) -> list[str]:
    """Strings of a program that are names of schedules; sentences and examples that mention one are none."""
    return [
        node.value
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in SCHEDULES
    ]


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(SRC)))
def test_no_schedule_is_named_elsewhere(file: Path) -> None:
    assert named(file.read_text(encoding="utf-8")) == ALLOWED.get(str(file.relative_to(SRC)), [])


def test_a_name_would_be_found() -> None:
    assert named('if layout.schedule in ("gpipe", "x"):\n    """A text on gpipe."""') == ["gpipe"]


def test_pages_name_none() -> None:
    for file in (SRC / "observe").rglob("*.js"):
        words = {word.strip("\"'`") for word in file.read_text(encoding="utf-8").split()}
        assert not words & SCHEDULES.keys(), file
