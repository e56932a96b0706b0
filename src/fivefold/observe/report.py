"""Writes the report of a run: RUN/report.html, one file that opens offline, on a phone or a screen, in light or dark.

Everything from the run (samples, recipe, names) is escaped. A content security policy forbids the page to load anything
and to run any script but its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from statistics import median
from typing import Any

from fivefold.draw.canvas import css
from fivefold.errors import UserError, printable
from fivefold.files import guard, understood, write_atomically
from fivefold.observe import (
    faults,
    memory_picture,
    prediction,
    slow,
    timelines,
)
from fivefold.observe.chart import Chart, Series, draw, smooth
from fivefold.observe.document import asset, document, section, table
from fivefold.observe.format import duration, short_number, size
from fivefold.observe.metrics import FILE, read_metrics
from fivefold.observe.sections import (
    DATA_FILE,
    SETS,
    commands,
    compression,
    data_seen,
    first_weights,
    machine,
    recipe_text,
    sampled,
    samples,
    validation_chart,
)
from fivefold.observe.summary import BUSY, column, finite, summarize
from fivefold.recipe import Recipe, count_parameters, load

ALARMS = 20
"""Lines of alarms in the report: the last ones."""


def write_report(run: Path | str) -> Path:
    """Writes `run`/report.html from the run's metrics.jsonl, recipe.toml and machine.json, and returns its path.

    Raises: UserError if `run` has no readable metrics. The other files may be missing.
    """
    run = Path(run)
    guard(run)
    path = run / "report.html"
    write_atomically(path, page(run))
    return path


def page(run: Path, state: str = "") -> str:
    """The page as HTML. state: what the run is doing now, of a page that is served."""
    lines, recipe = read_metrics(run), run_recipe(run)
    with understood(run / FILE):
        figures = summarize(lines)
        curves = run_charts(lines) + _table(lines) if lines else ""
        unusual, late = faults.section(lines), slow.section(lines)
    with understood(run / "plan.json"):
        predicted = prediction.section(prediction.read(run))
    with understood(run / "traces"):
        messages, memory = timelines.section(run), memory_picture.section(run)
        operators = timelines.operators_section(run)
    with understood(run / DATA_FILE):
        seen = data_seen(run, lines)
    with understood(run / "machine.json"):
        facts = machine(run / "machine.json")
    name = printable(run.resolve().name)
    sections = {
        "Curves": curves,
        "Data": seen,
        "Unusual steps": unusual,
        "Predicted and measured": predicted,
        "Computing and messages": messages,
        "Memory over a step": memory,
        "Profile": operators,
        "Compressed gradients": compression(lines),
        "Restarts": faults.restarts_section(run),
        "Slow ranks": late,
        "First weights": first_weights(run),
        "Samples": samples(lines),
        "Recipe": recipe_text(run / "recipe.toml", recipe),
        "Machine": facts,
        "Next steps": commands(run, recipe),
    }
    body = f"""<header>
<p class="kicker">Training report{escape(f": {state}" if state else "")}</p>
<h1>{escape(name)}</h1>
<p class="lead">{escape(printable(_in_words(recipe, figures)))}</p>
{_alarm(figures)}
{_headline(figures)}
</header>
<main>
{"".join(section(title, text) for title, text in sections.items())}</main>"""
    return document(f"{name}: training report", body, f"{asset('report.css')}\n{css()}", asset("report.js"))


def run_recipe(run: Path) -> Recipe | None:
    """The run's recipe, or None if it is missing or from a version with other fields."""
    path = run / "recipe.toml"
    try:
        return load(str(path)) if path.is_file() else None
    except UserError:
        return None


def _in_words(recipe: Recipe | None, figures: Mapping[str, Any]) -> str:
    """The training run in one sentence."""
    steps = f"{figures.get('steps', 0):,} steps"
    if recipe is None:
        return f"{steps}."
    model, layout = recipe.model, recipe.layout
    names = list(recipe.data.specs)
    data = recipe.data.source if names == [""] else f"a mixture of {', '.join(names)}"
    parameters = f" of {short_number(count_parameters(model))} parameters" if model.vocab_size else ""
    return (
        f"A {model.arch} model{parameters}, {model.layers} layers {model.dim} wide, trained on "
        f"{data} for {steps} of {recipe.train.global_batch_size} sequences of {model.seq_len} "
        f"tokens{f', by {layout.ranks} ranks' if layout.ranks > 1 else ''}."
    )


def _alarm(figures: Mapping[str, Any]) -> str:
    words = []
    if "nonfinite" in figures:
        count, first = figures["nonfinite"], figures["nonfinite_step"]
        words.append(f"The loss was NaN or infinite in {count:,} steps, first at step {first:,}.")
    alarms = figures.get("alarms", [])
    words += [f"Step {step:,}: {escape(printable(text))}" for step, text in alarms[-ALARMS:]]
    if len(alarms) > ALARMS:
        words.append(f"{len(alarms) - ALARMS:,} earlier alarms are in metrics.jsonl.")
    return "".join(f'<p class="alarm" role="alert">{text}</p>' for text in words)


