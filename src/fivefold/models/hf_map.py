"""An entry of a weight map between us and Hugging Face `transformers`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Entry:
    """One weight of ours and its counterpart there: one tensor, or several that ours stacks along dim 0."""

    ours: str
    theirs: tuple[str, ...]
    rows: tuple[int, ...] = ()
    """Rows of our weight for each of several tensors there."""
    transpose: bool = False
    """True if it is stored transposed there (the `Conv1D` of GPT-2)."""


def same(ours: str, theirs: str, *kinds: str) -> list[Entry]:
    """Weights that differ in name only: `ours.kind` and `theirs.kind` for each kind (`weight`, `bias`)."""
    return [Entry(f"{ours}.{kind}", (f"{theirs}.{kind}",)) for kind in kinds or ("weight",)]
