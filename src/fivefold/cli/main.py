"""`fivefold`: the list of commands, and how their errors are reported.

Exit codes: `launch/interrupt.py`.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence
from functools import partial
from typing import Annotated, NoReturn

import typer

from fivefold.cli import (
    bench,
    chat,
    check,
    checkpoints,
    clusters,
    collectives,
    compare,
    draw,
    eval_,
    export,
    formats,
    generate,
    import_,
    optimizers,
    plan,
    problems,
    recipes,
    report,
    sweep,
    terminal,
    tokenize,
    train,
    verify,
)
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
from fivefold.host.memory import little_space, require_space_for_torch, restart_with_huge_pages
from fivefold.launch.interrupt import BUSY, FAILED, USER

# Plain help texts: rich alone takes 0.1 s to import
app = typer.Typer(
    name="fivefold",
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
    ("compare", compare, compare.compare),
    ("check", check, check.check),
    ("draw", draw, draw.draw),
    ("collectives", collectives, collectives.collectives),
    ("clusters", clusters, clusters.clusters),
    ("formats", formats, formats.formats),
    ("optimizers", optimizers, optimizers.optimizers),
    ("recipes", recipes, recipes.recipes),
    ("tokenize", tokenize, tokenize.tokenize),
    ("eval", eval_, eval_.eval_),
    ("generate", generate, generate.generate),
    ("chat", chat, chat.chat),
    ("report", report, report.report),
    ("checkpoints", checkpoints, checkpoints.checkpoints),
    ("export", export, export.export),
    ("import", import_, import_.import_),
):
    examples = "".join(f"\n  {example}" for example in module.EXAMPLES)
    command = partial(problems.Command, groups=getattr(module, "GROUPS", {}))
    app.command(name, cls=command, epilog=f"\b\nExamples:{examples}")(function)  # type: ignore[arg-type]
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
        bool, typer.Option("--version", help="Print the version and stop.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    pass


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs one command and exits. `arguments` follow the word `fivefold` [default: those of the command line]."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    terminal.prepare(words)
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


if __name__ == "__main__":
    main()
