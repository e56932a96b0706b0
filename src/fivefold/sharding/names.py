"""Patterns of parameter names, as recipes write them. No torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from fivefold.errors import UserError, did_you_mean, shortened

FACTORS = ("lr", "decay")


@dataclass(frozen=True)
class Group:
    """Parameters with factors of their own. pattern: of their names. lr: on the learning rate. decay: on the weight
    decay."""

    pattern: str
    lr: float = 1.0
    decay: float = 1.0


def patterns(text: str) -> tuple[str, ...]:
    """The patterns of `embed*, blocks.[0-3].*`."""
    return tuple(part for one in text.split(",") if (part := one.strip()))


def matching(text: str, names: Iterable[str]) -> frozenset[str]:
    """The names that any of the patterns matches (`*`, `?`, `[0-3]`)."""
    some = patterns(text)
    return frozenset(n for n in names if any(fnmatchcase(n, one) for one in some)) if some else frozenset()


def groups(text: str) -> tuple[Group, ...]:
    """The groups of `*.attention.*: lr=0.5 decay=0, head*: lr=2`.

    Raises:
        UserError: the text is none.
    """
    return tuple(_group(part) for part in patterns(text))


def _group(part: str) -> Group:
    pattern, colon, rest = (one.strip() for one in part.partition(":"))
    values: dict[str, float] = {}
    for word in rest.split():
        name, _, value = word.partition("=")
        try:
            number = float(value)
        except ValueError:
            number = -1.0
        if name not in FACTORS or name in values or not 0 <= number < float("inf"):
            raise UserError(f"{part!r}: {word!r} must be lr=FACTOR or decay=FACTOR, a number of 0 or more")
        values[name] = number
    if not (pattern and colon and values):
        raise UserError(f"{part!r}: must be a pattern with factors, such as 'head*: lr=0.5 decay=0'")
    return Group(pattern, **values)


def factors(some: Iterable[Group], name: str) -> tuple[float, float]:
    """The factors on a parameter's learning rate and weight decay: of the last group whose pattern matches its name."""
    lr = decay = 1.0
    for group in some:
        if fnmatchcase(name, group.pattern):
            lr, decay = group.lr, group.decay
    return lr, decay


def unmatched(key: str, text: str, some: Iterable[str], names: Iterable[str]) -> str:
    """What is wrong with patterns that match no parameter; "" if all do. key: the recipe's field."""
    known = list(names)
    for pattern in some:
        if not any(fnmatchcase(name, pattern) for name in known):
            near = did_you_mean(pattern.strip("*"), known) or f"; the first are {', '.join(known[:3])}"
            return f'{key} = "{shortened(text, 200)}": no parameter of the model is called {pattern!r}{near}'
    return ""
