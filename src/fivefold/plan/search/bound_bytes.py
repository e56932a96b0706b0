"""Lower bounds of a layout's memory. No bound may exceed the prediction of `memory.predict`."""

from __future__ import annotations

from dataclasses import replace

from fivefold.plan.memory import buffers, memory, model_states
from fivefold.plan.memory.buffers import Buffers
from fivefold.plan.search.shared_costs import Position, SharedCosts, within_block
from fivefold.plan.search.space import Choice, Space
from fivefold.schedules.pipeline import most_live

ROUNDING = 1 - 1e-9
NONE = Buffers()
Live = tuple[tuple[int, ...], tuple[int, ...]]
"""Microbatches in each stage of a position when it holds most: those that wait for backward; for weight gradients."""


class LeastBytes:
    """Bounds for the layouts of a model on a cluster."""

    def __init__(self, shared: SharedCosts):
        self.shared = shared
        self._fewest: dict[tuple[int, int], tuple[tuple[int, int], int]] = {}
        self._kept: dict[tuple[object, ...], list[tuple[Position, float, float]]] = {}
        self._states: dict[tuple[object, ...], tuple[float, Buffers]] = {}

    def of(self, c: Choice, buffers: bool = True) -> float:
        """Bytes of the ranks that probably hold most. Without buffers it is a bound for every way to share states, if
        this layout's is the one that keeps least."""
        one, most = self.shared.microbatch(c).bytes, 0.0
        for at, live, own in self._fullest(c):
            states, besides = self._held(c, at)
            peak = memory.at_peak(one, besides if buffers else NONE, live, own, at.last)
            most = max(most, states + sum(peak))
        return ROUNDING * (most + memory.transfers(one, c.layout, c.count))

    def _fullest(self, c: Choice) -> list[tuple[Position, float, float]]:
        """Three pipeline positions: the first, the one with most blocks times live microbatches, the one with most
        blocks. With each the bytes that its live microbatches keep at least, and the bytes that one of them keeps."""
        x = c.layout
        key = (*within_block(x), x.recompute, c.B, c.mode, c.count)
        key += (x.pp, x.schedule, x.virtual_stages)
        if key not in self._kept:
            positions = self.shared.positions(x)
            live = [_live(c, number) for number in range(x.pp)]
            chosen = {
                0,
                max(range(x.pp), key=lambda n: _live_blocks(live[n], positions[n])),
                max(range(x.pp), key=lambda n: positions[n].plain + positions[n].mixed),
            }
            self._kept[key] = [(positions[n], *self._keeps(c, positions[n], live[n])) for n in chosen]
        return self._kept[key]

    def _keeps(self, c: Choice, at: Position, live: Live) -> tuple[float, float]:
        """Bytes that the live microbatches of a position keep, and those that one of them does."""
        one, kept, own = self.shared.microbatch(c).bytes, 0.0, 0.0
        for number, (plain, mixed) in enumerate(at.stages):
            size = plain * one.plain + mixed * one.mixed
            size += at.first * (number == 0) * one.begin
            size += at.last * (number == len(at.stages) - 1) * one.end
            owed = plain * one.owed_plain + mixed * one.owed_mixed
            kept, own = kept + live[0][number] * size + live[1][number] * owed, own + size
        return kept, own

    def _held(self, c: Choice, at: Position) -> tuple[float, Buffers]:
        """Bytes of a position's states, and its buffers."""
        x = c.layout
        key = (x.tp, x.ep, x.sp, x.pp > 1, x.zero, x.dp_shard * x.cp, at.plain, at.mixed, at.first, at.last)
        key += (c.mode, c.count == 1)
        if key not in self._states:
            own, s = self.shared.elements(x, at.plain, at.mixed, at.first, at.last), self.shared.setting(c)
            held = sum(model_states.rank_states(s, own))
            self._states[key] = held, buffers.buffers(s, at.first, at.last)
        return self._states[key]

    def shape(self, c: Choice, space: Space) -> float:
        """Bytes of the first ranks under any schedule, with states shared as widely as possible."""
        one, ((plain, mixed), blocks) = self.shared.microbatch(c).bytes, self._first_ranks(c, space)
        x = c.layout
        key = (x.tp, x.ep, x.sp, x.pp, x.dp * x.cp, c.mode, c.count == 1, plain, mixed)
        if key not in self._states:
            lean = space.leanest(x)
            own = self.shared.elements(lean, plain, mixed, True, False)
            held = sum(model_states.rank_states(self.shared.setting(replace(c, layout=lean)), own))
            self._states[key] = held, NONE
        kept = [k for k, some in ((one.plain, plain), (one.mixed, mixed)) if some]
        live = blocks * min(kept, default=0.0) + one.again + one.inside
        return (self._states[key][0] + live + memory.transfers(one, x, c.count)) * ROUNDING

    def _first_ranks(self, c: Choice, space: Space) -> tuple[tuple[int, int], int]:
        """The fewest blocks (without experts, with) of the first ranks under any schedule, and the fewest blocks times
        live microbatches."""
        key = (c.layout.pp, c.count)
        if key not in self._fewest:
            found = []
            for name, virtual in space.schedules(c.layout.pp):
                one = replace(c, layout=replace(c.layout, schedule=name, virtual_stages=virtual))
                at = self.shared.positions(one.layout)[0]
                found.append((at, _live_blocks(_live(one, 0), at)))
            fewest = min(at.plain for at, _ in found), min(at.mixed for at, _ in found)
            self._fewest[key] = fewest, min(blocks for _, blocks in found)
        return self._fewest[key]


def _live_blocks(live: Live, at: Position) -> int:
    return sum(count * sum(kinds) for count, kinds in zip(live[0], at.stages, strict=True))


def _live(c: Choice, rank: int) -> Live:
    x = c.layout
    return most_live(x.schedule, rank, x.pp, c.count, x.stages_per_rank) if x.pp > 1 else ((1,), (0,))
