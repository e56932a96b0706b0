"""Random kills of a run that goes on by itself: every one is recovered, and the weights are those of a run without.

A trial is a run of a tiny model. A rank, or the launcher, or all processes at once are killed (SIGKILL) while they
start, load, step, save or end. When the launcher is gone, the same command is given again, as a scheduler would.
"""

from __future__ import annotations

import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import process
import stored
import torch

from fivefold.checkpoint import store

LAYOUTS = (
    "dp=2", "dp=2,zero=3", "tp=2", "pp=2", "cp=2", "ep=2,dp=2", "dp=3", "dp=4", "dp=2,tp=2", "pp=2,dp=2,zero=1",
    "cp=2,dp=2,zero=3", "dp=4,ep=2,zero=3", "pp=4", "tp=4", "dp=4,zero=2",
)  # fmt: skip
MOMENTS = ("start", "load", "step", "save", "end")
TARGETS = (*["rank"] * 6, "launcher", "all")
STEPS, EVERY = 200, 10
BEGINS_S = 2.5  # a kill while ranks start or load falls into so many seconds
PATIENCE_S = 90.0  # for a recovery, and without a step


class Lost(AssertionError):
    """A run did not recover, or its weights are others."""


def trial(
    seed: int, number: int, folder: Path, moments: list[str] | None = None, targets: tuple[str, ...] = TARGETS
) -> dict[str, Any]:
    """One run with its kills. folder: keeps the undisturbed runs for the next trials. `lost` says what went wrong."""
    at = random.Random(f"{seed}-{number}")
    layout = LAYOUTS[number % len(LAYOUTS)]
    sets = process.overrides(folder, layout, STEPS, EVERY)
    wanted = undisturbed(folder, layout, sets)
    out = folder / f"trial-{seed}-{number}"
    began = time.monotonic()
    shutil.rmtree(out, ignore_errors=True)
    if moments is None:
        moments = [*at.choices(MOMENTS[1:4], k=at.randint(11, 17)), "end"]
        if at.random() < 0.3:
            moments.insert(0, "start")
    run = process.Run(out, layout, sets)
    found: dict[str, Any] = {"seed": seed, "number": number, "layout": layout, "ranks": _ranks(layout, sets)}
    found["kills"] = kills = []
    with losing(run, found):
        disturb(run, moments, targets, at, kills)
        if left := run.left():
            raise Lost(f"processes {left} do not end")
        if differs := difference(wanted, out):
            raise Lost(f"{differs} differs from the run without kills")
    shutil.rmtree(out)
    return found | {"starts": run.starts, "seconds": round(time.monotonic() - began)}


@contextmanager
def losing(run: process.Run, found: dict[str, Any]) -> Iterator[None]:
    """Starts a trial's run, and closes it. What went wrong becomes `found["lost"]`."""
    try:
        run.start()
        yield
    except Lost as error:
        found["lost"] = str(error)
        trial = "trial {number} of seed {seed}, {layout}".format(**found)
        print(f"LOST: {trial}: {error}\n{run.tail()}", flush=True)
    finally:
        run.close()


def disturb(
    run: process.Run,
    moments: list[str],
    targets: tuple[str, ...],
    at: random.Random,
    kills: list[dict[str, Any]],
) -> None:
    """Kills at the moments, and lists the kills; a moment that does not come is left out. Waits for the end."""
    since = 0.0  # of the last kill
    for index, moment in enumerate(moments):
        if not _come(run, moment, since, at):
            break
        target, step = at.choice(targets), run.step
        if not kill(run, target, at):
            continue
        since = time.monotonic()
        kills.append({"moment": moment, "target": target, "step": step, "recovery_s": None})
        _go_on(run)
        if moments[index + 1 : index + 2] != ["load"]:  # that one comes while the ranks still begin
            kills[-1] |= {"recovery_s": _recovered(run, since), "back_off_s": run.waited(since)}
    _finish(run)


def _come(run: process.Run, moment: str, since: float, at: random.Random) -> bool:
    """Waits for a moment. False: the run has ended before."""
    if moment in ("start", "load"):
        time.sleep(at.uniform(0, BEGINS_S))
        return not run.ended
    if not _until(run, lambda: run.stepped(since) is not None):
        return _not_stuck(run)
    if moment == "step":
        time.sleep(at.uniform(0, 0.2))
    elif moment == "save":
        checkpoints = run.out / "checkpoints"
        if not _until(run, lambda: any(checkpoints.glob(".step-*")), poll_s=0.001):
            return _not_stuck(run)
        time.sleep(at.uniform(0, 0.02))
    else:
        if not _until(run, lambda: run.step == STEPS):
            return _not_stuck(run)
        time.sleep(at.uniform(0, 1.0))
    return not run.ended


