"""The documentation is true: its commands run, its links lead somewhere, its reference is that of the schema.

Each document's commands run in their order in a folder of their own, on tiny settings. A block under
`<!-- cluster -->` needs more than one machine: its commands are only parsed.
"""

import io
import json
import re
import runpy
import shlex
import sys
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import typer
from commands import REPO, run
from launched import command
from sources import FILES, LINES, name_of, room_of

import fivefold
from fivefold.cli.main import app, main

PAGES = [REPO / "README.md", REPO / "CONTRIBUTING.md", *sorted((REPO / "docs").rglob("*.md"))]
RUN = [page for page in PAGES if page.parent.name != "lectures"]  # test_lectures.py compares what those print
FENCE = re.compile(r"^(<!-- cluster -->\n)?```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SHOWN = re.compile(
    r"^```\n(fivefold .*?)^```$", re.MULTILINE | re.DOTALL
)  # commands that take too long for a test
IN_TEXT = re.compile(r"`fivefold ([a-z]+)\b([^`]*)`")
TINY = [
    "model.layers=2", "model.dim=32", "model.heads=2", "model.seq_len=16", "model.vocab_size=260",
    "data.source=my_texts/",
    "data.tokenizer=bytes", "train.global_batch_size=4", "train.val_sequences=4", "train.sample_tokens=8",
    "observe.tracker=none", "layout.dp_replicate=1",
]  # fmt: skip
SEVERAL_RANKS = re.compile(r"--nproc|--layout|torchrun")
INSTEAD = {
    ". .venv/bin/activate": "test -f Makefile || type fivefold",  # the programs are in PATH already
    ".venv/bin/pre-commit install": f"pre-commit validate-config {REPO}/.pre-commit-config.yaml",
}
SMALLER = {  # fewer layouts; test_plan_page.py and test_plan_search.py look at many
    "h100:8 --layout dp=8 --html": "h100:1 --layout dp=1 --html",
    "h100:64 --deadline 30d": "h100:4 --deadline 900d",
}
STARTS_RANKS = re.compile(r"fivefold (train|verify) .*(--nproc|--layout)")
COMMANDS: Any = typer.main.get_command(app).commands  # type: ignore[attr-defined]
already_run: set[str] = set()  # lines with several ranks that two documents share


class Block(NamedTuple):
    kind: str
    text: str
    cluster: bool


def blocks(page: Path) -> list[Block]:
    found = FENCE.findall(page.read_text(encoding="utf-8"))
    return [Block(kind, text, bool(cluster)) for cluster, kind, text in found]


def lines(block: Block) -> list[str]:
    return block.text.replace("\\\n", " ").splitlines()


def tiny(given: str) -> list[str]:
    """The tiny settings of fields that a command does not set itself."""
    return [setting for setting in TINY if setting.partition("=")[0] + "=" not in given]


def scaled_down(line: str) -> str:
    if re.match("fivefold (chat|generate) ", line) and "--max-tokens" not in line:
        return f"{line} --max-tokens 4"
    for long, short in SMALLER.items():
        line = line.replace(long, short)
    if not re.search("fivefold (train|verify|draw|sweep)", line) or re.fullmatch(
        r"fivefold draw run(s/\w+)?( --out \w+)?", line
    ):
        return line
    if "--resume" in line:
        return f"{line} --set train.steps=5"
    settings = [*tiny(line), "train.steps=3"]
    if SEVERAL_RANKS.search(line):
        settings.remove("layout.dp_replicate=1")
    return " ".join([line, *(f"--set {setting}" for setting in settings)])


