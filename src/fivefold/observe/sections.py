"""The text sections of a run's page: samples, recipe, machine, commands. Everything is escaped."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from fivefold.draw.canvas import LIGHT
from fivefold.errors import UserError, printable
from fivefold.files import read_bytes, read_json
from fivefold.models.card import card_of
from fivefold.observe.chart import Chart, Series
from fivefold.observe.document import table
from fivefold.observe.format import short_number, size
from fivefold.observe.summary import by_name, column
from fivefold.observe.trackers import FILE_STORE
from fivefold.recipe import Recipe, explain
from fivefold.recipe.load import MOST_BYTES

INITIAL = "initial.json"
"""File of a run folder: where its first weights came from."""
_MOST_SAMPLES = 8
_LONGEST_SAMPLE = 4000


def sampled(items: Sequence[Any], most: int) -> list[Any]:
    """At most `most` of `items`, evenly spread, with the first and the last."""
    if len(items) <= most:
        return list(items)
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]


def samples(lines: Sequence[dict[str, Any]]) -> str:
    """The model's samples, from early to late."""
    found = [(line["step"], line["sample"]) for line in lines if isinstance(line.get("sample"), str)]
    if not found:
        return '<p class="none">This run has no samples.</p>'
    shown = ""
    for step, text in sampled(found, _MOST_SAMPLES):
        text = text if len(text) <= _LONGEST_SAMPLE else text[:_LONGEST_SAMPLE] + " [...]"
        # The parser drops a newline after <pre>: this one, so that a sample's own first newline stays.
        shown += (
            f'<figure class="sample"><figcaption>Step {step:,}</figcaption>'
            f'<pre tabindex="0">\n{escape(printable(text.rstrip()))}</pre></figure>\n'
        )
    left = len(found) - _MOST_SAMPLES
    return shown + (f'<p class="none">{left:,} more are in metrics.jsonl.</p>' if left > 0 else "")


def compression(lines: Sequence[dict[str, Any]]) -> str:
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
    """recipe.toml with marks on fields that differ from their defaults. A field's meaning is its tooltip."""
    if not path.is_file():
        return '<p class="none">This run has no recipe.toml.</p>'
    known = {field.key: field for field in explain(recipe)} if recipe else {}
    section, blocks = "", [""]
    for line in read_bytes(path, MOST_BYTES).decode("utf-8", "replace").splitlines():
        text = escape(printable(line))
        if line.startswith("["):
            section = line.strip("[] ")
            blocks.append(f'<span class="section">{text}</span>\n')
        elif text:
            field = known.get(f"{section}.{line.split('=')[0].strip()}")
            # A default of None is derived from other fields, so such a value is not a change.
            changed = field is not None and field.default is not None and not field.is_default
            doc = f' title="{escape(field.doc)}"' if field else ""
            blocks[-1] += f"<span{' class=changed' * changed}{doc}>{text}</span>\n"
    shown = "".join(f"<div>{block}</div>" for block in blocks if block)
    legend = '<p class="aside"><span class="key">Marked</span> fields differ from their defaults.</p>'
    return f'{legend if known else ""}<pre class="recipe">{shown}</pre>'


def machine(path: Path) -> str:
    """machine.json as a list of facts."""
    try:
        facts = read_json(path)
    except (OSError, UserError):
        facts = None
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
    rows = [f"<li><p>{title}</p><pre>{_unbroken(line)}</pre></li>\n" for title, line in possible.items()]
    return f'<ul class="commands">\n{"".join(rows)}</ul>'


def _unbroken(command: str) -> str:
    """A command that wraps between words, not at hyphens, if a word fits a line."""
    return " ".join(f'<span class="word">{escape(printable(word))}</span>' for word in command.split(" "))


DATA_FILE, SETS = "data.json", "sets"
Lines = Sequence[dict[str, Any]]


def validation_chart(lines: Lines, span: tuple[int, int]) -> Chart:
    """A curve per validation set."""
    names = dict.fromkeys(name for line in lines for name in by_name(line, "val_losses"))
    series = [
        Series(printable(name), *column(lines, f"val_losses/{name}"), f"c{number % len(LIGHT)}")
        for number, name in enumerate(names)
    ]
    return Chart(SETS, "Loss by validation set", series, span, log=True, wide=True)


def data_seen(run: Path, lines: Lines) -> str:
    """What was seen of each source; "" if the run does not say it."""
    try:
        facts = read_json(run / DATA_FILE)
    except (OSError, UserError):
        return ""
    sources = facts.get("sources")
    if not sources:
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
