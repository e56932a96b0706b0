"""Runs the parts of `fivefold bench gpu`, and writes what they find: DIR/gpu.json after each trial, and in the end
DIR/gpu.html, one page that needs no network. No torch.

A trial that is in gpu.json is not run again. One that failed or had no time is.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from html import escape
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from fivefold.bench.gpu.parts import OK, PARTS, SHORT, Row
from fivefold.draw.canvas import Canvas, text_width
from fivefold.errors import UserError, printable, shortened
from fivefold.files import make_folder, read_json, write_atomically
from fivefold.host.machine import describe
from fivefold.launch.verdict import Interrupt, unsaved
from fivefold.observe.compare import style
from fivefold.observe.format import document, section, table

LEAST_S = 5.0  # a trial's process alone takes some seconds to start
JSON, HTML = "gpu.json", "gpu.html"
AGAIN = "the same command again runs it"


def measure(out: Path, parts: Sequence[str], limit_s: float, say: Callable[[str], None]) -> dict[str, Any]:
    """Runs the trials of these parts that are still open, until the limit; the whole report. say: gets lines.

    Raises:
        UserError: `out` holds results of another machine, or of another version of Fivefold or PyTorch.
    """
    end, report = time.monotonic() + limit_s, {"machine": describe(), "parts": {part: {} for part in PARTS}}
    if (out / JSON).exists():
        new, report = report, read_json(out / JSON)
        if report.get("machine") != new["machine"] or report.get("parts", {}).keys() != new["parts"].keys():
            raise UserError(f"--out {out}: holds results of another machine; choose another folder")
    make_folder(out)
    done, gpus = report["parts"], len(report["machine"]["gpus"])
    open_ = {
        part: [n for n in PARTS[part].trials(gpus) if "rows" not in done[part].get(n, ())] for part in parts
    }
    waiting = {part: names for part, names in open_.items() if names}
    with Interrupt(noted=lambda number: sys.exit(unsaved(number))):
        try:
            while waiting:
                part, now = next(iter(waiting)), time.monotonic()
                until = now + (end - now) * PARTS[part].share / sum(PARTS[one].share for one in waiting)
                for name in waiting.pop(part):
                    done[part][name] = found = _trial(part, name, until - time.monotonic())
                    write_atomically(out / JSON, json.dumps(report, indent=1) + "\n")
                    say("\n  ".join([f"{part}: {name}", *map(_line, rows(found))]))
        finally:
            write_atomically(out / HTML, page(report))
    return report


def _trial(part: str, name: str, seconds: float) -> dict[str, Any]:
    """What the trial printed, or {"why": ...}: it failed, or there was no time."""
    if seconds < LEAST_S:
        return {"why": f"not run: its share of --limit is used up; {AGAIN}"}
    command = [sys.executable, "-P", "-m", "fivefold.bench.gpu.trials", part, name]
    printing: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with (
        TemporaryDirectory(prefix="fivefold-") as folder,
        subprocess.Popen([*command, f"{folder}/{JSON}"], process_group=0, **printing) as process,
    ):
        try:
            said = process.communicate(timeout=seconds)[0]
        except subprocess.TimeoutExpired:
            return {"why": f"stopped after {seconds:.0f} s, its share of --limit; {AGAIN}"}
        finally:
            with suppress(ProcessLookupError):  # what it has started, too
                os.killpg(process.pid, signal.SIGKILL)
        if process.returncode == 0:
            return read_json(Path(folder, JSON))
    said = said.replace(str(Path.home()), "~").strip() or f"it ended with {process.returncode}"
    return {"why": f"failed: {shortened(printable(said), 2000)}"}


def rows(found: dict[str, Any]) -> list[Row]:
    """A trial's rows; one that says why there are none."""
    if "why" in found:
        return [Row("", "no result", verdict=SHORT, advice=found["why"])]
    return [Row(**row) for row in found["rows"]]


def _cells(row: Row) -> tuple[str, str, str, str]:
    measured = row.measured if isinstance(row.measured, str) else f"{row.measured:,.4g} {row.unit}"
    return row.name, measured, "" if row.expected is None else f"{row.expected:,.4g}", row.advice


def _line(row: Row) -> str:
    name, measured, expected, advice = _cells(row)
    beside = f"(expected {expected})" if expected else ""
    return " ".join(filter(None, [row.verdict.upper() * (row.verdict != OK), name, measured, beside, advice]))


def page(report: dict[str, Any]) -> str:
    """The page: what fell short, then each part with its picture."""
    machine, sections, short = report["machine"], "", list[tuple[str, Row]]()
    for part, trials in report["parts"].items():
        some = [(name, row) for name, found in trials.items() for row in rows(found)]
        short += [(f"{part}: {name}", row) for name, row in some if row.verdict not in ("", OK)]
        sections += section(part, f"<p>{PARTS[part].about}</p>{_picture(some)}{_table(some)}" * bool(some))
    on = ", ".join(gpu["name"] for gpu in machine["gpus"]) or "a CPU, at tiny sizes, which show no speed"
    head = f"<header><h1>GPUs</h1><p class='lead'>{escape(printable(on))}</p></header>"
    first = section("Short of what was expected", _table(short) if short else "<p>Nothing.</p>")
    facts = section("Machine", table(["", ""], [(key, str(value)) for key, value in machine.items()]))
    return document("Fivefold: GPUs", f"{head}<main>{first}{sections}{facts}</main>", style(), "")


def _table(some: Sequence[tuple[str, Row]]) -> str:
    named = [(f"{name}: {row.name}", *_cells(row)[1:]) for name, row in some]
    return table(["", "measured", "expected", "what to do"], named)


def _picture(some: Sequence[tuple[str, Row]]) -> str:
    """Bars of measured by expected; "" where nothing was expected."""
    bars = [
        (f"{name} {row.name}", row.measured / row.expected, "green" if row.verdict in ("", OK) else "orange")
        for name, row in some
        if row.expected and not isinstance(row.measured, str)
    ]
    canvas = Canvas("Measured by expected")
    left = 40 + max((text_width(label) for label, *_ in bars), default=0)
    for number, (label, ratio, color) in enumerate(bars):
        y = 40 + 20 * number
        canvas.text(left - 8, y + 12, label, "end")
        canvas.bar(left, y, 14, [(color, 150 * min(ratio, 2.0), label)], f"{ratio:.3g}", left + 150)
    canvas.line("line now", [(left + 150, 34), (left + 150, canvas.height + 4)])
    return canvas.svg() * bool(bars)