def _headline(figures: Mapping[str, Any]) -> str:
    """The figures at the top, without those that the run lacks."""
    best, at = figures.get("best_val_loss"), figures.get("best_val_step")
    lowest = f"lowest: {best:.3f}, step {at:,}" if best is not None and best != figures["val_loss"] else ""
    cards = (
        ("val_loss", "Validation loss", lambda v: f"{v:.3f}", lowest),
        ("val_bits_per_byte", "Bits per byte", lambda v: f"{v:.3f}", "validation"),
        ("loss", "Train loss", lambda v: f"{v:.3f}", "mean of the last steps"),
        ("tokens", "Tokens", short_number, f"in {figures.get('steps', 0):,} steps"),
        ("train_s", "Time in steps", duration, ""),
        ("tokens_per_s", "Tokens per second", short_number, "median"),
        ("mfu", "MFU", lambda v: f"{100 * v:.1f}%", BUSY if "peak_share" in figures else "of the dense peak"),
        ("peak_memory_bytes", "Peak memory", size, ""),
        ("noise_scale", "Noise scale", short_number, "tokens, about the critical batch size"),
        ("data_wait", "Waiting for data", lambda v: f"{100 * v:.2f}%", "of the time"),
    )
    shown = "".join(
        f"<div{' class=main' if key == 'val_loss' else ''}><dt>{label}</dt><dd>{escape(show(figures[key]))}"
        f"{f'<small>{escape(note)}</small>' if note else ''}</dd></div>\n"
        for key, label, show, note in cards
        if key in figures
    )
    return f'<dl class="figures">\n{shown}</dl>' if shown else '<p class="none">No step is finished yet.</p>'


def _table(lines: Sequence[dict[str, Any]], rows: int = 12) -> str:
    """Losses at a few steps, evenly sampled: the charts' content for screen readers."""
    keys = {"loss": "Train loss", "val_loss": "Validation", "val_bits_per_byte": "Bits/byte"}
    columns = [dict(zip(*column(lines, key), strict=True)) for key in keys]
    train, validation = list(columns[0]), list(columns[1])
    steps = sorted({*sampled(validation or train, rows), *train[:1], *train[-1:]})
    if not steps:
        return ""
    cells = [(f"{step:,}", *(f"{c[step]:.4f}" if step in c else "" for c in columns)) for step in steps]
    return f"<details><summary>Losses as a table</summary>{table(('Step', *keys.values()), cells)}</details>"


Lines = Sequence[dict[str, Any]]
StepRange = tuple[int, int]


def run_charts(lines: Lines) -> str:
    """All charts of a run as HTML, most important first. A last line names those without data."""
    steps = [line["step"] for line in lines]
    span = (min(steps), max(steps))
    memory_steps, memory = column(lines, "peak_memory_bytes")
    gib = Series("peak memory", memory_steps, [value / 2**30 for value in memory])
    bits = Series("bits per byte", *column(lines, "val_bits_per_byte"), style="second", dots=True)
    rate = Series("learning rate", *column(lines, "lr"))
    norm = _with_mean("gradient norm", *column(lines, "grad_norm"))
    charts = [
        loss_chart(lines, span),
        validation_chart(lines, span),
        Chart("bits", "Bits per byte, validation", [bits], span, log=True),
        Chart("lr", "Learning rate", [rate], span, zero=True),
        Chart("norm", "Gradient norm", norm, span, zero=True, log=True),
        throughput_chart(lines, span),
        wait_chart(lines, span),
        Chart("memory", "Peak memory, GiB", [gib], span, zero=True, unit="GiB"),
    ]
    drawn = [(chart, draw(chart)) for chart in charts]
    missing = [chart.title.lower() for chart, html in drawn if not html and chart.id != SETS]
    none = f'<p class="none">Not in this run\'s metrics: {"; ".join(missing)}.</p>' if missing else ""
    return f'<div class="charts">\n{"".join(html for _, html in drawn)}</div>\n{none}'


def loss_chart(lines: Lines, span: StepRange) -> Chart:
    """Train loss per step (faint) under its moving mean, and validation loss as points."""
    steps, losses = column(lines, "loss")
    bad = [step for step, loss in zip(steps, losses, strict=True) if not math.isfinite(loss)]
    validation = Series("validation", *column(lines, "val_loss"), style="second", dots=True)
    note = "Red: steps whose loss was NaN or infinite." if bad else ""
    series = [*_with_mean("train", steps, losses), validation]
    return Chart("loss", "Loss", series, span, log=True, bad=bad, wide=True, note=note)


def throughput_chart(lines: Lines, span: StepRange) -> Chart:
    """Tokens per second, with MFU on the right axis, which is proportional to them."""
    pairs = [(line.get("mfu"), line.get("tokens_per_s")) for line in lines]
    ratios = finite([mfu / speed for mfu, speed in pairs if mfu and speed])
    title = "Tokens per second" + (" and MFU" if ratios else "")
    right = (100 * median(ratios), "%") if ratios else None
    series = _with_mean("tokens/s", *column(lines, "tokens_per_s"))
    return Chart("speed", title, series, span, zero=True, right=right)


def wait_chart(lines: Lines, span: StepRange) -> Chart:
    """Share of each step's time spent waiting for its batch."""
    found = [line for line in lines if line.get("step_s") and line.get("data_wait_s") is not None]
    shares = [100 * line["data_wait_s"] / line["step_s"] for line in found]
    series = _with_mean("waiting", [line["step"] for line in found], shares)
    return Chart("wait", "Waiting for data, share of a step", series, span, unit="%", zero=True)


def _with_mean(name: str, steps: Sequence[int], values: Sequence[float]) -> list[Series]:
    """A noisy line (faint) and its moving mean over 1/50 of the run. A short run has the line alone."""
    window = len(steps) // 50 | 1
    if window == 1:
        return [Series(name, steps, values)]
    mean = Series(f"{name}, mean of {window} steps", steps, smooth(values, window))
    return [Series(name, steps, values, "faint"), mean]
