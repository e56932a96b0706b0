"""Sizes by which kernels and techniques decide, data sheets and dtypes each stand in one table. The code executes it;
`plan` and the cards of `models`, which list what the planner prices, read it. All writes go through `files`."""

import ast
import operator
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from sources import FILES, SRC, name_of, room_of

from fivefold.kernels import sizes
from fivefold.models.operations import Sizes
from fivefold.recipe import load, resolve
from fivefold_plan import setting

TABLES = (
    "kernels/sizes.py",
    "sharding/layout.py",
    "sharding/units.py",
    "precision/card.py",
    "host/devices.py",
    "host/devices.toml",
)
ROOMS = ("plan", "models")
DISTINCT = 1 << 20  # smaller numbers mean many things: there the name must give it away
POWERS = {10.0**n for n in range(6, 16)}  # units, not sizes
OTHERS = {
    "LARGEST = 2**29\n",  # fivefold_plan/cluster/measured.py: the largest matmul that is timed
}
OPERATORS = {
    ast.LShift: operator.lshift,
    ast.Mult: operator.mul,
    ast.Pow: operator.pow,
    ast.Add: operator.add,
}


def value_of(node: ast.AST) -> float | None:
    """The number that an expression of literals stands for, or None."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        left, right = value_of(node.left), value_of(node.right)
        if (
            left is not None
            and right is not None
            and right < 64 + (not isinstance(node.op, ast.LShift)) * 1e12
        ):
            return OPERATORS[type(node.op)](left, right)
    return None


def constants(tree: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """(name, value) of everything that is assigned in capitals."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value:
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                names = target.elts if isinstance(target, ast.Tuple) else [target]
                values = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value] * len(names)
                for name, value in zip(names, values, strict=False):
                    if isinstance(name, ast.Name) and name.id.isupper():
                        yield name.id, value


def defaults(tree: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """(name, value) of fields and parameters with a default."""
    for node in ast.walk(tree):
        if isinstance(node, ast.AnnAssign) and node.value and isinstance(node.target, ast.Name):
            yield node.target.id, node.value
        elif isinstance(node, ast.FunctionDef | ast.Lambda):
            known = [*node.args.posonlyargs, *node.args.args]
            pairs = [
                *zip(known[::-1], node.args.defaults[::-1], strict=False),
                *zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True),
            ]
            yield from ((argument.arg, value) for argument, value in pairs if value)


@cache
def code_of(table: Path) -> str:
    """A table as Python."""
    text = table.read_text()
    return f"ROWS = {tomllib.loads(text)}" if table.suffix == ".toml" else text


@cache
def of_table(table: str) -> tuple[frozenset[str], frozenset[float]]:
    """The names and the telling values of its numbers."""
    names, values = set[str](), set[float]()
    for name, value in constants(ast.parse(table)):
        numbers = {n for n in map(value_of, ast.walk(value)) if n is not None}
        names |= {name} if numbers else set()  # not a list of words, such as AXES
        values |= {n for n in numbers if n >= DISTINCT}
    return frozenset(names), frozenset(values - POWERS)


def stated_again(code: str, tables: list[str]) -> list[str]:
    """What `code` states though one of the tables does."""
    names, values = (frozenset().union(*known) for known in zip(*map(of_table, tables), strict=True))
    tree = ast.parse(code)
    found = [f"{name} is assigned" for name, _ in constants(tree) if name in names]
    found += [f"{name} is set" for name, value in defaults(tree) if name.upper() in names and value_of(value)]
    return found + [
        f"line {node.lineno}: {ast.unparse(node)}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant | ast.BinOp) and value_of(node) in values
    ]


@pytest.mark.parametrize(
    "file",
    [file for file in FILES if room_of(name_of(file)) in ROOMS],
    ids=name_of,
)
def test_plan_states_no_size_again(file: Path) -> None:
    tables = [code_of(SRC / "fivefold" / table) for table in TABLES]
    code = file.read_text()
    for other in OTHERS:
        code = code.replace(other, "")
    assert not stated_again(code, tables), f"{file}: read it from {TABLES}"


@pytest.mark.parametrize(
    "code",
    [
        "MIN_ROWS = 1",
        "class A:\n    x: float = 16 * 2**20",
        "CHUNK = 25 << 20",
        "A, KEEP = 1, 2",
        "x = 16777216",
        "KEEP: int = 3",
        "class A:\n    keep: int = 4",
        "def f(a, min_rows=100): ...",
        "def f(*, keep: int = 8): ...",
    ],
)
def test_a_size_that_is_stated_again_is_found(code: str) -> None:
    assert stated_again(code, ["MIN_ROWS, KEEP = 128, 3\nA = {'cpu': 16 << 20}\nBUCKET_BYTES = 25 << 20"])


