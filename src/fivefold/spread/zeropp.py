"""ZeRO++ (arXiv 2306.10209) as data: what of ZeRO 3 is sent with fewer bytes between nodes. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from fivefold.errors import UserError, did_you_mean
from fivefold.schedules.compression import NONE
from fivefold.schedules.compression.blocks import INT4, INT8, Blocks

GRADIENTS = {"gradients": INT4, "gradients:int4": INT4, "gradients:int8": INT8}
WORDS = ("weights", "hier", *GRADIENTS)


@dataclass(frozen=True)
class ZeroPP:
    """weights, gradients: how they are quantised; None: not at all. hier: each node keeps the weights that it has
    gathered, a share on each of its ranks, until they change."""

    weights: Blocks | None = None
    hier: bool = False
    gradients: Blocks | None = None

    @property
    def two_gathers(self) -> bool:
        """True if weights are gathered across the nodes first, and then inside each of them."""
        return self.hier or self.weights is not None


@lru_cache
def zeropp(text: str) -> ZeroPP:
    """The meaning of a `layout.zeropp`.

    Raises:
        UserError: it is not a list of different parts.
    """
    words = [] if text == NONE else [word.strip() for word in text.split(",")]
    valid = (
        f"valid: {NONE}, or some of weights, hier, gradients (gradients:int8), such as weights,hier,gradients"
    )
    for word in words:
        if word not in WORDS:
            raise UserError(f"zeropp: '{word}' is unknown{did_you_mean(word, WORDS)} ({valid})")
    kinds = [word.partition(":")[0] for word in words]
    if len(set(kinds)) < len(kinds):
        raise UserError(f"zeropp: '{text}' has a part twice ({valid})")
    gradients = next((GRADIENTS[word] for word in words if word in GRADIENTS), None)
    return ZeroPP(INT8 if "weights" in words else None, "hier" in words, gradients)
