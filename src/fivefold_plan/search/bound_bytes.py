"""Lower bounds of the bytes of a layout's ranks. No bound may exceed the prediction of `memory.predict`."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import NamedTuple

from fivefold.schedules.pipeline import FILLING, holds_again, holds_all, most_live
from fivefold.sharding.layout import changed
from fivefold.sharding.parts import ends_of, stages_of
from fivefold_plan.memory import memory, model_states
from fivefold_plan.memory.memory import MicrobatchBytes, Tail
from fivefold_plan.memory.model_states import Buffers
from fivefold_plan.search.shared import MANY, Key, Position, Share, SharedCosts
from fivefold_plan.search.space import Choice, Space

NONE = Buffers()
ROUNDING = 1 - 1e-9


class LeastBytes:
    """Lower bounds of the bytes of layouts of a model on a cluster."""

    def __init__(self, shared: SharedCosts):
        self.shared = shared
        self._positions: dict[Key, tuple[Held, ...]] = {}
        self._fewest: dict[Key, list[tuple[Held, ...]]] = {}
        self._firsts: dict[Key, Held] = {}
        self._ranks: dict[Key, Held] = {}
        self._any: dict[Key, list[list[Held]]] = {}
        self._states: dict[Key, dict[Key, tuple[float, float, Buffers]]] = {}

    def of(self, c: Choice, buffers: bool = True) -> float:
        """Bytes of the ranks that probably hold most. Without buffers it is a bound for every way to share states, if
        this layout's is the one that keeps least."""
        return self._most(c, self.shared.bytes(c), [self._fullest(c)], buffers)

    def least(self, c: Choice, space: Space) -> float:
        """`start` or less, for the smallest microbatch of a shape and for all others."""
        x = c.layout
        key = (x.pp, x.dp, x.tp > 1, x.cp > 1, x.ep > 1)
        if key not in self._any:
            every = [self._first(one, space).times(one.B) for one in space.sizes(c)]
            apart = ([rank for rank in every if rank.once == once] for once in (True, False))
            self._any[key] = [[_smallest(ranks)] for ranks in apart if ranks]
        lean = changed(c, layout=space.leanest(x))
        return self._most(lean, self._scaled(c), self._any[key], False)

    def light(self, c: Choice, space: Space) -> float:
        """By which layouts are chosen that offload something, which is no bound: bytes of the least of everything that
        the first rank holds under any schedule."""
        x, rank = c.layout, self._first(c, space)
        settled = c.count >= 4 * x.pp and c.count % x.pp == 0
        lean, part = changed(c, layout=space.leanest(x)), rank.part._replace(last=False)
        rank = rank._replace(part=part, live=rank.live._replace(begin=0, end=0), settles=settled)
        return self._most(lean, self.shared.bytes(c), [[rank]], False)

    def _first(self, c: Choice, space: Space) -> Held:
        """The least of everything that the first rank holds under any schedule."""
        x = c.layout
        key = (x.pp, c.count, x.tp > 1, x.cp > 1, x.ep > 1)  # some schedules hold all microbatches
        if key not in self._firsts:
            ways = [changed(c, layout=changed(x, **way)) for way in space.schedules(x)]
            self._firsts[key] = _smallest([self.held(w, self.shared.positions(w.layout)[0]) for w in ways])
        return self._firsts[key]

    def start(self, c: Choice, space: Space) -> float:
        """`shape` or less, as `Bounds.start`."""
        lean = changed(c, layout=space.leanest(c.layout))
        return self._most(lean, self._scaled(c), self._ways(c, space), False)

    def shape(self, c: Choice, space: Space) -> float:
        """`of` or less, under any schedule and with states shared in any way."""
        lean = changed(c, layout=space.leanest(c.layout))
        return self._most(lean, self.shared.bytes(c), self._ways(c, space), False)

    def _scaled(self, c: Choice) -> MicrobatchBytes:
        """No more bytes than those of the microbatch: what its sequences take in one of `MANY`."""
        if self.shared.exact:
            return self.shared.bytes(c)
        factor = c.B / MANY
        return MicrobatchBytes._make([factor * size for size in self.shared.bytes(changed(c, B=MANY))])

    def _most(self, c: Choice, size: MicrobatchBytes, ways: Sequence[Sequence[Held]], buffers: bool) -> float:
        """Bytes of the rank that holds most, under the schedule with which that is least. Of the choice's layout
        only the sharing of states counts, not the schedule."""
        x, least = c.layout, math.inf
        key = (x.tp, x.ep, x.ep_fold, x.sp, x.pp > 1, x.zero, x.dp_shard * x.cp, c.mode)
        known = self._states.setdefault(key, {})
        for ranks in ways:
            most = 0.0
            for rank in ranks:
                if (key := (rank.part, rank.once)) not in known:
                    known[key] = self._states_of(c, rank)
                most = max(most, self._rank(*known[key], size, rank, buffers))
                if most >= least:
                    break
            least = min(least, most)
        return ROUNDING * (least + memory.transfers(size, x, c.count))

    def _rank(
        self, states: float, late: float, besides: Buffers, size: MicrobatchBytes, rank: Held, buffers: bool
    ) -> float:
        kept, each = sum(map(operator.mul, rank.live, size)), sum(map(operator.mul, rank.part, size))
        besides, last = besides if buffers else NONE, bool(rank.part.last)
        # gradients of several stages need not exist at once, nor any of them when most is live
        fullest, behind = late * (not rank.settles), late * rank.several
        tails = (self._tail(size, rank),)
        most = states - fullest + sum(memory.at_peak(size, besides, kept, each, last, tails=tails))
        if behind < fullest:
            most = max(
                most, states - behind + sum(memory.at_peak(size, besides, 0.0, each, last, tails=tails))
            )
        return most

    def _tail(self, size: MicrobatchBytes, rank: Held) -> Tail:
        """The backward of a rank's last block, which may be of either kind if the rank has both."""
        kept, kind = max(size.plain, size.mixed), self.shared.second[-1]
        own, other = (size.again, size.inside), (size.other_again, size.other_inside)
        if not rank.part.plain + rank.part.mixed:
            return Tail(0.0, kept, 0.0, 0.0)
        if rank.alike:
            return Tail(0.0, kept, *(own if rank.part[kind] else other))
        return Tail(0.0, kept, min(own[0], other[0]), min(own[1], other[1]))

    def _fullest(self, c: Choice) -> tuple[Held, ...]:
        """What three pipeline positions hold: the first, the one with most blocks times live microbatches, the one with
        most blocks."""
        x = c.layout
        key = (x.pp, x.schedule, x.virtual_stages, x.bare_ends, _filling(c))
        if key not in self._positions:
            every = [self.held(c, at) for at in self.shared.positions(x)]
            most = max(every, key=lambda one: one.live.plain + one.live.mixed)
            blocks = max(every, key=lambda one: one.part.plain + one.part.mixed)
            self._positions[key] = (*dict.fromkeys((every[0], most, blocks)),)
        return self._positions[key]

    def held(self, c: Choice, at: Position) -> Held:
        """What a pipeline rank holds."""
        x, count = c.layout, _filling(c)
        key = (x.pp, x.schedule, x.virtual_stages, x.bare_ends, count, at.number)
        if key not in self._ranks:
            self._ranks[key] = held_by(changed(c, count=count), at)
        return self._ranks[key]

    def _ways(self, c: Choice, space: Space) -> list[tuple[Held, ...]]:
        """The same under every schedule of a shape that does not hold more of everything than another one."""
        x = c.layout
        key = (x.pp, c.count, x.tp > 1, x.cp > 1, x.ep > 1)  # as in `_first`
        if key not in self._fewest:
            choices = (changed(c, layout=changed(x, **way)) for way in space.schedules(x))
            found = self._fewest[key] = list[tuple[Held, ...]]()
            for way in sorted(set(map(self._fullest, choices)), key=lambda way: max(map(Held.amount, way))):
                if not any(all(any(one.under(rank) for rank in way) for one in other) for other in found):
                    found.append(way)
        return self._fewest[key]

    def _states_of(self, c: Choice, rank: Held) -> tuple[float, float, Buffers]:
        """Bytes of the states of a rank, those of them that a pipeline does not always hold, and its buffers."""
        part, s = rank.part, self.shared.setting(changed(c, count=1 if rank.once else 2))
        own = self.shared.elements(c.layout, part)
        late = model_states.adding_up(s, own)[0] if c.layout.pp > 1 else 0.0
        besides = model_states.buffers(s, bool(part.first), bool(part.last))
        return sum(model_states.rank_states(s, own)), late, besides


