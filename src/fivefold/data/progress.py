"""A progress bar for `prepare`, on stderr."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def progress_bar() -> Iterator[Callable[[str, int, int | None], None]]:
    """A callback for `prepare(recipe, progress)`: a bar on a terminal, one line a stage elsewhere."""
    if not sys.stderr.isatty():
        seen: set[str] = set()

        def line(stage: str, done: int, total: int | None) -> None:
            if stage not in seen:
                seen.add(stage)
                print(
                    f"data: {stage}" + (f" ({total / 1e6:.1f} MB)" if total else ""),
                    file=sys.stderr,
                    flush=True,
                )

        yield line
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = [
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    ]
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        tasks = {}

        def show(stage: str, done: int, total: int | None) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage, total=total)
            bars.update(tasks[stage], completed=done, total=total)

        yield show
