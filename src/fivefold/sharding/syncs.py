"""The messages by which ranks with the same parameters share weights or sum gradients, as data; and what ZeRO++ (arXiv
2306.10209) sends of ZeRO 3 with fewer bytes between nodes. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from fivefold.errors import UserError, did_you_mean
from fivefold.schedules.compression import NONE
from fivefold.schedules.compression.blocks import INT4, INT8, Blocks
from fivefold.sharding.layout import Layout, groups
from fivefold.sharding.parts import sharing_group

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


@dataclass(frozen=True)
class Sync:
    """A message by which ranks with the same parameters share weights or sum gradients.

    what: "gather" weights from the ranks that keep them; "scatter" sums of gradients to these; "sum" gradients. each:
    times per microbatch, in forward and again in backward if twice; 0: once per step. rows: only those that a rank
    keeps. part: the message as a share of a unit's elements. blocks: how they are quantised, if they are.
    """

    what: Literal["gather", "scatter", "sum"]
    group: str
    each: int = 0
    rows: bool = False
    part: float = 1.0
    blocks: Blocks | None = None

    def size(self, padded: float, width: float, shares: Sequence[int], ranks: int) -> float:
        """Bytes for a unit of `padded` elements, of which `ranks` ranks have `shares`. width: bytes of an element that
        is not quantised."""
        if self.blocks is None:
            return self.part * padded * width
        return self.part * ranks * self.blocks.row(self.blocks.chunk([(share,) for share in shares], 1))


def syncs(layout: Layout, expert: bool = False) -> tuple[Sync, ...]:
    """The messages for parameters in a step, in their order. expert: those that expert parallelism cuts.

    Whole parameters are summed once. Of divided ones, stage 3 gathers weights before forward and before backward, the
    other stages after the update. Gradients are scattered, and a hybrid then sums its rows over the replicas.
    """
    group, ranks = sharing_group(layout, expert)
    inside = groups(layout)["inside"][0] if layout.zeropp != NONE else 1
    return _syncs(
        group, ranks > 1, layout.zero, layout.pp > 1, layout.dp_replicate > 1, layout.zeropp, inside
    )


@lru_cache
def _syncs(
    group: str, shared: bool, zero: int, pipeline: bool, hybrid: bool, plus: str, inside: int
) -> tuple[Sync, ...]:
    if not shared:
        return (Sync("sum", {"shard": "batch", "eshard": "edp"}[group]),)
    chosen, gathers, scatters = zeropp(plus), 2 if zero == 3 else 0, 1
    if scattered_once(zero, 2 if pipeline else 1):
        scatters = 0
    found = [Sync("gather", group, gathers)]
    if chosen.two_gathers:  # the nodes' copies stay until the weights change
        first = Sync(
            "gather", "across", 0 if chosen.hier else gathers, part=1 / inside, blocks=chosen.weights
        )
        found = [first, Sync("gather", "inside", gathers, blocks=chosen.weights)]
    if chosen.gradients:
        found.append(Sync("scatter", "inside", scatters, blocks=chosen.gradients))
        found.append(Sync("scatter", "across", scatters, part=1 / inside, blocks=chosen.gradients))
    else:
        found.append(Sync("scatter", group, scatters))
    return (*found, Sync("sum", "replicate", rows=True)) if hybrid else tuple(found)


def scattered_once(zero: int, pp: int) -> bool:
    """True if gradients add up whole on each rank and are scattered once per step, in the last microbatch.

    ZeRO 1 does so. In a pipeline every ZeRO stage does: microbatches overlap, and may defer weight gradients.
    """
    return zero == 1 or (zero > 1 and pp > 1)
