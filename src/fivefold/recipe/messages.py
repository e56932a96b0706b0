"""Recipes as text: the type and meaning of each field, error messages, and a recipe as TOML."""

from __future__ import annotations

import json
import re
import types
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from fivefold.errors import LONGEST_MESSAGE, LONGEST_WORD, did_you_mean, printable, shortened
from fivefold.models.rules import meaning
from fivefold.models.section import LARGEST
from fivefold.precision.formats import FORMATS
from fivefold.recipe.dial import KEY, origin
from fivefold.recipe.schema import Section, Sections

SHOWN = {form.multiplied for form in FORMATS.values()}
"""Formats of numbers."""
SECTIONS: dict[str, type[Section]] = {
    name: field.annotation
    for name, field in Sections.model_fields.items()
    if isinstance(field.annotation, type) and issubclass(field.annotation, Section)
}
KEYS: dict[str, FieldInfo] = {
    f"{section}.{name}": field
    for section, cls in SECTIONS.items()
    for name, field in cls.model_fields.items()
}
GONE = (("model", "untie_step", 0),)
"""Section, name and value of what runs of earlier versions name: no field any more, and nothing by this value."""
ELSEWHERE = {
    "train.global_batch_size": "batch_size batch train_batch_size",
    "train.steps": "max_steps max_iters iterations",
    "optim.lr": "learning_rate",
    "model.layers": "num_layers n_layer num_hidden_layers",
    "model.dim": "hidden_size n_embd d_model",
    "model.seq_len": "context_length block_size sequence_length max_seq_len",
}
"""Names of fields in other trainers."""

ESSENTIAL = (
    "data.source",
    "train.tokens",
    "model.layers",
    "model.dim",
    "model.seq_len",
    "train.global_batch_size",
    "optim.lr",
    "train.microbatch_size",
    "layout.recompute",
    "checkpoint.every",
)
"""The ten fields that most runs set, the most important first. (`--layout` sets the parallel axes together.)"""

LONGEST_PROBLEM = 1500
"""Characters of one problem of a recipe, as a message lists it."""
_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
_SECTION_NAMES = f"; valid sections: {', '.join(SECTIONS)}"
_SIGNS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}


def allowed(field: FieldInfo) -> str:
    """What a field may hold: `a whole number >= 1`, `one of "ring", "ulysses", "all_gather"`."""
    such = ", ".join(f'"{example}"' for example in field.examples or ())
    return _allowed(field.annotation, field.metadata) + (f", such as {such}" if such else "")


def optional(field: FieldInfo) -> bool:
    """True if a field may be unset (None); its value is then derived from other fields."""
    return type(None) in get_args(field.annotation)


def none_unsets(key: str) -> bool:
    """True if the text "none" unsets a field; it may also be one of its values."""
    return key in KEYS and optional(KEYS[key]) and "none" not in get_args(plain_type(KEYS[key].annotation))


def plain_type(annotation: Any) -> Any:
    """The type of a field without its `| None`."""
    if get_origin(annotation) in (Union, types.UnionType):
        (annotation,) = (choice for choice in get_args(annotation) if choice is not type(None))
    return annotation


def _allowed(annotation: Any, metadata: Any) -> str:
    annotation = plain_type(annotation)
    if get_origin(annotation) is Literal:
        return "one of " + ", ".join(f'"{choice}"' for choice in get_args(annotation))
    if get_origin(annotation) is tuple:
        items = get_args(annotation)
        if items[-1] is Ellipsis:
            return f"tables with {', '.join(items[0].model_fields)}"
        return f"a list of {len(items)}, each {_allowed(items[0], ())}"
    if get_origin(annotation) is dict:
        return f"a table of names with {_allowed(get_args(annotation)[1], ())} each"
    if get_origin(annotation) is Annotated:
        inner, info = get_args(annotation)
        return _allowed(inner, info.metadata)
    bounds = [
        f"{sign} {bound}"
        for m in metadata
        for name, sign in _SIGNS.items()
        if (bound := getattr(m, name, LARGEST)) != LARGEST
    ]
    return f"{_WORDS[annotation]} {' and '.join(bounds)}".strip()


class Explained(NamedTuple):
    """One field. A value or default of None is derived from other fields."""

    key: str
    value: Any
    type: str
    default: Any
    doc: str
    is_default: bool


def explain(recipe: Sections) -> list[Explained]:
    """All fields: first the essential ones, then the others in the order of the schema."""
    sections = recipe.model_dump().items()
    values = {f"{section}.{name}": v for section, fields in sections for name, v in fields.items()}
    rows = []
    for key, field in ({key: KEYS[key] for key in ESSENTIAL} | KEYS).items():
        type_ = allowed(field) + (", or unset" if optional(field) else "")
        doc = " ".join((field.description or "").split())
        if key.startswith("model."):
            doc = meaning(key.removeprefix("model."), doc)
        if source := origin(recipe, key):
            doc += f" Here by `{KEY}`: {source}."
        rows.append(Explained(key, values[key], type_, field.default, doc, values[key] == field.default))
    return rows


