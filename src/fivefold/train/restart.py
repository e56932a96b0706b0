"""Starts the ranks of a run again after a failure, from the newest checkpoint; says what became of a run.

A budget bounds the restarts: each one costs 1, or 3 where the death repeats the one before (at the same step, with
nothing saved between), or where memory ran out. A newer checkpoint makes it whole again. So a run that gets on is
restarted for as long as it takes, and one that cannot get on ends after a few. The same traceback after the same step
ends it at once: it would come every time.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from signal import Signals

from fivefold.checkpoint import keep, store
from fivefold.errors import UserError, printable, several
from fivefold.files import read_json, require_owned, write_atomically
from fivefold.launch.launchers import LAUNCH
from fivefold.launch.local import Attempt, Outcome, as_error
from fivefold.launch.verdict import FINAL, STOPPED, Failure, unsaved
from fivefold.observe.faults import add_restart
from fivefold.observe.metrics import last_line
from fivefold.recipe.resolve import nearest_layout
from fivefold.train.job import Job

REPEATED = 3  # what a restart costs after a death that repeats the one before
LONGEST_S = 60.0  # between two restarts
WENT_BACK = "went_back.json"


@dataclass
class Restarts:
    """The restarts of a run that local ranks train. attempt: returns what the ranks do for a job; it may have other
    ranks than the first. failed: is told of each failure, and if a step has been saved since the one before."""

    job: Job
    attempt: Callable[[Job], Attempt]
    failed: Callable[[Failure, bool], None] = lambda failure, progress: None
    elastic: bool = False  # a slot whose rank fails may be given up
    spent: int = 0
    deaths: int = 0  # since the newest checkpoint
    saved: int = 0
    died_after: int | None = None
    shown: str = field(default="", repr=False)  # the last traceback that was printed

    def __post_init__(self) -> None:
        self.budget = self.job.recipe.launch.restarts
        self.saved = newest(self.job.out)

    def again(self, failure: Failure | None) -> tuple[float, Attempt] | None:
        """Seconds to wait, and the next attempt; None when the budget is used up. Says so, and records it. failure:
        None: the ranks have left for others, which costs nothing."""
        require_owned(self.job.out)  # else the ranks would begin anew, in a folder that nobody owns
        saved, died_after = newest(self.job.out), last_step(self.job.out)
        if failure is None:
            following = self.attempt(replace(self.job, resume=True))
            record(self.job.out, "ranks", "another number of ranks goes on", following.world)
            return 0.0, following
        self.failed(failure, saved > self.saved)
        if saved > self.saved:
            self.spent = self.deaths = 0
            self.died_after = None
        # A traceback says its step. What the others have recorded by then is chance.
        same = self.deaths > 0 and bool(failure.more) and failure.more == self.shown
        repeated = same or died_after == self.died_after or failure.kind == "memory"
        certain = same and not self.elastic
        self.saved, self.died_after = saved, died_after
        self.deaths += 1
        self.spent += self.budget + 1 if certain else REPEATED if repeated else 1
        if self.spent > self.budget:
            return None
        wait_s = 0.0 if self.deaths == 1 else min(LONGEST_S, 2.0 ** (self.deaths - 2))
        following = self.attempt(replace(self.job, resume=True))
        if failure.more and failure.more != self.shown:
            print(printable(f"rank {failure.rank} failed:\n{failure.more}"), file=sys.stderr)
            self.shown = failure.more
        source = f"the checkpoint of step {self.saved}" if self.saved else "step 0"
        waiting = f" in {wait_s:g} s" if wait_s else ""
        line = (
            f"{failure.text}, after step {died_after}. Starting {several(following.world, 'rank')} again{waiting} from "
            f"{source} ({self.spent} of launch.restarts = {self.budget} used)"
        )
        print(printable(line), file=sys.stderr, flush=True)
        record(self.job.out, failure.kind, failure.text, following.world, wait_s)
        return wait_s, following

    def conclude(self, outcome: Outcome, advice: Callable[[Failure], str]) -> int | None:
        """Returns the signal that stopped the run with everything saved, or None if it is complete. advice: what to do.

        Raises:
            UserError, RankFailed: a rank failed for good, or the run's folder is gone.
            SystemExit: a signal stopped the run, but not all could be saved.
        """
        failure = outcome.failure
        if failure is None:
            return outcome.stopped
        require_owned(self.job.out)
        saved, trained = newest(self.job.out), last_step(self.job.out)
        if outcome.signal is not None and (failure.kind not in FINAL or trained > saved):
            name = Signals(outcome.signal).name
            if trained <= saved:
                print(f"stopped by {name}; nothing is lost: step {saved} is saved", file=sys.stderr)
                raise SystemExit(STOPPED)
            there = f"The newest checkpoint is of step {saved}" if saved else "No step is saved"
            line = f"stopped by {name}, but not saved: {failure.text}. {there}; {trained} were trained"
            print(printable(line), file=sys.stderr)
            raise SystemExit(unsaved(outcome.signal))
        more = "" if failure.kind == "error" else advice(failure)
        if self.deaths > 1:
            more = (
                f", after step {self.died_after}. The ranks died {self.deaths} times without a newer checkpoint, so "
                f"they are not started again (launch.restarts = {self.budget}){more}"
            )
        raise as_error(replace(failure, more="") if failure.more == self.shown else failure, more)


def record(run: Path, kind: str, why: str, ranks: int, wait_s: float = 0.0) -> None:
    """Records that the ranks start again."""
    steps = {"died_after": last_step(run), "from_step": newest(run)}
    with suppress(OSError):
        add_restart(run, kind=kind, why=why, **steps, ranks=ranks, wait_s=wait_s)


def go_back_once(run: Path, chosen: Path) -> None:
    """Sets aside the checkpoints after a chosen one. Under torchrun a launch does so in its first start only, though
    the first rank may not have been there: RUN/went_back.json names the launch. Raises UserError: as `keep.go_back`."""
    launch = os.environ.get(LAUNCH, "")
    mark, known = {"launch": "" if launch == "none" else launch, "to": str(chosen)}, {}
    with suppress(OSError, UserError, ValueError):
        known = read_json(run / WENT_BACK)
    if mark["launch"] and known == mark:
        print(f"note: {run} has gone back to {chosen.name} in this launch, and goes on", file=sys.stderr)
        return
    for moved in keep.go_back(run, chosen):
        print(f"note: later than {chosen.name}, so it is set aside: {moved}", file=sys.stderr)
    if mark["launch"]:
        write_atomically(run / WENT_BACK, json.dumps(mark))


def newest(run: Path) -> int:
    """The step of the newest checkpoint; 0 without one, or if none can be seen."""
    with suppress(UserError, OSError, ValueError):
        if found := store.checkpoints(run):
            return store.step_in(found[-1])
    return 0


def last_step(run: Path) -> int:
    """The last step that the metrics have; 0 without one."""
    return (last_line(run) or {}).get("step", 0)


def grace_s(job: Job) -> float:
    """Seconds that ranks have now, when a signal comes, to finish their step and save."""
    step_s = (last_line(job.out) or {}).get("step_s")
    return job.recipe.launch.grace + 2 * (step_s if isinstance(step_s, float) and step_s > 0 else 0.0)


OF_A_SLOT = ("killed", "failed", "ended")  # kinds of failures that another slot may not have
FAILURES = 2  # in a row, without progress, until a slot is given up
SLOTS = "slots"  # in the run folder; a number in it says how many ranks may run
SLOTS_BYTES = 32  # that are read of the file


class Slots:
    """Slots 0 to `most` - 1, of which at least `least` are used. run: the run folder.

    A slot whose rank fails FAILURES times in a row without progress is given up, unless too few would be left. It is
    taken up again when the file in the run folder is written: somebody has looked at the machine.
    """

    def __init__(self, run: Path, least: int, most: int):
        self.file, self.least, self.most = run / SLOTS, least, most
        self.failed = (-1, 0)  # the slot that failed last, and how often in a row
        self.given_up: set[int] = set()
        self._seen = self._read()

    def usable(self) -> tuple[int, ...]:
        """The slots for ranks, now."""
        if (wanted := self._read()) != self._seen:
            self._seen = wanted
            self.given_up.clear()
            self.failed = (-1, 0)
        slots = [slot for slot in range(self.most) if slot not in self.given_up]
        return tuple(slots[: max(self.least, wanted[0])])

    def fail(self, slot: int, progress: bool) -> bool:
        """The rank on a slot has failed. progress: the ranks have saved a step since the failure before. Returns True
        if the slot is given up."""
        before, times = self.failed
        times = times + 1 if slot == before and not progress else 1
        self.failed = slot, times
        if times < FAILURES or len(self.usable()) <= self.least:
            return False
        self.given_up.add(slot)
        self.failed = (-1, 0)
        return True

    def _read(self) -> tuple[int, int]:
        """The number in the file, and when it was written; all slots without one."""
        with suppress(OSError, ValueError):
            descriptor = os.open(self.file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            with open(descriptor, "rb") as file:
                text, written = file.read(SLOTS_BYTES).strip(), os.fstat(descriptor).st_mtime_ns
            if text.isdigit() and len(text) < SLOTS_BYTES:
                return int(text), written
        return self.most, 0


class Elastic:
    """Attempts with as many ranks as there are slots for. attempt: makes one with a number of ranks. The job's recipe
    has the layout that is asked for, and each attempt's the nearest to it (`resolve.nearest_layout`)."""

    def __init__(self, job: Job, least: int, most: int, attempt: Callable[[int, Job], Attempt]):
        self.recipe, self.slots, self._attempt = job.recipe, Slots(job.out, least, most), attempt
        self.used: tuple[int, ...] = ()
        self._fit = cache(partial(nearest_layout, self.recipe))  # by the number of slots
        self._printed = ""

    def attempt(self, job: Job) -> Attempt:
        usable = self.slots.usable()
        fit = self._fit(len(usable))
        if self._printed != fit.line:
            print(fit.line or f"{fit.ranks} ranks, as asked for", file=sys.stderr, flush=True)
            self._printed = fit.line
        self.used = usable[: fit.ranks]
        fitting = replace(job, recipe=fit.recipe, asked=self.recipe)
        return replace(self._attempt(fit.ranks, fitting), slots=self.used, reform=self.reform)

    def reform(self) -> bool:
        """True if another number of ranks is to go on now."""
        usable = self.slots.usable()
        ranks = self._fit(len(usable)).ranks
        if ranks == len(self.used):
            return False
        slots = f"there are {len(usable)} slots for ranks ({self.slots.file})"
        line = f"{slots}: the ranks save, then {ranks} instead of {len(self.used)} go on"
        print(line, file=sys.stderr, flush=True)
        return True

    def failed(self, failure: Failure, progress: bool) -> None:
        """A rank has failed. progress: a step has been saved since the failure before."""
        if failure.kind in OF_A_SLOT and self.slots.fail(slot := self.used[failure.rank], progress):
            line = (
                f"slot {slot} is given up: its rank failed again and again. Write the number of ranks that may run "
                f"into {self.slots.file} when it is mended"
            )
            print(line, file=sys.stderr, flush=True)
