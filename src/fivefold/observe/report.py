"""Writes the report of a run: RUN/report.html, one file that opens offline, on a phone or a screen, in light or dark.

Everything from the run (samples, recipe, names) is escaped. A content security policy forbids the page to load anything
and to run any script but its own.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from statistics import median
from typing import Any

from fivefold.draw.canvas import LIGHT, css
from fivefold.errors import UserError, printable
from fivefold.files import guard, read_bytes, read_facts, read_json, understood, write_atomically
from fivefold.models.card import card_of
from fivefold.observe import faults, memory_picture, prediction, timelines
from fivefold.observe.chart import Chart, Series, draw, smooth
from fivefold.observe.format import asset, document, duration, header, section, short_number, size, table
from fivefold.observe.metrics import FILE, read_metrics
from fivefold.observe.summary import BUSY, by_name, column, finite, summarize
from fivefold.observe.trackers import FILE_STORE
from fivefold.recipe import Recipe, count_parameters, explain, load
from fivefold.recipe.load import MOST_BYTES

INITIAL = "initial.json"
"""File of a run folder: where its first weights came from."""
DATA_FILE = "data.json"
ALARMS = 20
"""Lines of alarms in the report: the last ones."""
_MOST_SAMPLES, _LONGEST_SAMPLE = 8, 4000
Lines = Sequence[dict[str, Any]]


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
        unusual, late = faults.section(lines), faults.slow_section(lines)
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
    kicker = f"Training report: {state}" if state else "Training report"
    head = header(kicker, name, printable(_in_words(recipe, figures)), _alarm(figures) + _headline(figures))
    body = "".join(section(title, text) for title, text in sections.items())
    style, script = f"{asset('report.css')}\n{css()}", asset("report.js")
    return document(f"{name}: training report", f"{head}<main>\n{body}</main>", style, script)


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
        ("hfu", "HFU", lambda v: f"{100 * v:.1f}%", "all FLOPs that were computed"),
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


def _table(lines: Lines, rows: int = 12) -> str:
    """Losses at a few steps, evenly sampled: the charts' content for screen readers."""
    keys = {"loss": "Train loss", "val_loss": "Validation", "val_bits_per_byte": "Bits/byte"}
    columns = [dict(zip(*column(lines, key), strict=True)) for key in keys]
    train, validation = list(columns[0]), list(columns[1])
    steps = sorted({*sampled(validation or train, rows), *train[:1], *train[-1:]})
    if not steps:
        return ""
    cells = [(f"{step:,}", *(f"{c[step]:.4f}" if step in c else "" for c in columns)) for step in steps]
    return f"<details><summary>Losses as a table</summary>{table(('Step', *keys.values()), cells)}</details>"


def run_charts(lines: Lines) -> str:
    """All charts of a run as HTML, most important first. A last line names those without data."""
    steps = [line["step"] for line in lines]
    span = (min(steps), max(steps))
    losses = column(lines, "loss")
    bad = [step for step, loss in zip(*losses, strict=True) if not math.isfinite(loss)]
    validation = Series("validation", *column(lines, "val_loss"), style="second", dots=True)
    names = dict.fromkeys(name for line in lines for name in by_name(line, "val_losses"))
    sets = [
        Series(printable(name), *column(lines, f"val_losses/{name}"), f"c{number % len(LIGHT)}")
        for number, name in enumerate(names)
    ]
    memory_steps, memory = column(lines, "peak_memory_bytes")
    gib = Series("peak memory", memory_steps, [value / 2**30 for value in memory])
    bits = Series("bits per byte", *column(lines, "val_bits_per_byte"), style="second", dots=True)
    rate = Series("learning rate", *column(lines, "lr"))
    norm = _with_mean("gradient norm", *column(lines, "grad_norm"))
    # MFU, on the right axis, is proportional to tokens per second
    pairs = [(line.get("mfu"), line.get("tokens_per_s")) for line in lines]
    ratios = finite([mfu / speed for mfu, speed in pairs if mfu and speed])
    right = (100 * median(ratios), "%") if ratios else None
    speed = _with_mean("tokens/s", *column(lines, "tokens_per_s"))
    waits = [line for line in lines if line.get("step_s") and line.get("data_wait_s") is not None]
    shares = [100 * line["data_wait_s"] / line["step_s"] for line in waits]
    wait = _with_mean("waiting", [line["step"] for line in waits], shares)
    charts = [
        Chart("loss", "Loss", [*_with_mean("train", *losses), validation], span, log=True, bad=bad, wide=True,
              note="Red: steps whose loss was NaN or infinite." * bool(bad)),
        Chart("sets", "Loss by validation set", sets, span, log=True, wide=True),
        Chart("bits", "Bits per byte, validation", [bits], span, log=True),
        Chart("lr", "Learning rate", [rate], span, zero=True),
        Chart("norm", "Gradient norm", norm, span, zero=True, log=True),
        Chart("speed", "Tokens per second" + " and MFU" * bool(ratios), speed, span, zero=True, right=right),
        Chart("wait", "Waiting for data, share of a step", wait, span, unit="%", zero=True),
        Chart("memory", "Peak memory, GiB", [gib], span, zero=True, unit="GiB"),
    ]  # fmt: skip
    drawn = [(chart, draw(chart)) for chart in charts]
    missing = [chart.title.lower() for chart, html in drawn if not html and chart.id != "sets"]
    none = f'<p class="none">Not in this run\'s metrics: {"; ".join(missing)}.</p>' if missing else ""
    return f'<div class="charts">\n{"".join(html for _, html in drawn)}</div>\n{none}'


