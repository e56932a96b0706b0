"""Compression of gradient sums as data: what each compressor puts on the wire and keeps, by the shapes of a bucket's
parameters. `comm/compress.py` executes these sizes, and the planner reads them. No torch.

Each file of a family has a table of its own: {an example of the text: constructor}.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path

from fivefold.errors import UserError, did_you_mean
from fivefold.schedules.compression.compressor import Compressor, Wire

NONE = "none"
_EXAMPLES: dict[str, Callable[[str], Compressor]] = {}
for _file in sorted(Path(__file__).parent.glob("[!_]*.py")):
    if _file.stem != "compressor":
        _EXAMPLES |= import_module(f"{__name__}.{_file.stem}").COMPRESSORS
_BY_NAME = {example.partition(":")[0]: (example, make) for example, make in _EXAMPLES.items()}
TEXTS = (NONE, *_EXAMPLES)
"""What `layout.compress` may be, with examples of numbers."""


@cache
def compressor(text: str) -> Compressor | None:
    """The compressor that a recipe's text means; None for "none". Raises UserError: there is none with this name, or
    its number is not valid."""
    if text == NONE:
        return None
    name, colon, number = text.partition(":")
    valid = f"valid: {', '.join(TEXTS)}"
    if name not in _BY_NAME:
        raise UserError(f"compress: '{text}' is unknown{did_you_mean(name, [NONE, *_BY_NAME])} ({valid})")
    example, make = _BY_NAME[name]
    if bool(colon) != (":" in example) or (colon and not number):
        raise UserError(f"compress: '{text}' must be written like '{example}' ({valid})")
    try:
        return make(text)
    except ValueError as error:
        why = str(error) if str(error).startswith("must") else "must be a number"
        raise UserError(f"compress: '{text}': what follows the colon {why} ({valid})") from None


def problem(text: str) -> str:
    """The error of a text; "" if it is valid."""
    try:
        compressor(text)
    except UserError as error:
        return str(error)
    return ""
