"""What must be known of a schedule is asked of its rows or its entry in the registry: nobody else names one."""

import ast
from pathlib import Path

import pytest
from sources import FILES, SRC, name_of

from fivefold.schedules.pipeline import DEFAULT, SCHEDULES

OTHERS = [file for file in FILES if not name_of(file).startswith("fivefold/schedules/")]
ALLOWED = {"fivefold/recipe/schema.py": [DEFAULT]}  # the recipe's default


def named(text: str) -> list[str]:
    """Strings of a program that are names of schedules; sentences and examples that mention one are none."""
    return [
        node.value
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in SCHEDULES
    ]


@pytest.mark.parametrize("file", OTHERS, ids=name_of)
def test_no_schedule_is_named_elsewhere(file: Path) -> None:
    assert named(file.read_text(encoding="utf-8")) == ALLOWED.get(name_of(file), [])


def test_a_name_would_be_found() -> None:
    assert named('if layout.schedule in ("gpipe", "x"):\n    """A text on gpipe."""') == ["gpipe"]


def test_pages_name_none() -> None:
    for file in SRC.rglob("*.js"):
        words = {word.strip("\"'`") for word in file.read_text(encoding="utf-8").split()}
        assert not words & SCHEDULES.keys(), file
