"""Which cases of a test run in every `make test`; the others run in `make test-all` only."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from fnmatch import fnmatchcase
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


def only(*ids: str) -> pytest.MarkDecorator:
    """Every `make test` runs these cases of a test, by the ids that pytest shows, with `*` for any text."""
    return pytest.mark.cases(*ids, quick=True)


def all_but(*ids: str) -> pytest.MarkDecorator:
    """Every `make test` runs all cases of a test but these."""
    return pytest.mark.cases(*ids, quick=False)


def mark_slow(items: Sequence[pytest.Item], selected: bool) -> None:
    """Marks the cases as slow that `only` leaves out or `all_but` names.

    Raises:
        pytest.UsageError: an id is no case of its test. Not if the user `selected` single cases.
    """
    unused: dict[str, set[str]] = {}
    for item in items:
        mark = item.get_closest_marker("cases")
        if mark is None:
            continue
        test, _, case = item.nodeid.removesuffix("]").partition("[")
        matching = {pattern for pattern in mark.args if fnmatchcase(case, pattern)}
        if bool(matching) != mark.kwargs["quick"]:
            item.add_marker(pytest.mark.slow)
        unused.setdefault(test, set(mark.args)).difference_update(matching)
    missing = {test: sorted(ids) for test, ids in unused.items() if ids}
    if missing and not selected:
        raise pytest.UsageError(f"no such cases: {missing}")
