"""`fivefold`: the list of commands, and how their errors are reported.

Exit codes: `launch/verdict.py`.
"""

from __future__ import annotations

import codecs
import errno
import io
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from fivefold import wings
from fivefold.cli import check, generate, runs, train
from fivefold.cli.options import OUTPUT, RECIPE, examples, flag, print_problems
from fivefold.errors import (
    PASSING,
    BusyError,
    CheckFailed,
    CommunicationError,
    Problem,
    RankFailed,
    UserError,
    printable,
    problem,
)
from fivefold.host.machine import little_space, require_space_for_torch, restart_with_tuned_malloc
from fivefold.launch.verdict import BUSY, FAILED, USER

SHORT = 8
"""Arguments and options of a command whose help has one list."""


class Commands(TyperGroup):
    """The commands, some of which have names of two words: `plan search`."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if (name := " ".join(args[:2])) in self.commands:
            return name, self.commands[name], args[2:]
        return super().resolve_command(ctx, args)


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


# Plain help texts: rich alone takes 0.1 s to import
app = typer.Typer(
    name="fivefold",
    cls=Commands,
    help="Distributed LLM pretraining: describe a run once, train it in any layout.",
    epilog="\b\nStart with:\n  fivefold train quickstart",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)

COMMANDS: dict[str, Any] = {
    "train": train.train,
    "play": "play",
    "sweep": train.sweep,
    "verify": train.verify,
    "plan": "plan",
    "plan search": "plan",
    "plan terms": "plan",
    "plan trace": "plan",
    "plan calibrate": "plan",
    "compare": "plan",
    "check": check.check,
    "draw": "plan",
    "collectives": "plan",
    "clusters": "plan",
    "formats": runs.formats,
    "optimizers": "plan",
    "recipes": check.recipes,
    "tokenize": check.tokenize,
    "eval": runs.eval_,
    "generate": generate.generate,
    "chat": generate.chat,
    "report": runs.report,
    "checkpoints": runs.checkpoints,
    "export": runs.export,
    "import": runs.import_,
    "bench": "plan",
}
"""The commands in the order of the help: the function, or the part of another package that has it (`wings.PARTS`)."""


def _missing(name: str, error: wings.Missing) -> Any:
    """A command of a package that cannot be used says so, whatever follows it."""

    def refuse() -> None:
        raise UserError(f"`fivefold {name}` cannot run: {error}")

    refuse.__doc__ = f"(Not available: {error}.)"
    return refuse


for name, function in COMMANDS.items():
    anything = {}
    if isinstance(function, str):
        try:
            function = wings.part(function).COMMANDS[name]
        except wings.Missing as error:
            function, anything = (
                _missing(name, error),
                {"ignore_unknown_options": True, "allow_extra_args": True},
            )
    if isinstance(function, typer.Typer):
        app.add_typer(function, name=name)
        continue
    groups = getattr(sys.modules[function.__module__], "GROUPS", {})
    command = partial(Command, groups=RECIPE | groups | OUTPUT)
    app.command(name, cls=command, epilog=examples(name), context_settings=anything)(function)  # type: ignore[arg-type]

WITH_TORCH = {"train", "sweep", "verify", "bench", "eval", "generate", "chat", "export", "import"}


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"fivefold {version('fivefold')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, flag("Print the version and stop.", "--version", callback=_version, is_eager=True)
    ] = False,
) -> None:
    pass


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs one command and exits. `arguments` follow the word `fivefold` [default: those of the command line]."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    prepare(words)
    if arguments is None:
        if words[:1] in (["train"], ["bench"], ["sweep"]) and not {"-h", "--help"} & {*words}:
            restart_with_tuned_malloc()
        os.environ.setdefault("PYTHONSAFEPATH", "1")  # spawned ranks import nothing from the user's folder
    json = "--json" in (words[: words.index("--")] if "--" in words else words)
    try:
        if words[:1] and words[0] in WITH_TORCH:
            require_space_for_torch()
        if json:
            sys.exit(app(args=words, prog_name="fivefold", standalone_mode=False))
        app(args=None if arguments is None else words, prog_name="fivefold")
    except CheckFailed as error:  # its object is printed
        print(f"failed: {error}", file=sys.stderr)
        sys.exit(FAILED)
    except Exception as error:
        if (told := _told(error, words)) is None:
            raise
        code, message, problems = told
        if json:
            print_problems(message, problems)
        else:
            print(f"{'failed' if code == FAILED else 'error'}: {message}", file=sys.stderr)
        sys.exit(code)


def _told(error: Exception, words: Sequence[str]) -> tuple[int, str, Sequence[Problem]] | None:
    """(exit code, message, its parts) of an error. None: it is a fault of the program's."""
    if isinstance(error, UserError):
        return BUSY if isinstance(error, BusyError) else USER, str(error), error.problems
    if isinstance(error, CommunicationError | RankFailed):
        return FAILED, str(error), [problem(str(error))]
    unmapped = isinstance(error, ImportError) and "failed to map" in str(error) and little_space()
    if isinstance(error, MemoryError) or unmapped:
        message = f"memory ran out: {little_space() or 'close other programs'}"
        return USER, message, [problem(message)]
    if isinstance(error, OSError):  # no permission, full disk, name too long: the system's message
        if error.filename is None and error.errno not in PASSING | {errno.EMFILE}:
            return None
        name = printable(str(error.filename or "output")[:200])
        message = f"{name}: {error.strerror}"
        code = BUSY if error.errno in PASSING else USER
        return code, message, [Problem(name, None, message, None, None)]
    if not hasattr(error, "format_message") or not hasattr(error, "exit_code"):
        return None
    # With --json: what the parser of the command line refuses
    param = getattr(error, "param", None)
    names = list(getattr(param, "opts", None) or [getattr(error, "option_name", None)])
    key = names[0]
    if key is not None and not key.startswith("-"):  # an argument, such as RUN
        key = getattr(param, "metavar", None) or key.upper()
    found = problem(error.format_message(), key, _typed(words, names))  # type: ignore[attr-defined]
    if near := getattr(error, "possibilities", None):
        found = replace(found, nearest=near[0])
    return USER, found.message, [found]


