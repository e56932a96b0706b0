"""Which microbatches of a global batch each data-parallel rank takes: whole ones, as equally many as can be. No torch.

Every layout computes the microbatches of one process. So a mean over them is the same mean for any number of ranks.
"""

from __future__ import annotations

from fivefold.spread.layout import Layout


def share(microbatches: int, index: int, ranks: int) -> range:
    """The microbatches of data-parallel rank `index`: neighbours, and at most one more than any other rank has."""
    return range(microbatches * index // ranks, microbatches * (index + 1) // ranks)


def largest(microbatches: int, ranks: int) -> int:
    """Microbatches of the rank that has most. A step takes as long as this rank."""
    return -(-microbatches // ranks)


def in_step(layout: Layout) -> bool:
    """True if ranks with different sequences exchange weights or rows in every microbatch. Then all compute equally
    many: empty ones follow those of a smaller share."""
    return layout.zero > 0 or layout.ep > 1
