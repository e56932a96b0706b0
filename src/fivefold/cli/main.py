"""`fivefold`: the list of commands, and how their errors are reported.

Exit codes: `launch/exits.py`.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Sequence
from typing import Annotated

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
    recipes,
    report,
    sweep,
    tokenize,
    train,
    verify,
)
from fivefold.errors import (
    PASSING,
    BusyError,
    CheckFailed,
    CommunicationError,
    RankFailed,
    UserError,
    printable,
)
from fivefold.host.memory import restart_with_huge_pages
from fivefold.launch.exits import BUSY, FAILED, USER

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
    app.command(name, epilog=f"\b\nExamples:{examples}")(function)
app.add_typer(bench.bench, name="bench")


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
    for stream in (sys.stdout, sys.stderr):  # show characters that the terminal's encoding lacks as escapes
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    if (
        arguments is None
        and sys.argv[1:2] in (["train"], ["bench"], ["sweep"])
        and not {"-h", "--help"} & set(sys.argv)
    ):
        restart_with_huge_pages()
    if arguments is None:  # spawned ranks import nothing from the folder that the user is in
        os.environ.setdefault("PYTHONSAFEPATH", "1")
    try:
        app(args=None if arguments is None else list(arguments), prog_name="fivefold")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(BUSY if isinstance(error, BusyError) else USER)
    except MemoryError:
        print(
            "error: memory ran out. Close other programs, or raise this one's limit (ulimit -v)",
            file=sys.stderr,
        )
        sys.exit(USER)
    except OSError as error:  # no permission, full disk, name too long: print the system's message
        if error.filename is None and error.errno not in PASSING | {errno.EMFILE}:
            raise
        name = printable(str(error.filename or "output")[:200])
        print(f"error: {name}: {error.strerror}", file=sys.stderr)
        sys.exit(BUSY if error.errno in PASSING else USER)
    except (CheckFailed, CommunicationError, RankFailed) as error:
        print(f"failed: {error}", file=sys.stderr)
        sys.exit(FAILED)


if __name__ == "__main__":
    main()
