"""`fivefold recipes`: lists the shipped recipes, or prints one."""

from __future__ import annotations

from typing import Annotated

import typer

from fivefold.cli.options import JsonOption, print_json

EXAMPLES = ["fivefold recipes", "fivefold recipes quickstart > my.toml"]


def recipes(
    name: Annotated[
        str | None,
        typer.Argument(show_default=False, help="Print this recipe's TOML as a start for your own."),
    ] = None,
    json: JsonOption = False,
) -> None:
    """List the shipped recipes, or print one of them."""
    from fivefold.recipe import shipped, source

    if name is not None:
        text = source(name)
        print_json({"name": name, "toml": text}) if json else print(text, end="")
        return
    found = shipped()
    if json:
        print_json({"recipes": found})
        return
    width = max(map(len, found))
    for recipe, description in found.items():
        print(f"{recipe:{width}}  {description}")
