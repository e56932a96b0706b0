"""One action of a pipeline schedule, and its text, which is that of PyTorch's schedule files."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, cast

from fivefold.errors import UserError

Kind = Literal["F", "B", "I", "W", "SEND_F", "RECV_F", "SEND_B", "RECV_B"]
COMPUTE = ("F", "B", "I", "W")
TEXT = re.compile(r"(\d{1,9})(F|B|I|W|SEND_F|RECV_F|SEND_B|RECV_B)(\d{1,9})", re.ASCII)


@dataclass(frozen=True, slots=True)
class Action:
    """What a rank does with one microbatch at one of its stages.

    F: forward. B: whole backward. I: the gradient of the input only, which the stage before waits for; W: the
    gradients of the weights, which nothing waits for (arXiv 2401.10241). SEND_F, RECV_F: activations on their
    way to the next stage; SEND_B, RECV_B: gradients on their way to the stage before. `stage` is that of the
    rank that acts: 0SEND_F3 arrives as 1RECV_F3.
    """

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @property
    def computes(self) -> bool:
        """Whether this is F, B, I or W."""
        return self.kind in COMPUTE


def parse(text: str) -> Action:
    """Reads `0F3` or `1SEND_B2`. Inverse of `str`.

    Raises:
        UserError: if the text is not an action.
    """
    found = TEXT.fullmatch(text)
    if not found:
        raise UserError(
            f"'{text}' is not an action: those look like 0F3, 1B2, 1I2, 1W2, 0SEND_F3 or 1RECV_F3"
        )
    return Action(int(found[1]), cast(Kind, found[2]), int(found[3]))
