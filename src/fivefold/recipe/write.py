"""A recipe as TOML text that loads back to an equal recipe."""

from __future__ import annotations

import json
from typing import Any

from fivefold.recipe.schema import Recipe


def to_toml(recipe: Recipe, comment: str = "") -> str:
    """Every field that is set, section by section; TOML has no None, so unset fields are left out.

    `comment` becomes the first lines, each behind a `#`.
    """
    lines = [f"# {line}".rstrip() for line in comment.splitlines()]
    for section, fields in recipe.model_dump().items():
        lines += [""] if lines else []
        lines += [f"[{section}]"]
        lines += [f"{key} = {toml_value(value)}" for key, value in fields.items() if value is not None]
    return "\n".join(lines) + "\n"


def toml_value(value: Any) -> str:
    """One value as TOML writes it. Types that no field has are shown as Python does (in error messages)."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # TOML's escapes are JSON's, but it also wants the delete character escaped
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list | tuple):
        return "[" + ", ".join(toml_value(item) for item in value) + "]"
    return repr(value)
