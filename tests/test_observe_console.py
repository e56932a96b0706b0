"""What a run prints: on a terminal, in a file, in hostile places."""

from __future__ import annotations

import io
import itertools
import os
import re
import subprocess
import sys
from contextlib import closing
from itertools import count

import pytest

from fivefold.errors import printable
from fivefold.observe.console import QUIET, VALIDATIONS, Console, quietly
from fivefold.observe.format import duration, short_number, size

LINE = {
    "tokens": 4096,
    "loss": 5.4321,
    "grad_norm": 0.75,
    "lr": 1e-3,
    "step_s": 0.5,
    "data_wait_s": 0.005,
    "tokens_per_s": 3900.0,
    "mfu": 0.72,
    "peak_memory_bytes": 1.25 * 2**30,
}


def output(terminal: bool, use, **options) -> str:
    """What `use(console)` prints to a text stream; the clock ticks one second a look."""
    stream = io.TextIOWrapper(io.BytesIO(), encoding=options.pop("encoding", "utf-8"), write_through=True)
    ticks = count()
    options = {"total_steps": 20, "clock": lambda: float(next(ticks)), **options}
    with closing(Console(file=stream, terminal=terminal, **options)) as console:
        use(console)
    stream.seek(0)
    return stream.read()


def test_plain_line_has_every_figure_and_no_escape_codes() -> None:
    text = output(False, lambda c: [c.step({"step": step, **LINE}) for step in (1, 2, 3)])
    assert "\x1b" not in text
    first, second, third = text.splitlines()
    for part in ("step  2/20", "loss  5.4321", "norm  0.750", "lr 1.00e-03", "3,900 tok/s", "mfu 72.0%"):
        assert part in second
    assert "mem 1.25 GiB" in second
    assert "wait  1.0%" in second
    assert first.endswith("eta      -")
    assert second.endswith("eta      -"), "the start-up says nothing of the end"
    assert re.search(r"eta +\d+(\.\d)?s", third)
    assert len(first) == len(second) == len(third), "columns are aligned"


def test_log_every_prints_multiples_and_the_last_step() -> None:
    text = output(
        False, lambda c: [c.step({"step": s, **LINE}) for s in range(1, 12)], total_steps=11, log_every=5
    )
    assert re.findall(r"step +(\d+)/", text) == ["5", "10", "11"]


def test_a_file_gets_about_twenty_lines_and_one_a_minute() -> None:
    def steps(terminal: bool, tick: float, **options) -> list[int]:
        clock = (tick * i for i in count())
        text = output(
            terminal,
            lambda c: [c.step({"step": s, **LINE}) for s in range(1, 601)],
            total_steps=600,
            clock=lambda: next(clock),
            **options,
        )
        return [*dict.fromkeys(int(step) for step in re.findall(r"step +(\d+)/", text))]

    assert steps(False, 0.01) == [1, *range(30, 601, 30)]
    slow = steps(False, 5.0)
    assert 1 < max(b - a for a, b in itertools.pairwise(slow)) <= 12
    assert len(slow) < 200
    assert steps(False, 5.0, log_every=100) == [*range(100, 601, 100)]
    assert steps(True, 0.01, log_every=0) == [*range(1, 601)]


