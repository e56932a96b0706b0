"""`fivefold recipes`: lists the shipped recipes, or prints one."""

from __future__ import annotations

from math import inf
from typing import Annotated

import typer

from fivefold.cli.options import JsonOption, print_json

EXAMPLES = ["fivefold recipes", "fivefold recipes quickstart > my.toml"]


def recipes(
    name: Annotated[
        str | None,
        typer.Argument(help="Print this recipe's TOML as a start for your own."),
    ] = None,
    json: JsonOption = False,
) -> None:
    """List the shipped recipes by family with their parameters, or print one of them."""
    from fivefold.observe.format import short_number
    from fivefold.recipe import families, load, shipped, source
    from fivefold.recipe.load import FIRST

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


def _parameters(name: str) -> int | None:
    """Parameters of a shipped recipe's model; None: its folder's, or they depend on the text's vocabulary."""
    from fivefold.recipe import count_parameters, expected_vocab_size, load

    recipe = load(name)
    if recipe.train.init_from:
        return None
    size = expected_vocab_size(recipe)
    return count_parameters(recipe.model.model_copy(update={"vocab_size": size})) if size else None