def test_the_planner_cuts_the_loss_as_the_kernel_does(monkeypatch: pytest.MonkeyPatch) -> None:
    model = resolve(load("quickstart"), vocab_size=4096).model
    s = Sizes(model, B=8, e=4)
    assert setting.FIVEFOLD_CPU.chunk_bytes == sizes.logits_bytes("cpu")
    assert setting.FIVEFOLD.chunk_bytes == sizes.logits_bytes("cuda")
    rows = 8 * model.seq_len
    assert s.loss_chunks(setting.FIVEFOLD_CPU, rows) == -(
        -rows // sizes.rows_at_once(rows, model.vocab_size or 0, model.dim, 4, sizes.logits_bytes("cpu"))
    )
    before = s.loss_chunks(setting.FIVEFOLD_CPU, rows)
    monkeypatch.setattr(sizes, "MIN_ROWS", 2 * rows)
    assert s.loss_chunks(setting.FIVEFOLD_CPU, rows) == 1 < before


# Calls that change files. A method of one argument named `replace` is a path's: text has two.
CHANGES = {
    "write_text",
    "write_bytes",
    "mkdir",
    "rmdir",
    "unlink",
    "rename",
    "touch",
    "symlink_to",
    "hardlink_to",
}
MODULES = {
    "os": {
        "replace",
        "rename",
        "renames",
        "remove",
        "unlink",
        "link",
        "symlink",
        "mkdir",
        "makedirs",
        "rmdir",
    },
    "shutil": {"rmtree", "move", "copy", "copy2", "copyfile", "copytree"},
    "np": {"save", "savez", "savetxt"},
    "torch": {"save"},
}
OTHER_WRITES = {  # what is written another way, and why
    ("checkpoint/dcp/write.py", "torch.save"): "into a file of `files`",
    ("parallel/offload/disk.py", "os.open"): "files without a name",
    **dict.fromkeys(
        [
            ("launch/verdict.py", "write_text"),
            ("launch/verdict.py", "temporary.replace"),
            ("launch/verdict.py", "touch"),
            ("launch/local.py", "mkdir"),
        ]
        + [("launch/local.py", call) for call in ("open", "os.open", "os.replace", "shutil.rmtree")],
        "a temporary folder of the launcher, gone with it",
    ),
    ("comm/watchdog.py", "os.open"): "what ranks post, in a temporary folder of the launcher",
    ("observe/console.py", "os.open"): "the null device",
    ("fivefold_plan/trace/gpu.py", "fdopen"): "the output of the process that traces",
    ("fivefold_play/talk.py", "fdopen"): "the output of the process with the model",
}


def writes(code: str) -> Iterator[tuple[int, str]]:
    """(line, call) of everything in `code` that changes a file."""
    for node in ast.walk(ast.parse(code)):
        if not isinstance(node, ast.Call):
            continue
        text, values = ast.unparse(node.func), [*node.args, *(keyword.value for keyword in node.keywords)]
        owner, _, name = text.rpartition(".")
        if owner == "files":  # the room's own
            continue
        literals = [v.value for v in values if isinstance(v, ast.Constant) and isinstance(v.value, str)]
        modes = [v for v in literals if len(v) <= 3 and set(v) <= set("rwaxbt+") and set(v) & set("wax+")]
        if (
            (owner and name in CHANGES and owner not in MODULES)
            or (owner and name == "replace" and len(values) == 1 and owner not in MODULES)
            or name in MODULES.get(owner, ())
            or name == "save_file"
            or (name in ("open", "fdopen") and modes)
            or (text == "os.open" and re.search("O_(WRONLY|RDWR|CREAT|TMPFILE)", ast.unparse(node)))
        ):
            yield node.lineno, name if name in CHANGES | {"fdopen", "save_file"} else text


def test_all_writes_go_through_files() -> None:
    """What a power cut may leave is replayed from what `files/writing.py` logs: see tests/chaos/power.py."""
    found = {
        (name_of(file).removeprefix("fivefold/"), call): line
        for file in FILES
        if not name_of(file).startswith("fivefold/files/")
        for line, call in writes(file.read_text())
    }
    assert found.keys() <= OTHER_WRITES.keys(), found


@pytest.mark.parametrize(
    "code",
    [
        "open(path, 'w')",
        "path.open('ab', buffering=0)",
        "path.open(mode='x')",
        "path.write_text(text)",
        "os.replace(a, b)",
        "a.replace(b)",
        "shutil.rmtree(folder)",
        "os.open(path, os.O_WRONLY | os.O_CREAT)",
        "folder.mkdir(parents=True)",
        "save_file(tensors, path)",
    ],
)
def test_another_way_to_write_is_found(code: str) -> None:
    assert list(writes(code))


def test_reading_is_no_write() -> None:
    code = (
        "open(p); open(p, 'rb'); p.open(); t.replace('a', 'b'); os.open(p, os.O_RDONLY); x.replace(self, a=1)"
    )
    assert not list(writes(code))
