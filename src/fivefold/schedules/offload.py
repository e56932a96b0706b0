"""Ways to order gradients that leave, updates on the host, and weights that come back, as timelines. No torch.

A model is a row of units. Backward goes through them from the last to the first. Each unit's gradients go out over a
link, the host updates its states, and its weights come back over the link's other direction. A `Way` says what waits
for what:

- `after`: the update begins when the whole gradient is out, since clipping needs its norm, and the next forward when
  all weights are back (ZeRO-Offload, arXiv 2101.06840).
- `beside`, `early`: `tiers.BESIDE`, `tiers.EARLY` (arXiv 2104.07857 reads ahead likewise).
- `window`: as `early`, and only `width` units have weights on the device (STRONGHOLD, SC 2022).
- `direct`: as `window`; where the link would be late, the device computes on the weights in host memory, and reads them
  over the link meanwhile (MemFerry, ICS 2025). It needs kernels that do so, so it is planned only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from fivefold.schedules.timelines import COMPUTE, MESSAGE, WAIT, Span, StepTimeline

OUT, IN, HOST = "out", "in", "host"
STEPS = 4  # simulated; the last but one is steady


@dataclass(frozen=True)
class Way:
    """eager: updates do not wait for the norm. together: forward waits for all weights. width: 0: all units."""

    name: str
    eager: bool = False
    together: bool = False
    width: int = 0
    direct: bool = False


WAYS = {
    way.name: way
    for way in (
        Way("after", together=True),
        Way("beside"),
        Way("early", eager=True),
        Way("window", eager=True, width=3),
        Way("direct", eager=True, width=3, direct=True),
    )
}


@dataclass(frozen=True)
class Unit:
    """Seconds of a unit. out: of its gradients' way out; update: on the host; back: of its weights' way in."""

    forward: float
    backward: float
    out: float
    update: float
    back: float


@dataclass
class _Clock:
    """What has been placed. free: when each resource is free."""

    spans: list[Span] = field(default_factory=list)
    free: dict[str, float] = field(default_factory=dict)

    def run(self, lane: str, kind: str, name: str, seconds: float, ready: float = 0.0) -> float:
        """Places work on a lane as early as possible. Returns its end."""
        start = max(ready, self.free.get(lane, 0.0))
        if lane == COMPUTE and start > self.free.get(lane, 0.0):
            self.spans.append(Span(COMPUTE, WAIT, name, self.free.get(lane, 0.0), start))
        self.spans.append(Span(lane, kind, name, start, start + seconds))
        self.free[lane] = start + seconds
        return start + seconds


def simulate(units: Sequence[Unit], way: Way) -> StepTimeline:
    """A step in the steady state, from the begin of its forward to the begin of the next one."""
    clock, starts, numbers = _Clock(), list[float](), range(len(units))
    back = [0.0] * len(units)  # when the weights of each unit are up to date, on the device or in host memory
    for _ in range(STEPS):
        begin = max(back) if way.together else 0.0
        start, _ = _pass(clock, units, way, "forward", numbers, [max(begin, ready) for ready in back])
        _, ended = _pass(clock, units, way, "backward", numbers[::-1], [0.0] * len(units))
        out = [0.0] * len(units)
        for number in numbers[::-1]:
            out[number] = clock.run(OUT, MESSAGE, f"gradients {number}", units[number].out, ended[number])
        starts, back = [*starts, start], _update(clock, units, way, out)
    return _cut(clock.spans, starts[-2], starts[-1])


def _pass(
    clock: _Clock, units: Sequence[Unit], way: Way, kind: str, order: Sequence[int], ready: Sequence[float]
) -> tuple[float, dict[int, float]]:
    """Returns when the forward or backward of the first unit starts, and when that of each ends. With a window there is
    room for a unit's weights once the one `width` before it has computed. Those of the last units stay for backward."""
    ended, start = dict[int, float](), 0.0
    for place, number in enumerate(order):
        unit = units[number]
        if way.width and (kind == "forward" or place >= way.width):
            freed = ended[order[place - way.width]] if place >= way.width else 0.0
            ended[number] = _fetched(clock, unit, number, kind, way.direct, ready[number], freed)
        else:
            ended[number] = clock.run(COMPUTE, kind, f"unit.{number}", getattr(unit, kind), ready[number])
        if not place:
            start = clock.spans[-1].start
    return start, ended


def _fetched(
    clock: _Clock, unit: Unit, number: int, kind: str, direct: bool, ready: float, freed: float
) -> float:
    """Computes with weights that are in host memory from `ready` on. There is room for them on the device when another
    unit's are `freed`. Returns the end."""
    seconds, name = getattr(unit, kind), f"weights {number}"
    idle, link = clock.free.get(COMPUTE, 0.0), clock.free.get(IN, 0.0)
    if direct and max(ready, freed, link) + unit.back > max(idle, ready):
        begin = max(idle, ready, link)
        clock.run(IN, MESSAGE, f"{name}, read in place", unit.back, begin)
        return clock.run(COMPUTE, kind, f"unit.{number}", seconds, begin + max(0.0, unit.back - seconds))
    here = clock.run(IN, MESSAGE, name, unit.back, max(ready, freed))
    return clock.run(COMPUTE, kind, f"unit.{number}", seconds, here)


def _update(clock: _Clock, units: Sequence[Unit], way: Way, out: list[float]) -> list[float]:
    """Returns when each unit's new weights are back."""
    back, order = [0.0] * len(units), range(len(units))
    for number in reversed(order) if way.eager else order:
        ready = out[number] if way.eager else max(out)
        updated = clock.run(HOST, "update", f"update {number}", units[number].update, ready)
        back[number] = updated
        if not way.width:  # else the window fetches them when it needs them
            back[number] = clock.run(IN, MESSAGE, f"weights {number}", units[number].back, updated)
    return back


def _cut(spans: Sequence[Span], start: float, end: float) -> StepTimeline:
    """What happens from start to end, with times since then."""
    inside = [
        span._replace(start=max(span.start, start) - start, end=min(span.end, end) - start)
        for span in spans
        if span.end > start and span.start < end
    ]
    return StepTimeline(tuple(sorted(inside, key=lambda span: (span.lane != COMPUTE, span.start))))