def test_terminal_shows_colours_and_a_bar() -> None:
    text = output(True, lambda c: [c.step({"step": step, **LINE}) for step in range(1, 21)])
    assert "\x1b[" in text
    assert "100%" in text
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l"), "the cursor is visible again"


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_terminal_lines_fit_the_width(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    text = output(True, lambda c: c.step({"step": 7, **LINE}), clock=lambda: 0.0)
    (line,) = [
        row
        for row in re.sub(r"\x1b\[[?0-9;]*[a-zA-Z]", "\r", text).replace("\r", "").split("\n")
        if "loss" in row
    ]
    assert len(line) <= columns
    assert "step  7/20" in line
    assert ("wait" in line) == (columns == 200)


def test_sample_cannot_steer_the_terminal() -> None:
    evil = "ok\tü\x1b]0;title\x07\x1b[2J\r\x9b31m\u202e\u200b\ud800\u2028\n[bold]not markup[/bold] :smile:"
    text = output(False, lambda c: c.sample(evil, 3))
    assert re.fullmatch(r"[^\x00-\x08\x0b-\x1f\x7f-\x9f\u202e\u200b\ud800\u2028]*", text)
    assert r"\x1b]0;title\x07\x1b[2J\r\x9b31m\u202e\u200b\ud800\u2028" in text
    coloured = output(True, lambda c: c.sample(evil, 3))
    assert "\x1b]" not in coloured
    assert "\x1b[2J" not in coloured
    assert "[bold]not markup[/bold] :smile:" in coloured


def test_output_that_cannot_encode_gets_escapes() -> None:
    for terminal in (False, True):
        text = output(terminal, lambda c: (c.sample("süß → 漢"), c.note("ü")), encoding="ascii")
        assert r"s\xfc\xdf \u2192 \u6f22" in text


def test_other_ranks_are_silent() -> None:
    def use(console: Console) -> None:
        console.step({"step": 1, **LINE})
        console.validation({"step": 1, "val_loss": 2.0})
        console.sample("text", 1)
        console.note("note")
        console.summary({"steps": 1}, {}, ["next"])

    assert output(False, use, rank=1) == output(True, use, rank=1) == ""


def test_validation_note_and_summary() -> None:
    figures = {
        "steps": 20,
        "tokens": 81920,
        "loss": 1.9,
        "val_loss": 2.25,
        "best_val_loss": 2.125,
        "best_val_step": 10,
        "mfu": 0.72,
        "data_wait": 0.0012,
    }

    def use(console: Console) -> None:
        console.validation({"step": 20, "val_loss": 2.25, "val_bits_per_byte": 0.75})
        console.note("saved")
        console.summary(figures, {"report": "run/report.html"}, ["fivefold generate run"])

    for terminal in (False, True):
        text = re.sub(r"\x1b\[[0-9;]*m", "", output(terminal, use))
        for part in (
            "loss 2.2500  bits/byte 0.7500",
            "saved",
            "2.2500 (best 2.1250, step 10)",
            "72.0%",
            "0.12%",
        ):
            assert part in text
        assert re.search(r"report +run/report\.html", text)
        assert "  fivefold generate run" in text


def test_eta_is_the_mean_pace_without_the_first_step() -> None:
    now = [0.0]
    console = Console(10, file=io.StringIO(), clock=lambda: now[0])
    now[0] = 100.0  # start-up and compilation
    console.step({"step": 1, **LINE})
    for step in (2, 3):
        now[0] += 4.0
        console.step({"step": step, **LINE})
    assert console.eta(3) == "28s"


def test_a_closed_pipe_does_not_end_the_run() -> None:
    program = (
        "import sys; from fivefold.observe.console import Console\n"
        "c = Console(10000)\n"
        "for s in range(1, 10001): c.step({'step': s, 'loss': 1.0})\n"
        "print('trained to the end', file=sys.stderr)"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ
    )
    assert child.stdout
    assert child.stderr
    assert child.stdout.readline().startswith(b"step")
    child.stdout.close()
    assert child.stderr.read() == b"trained to the end\n"
    assert child.wait(20) == 0


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.42, "0.4s"),
        (9.99, "10s"),
        (59.7, "1m00s"),
        (3599.9, "1h00m"),
        (86_400 * 3 + 7200, "3d02h"),
        (86_400 * 999, "999d"),
        (86_400 * 82_268_398, "225,239y"),
        (-1, "?"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_numbers_and_sizes() -> None:
    assert [short_number(v) for v in (0.5, 950, 9999, 12_345, 13.82e6, 7e12)] == [
        *("0.5", "950", "9,999", "12.35k", "13.82M", "7T")
    ]
    assert [size(v) for v in (12, 1536, 2**20 * 12.25, 2**30 * 700)] == [
        "12 B",
        "1.50 KiB",
        "12.2 MiB",
        "700 GiB",
    ]
    assert printable("plain ü\n\t漢") == "plain ü\n\t漢"


@pytest.mark.parametrize("before", ["1", None])
def test_consoles_are_quiet_inside_of_a_block_only(
    before: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(QUIET, before) if before else monkeypatch.delenv(QUIET, raising=False)
    with quietly(VALIDATIONS):
        assert os.environ[QUIET] == VALIDATIONS
    assert os.environ.get(QUIET) == before
