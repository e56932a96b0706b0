"""Saves a run's state when it is due: beside the steps that follow, or at once.

A save that fails is an alarm. The run goes on, the checkpoints before stay, and it is tried again after the next step,
then after 2, 4, 8 ... more. At the end of the run the ranks keep what they have trained, and try again until it works
or the run is told to stop.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fivefold.checkpoint.background import Background
from fivefold.checkpoint.keep import prune
from fivefold.checkpoint.store import odd_numbers
from fivefold.checkpoint.write import Writing
from fivefold.comm import Started, all_or_none
from fivefold.errors import UserError
from fivefold.host.memory import available
from fivefold.step.state import State
from fivefold.train.job import Job
from fivefold.train.saved import prepare

COPY_ROOM = 1.25
"""Free memory that a copy of the state needs, relative to its bytes."""
JOIN_S = 30
AGAIN_S = 5  # between tries of the last save
FAILED, BUSY = "save_failed", "save_under_way"
"""Figures of a step: the numbers of ranks whose part of the save has failed, or is not complete."""


class Saver:
    """The saves of a run: at most one on its way. All ranks call these methods together.

    alarm: says on the console and in the report what failed in a step. flush: forces to the disk what a checkpoint
    needs beside itself; the first rank calls it before the checkpoint gets its name. beside: False where the state
    changes outside of updates, so every save is complete before the run goes on. stopped: asked every second while the
    last save is tried again: has a signal told this rank to stop? seconds: for which steps waited for the copies of
    saves. retry_at: the step after which a failed save is tried again; the same on all ranks.
    """

    def __init__(
        self,
        state: State,
        job: Job,
        alarm: Callable[[int, str], None],
        flush: Callable[[], None] = lambda: None,
        stopped: Callable[[], bool] = lambda: False,
        local_ranks: int = 1,
        beside: bool = True,
    ):
        self.state, self.job, self.alarm, self.flush = state, job, alarm, flush
        self.stopped, self.local_ranks = stopped, local_ranks
        self.beside = beside and job.recipe.checkpoint.asynchronous and state.parallel.disk is None
        self.axis = state.mesh.axis("run")
        self.under_way: Background | None = None
        self.seconds = 0.0
        self.retry_at: int | None = None
        self._failures = 0  # in a row
        self._began = time.monotonic()  # the last save, or the run
        self._asked: Started | None = None
        self._awaited = False  # the answer is on its way to the host
        self._answer: tuple[float, float] | None = None

    def save(self, meta: Mapping[str, Any], ends: bool, waits: bool = True) -> None:
        """Saves the state as it is now. ends: the run ends here, so the save is complete when this returns. waits: then
        it is tried again until it works.

        Raises:
            UserError: it failed, the run ends, and it does not wait, was told to stop, has trained nothing, or has
                numbers that no checkpoint may hold.
        """
        self.settle()
        self._began, self.retry_at = time.monotonic(), None  # this one is the next try
        kept = self.job.recipe.checkpoint
        hooks = {"before": self.flush, "after": partial(prune, self.job.out, kept.keep_last, kept.keep_every)}
        writing = replace(prepare(self.state, self.job.out, meta), **hooks)
        try:
            if ends or not self._beside(writing):
                writing.save()
                self._succeeded()
            else:
                writing.begin()
                self.under_way = self._start(writing)
                if not self._settled:
                    self.seconds += self.under_way.wait_for_copy()
        except UserError as error:
            if not ends:
                self._failed(error)
            elif waits:
                self._save_later(writing, error)
            else:
                raise
        if self.state.parallel.disk is not None:
            self.state.parallel.disk.drop()

    def _save_later(self, writing: Writing, error: UserError) -> None:
        """The last save has failed with this error: tries again until it works, or raises the error."""
        every = (piece for pieces in writing.pieces.values() for piece in pieces)
        odd, waited = any(odd_numbers(piece.tensor, piece.buffer) for piece in every), 0
        said = f"The run waits with what it has trained, and tries again every {AGAIN_S} s. Ctrl-C or SIGTERM ends it"
        deaf = threading.current_thread() is not threading.main_thread()  # no signal could end the wait
        while self.state.step and not self._any(odd or deaf or self.stopped()):
            if not waited:
                self.alarm(self.state.step, f"{error}. {said} without this save")
            time.sleep(1)
            waited += 1
            if waited % AGAIN_S == 0:
                try:
                    writing.save()
                    return
                except UserError as again:
                    error = again
        raise error

    def before_update(self) -> None:
        """The state is about to change: waits until it is copied."""
        if self.under_way is not None:
            self.seconds += self.under_way.wait_for_copy()

    def poll(self) -> None:
        """Between steps: learns what became of the save under way. The ranks ask each other in one step. The answer
        comes to the host with the figures of that step (`answer`), so nobody waits, and no host for its device."""
        if self.under_way is None:
            return
        if self._answer is not None:
            failed, busy = self._answer
            self._answer = None
            if failed or not busy:
                self.settle()
                return
        if self._awaited:
            return
        said = self.under_way.error is not None, not self.under_way.ended.is_set()
        flags = [torch.full((), float(flag), device=self.axis.device) for flag in said]
        self._asked, self._awaited = self.axis.start_all_reduce(torch.stack(flags)), True

    def figures(self) -> dict[str, Tensor]:
        """What the ranks have asked each other in this step."""
        if self._asked is None:
            return {}
        asked, self._asked = self._asked, None
        return dict(zip((FAILED, BUSY), asked().unbind(), strict=True))

    def answer(self, failed: float | None, busy: float | None) -> None:
        """The host has read the figures of a step; None: it had none of these."""
        if self._awaited and failed is not None and busy is not None:
            self._answer, self._awaited = (failed, busy), False

    def settle(self) -> None:
        """Waits for the save under way. Says so if it failed."""
        save, self.under_way = self.under_way, None
        self._answer, self._awaited = None, False
        if self._asked is not None:
            self._asked()
            self._asked = None
        if save is None:
            return
        try:
            save.written.wait()
            with all_or_none(self.axis):
                _raise(save)
            save.join()  # of the first rank, which waits for parts that are all there
            with all_or_none(self.axis):
                _raise(save)
            self._succeeded()
        except UserError as error:
            save.cancel()
            save.join()
            save.writing.abandon()
            self._failed(error)

    def is_time(self) -> bool:
        """True if a save is due by time. Ranks differ in this: the first one decides."""
        minutes = self.job.recipe.checkpoint.minutes
        return minutes > 0 and self.under_way is None and time.monotonic() - self._began >= 60 * minutes

    def tries_again(self, step: int) -> bool:
        """True if a save that has failed is tried again after this step."""
        return self.retry_at is not None and step >= self.retry_at

    def close(self) -> None:
        """The run ends, perhaps by an error: a part that is being written is finished, but nobody waits for others."""
        if self.under_way is not None:
            self.under_way.cancel()
            self.under_way.join(JOIN_S)

    def _start(self, writing: Writing) -> Background:
        """Raises UserError: a rank has no memory or thread for the copy. On all ranks."""
        save, why = None, ""
        try:
            save = Background(writing)
        except (OSError, MemoryError, RuntimeError) as error:
            why = str(error)
        try:
            with all_or_none(self.axis):
                if save is None:
                    raise UserError(
                        f"cannot write the checkpoint {writing.folder}: no room for a copy: {why}"
                    )
        except UserError:
            if save is not None:
                save.cancel()
                save.join()
            writing.abandon()
            raise
        assert save is not None, "it is there on all ranks"
        return save

    def _failed(self, error: UserError) -> None:
        self.retry_at = self.state.step + 2**self._failures
        self._failures += 1
        self.alarm(self.state.step, f"{error}. Training goes on; step {self.retry_at} tries again")

    def _succeeded(self) -> None:
        self.retry_at, self._failures = None, 0

    @property
    def _settled(self) -> bool:
        """True if what is saved changes in updates alone."""
        return self.state.outer is None and not self.state.parallel.offloads

    def _beside(self, writing: Writing) -> bool:
        """True if this save is written beside the steps that follow. The same on all ranks."""
        if not self.beside:
            return False
        own = sum(piece.tensor.nbytes for pieces in writing.pieces.values() for piece in pieces)
        room = available()
        return not self._any(room is not None and own * COPY_ROOM * self.local_ranks > room)

    def _any(self, flag: bool) -> bool:
        """True if this is true of any rank."""
        return bool(self.axis.all_reduce(torch.tensor(float(flag), device=self.axis.device), "max"))


def _raise(save: Background) -> None:
    if isinstance(save.error, UserError):
        raise save.error
    if save.error is not None:
        raise UserError(f"cannot write the checkpoint {save.writing.folder}: {save.error!r}")
