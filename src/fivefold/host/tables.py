"""What `fivefold bench` has measured on this machine: one file of JSON in the cache folder, for all machines."""

from __future__ import annotations

import json
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

from fivefold.errors import UserError
from fivefold.files import cache_folder, make_folder, write_atomically
from fivefold.host import cores, cpu_model

VERSION = 2


def key() -> str:
    """The key of a table: processor, cores, version of torch and of the table."""
    return f"{cpu_model()} | {cores()} cores | torch {metadata.version('torch')} | table {VERSION}"


def path() -> Path:
    return cache_folder() / "hardware.json"


def read(name: str) -> Any:
    """The table with this key, or None."""
    return _tables().get(name)


def write(name: str, found: dict[str, Any]) -> None:
    """Writes a table beside the others. Raises UserError: the cache folder cannot be written."""
    file = path()
    try:
        make_folder(file.parent)
        write_atomically(file, json.dumps(_tables() | {name: found}, indent=1))
    except OSError as error:
        raise UserError(f"{file}: cannot be written: {error.strerror}; set $FIVEFOLD_CACHE") from None


def collectives_key() -> str:
    """The key of what `fivefold bench collectives` found on this machine, by number of ranks: `device`, `fit`, and by
    size `seconds` and `predicted` of each algorithm, and the `best` one."""
    return f"{key()} | collectives 2"


def load_collectives() -> dict[str, Any] | None:
    """The table with this key; None without one."""
    return read(collectives_key())


def best_all_reduce(ranks: int, device: str) -> dict[int, str]:
    """The fastest all-reduce between so many local ranks on such devices ("cpu" or "cuda") by size in bytes; empty if
    it was not measured."""
    table = load_collectives() or {}
    if table.get("device", {}).get(str(ranks)) != device:
        return {}
    found = table["best"][str(ranks)]
    return {int(size): name for size, name in found.items()}


def all_reduce_seconds(ranks: int, name: str) -> list[tuple[int, float]]:
    """(bytes, seconds) of an all-reduce between so many local ranks, by size; empty if it was not measured."""
    found = (load_collectives() or {}).get("seconds", {}).get(str(ranks), {})
    return sorted((int(size), times[name]) for size, times in found.items() if name in times)


def _tables() -> dict[str, Any]:
    """All tables of the cache file. A missing or broken file counts as empty."""
    try:
        file = path()
        state = file.stat()
        return _parsed(file, state.st_mtime_ns, state.st_size)
    except (OSError, ValueError):
        return {}


@lru_cache(maxsize=4)
def _parsed(file: Path, changed: int, size: int) -> dict[str, Any]:
    """A search asks often."""
    tables = json.loads(file.read_text(encoding="utf-8"))
    return tables if isinstance(tables, dict) else {}