def bad_field(key: str, value: Any) -> str:
    """A key that its section does not have, or a known one with a value of the wrong type or out of range."""
    if key not in KEYS:
        section, _, name = key.partition(".")
        fields = SECTIONS[section].model_fields
        near = (
            _home(name) or did_you_mean(name, fields) or f"; valid keys in [{section}]: {', '.join(fields)}"
        )
        return f"{shortened(key, LONGEST_WORD)} = {short(value)}: unknown key{near}"
    hint, type_ = "", plain_type(KEYS[key].annotation)
    if isinstance(value, str):
        hint = did_you_mean(value, [choice for choice in get_args(type_) if isinstance(choice, str)])
    elif isinstance(value, int) and value > LARGEST and "<=" not in allowed(KEYS[key]):
        hint = f" and <= {LARGEST}"
    if key == "precision.mode" and value in SHOWN:
        hint = "; `fivefold formats` shows it, and nothing trains in it"
    return f"{key} = {short(value)}: must be {allowed(KEYS[key])}{hint}"


def entry_type(key: str) -> type[Section] | None:
    """The type of the tables that a field lists; None for all other fields."""
    items = get_args(plain_type(KEYS[key].annotation)) if key in KEYS else ()
    return items[0] if items and items[-1] is Ellipsis else None


def bad_entries(key: str, value: Any) -> list[str]:
    """What is wrong with a list of tables: a sentence per key."""
    cls = entry_type(key)
    assert cls is not None
    if not isinstance(value, list | tuple) or not all(isinstance(entry, dict) for entry in value):
        return [f"{key} = {short(value)}: must be {allowed(KEYS[key])}; write each below a line [[{key}]]"]
    return [
        f"[[{key}]] number {number}: {text}"
        for number, entry in enumerate(value, 1)
        for text in wrong(cls, entry)
    ]


def wrong(cls: type[BaseModel], entry: dict[str, Any]) -> Iterator[str]:
    """What is wrong with a table: a sentence per key."""
    try:
        cls.model_validate(entry)
    except ValidationError as error:
        for name in dict.fromkeys(str(problem["loc"][0]) for problem in error.errors()):
            field = cls.model_fields.get(name)
            if field is None:
                near = did_you_mean(name, cls.model_fields) or f"; it has {', '.join(cls.model_fields)}"
                yield f"{name} = {short(entry[name])}: unknown key{near}"
            elif name in entry:
                yield f"{name} = {short(entry[name])}: must be {allowed(field)}"
            else:
                yield f"{name} is missing: {allowed(field)}"


def unknown_section(name: str, value: Any) -> str:
    """An unknown section, or a key outside of any section."""
    if isinstance(value, dict):
        return f"[{shortened(name, LONGEST_WORD)}]: unknown section" + (
            did_you_mean(name, SECTIONS) or _SECTION_NAMES
        )
    said = f"{shortened(name, LONGEST_WORD)} = {short(value)}: this key is in no section"
    return said + (_home(name) or _SECTION_NAMES)


def list_problems(name: str, problems: Sequence[str]) -> str:
    """All problems in one message that is not cut: a longer one is shortened in its middle, beside what it quotes."""
    most = max(100, min(LONGEST_PROBLEM, (LONGEST_MESSAGE - len(name) - 40) // len(problems) - 10))
    problems = [shortened(printable(problem), most) for problem in problems]
    if len(problems) == 1:
        return f"{name}: {problems[0]}"
    listed = "".join(f"\n  {number}. {problem}" for number, problem in enumerate(problems, 1))
    return f"{name}: {len(problems)} problems{listed}"


def short(value: Any) -> str:
    """A value as TOML writes it, cut to 60 characters."""
    text = toml_value(value[:60] if isinstance(value, list | tuple) else value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def home(name: str) -> str:
    """The key that a name without its section, or of another trainer, stands for; "" if there is none."""
    return next((k for k in KEYS if name == k.partition(".")[2] or name in ELSEWHERE.get(k, "").split()), "")


def _home(name: str) -> str:
    return f"; did you mean '{key}'?" if (key := home(name)) else ""


def to_toml(recipe: Sections, comment: str = "") -> str:
    """Every field that is set, section by section; TOML has no None, so unset fields are left out.

    `comment` becomes the first lines, each behind a `#`.
    """
    lines = [f"# {line}".rstrip() for line in comment.splitlines()]
    for section, fields in recipe.model_dump().items():
        lines += [""] if lines else []
        lines += [f"[{section}]"]
        entries = {key: value for key, value in fields.items() if entry_type(f"{section}.{key}")}
        replaced = {"source"} if entries.get("sources") else set[str]()
        lines += _fields({k: v for k, v in fields.items() if k not in entries and k not in replaced})
        for key, tables in entries.items():
            for table in tables:
                lines += ["", f"[[{section}.{key}]]", *_fields(table)]
    return "\n".join(lines) + "\n"


def _fields(fields: dict[str, Any]) -> list[str]:
    return [f"{key} = {toml_value(value)}" for key, value in fields.items() if value is not None]


def toml_value(value: Any) -> str:
    """One value as TOML writes it. Types that no field has are shown as Python does (in error messages)."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # TOML's escapes are JSON's, but it also wants the delete character escaped
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list | tuple):
        return "[" + ", ".join(toml_value(item) for item in value) + "]"
    if isinstance(value, dict):
        keys = {key: key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else toml_value(key) for key in value}
        return (
            "{" + ", ".join(f"{keys[k]} = {toml_value(v)}" for k, v in value.items() if v is not None) + "}"
        )
    try:
        return repr(value)
    except ValueError:  # Python writes no numbers of more than 4300 digits
        return f"a number of {value.bit_length()} bits"


def without_gone(section: str, given: Any) -> Any:
    """A copy of what a recipe has under this name, without the fields that are GONE."""
    present = isinstance(given, dict)
    return {n: value for n, value in given.items() if (section, n, value) not in GONE} if present else given
