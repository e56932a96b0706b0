"""Data sets of Hugging Face (`hf:NAME:CONFIG:SPLIT[FROM:TO]`), read row by row."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

from fivefold.data.kinds import remote
from fivefold.data.kinds.kind import Fields, File, Rows
from fivefold.errors import UserError

PREFIX = "hf:"


class Hub(NamedTuple):
    """Rows first .. stop of a split of a Hugging Face data set. stop None: all."""

    name: str
    config: str | None = None
    split: str = "train"
    first: int = 0
    stop: int | None = None


_SPEC = re.compile(
    r"hf:(?P<name>[^:\[\]]+)(:(?P<config>[^:\[\]]*))?(:(?P<split>[^:\[\]]+))?(\[(?P<first>\d*):(?P<stop>\d*)\])?"
)


class HubRows(Rows):
    """A data set is one file, whose name is the text in the recipe."""

    name = "hf"

    def rows(self, file: File, fields: Fields, done: int) -> Iterator[tuple[int, dict[str, Any] | str]]:
        """Rows from `done` on. After an error it asks again, from where it was."""
        hub = parse(file.name)
        read, failed = max(hub.first, done), 0
        while True:
            try:
                loaded = _call("load_dataset", hub, split=hub.split, streaming=True)
                rows = iter(loaded.skip(read) if read else loaded)
                while hub.stop is None or read < hub.stop:
                    try:
                        row = next(rows)
                    except StopIteration:
                        return
                    yield read, row
                    read, failed = read + 1, 0
                return
            except UserError:
                raise
            except Exception as error:  # network error, or a file that the library cannot read
                if failed == len(remote.DELAYS):
                    reason = f"{type(error).__name__}: {remote.shown(str(error))}"
                    raise UserError(
                        f"data.source = 'hf:{hub.name}': reading stopped after {read:,} rows: {reason}"
                    ) from error
                time.sleep(remote.DELAYS[failed])
                failed += 1


def parse(spec: str) -> Hub:
    match = _SPEC.fullmatch(spec)
    if not match:
        what = "the name is missing" if spec == "hf:" else "cannot be read"
        raise UserError(
            f"data.source = {spec!r}: {what}; write hf:NAME, hf:NAME:CONFIG or hf:NAME:CONFIG:SPLIT, and [FROM:TO] "
            "behind it for some of the rows"
        )
    first, stop = int(match["first"] or 0), int(match["stop"]) if match["stop"] else None
    if stop is not None and stop <= first:
        raise UserError(f"data.source = {spec!r}: the rows end before they begin; FROM must be below TO")
    return Hub(match["name"], match["config"] or None, match["split"] or "train", first, stop)


def fingerprint(spec: str) -> list[Any]:
    """Identity of a data set's content: the hash that `datasets` computes of its revision and files."""
    hub = parse(spec)
    builder = _call("load_dataset_builder", hub)
    known = ["hf", hub.name, builder.config.name, str(builder.hash), str(builder.info.version)]
    return known if hub[2:] == Hub(hub.name)[2:] else [*known, *hub[2:]]


def require_library(hub: Hub) -> None:
    """Raises UserError if the library that reads data sets is missing."""
    if not (sys.modules.get("datasets") or find_spec("datasets")):
        raise UserError(f"data.source = 'hf:{hub.name}' needs the extra `hf`: pip install 'fivefold[hf]'")


def _call(function: str, hub: Hub, **options: Any) -> Any:
    require_library(hub)
    try:
        datasets = import_module("datasets")
    except ImportError as error:
        raise UserError(
            f"data.source = 'hf:{hub.name}': the library `datasets` cannot be imported: {error}"
        ) from None
    try:
        return getattr(datasets, function)(hub.name, hub.config, **options)
    except Exception as error:  # not found, no network, gated, missing config: these share no base class
        raise UserError(
            f"data.source = 'hf:{hub.name}': {type(error).__name__}: {remote.shown(str(error))}"
        ) from error
