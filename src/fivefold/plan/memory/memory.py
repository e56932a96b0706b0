"""Memory per rank: states from the parameter table, activations from the operations, live microbatches from the
schedule, and buffers at the moment with the largest sum. Search, `plan` and plan.json share this formula."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from fivefold.plan.memory import operations
from fivefold.plan.memory.buffers import (
    Buffers,
    buffers,
    compression,
    node_copies,
    rounding_scratch,
    sum_scratch,
    update_scratch,
)
from fivefold.plan.memory.model_states import Elements, alike, more_states, rank_elements, rank_states
from fivefold.plan.memory.operations import Sums
from fivefold.plan.setting import Setting, schedule
from fivefold.schedules.pipeline import SENDS_PER_RANK, Schedule, few, holds_all, peak_live
from fivefold.schedules.timelines import CATEGORIES
from fivefold.sharding.layout import Layout
from fivefold.sharding.parts import stages_of
from fivefold.sharding.tiers import partitions

ERROR = 0.015
"""Mean error of the formula against tracked peaks on CPUs (benchmarks/planner/own_memory.py), rounded up."""
PUBLISHED_ERROR = 0.027
"""Its mean error on GPUs, against published peaks of another program (benchmarks/planner/published.py, SimuMax)."""


@dataclass(frozen=True)
class Memory:
    """Bytes on the first rank of a pipeline position; no other rank there has more.

    params: weights that compute. gradients: their sums. optimizer: moments, and masters that do not compute.
    activations: tensors that forward, or its recomputation, keeps for backward. buffers: the rest.
    host, disk: what is offloaded there; not in the total.
    """

    params: float
    gradients: float
    optimizer: float
    activations: float
    buffers: float
    host: float = 0.0
    disk: float = 0.0

    @property
    def total(self) -> float:
        return sum(getattr(self, name) for name in CATEGORIES)

    def as_json(self) -> dict[str, int]:
        away = [name for name in ("host", "disk") if getattr(self, name)]
        return {name: round(getattr(self, name)) for name in (*CATEGORIES, "total", *away)}


class MicrobatchBytes(NamedTuple):
    """Bytes of one microbatch on a rank.

    plain, mixed: kept from forward to backward by a block without and with experts. begin, end: kept by the layers
    before and behind the blocks. owed_plain, owed_mixed: kept by a block from I to W. again: recomputed in a block's
    backward. inside, loss: workspace of a block's backward, and of the loss. stream: the activation between two blocks.
    tokens: inputs and targets.
    """

    plain: float
    mixed: float
    begin: float
    end: float
    owed_plain: float
    owed_mixed: float
    again: float
    inside: float
    loss: float
    stream: float
    tokens: float


def sums(s: Setting) -> Sums:
    """Sums over the operations of one rank."""
    return operations.sums(s.work, s.sizes.e, any(s.card.mixed), s.sizes.narrow)


def microbatch(s: Setting, found: Sums, recompute: str) -> MicrobatchBytes:
    """Bytes of one microbatch on a rank under a recomputation mode. A block that runs again has its input whole."""
    software, parts, stream = s.software, parts_of(s.layout), s.activation
    kept = {kind: operations.kept(block, recompute, software) for kind, block in found.block.items()}
    again, inside = operations.largest_backward(found, recompute, software)
    others = stream * (1 - 1 / parts)
    return MicrobatchBytes(
        max(0.0, kept.get(False, 0.0) - others),
        max(0.0, kept.get(True, 0.0) - others),
        operations.kept(found.begin, "none", software),  # not in a block
        operations.kept(found.end, "none", software),
        found.owed.get(False, 0.0),
        found.owed.get(True, 0.0),
        again,
        inside + stream * (2 if parts > 1 else 1),  # with the gradient of the residual stream
        found.loss,
        stream,
        2 * 8 * s.sizes.N,
    )


def parts_of(layout: Layout) -> int:
    """Into how many parts tensor-parallel ranks divide the inputs of recomputed blocks."""
    return layout.tp if partitions(layout.offload, layout.recompute, layout.tp, layout.sp) else 1


def transfers(one: MicrobatchBytes, layout: Layout, microbatches: int) -> float:
    """Bytes of all inputs. A pipeline adds one activation and one gradient that arrive, and the sends that the rank has
    not waited for."""
    size = microbatches * one.tokens
    if layout.pp > 1:
        size += (2 + min(SENDS_PER_RANK * layout.pp, microbatches)) * one.stream
    return size


class Tail(NamedTuple):
    """A block's backward: bytes that the blocks behind it kept, and it keeps; recomputed bytes; workspace."""

    behind: float
    kept: float
    again: float
    inside: float


def at_peak(
    one: MicrobatchBytes,
    besides: Buffers,
    live: float,
    own: float,
    last: bool,
    after: float = 0.0,
    tails: Sequence[Tail] = (),
) -> tuple[float, float]:
    """(activations, buffers) at the moment of `Buffers` with the largest sum.

    live: bytes kept by all live microbatches. own: bytes kept by one of them. last: True if the rank has the last
    stage. after: bytes of what happens behind backward: the end of compressed sums, the update. tails: the
    rank's blocks, the last one first, if they recompute different things; else only the last one counts, behind which
    most is live.
    """
    loss = one.end if last else 0.0
    tails = tails or (Tail(0.0, max(one.plain, one.mixed), one.again, one.inside),)
    left = own - loss - tails[0].kept
    moments = [
        (left, one.stream + besides.scatter),
        (0.0, besides.rest),
        (0.0, after),
    ]
    for behind, _, again, inside in tails:
        moments.append((live - loss - behind + again, inside + besides.block))
        moments.append((own - loss - max(behind, tails[0].kept) + again, inside + besides.next))
    if last:
        moments.append((live, one.loss + besides.loss))
    return max(moments, key=sum)


