"""The steps that PyTorch's profiler records: `observe.profile_steps`. No torch."""

from __future__ import annotations

import re
from typing import Any

MOST = 100
"""Steps of a profile. It stays in memory until it is written."""
_STEPS = re.compile(r"(\d{1,12})(?:-(\d{1,12}))?", re.ASCII)


def as_text(value: Any) -> Any:
    """A single step as text. Recipes may have it as a number."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def steps(text: str) -> range:
    """The steps that "10-12" or "10" names; "" names none.

    Raises:
        ValueError: it does not name steps, or names too many. The message says what is allowed.
    """
    if not text:
        return range(0)
    found = _STEPS.fullmatch(text)
    first, last = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if first < 1 or last < first:
        raise ValueError('must be a step, such as "10", or steps from a first to a last, such as "10-12"')
    if last - first >= MOST:
        raise ValueError(f'has more than {MOST} steps. Nearest valid: "{first}-{first + MOST - 1}"')
    return range(first, last + 1)
