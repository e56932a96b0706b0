"""The zero-bubble schedules with one stage per rank (Qi et al., arXiv 2401.10241): two by hand, and one that is
searched for given costs and memory.

Symbols: p ranks, m microbatches; F, I, W seconds of forward, input and weight gradients.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from heapq import heappop, heappush
from itertools import product
from math import inf

from fivefold.errors import UserError
from fivefold.schedules.pipeline.schedule import Kind, Step, W


def zb_h1(rank: int, ranks: int, microbatches: int, chunks: int) -> list[Step]:
    """Zero bubble H1: 1F1B with each W delayed by `rank` microbatches. Later ranks send gradients to earlier ones
    sooner, and have W left for the end, where they would otherwise be idle.

    Every rank holds at most `ranks` microbatches, as rank 0 does in 1F1B. Idle time per rank for m >= p and F, I >= W:
    (p-1) (F + I - W), a third of 1F1B's if they are equal.
    """
    assert chunks == 1
    forward: Step = ("F", rank)
    inputs: Step = ("I", rank)
    warmup = min(ranks - rank - 1, microbatches)
    steps: list[Step] = [forward] * warmup
    for position in range(microbatches):
        steps += [forward] * (warmup + position < microbatches) + [inputs] + [W] * (position >= rank)
    return steps


def zb_h2(rank: int, ranks: int, microbatches: int, chunks: int) -> list[Step]:
    """Zero bubble H2: forwards fill the time until the first backward, so 2p-1 microbatches are live on every rank.
    Each W is delayed by 2 `rank` microbatches.

    If F, I and W take equal time, no rank is idle between its first and its last action: ranks begin and end one after
    the other. A step that ends with a sum over all ranks, as ours does for the norm of gradients, still waits for the
    last one: (p-1) F, as in H1. The paper corrects the update afterwards instead.
    """
    assert chunks == 1
    forward: Step = ("F", rank)
    inputs: Step = ("I", rank)
    warmup = min(2 * (ranks - rank) - 1, microbatches)
    steps: list[Step] = [forward] * warmup
    for position in range(microbatches):
        steps += [inputs] + [W] * (position >= 2 * rank) + [forward] * (warmup + position < microbatches)
    return steps


def zb_auto(
    rank: int,
    ranks: int,
    microbatches: int,
    chunks: int,
    zb_costs: str = "",
    zb_live: int | None = None,
) -> list[Step]:
    """The automatic schedule (section 3.1): a greedy search with the costs of this machine and a limit of memory.

    zb_costs: see `costs_of`. zb_live: the most microbatches that a rank holds; None: 2p - 1, as H2 holds.
    """
    assert chunks == 1
    return list(_searched(ranks, microbatches, costs_of(zb_costs), zb_live or 2 * ranks - 1)[rank])


CHOOSING = 16
"""Microbatches per rank that choose between the ways to search: all of them where there are no more."""
Seconds = tuple[float, float, float, float]
"""Of F, I, W and of a transfer between ranks, in any unit."""


def costs_of(text: str) -> Seconds:
    """Reads `F:I:W:transfer`, such as `1:1.2:0.7:0.05`; empty: `1:1:1:0`. Raises UserError: these are not four numbers,
    or a computation takes no time."""
    if not text:
        return 1.0, 1.0, 1.0, 0.0
    try:
        forward, inputs, weights, transfer = map(float, text.split(":"))
        if min(forward, inputs, weights) > 0 <= transfer and forward + inputs + weights + transfer < inf:
            return forward, inputs, weights, transfer
    except ValueError:
        pass
    raise UserError(
        f"layout.zb_costs: '{text[:40]}' must be the times of F, I, W and of a transfer, F:I:W:transfer, such as "
        "1:1.2:0.7:0.05. Nearest valid: 1:1:1:0"
    )


@lru_cache(maxsize=64)
def _searched(ranks: int, microbatches: int, costs: Seconds, live: int) -> tuple[tuple[Step, ...], ...]:
    """The rows of the greedy schedule that ends first; of equal ones that whose longest rank is shortest. Where there
    are many microbatches, the first ones choose the way."""
    first = min(microbatches, CHOOSING * ranks)
    ways = product((True, False), (True, False), (1, 2))
    tries = (_Greedy(ranks, first, costs, live, *way).run() for way in ways)
    best = min(tries, key=lambda one: (one.end, one.longest))
    if first < microbatches:
        best = replace(best, microbatches=microbatches).run()
    return tuple(tuple((kind, rank) for kind in row) for rank, row in enumerate(best.rows))


@dataclass
class _Greedy:
    """Goes through time, and lets each rank that is free begin what it can: F and I as soon as their inputs are there,
    and W in the gaps.

    patient: a rank waits for a result that is known to arrive before a W would end. forwards_first: F before I. lead:
    F without I on a rank, as a multiple of the ranks from it on: 1 as in 1F1B and H1, 2 as in H2 (less one).
    """

    ranks: int
    microbatches: int
    costs: Seconds
    live: int
    patient: bool
    forwards_first: bool
    lead: int

    def run(self) -> _Greedy:
        every = range(self.ranks)
        self.rows: list[list[Kind]] = [[] for _ in every]
        self.free, self.begun = [0.0] * self.ranks, [inf] * self.ranks
        self.done = [dict.fromkeys("FIW", 0) for _ in every]
        # when the inputs of each rank's F and I arrive, in order; and when ranks look again, the last ones first
        self.arrivals = [{"F": [0.0] * self.microbatches * (rank == 0), "I": list[float]()} for rank in every]
        self.events = [(0.0, 0)]
        while self.events:
            now, rank = heappop(self.events)
            if self.free[-rank] <= now and (kind := self._next(-rank, now)):
                self._begin(-rank, kind, now)
        self.end = max(self.free)
        self.longest = max(end - begun for end, begun in zip(self.free, self.begun, strict=True))
        return self

    def _next(self, rank: int, now: float) -> Kind | None:
        """What a free rank begins, if anything."""
        done = self.done[rank]
        ahead = max(1, self.lead * (self.ranks - rank) - (self.lead > 1))
        full = done["F"] - done["W"] >= self.live or done["F"] - done["I"] >= ahead
        arrival = {"F": inf if full else self._arrives(rank, "F"), "I": self._arrives(rank, "I")}
        order: tuple[Kind, Kind] = ("F", "I") if self.forwards_first else ("I", "F")
        for kind in order:
            if arrival[kind] <= now:
                return kind
        waits = self.patient and min(arrival.values()) < now + self.costs[2]
        return "W" if done["I"] > done["W"] and not waits else None

    def _arrives(self, rank: int, kind: str) -> float:
        """When the next F or I of a rank has its input; inf if that is not known yet."""
        known, number = self.arrivals[rank][kind], self.done[rank][kind]
        return known[number] if number < len(known) else inf

    def _begin(self, rank: int, kind: Kind, now: float) -> None:
        self.rows[rank].append(kind)
        self.done[rank][kind] += 1
        self.begun[rank] = min(self.begun[rank], now)
        self.free[rank] = end = now + self.costs["FIW".index(kind)]
        heappush(self.events, (end, -rank))
        last = rank == self.ranks - 1
        if kind == "W" or (kind == "I" and rank == 0):
            return
        to = rank if kind == "F" and last else rank + 1 if kind == "F" else rank - 1
        arrival = end + self.costs[3] * (to != rank)
        self.arrivals[to]["I" if kind == "I" or last else "F"].append(arrival)
        heappush(self.events, (arrival, -to))
