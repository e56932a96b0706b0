"""Runs the commands of docs/lectures and docs/start and writes what they print under them, so that nobody types a
figure.

    python docs/refresh_lectures.py [PAGE...]

A block of kind `console` has lines `$ fivefold ...`, `$ python ...` or `$ torchrun ...`, each followed by what the
command prints. A command may end in `| grep [-A N] PATTERN`, `| head -N` or `| tail -N`, which leave out the other
lines. All commands start from the repository's root. The table of README.md has commands and parts of what they print;
those are typed by hand, because they are the lectures' own figures.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

from fivefold.cli.main import main as fivefold

FOLDER = Path(__file__).with_name("lectures")
PROGRAMS = FOLDER.parents[1] / "examples"
START = Path(__file__).with_name("start")
BLOCK = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SHOWN = re.compile(r"^```console\n\$ ", re.MULTILINE)
ROW = re.compile(r"^\| (\d+) \| (.*?) \| (.*?) \| (`fivefold .*?`) \| (.*?) \| (.*?) \|$", re.MULTILINE)
QUOTED = re.compile(r"`(.*?)`")
PATIENCE_S = 300  # for a program
COLUMNS = "80"  # of the terminal that commands see: what they also take where there is none


class Number(NamedTuple):
    """A row of the table: courses, their statement, the commands, parts of what they print, and the topic's page."""

    number: int
    courses: list[str]
    statement: str
    commands: list[str]
    prints: list[str]
    page: str


def pages() -> list[Path]:
    """The pages of the lectures, with their table first."""
    return sorted(FOLDER.glob("*.md"), key=lambda path: (path.name != "README.md", path.name))


def all_pages() -> list[Path]:
    """All pages with commands that show what they print."""
    first = (page for page in sorted(START.glob("*.md")) if SHOWN.search(page.read_text(encoding="utf-8")))
    return [*pages(), *first]


def refreshed(page: str) -> str:
    """The page with what its commands print now."""
    return BLOCK.sub(lambda found: f"```console\n{''.join(_lines(found[1]))}```", page)


def numbers(page: str) -> list[Number]:
    """The rows of the table of README.md."""
    found = (row.groups() for row in ROW.finditer(page))
    return [
        Number(int(number), courses.split(", "), says, QUOTED.findall(commands), QUOTED.findall(prints), link)
        for number, courses, says, commands, prints, link in found
    ]


def missing(row: Number) -> list[str]:
    """The parts that the row's commands do not print. Each command prints at least one of them."""
    there = [plain(printed(command)) for command in row.commands]
    silent = [
        command
        for command, text in zip(row.commands, there, strict=True)
        if not any(stands(part, text) for part in row.prints)
    ]
    return [part for part in row.prints if not any(stands(part, text) for text in there)] + silent


def stands(part: str, text: str) -> bool:
    """Whether a text has this part, in whole words and numbers: `1.9 GB` is not in `11.9 GB`. Spaces count as one."""
    return bool(re.search(rf"(?<![\w.,]){re.escape(plain(part))}(?!\w|[.,]\d)", text))


def plain(text: str) -> str:
    return " ".join(text.split())


def commands(block: str) -> Iterator[tuple[str, str]]:
    """(lines as written, the command in one line) of each command of a block."""
    written = ""
    for line in block.splitlines(keepends=True):
        if not written and not line.startswith("$ "):
            continue  # what a command printed when the page was written
        written += line
        if not line.endswith("\\\n"):
            yield written, re.sub(r"\\\n *", "", written)[2:].strip()
            written = ""


def _lines(block: str) -> Iterator[str]:
    """A block with what its commands print now."""
    for number, (written, command) in enumerate(commands(block)):
        yield ("\n" if number else "") + written
        yield from (f"{line}\n" for line in shown(command))


def shown(command: str) -> list[str]:
    """The lines that a command prints and its filters let through, without spaces at their ends."""
    program, *filters = _split(shlex.split(command))
    lines = [line.rstrip() for line in printed(shlex.join(program)).strip("\n").splitlines()]
    for words in filters:
        lines = _filtered(words, lines)
    if not lines or lines[0].startswith("Usage:"):
        raise ValueError(f"nothing to show of: {command}\n" + "\n".join(lines))
    return lines


def _split(words: list[str]) -> Iterator[list[str]]:
    """The commands of a pipeline."""
    ends = [i for i, word in enumerate(words) if word == "|"]
    for start, end in zip([-1, *ends], [*ends, len(words)], strict=True):
        yield words[start + 1 : end]


def _filtered(words: list[str], lines: list[str]) -> list[str]:
    """What `grep -E`, `head` or `tail` would print of these lines."""
    match words:
        case ["grep", "-A", number, pattern]:
            starts = [i for i, line in enumerate(lines) if re.search(pattern, line)]
            return [line for i, line in enumerate(lines) if any(s <= i <= s + int(number) for s in starts)]
        case ["grep", "-E", pattern] | ["grep", pattern]:
            return [line for line in lines if re.search(pattern, line)]
        case ["head", number]:
            return lines[: int(number[1:])]
        case ["tail", number]:
            return lines[-int(number[1:]) :]
    raise ValueError(f"not a filter of these pages: {shlex.join(words)}")


@cache
def printed(command: str) -> str:
    """What a command prints, run in a folder that has what the pages' commands read, as the repository's root has
    it."""
    with tempfile.TemporaryDirectory() as folder:
        there = Path(folder)
        place(there)
        words = shlex.split(command)
        return _here(words[1:], there) if words[0] == "fivefold" else _beside(words, there)


def place(folder: Path) -> None:
    """Puts into a folder what the pages' commands read, as the repository's root has it."""
    shutil.copytree(FOLDER, folder / "docs/lectures", ignore=shutil.ignore_patterns("*.md"))
    shutil.copytree(PROGRAMS, folder / "examples", ignore=shutil.ignore_patterns("__pycache__"))


def _here(arguments: list[str], folder: Path) -> str:
    """What `fivefold` prints, run in this process."""
    out = io.StringIO()
    with contextlib.ExitStack() as stack:
        stack.enter_context(patch.dict(os.environ, COLUMNS=COLUMNS))
        for way in (
            contextlib.chdir(folder),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(out),
        ):
            stack.enter_context(way)
        stack.enter_context(contextlib.suppress(SystemExit))  # also that of a refusal, which a page may show
        fivefold(arguments)
    return out.getvalue()


def _beside(words: list[str], folder: Path) -> str:
    """What a program prints, run by this Python. It may end with an error that it says itself, as a grader does."""
    found = {"python": [], "torchrun": ["-m", "torch.distributed.run"]}
    if words[0] not in found:
        raise ValueError(f"not a program of these pages: {shlex.join(words)}")
    env = {"OMP_NUM_THREADS": "1", "PET_STANDALONE": "1", "COLUMNS": COLUMNS}  # standalone: at any free port
    started = [sys.executable, *found[words[0]], *words[1:]]
    done = subprocess.run(
        started, cwd=folder, env={**os.environ, **env}, capture_output=True, text=True, timeout=PATIENCE_S
    )
    if "Traceback" in done.stderr or not done.stdout:
        raise ValueError(f"{shlex.join(words)} failed:\n{done.stderr}")
    return done.stdout


def main(paths: list[Path]) -> None:
    for path in paths:
        text = path.read_text(encoding="utf-8")
        path.write_text(refreshed(text), encoding="utf-8")
        for row in numbers(text):
            if gone := missing(row):
                print(f"{path.name}, number {row.number}: not printed: {gone}")


if __name__ == "__main__":
    main([Path(name) for name in sys.argv[1:]] or all_pages())