class Live(NamedTuple):
    """Blocks of the first and of the second kind, beginnings and ends of the model, times microbatches that are live in
    them; and those blocks times microbatches that wait for weight gradients."""

    plain: int
    mixed: int
    begin: int
    end: int
    owed_plain: int
    owed_mixed: int


class Held(NamedTuple):
    """What a pipeline rank holds when it holds most. part: of the model. settles: it holds as much again and again,
    also when the gradients of all its stages add up. several: it has several stages. once: of one microbatch. alike:
    all its blocks are of one kind."""

    part: Share
    live: Live
    settles: bool
    several: bool
    once: bool
    alike: bool

    def times(self, B: int) -> Held:
        """With B times as many live sequences: where a rank computes the loss, it holds the end of one sequence in any
        case (`memory.at_peak`)."""
        live = Live(*(B * count for count in self.live))
        return self._replace(live=live._replace(end=live.end - (B - 1) * self.part.last))

    def amounts(self) -> tuple[float, ...]:
        """By which a rank's bytes grow."""
        more = (self.live.end - self.part.last, self.settles, not self.several, self.alike)
        return *self.part, *self.live, *more

    def under(self, other: Held) -> bool:
        """True if it holds no more of anything."""
        return all(map(operator.le, self.amounts(), other.amounts()))

    def amount(self) -> float:
        return sum(self.amounts())


