"""Sites: parts of a run that train apart and synchronise their weights every few steps. No torch.

A site is a run of its own, with a layout of its own: its ranks sum gradients among themselves only. So inner steps need
no code here. This file says what sites add, as data that the trainer executes and the planner prices: which ranks form
a site, which parameters synchronise after which inner step, in which messages, of how many bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from fivefold.precision import DTYPES
from fivefold.schedules.compression.blocks import INT8
from fivefold.sharding.layout import Layout
from fivefold.sharding.parts import TIED

OWN_SHARE = 0.5
"""What a site keeps of its own weights when a sum arrives that overlapped with inner steps (alpha of arXiv 2501.18512):
the common weights do not know these steps yet."""


@dataclass(frozen=True)
class Sites:
    """How `count` sites synchronise: each of `fragments` parts of the model once in `every` inner steps, by outer
    gradients sent as `dtype` ("fp32", "bf16" or "int8"). kept: bytes per parameter of the common weights and the outer
    optimizer's states. overlap: inner steps that a site takes while a sum is under way."""

    count: int = 1
    every: int = 1
    fragments: int = 1
    dtype: str = "fp32"
    kept: float = 0.0
    overlap: int = 0

    def due(self, step: int, last: int) -> tuple[int, ...]:
        """The fragments whose sums start after inner step `step` (1, 2, ...) of a run of `last` steps: their turns are
        spread evenly over `every` steps. The run ends with all of them, so that its model holds every step; no sum
        starts that would arrive later."""
        if step == last:
            return tuple(range(self.fragments))
        if step + self.overlap >= last:
            return ()
        turns = ((number + 1) * self.every // self.fragments for number in range(self.fragments))
        return tuple(number for number, turn in enumerate(turns) if (step - turn) % self.every == 0)

    def arriving(self, step: int, last: int) -> tuple[int, ...]:
        """The fragments whose sums arrive after this step, and change the weights."""
        if step == last or not self.overlap:
            return self.due(step, last)
        return self.due(step - self.overlap, last) if step > self.overlap else ()

    def traced(self, last: int) -> int:
        """The step that stands for all where a single one is looked at: the first one that synchronises the last
        fragment, and all before have."""
        return min(self.every, last) if self.count > 1 else 1

    @property
    def at_once(self) -> int:
        """The most fragments whose sums are under way at once."""
        return min(self.fragments, self.overlap * self.fragments // self.every + 1)

    def aligned(self, step: int, last: int) -> bool:
        """True if all sites have the same weights after this step. 0: before the first."""
        if step in (0, last):
            return True
        return not self.overlap and len(self.due(step, last)) == self.fragments


ONE_SITE = Sites()


def site_layout(layout: Layout, count: int) -> Layout:
    """The layout of one of `count` sites. They divide the replicas, and consecutive ranks form a site, so that it stays
    within as few machines as it can (`in_site`)."""
    assert layout.dp_replicate % count == 0, f"{layout.dp_replicate} replicas in {count} sites"
    return layout if count == 1 else replace(layout, dp_replicate=layout.dp_replicate // count)


def in_site(site: Layout, rank: int) -> tuple[int, int]:
    """(number of the site, rank in it) of a rank of the run. site: the layout of a site."""
    return divmod(rank, site.ranks)


def counterparts(site: Layout, count: int) -> list[list[int]]:
    """For each rank of a site, the ranks of the run with its place in all `count` sites."""
    return [list(range(rank, count * site.ranks, site.ranks)) for rank in range(site.ranks)]


def messages(names: Iterable[str], fragments: int) -> list[list[tuple[str, ...]]]:
    """The outer messages of each fragment: the parameters of each, from those that a rank has.

    Blocks are dealt out to fragments in turn (strided fragments, arXiv 2501.18512); what lies before them belongs to
    the first fragment, what lies behind them to the last. A message is a block, or what lies before or behind the
    blocks. A tied embedding has its own, so that two pipeline stages sum their copies in the same order.
    """
    found: list[dict[str, list[str]]] = [{} for _ in range(fragments)]
    for name in names:
        if name.startswith("blocks."):
            number = int(name.split(".")[1])
            found[number % fragments].setdefault(f"blocks.{number}", []).append(name)
        else:
            before = name.startswith("embed")
            key = name if name == TIED else "before" if before else "behind"
            found[0 if before else -1].setdefault(key, []).append(name)
    return [[tuple(some) for some in fragment.values()] for fragment in found]


Sent = tuple[str, float]
"""(operation, bytes of the larger of its input and output)."""


def sent(elements: int, count: int, dtype: str) -> list[Sent]:
    """The collectives by which `count` sites sum an outer gradient. In int8 each site sums its share of the elements,
    and sends the others its sum (as in ZeRO++, arXiv 2306.10209)."""
    if not elements:
        return []
    if dtype != "int8":
        return [("all_reduce", elements * DTYPES[dtype].bytes)]
    return [*INT8.messages([(elements,)], count)]
