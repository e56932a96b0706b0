"""docs/lectures and docs/start are true: their commands print what the pages show. The sentences of lectures state no
other figures."""

import json
import re
import runpy
import shlex
from pathlib import Path

import pytest
from commands import REPO
from lessons import without
from test_readme import FENCE, blocks, lines, typed

SCRIPT = runpy.run_path(str(REPO / "docs" / "refresh_lectures.py"))
PAGES = SCRIPT["pages"]()
TOPICS = [page for page in PAGES if page.name != "README.md"]
NAMES = {page.name for page in TOPICS}
COURSES = ("LLM 101", "systems", "language", "playbook", "guest")
QUOTED = re.compile(r"\$\$.*?\$\$|\$[^$]+\$|`[^`]*`|\]\([^)]*\)|arXiv [\d., and]+", re.DOTALL)  # no sentences
FIGURE = re.compile(
    r"(?<![\w.,-])\d[\d,.]*\d(?![\w-])|(?<![\w.,-])\d+(?=%)"
)  # of two digits or more, or a share


def name_of(page: Path) -> str:
    return page.stem


@pytest.mark.slow
@pytest.mark.parametrize("page", SCRIPT["all_pages"](), ids=name_of)
def test_a_page_shows_what_its_commands_print(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = page.read_text(encoding="utf-8")
    if reason := without(text):
        pytest.skip(reason)
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # also where there is a GPU
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    assert SCRIPT["refreshed"](text) == text, f"run: python docs/refresh_lectures.py {page}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_other_commands_can_be_typed(page: Path) -> None:
    """Those that train or measure: known options, valid recipes, programs that are there."""
    for block in blocks(page):
        assert block.kind in ("console", "sh", "text"), f"{block.kind}: nothing checks it"
        for line in lines(block) if block.kind == "sh" else ():
            if not line.startswith(("python ", "torchrun ")):
                typed(shlex.split(line))
        for line in block.text.splitlines():
            if line.removeprefix("$ ").startswith(("python ", "torchrun ")):
                files = [word for word in shlex.split(line) if word.endswith(".py")]
                assert files
                assert all((REPO / file).is_file() for file in files), (
                    f"{line}: not from the repository's root"
                )


def test_programs_are_shown_from_one_folder() -> None:
    """What a program prints is run where its path begins, as commands of `fivefold` are; a filter of lines may follow.
    Nobody has to change the folder. A program that fails, and a command of no known program, are errors."""
    said = SCRIPT["shown"]("python examples/lectures/exercises/grade.py 06 | tail -1")
    assert said == ["0 of 5 functions are right"]
    assert not any(
        "\ncd " in block.text or block.text.startswith("cd ") for page in PAGES for block in blocks(page)
    )
    with pytest.raises(ValueError, match=r"No such file"):
        SCRIPT["shown"]("python examples/lectures/none.py")
    with pytest.raises(ValueError, match="not a program of these pages: ls"):
        SCRIPT["shown"]("ls docs")


def test_the_34_numbers_of_the_lectures() -> None:
    rows = SCRIPT["numbers"](PAGES[0].read_text(encoding="utf-8"))
    assert [row.number for row in rows] == list(range(1, 35))
    assert all(row.prints for row in rows)
    assert {course for row in rows for course in row.courses} < set(COURSES)
    assert {row.number: gone for row in rows if (gone := SCRIPT["missing"](row))} == {}


def test_parts_are_whole_words_and_numbers() -> None:
    stands = SCRIPT["stands"]
    text = "ZeRO 3  16 Psi / n  11.9 GB (2.5 GiB), a string of 1,9000.5 and (64.0 GiB) +33.3%: twice"
    assert stands("11.9  GB", SCRIPT["plain"](text))
    assert all(stands(part, text) for part in ("(64.0 GiB)", "+33.3%: twice", "2.5 GiB", "string"))
    assert not any(stands(part, text) for part in ("1.9 GB", "ring", "9000", "9000.5", "1", "+33", "11"))


def test_the_sweep_shown_is_the_measured_one() -> None:
    """The table beside the pages is that of benchmarks/scaling.py."""
    shown = json.loads((REPO / "docs" / "lectures" / "scaling" / "sweep.json").read_text())["runs"]
    measured = json.loads((REPO / "benchmarks" / "results" / "scaling.json").read_text())["law"]["runs"]
    assert [(run["name"], run["figures"]["val_loss"]) for run in shown] == [
        (run["name"], run["val_loss"]) for run in measured
    ]


def test_every_topic_is_two_clicks_from_the_readme() -> None:
    """The table of topics and numbers, then the topic."""
    assert "](docs/lectures/README.md)" in (REPO / "README.md").read_text(encoding="utf-8")
    text = PAGES[0].read_text(encoding="utf-8")
    assert set(re.findall(r"\]\((\w+\.md)", text)) >= NAMES


@pytest.mark.parametrize("page", TOPICS, ids=name_of)
def test_a_topic_has_its_parts(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert "$$" in text, "a formula"
    assert re.search(r"!\[.+\]\(.+\)", text), "a picture"
    exercises, _, answers = text.partition("## Exercises")[2].partition("## Answers")
    assert re.findall(r"^(\d)\. ", exercises, re.MULTILINE) == ["1", "2", "3"]
    assert re.findall(r"^\*\*(\d)\.\*\*", answers, re.MULTILINE) == ["1", "2", "3"]
    assert answers.count("\n$ fivefold ") >= 3, "each answer has a command"


@pytest.mark.parametrize("page", TOPICS, ids=name_of)
def test_sentences_state_figures_that_commands_print(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    shown = "\n".join(block.text for block in blocks(page))
    told = FIGURE.findall(QUOTED.sub(" ", FENCE.sub(" ", text)))
    assert [
        figure for figure in told if not re.search(rf"(?<![\d.]){re.escape(figure)}(?![\d])", shown)
    ] == []