def _until(run: process.Run, found: Callable[[], bool], poll_s: float = 0.01) -> bool:
    """Waits until something is found. False: the run has ended, or no step came in all of PATIENCE_S."""
    step = -1
    while not run.ended and run.step != step:
        step = run.step
        if run.wait(found, PATIENCE_S, poll_s):
            return True
    return found()


def _not_stuck(run: process.Run) -> bool:
    if not run.ended:
        raise Lost(f"nothing happens for {PATIENCE_S} s")
    return False


def kill(run: process.Run, target: str, at: random.Random) -> bool:
    """False: there is nothing to kill."""
    if target == "launcher":
        return process.send(run.launcher(), signal.SIGKILL)
    pids = run.processes() if target == "all" else run.ranks()
    if target == "rank" and pids:
        pids = [at.choice(pids)]
    return sum(process.send(pid, signal.SIGKILL) for pid in pids) > 0


def _go_on(run: process.Run) -> None:
    """Starts the run again if its launcher was killed."""
    deadline = time.monotonic() + 0.5
    while not run.ended and time.monotonic() < deadline:
        time.sleep(0.005)
    if run.ended and run.code != 0:
        if left := run.left():
            raise Lost(f"processes {left} outlive their launcher")
        run.start()


def _recovered(run: process.Run, since: float) -> float | None:
    """Seconds from the kill to the first new step; None if none was left to do."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        if run.wait(lambda: run.stepped(since) is not None, 1.0):
            first = run.stepped(since)
            assert first is not None
            return round(first - since, 3)
        if run.ended:
            if run.code == 0:
                return None
            _go_on(run)
    raise Lost(f"no step within {PATIENCE_S} s")


def _finish(run: process.Run) -> None:
    deadline = time.monotonic() + 2 * PATIENCE_S
    while time.monotonic() < deadline:
        run.wait(lambda: False, 5.0)
        if run.ended:
            if run.code == 0:
                return
            _go_on(run)
    raise Lost("the run does not end")


@cache
def commit() -> str:
    """That of the code that runs; "" without git."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(
        command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    ).stdout.strip()


def undisturbed(folder: Path, layout: str, sets: list[str], steps: int = STEPS) -> Path:
    """The last checkpoint of the run without kills, made once per commit: other code may round otherwise."""
    out = folder / f"whole-{layout}-{steps}-{commit()}"
    if not (out / "report.html").exists():
        shutil.rmtree(out, ignore_errors=True)
        run = process.Run(out, layout, sets)
        try:
            run.start()
            run.wait(lambda: False, 10 * PATIENCE_S)  # 4 ranks on a busy machine
            if run.code != 0:
                raise Lost(f"the undisturbed run fails:\n{run.tail()}")
        finally:
            run.close()
    return store.latest(out)


def difference(wanted: Path, out: Path) -> str:
    """The first tensor or count of a run's last checkpoint that is not the same, bit for bit; "" if all are."""
    a, b = stored.load(wanted), stored.load(store.latest(out))
    for kind in ("model", "optimizer"):
        one, other = getattr(a, kind), getattr(b, kind)
        if one.keys() != other.keys():
            return f"the names of {kind}"
        for name in one:
            if not torch.equal(one[name], other[name]):
                return f"{kind} {name}"
    return next((key for key in ("step", "updates", "skipped") if a.meta[key] != b.meta[key]), "")


def _ranks(layout: str, sets: list[str]) -> int:
    from fivefold.recipe import load
    from fivefold.sharding.layout import Layout

    return Layout.from_recipe(load("quickstart", sets, layout).layout).ranks


def figures(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """What all trials say together."""
    kills = [kill | {"ranks": run["ranks"]} for run in runs for kill in run["kills"]]
    unattended = [kill for kill in kills if kill["target"] == "rank" and not kill.get("back_off_s")]
    waited = [kill for kill in kills if kill["target"] == "rank" and kill.get("back_off_s")]
    by_hand = [kill for kill in kills if kill["target"] != "rank"]
    found: dict[str, Any] = {
        "runs": len(runs),
        "kills": len(kills),
        "recovered": len(kills) - sum("lost" in run for run in runs),
        "identical": sum("lost" not in run for run in runs),
        "by_moment": {name: sum(kill["moment"] == name for kill in kills) for name in MOMENTS},
        "by_target": {name: sum(kill["target"] == name for kill in kills) for name in dict.fromkeys(TARGETS)},
    }
    for name, some in (("rank", unattended), ("rank_with_back_off", waited), ("launcher_or_all", by_hand)):
        seconds = sorted(kill["recovery_s"] for kill in some if kill["recovery_s"] is not None)
        if seconds:
            found[f"recovery_s_{name}"] = {
                "count": len(seconds),
                "median": round(median(seconds), 2),
                "p95": seconds[int(0.95 * (len(seconds) - 1))],
                "most": seconds[-1],
                "within_10_s": sum(one <= 10 for one in seconds),
            }
    return found
