"""Errors of a command with `--json`: one JSON object on standard output, with the exit code of the text."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from types import MappingProxyType
from typing import Any

from typer.core import TyperCommand, TyperGroup

from fivefold.cli.options import print_json
from fivefold.errors import Problem, problem

SHORT = 8
"""Arguments and options of a command whose help has one list."""


def wants_json(words: Sequence[str]) -> bool:
    """True if a command was typed with --json."""
    options = words[: words.index("--")] if "--" in words else words
    return "--json" in options


def print_problems(message: str, found: Sequence[Problem], /, **beside: Any) -> None:
    """{"error": {"key", "value", "message", "allowed", "nearest"}}: the parts of the first problem, and the whole
    message. Several problems are listed in "problems", too. beside: what else the object has."""
    error = _plain(found[0]) | {"message": message}
    if len(found) > 1:
        error["problems"] = [_plain(one) for one in found]
    print_json({**beside, "error": error})


def _plain(one: Problem) -> dict[str, Any]:
    """Its fields as JSON values: what JSON lacks is text."""
    value = one.value
    simple = value is None or isinstance(value, bool | int | str | list | tuple)
    if not (simple or (isinstance(value, float) and math.isfinite(value))):
        value = str(value)
    return asdict(one) | {"value": value}


def of_options(error: Exception, words: Sequence[str]) -> Problem | None:
    """What the parser of the command line refuses. None: the error is another one."""
    message = getattr(error, "format_message", None)
    if message is None or not hasattr(error, "exit_code"):
        return None
    param = getattr(error, "param", None)
    names = list(getattr(param, "opts", None) or [getattr(error, "option_name", None)])
    key = names[0]
    if key is not None and not key.startswith("-"):  # an argument, such as RUN
        key = getattr(param, "metavar", None) or key.upper()
    near = list(getattr(error, "possibilities", None) or [])
    found = problem(message(), key, _typed(words, names))
    return Problem(found.key, found.value, found.message, found.allowed, near[0] if near else found.nearest)


class Commands(TyperGroup):
    """The commands, some of which have names of two words: `plan search`."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name = " ".join(args[:2])
        return (
            (name, self.commands[name], args[2:])
            if name in self.commands
            else super().resolve_command(ctx, args)
        )


class Command(TyperCommand):
    """A command. An unknown option that is the name of a recipe's field is refused with how to set it.

    groups: headings of the help, and the names of the options below each. A short help has none.
    """

    def __init__(self, *args: Any, groups: Mapping[str, Sequence[str]] = MappingProxyType({}), **more: Any):
        super().__init__(*args, **more)
        self.headings: dict[str, str] = {}
        for title, names in groups.items():
            for name in names:
                self.headings.setdefault(name, title)  # the first group has it

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        shown = [
            p for p in self.params if p.param_type_name == "argument" and not getattr(p, "hidden", False)
        ]
        words = [f"{p.metavar}..." if p.nargs == -1 else f"{p.metavar}" for p in shown]
        return ["[OPTIONS]", *(w if p.required else f"[{w}]" for p, w in zip(shown, words, strict=True))]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        headings = self.headings if len(self.params) > SHORT else {}
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        sections |= {title: [] for title in headings.values()}
        for param in self.get_params(ctx):
            if record := param.get_help_record(ctx):
                argument = param.param_type_name == "argument"
                title = "Arguments" if argument else headings.get(param.name or "", "Options")
                name = f"{param.metavar}" if argument else record[0]
                sections[title].append((name, record[1]))
        for title, records in sections.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        words = list(args)
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            name = getattr(error, "option_name", None) if hasattr(error, "possibilities") else None
            if name and any("--set" in param.opts for param in self.params):
                from fivefold.recipe.messages import home

                if key := home(name.lstrip("-").replace("-", "_")):
                    use = f"--set {key}={_typed(words, [name]) or '...'}"
                    said = f"{name} is a field of the recipe. Use {use}"
                    error.__dict__.update(message=said, possibilities=None)
            raise


def _typed(words: Sequence[str], names: Sequence[str | None]) -> str | None:
    """The text after one of these options."""
    for word, after in zip(words, [*words[1:], None], strict=True):
        name, equals, value = word.partition("=")
        if name in names:
            return value if equals else after
    return None
