"""Prints a training run: lines of steps, validation, samples, notes, and the summary at the end.

A terminal gets coloured lines, cut to its width, above a progress bar. Files, pipes and CI get plain aligned lines
without escape codes. Only rank 0 prints. Nothing here can stop a training run: a terminal that hangs up or a closed
pipe only ends the printing.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TextIO

from rich.console import Console as RichConsole
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from fivefold.errors import printable
from fivefold.observe.faults import in_words
from fivefold.observe.format import duration, short_number, size
from fivefold.observe.summary import BUSY, by_name

QUIET = "FIVEFOLD_QUIET"  # environment variable, which ranks inherit: any text, and only alarms are printed
VALIDATIONS = "validations"  # its value with which validations are printed, too
# Seconds between redraws of the bar. A redraw takes about a millisecond, and steps may take less.
_REDRAW_S = 0.25
# Of a run that prints into a file or a pipe: lines of steps, and seconds between two of them at most.
_LINES, _LONGEST_S = 20, 60.0


@contextmanager
def quietly(how: str) -> Iterator[None]:
    """Inside the block consoles print as QUIET = `how` says; "": as before. Ranks inherit it."""
    before = os.environ.get(QUIET)
    if how:
        os.environ[QUIET] = how
    try:
        yield
    finally:
        os.environ.pop(QUIET, None)
        if before is not None:
            os.environ[QUIET] = before


# The fields that a narrow terminal drops first.
_LEAST_IMPORTANT = ("wait", "mem", "norm", "lr", "hfu", "mfu", "eta", "speed")


class Console:
    """Prints the run's progress.

    total_steps: last step of the run. start_step: the step from which it starts or resumes. rank: only 0 prints.
    log_every: steps between lines (the last step always gets one); 0: as `observe.log_every` says. file: output file
    [default: stdout]. terminal: None asks the file. clock: seconds, for the ETA.
    """

    def __init__(
        self,
        total_steps: int,
        *,
        rank: int = 0,
        start_step: int = 0,
        log_every: int = 0,
        file: TextIO | None = None,
        terminal: bool | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.total, self.silent = total_steps, rank != 0
        how = os.environ.get(QUIET, "")
        self.quiet, self._validations = bool(how), how == VALIDATIONS
        self._file = file or (sys.stderr if self.quiet and not self._validations else sys.stdout)
        self._start, self._clock, self._drawn = start_step, clock, -math.inf
        self._pace_from = (start_step, clock())
        able = self._file.isatty() and os.environ.get("TERM", "") not in ("dumb", "unknown")
        self.terminal = able if terminal is None else terminal
        self._longest = math.inf if log_every or self.terminal else _LONGEST_S
        self.log_every = log_every or (1 if self.terminal else max(1, total_steps // _LINES))
        self._last_line = -math.inf  # the first step has one, unless asked otherwise
        self._rich = RichConsole(file=self._file, force_terminal=True) if self.terminal else None
        self._bar: Progress | None = None

    def step(self, metrics: Mapping[str, Any]) -> None:
        """Prints a finished optimizer step. `metrics` is its line of metrics.jsonl. Missing fields are left out."""
        if self.silent or self.quiet:
            return
        step = metrics["step"]
        now = self._clock()
        if step % self.log_every == 0 or step == self.total or now - self._last_line > self._longest:
            self._last_line = now
            fields = self._fields(metrics)
            self._print(self._coloured(fields, metrics) if self._rich else "  ".join(fields.values()))
        if self._rich and now - self._drawn > _REDRAW_S:
            if self._bar is None:
                percent, end = TextColumn("{task.percentage:3.0f}%"), TextColumn("{task.fields[eta]}")
                self._bar = Progress(
                    BarColumn(None), percent, end,
                    console=self._rich, auto_refresh=False, transient=True, expand=True,
                )  # fmt: skip
                self._bar.add_task("", total=self.total, eta="")
                self._guard(self._bar.start)
            eta = f"{time_left} left" if (time_left := self.eta(step)) else ""
            self._bar.update(self._bar.task_ids[0], completed=step, eta=eta)
            self._guard(self._bar.refresh)
            self._drawn = self._clock()
        if step == self._start + 1:  # the ETA leaves out the first step: start-up, compilation
            self._pace_from = (step, self._clock())

    def validation(self, metrics: Mapping[str, Any]) -> None:
        """Prints a finished validation: `step`, `val_loss` and, if known, `val_bits_per_byte`."""
        text = f"validation  step {metrics['step']}  loss {metrics['val_loss']:.4f}"
        if metrics.get("val_bits_per_byte") is not None:
            text += f"  bits/byte {metrics['val_bits_per_byte']:.4f}"
        for name, loss in by_name(metrics, "val_losses").items():
            text += f"  {name} {loss:.4f}"
        self._say(text, "bold green", always=self._validations)

    def sample(self, text: str, step: int | None = None) -> None:
        """Prints generated text, indented. Control characters are shown as escapes, so none reaches the terminal."""
        self._say("sample" + (f"  step {step}" if step is not None else ""), "bold magenta")
        self._say("".join(f"    | {line}\n" for line in printable(text).split("\n")).rstrip("\n"))

    def note(self, text: str) -> None:
        """Prints a line of prose, such as how to resume."""
        self._say(printable(text), "cyan")

    def warn(self, text: str) -> None:
        """Prints a line of prose about something unusual."""
        self._say(printable(text), "yellow", always=True)

    def alarm(self, text: str) -> None:
        """Prints a line that must not be missed."""
        self._say(f"alarm: {printable(text)}", "bold red", always=True)

    def summary(
        self,
        figures: Mapping[str, Any],
        paths: Mapping[str, Any],
        commands: Sequence[str],
        predicted: Sequence[tuple[str, str]] = (),
    ) -> None:
        """Prints the end of the run.

        figures: from `summarize`. paths: name -> file or folder of the run. commands: commands to try next. predicted:
        names and values of `prediction.rows`.
        """
        if self.quiet:
            return
        rows = [*summary_rows(figures), *predicted]
        rows += [(name, self._encodable(printable(str(path)))) for name, path in paths.items()]
        self.close()
        if self._rich:
            table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
            table.add_column(style="dim")
            table.add_column(overflow="fold")
            for name, value in rows:
                table.add_row(Text(name), Text(value))
            self._print("")
            self._print(table)
        else:
            width = max((len(name) for name, _ in rows), default=0)
            self._print("\n" + "\n".join(f"{name:<{width}} {value}" for name, value in rows))
        if commands:
            self._say("\nNext, try", "bold")
            self._say("\n".join(f"  {printable(command)}" for command in commands))

    def close(self) -> None:
        """Removes the progress bar and restores the terminal. Further calls do nothing."""
        bar, self._bar = self._bar, None
        if bar:
            self._guard(bar.stop)

    def eta(self, step: int) -> str:
        """Time to the end at the mean pace since the first step (validations and saves count); "" if not known: before
        the third step."""
        first, since = self._pace_from
        if step < self._start + 3:
            return ""
        return duration((self._clock() - since) / (step - first) * (self.total - step))

    def _fields(self, metrics: Mapping[str, Any]) -> dict[str, str]:
        """The fields of a step's line, in order, each with constant width."""
        digits, step = len(str(self.total)), metrics["step"]
        fields = {"step": f"step {step:>{digits}}/{self.total}"}
        for key, name, shown in (
            ("loss", "loss", lambda v: f"loss {v:7.4f}"),
            ("grad_norm", "norm", lambda v: f"norm {v:6.3f}"),
            ("lr", "lr", lambda v: f"lr {v:.2e}"),
            ("loss_scale", "scale", lambda v: f"scale 2^{math.log2(v):<2.0f}"),
            ("skipped_steps", "skipped", lambda v: f"skipped {v:.0f}"),
            ("tokens_per_s", "speed", lambda v: f"{short_number(v):>6} tok/s"),
            ("mfu", "mfu", lambda v: f"mfu {100 * v:4.1f}%"),
            ("hfu", "hfu", lambda v: f"hfu {100 * v:4.1f}%"),
            ("peak_memory_bytes", "mem", lambda v: f"mem {size(v):>8}"),
        ):
            if metrics.get(key) is not None:
                fields[name] = shown(metrics[key])
        if metrics.get("data_wait_s") is not None and metrics.get("step_s"):
            fields["wait"] = f"wait {100 * metrics['data_wait_s'] / metrics['step_s']:4.1f}%"
        fields["eta"] = f"eta {self.eta(step) or '-':>6}"
        return fields

    def _coloured(self, fields: dict[str, str], metrics: Mapping[str, Any]) -> Text:
        """The line for a terminal, without the least important fields that do not fit its width."""
        assert self._rich
        for name in _LEAST_IMPORTANT:
            if sum(map(len, fields.values())) + 2 * (len(fields) - 1) <= self._rich.width:
                break
            fields.pop(name, None)
        alarm = not math.isfinite(metrics.get("loss", 0.0))
        colours = {"loss": "bold red" if alarm else "bold", "step": "cyan", "speed": "green", "mfu": "green"}
        line = Text("  ").join(Text(part, colours.get(name, "dim")) for name, part in fields.items())
        line.no_wrap, line.overflow = True, "crop"
        return line

    def _say(self, text: str, style: str = "", always: bool = False) -> None:
        if not self.silent and (always or not self.quiet):
            text = self._encodable(text)
            self._print(Text(text, style) if self._rich else text)

    def _encodable(self, text: str) -> str:
        """`text` with escapes for characters that the output's encoding lacks. A C locale must not end a run."""
        encoding = getattr(self._file, "encoding", None) or "utf-8"
        return text.encode(encoding, "backslashreplace").decode(encoding)

    def _print(self, line: Any) -> None:
        if rich := self._rich:
            self._guard(lambda: rich.print(line, soft_wrap=isinstance(line, (str, Text))))
        else:
            self._guard(lambda: print(line, file=self._file, flush=True))

    def _guard(self, write: Callable[[], object]) -> None:
        """Runs `write`. If the other end is gone (closed pipe, hung-up terminal), the console stays silent."""
        if self.silent:
            return
        try:
            write()
        except OSError:
            self.silent, self._bar = True, None
            if self._file is sys.stdout:  # or the interpreter fails at exit, when it flushes what is left
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def summary_rows(figures: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The figures of `summarize` as (name, value) texts, without missing ones."""
    seen = max(1, sum(figures.get("source_tokens", {}).values()))
    shown: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
        ("steps", "steps", lambda v: f"{v:,}"),
        ("tokens", "tokens", lambda v: f"{short_number(v)} ({v:,})" if v >= 10_000 else str(v)),
        ("source_tokens", "of them", lambda v: ", ".join(
            f"{name} {short_number(n)} ({100 * n / seen:.3g}%)" for name, n in v.items()
        )),
        ("train_s", "training time", duration),
        ("loss", "train loss", lambda v: f"{v:.4f}"),
        ("val_loss", "validation loss", lambda v: f"{v:.4f}" + best(v, "best_val_loss")),
        ("val_losses", "by validation set", lambda v: ", ".join(f"{k} {x:.4f}" for k, x in v.items())),
        ("val_bits_per_byte", "bits per byte", lambda v: f"{v:.4f}" + best(v, "best_val_bits_per_byte")),
        ("tokens_per_s", "tokens/s", short_number),
        ("mfu", "MFU", lambda v: f"{100 * v:.1f}%" + (f" ({BUSY})" if "peak_share" in figures else "")),
        ("hfu", "HFU", lambda v: f"{100 * v:.1f}% (all FLOPs that were computed)"),
        ("data_wait", "data wait", lambda v: f"{100 * v:.2f}% of the time"),
        ("peak_memory_bytes", "peak memory", size),
        ("loss_scale", "loss scale", lambda v: f"2^{math.log2(v):.0f}"),
        ("skipped_steps", "skipped steps", lambda v: f"{v:.0f}, whose gradients overflowed"),
        ("faults", "unusual steps", in_words),
        ("noise_scale", "noise scale", lambda v: f"{short_number(v)} tokens (about the critical batch size)"),
        ("restarts", "restarts", str),
        ("nonfinite", "NaN or inf loss", lambda v: f"{v} steps, first at step {figures['nonfinite_step']}"),
    )  # fmt: skip

    def best(last: float, key: str) -> str:
        lowest = figures.get(key, last)
        if not (lowest < last or (math.isnan(last) and lowest == lowest)):
            return ""
        step = f", step {figures['best_val_step']}" if "best_val_step" in figures else ""
        return f" (best {lowest:.4f}{step})"

    return [(name, show(figures[key])) for key, name, show in shown if figures.get(key) is not None]
