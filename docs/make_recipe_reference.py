"""Writes the list of fields in docs/recipes.md from the schema itself, so that it cannot say anything else; and in
docs/planner.md which keys of other programs are read as which of them.

python docs/make_recipe_reference.py
"""

from __future__ import annotations

from pathlib import Path

from pydantic.fields import FieldInfo

from fivefold.recipe import explain, load
from fivefold.recipe.messages import KEYS, SECTIONS, allowed, entry_type, toml_value
from fivefold_plan.foreign import KINDS, tables

PAGE = Path(__file__).with_name("recipes.md")
BEGIN = "<!-- What follows is written by docs/make_recipe_reference.py, from recipe/schema.py -->\n"

PLANNER = Path(__file__).with_name("planner.md")
BEGIN_KEYS = (
    "<!-- What follows is written by docs/make_recipe_reference.py, from fivefold_plan/foreign/*.toml -->\n"
)
END_KEYS = "<!-- The end of that -->\n"


def with_fields(page: str) -> str:
    """The page with its part after BEGIN written anew."""
    before, begin, _ = page.partition(BEGIN)
    assert begin, f"{PAGE.name} has lost its line {BEGIN!r}"
    return before + begin + fields()


def fields() -> str:
    """A table of fields for each section, in the schema's order."""
    tables: dict[str, list[list[str]]] = {}
    for field in explain(load("quickstart")):
        section, _, name = field.key.partition(".")
        default = "unset" if field.default is None else f"`{toml_value(field.default)}`"
        tables.setdefault(f"[{section}]", []).append(
            [f"`{name}`", field.type.removesuffix(", or unset"), default, field.doc]
        )
        if entry := entry_type(field.key):
            tables[f"[[{field.key}]]"] = [_row(name, own) for name, own in entry.model_fields.items()]
    lines: list[str] = []
    for title in sorted(tables, key=lambda title: list(SECTIONS).index(title.strip("[]").split(".")[0])):
        lines += ["", f"### `{title}`", "", "| Field | Holds | Default | Meaning |", "|---|---|---|---|"]
        for cells in tables[title]:
            lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(lines) + "\n"


def _row(name: str, field: FieldInfo) -> list[str]:
    default = "must be set" if field.is_required() else "unset"
    return [f"`{name}`", allowed(field), default, " ".join((field.description or "").split())]


def with_keys(page: str) -> str:
    """The page of the planner with its table of other programs' keys written anew."""
    before, begin, rest = page.partition(BEGIN_KEYS)
    _, end, after = rest.partition(END_KEYS)
    assert end, f"{PLANNER.name} has lost its line {BEGIN_KEYS!r} or {END_KEYS!r}"
    return before + begin + keys() + end + after


def keys() -> str:
    """A row for each field that keys of other programs set, in the schema's order."""
    kinds = [kind for kind in KINDS if tables(kind)["copied"]]
    rows: dict[str, list[list[str]]] = {key: [[] for _ in kinds] for key in ("[model]", *KEYS)}
    for column, kind in enumerate(kinds):
        for theirs, ours in (tables(kind)["copied"] | tables(kind)["derived"]).items():
            for key in ours.split(", "):
                if key in rows:
                    rows[key][column].append(f"`{theirs}`")
    lines = ["", f"| Field | {' | '.join(kind.NAME for kind in kinds)} |", "|---" * (len(kinds) + 1) + "|"]
    lines += [
        f"| `{key}` | {' | '.join(map(', '.join, cells))} |" for key, cells in rows.items() if any(cells)
    ]
    return "\n".join([*lines, "", ""])


if __name__ == "__main__":
    PLANNER.write_text(with_keys(PLANNER.read_text(encoding="utf-8")), encoding="utf-8")
    PAGE.write_text(with_fields(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
