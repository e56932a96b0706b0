"""Memory per rank: states from the parameter table, activations from the operations, live microbatches from the
schedule, and buffers at the moment with the largest sum. Search, `plan` and plan.json share this formula."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from fivefold.models.operations import ByKind, Kind, Operation, Role
from fivefold.models.recomputation import region
from fivefold.schedules.pipeline import SENDS_PER_RANK, Schedule, holds_all, live_phases, peak_live
from fivefold.schedules.pipeline.schedule import owed_together
from fivefold.schedules.timelines import CATEGORIES
from fivefold.sharding.layout import Layout
from fivefold.sharding.parts import ends_of, stages_of
from fivefold.sharding.tiers import partitions, tiers
from fivefold_plan.memory import model_states
from fivefold_plan.memory.model_states import (
    Buffers,
    elements,
    node_copies,
    outside_blocks,
    rank_elements,
    rank_states,
    uneven_states,
)
from fivefold_plan.setting import Setting, Software

ERROR = 0.015
"""Mean error of the formula against tracked peaks on CPUs (benchmarks/planner/own_memory.py), rounded up."""


@dataclass(frozen=True)
class Memory:
    """Bytes on the first rank of a pipeline position; no other rank there has more.

    params: weights that compute. gradients: their sums. optimizer: moments, and masters that do not compute.
    activations: tensors that forward, or its recomputation, keeps for backward. buffers: the rest.
    host, disk: what is offloaded there; not in the total. left: those of `gradients` that are in another tier at the
    moment with the largest sum, until `offload.held` moves what is offloaded.
    """

    params: float
    gradients: float
    optimizer: float
    activations: float
    buffers: float
    host: float = 0.0
    disk: float = 0.0
    left: float = 0.0

    @property
    def total(self) -> float:
        return sum(getattr(self, name) for name in CATEGORIES)

    def as_json(self) -> dict[str, int]:
        away = [name for name in ("host", "disk") if getattr(self, name)]
        return {name: round(getattr(self, name)) for name in (*CATEGORIES, "total", *away)}


ByRole = dict[Role, float]
"""Bytes of saved tensors by their role."""


class BlockSums(NamedTuple):
    """Sums over a block's operations. saved: bytes by role. owed: bytes kept for deferred weight gradients: the input
    of each matmul with weights, and the gradient of its output. parts: the block's backward, cut at the matmuls of its
    sublayers: saved bytes, those of them that exist at once if attention's core is recomputed, largest workspace."""

    saved: ByRole
    owed: float
    parts: list[tuple[ByRole, ByRole, float]]


NO_BLOCK = BlockSums({}, 0.0, [])


@dataclass(frozen=True)
class Sums:
    """Sums over a microbatch's operations, also before and behind the blocks. The memory of every recomputation mode
    follows from them. head: the part of `end` that is of one depth. loss: workspace of the loss."""

    block: ByKind[BlockSums]
    begin: ByRole
    end: ByRole
    head: ByRole
    loss: float


def sums(s: Setting) -> Sums:
    """Sums over the operations of one rank."""
    work, narrow, late = s.work, s.sizes.narrow, s.software.late_experts
    held = s.sizes.kept(s.software.narrow_factors)

    def workspace(op: Operation) -> float:  # the rounded factors of one matmul exist at once
        if not (op.matmul and narrow):
            return op.workspace
        return op.workspace + narrow * max(op.matmul.rounded(s.rounded_once[op.matmul.grouped]))

    def of_block(kind: Kind) -> BlockSums:
        block, cut = work.block[kind], list[list[Operation]]([[]])
        for op in block:
            if any(tensor.role in ("product", "copied") for tensor in op.saved):
                cut.append([])
            cut[-1].append(op)
        parts, behind = list[tuple[ByRole, ByRole, float]](), 0.0
        for ops in reversed(
            [ops for ops in cut if ops]
        ):  # what parts behind have kept is free when one runs again
            most = max(max(0.0, workspace(op) - behind * op.again) for op in ops)
            parts.insert(0, (saved(ops), saved(ops, True), most))
            behind += sum(parts[0][0].values())
        products = (op.matmul for op in block if op.matmul and op.matmul.weight)
        owed = sum(m.count * m.m * (m.k + m.n) for m in products if late or not m.grouped) * held
        return BlockSums(saved(block), owed, parts)

    largest = max(op.workspace for op in work.end)
    return Sums(ByKind(of_block), saved(work.begin), saved(work.end), saved(work.head), largest)


