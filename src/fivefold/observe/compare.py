"""Compares runs: losses over steps, tokens, time and FLOPs, figures, and the fields in which their recipes differ."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fivefold.errors import UserError, printable
from fivefold.files import guard, understood
from fivefold.observe.chart import smooth
from fivefold.observe.format import aligned, duration, short_number, size
from fivefold.observe.metrics import FILE, read_metrics
from fivefold.observe.report import run_recipe, sampled
from fivefold.observe.summary import by_name, column, summarize
from fivefold.recipe import Recipe, count_parameters, explain, flops_per_token
from fivefold.sharding.layout import Layout, to_text

AXES = ("step", "tokens", "seconds", "FLOPs")
"""What losses are drawn against."""
SPREAD = 8.0
"""Runs whose lengths differ by more get a logarithmic x axis."""
FIGURES: Mapping[str, tuple[str, Callable[[float], str]]] = {
    "parameters": ("Parameters", short_number),
    "steps": ("Steps", lambda v: f"{v:,.0f}"),
    "tokens": ("Tokens", short_number),
    "flops": ("FLOPs", lambda v: f"{v:.3g}"),
    "loss": ("Train loss", lambda v: f"{v:.4f}"),
    "val_loss": ("Val. loss", lambda v: f"{v:.4f}"),
    "best_val_loss": ("Lowest val.", lambda v: f"{v:.4f}"),
    "val_bits_per_byte": ("Bits/byte", lambda v: f"{v:.4f}"),
    "train_s": ("Time", duration),
    "tokens_per_s": ("Tokens/s", short_number),
    "mfu": ("MFU", lambda v: f"{100 * v:.1f}%"),
    "hfu": ("HFU", lambda v: f"{100 * v:.1f}%"),
    "peak_memory_bytes": ("Memory", size),
}
"""Of a run, in the table: its title, and how it is shown."""
LOSSES = {"loss": "training loss, smoothed", "val_loss": "validation loss"}
TOKENIZER_KEYS = {"data.tokenizer", "model.vocab_size"}
SMALLEST_IS_BEST = {"loss", "val_loss", "best_val_loss", "val_bits_per_byte"}


@dataclass(frozen=True)
class ComparedRun:
    """A run to compare. recipe: None if it is missing or of another version."""

    name: str
    folder: Path
    lines: Sequence[dict[str, Any]]
    recipe: Recipe | None

    @property
    def figures(self) -> dict[str, float]:
        """Those of FIGURES that the run has."""
        figures = dict(summarize(self.lines))
        if (model := self._model) is not None:
            figures["parameters"] = count_parameters(model)
            if "tokens" in figures:
                figures["flops"] = flops_per_token(model) * figures["tokens"]
        return {key: figures[key] for key in FIGURES if key in figures}

    @property
    def _model(self) -> Any:
        return self.recipe.model if self.recipe and self.recipe.model.vocab_size else None

    def along(self, axis: str, key: str) -> tuple[list[float], list[float]]:
        """The values of `key` over an axis of AXES; empty if the run does not have it."""
        steps, values = column(self.lines, key)
        if axis == "step":
            return list(steps), values
        places: dict[int, float] = {}  # of each step on the axis
        if axis == "seconds":
            total, before = 0.0, 0
            for step, seconds in zip(*column(self.lines, "step_s"), strict=True):
                # Where only each n-th step was written, the others took as long
                total += (seconds if math.isfinite(seconds) else 0.0) * max(0, step - before)
                before = max(step, before)
                places[step] = float(f"{total:.6g}")
        elif axis == "tokens" or self._model is not None:
            factor = 1 if axis == "tokens" else flops_per_token(self._model)
            places = {step: n * factor for step, n in zip(*column(self.lines, "tokens"), strict=True)}
        pairs = [(places[step], value) for step, value in zip(steps, values, strict=True) if step in places]
        return [x for x, _ in pairs], [y for _, y in pairs]


def read_runs(folders: Sequence[Path]) -> list[ComparedRun]:
    """The runs in these folders, named by as much of their paths as tells them apart. Raises UserError: a folder is no
    run, or comes twice."""
    real = [folder.resolve() for folder in folders]
    if twice := [str(f) for f, r in zip(folders, real, strict=True) if real.count(r) > 1]:
        raise UserError(f"{twice[0]} is given twice; a comparison needs different runs")
    depth = next(n for n in range(1, 100) if len({r.parts[-n:] for r in real}) == len(real))
    runs = []
    for folder, there in zip(folders, real, strict=True):
        guard(folder)
        with understood(folder / FILE):
            lines = read_metrics(folder)
        runs.append(ComparedRun(printable("/".join(there.parts[-depth:])), folder, lines, run_recipe(folder)))
    return runs


def differences(runs: Sequence[ComparedRun]) -> dict[str, list[Any]]:
    """{field: its value in each run} of the recipe's fields that differ. A run without a recipe has None."""
    values = [{row.key: row.value for row in explain(run.recipe)} if run.recipe else {} for run in runs]
    known = [fields for fields in values if fields]
    keys = [key for key in (known[0] if known else ()) if any(f[key] != known[0][key] for f in known)]
    return {key: [fields.get(key) for fields in values] for key in keys}


