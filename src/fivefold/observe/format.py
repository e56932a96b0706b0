"""Formats numbers, tables and pages for people: on the console, and as HTML files that need no network."""

from __future__ import annotations

import base64
import hashlib
import math
import time
from collections.abc import Container, Iterable, Sequence
from html import escape
from pathlib import Path

from fivefold.errors import printable


def short_number(value: float) -> str:
    """Four significant digits and a thousands letter: 8.03B, 13.82M, 1,234, 950. Else `nan`, `inf`, `-inf`."""
    if not math.isfinite(value):
        return str(float(value))
    for factor, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= factor:
            return f"{value / (1e3 if letter == 'k' else factor):.4g}{letter}"
    return f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"


def size(value: float) -> str:
    """Bytes in binary units, three digits: `1.25 GiB`, `12.5 MiB`, `125 KiB`."""
    for factor, unit in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if abs(value) >= factor:
            scaled = value / factor
            return f"{scaled:.{2 if scaled < 10 else 1 if scaled < 100 else 0}f} {unit}"
    return f"{value:.0f} B"


def memory_text(value: float) -> str:
    """Bytes of a device's memory, one decimal: `75.4 GiB`, and below one `84.6 MiB`."""
    return f"{value / 2**30:.1f} GiB" if value >= 2**30 else f"{value / 2**20:.1f} MiB"


def duration(seconds: float) -> str:
    """A time in its two largest units: `0.4s`, `42s`, `3m05s`, `4d03h`, `266d` from 100 days on, `12y` from
    1000; `?` if not known."""
    if not math.isfinite(seconds) or seconds < 0:
        return "?"
    if seconds < 9.95:
        return f"{seconds:.1f}s"
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    days, h = divmod(hours, 24)
    if days >= 1000:
        return f"{days / 365.25:,.0f}y"
    if days >= 100:
        return f"{days}d"
    return f"{days}d{h:02d}h" if days else f"{h}h{m:02d}m" if h else f"{m}m{s:02d}s" if m else f"{s}s"


def aligned(rows: Sequence[Sequence[str]], left: Container[int] | None = None) -> list[str]:
    """Rows of a table as lines, all with as many cells. left: the columns of text, by default all; the cells of others
    end below each other."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            f"{cell:{width}}" if left is None or place in left else f"{cell:>{width}}"
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def asset(name: str) -> str:
    """A style sheet or script of the package."""
    return (Path(__file__).parent / "page" / name).read_text("utf-8")


def document(title: str, body: str, style: str, script: str) -> str:
    """The page. title: text. body: HTML, in which everything foreign is escaped. Controls are made printable here.

    A content security policy forbids the page to load anything and to run any script but this one.
    """
    from importlib import metadata  # it takes 20 ms

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


def header(kicker: str, title: str, lead: str, more: str = "") -> str:
    """The head of a page. more: HTML."""
    return (
        f'<header>\n<p class="kicker">{escape(kicker)}</p>\n<h1>{escape(title)}</h1>\n'
        f'<p class="lead">{escape(lead)}</p>\n{more}</header>\n'
    )


def table(titles: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table. rows: cells as text; the first one names its row. All are escaped."""
    head = "".join(f'<th scope="col">{escape(title)}</th>' for title in titles)
    body = ""
    for first, *others in ([escape(printable(str(cell))) for cell in row] for row in rows):
        cells = "".join(f"<td>{cell}</td>" for cell in others)
        body += f'<tr><th scope="row">{first}</th>{cells}</tr>\n'
    return f"<table><thead><tr>{head}</tr></thead><tbody>\n{body}</tbody></table>"


def section(title: str, body: str) -> str:
    """A section of the page; "" without a body."""
    name = title.lower().replace(" ", "-")
    html = f'<section aria-labelledby="{name}"><h2 id="{name}">{title}</h2>\n{body}\n</section>\n'
    return html if body else ""
