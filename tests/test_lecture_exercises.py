"""The lectures' exercises (examples/lectures/exercises): the grader passes each solution, says what is wrong with
anything else, and each page shows its exercise."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
from commands import REPO

FOLDER = REPO / "examples" / "lectures" / "exercises"
PAGES = [page for page in sorted((REPO / "docs" / "lectures").glob("*.md")) if page.name != "README.md"]
NAMES = [page.stem for page in PAGES]
OTHER = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult}
AS_GOOD = {  # operations whose opposite computes the same
    "sign * math.inf": "the sign of infinity",
    "blocks / k * given + k * (given + inside) - given": "the lowest of sums that differ by a constant",
    "blocks + 1": "of the divisors this lacks only `blocks`, which is never best in a check",
}
EMPTY = {"missing": "raise NotImplementedError", "None": "return None", "error": "return 1 / 0"}
PATIENCE_S = 2  # of the grader, in tests


def graded(name: str, file: Path | None = None) -> tuple[int, list[str]]:
    """The grader's exit code and lines, as a learner starts it."""
    command = [
        sys.executable,
        "examples/lectures/exercises/grade.py",
        name[:2],
        *([str(file)] if file else []),
    ]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=120)
    assert done.stderr == "", done.stderr
    return done.returncode, done.stdout.splitlines()


def functions(file: Path) -> list[ast.FunctionDef]:
    return [node for node in ast.parse(file.read_text("utf-8")).body if isinstance(node, ast.FunctionDef)]


def signatures(file: Path) -> list[tuple[str, str, str | None]]:
    return [(f.name, ast.unparse(f.args), ast.get_docstring(f)) for f in functions(file)]


@pytest.mark.parametrize("name", NAMES)
def test_each_page_has_an_exercise_to_write(name: str) -> None:
    """The file asks for what the solution does; every function is checked and has a text; the page says where it is,
    how long it takes and what data it needs."""
    exercise, solution = FOLDER / f"{name}.py", FOLDER / "solutions" / f"{name}.py"
    assert signatures(exercise) == signatures(solution)
    assert all(ast.unparse(f.body[1:]) == "raise NotImplementedError" for f in functions(exercise))
    asked = [name for name, _, text in signatures(exercise) if text]
    checked = [f.name for f in functions(FOLDER / "checks" / f"{name}.py")]
    assert asked == [name.removeprefix("check_") for name in checked if name.startswith("check_")]
    assert len(asked) == len(functions(exercise)) >= 3
    for file in (exercise, solution):
        head = ast.get_docstring(ast.parse(file.read_text("utf-8"))) or ""
        assert re.search(r"Time: .*Data:\s", head, re.DOTALL)
    page = (REPO / "docs" / "lectures" / f"{name}.md").read_text("utf-8")
    section = page.partition("\n## To write\n")[2].partition("\n## ")[0]
    assert f"(../../examples/lectures/exercises/{name}.py)" in section
    assert f"(../../examples/lectures/exercises/solutions/{name}.py)" in section
    assert f"\n$ python examples/lectures/exercises/grade.py {name[:2]}\n" in section
    assert re.search(r"hour|minutes", section)
    assert re.search(r"\bdata\b", section)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_grader(name: str, tmp_path: Path) -> None:
    """The solution passes. The unfilled file fails, and says of each function that it is not written."""
    solution = FOLDER / "solutions" / f"{name}.py"
    names = [f.name for f in functions(solution)]
    right = f"{len(names)} of {len(names)} functions are right"
    assert graded(name, solution) == (0, [f"{name}.py", *(f"  yes  {each}" for each in names), right])
    code, lines = graded(name)
    assert code == 1
    assert lines[-1] == f"0 of {len(names)} functions are right"
    assert {f"  no   {each}: not written yet" for each in names} == set(lines[1:-1])


@pytest.mark.slow
@pytest.mark.parametrize("body", EMPTY)
@pytest.mark.parametrize("name", NAMES)
def test_each_function_is_graded(
    name: str, body: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A solution of which one function is empty, returns nothing or ends with an error: the grader names it."""
    monkeypatch.syspath_prepend(FOLDER)
    from grade import grade  # pyright: ignore[reportMissingImports]

    solution = FOLDER / "solutions" / f"{name}.py"
    for function in functions(solution):
        tree = ast.parse(solution.read_text("utf-8"))
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and node.name == function.name:
                node.body = ast.parse(EMPTY[body]).body
        file = tmp_path / f"{name}.py"
        file.write_text(ast.unparse(tree), encoding="utf-8")
        lines, right = grade(name[:2], file)
        assert not right
        [line] = [line for line in lines if line.startswith(f"  no   {function.name}: ")]
        expected = {
            "missing": "not written yet",
            "error": "ends with ZeroDivisionError: division by zero, in line",
        }
        assert expected.get(body, "") in line


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # overflows
@pytest.mark.parametrize("name", NAMES)
def test_a_wrong_operator_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each solution with one + that is -, one / that is *, and so on: the grader passes none of them."""
    monkeypatch.syspath_prepend(FOLDER)
    import grade as grader  # pyright: ignore[reportMissingImports]

    monkeypatch.setattr(grader, "PATIENCE_S", PATIENCE_S)
    tree = ast.parse((FOLDER / "solutions" / f"{name}.py").read_text("utf-8"))
    tried = 0
    for function in (node for node in tree.body if isinstance(node, ast.FunctionDef)):
        for node in (node for part in function.body for node in ast.walk(part)):
            if not isinstance(node, ast.BinOp) or type(node.op) not in OTHER or ast.unparse(node) in AS_GOOD:
                continue
            right, node.op = node.op, OTHER[type(node.op)]()
            file = tmp_path / f"{name}.py"
            file.write_text(ast.unparse(tree), encoding="utf-8")
            assert not grader.grade(name[:2], file)[1], f"{function.name}: {ast.unparse(node)} passes"
            node.op, tried = right, tried + 1
    assert tried >= 3


@pytest.mark.slow
def test_what_cannot_be_graded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A file with an error, one without a function, a number that is none: a sentence each."""
    broken = tmp_path / "broken.py"
    broken.write_text("def rows(:\n", encoding="utf-8")
    code, [line] = graded("01", broken)
    assert code == 1
    assert line.startswith("broken.py cannot be run: SyntaxError: ")
    broken.write_text("def ring_bytes(ranks, size):\n    return size\n", encoding="utf-8")
    code, lines = graded("01", broken)
    assert code == 1
    assert "  no   rows: broken.py has no function of this name" in lines
    assert (
        "  no   ring_bytes: ring_bytes(1, 24) is 24, expected 0: each round sends an n-th of the bytes"
        in lines
    )
    broken.write_text("def rows(rank, ranks, batch):\n    while True:\n        pass\n", encoding="utf-8")
    monkeypatch.syspath_prepend(FOLDER)
    import grade as grader  # pyright: ignore[reportMissingImports]

    monkeypatch.setattr(grader, "PATIENCE_S", 1)
    lines, right = grader.grade("01", broken)
    assert "  no   rows: does not end within 1 s" in lines
    assert not right
    code, [line] = graded("99")
    assert code == 1
    assert line.startswith("there is no exercise '99'; there are: 01, 02,")
