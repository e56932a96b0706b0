"""What `fivefold plan` says of another program's configuration before its plan."""

from __future__ import annotations

from typing import Any

from fivefold.cli.bench import ensure_measured
from fivefold.errors import printable


def told(name: str, cluster: str, json: bool) -> dict[str, Any]:
    """Prints what was understood of a configuration and what was not, unless `json`. Returns {"read": the same}; {} for
    a recipe. Raises UserError: as `fivefold.recipe.foreign.read`."""
    from fivefold.plan.cluster.clusters import parse
    from fivefold.recipe.load import is_foreign, read_foreign

    if not is_foreign(name):
        return {}
    ensure_measured(cluster)
    reading = read_foreign(name, parse(cluster).devices)
    assert reading is not None
    if not json:
        software = reading.tables.get("software")
        priced = f" (--software {software} prices that program, and not this one)" if software else ""
        print(f"{name}: a configuration of {reading.kind}, {len(reading.understood)} keys understood{priced}")
        lines = [f"no effect on a plan ({why}): {', '.join(keys)}" for why, keys in reading.unused.items()]
        lines += [f"not understood: {key}: {why}" for key, why in reading.missing.items()]
        print(printable("".join(f"  {line}\n" for line in [*reading.notes, *lines])))
    parts = ("understood", "unused", "missing", "notes")
    return {"read": {"kind": reading.kind} | {part: getattr(reading, part) for part in parts}}
