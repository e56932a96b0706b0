"""Saves a run's state when it is due: beside the steps that follow, or at once.

A save that fails is an alarm. The run goes on, the checkpoints before stay, and it is tried again after the next step,
then after 2, 4, 8 ... more. At the end of the run the ranks keep what they have trained, and try again until it works
or the run is told to stop.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fivefold.checkpoint import store, write
from fivefold.checkpoint.keep import prune
from fivefold.checkpoint.source import ELSEWHERE, FROZEN
from fivefold.checkpoint.store import odd_numbers
from fivefold.checkpoint.write import Background, Writing
from fivefold.comm import Started, all_or_none
from fivefold.errors import UserError
from fivefold.host.machine import available
from fivefold.parallel.mesh import Microbatch
from fivefold.schedules.compression import NONE
from fivefold.sharding.layout import Layout, to_text
from fivefold.sharding.parts import Part, boxes
from fivefold.step.state import State
from fivefold.train.checked import anywhere
from fivefold.train.instruments import Instrument
from fivefold.train.job import Job

COPY_ROOM = 1.25
"""Free memory that a copy of the state needs, relative to its bytes."""
JOIN_S = 30
AGAIN_S = 5  # between tries of the last save
FAILED, BUSY = "save_failed", "save_under_way"
"""Figures of a step: the numbers of ranks whose part of the save has failed, or is not complete."""


class Saver(Instrument):
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
        it is tried again until it works. Raises UserError: it failed, the run ends, and it does not wait, was told to
        stop, has trained nothing, or has numbers that no checkpoint may hold."""
        self.settle()
        self._began, self.retry_at = time.monotonic(), None  # this one is the next try
        keeps = self.job.recipe.checkpoint
        pruned = partial(prune, self.job.out, keeps.keep_last, keeps.keep_every)
        writing = replace(prepare(self.state, self.job.out, meta), before=self.flush, after=pruned)
        try:
            if ends or not self._beside(writing):
                writing.save()
                self.retry_at, self._failures = None, 0
            else:
                writing.begin()
                self.under_way = self._start(writing)
                # Then what is saved changes outside of updates, too
                if self.state.outer is not None or self.state.parallel.offloads:
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
        waits = f"The run waits with what it has trained, and tries again every {AGAIN_S} s. Ctrl-C or SIGTERM ends it"
        deaf = threading.current_thread() is not threading.main_thread()  # no signal could end the wait
        while self.state.step and not anywhere(odd or deaf or self.stopped(), self.axis):
            if not waited:
                self.alarm(self.state.step, f"{error}. {waits} without this save")
            time.sleep(1)
            waited += 1
            if waited % AGAIN_S == 0:
                try:
                    writing.save()
                    return
                except UserError as again:
                    error = again
        raise error

    def begin_step(self, state: State, microbatches: Sequence[Microbatch]) -> None:
        """Between steps: learns what became of the save under way. The ranks ask each other in one step. The answer
        comes to the host with the figures of that step, so nobody waits, and no host for its device."""
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
        answers = self.under_way.error is not None, not self.under_way.ended.is_set()
        flags = [torch.full((), float(flag), device=self.axis.device) for flag in answers]
        self._asked, self._awaited = self.axis.start_all_reduce(torch.stack(flags)), True

    def begin_update(self, state: State) -> Mapping[str, Tensor]:
        """The state is about to change: waits until it is copied. Returns what the ranks have asked each other."""
        if self.under_way is not None:
            self.seconds += self.under_way.wait_for_copy()
        if self._asked is None:
            return {}
        asked, self._asked = self._asked, None
        return dict(zip((FAILED, BUSY), asked().unbind(), strict=True))

    def figures(self, line: dict[str, Any]) -> Mapping[str, Any]:
        failed, busy = line.pop(FAILED, None), line.pop(BUSY, None)
        if self._awaited and failed is not None and busy is not None:
            self._answer, self._awaited = (failed, busy), False
        return {}

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
            for wait in (save.written.wait, save.join):  # the first rank's thread waits for all parts
                wait()
                with all_or_none(self.axis):
                    if isinstance(save.error, UserError):
                        raise save.error
                    if save.error is not None:
                        raise UserError(f"cannot write the checkpoint {save.writing.folder}: {save.error!r}")
            self.retry_at, self._failures = None, 0
        except UserError as error:
            save.cancelled.set()
            save.join()
            save.writing.abandon()
            self._failed(error)

    def is_time(self) -> bool:
        """True if a save is due by time. Ranks differ in this: the first one decides."""
        minutes = self.job.recipe.checkpoint.minutes
        return minutes > 0 and self.under_way is None and time.monotonic() - self._began >= 60 * minutes

    def close(self) -> None:
        """The run ends, perhaps by an error: a part that is being written is finished, but nobody waits for others."""
        if self.under_way is not None:
            self.under_way.cancelled.set()
            self.under_way.join(JOIN_S)

    def _start(self, writing: Writing) -> Background:
        """Raises UserError: a rank has no memory or thread for the copy. On all ranks."""
        save = None
        try:
            with all_or_none(self.axis):
                try:
                    save = Background(writing)
                except (OSError, MemoryError, RuntimeError) as error:
                    wrong = f"cannot write the checkpoint {writing.folder}: no room for a copy: {error}"
                    raise UserError(wrong) from None
        except UserError:
            if save is not None:
                save.cancelled.set()
                save.join()
            writing.abandon()
            raise
        assert save is not None, "it is there on all ranks"
        return save

    def _failed(self, error: UserError) -> None:
        self.retry_at = self.state.step + 2**self._failures
        self._failures += 1
        self.alarm(self.state.step, f"{error}. Training goes on; step {self.retry_at} tries again")

    def _beside(self, writing: Writing) -> bool:
        """True if this save is written beside the steps that follow. The same on all ranks."""
        if not self.beside:
            return False
        copied = sum(piece.tensor.nbytes for pieces in writing.pieces.values() for piece in pieces)
        room = available()
        return not anywhere(room is not None and copied * COPY_ROOM * self.local_ranks > room, self.axis)


