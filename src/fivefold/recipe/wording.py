"""What a recipe's errors say: the key, its value, what is allowed, the nearest valid choice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

from fivefold.errors import did_you_mean
from fivefold.recipe.fields import KEYS, SECTIONS, allowed, plain_type
from fivefold.recipe.write import toml_value


def bad_value(key: str, value: Any) -> str:
    """A known key with a value of the wrong type or out of range."""
    hint, type_ = "", plain_type(KEYS[key])
    if isinstance(value, str):
        hint = did_you_mean(value, [choice for choice in get_args(type_) if isinstance(choice, str)])
    elif isinstance(value, float) and type_ is int and value.is_integer():
        hint = f": write {int(value)}"
    return f"{key} = {short(value)}: must be {allowed(KEYS[key])}{hint}"


def unknown_key(key: str, value: Any) -> str:
    """A key that its section does not have."""
    section, _, name = key.partition(".")
    near = _home(name) or did_you_mean(name, SECTIONS[section].model_fields)
    return f"{key} = {short(value)}: [{section}] has no such key" + (
        near or _has(SECTIONS[section].model_fields)
    )


def unknown_section(name: str, value: Any) -> str:
    """A section that does not exist, or a key that stands outside of any section."""
    if isinstance(value, dict):
        return f"[{name}]: no such section" + (did_you_mean(name, SECTIONS) or _has(SECTIONS))
    return f"{name} = {short(value)}: stands in no section" + (_home(name) or _has(SECTIONS))


def not_a_section(name: str, value: Any) -> str:
    """A section's name with something else than a table behind it."""
    return f"{name} = {short(value)}: must be a section: a line [{name}], then its keys"


def together(name: str, problems: Sequence[str]) -> str:
    """One message of all problems."""
    if len(problems) == 1:
        return f"{name}: {problems[0]}"
    listed = "".join(f"\n  {number}. {problem}" for number, problem in enumerate(problems, 1))
    return f"{name}: {len(problems)} problems{listed}"


def short(value: Any) -> str:
    """A value as TOML writes it, cut to 60 characters."""
    text = toml_value(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _home(name: str) -> str:
    """The section that a key belongs to."""
    homes = [known for known in KEYS if known.partition(".")[2] == name]
    return f"; did you mean '{homes[0]}'?" if homes else ""


def _has(choices: Any) -> str:
    return f"; there are: {', '.join(choices)}"
