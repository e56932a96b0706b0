"""Writes measured figures into README.md and the pages, from the files of benchmarks/results.

    python docs/fill_figures.py [--check]

A figure in a sentence stands between marks: `<!-- figure best.json geometric_mean .2f -->1.10<!--/-->`. The first
mark says the file, the path in it and the format. Steps of a path are divided by `/`, and `*` takes every member.
`max(summary/*/ratio)` is one figure of many; there are `min`, `median` and `len`, too.

A table behind `<!-- figures best.json summary ratio .2f | fivefold/peak_mib ,.0f -->` gets its cells but the first from
these paths below `summary/FIRST CELL`, a path and a format per column. Of a first cell with code only the code counts.
--check only compares (exit code 1).
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

REPO = Path(__file__).resolve().parents[1]
RESULTS = REPO / "benchmarks" / "results"
FIGURE = re.compile(r"(<!-- figure (\S+) (.+?) (\S+) -->)(.*?)(<!--/-->)", re.DOTALL)
TABLE = re.compile(r"(<!-- figures (\S+) (.+?) (\S+ \S+(?: \| .+?)?) -->\n\|.*\n\|[-|: ]+\n)((?:\|.*\n)+)")
OF_MANY: dict[str, Callable[[list[Any]], Any]] = {"min": min, "max": max, "median": median, "len": len}


@cache
def result(name: str) -> Any:
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def found(data: Any, steps: list[str]) -> list[Any]:
    """All values at a path; of members that lack it, none."""
    if not steps:
        return [data]
    members = {str(number): each for number, each in enumerate(data)} if isinstance(data, list) else data
    if not isinstance(members, dict):
        return []
    first, *rest = steps
    chosen = members.values() if first == "*" else [members[first]] if first in members else []
    return [value for each in chosen for value in found(each, rest)]


def shown(file: str, path: str, form: str) -> str:
    """One figure. Raises KeyError if the file has none, or several without a word on which."""
    reduced = re.fullmatch(r"(min|max|median|len)\((.*)\)", path)
    values = found(result(file), (reduced[2] if reduced else path).split("/"))
    if not values or (not reduced and len(values) > 1):
        raise KeyError(f"benchmarks/results/{file} has {len(values)} values at {path!r}")
    return format(OF_MANY[reduced[1]](values) if reduced else values[0], form)


def filled(text: str) -> str:
    """A page with all figures as the files have them."""

    def table(match: re.Match[str]) -> str:
        head, file, below, columns, rows = match.groups()
        wanted = [column.rsplit(" ", 1) for column in columns.split(" | ")]

        def row(line: str) -> str:
            first = line.split("|")[1].strip()
            key = re.search(r"`(.+)`", first)
            of = f"{below}/{key[1] if key else first}"
            cells = [shown(file, f"{of}/{path}", form) for path, form in wanted]
            return f"| {' | '.join([first, *cells])} |\n"

        return head + "".join(row(line) for line in rows.splitlines())

    text = FIGURE.sub(lambda match: match[1] + shown(match[2], match[3], match[4]) + match[6], text)
    return TABLE.sub(table, text)


def pages() -> list[Path]:
    return [REPO / "README.md", *sorted((REPO / "docs").rglob("*.md"))]


def main() -> int:
    stale = [page for page in pages() if filled(page.read_text(encoding="utf-8")) != page.read_text("utf-8")]
    for page in stale:
        print(f"{page.relative_to(REPO)} has other figures than benchmarks/results")
        if "--check" not in sys.argv[1:]:
            page.write_text(filled(page.read_text(encoding="utf-8")), encoding="utf-8")
    return bool(stale and "--check" in sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