def _with_mean(name: str, steps: Sequence[int], values: Sequence[float]) -> list[Series]:
    """A noisy line (faint) and its moving mean over 1/50 of the run. A short run has the line alone."""
    window = len(steps) // 50 | 1
    if window == 1:
        return [Series(name, steps, values)]
    mean = Series(f"{name}, mean of {window} steps", steps, smooth(values, window))
    return [Series(name, steps, values, "faint"), mean]


def sampled(items: Sequence[Any], most: int) -> list[Any]:
    """At most `most` of `items`, evenly spread, with the first and the last."""
    if len(items) <= most:
        return list(items)
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]


def samples(lines: Lines) -> str:
    """The model's samples, from early to late."""
    texts = [(line["step"], line["sample"]) for line in lines if isinstance(line.get("sample"), str)]
    if not texts:
        return '<p class="none">This run has no samples.</p>'
    shown = ""
    for step, text in sampled(texts, _MOST_SAMPLES):
        text = text if len(text) <= _LONGEST_SAMPLE else text[:_LONGEST_SAMPLE] + " [...]"
        # The parser drops a newline after <pre>: this one, so that a sample's own first newline stays.
        shown += (
            f'<figure class="sample"><figcaption>Step {step:,}</figcaption>'
            f'<pre tabindex="0">\n{escape(printable(text.rstrip()))}</pre></figure>\n'
        )
    more = len(texts) - _MOST_SAMPLES
    return shown + (f'<p class="none">{more:,} more are in metrics.jsonl.</p>' if more > 0 else "")


def compression(lines: Lines) -> str:
    """What compressed sums left out of each parameter's gradient, at the last validation; "" without compression."""
    key = "compression_errors"
    line = next((line for line in reversed(lines) if isinstance(line.get(key), dict)), None)
    if line is None:
        return ""
    rows = [(name, f"{100 * error:.1f}%") for name, error in line[key].items()]
    shown = table(("Parameter", "Not sent"), rows)
    return (
        f"<p>In step {line['step']:,} rank 0 did not send these shares of its gradients (by their norm). They are "
        f"added to the next gradients.</p><details><summary>By parameter</summary>{shown}</details>"
    )


def first_weights(run: Path) -> str:
    """Where the first weights came from, as a paragraph; "" for a run from random weights."""
    if not (run / INITIAL).is_file():
        return ""
    try:
        found = read_json(run / INITIAL)
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


def recipe_text(path: Path, recipe: Recipe | None) -> str:
    """Of recipe.toml the fields that differ from their defaults, then all of it, folded. A field's meaning is its
    tooltip."""
    if not path.is_file():
        return '<p class="none">This run has no recipe.toml.</p>'
    known = {field.key: field for field in explain(recipe)} if recipe else {}
    section, blocks, own = "", [""], [""]  # own: without the fields that are as by default
    for line in read_bytes(path, MOST_BYTES).decode("utf-8", "replace").splitlines():
        text = escape(printable(line))
        if line.startswith("["):
            section = line.strip("[] ")
            blocks.append(f'<span class="section">{text}</span>\n')
            own.append(blocks[-1])
        elif text:
            field = known.get(f"{section}.{line.split('=')[0].strip()}")
            # A default of None is derived from other fields, so such a value is not a change.
            changed = field is not None and field.default is not None and not field.is_default
            doc = f' title="{escape(field.doc)}"' if field else ""
            blocks[-1] += f"<span{' class=changed' * changed}{doc}>{text}</span>\n"
            own[-1] += f"<span{doc}>{text}</span>\n" * changed
    whole = _in_columns([block for block in blocks if block])
    if not known:
        return whole
    few = _in_columns([block for block in own if block.count("\n") > 1])
    legend = '<p class="aside">Fields that differ from their defaults.</p>'
    return f"{legend}{few}<details><summary>All fields</summary>{whole}</details>"


