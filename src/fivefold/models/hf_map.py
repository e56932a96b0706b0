"""The unit of a weight map between us and Hugging Face `transformers`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Entry:
    """One weight of ours and what it is there: one tensor, or several that ours stacks along dim 0."""

    ours: str
    theirs: tuple[str, ...]
    rows: tuple[int, ...] = ()
    """Rows of ours that each of several tensors there has."""
    transpose: bool = False
    """Stored transposed there (the `Conv1D` of GPT-2)."""


def same(ours: str, theirs: str, *kinds: str) -> list[Entry]:
    """Weights that differ in name only: `ours.kind` and `theirs.kind` for each kind (`weight`, `bias`)."""
    return [Entry(f"{ours}.{kind}", (f"{theirs}.{kind}",)) for kind in kinds or ("weight",)]
