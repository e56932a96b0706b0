"""The fields of a recipe, looked up by name, and what each may hold, in words."""

from __future__ import annotations

import types
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from fivefold.recipe.schema import Recipe, Section

SECTIONS: dict[str, type[Section]] = {
    name: field.annotation
    for name, field in Recipe.model_fields.items()
    if isinstance(field.annotation, type) and issubclass(field.annotation, Section)
}
KEYS: dict[str, FieldInfo] = {
    f"{section}.{name}": field
    for section, cls in SECTIONS.items()
    for name, field in cls.model_fields.items()
}

_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
_SIGNS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}


def allowed(field: FieldInfo) -> str:
    """What a field may hold: `a whole number >= 1`, `one of "llama", "gpt2", "bert"`."""
    return _allowed(field.annotation, field.metadata)


def optional(field: FieldInfo) -> bool:
    """Whether a field may be left unset (None), to be worked out from the others."""
    return type(None) in get_args(field.annotation)


def plain_type(field: FieldInfo) -> Any:
    """The type of a field without its `| None`."""
    return _without_none(field.annotation)


def _without_none(annotation: Any) -> Any:
    if get_origin(annotation) in (Union, types.UnionType):
        (annotation,) = (choice for choice in get_args(annotation) if choice is not type(None))
    return annotation


def _allowed(annotation: Any, metadata: Any) -> str:
    annotation = _without_none(annotation)
    if get_origin(annotation) is Literal:
        return "one of " + ", ".join(f'"{choice}"' for choice in get_args(annotation))
    if get_origin(annotation) is tuple:
        items = get_args(annotation)
        return f"a list of {len(items)}, each {_allowed(items[0], ())}"
    if get_origin(annotation) is Annotated:
        inner, info = get_args(annotation)
        return _allowed(inner, info.metadata)
    bounds = [
        f"{sign} {getattr(m, name)}" for m in metadata for name, sign in _SIGNS.items() if hasattr(m, name)
    ]
    return f"{_WORDS[annotation]} {' and '.join(bounds)}".strip()
