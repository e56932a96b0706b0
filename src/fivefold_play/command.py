"""`fivefold play` opens a page on this machine, which trains, watches and compares runs."""

from __future__ import annotations

import os
import sys
import tempfile
import webbrowser
from contextlib import ExitStack
from html import escape
from pathlib import Path
from typing import Annotated

import typer

from fivefold.cli import options
from fivefold.cli.options import flag, option
from fivefold.errors import UserError
from fivefold.files import guard, make_folder, write


def play(
    folders: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="DIR",
            help="Folders of runs, or run folders. New runs go into the first one. [default: runs]",
            autocompletion=options.run_folders,
        ),
    ] = None,
    port: Annotated[
        int | None, option("N", "0: a free one. [default: 6007, or a free one]", min=0, max=65535)
    ] = None,
    host: Annotated[
        str, option("ADDRESS", "Listen here, for other machines too. A tunnel is safer: docs/play.md.")
    ] = "127.0.0.1",
    browser: Annotated[bool, flag("Open the page in a browser.", "--browser/--no-browser")] = True,
) -> None:
    """Open the page: train, watch and compare runs in a browser.

    A run that is started there is a process of its own, and trains on when the page or this command ends.
    """
    found = folders or [Path("runs")]
    for folder in found:
        if folder == Path("runs"):
            make_folder(folder)
        elif not folder.is_dir():
            raise UserError(f"'{folder}': there is no such folder")
        if (folder / "recipe.toml").is_file():
            guard(folder)
    try:
        from fivefold_play.server import is_loopback, serve
    except ModuleNotFoundError as error:
        raise UserError(f"{error.name} is not installed. Use: pip install 'fivefold[play]'") from None
    with ExitStack() as stack:

        def tell(url: str) -> None:
            print(
                f"{url}\nThis address is a key: whoever has it may train here. Ctrl-C ends the page, not its runs"
            )
            if not is_loopback(host):
                print(
                    f"WARNING: --host {host} lets other machines ask, and nothing encrypts what they read and send",
                    file=sys.stderr,
                )
            sys.stdout.flush()
            if browser and (sys.platform != "linux" or {"DISPLAY", "WAYLAND_DISPLAY"} & {*os.environ}):
                _open(url, Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fivefold-"))))

        serve(found, host, port, tell)


COMMANDS = {"play": play}


def _open(url: str, folder: Path) -> None:
    """Opens a browser at a file that leads on: other users can read what a browser is called with."""
    page = folder / "open.html"
    write(page, f'<!DOCTYPE html><meta http-equiv="refresh" content="0; url={escape(url)}">')
    webbrowser.open(page.as_uri())
