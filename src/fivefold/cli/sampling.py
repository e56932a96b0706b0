"""Options of `fivefold generate` and `fivefold chat`: how text is sampled, and how it is shown."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Annotated

from fivefold.cli.options import option
from fivefold.errors import printable

TemperatureOption = Annotated[float, option("X", "Sampling temperature; 0 is greedy.")]
TopKOption = Annotated[int, option("K", "Sample from the K likeliest tokens; 0: from all.")]
TopPOption = Annotated[float, option("P", "Sample from the likeliest tokens with total probability P.")]
SeedOption = Annotated[int, option("N", "Random seed; the same seed gives the same text.")]
StopOption = Annotated[
    list[str] | None,
    option("TEXT", "Stop before this text. Repeatable."),
]


def shown() -> Callable[[str], str]:
    """How a model's text is printed: a terminal would obey escape codes in it."""
    return printable if sys.stdout.isatty() else str
