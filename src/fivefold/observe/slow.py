"""Names a rank that the others wait for, by the seconds that ranks share every few steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median, median_low
from typing import Any

from fivefold.observe.document import table
from fivefold.sharding.layout import Layout, index_in

KINDS = ("computing", "data", "network")
SHARE = 0.2
"""A rank is slow if it takes longer than the others by so much of a step, in two windows in a row."""
PAST = 2  # windows after which a rank without peers is compared with itself


@dataclass(frozen=True)
class Slow:
    """delay: seconds per step of each of `KINDS`. step_s: of a step. to: the address to which the network is slow."""

    rank: int
    delay: dict[str, float]
    step_s: float
    to: str = ""

    @property
    def delay_s(self) -> float:
        return sum(self.delay.values())

    @property
    def figures(self) -> dict[str, float]:
        return {"rank": self.rank, "step_s": self.step_s, **self.delay}

    def __str__(self) -> str:
        shares = [
            f"{kind} {100 * s / self.delay_s:.0f}%"
            for kind, s in self.delay.items()
            if s > 0.005 * self.delay_s
        ]
        to = f", to {self.to}" if self.to and self.delay["network"] else ""
        return (
            f"rank {self.rank} is slow: the others wait {self.delay_s:.3g} s of a step of {self.step_s:.3g} s for it "
            f"({', '.join(shares)}{to})"
        )


class SlowRanks:
    """Compares ranks that compute the same, those of one pipeline stage. A rank without such peers is compared with
    what it took before."""

    def __init__(self, layout: Layout):
        self.stages = [index_in(layout, "pp", rank) for rank in range(layout.ranks)]
        self._past: list[list[list[float]]] = []
        self._suspect: int | None = None
        self._said: int | None = None

    def add(self, rows: Sequence[Sequence[float]]) -> Slow | None:
        """rows: `SECONDS` of each rank, in a window. Returns a rank that has become slow."""
        if not rows:
            return None
        if not self._past:  # the first window has the first steps, where caches and compilers warm up
            self._past.append([])
            return None
        found = self._slowest(rows)
        self._past = [*self._past[-20:], [list(row) for row in rows]]
        rank = found.rank if found else None
        again, self._suspect = rank is not None and rank == self._suspect, rank
        if rank is None:
            self._said = None
        if not again or rank == self._said:
            return None
        self._said = rank
        return found

    def _slowest(self, rows: Sequence[Sequence[float]]) -> Slow | None:
        by_kind = [dict(zip(SECONDS, row, strict=True)) for row in rows]
        own = [row["computing"] + row["data"] for row in by_kind]
        step_s = max(seconds + row["messages"] for seconds, row in zip(own, by_kind, strict=True))
        usual_data, usual_network = (median_low(r[kind] for r in by_kind) for kind in ("data", "network"))
        delays = []
        for row, seconds, usual in zip(by_kind, own, self._usual(own), strict=True):
            late = max(0.0, seconds - usual) if usual is not None else 0.0
            data = min(late, max(0.0, row["data"] - usual_data))
            network = max(0.0, row["network"] - usual_network)
            delays.append(dict(zip(KINDS, (late - data, data, network), strict=True)))
        rank = max(range(len(rows)), key=lambda rank: sum(delays[rank].values()))
        slow = Slow(rank, delays[rank], step_s, _address(int(by_kind[rank]["to"])))
        return slow if slow.delay_s > SHARE * step_s else None

    def _usual(self, own: Sequence[float]) -> list[float | None]:
        """Seconds without messages that each rank should take; None: not known yet. own: those that it took."""
        peers: dict[int, list[float]] = {}
        for stage, seconds in zip(self.stages, own, strict=True):
            peers.setdefault(stage, []).append(seconds)
        common = {stage: median_low(group) for stage, group in peers.items() if len(group) > 1}
        past = [window for window in self._past if window]
        known = len(past) >= PAST
        before = [
            median(w[rank][0] + w[rank][1] for w in past) if known else None for rank in range(len(own))
        ]
        return [common.get(stage, before[rank]) for rank, stage in enumerate(self.stages)]


def _address(number: int) -> str:
    return ".".join(str(number >> shift & 255) for shift in (24, 16, 8, 0)) if number else ""


def section(lines: Sequence[dict[str, Any]]) -> str:
    """The slow ranks of a run, for its page; "" without any."""
    found = [(line["step"], line["slow_rank"]) for line in lines if isinstance(line.get("slow_rank"), dict)]
    if not found:
        return ""
    rows = [
        [f"{step:,}", f"{figures.get('rank', 0):.0f}"]
        + [f"{1e3 * float(figures.get(kind, 0)):.3g}" for kind in (*KINDS, "step_s")]
        for step, figures in found
    ]
    titles = ("Step", "Rank", *(f"Late by {kind}, ms" for kind in KINDS), "Step, ms")
    return f"<p>The other ranks waited for these, per step.</p>{table(titles, rows)}"


SECONDS = ("computing", "data", "messages", "network", "to")
"""Seconds of a step of one rank. `network`: of `messages`, in which the network took no data from this rank; `to`: from
it to which IPv4 address, as a number."""
SHARED_EVERY = 10
"""Steps between two times that they do."""
