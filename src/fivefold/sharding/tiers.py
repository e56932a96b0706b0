"""Where a rank keeps what: in the memory of its device, in host memory or on disk, as data. No torch.

`layout.offload` names a row of `OFFLOADS`. parallel/offload keeps and streams by it, the planner prices by it. States
are streamed through buffers of constant size (`CHUNK`, `SLOTS`; ZeRO-R's C_B, arXiv 1910.02054).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

Tier = Literal["device", "host", "disk"]

CHUNK = 1 << 19
"""Elements of a chunk: the states of so many parameters are read, updated and written together."""
SLOTS = 6
"""Chunks in memory at once: those read ahead, the one that is updated, those written behind."""
ALIGNMENT = 2048
"""Parameters begin at a multiple of so many elements: 4 KiB in the narrowest dtype, as direct I/O requires."""
WINDOW = 2
"""The default of `layout.offload_window`: the block that computes, and the next one, which is read meanwhile."""
BESIDE, EARLY = "beside", "early"
"""When a streamed update runs (`layout.offload_update`): beside the next step's forward, when the gradient's norm is
known; or each unit's beside backward, once its gradients are complete."""
BEHIND = 2
"""Units whose gradients are written at once. Backward waits for the first of more."""
READ_AHEAD = 4
"""Saved activations that backward reads before it needs them."""
SMALLEST = 1 << 16
"""Bytes of the smallest activation that leaves the device."""
NOT_OFFLOADED = "none"


@dataclass(frozen=True)
class Tiers:
    """The tier of each kind of tensor. working: weights that compute; of blocks only, as the embeddings and the end of
    the model stay. gradients: their sums. masters: weights, where others compute. states: the optimizer's. divided:
    tensor-parallel ranks keep a part each of what they have alike (see `partitions`)."""

    working: Tier = "device"
    gradients: Tier = "device"
    masters: Tier = "device"
    states: Tier = "device"
    activations: Tier = "device"
    divided: bool = False

    @property
    def streams(self) -> bool:
        """True if the optimizer's states are elsewhere, so that its update is streamed."""
        return self.states != "device"

    @property
    def stays(self) -> bool:
        """True if nothing leaves the device."""
        return not self.streams and self.activations == "device"

    @property
    def disk(self) -> bool:
        return "disk" in (self.working, self.gradients, self.masters, self.states)


OFFLOADS: dict[str, Tiers] = {
    NOT_OFFLOADED: Tiers(),
    "activations:tp": Tiers(divided=True),
    "activations": Tiers(activations="host", divided=True),
    "states:host": Tiers(gradients="host", masters="host", states="host"),
    "states:disk": Tiers(masters="disk", states="disk"),
    "all:host": Tiers("host", "host", "host", "host"),
    "all:disk": Tiers("disk", "disk", "disk", "disk"),
}
"""docs/parallelism/offload.md names the paper of each row."""


def tiers(offload: str, own_masters: bool = True) -> Tiers:
    """The tiers of a rank's parameters, or of its rows under ZeRO. own_masters: False if the masters compute
    (`Mode.copies`); they stay unless gradients leave, too."""
    found = OFFLOADS[offload]
    if found.streams and not own_masters and found.gradients == "device":
        return Tiers(states=found.states)
    return found


Phase = Literal["update", "forward", "backward"]


def lane_of(link: str, out: bool) -> str:
    """What a link is called in a measured timeline, one way."""
    return f"{'write' if out else 'read'} {link}"


@dataclass(frozen=True)
class Flow:
    """Bytes per parameter that cross a link each time that a phase runs.

    phase: the streamed "update"; "forward" and "backward" of every microbatch. link: "host", between the device and
    host memory, or "disk". out: away from the device.
    """

    phase: Phase
    kind: str
    link: Literal["host", "disk"]
    out: bool
    bytes: float


