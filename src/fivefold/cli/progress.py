"""A progress bar on stderr for work that is counted in bytes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def byte_progress() -> Iterator[Callable[[str, int, int | None], None]]:
    """Gives a function to be called with (stage, bytes done, bytes in all or None).

    On a terminal it moves a bar; elsewhere each stage is one line.
    """
    if not sys.stderr.isatty():
        seen: set[str] = set()

        def say(stage: str, done: int, total: int | None) -> None:
            if stage not in seen:
                seen.add(stage)
                print(f"{stage} ...", file=sys.stderr, flush=True)

        yield say
        return

    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        tasks = {}

        def move(stage: str, done: int, total: int | None) -> None:
            if stage not in tasks:
                tasks[stage] = bar.add_task(stage, total=total)
            bar.update(tasks[stage], completed=done, total=total)

        yield move
