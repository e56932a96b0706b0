"""One action of a pipeline schedule: its text, the results it needs and the result it makes."""

from __future__ import annotations

from typing import Literal, NamedTuple

Kind = Literal["F", "B", "I", "W", "SEND_F", "RECV_F", "SEND_B", "RECV_B"]
COMPUTE = ("F", "B", "I", "W")


class Action(NamedTuple):
    """One action of a rank: one microbatch at one of its stages. Its text is that of PyTorch's runtime.

    F: forward. B: the whole backward. I: the gradient of the input alone, which the previous stage waits for. W: the
    gradients of the weights, which nothing waits for (arXiv 2401.10241). SEND_F, RECV_F: transfer of activations to the
    next stage. SEND_B, RECV_B: transfer of gradients to the previous stage. `stage` belongs to the rank that acts:
    0SEND_F3 arrives as 1RECV_F3.
    """

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @property
    def computes(self) -> bool:
        """True for F, B, I and W."""
        return self.kind in COMPUTE


Result = tuple[Literal["output", "gradient"], int, int]
"""(what, stage, microbatch): a stage's output, or the gradient of its input. A plain tuple, since walks make many."""


def makes(action: Action) -> Result | None:
    """The result of a computation. W has none: nobody waits for it."""
    stage, kind, microbatch = action
    if kind == "W":
        return None
    return ("output" if kind == "F" else "gradient", stage, microbatch)


def needs(action: Action, last: int) -> tuple[Result, ...]:
    """The results that a computation waits for. last: the last stage of the model."""
    stage, kind, microbatch = action
    if kind == "F":
        return (("output", stage - 1, microbatch),) if stage else ()
    if kind == "W":
        return (("gradient", stage, microbatch),)
    if stage == last:
        return (("output", stage, microbatch),)
    return ("output", stage, microbatch), ("gradient", stage + 1, microbatch)