def flows(
    away: Tiers,
    working: float,
    states: float,
    microbatches: int,
    gradient: float = 4.0,
    master: float = 4.0,
    sums: int | None = None,
    stays: float = 0.0,
) -> tuple[Flow, ...]:
    """What a streamed update and the paging of weights and gradients move. working, states, ...: bytes per parameter of
    each kind; master: 0 if the masters compute and do not leave. sums: how often gradients leave in a step, if not in
    every microbatch. stays: the share of the weights that stays from forward to backward."""
    if not away.streams:
        return ()
    found: list[Flow] = []

    def moves(phase: Phase, kind: str, tier: Tier, size: float, way: str) -> None:
        """way: of "in" and "out", from and to where the kind lies. The update runs in host memory, all else on the
        device."""
        outer = tier == "disk"
        inner = (tier == "device") if phase == "update" else tier != "device"
        for word in ("in", "out"):
            if word in way.split() and size:
                if outer:
                    found.append(Flow(phase, kind, "disk", word == "out", size))
                if inner:
                    found.append(Flow(phase, kind, "host", (word == "out") != (phase == "update"), size))

    moves("update", "gradients", away.gradients, gradient, "in")
    moves("update", "masters", away.masters, master, "in out")
    moves("update", "states", away.states, states, "in out")
    if master:
        moves("update", "working", away.working, working, "out")
    if away.working != "device":
        moves("forward", "working", away.working, working, "in")
        moves("backward", "working", away.working, (1 - stays) * working, "in")
    if away.gradients != "device":
        sums = sums or microbatches
        moves("backward", "gradients", away.gradients, gradient * sums / microbatches, "out")
        moves("backward", "gradients", away.gradients, gradient * (sums - 1) / microbatches, "in")
    return tuple(found)


def partitions(offload: str, recompute: str, tp: int, sp: bool) -> bool:
    """True if the inputs of recomputed blocks, which tensor-parallel ranks have all alike, are kept in parts, a part of
    each on each rank, and are gathered before the block runs again (ZeRO-R's Pa, and Pa+cpu where the parts leave the
    device). With sp they are in parts already."""
    return OFFLOADS[offload].divided and recompute == "full" and tp > 1 and not sp


def unit_of(name: str) -> str:
    """The unit of a parameter: its block, or "" for everything outside the blocks."""
    found = re.match(r"blocks\.\d+", name)
    return found.group() if found else ""


@dataclass(frozen=True)
class Piece:
    """Elements start .. stop of a parameter, which begin at element `at` of a chunk."""

    name: str
    start: int
    stop: int
    at: int


@dataclass(frozen=True)
class Chunk:
    """Elements start .. start + size of an arena, all of one unit. They hold `pieces`, and padding between them."""

    unit: str
    start: int
    size: int
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Arena:
    """Where the parameters of a rank lie, one after the other, each at a multiple of ALIGNMENT elements.

    starts: the first element of each; sizes: their elements. spans: (start, stop) of each unit, in the order in which
    forward needs them: what is outside of the blocks, then the blocks.
    """

    starts: dict[str, int]
    sizes: dict[str, int]
    spans: dict[str, tuple[int, int]]
    total: int

    def names(self, unit: str) -> list[str]:
        start, stop = self.spans[unit]
        return [name for name, at in self.starts.items() if start <= at < stop]

    def chunks(self) -> Iterator[Chunk]:
        """The chunks of all units, in the order of forward."""
        for unit, (first, last) in self.spans.items():
            names = self.names(unit)
            for start in range(first, last, CHUNK):
                stop = min(start + CHUNK, last)
                pieces = tuple(
                    Piece(name, max(0, start - at), min(size, stop - at), max(0, at - start))
                    for name in names
                    for at, size in [(self.starts[name], self.sizes[name])]
                    if at < stop and start < at + size
                )
                yield Chunk(unit, start, stop - start, pieces)


def arena(
    sizes: Mapping[str, int], units_of: Mapping[str, str] | None = None, room: Mapping[str, int] | None = None
) -> Arena:
    """The arena of parameters in the order of the module: {name: number of elements}. Units are contiguous. units_of:
    of each parameter, if not `unit_of`. room: elements that each has place for, if more."""
    units: dict[str, list[str]] = {"": []}
    for name in sizes:
        units.setdefault(unit_of(name) if units_of is None else units_of[name], []).append(name)
    starts, spans, at = dict[str, int](), dict[str, tuple[int, int]](), 0
    for unit, names in units.items():
        first = at
        for name in names:
            starts[name] = at
            at += -(-(sizes if room is None else room)[name] // ALIGNMENT) * ALIGNMENT
        if names:
            spans[unit] = (first, at)
    return Arena(starts, dict(sizes), spans, at)
