"""`fivefold recipes`: lists the shipped recipes, or prints one."""

from __future__ import annotations

from math import inf
from textwrap import wrap
from typing import Annotated, Any

import typer

from fivefold.cli.options import JsonOption, flag, print_json
from fivefold.errors import UserError

EXAMPLES = ["fivefold recipes", "fivefold recipes quickstart > my.toml", "fivefold recipes --fields"]


def recipes(
    name: Annotated[
        str | None, typer.Argument(help="Print this recipe's TOML as a start for your own.")
    ] = None,
    fields: Annotated[
        bool, flag("Print the ten fields that most runs set, then all others by name.", "--fields")
    ] = False,
    json: JsonOption = False,
) -> None:
    """List the shipped recipes by family with their parameters, or print one of them."""
    from fivefold.observe.format import short_number
    from fivefold.recipe import families, load, shipped, source
    from fivefold.recipe.load import FIRST

    if fields:
        if name is not None:
            raise UserError(
                f"--fields: leave {name} out; `fivefold check {name} --explain` has the values of a recipe"
            )
        essential, others = _fields()
        print_json({"essential": essential, "others": others}) if json else print(
            _fields_text(essential, others)
        )
        return
    if name is not None:
        text = source(name)
        print_json({"name": name, "toml": text}) if json else print(text, end="")
        return
    found, sizes = shipped(), {name: _parameters(name) for name in shipped()}
    groups = {
        family: sorted(names, key=lambda name: (name != FIRST, sizes[name] or inf))
        for family, names in families().items()
    }
    if json:
        print_json({"recipes": found, "families": groups, "parameters": sizes})
        return
    width = max(map(len, found))
    for family, names in groups.items():
        print(family)
        for name in names:
            count, folders = sizes[name], load(name).train.init_from
            size = short_number(count) if count else "folder's" if folders else ""
            print(f"  {name:{width}} {size:>8}  {found[name]}")


def _fields() -> tuple[list[dict[str, Any]], dict[str, list[str]]]:
    """The essential fields, the most important first, and the names of all others by section."""
    from fivefold.recipe import explain
    from fivefold.recipe.schema import Sections
    from fivefold.recipe.words import ESSENTIAL

    known = {field.key: field for field in explain(Sections())}
    essential = [
        {"key": key, "default": known[key].default, "type": known[key].type, "doc": known[key].doc}
        for key in ESSENTIAL
    ]
    others: dict[str, list[str]] = {}
    for key in known:
        section, _, name = key.partition(".")
        if key not in ESSENTIAL:
            others.setdefault(section, []).append(name)
    return essential, others


def _fields_text(essential: list[dict[str, Any]], others: dict[str, list[str]]) -> str:
    from fivefold.recipe.words import toml_value

    lines = [
        "The fields that most runs set, with their defaults. --layout sets [layout], such as dp=8,zero=3.",
        "",
    ]
    for row in essential:
        default = "unset" if row["default"] is None else toml_value(row["default"])
        sentence = row["doc"].partition(". ")[0].partition(": `")[0].removesuffix(".")
        lines.append(f"  {row['key']:25} {default:9} {sentence}.")
    lines += [
        "",
        "All others. `fivefold check RECIPE --explain` says what they mean, and so does docs/recipes.md.",
        "",
    ]
    for section, names in others.items():
        lines += wrap(", ".join(names), 110, initial_indent=f"  [{section}] ", subsequent_indent="    ")
    return "\n".join(lines)


def _parameters(name: str) -> int | None:
    """Parameters of a shipped recipe's model; None: its folder's, or they depend on the text's vocabulary."""
    from fivefold.recipe import count_parameters, expected_vocab_size, load

    recipe = load(name)
    if recipe.train.init_from:
        return None
    size = expected_vocab_size(recipe)
    return count_parameters(recipe.model.model_copy(update={"vocab_size": size})) if size else None
