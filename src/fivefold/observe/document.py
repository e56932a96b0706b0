"""The frame of a page: one HTML file that needs no network and runs no script but its own."""

from __future__ import annotations

import base64
import hashlib
import time
from collections.abc import Iterable, Sequence
from html import escape
from importlib import metadata, resources

from fivefold.errors import printable


def asset(name: str) -> str:
    """A style sheet or script of the package."""
    return resources.files("fivefold.observe").joinpath("page", name).read_text("utf-8")


def document(title: str, body: str, style: str, script: str) -> str:
    """The page. title: text. body: HTML, in which everything foreign is escaped. Controls are made printable here.

    A content security policy forbids the page to load anything and to run any script but this one.
    """
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; \
script-src 'sha256-{digest}'; base-uri 'none'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="referrer" content="no-referrer">
<title>{escape(printable(title))}</title>
<style>{style}</style>
</head>
<body>
{printable(body)}
<footer>Written by Fivefold {escape(metadata.version("fivefold"))}, {time.strftime("%Y-%m-%d %H:%M")}.
This file needs no network.</footer>
<script>{script}</script>
</body>
</html>
"""


def table(titles: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table. rows: cells as text; the first one names its row. All are escaped."""
    cells = ([escape(printable(str(cell))) for cell in row] for row in rows)
    return html_table(titles, ((first, [f"<td>{cell}</td>" for cell in others]) for first, *others in cells))


def html_table(titles: Sequence[str], rows: Iterable[tuple[str, Sequence[str]]]) -> str:
    """A table. rows: HTML of the cell that names the row, the other cells with their tags."""
    head = "".join(f'<th scope="col">{escape(title)}</th>' for title in titles)
    body = "".join(f'<tr><th scope="row">{first}</th>{"".join(cells)}</tr>\n' for first, cells in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>\n{body}</tbody></table>"


def section(title: str, body: str) -> str:
    """A section of the page; "" without a body."""
    name = title.lower().replace(" ", "-")
    return (
        f'<section aria-labelledby="{name}"><h2 id="{name}">{title}</h2>\n{body}\n</section>\n'
        if body
        else ""
    )