def execute(line: str, folder: Path) -> None:
    """Runs a command: in this process, or, if it starts ranks, in one that is forked from a process which has imported
    torch, because that import is most of their time."""
    line = scaled_down(INSTEAD.get(line, line))
    if line.startswith("make "):
        execute_make(line, folder)
    elif program := re.match(r"torchrun .* (examples/lectures/\w+\.py)", line):
        assert f"\n{line}" in (REPO / program[1]).read_text()  # test_lecture_programs.py runs it
    elif said := re.fullmatch(r"echo '([^']*)' \| (fivefold chat .*)", line):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("sys.stdin", io.StringIO(said[1] + "\n"))
            execute(said[2], folder)
    elif "fivefold play" in line:  # which serves until it is stopped; test_play_server.py starts it
        words = shlex.split(line)
        typed(words[words.index("fivefold") :])
    elif not line.startswith("fivefold ") or ">" in line:
        if line not in already_run:
            run(line, folder)
        if SEVERAL_RANKS.search(line):
            already_run.add(line)
    elif STARTS_RANKS.search(line):
        if line not in already_run:
            started = command(folder / "printed.log", *shlex.split(line)[1:], folder=folder)
            assert started.wait(120) == 0, f"{line}\n{started.said}"
        already_run.add(line)
    else:
        with pytest.raises(SystemExit) as stop:
            main(shlex.split(line)[1:])
        assert not stop.value.code, line


def execute_make(line: str, folder: Path) -> None:
    """`make train` trains, with the environment of the tests; the others only say what they would run."""
    stamps = "-o .venv/.installed -o .venv/.installed-test -o .venv/.installed-docs"
    if line == "make train":
        sets = " ".join(f"--set {setting}" for setting in [*TINY[:-1], "train.steps=3"])
        run(f"ln -s {shlex.quote(sys.prefix)} .venv", folder)
        printed = run(f"make -f {REPO}/Makefile {stamps} train ARGS='{sets}'", folder)
        assert "runs/quickstart-1/report.html" in printed
        return
    planned = run(f"make -n {stamps} {line.removeprefix('make ')}", REPO)
    wanted = {
        "make test": ["-m pytest"],
        "make check": ["ruff format --check", "ruff check", "pyright"],
        "make docs": ["-m mkdocs"],
        "make test-chaos": ["tests/chaos/run.py kills --number 100"],
        "make test-chaos KILLS=300 SEED=2": ["tests/chaos/run.py kills --number 300 --seed 2"],
    }
    assert all(part in planned for part in wanted[line.partition("#")[0].strip()])


def parse_only(line: str) -> None:
    """What a command for a cluster says to fivefold: known options, a recipe and changes that are valid. Files that it
    names are there."""
    words = shlex.split(line.replace("$FIVEFOLD_DEPLOY/", "deploy/"))
    if words[0] == "export":
        wheel = tomllib.loads((REPO / "pyproject.toml").read_text())["tool"]["setuptools"]["data-files"]
        assert words[1].removeprefix("FIVEFOLD_DEPLOY=$VIRTUAL_ENV/") in wheel, line
        return
    if words[:2] == ["docker", "run"]:
        words = ["fivefold" if word.startswith("fivefold:") else word for word in words]
    named = [word for word in words if word.startswith("deploy/")]
    assert all((REPO / name).is_file() for name in named), line
    if named or words[0] == "kubectl":
        return
    typed(words[words.index("fivefold") :])


def typed(words: list[str]) -> None:
    """What somebody types: a command with known options, and a valid recipe."""
    name = " ".join(words[1:3]) if " ".join(words[1:3]) in COMMANDS else words[1]
    found = COMMANDS[name].make_context(name, words[1 + len(name.split()) :]).params
    if found.get("recipe") in fivefold.shipped():
        fivefold.load(found["recipe"], found["set_"] or [], found.get("layout"))


def check_python(block: Block, monkeypatch: pytest.MonkeyPatch) -> None:
    load = fivefold.load
    small = lambda name, sets=(), layout=None: load(name, [*tiny(" ".join(sets)), *sets], layout)  # noqa: E731
    monkeypatch.setattr(fivefold, "load", small)
    exec(compile(block.text, "documentation", "exec"), {"__name__": "__main__"})
    monkeypatch.setattr(fivefold, "load", load)


