"""docs/courses: what it tells to type can be typed, and each course has the numbers that it states."""

import re
import runpy
import shlex
import shutil
from pathlib import Path

import pytest
from commands import REPO, run
from test_readme import typed

PAGES = {
    path.stem: path for path in sorted((REPO / "docs" / "courses").glob("*.md")) if path.name != "README.md"
}
COURSES = {
    "LLM 101": "llm101",
    "systems": "systems",
    "language": "language",
    "playbook": "playbook",
    "guest": "guest",
}
SCRIPT = runpy.run_path(str(REPO / "docs" / "refresh_lectures.py"))
COMMAND = re.compile(r"`(fivefold [^`]*)`")
TRAINS = ("train", "verify", "bench")  # or measure


def told(page: Path) -> list[str]:
    return [command for command in COMMAND.findall(page.read_text(encoding="utf-8")) if "RUN" not in command]


@pytest.mark.parametrize("course", COURSES)
def test_a_course_has_its_numbers(course: str) -> None:
    page = PAGES[COURSES[course]]
    here = {
        int(n) for found in re.findall(r"\[([\d, ]+)\]", page.read_text("utf-8")) for n in found.split(",")
    }
    rows = SCRIPT["numbers"]((REPO / "docs" / "lectures" / "README.md").read_text(encoding="utf-8"))
    assert here == {row.number for row in rows if course in row.courses}


@pytest.mark.parametrize("name", PAGES)
def test_commands_can_be_typed(name: str) -> None:
    for command in told(PAGES[name]):
        if "--help" not in command:
            typed(shlex.split(command))


def test_options_of_techniques_stand_in_a_course() -> None:
    """One command each, of all courses together."""
    commands = "\n".join(command for page in PAGES.values() for command in told(page))
    words = (
        "round_microbatches=", "schedule=dualpipe,", "schedule=dualpipev,", "schedule=zb_h2", "schedule=zb_auto",
        "--draw keys_then_values", "--draw leaders", "--draw mesh_2d_whole", "--draw in_network",
        "offload_window=0,offload_update=early", "optim.estimator=gnb", "compress=",
    )  # fmt: skip
    assert [word for word in words if word not in commands] == []


@pytest.mark.parametrize("name", PAGES)
def test_programs_are_there(name: str) -> None:
    for program in re.findall(r"`python ([^\s`]+)", PAGES[name].read_text(encoding="utf-8")):
        assert (REPO / program).is_file(), program


@pytest.mark.slow
@pytest.mark.parametrize("name", PAGES)
def test_computing_commands_run(name: str, tmp_path: Path) -> None:
    """From the repository's root, each by itself: it succeeds, and prints something. Those of an earlier course are not
    run again. Programs succeed, too; those of kernels are run by page 18 of the lectures, where Triton is."""
    earlier = {command for page in [*PAGES][: [*PAGES].index(name)] for command in told(PAGES[page])}
    SCRIPT["place"](tmp_path)
    shutil.copy(REPO / "README.md", tmp_path)
    commands = [command for command in told(PAGES[name]) if command.split()[1] not in TRAINS]
    commands = [command for command in dict.fromkeys(commands) if command not in earlier]
    assert commands
    assert [command for command in commands if not run(command, tmp_path).strip()] == []
    for program in re.findall(
        r"`(python examples/(?!kernels)[^`]+)`", PAGES[name].read_text(encoding="utf-8")
    ):
        run(program, tmp_path)