def predict(s: Setting) -> list[Memory]:
    """Memory per rank at each pipeline position."""
    return Predictor(s).of(s.recompute)


class Predictor:
    """The memory of a setting, for any modes of recomputation of its blocks."""

    def __init__(self, s: Setting):
        self.setting, self.layout, self.by_stage = s, s.layout, s.stages
        self.mixed = s.card.is_mixed
        self.sums = sums(s)
        self._modes: dict[str, MicrobatchBytes] = {}
        self.schedule, self.times = live_schedule(s.layout, s.microbatches)
        self.always = transfers(self.microbatch("none"), s.layout, s.microbatches)
        ranks, same = rank_elements(s), alike(s)
        besides = {ends: buffers(s, *ends) for ends in {s.ends(number) for number in same}}
        held = {n: self._held(n, ranks[n], besides[s.ends(n)]) for n in dict.fromkeys(same)}
        self.held = [held[number] for number in same]

    def microbatch(self, mode: str) -> MicrobatchBytes:
        """Bytes of a microbatch whose blocks all have this mode."""
        if mode not in self._modes:
            self._modes[mode] = microbatch(self.setting, self.sums, mode)
        return self._modes[mode]

    def kept(self, mode: str, number: int) -> float:
        """Bytes that a block keeps of a microbatch."""
        one = self.microbatch(mode)
        return one.mixed if self.mixed(number) else one.plain

    def of(self, modes: Sequence[str]) -> list[Memory]:
        """Memory per rank at each pipeline position. modes: of each block of the model."""
        kept = [sum(self.kept(modes[i], i) for i in part) for part in self.by_stage]
        one = self.microbatch(modes[-1])
        owed = [
            sum(one.owed_mixed if self.mixed(i) else one.owed_plain for i in part) for part in self.by_stage
        ]
        if (parts := parts_of(self.layout)) > 1:  # a pipeline holds what a stage has received whole
            kept[1:] = [size + one.stream * (1 - 1 / parts) for size in kept[1:]]
        kept[0] += one.begin
        kept[-1] += one.end
        live = [self.times * size for size in peak_live(self.schedule, kept, owed)] if self.schedule else kept
        found = []
        for position, (states, besides, after, scratch) in enumerate(self.held):
            own = sum(kept[i] for i in stages_of(self.layout, position))
            last = self.setting.ends(position)[1]
            tails = self._tails(modes, position) if len(set(modes)) > 1 else ()
            activations, more = at_peak(one, besides, live[position], own, last, after, tails)
            found.append(replace(states, activations=activations, buffers=more + scratch + self.always))
        return found

    def _tails(self, modes: Sequence[str], position: int) -> list[Tail]:
        """The blocks of a rank's stages, the last one first."""
        behind, found = 0.0, []
        for number in reversed(self.setting.blocks(position)):
            one, kept = self.microbatch(modes[number]), self.kept(modes[number], number)
            found.append(Tail(behind, kept, one.again, one.inside))
            behind += kept
        return found

    def _held(self, position: int, own: Elements, besides: Buffers) -> tuple[Memory, Buffers, float, float]:
        """(states, buffers, bytes behind backward, scratch of sums) of a rank, whatever it recomputes."""
        s, optimizer_name = self.setting, self.setting.software.optimizer
        unsent, summing = compression(s, position)
        summing = max(summing, rounding_scratch(s, position))
        after = max(summing, update_scratch(optimizer_name, s.model, s.layout, position))
        params, gradients, optimizer = rank_states(s, own)
        optimizer += more_states(optimizer_name, s.model, s.layout, position, s.states.moments)
        params += node_copies(s, position)
        states = Memory(params, gradients + unsent, optimizer, 0.0, 0.0)
        return states, besides, after, sum_scratch(s, position)


def live_microbatches(layout: Layout, microbatches: int) -> float:
    """The most microbatches that a rank keeps at once, with equal stages: all with GPipe, as many as there are ranks
    with 1F1B."""
    held, times = live_schedule(layout, microbatches)
    return times * max(peak_live(held)) / layout.stages_per_rank if held else 1.0


def live_schedule(layout: Layout, microbatches: int) -> tuple[Schedule | None, int]:
    """(a schedule of fewer microbatches, the factor from its peaks to those of the whole step); None without a
    pipeline. More microbatches than can be live at once change no peak. If all are live at once, one stands for all."""
    if layout.pp == 1:
        return None, 1
    times = 1
    if holds_all(layout.schedule, layout.pp, layout.stages_per_rank):
        microbatches, times = 1, microbatches
    else:
        microbatches = few(microbatches, layout.pp)
    return schedule(layout.schedule, layout.pp, microbatches, layout.virtual_stages), times
