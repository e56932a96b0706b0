"""A sweep as data: recipes that differ in a few fields, as a table. It is run, drawn and fitted.

FOLDER/sweep.json has the table: a row per run, with what was set, how far it is, and its figures once it is finished.
FOLDER/base.toml is the recipe as it was when the sweep began. FOLDER/NAME is the run of the row with that name.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import chain, count, product
from pathlib import Path
from typing import Any

from fivefold.errors import UserError, shortened
from fivefold.files import guard, make_folder, read_bytes, read_json, understood, write_atomically
from fivefold.recipe.load import MOST_BYTES, Recipe, load, source

FILE, BASE, FORMAT = "sweep.json", "base.toml", 1
FLOPS = "flops"
"""Beside the recipe's fields, `--over` takes this one: the run's 6 N D, from which its tokens follow."""
MOST_RUNS = 1000
WAITING, FINISHED, STOPPED, FAILED = "waiting", "finished", "stopped", "failed"
Settings = Mapping[str, str]
"""{field: its value as text}."""


@dataclass
class Row:
    """One run. why: of a failure. figures: parameters, tokens, flops from the start; losses, speed and memory once it
    is finished."""

    name: str
    settings: Settings
    status: str = WAITING
    why: str = ""
    figures: dict[str, Any] = field(default_factory=dict)

    @property
    def texts(self) -> list[str]:
        """Its overrides of the recipe. FLOPs count as the tokens that they make."""
        own = {key: value for key, value in self.settings.items() if key != FLOPS}
        if FLOPS in self.settings:  # until the size is known, any number of tokens
            own["train.tokens"] = str(self.figures.get("tokens", 1))
        return [f"{key}={value}" for key, value in own.items()]


@dataclass
class Sweep:
    """A recipe, what all runs change in it (`--set`, `--layout`), what they vary (`--over`), and a row per run."""

    recipe: str
    overrides: list[str]
    layout: str | None
    over: list[str]
    rows: list[Row]
    base: str  # text of the recipe

    @property
    def varied(self) -> list[str]:
        """The fields that differ between runs."""
        keys = dict.fromkeys(key for row in self.rows for key in row.settings)
        return [key for key in keys if len({row.settings.get(key) for row in self.rows}) > 1]

    def load(self, base: str | Path, row: Row) -> Recipe:
        """The recipe of a row. base: the sweep's recipe, by name or path. Raises UserError: a value is wrong, or does
        not fit the others."""
        return load(base, self.overrides, self.layout, row.texts)


def grid(over: Sequence[str]) -> list[dict[str, str]]:
    """The settings of each run: all combinations of the groups. In a group such as `model.dim=64,128 model.heads=2,4`
    the fields move together. Raises UserError: a group is not of this form, a field comes twice, or there are too many
    runs."""
    groups = [_group(text) for text in over]
    keys = [key for group in groups for key in group[0]]
    if twice := {key for key in keys if keys.count(key) > 1}:
        raise UserError(f"--over: {', '.join(sorted(twice))} is varied twice; give all its values at once")
    if FLOPS in keys and (length := {"train.tokens", "train.steps"} & set(keys)):
        raise UserError(f"--over: {FLOPS} sets the number of tokens, so {', '.join(length)} cannot vary, too")
    if (runs := math.prod(map(len, groups))) > MOST_RUNS:
        raise UserError(f"--over: {runs:,} runs; a sweep has at most {MOST_RUNS:,}")
    return [{k: v for part in parts for k, v in part.items()} for parts in product(*groups)]


def _group(text: str) -> list[dict[str, str]]:
    """The settings that a group makes, one after the other."""
    said = f"--over {shortened(text, 200)!r}"
    values: dict[str, list[str]] = {}
    for part in _split(text, " "):
        key, equals, given = (word.strip() for word in part.partition("="))
        if not equals or not given:
            raise UserError(f"{said}: must have the form section.key=value,value,...")
        if key in values:
            raise UserError(f"{said}: {key} is varied twice; give all its values at once")
        values[key] = _split(given, ",")
        for number, text_ in enumerate(values[key] if key == FLOPS else ()):
            flops = math.nan
            with suppress(ValueError):
                flops = float(text_)
            if not 0 < flops < math.inf:
                raise UserError(f"{said}: {FLOPS} = {text_}: must be a number above 0, such as 1e15")
            values[key][number] = f"{flops:g}"
    if not values:
        raise UserError(f"{said}: must have the form section.key=value,value,...")
    counts = {key: len(given) for key, given in values.items()}
    if len(set(counts.values())) > 1:
        shown = ", ".join(f"{key} {count}" for key, count in counts.items())
        raise UserError(
            f"{said}: fields of one --over move together, so each needs as many values: {shown}. Give fields that vary "
            "on their own an --over each"
        )
    return [dict(zip(values, row, strict=True)) for row in zip(*values.values(), strict=True)]


def _split(text: str, mark: str) -> list[str]:
    """The parts of a text between marks outside of brackets and quotes, without empty ones."""
    parts, depth, quote = [""], 0, ""
    for character in text:
        if quote or character in "\"'":
            quote = "" if character == quote else quote or character
        depth += (character in "[{") - (character in "]}")
        if not quote and depth == 0 and (character == mark or (mark == " " and character.isspace())):
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts if part.strip()]


def make(
    recipe: str, overrides: Sequence[str], layout: str | None, over: Sequence[str], rows: Sequence[Row] = ()
) -> Sweep:
    """A sweep. rows: those that the folder has already; they stay. Raises UserError: the recipe cannot be read, or
    `over` is not a grid of settings."""
    known = [row.settings for row in rows]
    taken = {row.name for row in rows}
    every = grid(over)
    varied = [key for key in every[0] if len({settings[key] for settings in every}) > 1 or len(every) == 1]
    found = list(rows)
    for settings in every:
        if settings not in known:
            parts = (key.rpartition(".")[2] + settings[key] for key in varied)  # dim64_heads2_tokens200000
            name = re.sub(r"[^\w.+-]+", "-", "_".join(parts), flags=re.ASCII)[:100].strip("-.") or "run"
            names = chain([name], (f"{name}-{number}" for number in count(2)))
            row = Row(next(name for name in names if name not in taken), settings)
            found.append(row)
            taken.add(row.name)
            known.append(settings)
    return Sweep(recipe, list(overrides), layout, list(over), found, source(recipe))


def is_sweep(folder: Path) -> bool:
    return (folder / FILE).is_file()


def read(folder: Path) -> Sweep:
    """The sweep in a folder. Raises UserError: there is none, or it is damaged."""
    if not is_sweep(folder):
        raise UserError(f"'{folder}' is not a sweep: it has no {FILE}")
    guard(folder, look=False)
    path = folder / FILE
    found = read_json(path)
    with understood(path):
        if found["format"] != FORMAT:
            raise UserError(f"{path}: format {found['format']!r}; this version reads {FORMAT}")
        rows = []
        for row in found["runs"]:
            settings = {str(key): str(value) for key, value in row["settings"].items()}
            figures = {str(key): value for key, value in row["figures"].items() if value is not None}
            if bad := [key for key, value in figures.items() if type(value) not in (int, float)]:
                raise TypeError(f"figures.{bad[0]} is no number")
            sizes = [figures[key] for key in ("parameters", "tokens", "flops") if row["status"] == FINISHED]
            if not all(size > 0 for size in sizes):
                raise ValueError("a size is not above 0")
            rows.append(Row(str(row["name"]), settings, str(row["status"]), str(row["why"]), figures))
        if bad := [row.name for row in rows if not re.fullmatch(r"[\w+-][\w.+-]*", row.name, re.ASCII)]:
            raise UserError(f"{path}: {bad[0]!r} is no name of a run")
        texts = [str(text) for text in found["set"]], [str(text) for text in found["over"]]
        base = read_bytes(folder / BASE, MOST_BYTES).decode("utf-8")
        return Sweep(str(found["recipe"]), texts[0], found["layout"], texts[1], rows, base)


def write(folder: Path, sweep: Sweep) -> None:
    """Writes sweep.json, and base.toml the first time."""
    make_folder(folder)
    if not (folder / BASE).exists():
        write_atomically(folder / BASE, sweep.base)
    rows = [asdict(row) for row in sweep.rows]
    for row in rows:
        infinite = [key for key, v in row["figures"].items() if isinstance(v, float) and not math.isfinite(v)]
        row["figures"] |= dict.fromkeys(infinite)
    content = {
        "format": FORMAT,
        "recipe": sweep.recipe,
        "set": sweep.overrides,
        "layout": sweep.layout,
        "over": sweep.over,
        "runs": rows,
    }
    write_atomically(folder / FILE, json.dumps(content, indent=1, allow_nan=False) + "\n")
