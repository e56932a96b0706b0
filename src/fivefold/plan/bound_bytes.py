"""Bytes that a layout takes at least. Nothing here may exceed what `predict.price` says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fivefold.plan import memory
from fivefold.plan.pieces import Pieces, Position
from fivefold.plan.space import Choice, Space
from fivefold.schedules.pipeline.one_f_one_b import split_into_rounds

ROUNDING = 1 - 1e-9


class LeastBytes:
    """Of layouts of a model on a cluster."""

    def __init__(self, pieces: Pieces):
        self.pieces = pieces
        self._fewest: dict[tuple[int, int], tuple[tuple[int, int], int]] = {}
        self._kept: dict[tuple[object, ...], list[tuple[Position, float]]] = {}
        self._states: dict[tuple[object, ...], float] = {}

    def of(self, c: Choice, buffers: bool = True) -> float:
        """On the ranks that seem to hold most: states, what live microbatches keep, and what is there besides. Without
        buffers: what no other sharing of states goes below, if this is the one that keeps least."""
        return ROUNDING * max(kept + self._held(c, at, buffers) for at, kept in self._fullest(c))

    def _fullest(self, c: Choice) -> list[tuple[Position, float]]:
        """The positions with most blocks times live microbatches, and with most blocks; what they keep for backward,
        and during it."""
        x = c.layout
        key = (x.tp, x.cp, x.cp_method, x.ep, x.sp, x.recompute, c.B, c.dtype, c.count)
        key += (x.pp, x.schedule, x.virtual_stages)
        if key not in self._kept:
            positions = self.pieces.positions(x)
            live = [_live(c, number, len(at.stages)) for number, at in enumerate(positions)]
            chosen = {
                0,
                max(range(x.pp), key=lambda n: _live_blocks(live[n], positions[n])),
                max(range(x.pp), key=lambda n: positions[n].plain + positions[n].mixed),
            }
            self._kept[key] = [(positions[n], self._keeps(c, positions[n], live[n])) for n in chosen]
        return self._kept[key]

    def _keeps(self, c: Choice, at: Position, live: Sequence[int]) -> float:
        """live: microbatches in each stage of the position."""
        piece, kept = self.pieces.piece(c), 0.0
        for number, (plain, mixed) in enumerate(at.stages):
            size = plain * piece.kept_plain + mixed * piece.kept_mixed
            size += at.first * (number == 0) * piece.kept_begin
            kept += live[number] * (size + at.last * (number == len(at.stages) - 1) * piece.kept_end)
        besides = max(piece.inside, piece.loss) if at.last else piece.inside
        return kept + besides + piece.sent * (c.layout.pp > 1)

    def _held(self, c: Choice, at: Position, buffers: bool) -> float:
        """States of a position, and buffers."""
        x = c.layout
        key = (x.tp, x.ep, x.pp > 1, x.zero, x.dp_shard * x.cp, at.plain, at.mixed, at.first, at.last)
        key += (c.dtype, c.count == 1, buffers)
        if key not in self._states:
            model, b = self.pieces.model, self.pieces.software.states[c.dtype]
            own = self.pieces.elements(x, at.plain, at.mixed, at.first, at.last)
            held = sum(memory.state_bytes(b, x.zero, own.computes, own.keeps, c.count, x.pp > 1))
            self._states[key] = held + (memory.buffers(model, x, own, b) if buffers else 0.0)
        return self._states[key]

    def shape(self, c: Choice, space: Space) -> float:
        """On the first ranks, whatever the schedule, where states are shared as far as can be."""
        piece, ((plain, mixed), blocks) = self.pieces.piece(c), self._first_ranks(c, space)
        x = c.layout
        key = (x.tp, x.ep, x.pp, x.dp * x.cp, c.dtype, c.count == 1, plain, mixed)
        if key not in self._states:
            lean, b = space.leanest(x), self.pieces.software.states[c.dtype]
            own = self.pieces.elements(lean, plain, mixed, True, False)
            self._states[key] = sum(memory.state_bytes(b, lean.zero, own.computes, own.keeps, c.count))
        held = self._states[key]
        kept = [k for k, some in ((piece.kept_plain, plain), (piece.kept_mixed, mixed)) if some]
        return (held + piece.inside + blocks * min(kept, default=0.0)) * ROUNDING

    def _first_ranks(self, c: Choice, space: Space) -> tuple[tuple[int, int], int]:
        """The fewest blocks (without experts, with) that they have under any schedule, and the fewest times
        microbatches that are live."""
        key = (c.layout.pp, c.count)
        if key not in self._fewest:
            found = []
            for name, virtual in space.schedules(c.layout.pp):
                one = replace(c, layout=replace(c.layout, schedule=name, virtual_stages=virtual))
                at = self.pieces.positions(one.layout)[0]
                found.append((at, _live_blocks(_live(one, 0, len(at.stages)), at)))
            fewest = min(at.plain for at, _ in found), min(at.mixed for at, _ in found)
            self._fewest[key] = fewest, min(blocks for _, blocks in found)
        return self._fewest[key]


def _live_blocks(live: Sequence[int], at: Position) -> int:
    return sum(count * sum(kinds) for count, kinds in zip(live, at.stages, strict=True))


def _live(c: Choice, rank: int, stages: int) -> list[int]:
    """Microbatches that each stage of a position in the pipeline has before the first is given up, at least: those of
    the forwards before it, as `schedules/pipeline` has them."""
    p, m, v = c.layout.pp, c.count, stages
    if p == 1:
        return [1]
    if c.layout.schedule in ("gpipe", "looped_bfs"):
        return [m] * v
    if c.layout.schedule in ("zbv", "dualpipev"):
        return [min(m, 2 * p - 1 - rank), min(m, rank + 1)]
    if c.layout.schedule == "zb_h1":
        return [min(m, p)]
    if c.layout.schedule != "interleaved":
        return [min(m, p - rank)]
    rounds = split_into_rounds(m, p)
    found, left = [0] * v, (v - 1) * rounds[0] + 2 * (p - rank - 1) + 1
    for size in rounds:
        for stage in range(v):
            found[stage] += min(size, left)
            left -= min(size, left)
        if not left:
            break
    return found
