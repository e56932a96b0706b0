"""Makes a Jupyter notebook of each page of docs/lectures: `make notebooks`, or

    python docs/make_notebooks.py [--out build/notebooks] [PAGE...]

Prose becomes cells of text, commands become cells that run them from the repository root, with what the page says
that they print as their output. Start Jupyter in an environment that has Fivefold.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[1]
PAGES = runpy.run_path(str(REPO / "docs" / "refresh_lectures.py"))
FENCE = re.compile(r"^```(\w+)\n(.*?)^```\n?", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(\]\()(?!\w+:|#)([^)]+\))")
RUNS = ("console", "sh")


def notebook(page: Path, out: Path) -> dict[str, Any]:
    """The notebook of a page, in format 4.5 of nbformat. out: the folder that it will be in."""
    text, cells, end = page.read_text(encoding="utf-8"), [], 0
    root = os.path.relpath(REPO, out)
    start = "import os\nSTART = globals().get('START') or os.getcwd()"
    cells.append(_cell("code", f"{start}\nos.chdir(os.path.abspath(os.path.join(START, {root!r})))", []))
    for block in FENCE.finditer(text):
        if block[1] not in RUNS:
            continue  # it stays a part of the prose
        cells.append(_prose(text[end : block.start()], page, out))
        cells += _console(block[2]) if block[1] == "console" else [_cell("code", _shell(block[2]), [])]
        end = block.end()
    cells.append(_prose(text[end:], page, out))
    cells = [cell | {"id": f"cell-{number}"} for number, cell in enumerate(cells) if cell["source"]]
    python = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return {"cells": cells, "metadata": {"kernelspec": python}, "nbformat": 4, "nbformat_minor": 5}


def _console(block: str) -> Iterator[dict[str, Any]]:
    """A cell for each command, with what it prints."""
    written = [(lines, block.index(lines)) for lines, _ in PAGES["commands"](block)]
    for (lines, start), (_, stop) in zip(written, [*written[1:], ("", len(block))], strict=True):
        printed = block[start + len(lines) : stop].strip("\n") + "\n"
        yield _cell("code", _shell(lines.removeprefix("$ ")), [printed])


def _shell(lines: str) -> str:
    """Lines of a shell as those of a notebook. Continued ones stay together."""
    return re.sub(r"^(?=\S)", "!", lines.strip("\n"), flags=re.MULTILINE)


def _prose(text: str, page: Path, out: Path) -> dict[str, Any]:
    """Text, with links that lead from the notebook's folder to where the page's lead."""

    def moved(found: re.Match[str]) -> str:
        path, mark, anchor = found[2].partition("#")
        return f"{found[1]}{os.path.relpath(page.parent / path.rstrip(')'), out)}{')' * (not mark)}{mark}{anchor}"

    return _cell("markdown", LINK.sub(moved, text.strip("\n")))


def _cell(kind: str, source: str, printed: list[str] | None = None) -> dict[str, Any]:
    cell: dict[str, Any] = {"cell_type": kind, "metadata": {}, "source": source.splitlines(keepends=True)}
    if printed is not None:
        outputs = [{"output_type": "stream", "name": "stdout", "text": text} for text in printed]
        cell |= {"execution_count": None, "outputs": outputs}
    return cell


def main(pages: list[Path], out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    for page in pages:
        path = out / f"{page.stem}.ipynb"
        path.write_text(
            json.dumps(notebook(page, out), indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
        )
        print(path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Makes a notebook of each page of docs/lectures.")
    parser.add_argument("pages", nargs="*", type=Path, metavar="PAGE")
    parser.add_argument("--out", type=Path, default=REPO / "build" / "notebooks")
    typed = parser.parse_args()
    main(typed.pages or [page for page in PAGES["pages"]() if page.name != "README.md"], typed.out)
