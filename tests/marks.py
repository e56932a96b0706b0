"""Which cases of a test run in every `make test`; the others run in `make test-all` only."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import pytest


def slow(*cases: Any) -> list[Any]:
    """Cases for `make test-all`. A tuple has a case's arguments."""
    return [
        pytest.param(*(case if isinstance(case, tuple) else [case]), marks=pytest.mark.slow) for case in cases
    ]


def slow_but(quick: Collection[Any], everything: Sequence[Any]) -> list[Any]:
    """All cases, those that are not quick marked as slow."""
    return [case if case in quick else slow(case)[0] for case in everything]
