"""Prices the outer steps of sites that train apart: seconds, and memory at once."""

from __future__ import annotations

from fivefold.plan import communication, rates, volume
from fivefold.plan.cost import Setting
from fivefold.precision import DTYPES, MASTER


def _elements(s: Setting, position: int) -> tuple[int, ...]:
    """Elements of each fragment on the first rank of a pipeline position, which has most."""
    rank = s.layout.rank({"pp": position})
    return tuple(sum(volume.outer_elements(s, rank, number)) for number in range(s.sites.fragments))


def seconds(s: Setting, inner: float = 0.0) -> float:
    """Seconds of all outer steps of `sites.every` inner steps. Each fragment's messages go out together, and overlap
    with `sites.overlap` inner steps of `inner` seconds. The slowest pipeline position decides."""
    if s.sites.count == 1:
        return 0.0
    return max(_at(s, position, inner * s.sites.overlap) for position in range(s.layout.pp))


def _at(s: Setting, position: int, hidden: float) -> float:
    rank, group, total = s.layout.rank({"pp": position}), s.group("sites"), 0.0
    for number in range(s.sites.fragments):
        messages = (one for message in volume.outer(s, rank, number) for one in message)
        sent = sum(getattr(communication, what)(size, group, s.cluster) for what, size in messages)
        total += max(0.0, sent - hidden)
    # common weights and momentum are read and written; masters are read for the difference, and written
    moved = sum(_elements(s, position)) * (2 * s.sites.kept + 4 * DTYPES[MASTER].bytes)
    update = rates.stream(moved, s.cluster.device, "optimizer", s.dtype)
    return total + s.cluster.oversubscription * update


def buffers(s: Setting, position: int) -> float:
    """Bytes of the outer gradients that are under way at once: a fragment's, or with overlap those of several."""
    if s.sites.count == 1:
        return 0.0
    return DTYPES[MASTER].bytes * sum(sorted(_elements(s, position))[-s.sites.at_once :])
