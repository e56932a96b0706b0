"""All precision modes by name. A new one is a file in this folder, with its CARDS listed here. No torch."""

from __future__ import annotations

from fivefold.precision import fp8, mxfp8, plain
from fivefold.precision.card import MASTER, Mode

_FAMILIES = (plain, fp8, mxfp8)
PRECISIONS: dict[str, Mode] = {mode.name: mode for family in _FAMILIES for mode in family.CARDS}
FIELDS: dict[str, list[str]] = {
    field: [mode.name for mode in PRECISIONS.values() if field in mode.fields]
    for field in dict.fromkeys(field for mode in PRECISIONS.values() for field in mode.fields)
}
"""The fields of [precision] that only some modes have, with these modes."""


def chosen(mode: str, fast_bf16: bool) -> str:
    """The mode that `precision.mode` stands for. "auto" is bf16 on devices that compute it faster than fp32."""
    return ("bf16" if fast_bf16 else MASTER) if mode == "auto" else mode
