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
    catalogs,
    check,
    checkpoints,
    collectives,
    compare,
    draw,
    eval_,
    generate,
    hugging_face,
    local,
    optimizers,
    plan,
    plan_search,
    plan_terms,
    plan_trace,
    problems,
    report,
    sweep,
    terminal,
    train,
    verify,
)
from fivefold.cli.options import OUTPUT, RECIPE, flag
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
    ("plan calibrate", local, local.calibrate),
    ("compare", compare, compare.compare),
    ("check", check, check.check),
    ("draw", draw, draw.draw),
    ("collectives", collectives, collectives.collectives),
    ("clusters", catalogs, catalogs.clusters),
    ("formats", catalogs, catalogs.formats),
    ("optimizers", optimizers, optimizers.optimizers),
    ("recipes", check, check.recipes),
    ("tokenize", check, check.tokenize),
    ("eval", eval_, eval_.eval_),
    ("generate", generate, generate.generate),
    ("chat", generate, generate.chat),
    ("report", report, report.report),
    ("checkpoints", checkpoints, checkpoints.checkpoints),
    ("export", hugging_face, hugging_face.export),
    ("import", hugging_face, hugging_face.import_),
):
    examples = "".join(f"\n  {example}" for example in module.EXAMPLES if f"fivefold {name}" in example)
    command = partial(problems.Command, groups=RECIPE | {**getattr(module, "GROUPS", {})} | OUTPUT)
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
        bool, flag("Print the version and stop.", "--version", callback=_version, is_eager=True)
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
