"""`fivefold`: the list of commands, and how their errors are reported.

Exit codes: `launch/verdict.py`.
"""

from __future__ import annotations

import codecs
import errno
import io
import os
import sys
from collections.abc import Sequence
from functools import partial
from typing import Annotated, NoReturn

import typer

from fivefold.cli import (
    bench,
    catalogs,
    check,
    checkpoints,
    collectives,
    compare,
    draw,
    eval_,
    generate,
    plan,
    plan_search,
    plan_terms,
    plan_trace,
    problems,
    report,
    sweep,
    train,
    verify,
)
from fivefold.cli.options import OUTPUT, RECIPE, examples, flag
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
from fivefold.host.machine import little_space, require_space_for_torch, restart_with_huge_pages
from fivefold.launch.verdict import BUSY, FAILED, USER

# Plain help texts: rich alone takes 0.1 s to import
app = typer.Typer(
    name="fivefold",
    cls=problems.Commands,
    help="Distributed LLM pretraining: describe a run once, train it in any layout.",
    epilog="\b\nStart with:\n  fivefold train quickstart",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)

for name, module, function in (
    ("train", train, train.train),
    ("sweep", sweep, sweep.sweep),
    ("verify", verify, verify.verify),
    ("plan", plan, plan.plan),
    ("plan search", plan_search, plan_search.search),
    ("plan terms", plan_terms, plan_terms.terms),
    ("plan trace", plan_trace, plan_trace.trace),
    ("plan calibrate", bench, bench.calibrate),
    ("compare", compare, compare.compare),
    ("check", check, check.check),
    ("draw", draw, draw.draw),
    ("collectives", collectives, collectives.collectives),
    ("clusters", catalogs, catalogs.clusters),
    ("formats", catalogs, catalogs.formats),
    ("optimizers", catalogs, catalogs.optimizers),
    ("recipes", check, check.recipes),
    ("tokenize", check, check.tokenize),
    ("eval", eval_, eval_.eval_),
    ("generate", generate, generate.generate),
    ("chat", generate, generate.chat),
    ("report", report, report.report),
    ("checkpoints", checkpoints, checkpoints.checkpoints),
    ("export", checkpoints, checkpoints.export),
    ("import", checkpoints, checkpoints.import_),
):
    command = partial(problems.Command, groups=RECIPE | {**getattr(module, "GROUPS", {})} | OUTPUT)
    app.command(name, cls=command, epilog=examples(module.EXAMPLES, name))(function)  # type: ignore[arg-type]
app.add_typer(bench.bench, name="bench")


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
    if (
        arguments is None
        and words[:1] in (["train"], ["bench"], ["sweep"])
        and not {"-h", "--help"} & {*words}
    ):
        restart_with_huge_pages()
    if arguments is None:  # spawned ranks import nothing from the folder that the user is in
        os.environ.setdefault("PYTHONSAFEPATH", "1")
    json = problems.wants_json(words)
    try:
        if words[:1] and words[0] in WITH_TORCH:
            require_space_for_torch()
        if json:
            sys.exit(app(args=words, prog_name="fivefold", standalone_mode=False))
        app(args=None if arguments is None else words, prog_name="fivefold")
    except UserError as error:
        _stop(BUSY if isinstance(error, BusyError) else USER, str(error), error.problems if json else ())
    except (MemoryError, ImportError) as error:
        if isinstance(error, ImportError) and not ("failed to map" in str(error) and little_space()):
            raise
        message = f"memory ran out: {little_space() or 'close other programs'}"
        _stop(USER, message, [problem(message)] if json else ())
    except OSError as error:  # no permission, full disk, name too long: print the system's message
        if error.filename is None and error.errno not in PASSING | {errno.EMFILE}:
            raise
        name = printable(str(error.filename or "output")[:200])
        message = f"{name}: {error.strerror}"
        _stop(
            BUSY if error.errno in PASSING else USER,
            message,
            [Problem(name, None, message, None, None)] if json else (),
        )
    except CheckFailed as error:  # its object is printed
        print(f"failed: {error}", file=sys.stderr)
        sys.exit(FAILED)
    except (CommunicationError, RankFailed) as error:
        _stop(FAILED, str(error), [problem(str(error))] if json else (), "failed")
    except Exception as error:
        if not json or (found := problems.of_options(error, words)) is None:
            raise
        _stop(USER, found.message, [found])


def _stop(code: int, message: str, found: Sequence[Problem], word: str = "error") -> NoReturn:
    """Prints an error, and ends with its exit code. found: its parts, with --json."""
    if found:
        problems.print_problems(message, found)
    else:
        print(f"{word}: {message}", file=sys.stderr)
    sys.exit(code)


ASCII = dict(
    zip(
        "▁▂▃▄▅▆▇█·─═╌┄│┃└┘╱▓▒░∙→µ–",
        "_:-=+*%#.-=~.||++/%x.o>u-",
        strict=True,
    )
)
"""The characters of timelines and bars, and the nearest in ASCII."""
_ESCAPE, _KEEP = "fivefold.escape", "fivefold.keep"  # error handlers of encodings
_COERCED = (
    "C.UTF-8",
    "C.utf8",
    "UTF-8",
)  # Python itself sets LC_CTYPE to one of these where the locale is C (PEP 538)


def in_c_locale() -> bool:
    """True if the user has set the locale C or POSIX. (Without any setting Python assumes UTF-8, as terminals do.)"""
    words = (os.environ.get(name, "") for name in ("LC_ALL", "LC_CTYPE", "LANG"))
    return next((word for word in words if word and word not in _COERCED), "") in ("C", "POSIX")


def prepare(words: Sequence[str]) -> None:
    """Sets standard output and error for the command `words`. In a C locale pictures are drawn in ASCII; text from
    elsewhere stays UTF-8 there, as Python has it."""
    codecs.register_error(_ESCAPE, _escaped)
    codecs.register_error(_KEEP, _kept)
    for stream in (sys.stdout, sys.stderr):
        if not isinstance(stream, io.TextIOWrapper):
            continue
        unicode = stream.encoding.lower().replace("-", "") == "utf8"
        models_text = words[:1] in (["generate"], ["chat"])  # and no pictures
        if unicode and in_c_locale() and not models_text:
            stream.reconfigure(encoding="ascii", errors=_KEEP)
        else:
            stream.reconfigure(errors=_ESCAPE)


def _escaped(error: UnicodeError) -> tuple[str | bytes, int]:
    assert isinstance(error, UnicodeEncodeError)
    missing = error.object[error.start : error.end]
    return "".join(ASCII.get(c) or c.encode("ascii", "backslashreplace").decode() for c in missing), error.end


def _kept(error: UnicodeError) -> tuple[str | bytes, int]:
    assert isinstance(error, UnicodeEncodeError)
    missing = "".join(ASCII.get(c, c) for c in error.object[error.start : error.end])
    return missing.encode("utf-8", "backslashreplace"), error.end


if __name__ == "__main__":
    main()
