"""Where a run's first weights came from: initial.json, for the run's page."""

from __future__ import annotations

from html import escape
from pathlib import Path

from fivefold.errors import UserError, printable
from fivefold.files import read_json

FILE = "initial.json"


def section(run: Path) -> str:
    """A paragraph; "" for a run from random weights."""
    if not (run / FILE).is_file():
        return ""
    try:
        found = read_json(run / FILE)
        where, fingerprint = str(found["checkpoint"] or found["where"]), str(found["fingerprint"])
        notes = [f"{len(found['new']):,} parameters are new."] if found["new"] else []
        notes += [f"{text}." for text in found["changed"]]
    except (UserError, OSError, KeyError, TypeError):
        return '<p class="none">initial.json cannot be read.</p>'
    shown = " ".join(escape(printable(str(note))) for note in notes)
    return (
        f"<p>Training began with the weights of <code>{escape(printable(where))}</code>, sha256 "
        f"<code>{escape(printable(fingerprint))}</code>. {shown}</p>"
    )
