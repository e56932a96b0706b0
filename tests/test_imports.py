"""Imports point downwards only, and what must answer at once imports nothing heavy."""

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from sources import FILES, LINES, PACKAGES, SRC, name_of, room_of

import fivefold

LINE_OF = {room: number for number, rooms in enumerate(LINES) for room in rooms}
# These import no torch.
LIGHT = {
    "__init__",
    "cli",
    "data",
    "draw",
    "errors",
    "files",
    "host",
    "plan",
    "plan.commands",
    "plan.foreign",
    "plan.lessons",
    "precision",
    "recipe",
    "schedules",
    "sharding",
    "wings",
}
LIGHT_FILES = (
    "fivefold/train/__init__.py",
    "fivefold/train/forecast.py",
    "fivefold/train/peak.py",
    "fivefold_plan/forecast/__init__.py",
    "fivefold_play/command.py",
    *(f"fivefold/launch/{name}.py" for name in ("launchers", "verdict")),
    *(f"fivefold/kernels/{name}.py" for name in ("__init__", "sizes")),
    *(f"fivefold/models/{name}.py" for name in ("__init__", "*/__init__", "*/card", "*/hf")),
    *(f"fivefold/models/{name}.py" for name in ("card", "hf", "operations", "recomputation")),
    *(f"fivefold/models/{name}.py" for name in ("rules", "section", "work")),
    *(f"fivefold/optim/{name}.py" for name in ("__init__", "adamw", "card", "sgd")),
)


@cache
def imported(file: Path) -> tuple[list[tuple[int, str]], set[str], set[str]]:
    """`imports` of a file; the names of those that run with it; `modules_of` it."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return [*imports(tree)], {name for _, name in imports(tree, True)}, {*modules_of(tree)}


def imports(tree: ast.AST, module_level_only: bool = False) -> Iterator[tuple[int, str]]:
    """(line, absolute module name) of every import, inside functions and for the type checker too.

    module_level_only: those that run when the module is imported."""
    for node in ast.iter_child_nodes(tree):
        if module_level_only and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import"
            assert node.module is not None
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from ((node.lineno, name) for name in (names if node.module in PACKAGES else [node.module]))
        elif not (module_level_only and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)):
            yield from imports(node, module_level_only)


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_imports_point_downwards(file: Path) -> None:
    """So the trainer imports no package that stands on it."""
    room = room_of(name_of(file))
    assert room in LINE_OF, f"room '{room}' is on no line of this test"
    upwards = []
    for line, name in imported(file)[0]:
        ours, target = name.partition(".")[0] in PACKAGES, room_of(name)
        if ours and target != room and LINE_OF.get(target, -1) <= LINE_OF[room]:
            upwards.append(f"{name_of(file)}:{line}: '{room}' imports '{target}'")
    assert not upwards, "\n".join(upwards)


def test_no_file_imports_itself_through_others() -> None:
    """A circle is a fact without a home; hiding it in a function or from the type checker does not give it one."""
    files = {".".join(f.relative_to(SRC).with_suffix("").parts): f for f in FILES}
    files = {name.removesuffix(".__init__"): f for name, f in files.items()}
    wanted = {name: imported(f)[2] & files.keys() - {name} for name, f in files.items()}
    while free := [name for name, needs in wanted.items() if not needs & wanted.keys()]:
        for name in free:
            del wanted[name]
    while free := [name for name in wanted if not any(name in needs for needs in wanted.values())]:
        for name in free:  # they only need what is in a circle
            del wanted[name]
    assert not wanted, f"imports in a circle: {', '.join(sorted(wanted))}"


def test_only_comm_sends() -> None:
    """But for the meeting of ranks and for measurements (docs/messages.md)."""
    sends = r"\b(dist|distributed)\.(all_|broadcast|i?send|i?recv|reduce|gather|scatter|(monitored_)?barrier|batch_)"
    found = {file for file in FILES if re.search(sends, file.read_text(encoding="utf-8"))}
    others = {name_of(file) for file in found if room_of(name_of(file)) not in ("comm", "plan.bench")}
    assert {"comm", "plan.bench"} <= {room_of(name_of(file)) for file in found}
    assert others == {"fivefold/launch/ranks.py"}


def test_no_kit_is_named_like_a_folder_that_the_program_makes() -> None:
    """Tools that read a checkout would take the folder `runs` for a module of that name, which benchmarks import."""
    root = SRC.parent
    if not (root / ".gitignore").exists():
        pytest.skip("no checkout")
    made = {line.strip("/") for line in (root / ".gitignore").read_text().splitlines() if line.endswith("/")}
    assert "runs" in made
    assert not made & {file.stem for file in (root / "tests").glob("*.py")}


def modules_of(tree: ast.AST) -> Iterator[str]:
    """Modules that a file imports; of `from package import name` the package and what may be its module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found = [name for name in names if is_module(name)]
            yield from found or [node.module or ""]
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def is_module(name: str) -> bool:
    path = SRC.joinpath(*name.split("."))
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


@pytest.mark.parametrize(
    "file",
    [
        f
        for f in FILES
        if room_of(name_of(f)) in LIGHT or any(f.relative_to(SRC).match(p) for p in LIGHT_FILES)
    ],
    ids=name_of,
)
def test_light_rooms_have_no_torch_at_module_level(file: Path) -> None:
    found = {name.partition(".")[0] for name in imported(file)[1]}
    assert not found & {"torch", "transformers", "datasets", "pyarrow", "plotly", "tensorboard"}


def test_light_files_are_there() -> None:
    assert [
        pattern for pattern in LIGHT_FILES if not any(f.relative_to(SRC).match(pattern) for f in FILES)
    ] == []


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("import fivefold", ["torch", "numpy", "pydantic", "typer", "rich"]),
        ("import fivefold.cli.main", ["torch", "numpy", "pydantic", "rich", "tokenizers"]),
        ("import fivefold.recipe, fivefold.sharding.layout", ["torch", "numpy", "typer", "rich"]),
        ("import fivefold.optim, fivefold.precision", ["torch", "numpy", "pydantic"]),
        ("import fivefold.schedules.pipeline", ["torch", "numpy", "pydantic"]),
        (
            "import fivefold_plan.search.search, fivefold_plan.advice.explain",
            ["torch", "numpy", "typer", "rich"],
        ),
        ("import fivefold.kernels.sizes", ["torch", "numpy"]),
        ("import fivefold.data", ["torch", "transformers", "datasets"]),
    ],
)
def test_import_is_light(statement: str, absent: list[str]) -> None:
    code = f"import sys, json; {statement}; print(json.dumps([n for n in {absent!r} if n in sys.modules]))"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert json.loads(result.stdout) == []


@pytest.mark.parametrize("name", fivefold.__all__)
def test_public_names_exist(name: str) -> None:
    value = getattr(fivefold, name)
    assert value is not None
    if name not in ("Recipe", "__version__"):
        assert callable(value)


def test_unknown_public_name() -> None:
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        fivefold.trian  # noqa: B018