def _in_columns(blocks: Sequence[str]) -> str:
    return f'<pre class="recipe">{"".join(f"<div>{block}</div>" for block in blocks)}</pre>'


def machine(path: Path) -> str:
    """machine.json as a list of facts."""
    facts = read_facts(path)
    if not facts:
        return '<p class="none">This run has no machine.json.</p>'
    rows = [f"<dt>{escape(_label(k))}</dt><dd>{escape(_fact(k, v))}</dd>\n" for k, v in facts.items()]
    return f'<dl class="facts">\n{"".join(rows)}</dl>'


_LABELS = {
    "cpu": "Processor", "cpu_features": "Instructions", "os": "System", "gpus": "GPUs", "torch": "PyTorch",
    "fast_bf16": "Fast bf16",
}  # fmt: skip


def _label(key: str) -> str:
    words = printable(key.removesuffix("_bytes").replace("_", " "))
    return _LABELS.get(key, words[:1].upper() + words[1:])


def _fact(key: str, value: Any) -> str:
    """One fact as text; lists and dicts in one line."""
    if value is None or isinstance(value, bool):
        return "unknown" if value is None else "yes" if value else "no"
    if isinstance(value, (int, float)):
        return size(value) if key.endswith("_bytes") else f"{value:,}"
    if isinstance(value, dict):
        return ", ".join(f"{_label(k).lower()} {_fact(k, v)}" for k, v in value.items()) or "none"
    if isinstance(value, list):
        return ("; " if any(isinstance(v, dict) for v in value) else ", ").join(
            _fact(key, v) for v in value
        ) or "none"
    return printable(str(value))


def commands(run: Path, recipe: Recipe | None) -> str:
    """Commands that start from this run, with its folder as seen from the working directory."""
    folder, here = run.resolve(), Path.cwd()
    # A folder elsewhere is named by its last part, because the page may be shared and the path is private.
    near = folder.relative_to(here) if folder.is_relative_to(here) else Path(folder.name)
    where, toml = shlex.quote(str(near)), shlex.quote(str(near / "recipe.toml"))
    prompt = shlex.quote(recipe.train.sample_prompt) if recipe and recipe.train.sample_prompt else "'The '"
    possible = {
        "Repeat the run": f"fivefold train {toml}",
        "Resume from its last checkpoint": f"fivefold train {where} --resume",
        "Generate text": f"fivefold generate {where} --prompt {prompt}",
        "Export to a Hugging Face folder": f"fivefold export {where} exported-model",
    }
    for name, title, command in (
        ("tensorboard", "All curves in TensorBoard", "tensorboard --logdir {}"),
        ("wandb", "Upload an offline run to Weights & Biases", "wandb sync {}/offline-run-*"),
        ("mlruns", "All curves in MLflow", f"{FILE_STORE}=true mlflow ui --backend-store-uri {{}}"),
    ):
        if (run / name).is_dir():
            possible[title] = command.format(shlex.quote(str(near / name)))
    if recipe and not card_of(recipe.model).causal:  # it generates no text
        del possible["Generate text"]
    rows = ""
    for title, line in possible.items():  # they wrap between words, not at hyphens, if a word fits a line
        words = (f'<span class="word">{escape(printable(word))}</span>' for word in line.split(" "))
        rows += f"<li><p>{title}</p><pre>{' '.join(words)}</pre></li>\n"
    return f'<ul class="commands">\n{rows}</ul>'


def data_seen(run: Path, lines: Lines) -> str:
    """What was seen of each source; "" if the run does not say it."""
    facts = read_facts(run / DATA_FILE)
    if not (sources := facts.get("sources")):
        return ""
    seen = next((by_name(line, "source_tokens") for line in reversed(lines) if "source_tokens" in line), {})
    if not seen and len(sources) == 1:
        seen = {sources[0]["name"]: max((float(line.get("tokens") or 0) for line in lines), default=0.0)}
    whole = max(1.0, math.fsum(n for n in seen.values() if math.isfinite(n)))
    rows = []
    for source in sources:
        tokens, size = seen.get(source["name"], 0.0), source["tokens"]  # None: a stream's end is not known
        there = "not known" if size is None else short_number(float(size))
        epochs = "-" if size is None else f"{tokens / max(1.0, float(size)):.2f}"
        name, share = source["name"] or "the source", f"{100 * tokens / whole:.3g}%"
        rows.append((name, source["source"], there, short_number(tokens), share, epochs))
    titles = ("Source", "What", "Tokens there are", "Tokens seen", "Share of the run", "Epochs")
    stages = "".join(f"<li>{escape(printable(str(line)))}</li>" for line in facts.get("stages", ()))
    return table(titles, rows) + (f"<p>Shares, by weight:</p><ul>{stages}</ul>" if stages else "")