OUTER = "outer."  # prefix of the outer optimizer's states
OFFLOADED_SHARD_BYTES = 64 << 20  # a shard is in memory while it is written


def prepare(state: State, out: Path, meta: Mapping[str, Any]) -> write.Writing:
    """The checkpoint of the state as it is now, with `meta`, for the run folder. Each rank writes its own pieces.

    What updates do not change, but other parts of a step do, is copied: buffers, residuals of compression.
    """
    counts = {"step": state.step, "updates": state.updates, "skipped": state.skipped}
    known = any(state.noise) and all(map(math.isfinite, state.noise))
    measured: dict[str, Any] = {"noise": list(state.noise)} if known else {}
    if bool(state.usual[:, 0].any()):
        measured["usual"] = state.usual.flatten().tolist()
    if state.left_out:
        measured["left_out"] = [n for pair in state.left_out for n in pair]
    if state.loss_scale is not None:
        measured["loss_scale"] = state.loss_scale.values.tolist()
    whole = {**counts, **measured, **compression(state), **meta}
    masters = state.masters()
    if frozen := [name for name, part in state.parts().items() if part.frozen]:
        whole[FROZEN] = True
        # Rows of FSDP2 are fp32
        masters |= {name: masters[name].to(state.parallel.computes) for name in frozen}
    if state.products is not None:
        whole["products"] = state.products._asdict()
    if state.elsewhere is not None:
        whole[ELSEWHERE] = asdict(state.elsewhere)
    if state.outer is None:
        gone = state.elsewhere.names if state.elsewhere is not None else {}
        kept = {name: w for name, w in masters.items() if name not in gone}
        model, optimizer = owned_pieces(state, kept), moment_pieces(state)
    else:
        # The first replica group writes what all have: the common weights and the states of the outer optimizer. Every
        # one writes its moments, and its weights if they differ
        replica_group, model = state.mesh.index("replica_groups"), list[write.Piece]()
        optimizer = moment_pieces(state, moments_at(replica_group))
        if not state.outer.aligned:
            optimizer += owned_pieces(state, state.masters(), before=weights_at(replica_group))
        if replica_group == 0:
            model = owned_pieces(state, state.outer.weights)
            optimizer += owned_pieces(state, state.outer.states(), state.outer.state_names, OUTER)
        whole["replica_groups"] = {
            # A replica group that is a launch of its own saves for itself
            "count": state.mesh.size("replica_groups"),
            "every": state.outer.replica_groups.every,
            "fragments": state.outer.replica_groups.fragments,
            "aligned": state.outer.aligned,
        }
    optimizer += _copies(write.whole_pieces(state.unsent()))
    shard = write.MAX_SHARD_BYTES if state.parallel.disk is None else OFFLOADED_SHARD_BYTES
    pieces = {"model": [*model, *_copies(buffer_pieces(state))], "optimizer": optimizer}
    folder = store.folder_of(out, state.step)
    return write.Writing(folder, pieces, whole, state.mesh.axis("run"), shard)