def saved(operations: Iterable[Operation], once: bool = False) -> ByRole:
    """Bytes of the saved tensors of each role. once: those that exist at once if they are recomputed."""
    sizes: ByRole = {}
    for op in operations:
        for tensor in op.saved:
            size = tensor.size if tensor.once is None or not once else tensor.once
            sizes[tensor.role] = sizes.get(tensor.role, 0.0) + size
    return sizes


def kept(operations: Iterable[Operation], recompute: str, software: Software) -> float:
    """Bytes that operations keep from forward to backward."""
    return _of(saved(operations), region(recompute, software).keeps)


def _of(sizes: ByRole, roles: frozenset[Role]) -> float:
    return sum(size for role, size in sizes.items() if role in roles)


class MicrobatchBytes(NamedTuple):
    """Bytes of one microbatch on a rank.

    plain, mixed: kept from forward to backward by a block of the first and of the second kind (`Card.second`). begin,
    end: kept by the layers before and behind the blocks. owed_plain, owed_mixed: kept by a block from I to W. again,
    inside: recomputed in the last block's backward, and its workspace; other_again, other_inside: of a block of the
    other kind. loss: workspace of the loss. stream: the activation between two blocks. tokens: inputs and targets.
    freed: the part of `end` that is gone before the last block's backward.
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
    freed: float
    other_again: float
    other_inside: float


def microbatch(s: Setting, sums: Sums, recompute: str) -> MicrobatchBytes:
    """Bytes of one microbatch on a rank under a recomputation mode. A block that runs again has its input whole."""
    divided, stream = parts_of(s.layout), s.activation
    used, outside = region(recompute, s.software), region("none", s.software).keeps
    behind = used.keeps | frozenset[Role](("stream",))  # blocks of multi-token prediction recompute, too
    others = stream * (1 - 1 / divided)
    kinds = [
        sums.block[s.kind(second, recompute)] if second in s.card.second else NO_BLOCK
        for second in (False, True)
    ]
    plain, mixed = (max(0.0, _of(kind.saved, used.keeps) - others) for kind in kinds)
    repeated = region("none").keeps - used.keeps

    def backward(parts: list[tuple[ByRole, ByRole, float]]) -> tuple[float, float]:
        """Full recomputation repeats the whole block, the other modes one part at a time."""
        made = [(_of(once if used.core else sizes, repeated), most) for sizes, once, most in parts]
        if recompute == "full" or not repeated:
            return sum(size for size, _ in made), max((most for _, most in made), default=0.0)
        return max(made, key=sum, default=(0.0, 0.0))

    last, between = (
        s.card.second[-1],
        stream * (2 if divided > 1 else 1),
    )  # the gradient of the residual stream
    (again, inside), (other_again, other_inside) = (backward(kinds[kind].parts) for kind in (last, not last))
    return MicrobatchBytes(
        plain,
        mixed,
        _of(sums.begin, outside),
        _of(sums.end, behind),
        kinds[False].owed,
        kinds[True].owed,
        again,
        inside + between,
        sums.loss,
        stream,
        2 * 8 * s.sizes.N * (1 + s.card.further),
        _of(sums.head, behind),
        other_again,
        other_inside + between,
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
) -> tuple[float, float, float]:
    """(activations, buffers, -gradients that have left) at the moment of `Buffers` with the largest sum.

    live: bytes kept by all live microbatches. own: bytes kept by one of them. last: True if the rank has the last
    stage. after: bytes of what happens behind backward: the end of compressed sums, the update. tails: of the rank's
    blocks, the last one first; else only that counts, behind which most is live.
    """
    loss = one.freed if last else 0.0
    tails = tails or (Tail(0.0, max(one.plain, one.mixed), one.again, one.inside),)
    others = own - loss - tails[0].kept
    moments = [(others, one.stream + besides.scatter, 0.0), (0.0, besides.rest, 0.0), (0.0, after, 0.0)]
    for behind, _, again, inside in tails:
        moments.append((live - loss - behind + again, inside + besides.block, 0.0))
        moments.append((own - loss - max(behind, tails[0].kept) + again, inside + besides.next, 0.0))
    if last:
        moments.append((live, one.loss + besides.loss, -besides.left))
    return max(moments, key=sum)


def leaving(s: Setting, position: int) -> float:
    """Bytes of the gradients on a rank that leave its device unit by unit: of what is outside of blocks, and of two
    blocks (one computes, one moves), or of those that wait from their I, which brings those of norms, to their W. FSDP2
    brings rows when a unit is done, so only one moves; its whole sums over microbatches stay besides. 0 if gradients
    stay."""
    if tiers(s.layout.offload, s.states.master > 0).gradients == "device":
        return 0.0
    every = outside_blocks(s, position), rank_elements(s)[position], *elements(s.model, s.layout).blocks
    outside, own, *blocks = (part.keeps if s.layout.zero else part.computes for part in every)
    if s.layout.zero:
        return s.states.gradient * max(outside, min(own - outside, max(blocks)))
    wait, (schedule, _) = 2 * max(blocks), live_schedule(s.layout, s.microbatches)
    if schedule:
        owed = [sum(blocks[number] for number in stage) for stage in s.stages]
        wait = max(wait, owed_together(schedule.rows[position], owed))
    return s.states.gradient * (outside + min(own - outside, wait))


def predict(s: Setting, shared: Sums | None = None) -> list[Memory]:
    """Memory per rank at each pipeline position. shared: the layout's `sums`, if already known."""
    return Predictor(s, shared).of(s.recompute)


