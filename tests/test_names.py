"""Dotted names of our own code in comments, docstrings and docs are there: `module.name`, `room/file.name`,
`Class.name`."""

from __future__ import annotations

import ast
import importlib
import re
from collections import defaultdict
from contextlib import suppress
from functools import cache

import pytest
from sources import FILES, SRC

from fivefold.recipe import Recipe

ROOT = SRC.parent
NAME = re.compile(r"`(?:[a-z_]+/)*([A-Za-z_]\w*)\.([A-Za-z_]\w*)(?:\.\w+)*(?:\(\))?`")
ENDS = {"c", "cpp", "csv", "html", "json", "jsonl", "js", "css", "md", "py", "sh", "svg", "toml", "txt", "h"}
"""Endings of files."""
OTHERS = {"torch", "nn", "dist", "tokenizers", "transformers", "F", "np"}
ELSEWHERE = {
    "`NAME.PARAMETER`", "`NAME.PARAMETER.NUMBER`", "`STATE.PARAMETER`", "`sources.web.weight`", "`run.weights()`",
    "`fivefold.example`", "`checkpoint.initial_load_path`", "`checkpoint.interval`", "`checkpoint.enable`",
    "`metrics.log_freq`", "`model.name`", "`model.flavor`", "`model.converters`",
}  # fmt: skip
"""Patterns of names, a variable of an example, a host, and fields of torchtitan's recipes."""


def bound(tree: ast.AST) -> set[str]:
    """All names that a module, class or function binds, its attributes and arguments, too."""
    found = set()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.alias(name=name):
                found |= {name, name.split(".")[-1]}
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name) | ast.arg(arg=name):
                found.add(name)
    return found


@cache
def homes() -> dict[str, set[str]]:
    """By each name of a module, a room or a class of ours, the names that are in it."""
    found, trees = defaultdict[str, set[str]](set), {file: ast.parse(file.read_text()) for file in FILES}
    for file, tree in trees.items():
        found[file.parent.name if file.stem == "__init__" else file.stem] |= bound(tree)
        found[file.parent.name] |= {file.stem, *(p.name for p in file.parent.iterdir() if p.is_dir())}
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                found[node.name] |= bound(node)
    for name, field in Recipe.model_fields.items():
        found[name] |= set(getattr(field.annotation, "model_fields", ()))
    return found


def missing(text: str) -> list[str]:
    """The dotted names in a text that look like ours and are not there."""
    found = []
    for match in NAME.finditer(text):
        first, second = match.groups()
        with suppress(ImportError, ValueError):  # of the standard library, or another
            if first.islower() and hasattr(importlib.import_module(first), second):
                continue
        ours = first in homes() or second.isupper() or second[0].isupper()
        if ours and second not in homes().get(first, ()) and second not in ENDS and first not in OTHERS:
            found.append(match[0])
    return found


@pytest.mark.slow
def test_dotted_names_are_there() -> None:
    texts = [*FILES, *ROOT.glob("docs/**/*.md"), ROOT / "CONTRIBUTING.md", ROOT / "README.md"]
    wrong = {str(f.relative_to(ROOT)): names for f in texts if (names := missing(f.read_text()))}
    wrong = {f: left for f, names in wrong.items() if (left := [n for n in names if n not in ELSEWHERE])}
    assert not wrong, wrong


@pytest.mark.slow
def test_what_is_not_there_is_found() -> None:
    assert missing("`overlap.KINDS`, `sharding.seconds.SECONDS`, `writing.begin`, `launch/ranks.nobody()`") == [
        "`overlap.KINDS`", "`sharding.seconds.SECONDS`", "`writing.begin`", "`launch/ranks.nobody()`",
    ]  # fmt: skip
    assert not missing(
        "`timelines.KINDS`, `launch/ranks.words_first`, `train.steps`, `loop.py`, `time.monotonic`"
    )
