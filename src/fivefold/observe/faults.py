"""What went wrong in a run. Steps: their names in metrics.jsonl, in words, and as a section of the report. Restarts:
RUN/restarts.jsonl, a line for each time that the ranks were started again, and why. Slow ranks: those that the others
wait for, by the seconds that ranks share every few steps."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from html import escape
from pathlib import Path
from statistics import median, median_low
from typing import Any

from fivefold.files import MOST_JSON, Lines, read_bytes
from fivefold.observe.format import table
from fivefold.observe.metrics import json_object
from fivefold.sharding.layout import Layout, index_in

KINDS = {
    "destroyed": "update(s) that destroyed weights",
    "nonfinite": "not finite",
    "spike": "spike(s) of the loss",
    "outlier": "outlier(s) of the gradient's norm",
    "overflow": "overflow(s) in fp16",
}
"""Figures of a step that are 1 where the update before it has destroyed weights; where loss or gradient are not finite;
where the loss, or the gradient's norm, is far above the usual one; where the gradient overflowed, which a lower factor
of the loss may cure."""
GROWTH = 1e4
"""How far the largest weight may grow in one step."""
USUAL = ("usual_loss", "usual_norm")
"""Figures of a step: the running means of loss and norm."""
ROLLBACK = "rollback"
"""A figure of the step that a run went back to: {"from": the step of the fault, "why": in words}."""
SHOWN = 50


def described(kind: str, figures: Mapping[str, Any]) -> str:
    """A fault of a step in words. figures: those of the step."""
    if kind == "destroyed":
        return (
            f"the update of step {figures['step'] - 1} has destroyed weights: they are not finite, or grew "
            f"{GROWTH:,.0f}-fold"
        )
    if kind == "overflow":
        return "the gradient overflowed in fp16"
    if kind == "nonfinite":
        return "loss or gradient is not finite"
    key, name = ("loss", "the loss") if kind == "spike" else ("grad_norm", "the gradient's norm")
    usual = figures.get(USUAL[kind == "outlier"])
    return f"{name} is {figures.get(key, 0.0):.4g}" + (f", and about {usual:.4g} is usual" if usual else "")


def found_in(figures: Mapping[str, Any]) -> list[str]:
    """The faults of a step, by `KINDS`."""
    return [kind for kind in KINDS if figures.get(kind) == 1]


def counts(lines: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """How many steps had each kind of fault, and how often the run went back; without zeros."""
    kinds = (kind for line in lines for kind in (*found_in(line), *([ROLLBACK] if ROLLBACK in line else [])))
    return dict(Counter(kinds))


def in_words(counted: Mapping[str, int]) -> str:
    """Counts as text: "1 not finite, 2 spikes of the loss, 1 rollback"."""
    words = KINDS | {ROLLBACK: "rollback(s)"}
    return ", ".join(f"{n} {words[kind].replace('(s)', 's' * (n != 1))}" for kind, n in counted.items())


def section(lines: Sequence[Mapping[str, Any]]) -> str:
    """The events of a run as HTML, in order; "" if nothing was wrong. Overflows of fp16 are usual, and left out."""
    wrong = []
    for line in lines:
        if isinstance(back := line.get(ROLLBACK), dict):
            wrong.append((f"{line['step']:,}", f"{back.get('why')}. The run went back to this step"))
        if words := "; ".join(described(kind, line) for kind in found_in(line) if kind != "overflow"):
            wrong.append((f"{line['step']:,}", words))
    if not wrong:
        return ""
    before = len(wrong) - SHOWN
    more = f'<p class="none">{before:,} earlier ones are in metrics.jsonl.</p>' if before > 0 else ""
    shown = table(("Step", "What was wrong"), wrong[-SHOWN:])
    return f"<p>{escape(in_words(counts(lines)))}.</p>{more}{shown}"


RESTARTS = "restarts.jsonl"


def add_restart(run: Path, **line: Any) -> None:
    """Appends a line. Fields: kind, why (one message), died_after (the last step of metrics.jsonl), from_step (that of
    the newest checkpoint, or 0), ranks, wait_s."""
    with closing(Lines(run / RESTARTS)) as file:
        file.write(json.dumps({"time": time.strftime("%Y-%m-%d %H:%M:%S")} | line))


def read_restarts(run: Path) -> list[dict[str, Any]]:
    """The restarts of a run, oldest first. A line that a crash cut off is left out."""
    path = run / RESTARTS
    lines = read_bytes(path, MOST_JSON).splitlines() if path.is_file() else ()
    return [line for line in map(json_object, lines) if line is not None]


def restart_figures(run: Path) -> dict[str, int]:
    """For the summary: the number of restarts, if there were any."""
    count = len(read_restarts(run))
    return {"restarts": count} if count else {}


def restarts_section(run: Path, rows: int = 20) -> str:
    """The restarts as a table for the report; the last ones if there are many. Empty without any."""
    lines = read_restarts(run)
    if not lines:
        return ""
    keys = ("time", "died_after", "from_step", "ranks", "why")
    cells = [[str(line.get(key, ""))[:300] for key in keys] for line in lines[-rows:]]
    shown = table(("when", "last step", "restarted from", "ranks", "because"), cells)
    return f'<p>{len(lines)} restart{"s" * (len(lines) != 1)}.</p><div class="scroll">{shown}</div>'


SECONDS = ("computing", "data", "messages", "network", "to")
"""Seconds of a step of one rank. `network`: of `messages`, in which the network took no data from this rank; `to`: from
it to which IPv4 address, as a number."""
SHARED_EVERY = 10
"""Steps after which ranks share them."""
DELAYS = ("computing", "data", "network")
SHARE = 0.2
"""A rank is slow if it takes longer than the others by so much of a step, in two windows in a row."""
PAST = 2  # windows after which a rank without peers is compared with itself


@dataclass(frozen=True)
class Slow:
    """delay: seconds per step of each of `DELAYS`. step_s: of a step. to: the address to which the network is slow."""

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
        self._past: list[Sequence[Sequence[float]]] | None = None
        self._suspect: int | None = None
        self._told: int | None = None

    def add(self, rows: Sequence[Sequence[float]]) -> Slow | None:
        """rows: `SECONDS` of each rank, in a window. Returns a rank that has become slow."""
        if not rows:
            return None
        if self._past is None:  # the first window has the first steps, where caches and compilers warm up
            self._past = []
            return None
        slow = self._slowest(rows, self._past)
        self._past = [*self._past[-20:], rows]
        rank = slow.rank if slow else None
        again, self._suspect = rank is not None and rank == self._suspect, rank
        if rank is None:
            self._told = None
        if not again or rank == self._told:
            return None
        self._told = rank
        return slow

    def _slowest(
        self, rows: Sequence[Sequence[float]], past: Sequence[Sequence[Sequence[float]]]
    ) -> Slow | None:
        by_kind = [dict(zip(SECONDS, row, strict=True)) for row in rows]
        busy = [row["computing"] + row["data"] for row in by_kind]
        step_s = max(seconds + row["messages"] for seconds, row in zip(busy, by_kind, strict=True))
        usual_data, usual_network = (median_low(r[kind] for r in by_kind) for kind in ("data", "network"))
        peers: dict[int, list[float]] = {}
        for seconds, stage in zip(busy, self.stages, strict=True):
            peers.setdefault(stage, []).append(seconds)
        usual = {stage: median_low(seconds) for stage, seconds in peers.items() if len(seconds) > 1}
        delays = []
        for rank, row in enumerate(by_kind):
            late = 0.0  # as long as it is not known what it should take
            if self.stages[rank] in usual:
                late = max(0.0, busy[rank] - usual[self.stages[rank]])
            elif len(past) >= PAST:
                late = max(0.0, busy[rank] - median(window[rank][0] + window[rank][1] for window in past))
            data = min(late, max(0.0, row["data"] - usual_data))
            network = max(0.0, row["network"] - usual_network)
            delays.append(dict(zip(DELAYS, (late - data, data, network), strict=True)))
        rank = max(range(len(rows)), key=lambda rank: sum(delays[rank].values()))
        to = int(by_kind[rank]["to"])
        address = ".".join(str(to >> shift & 255) for shift in (24, 16, 8, 0)) if to else ""
        slow = Slow(rank, delays[rank], step_s, address)
        return slow if slow.delay_s > SHARE * step_s else None


def slow_section(lines: Sequence[dict[str, Any]]) -> str:
    """The slow ranks of a run, for its page; "" without any."""
    rows = [
        [f"{line['step']:,}", f"{slow.get('rank', 0):.0f}"]
        + [f"{1e3 * float(slow.get(kind, 0)):.3g}" for kind in (*DELAYS, "step_s")]
        for line in lines
        if isinstance(slow := line.get("slow_rank"), dict)
    ]
    if not rows:
        return ""
    titles = ("Step", "Rank", *(f"Late by {kind}, ms" for kind in DELAYS), "Step, ms")
    return f"<p>The other ranks waited for these, per step.</p>{table(titles, rows)}"