class Predictor:
    """The memory of a setting, for any modes of recomputation of its blocks."""

    def __init__(self, s: Setting, shared: Sums | None = None):
        self.setting, self.layout, self.by_stage = s, s.layout, s.stages
        self.second = s.card.second
        self.sums = shared or sums(s)
        self._modes: dict[str, MicrobatchBytes] = {}
        self.schedule, self.times = live_schedule(s.layout, s.microbatches)
        self.always = transfers(self.microbatch("none"), s.layout, s.microbatches)
        ranks, same = model_states.rank_elements(s), model_states.alike(s)
        kinds = {number: (*s.ends(number), bool(s.blocks(number))) for number in dict.fromkeys(same)}
        besides = {kind: model_states.buffers(s, *kind) for kind in {*kinds.values()}}
        held = dict[int, tuple[Memory, Buffers, float, float]]()
        for number in dict.fromkeys(same):
            params, gradients, optimizer = rank_states(s, ranks[number])
            unsent, summing = model_states.compression(s, number)
            more, matrices = uneven_states(s.software.optimizer, s.model, s.layout, number, s.states.moments)
            more += s.states.estimate * (ranks[number].keeps - ranks[number].frozen[1])
            after = max(summing, model_states.rounding_scratch(s, number), matrices)
            states = Memory(params + node_copies(s, number), gradients + unsent, optimizer + more, 0.0, 0.0)
            moments = besides[kinds[number]]
            if s.layout.pp == 1:  # at the loss, gradients of the last microbatch have left
                moments = replace(moments, left=leaving(s, number))
            held[number] = states, moments, after, model_states.sum_scratch(s, number)
        several = range(len(self.by_stage)) if s.layout.pp > 1 else ()
        self.adding_up = [model_states.adding_up(s, model_states.stage_elements(s, n)) for n in several]
        """Bytes of the gradients of each pipeline stage while they add up, and after."""
        self.together = (0, len(several) - 1) if s.card.tied else ()
        self.held = [held[number] for number in same]
        """(states, buffers, bytes behind backward, scratch of sums) of each position, whatever it recomputes."""

    def microbatch(self, mode: str) -> MicrobatchBytes:
        """Bytes of a microbatch whose blocks all have this mode."""
        if mode not in self._modes:
            self._modes[mode] = microbatch(self.setting, self.sums, mode)
        return self._modes[mode]

    def kept(self, mode: str, number: int) -> float:
        """Bytes that a block keeps of a microbatch."""
        one = self.microbatch(mode)
        return one.mixed if self.second[number] else one.plain

    def of(self, modes: Sequence[str]) -> list[Memory]:
        """Memory per rank at each pipeline position. modes: of each block of the model."""
        kept = [sum(self.kept(modes[i], i) for i in part) for part in self.by_stage]
        one = self.microbatch(modes[-1])
        owed = [
            sum(one.owed_mixed if self.second[i] else one.owed_plain for i in part) for part in self.by_stage
        ]
        if (parts := parts_of(self.layout)) > 1:  # a pipeline holds what a stage has received whole
            kept[1:] = [size + one.stream * (1 - 1 / parts) for size in kept[1:]]
        for stage in range(len(kept)):
            first, last = ends_of(self.layout, [stage])
            kept[stage] += one.begin * first + one.end * last
        phases = [[(frozenset[int](), kept[0])]]
        if self.schedule:
            phases = live_phases(self.schedule, kept, owed, self.together, sooner=self.times > 1)
        ranks = []
        for position, (states, besides, after, scratch) in enumerate(self.held):
            own = sum(kept[i] for i in stages_of(self.layout, position))
            last, tails = self.setting.ends(position)[1], self._tails(position, modes)
            moments = list[tuple[float, float, float, float]]()
            for gradients, live in self.moments(position, states.gradients, phases[position]):
                moments.append((gradients, *at_peak(one, besides, live, own, last, after, tails)))
            gradients, activations, more, gone = max(moments, key=sum)
            sizes = {"gradients": gradients, "activations": activations, "left": -gone}
            ranks.append(replace(states, buffers=more + scratch + self.always, **sizes))
        return ranks

    def _tails(self, position: int, modes: Sequence[str]) -> list[Tail]:
        """Of a rank's blocks the last one of each kind and mode: behind it most is live."""
        behind, tails = 0.0, dict[tuple[bool, str], Tail]()
        for number in reversed(self.setting.blocks(position)):
            second, mode = self.second[number], modes[number]
            block, size = self.microbatch(mode), self.kept(mode, number)
            work = block.again, block.inside
            if second != self.second[-1]:
                work = block.other_again, block.other_inside
            tails.setdefault((second, mode), Tail(behind, size, *work))
            behind += size
        return list(tails.values()) or [Tail(0.0, 0.0, 0.0, 0.0)]

    def moments(
        self, position: int, gradients: float, phases: Sequence[tuple[frozenset[int], float]]
    ) -> Iterator[tuple[float, float]]:
        """(bytes of gradients, bytes of all live microbatches) of a rank at its fullest in each phase of a step.
        gradients: of all stages at once, whole."""
        if not sum(whole for whole, _ in self.adding_up):
            yield gradients, self.times * max(live for _, live in phases)
            return
        gradients -= sum(self.adding_up[stage][0] for stage in stages_of(self.layout, position))
        begun = set[int]()
        for whole, live in phases:
            begun |= whole
            yield gradients + sum(self.adding_up[n][n not in whole] for n in begun), self.times * live


def live_microbatches(layout: Layout, microbatches: int) -> float:
    """The most microbatches that a rank keeps at once, with equal stages: all with GPipe, as many as there are ranks
    with 1F1B."""
    held, times = live_schedule(layout, microbatches)
    return times * max(peak_live(held)) / layout.stages_per_rank if held else 1.0


def live_schedule(layout: Layout, microbatches: int) -> tuple[Schedule | None, float]:
    """(a schedule of fewer microbatches, the factor from its peaks to those of the whole step); None without a
    pipeline. More microbatches than can be live at once change no peak. If all are live at once, two stand for all."""
    if layout.pp == 1:
        return None, 1
    every = holds_all(layout.schedule, layout.pp, layout.stages_per_rank)
    shown = min(2, microbatches) if every else layout.few(microbatches)
    return layout.pipeline(shown), microbatches / shown if every else 1