def _copies(pieces: list[write.Piece]) -> list[write.Piece]:
    return [replace(piece, tensor=piece.tensor.detach().clone()) for piece in pieces]


def moments_at(replica_group: int) -> str:
    """The prefix of a replica group's moments. The first has none, so that a run of one replica group reads them."""
    return f"replica_group{replica_group}." if replica_group else ""


def weights_at(replica_group: int) -> str:
    return f"replica_group{replica_group}.weight."


def owned_pieces(
    state: State, tensors: dict[str, Tensor], moments: Iterable[str] = (), before: str = ""
) -> list[write.Piece]:
    """What this rank owns of tensors that have the shapes of its masters; their names are a parameter's, perhaps with
    "momentum_buffer." or the like before it. moments: such names. before: added to the names."""
    parts = {name: part for r in state.parallel.replicas for name, part in reversed(r.parts.items())}
    prefixes = ("", *(f"{moment}." for moment in moments))
    return [
        piece
        for name, part in parts.items()
        for prefix in prefixes
        if prefix + name in tensors
        for piece in _pieces(before + prefix + name, tensors[prefix + name], part)
    ]


def moment_pieces(state: State, before: str = "") -> list[write.Piece]:
    """What this rank owns of the optimizer's states; none before the first update. before: added to the names."""
    tensors = state.moments()
    return [
        piece
        for (moment, name), part in state.moment_parts().items()
        if f"{moment}.{name}" in tensors
        for piece in _pieces(f"{before}{moment}.{name}", tensors[f"{moment}.{name}"], part)
    ]


def _pieces(name: str, tensor: Tensor, part: Part) -> Iterator[write.Piece]:
    """The pieces of a tensor, if this rank owns it."""
    if part.owned:
        for where, box in boxes(part.keeps):
            yield write.Piece(name, tensor[where], part.shape, box)


OTHERWISE = ("recompute", "offload", "offload_dir", "offload_window", "offload_update",
             "microbatches", "cp_method", "sp_regather", "tp_chunks", "expert_chunks", "expert_buffer",
             "all_reduce", "all_gather", "reduce_scatter", "compress_after")  # fmt: skip
"""Fields of a layout that change no residual."""


def compression(state: State) -> dict[str, Any]:
    """Where residuals of compression fit: in the same layout."""
    layout = state.mesh.layout
    if layout.compress == NONE:
        return {}
    plain = {name: getattr(Layout(), name) for name in OTHERWISE}
    same, replica_groups = to_text(replace(layout, **plain)), state.mesh.size("replica_groups")
    if replica_groups > 1:
        same += f" in {replica_groups} replica groups"
    return {"compression": {"layout": same}}


def buffer_pieces(state: State) -> list[write.Piece]:
    """The buffers that this rank writes. All ranks of a pipeline stage have the same; the first writes them. Of two
    copies of the model the ranks at the pipeline's first half have all stages."""
    mesh = state.mesh
    first = not any(mesh.index(axis) for axis in ("replica_groups", "batch", "tp"))
    first &= mesh.index("pp") * mesh.layout.copies < mesh.size("pp")
    return write.whole_pieces(state.buffers(), buffers=True) if first else []
