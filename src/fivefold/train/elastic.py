"""Elastic training by local ranks: how many the next attempt has, and in which layout."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace

from fivefold.launch.slots import Slots
from fivefold.launch.supervisor import Attempt
from fivefold.launch.verdict import Failure
from fivefold.recipe.fit import Fit, nearest_layout
from fivefold.train.job import Job

OF_A_SLOT = ("killed", "failed", "ended")  # kinds of failures that another slot may not have


class Elastic:
    """Attempts with as many ranks as there are slots for. attempt: makes one with a number of ranks. The job's recipe
    has the layout that is asked for, and each attempt's the nearest to it (`recipe.fit`)."""

    def __init__(self, job: Job, least: int, most: int, attempt: Callable[[int, Job], Attempt]):
        self.recipe, self.slots, self._attempt = job.recipe, Slots(job.out, least, most), attempt
        self.used: tuple[int, ...] = ()
        self._fits: dict[int, Fit] = {}
        self._said = ""

    def attempt(self, job: Job) -> Attempt:
        """The next attempt of a job."""
        usable = self.slots.usable()
        fit = self._fit(len(usable))
        if self._said != fit.line:
            print(fit.line or f"{fit.ranks} ranks, as asked for", file=sys.stderr, flush=True)
            self._said = fit.line
        self.used = usable[: fit.ranks]
        own = replace(job, recipe=fit.recipe, asked=self.recipe)
        return replace(self._attempt(fit.ranks, own), slots=self.used, reform=self.reform)

    def reform(self) -> bool:
        """True if another number of ranks is to go on now."""
        usable = self.slots.usable()
        ranks = self._fit(len(usable)).ranks
        if ranks == len(self.used):
            return False
        what = f"there are {len(usable)} slots for ranks ({self.slots.file})"
        print(
            f"{what}: the ranks save, then {ranks} instead of {len(self.used)} go on",
            file=sys.stderr,
            flush=True,
        )
        return True

    def failed(self, failure: Failure, progress: bool) -> None:
        """A rank has failed. progress: a step has been saved since the failure before."""
        if failure.kind in OF_A_SLOT:
            slot = self.used[failure.rank]
            if self.slots.fail(slot, progress):
                print(
                    f"slot {slot} is given up: its rank failed again and again. Write the number of ranks that may run "
                    f"into {self.slots.file} when it is mended",
                    file=sys.stderr,
                    flush=True,
                )

    def _fit(self, slots: int) -> Fit:
        if slots not in self._fits:
            self._fits[slots] = nearest_layout(self.recipe, slots)
        return self._fits[slots]
