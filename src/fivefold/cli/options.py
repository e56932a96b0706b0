"""Arguments and options that several commands share."""

from __future__ import annotations

import json as json_
import math
import os
import re
import shutil
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

from fivefold.errors import Problem, UserError, did_you_mean, problem, system_error
from fivefold.files import guard, write, write_atomically


def option(metavar: str, help: str, *names: str, **more: Any) -> Any:
    """An option with a value. names: other ones than the parameter's."""
    return typer.Option(*names, metavar=metavar, help=help, **more)


def flag(help: str, *names: str, **more: Any) -> Any:
    """An option without a value of its own, or with one of a few words."""
    return typer.Option(*names, help=help, **more)


def examples(command: str) -> str:
    """The end of a command's help: its lines of examples.txt."""
    its = re.compile(rf"fivefold {command}(?! (?:search|terms|trace|calibrate))\b")
    lines = Path(__file__).with_name("examples.txt").read_text(encoding="utf-8").splitlines()
    return "\b\nExamples:" + "".join(f"\n  {line}" for line in lines if its.search(line))


RECIPE = {"Recipe": ("set_", "layout")}
OUTPUT = {"Output": ("quiet", "explain", "save", "pictures", "html", "json", "help")}
"""Headings of the help that commands share, and the options below each."""


def run_folders() -> list[str]:
    return [str(recipe.parent) for recipe in sorted(Path().glob("runs/*/recipe.toml"))]


RecipeArgument = Annotated[
    str,
    typer.Argument(
        metavar="RECIPE",
        help="Name of a shipped recipe (see `fivefold recipes`) or path of a TOML file.",
        autocompletion=lambda: list(import_module("fivefold.recipe").shipped()),  # imported if it is used
    ),
]
SetOption = Annotated[
    list[str] | None,
    option(
        "SECTION.KEY=VALUE", "Override a field of the recipe, such as optim.lr=3e-4. Repeatable.", "--set"
    ),
]
LayoutOption = Annotated[
    str | None,
    option("LAYOUT", "Replace the recipe's [layout], such as dp=2 or dp=4,tp=2,zero=1.", "--layout"),
]
JsonOption = Annotated[bool, flag("Print one JSON object instead of text.", "--json")]
RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="Run folder.", autocompletion=run_folders)]
StepOption = Annotated[int | None, option("N", "Step of the checkpoint. [default: the newest]", min=0)]


def require_run(folder: Path, look: bool = True) -> Path:
    """Returns `folder` if it holds a run. look: see `guard`; False where what follows looks. Raises UserError: it does
    not; the message names runs nearby."""
    if (folder / "recipe.toml").is_file():
        guard(folder, look=look)
        return folder
    what = "has no recipe.toml" if folder.is_dir() else "there is no such folder"
    runs = run_folders()
    near = f"; runs here: {', '.join(runs[-5:])}" if runs else ""
    message = f"'{folder}' is not a run: {what}{near}"
    raise UserError(message, [problem(message, "RUN", str(folder))])


def require_writable(**paths: Path | None) -> None:
    """Checks before long work that its results can be written to the paths of these options. Raises UserError: a path
    is not writable."""
    for name, path in paths.items():
        try:
            if path is None:
                continue
            if path.is_dir():
                why = "it is a folder"
            elif not path.parent.is_dir():
                why = f"there is no folder {path.parent}"
            elif os.access(path if path.exists() else path.parent, os.W_OK):
                continue
            else:
                why = "permission denied"
        except OSError as error:
            why = error.strerror or "no such path"
        raise UserError(f"--{name.replace('_', '-')} {path}: cannot be written: {why}")


def save_as(option: str, path: Path, text: str) -> None:
    """Writes the file of an option. A link, a pipe or a device stays what it is. Raises UserError: it cannot be
    written."""
    try:
        plain = not path.is_symlink() and (path.is_file() or not path.exists())
        (write_atomically if plain else write)(path, text)
    except OSError as error:
        raise system_error(f"{option} {path}: cannot be written: {error.strerror}", error) from None


def require_known(option: str, names: Iterable[str], valid: Collection[str]) -> None:
    """Raises UserError for a name after an option that is not valid."""
    for name in names:
        if name not in valid:
            raise UserError(f"{option} {name}: must be {' or '.join(valid)}{did_you_mean(name, list(valid))}")


def bytes_of(option: str, text: str) -> int:
    """Reads a size such as `4096`, `4K`, `1.5M` or `2GiB` (powers of 1024). Raises UserError: it is not a size."""
    size = _scaled(text, "KMGT", 1024, "(?:i?B)?")
    if size is None:
        raise UserError(f"{option}: '{text[:60]}' is not a size; write 4K, 16M, 1G or a number of bytes")
    if not 1 <= size <= 1 << 50:
        raise UserError(f"{option}: {text[:60]} is not possible; must be at least 1 byte and at most 1024T")
    return round(size)


def number(text: str) -> float:
    """Reads a number such as `1.4e12`, `300B` or `15T` (thousands, millions, billions, 1e12). For `parser=` of options.
    Raises typer.BadParameter: it is none."""
    try:
        return float(text)
    except ValueError:
        if (found := _scaled(text, "KMBT", 1000)) is None:
            raise typer.BadParameter(f"'{text[:60]}' is not a number; write 1.4e12, 300B or 15T") from None
        return found


def _scaled(text: str, letters: str, base: int, end: str = "") -> float | None:
    """A number with at most one of these letters behind it, each of which is `base` times the one before. None: it is
    none."""
    pattern = rf"(\d{{1,15}}(?:\.\d{{1,15}})?) ?([{letters}]?){end}"
    found = re.fullmatch(pattern, text.strip(), re.ASCII | re.IGNORECASE)
    return float(found[1]) * base ** f" {letters}".index(found[2].upper() or " ") if found else None


def print_json(result: dict[str, Any]) -> None:
    """Prints the one object of a command with `--json`. NaN and infinity become null, because JSON has neither."""
    finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in result.items()}
    print(json_.dumps(finite, default=str))


def print_problems(message: str, found: Sequence[Problem], /, **beside: Any) -> None:
    """{"error": {"key", "value", "message", "allowed", "nearest"}}: the parts of the first problem, and the whole
    message. Several problems are listed in "problems", too. beside: what else the object has."""
    error = _plain(found[0]) | {"message": message}
    if len(found) > 1:
        error["problems"] = [_plain(one) for one in found]
    print_json({**beside, "error": error})


def _plain(one: Problem) -> dict[str, Any]:
    """Its fields as JSON values: what JSON lacks is text."""
    value = one.value
    simple = value is None or isinstance(value, bool | int | str | list | tuple)
    if not (simple or (isinstance(value, float) and math.isfinite(value))):
        value = str(value)
    return asdict(one) | {"value": value}


def columns(least: int, most: int, words: int = 0) -> int:
    """Columns of the terminal, `least` to `most`, beside so many for words."""
    return max(least, min(most, shutil.get_terminal_size().columns) - words)