@pytest.mark.slow
@pytest.mark.parametrize("page", RUN, ids=lambda page: page.name)
def test_commands(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    if "fivefold bench collectives" in page.read_text():  # training goes by its table; other tests must not
        monkeypatch.setenv("FIVEFOLD_CACHE", str(tmp_path / "cache"))
    for folder in ("my_texts", "tokens"):
        Path(folder).mkdir()
    Path("examples").symlink_to(REPO / "examples")
    for name in ("one.txt", "two.txt"):
        Path("my_texts", name).write_text("the quick brown fox jumps over the lazy dog. " * 200)
    np.arange(40_000, dtype="<u2").tofile("tokens/train.bin")
    talk = [
        {"role": "user", "content": "What is it?"},
        {"role": "assistant", "content": "A test of the page."},
    ]
    Path("talks.jsonl").write_text((json.dumps({"messages": talk}) + "\n") * 40)
    Path("prompts.jsonl").write_text(f'{{"prompt": "It is"}}\n{json.dumps({"messages": talk[:1]})}\n')
    for block in blocks(page):
        if block.cluster:
            for line in lines(block):
                parse_only(line)
        elif block.kind == "console":
            assert block.text.startswith("$ ")  # test_lectures.py compares what it prints
        elif block.kind == "sh":
            for line in lines(block):
                execute(line, tmp_path)
        elif block.kind == "python":
            check_python(block, monkeypatch)
        elif block.kind == "json":
            json.loads(block.text)
        elif block.kind == "toml":
            Path("recipe.toml").write_text(block.text, encoding="utf-8")
            fivefold.load("recipe.toml")
        else:
            raise AssertionError(f"{page.name}: a block of kind {block.kind}: nothing checks it")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_that_are_not_run_can_be_typed(page: Path) -> None:
    """Those in blocks without a kind, and the options of those in sentences."""
    text = page.read_text(encoding="utf-8")
    for block in SHOWN.findall(text):
        for line in block.replace("\\\n", " ").splitlines():
            typed(shlex.split(line)) if line.startswith("fivefold ") else None
    for name, rest in IN_TEXT.findall(text):
        second = (rest.split() or [""])[0]
        command = COMMANDS.get(f"{name} {second}", COMMANDS[name])
        inner = getattr(command, "commands", {}).get(second, command)
        known = {
            option for parameter in inner.params for option in (*parameter.opts, *parameter.secondary_opts)
        }
        assert set(re.findall(r"(?<!\S)--[a-z][\w-]*", rest)) <= known | {"--help"}, f"fivefold {name}{rest}"


def test_the_first_screen_of_the_readme() -> None:
    assert blocks(REPO / "README.md")[0] == Block("sh", "make train\nmake test\n", False)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#\s]+)", text):
        assert target.startswith("https://") or (page.parent / target).exists(), target


def test_the_readme_is_short() -> None:
    text = (REPO / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 105, "two screens"


def test_measured_figures_are_those_of_their_files() -> None:
    script = runpy.run_path(str(REPO / "docs" / "fill_figures.py"))
    for page in script["pages"]():
        text = page.read_text(encoding="utf-8")
        assert script["filled"](text) == text, f"{page.name}: run: python docs/fill_figures.py"
    text = (REPO / "README.md").read_text(encoding="utf-8")
    assert len(script["FIGURE"].findall(text)) <= 12
    prose = re.sub(
        r"```.*?```|\]\([^)]*\)|Python 3\.\d+", "", script["FIGURE"].sub("", text), flags=re.DOTALL
    )
    assert re.findall(r"\d+\.\d+|\d+ (?:times|seconds|minutes|tokens)", prose) == ["2.0"], (
        "the license has no marks"
    )


def test_figures_are_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stale figure is written again, in a sentence and in a table; a file without it is an error."""
    script = runpy.run_path(str(REPO / "docs" / "fill_figures.py"))
    data = {"mean": 1.5, "rows": {"a": {"x": 1.25, "y": {"z": 2000}}, "b, c": {"x": 3, "y": {"z": 4}}}}
    monkeypatch.setitem(script["filled"].__globals__, "result", {"f.json": data}.__getitem__)
    text = "<!-- figure f.json {} -->0<!--/--> or\n\n<!-- figures f.json rows x .1f | y/z ,d -->\n"
    text += "| | x | z |\n|---|--:|---|\n| a | 0 | 0 |\n| `b, c` | | |\n\nend"
    found = script["filled"](text.format("max(rows/*/x) .1f"))
    assert "-->3.0<!--/-->" in found
    assert "|--:|---|\n| a | 1.2 | 2,000 |\n| `b, c` | 3.0 | 4 |\n\nend" in found
    assert script["filled"](found) == found
    for lacks in ("median .1f", "rows/*/x .1f"):
        with pytest.raises(KeyError, match=r"f\.json has (0|2) values"):
            script["filled"](text.format(lacks))


def test_the_page_of_the_wheel_stands_alone() -> None:
    text = runpy.run_path(str(REPO / "setup.py"))["page"]()
    project = tomllib.loads((REPO / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    links = re.findall(r"\]\(([^)\s]+)\)", text)
    assert links
    for link in links:
        path = link.removeprefix(project["urls"]["Repository"])
        found = re.match(r"/(blob|raw)/main/([^#]+)", path)
        assert found, f"{link} leads nowhere from the wheel's page"
        assert (REPO / found[2]).exists(), link
    assert "<!--" not in text
    assert "make train" not in text, "the wheel has no Makefile"
    assert text.index("pip install 'fivefold[play]'") < text.index("## ")
    assert all(link.startswith(project["urls"]["Repository"]) for link in project["urls"].values())
    assert project["authors"]
    assert {f"Programming Language :: Python :: 3.{minor}" for minor in (11, 13)} <= {*project["classifiers"]}


def test_a_page_names_every_recipe() -> None:
    text = (REPO / "docs" / "models.md").read_text(encoding="utf-8")
    assert [name for name in fivefold.shipped() if f"`{name}`" not in text] == []


@pytest.mark.parametrize("name", ["first_run", "talk"])
def test_the_terminal_shows_what_was_recorded(name: str) -> None:
    script = runpy.run_path(str(REPO / "docs" / "terminal_picture.py"))
    picture = (REPO / "docs" / "pictures" / f"{name}.svg").read_text(encoding="utf-8")
    assert script[name]() == picture, "run: python docs/make_pictures.py"


@pytest.mark.slow
def test_the_support_matrix_is_current() -> None:
    script = runpy.run_path(str(REPO / "docs" / "make_support_matrix.py"))
    page = (REPO / "docs" / "support.md").read_text(encoding="utf-8")
    assert script["page"]() == page, "run: python docs/make_support_matrix.py"


def test_the_table_of_rooms_is_that_of_the_code() -> None:
    text = (REPO / "docs" / "architecture.md").read_text(encoding="utf-8")
    table = [
        set(re.findall(r"`([\w.]+)`", rooms))
        for rooms in re.findall(r"^\| \d+ \| (.*?) \|", text, re.MULTILINE)
    ]
    assert table == [rooms for rooms in LINES if "__main__" not in rooms]
    assert set().union(*LINES) == {room_of(name_of(file)) for file in FILES}
    assert text.count("\n") <= 120, "a map: how to add things has pages of its own"


def test_the_reference_of_recipes_is_current() -> None:
    script = runpy.run_path(str(REPO / "docs" / "make_recipe_reference.py"))
    page = (REPO / "docs" / "recipes.md").read_text(encoding="utf-8")
    assert script["with_fields"](page) == page, "run: python docs/make_recipe_reference.py"
    planner = (REPO / "docs" / "planner.md").read_text(encoding="utf-8")
    assert script["with_keys"](planner) == planner, "run: python docs/make_recipe_reference.py"
