"""Saves a run's state when it is due: beside the steps that follow, or at once.

A save that fails is an alarm. The run goes on, the checkpoints before stay, and the next save tries again. At the end
of the run it is an error, because nothing would be saved.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from fivefold.checkpoint.background import Background
from fivefold.checkpoint.write import Writing
from fivefold.comm import Started, all_or_none
from fivefold.errors import UserError
from fivefold.host.memory import available
from fivefold.step.state import State
from fivefold.train.job import Job
from fivefold.train.saved import prepare, prune

COPY_ROOM = 1.25
"""Free memory that a copy of the state needs, relative to its bytes."""
JOIN_S = 30


class Saver:
    """The saves of a run: at most one on its way. All ranks call these methods together.

    alarm: says on the console and in the report what failed in a step. flush: forces to the disk what a checkpoint
    needs beside itself; the first rank calls it before the checkpoint gets its name. beside: False where the state
    changes outside of updates, so every save is complete before the run goes on. seconds: for which steps waited for
    the copies of saves.
    """

    def __init__(
        self,
        state: State,
        job: Job,
        alarm: Callable[[int, str], None],
        flush: Callable[[], None] = lambda: None,
        local_ranks: int = 1,
        beside: bool = True,
    ):
        self.state, self.job, self.alarm, self.flush = state, job, alarm, flush
        self.local_ranks = local_ranks
        self.beside = beside and job.recipe.checkpoint.asynchronous and state.parallel.disk is None
        self.axis = state.mesh.axis("run")
        self.under_way: Background | None = None
        self.seconds = 0.0
        self._asked: Started | None = None

    def save(self, meta: Mapping[str, Any], ends: bool) -> None:
        """Saves the state as it is now. ends: the run ends here, so the save is complete when this returns.

        Raises:
            UserError: it failed, and the run ends.
        """
        self.settle()
        try:
            hooks = {"before": self.flush, "after": partial(prune, self.job)}
            writing = replace(prepare(self.state, self.job.out, meta), **hooks)
            if ends or not self._beside(writing):
                writing.save()
            else:
                writing.begin()
                self.under_way = self._start(writing)
                if not self._settled:
                    self.seconds += self.under_way.wait_for_copy()
        except UserError as error:
            if ends:
                raise
            self._failed(error)
        if self.state.parallel.disk is not None:
            self.state.parallel.disk.drop()

    def before_update(self) -> None:
        """The state is about to change: waits until it is copied."""
        if self.under_way is not None:
            self.seconds += self.under_way.wait_for_copy()

    def poll(self) -> None:
        """Between steps: learns what became of the save under way. The ranks ask each other in one step and read the
        answer in the next, so nobody waits."""
        if self.under_way is None:
            return
        if self._asked is not None:
            failed, busy = self._asked().tolist()
            self._asked = None
            if failed or not busy:
                self.settle()
                return
        failed = self.under_way.error is not None
        ended = self.under_way.ended.is_set()
        self._asked = self.axis.start_all_reduce(
            torch.tensor([float(failed), float(not ended)], device=self.axis.device)
        )

    def settle(self) -> None:
        """Waits for the save under way. Says so if it failed."""
        save, self.under_way = self.under_way, None
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
        except UserError as error:
            save.cancel()
            save.join()
            save.writing.abandon()
            self._failed(error)

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
        self.alarm(self.state.step, f"{error}. Training goes on; the next save tries again")

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
        tight = room is not None and own * COPY_ROOM * self.local_ranks > room
        flag = torch.tensor(float(tight), device=self.axis.device)
        return not bool(self.axis.all_reduce(flag, "max"))


def _raise(save: Background) -> None:
    if isinstance(save.error, UserError):
        raise save.error
    if save.error is not None:
        raise UserError(f"cannot write the checkpoint {save.writing.folder}: {save.error!r}")
