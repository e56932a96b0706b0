"""Ranks that leave and join, beside random kills: the run goes on with fewer and with more, and computes the same.

A trial is a run of four ranks (`--nproc 2:4`). In each round the ranks become fewer, because somebody writes RUN/slots
or because one slot's rank dies until the slot is given up; then a rank or all processes are killed; then a spare slot
joins, and there is another kill. Losses and weights have to be those of an undisturbed run of four ranks, as far as the
order of sums allows. How far this is, the run of one rank shows.
"""

from __future__ import annotations

import random
import re
import shutil
import time
from pathlib import Path
from typing import Any

import kills
import process
import stored
import torch
from kills import PATIENCE_S, Lost
from pool_runs import lines

from fivefold.checkpoint import store

LAYOUTS = {"dp=4": 3, "dp=4,zero=3": 3, "dp=2,tp=2": 2, "dp=4,zero=1": 3, "pp=2,dp=2": 2}
"""By layout, how many of three ranks go on."""
STEPS, EVERY, ROUNDS = 300, 10, 3
MOST = 8  # times as far from four ranks as one rank is
SETS = ["optim.eps=1e-4"]  # with a tiny one, an element without a gradient moves by rounding alone
RANKS = re.compile(r"; (\d+) ranks? on ")


def trial(seed: int, number: int, folder: Path, rounds: int = ROUNDS) -> dict[str, Any]:
    """One run. folder: keeps the undisturbed runs for the next trials. `lost` says what went wrong."""
    at = random.Random(f"elastic-{seed}-{number}")
    layout, fewer = [*LAYOUTS.items()][number % len(LAYOUTS)]
    sets = [*process.overrides(folder, layout, STEPS, EVERY), *SETS]
    whole, one = (_undisturbed(folder, spread, sets) for spread in (layout, "dp=1"))
    out, began = folder / f"elastic-{seed}-{number}", time.monotonic()
    shutil.rmtree(out, ignore_errors=True)
    run = process.Run(out, layout, sets, ["--nproc", "2:4"])
    found: dict[str, Any] = {"seed": seed, "number": number, "layout": layout, "events": []}
    with kills.losing(run, found):
        for _ in range(rounds):
            event = at.choice(("slots", "given up"))
            _leave(run, at, event, fewer, found["events"])
            _kill(run, at, found["events"])
            _join(run, found["events"])
            _kill(run, at, found["events"])
        kills._finish(run)
        if left := run.left():
            raise Lost(f"processes {left} do not end")
        mine, allowed = difference(whole, out), difference(whole, one)
        found |= {"difference": mine, "of_one_rank": allowed}
        for kind, far in mine.items():
            if not far <= MOST * allowed[kind]:
                raise Lost(f"{kind} differ by {far:.1e}, those of one rank by {allowed[kind]:.1e}")
    shutil.rmtree(out)
    return found | {"starts": run.starts, "seconds": round(time.monotonic() - began)}


def _undisturbed(folder: Path, layout: str, sets: list[str]) -> Path:
    """The run folder of a run without events, made once."""
    home = folder / "elastic"
    home.mkdir(exist_ok=True)
    return kills.undisturbed(home, layout, sets, STEPS).parents[1]


def _leave(run: process.Run, at: random.Random, how: str, fewer: int, events: list[dict[str, Any]]) -> None:
    """Three slots are left."""
    if not _stepping(run):
        return
    since = time.monotonic()
    if how == "slots":
        (run.out / "slots").write_text("3")
    else:
        who = at.randrange(4)
        while not any("is given up" in line for when, line in list(run.lines) if when > since):
            ranks = run.ranks()
            if len(ranks) == 4:
                process.send(ranks[who], kills.signal.SIGKILL)
            if run.ended or time.monotonic() - since > PATIENCE_S:
                break
            time.sleep(0.2)
        since = time.monotonic()  # before, four ranks may have taken steps
    _go_on(run, how, since, events, fewer)


def _join(run: process.Run, events: list[dict[str, Any]]) -> None:
    """The fourth slot is there again. A launcher that has just been started anew uses slots that were given up."""
    if _stepping(run) and _ranks(run) < 4:
        since = time.monotonic()
        (run.out / "slots").write_text("4")
        _go_on(run, "joins", since, events, 4)


def _kill(run: process.Run, at: random.Random, events: list[dict[str, Any]]) -> None:
    if not _stepping(run):
        return
    time.sleep(at.uniform(0, 0.3))
    target, since = at.choice(("rank", "rank", "all")), time.monotonic()
    if kills.kill(run, target, at):
        kills._go_on(run)
        _go_on(run, f"kill of {'a rank' if target == 'rank' else 'all'}", since, events, 0)


def _stepping(run: process.Run) -> bool:
    """Waits for a step of the last start. False: the run has ended."""
    return not run.ended and kills._until(run, lambda: run.stepped(run.begun()) is not None)


def _go_on(run: process.Run, what: str, since: float, events: list[dict[str, Any]], ranks: int) -> None:
    """Waits for the first new step, and notes how many ranks took it. ranks: that have to (0: any number)."""
    seconds = kills._recovered(run, since)
    now = _ranks(run)
    events.append(
        {"what": what, "ranks": now, "step": run.step, "seconds": seconds, "back_off_s": run.waited(since)}
    )
    if ranks and seconds is not None and now != ranks:
        raise Lost(f"after {what!r} there are {now} ranks, not {ranks}")


def _ranks(run: process.Run) -> int:
    """How many ranks the last start had."""
    found = [int(one[1]) for _, line in list(run.lines) if (one := RANKS.search(line))]
    return found[-1] if found else 0


def difference(wanted: Path, out: Path) -> dict[str, float]:
    """How far losses are apart relatively, and weights by their norm."""
    a, b = (torch.tensor(lines(folder, "loss"), dtype=torch.float64) for folder in (wanted, out))
    if len(a) != len(b):
        raise Lost(f"{len(b)} steps instead of {len(a)}")
    one, other = (stored.load(store.latest(folder)).model for folder in (wanted, out))
    far = max(float((one[name] - other[name]).norm() / one[name].norm()) for name in one)
    return {"losses": float(((a - b) / a).abs().max()), "weights": far}


def figures(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """What all trials say together."""
    events = [event for run in runs for event in run["events"]]
    found: dict[str, Any] = {
        "runs": len(runs),
        "events": len(events),
        "the_same": sum("lost" not in run for run in runs),
        "worst_of_one_rank": max(
            (run["difference"][kind] / run["of_one_rank"][kind] for run in runs if "difference" in run
             for kind in run["difference"]), default=None,
        ),
    }  # fmt: skip
    for what in dict.fromkeys(event["what"] for event in events):
        seconds = sorted(e["seconds"] for e in events if e["what"] == what and e["seconds"] is not None)
        found[what] = (
            {"count": len(seconds), "median_s": kills.median(seconds), "most_s": seconds[-1]}
            if seconds
            else {}
        )
    return found
