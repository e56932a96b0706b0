"""What was read of a configuration of another program. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fivefold.errors import UserError


@dataclass
class Reading:
    """kind: the program. tables: its TOML file. given: their keys and values. devices: how many it is for (0: not
    known). model_of: [model] of a shipped recipe. fields: ours, by "section.name". understood: {their key: our fields}.
    unused: {why: keys that change no plan}. missing: {their key and value: why it has no counterpart}. notes: what the
    file leaves open."""

    kind: str
    path: Path
    tables: Mapping[str, Any]
    given: dict[str, Any]
    devices: int
    model_of: Callable[[str], dict[str, Any]]
    fields: dict[str, Any]
    understood: dict[str, str] = field(default_factory=dict)
    unused: dict[str, list[str]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def number(self, key: str, default: int | None, least: int = 0) -> int:
        """Their whole number. Raises UserError: it is none, or too small."""
        value = self.given.get(key, default)
        if type(value) is not int or value < least:
            said = "has no value, or several" if value is None else f"= {value!r:.60}"
            raise UserError(f"{self.path}: {key} {said}: must be a whole number >= {least}")
        return value

    def lacks(self, key: str, why: str) -> None:
        """Their value has no counterpart."""
        self.understood.pop(key, None)
        self.missing[f"{key} = {self.given.get(key)!s:.60}"] = why

    def cut_experts(self, key: str, default: int) -> None:
        """Sets `layout.ep_fold` by the number of ranks that cut each expert there: 1, or all of the tensor axis."""
        tp, sp, why = self.fields.get("layout.tp", 1), self.fields.get("layout.sp"), ""
        cut = self.number(key, default, 1)
        if cut not in (1, tp):
            why = f"an expert is whole, or cut by all of layout.tp = {tp}"
        elif tp > 1 and cut == 1 and sp:
            self.fields["layout.ep_fold"] = True
        elif tp > 1 and (cut == 1 or sp):
            why = "experts are whole with layout.sp, and cut by layout.tp without it"
        if why and key in self.given:
            self.lacks(key, why)
        elif why:
            self.notes.append(f"{key} is {cut} there by itself: {why}")

    def table(self) -> dict[str, dict[str, Any]]:
        """Our fields by section."""
        found: dict[str, dict[str, Any]] = {}
        for key, value in self.fields.items():
            section, _, name = key.partition(".")
            found.setdefault(section, {})[name] = value
        return found