ASCII = dict(zip("▁▂▃▄▅▆▇█·─═╌┄│┃└┘╱▓▒░∙→µ–", "_:-=+*%#.-=~.||++/%x.o>u-", strict=True))
"""The characters of timelines and bars, and the nearest in ASCII."""
_ESCAPE, _KEEP = "fivefold.escape", "fivefold.keep"  # error handlers of encodings
_COERCED = ("C.UTF-8", "C.utf8", "UTF-8")
"""Python itself sets LC_CTYPE to one of these where the locale is C (PEP 538)."""


def prepare(words: Sequence[str]) -> None:
    """Sets standard output and error for the command `words`. In a C locale pictures are drawn in ASCII; text from
    elsewhere stays UTF-8 there, as Python has it."""
    codecs.register_error(_ESCAPE, partial(_replaced, False))
    codecs.register_error(_KEEP, partial(_replaced, True))
    # Without any setting Python assumes UTF-8, as terminals do
    locales = [os.environ.get(name, "") for name in ("LC_ALL", "LC_CTYPE", "LANG")]
    in_c_locale = next((x for x in locales if x and x not in _COERCED), "") in ("C", "POSIX")
    for stream in (sys.stdout, sys.stderr):
        if not isinstance(stream, io.TextIOWrapper):
            continue
        unicode = stream.encoding.lower().replace("-", "") == "utf8"
        models_text = words[:1] in (["generate"], ["chat"])  # and no pictures
        if unicode and in_c_locale and not models_text:
            stream.reconfigure(encoding="ascii", errors=_KEEP)
        else:
            stream.reconfigure(errors=_ESCAPE)


def _replaced(keep: bool, error: UnicodeError) -> tuple[str | bytes, int]:
    """What stands for characters that a stream cannot write. keep: text from elsewhere stays UTF-8."""
    assert isinstance(error, UnicodeEncodeError)
    missing = error.object[error.start : error.end]
    if keep:
        return "".join(ASCII.get(c, c) for c in missing).encode("utf-8", "backslashreplace"), error.end
    return "".join(ASCII.get(c) or c.encode("ascii", "backslashreplace").decode() for c in missing), error.end


if __name__ == "__main__":
    main()