def _smallest(ranks: Sequence[Held]) -> Held:
    """The least of each that ranks hold."""
    part = Share(*map(min, zip(*(rank.part for rank in ranks), strict=True)))
    live = Live(*map(min, zip(*(rank.live for rank in ranks), strict=True)))
    kinds = {(bool(rank.part.plain), bool(rank.part.mixed)) for rank in ranks}
    return Held(part, live, False, True, ranks[0].once, ranks[0].alike and len(kinds) == 1)


def held_by(c: Choice, at: Position) -> Held:
    x, counts = c.layout, ((1,), (0,))
    if x.pp > 1:
        counts = most_live(x.schedule, at.number, x.pp, c.count, x.stages_per_rank)
    live = [0] * len(Live._fields)
    for stage, blocks, waiting, owed in zip(stages_of(x, at.number), at.stages, *counts, strict=True):
        one = (
            *(waiting * some for some in (*blocks, *ends_of(x, [stage]))),
            *(owed * some for some in blocks),
        )
        live = [*map(operator.add, live, one)]
    if (
        live[3] < at.part.last
    ):  # `memory.at_peak` subtracts the end of one, but a second copy of the model may have none
        live = [0] * len(live)
    alike = bool(at.part.plain) != bool(at.part.mixed)
    return Held(at.part, Live(*live), _settles(c, at.number), len(at.stages) > 1, c.count == 1, alike)


def _filling(c: Choice) -> int:
    """Fewer microbatches with which every rank holds as much, if there are fewer."""
    x, few = c.layout, FILLING * c.layout.pp
    if c.count < few or (x.pp > 1 and holds_all(x.schedule, x.pp, x.stages_per_rank)):
        return c.count
    return few + (c.count % x.pp > 0)


def _settles(c: Choice, rank: int) -> bool:
    """True if a rank holds most again while the gradients of all its stages add up. With several stages the
    microbatches are whole rounds; with two copies of the model it may be other stages that it holds then."""
    x, chunks = c.layout, c.layout.stages_per_rank
    if x.copies > 1 or c.count < FILLING * x.pp or (chunks > 1 and c.count % x.pp):
        return False
    return x.pp == 1 or holds_again(x.schedule, rank, x.pp, chunks)
