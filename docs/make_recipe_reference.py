"""Writes the list of fields in docs/recipes.md from the schema itself, so that it cannot say anything else.

python docs/make_recipe_reference.py
"""

from __future__ import annotations

from pathlib import Path

from fivefold.recipe import explain, load
from fivefold.recipe.words import toml_value

PAGE = Path(__file__).with_name("recipes.md")
BEGIN = "<!-- What follows is written by docs/make_recipe_reference.py, from recipe/schema.py -->\n"


def with_fields(page: str) -> str:
    """The page with its part after BEGIN written anew."""
    before, begin, _ = page.partition(BEGIN)
    assert begin, f"{PAGE.name} has lost its line {BEGIN!r}"
    return before + begin + fields()


def fields() -> str:
    """A table of fields for each section, in the schema's order."""
    lines, section = [], ""
    for field in explain(load("quickstart")):
        here, _, name = field.key.partition(".")
        if here != section:
            section = here
            lines += [
                "",
                f"### `[{section}]`",
                "",
                "| Field | Holds | Default | Meaning |",
                "|---|---|---|---|",
            ]
        default = "unset" if field.default is None else f"`{toml_value(field.default)}`"
        cells = [f"`{name}`", field.type.removesuffix(", or unset"), default, field.doc]
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(with_fields(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
