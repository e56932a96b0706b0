"""docs/courses: what it tells to type can be typed, and each course has the numbers that it states."""

import re
import runpy
import shlex
from pathlib import Path

import pytest
from commands import REPO
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
NUMBERS = runpy.run_path(str(REPO / "docs" / "refresh_lectures.py"))["numbers"]
COMMAND = re.compile(r"`(fivefold [^`]*)`")


def told(page: Path) -> list[str]:
    return [command for command in COMMAND.findall(page.read_text(encoding="utf-8")) if "RUN" not in command]


@pytest.mark.parametrize("course", COURSES)
def test_a_course_has_its_numbers(course: str) -> None:
    page = PAGES[COURSES[course]]
    here = {
        int(n) for found in re.findall(r"\[([\d, ]+)\]", page.read_text("utf-8")) for n in found.split(",")
    }
    rows = NUMBERS((REPO / "docs" / "lectures" / "README.md").read_text(encoding="utf-8"))
    assert here == {row.number for row in rows if course in row.courses}


@pytest.mark.parametrize("name", PAGES)
def test_commands_can_be_typed(name: str) -> None:
    for command in told(PAGES[name]):
        if "--help" not in command:
            typed(shlex.split(command))


@pytest.mark.parametrize("name", PAGES)
def test_programs_are_there(name: str) -> None:
    for program in re.findall(r"`python ([^\s`]+)", PAGES[name].read_text(encoding="utf-8")):
        assert (REPO / program).is_file(), program