def as_json(runs: Sequence[ComparedRun]) -> dict[str, Any]:
    """The comparison as JSON values."""
    rows = [
        {"run": str(run.folder), "name": run.name}
        | {k: v if math.isfinite(v) else None for k, v in run.figures.items()}
        for run in runs
    ]
    return {"runs": rows, "differences": differences(runs), "notes": notes(runs)}


def notes(runs: Sequence[ComparedRun]) -> list[str]:
    """What a reader of the comparison has to know."""
    changed = differences(runs)
    texts = [f"{run.name} has no recipe that this version reads." for run in runs if run.recipe is None]
    if TOKENIZER_KEYS & changed.keys():
        texts.append("The tokenizers differ, so losses per token do not compare; bits per byte do.")
    if _other_texts(runs):
        texts.append("The data differ, so validation losses are of different texts.")
    if {"train.val_sequences", "model.seq_len"} & changed.keys():
        texts.append("Validation uses other sequences, so compare validation losses with care.")
    return texts


def _other_texts(runs: Sequence[ComparedRun]) -> bool:
    held_out = [(run.recipe.data.specs, run.recipe.data.val_fraction) for run in runs if run.recipe]
    return any(data != held_out[0] for data in held_out)


def text(runs: Sequence[ComparedRun]) -> str:
    """The comparison as lines for a terminal: figures of each run, then the fields in which they differ."""
    all_figures = [run.figures for run in runs]
    keys = [key for key in FIGURES if any(key in figures for figures in all_figures)]
    rows = [["", *(FIGURES[key][0] for key in keys)]]
    rows += [[run.name, *_cells(f, keys)] for run, f in zip(runs, all_figures, strict=True)]
    changed = differences(runs)
    lines = aligned(rows, (0,))
    if changed:
        table = [["", *(run.name for run in runs)]]
        table += [[key, *(_value(value)[:40] for value in values)] for key, values in changed.items()]
        lines += ["", "differences", *aligned(table, (0,))]
    return "\n".join([*lines, *(f"note: {note}" for note in notes(runs))])


def _cells(figures: Mapping[str, float], keys: Sequence[str]) -> list[str]:
    return [FIGURES[key][1](figures[key]) if key in figures else "" for key in keys]


def _value(value: Any) -> str:
    return "unset" if value is None else printable(str(value))


def row(run: ComparedRun) -> dict[str, Any]:
    """A run in the page's list: its figures, as numbers and as they are shown, its layout and its architecture."""
    figures, recipe = run.figures, run.recipe
    return {
        "figures": {key: value if math.isfinite(value) else None for key, value in figures.items()},
        "shown": {key: FIGURES[key][1](value) for key, value in figures.items()},
        "layout": to_text(Layout.from_recipe(recipe.layout)) if recipe else "",
        "arch": recipe.model.arch if recipe else "",
    }


def side_by_side(runs: Sequence[ComparedRun]) -> dict[str, Any]:
    """`as_json`, with differences as text, and what else the page shows over any axis: kinds, {key: title} of losses;
    best: {figure: its lowest value}."""
    found = as_json(runs)
    for one, run in zip(found["runs"], runs, strict=True):
        one["run"] = printable(str(run.folder))
    changed = {key: [*map(_value, values)] for key, values in found["differences"].items()}
    return found | {"axes": AXES, "kinds": _kinds(runs), "best": best(runs), "differences": changed}


def _kinds(runs: Sequence[ComparedRun]) -> dict[str, str]:
    sets = dict.fromkeys(name for run in runs for line in run.lines for name in by_name(line, "val_losses"))
    return LOSSES | {f"val_losses/{name}": f"loss on {printable(name)}" for name in sets}


def drawn(runs: Sequence[ComparedRun], axis: str, points: int) -> dict[str, Any]:
    """What the page draws over an axis of AXES: curves, {folder: {kind: (places, values)}} of at most so many points;
    spread: the axis is logarithmic."""
    kinds = _kinds(runs)
    last = [places[-1] for run in runs if (places := run.along(axis, "loss")[0])]
    spread = bool(last) and max(last) > SPREAD * min(last) > 0
    low = min(last) / 20 if spread else -math.inf
    curves = {
        printable(str(run.folder)): {kind: _curve(run, axis, kind, low, points) for kind in kinds}
        for run in runs
    }
    return {"curves": curves, "spread": spread}


def _curve(run: ComparedRun, axis: str, kind: str, low: float, most: int) -> tuple[list[float], list[Any]]:
    """At most so many points of a curve from a place on."""
    places, values = run.along(axis, kind)
    if kind == "loss":
        values = smooth(values, len(values) // 50 | 1)
    points = sampled([(x, y) for x, y in zip(places, values, strict=True) if x >= low], most)
    return [x for x, _ in points], [y if math.isfinite(y) else None for _, y in points]


def best(runs: Sequence[ComparedRun]) -> dict[str, float]:
    """The lowest loss of each kind, of those that compare."""
    comparable, changed = SMALLEST_IS_BEST, differences(runs).keys()
    if _other_texts(runs) or "model.seq_len" in changed:
        comparable = set[str]()
    if "train.val_sequences" in changed:
        comparable = comparable & {"loss"}
    if TOKENIZER_KEYS & changed:
        comparable = comparable & {"val_bits_per_byte"}
    figures = [run.figures for run in runs]
    values = {key: [f[key] for f in figures if math.isfinite(f.get(key, math.nan))] for key in comparable}
    return {key: min(some) for key, some in values.items() if some}
