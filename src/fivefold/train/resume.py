"""Resuming a run: the newest valid checkpoint that fits it is loaded; damaged ones are set aside."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fivefold.checkpoint import keep, store
from fivefold.checkpoint.manifest import MANIFEST, Damaged
from fivefold.comm import all_or_none
from fivefold.errors import UserError
from fivefold.recipe import sequences_before
from fivefold.step.state import State
from fivefold.train.checked import assert_same, damaged_together, meta_of
from fivefold.train.job import Job
from fivefold.train.loaded import load_checkpoint
from fivefold.train.saved import FINGERPRINT, STAGES, identity
from fivefold.train.share import begin_streams


@dataclass(frozen=True)
class Resumed:
    """folder: the checkpoint that was loaded. alarms: what there is to say about others that were damaged."""

    folder: Path
    alarms: list[str]


def resume(state: State, job: Job) -> Resumed | None:
    """Loads the newest valid checkpoint. Returns None if there is none yet. All ranks call it.

    A damaged one is set aside, and the one before it is loaded.

    Raises:
        UserError: the checkpoints cannot be read, all are damaged, or the run cannot resume from the newest valid one.
            On all ranks.
    """
    run, damages = state.mesh.axis("run"), dict[Path, str]()
    with all_or_none(run):
        if run.index == 0:
            with suppress(OSError):  # of a disk that is read-only
                keep.recover(job.out)
    with all_or_none(run):
        folders = _candidates(job)
    assert_same(folders, state.mesh)
    for folder in folders:
        try:
            with damaged_together(run):
                checkpoint = store.Reader(folder)
                _assert_updates(job, checkpoint)
            with all_or_none(run):  # each machine prepares its own data
                assert_identity(job, checkpoint)
            load_checkpoint(state, checkpoint)
            begin_streams(job, checkpoint.meta)
        except Damaged as error:
            damages[folder] = str(error)
            continue
        steps = job.recipe.train.steps or 0
        if state.step > steps:
            raise UserError(f"train.steps = {steps}, but {folder} is beyond it; set at least {state.step}")
        return Resumed(folder, _set_aside(damages, run.index == 0, state.step))
    if not folders:
        return None
    raise UserError(
        f"{job.out} has no valid checkpoint. Start a new run, or put a copy back\n"
        + "\n".join(f"  {text}" for text in damages.values())
    )


def _assert_updates(job: Job, checkpoint: store.Reader) -> None:
    """Raises Damaged: as `meta_of`, or more updates than sequences. Each share of an asynchronous server is an update,
    and the run may have had some before."""
    meta = meta_of(checkpoint)
    most = meta.step * job.recipe.train.global_batch_size
    if meta.updates > most:
        said = f"meta.updates is {meta.updates}, and step {meta.step} has at most {most}"
        raise Damaged(f"{checkpoint.folder / MANIFEST} is damaged: {said}")


def _candidates(job: Job) -> list[Path]:
    """The checkpoints from which a run may go on, newest first: none before the one that the user chose."""
    folders, chosen = store.checkpoints(job.out)[::-1], job.resume_from
    if chosen is None:
        return folders
    mine = [folder.resolve() for folder in folders]
    if chosen.resolve() in mine:
        return folders[: mine.index(chosen.resolve()) + 1]
    return [*folders, chosen]


def _set_aside(damages: Mapping[Path, str], first: bool, step: int) -> list[str]:
    """Sets damaged checkpoints aside, on the first rank. Returns what to say."""
    said = []
    for folder, text in damages.items():
        where = ""
        if first:
            try:
                where = f", set aside as {keep.set_aside(folder, keep.DAMAGED).name}"
            except OSError as error:
                where = f", which cannot be renamed ({error.strerror})"
        said.append(f"{text}. Resumed from step {step} instead of {folder.name}{where}")
    return said


def assert_identity(job: Job, checkpoint: store.Reader) -> None:
    """Raises UserError if what a checkpoint was trained with has changed, so that the run cannot resume exactly."""
    folder, meta = checkpoint.folder, checkpoint.meta
    for key, now in identity(job).items():
        then = meta.get(key, now)
        if key == STAGES:  # a stage that has not begun may change
            place = sequences_before(job.recipe.train, meta["step"])
            then, now = ([stage for stage in stages if stage[0] < max(1, place)] for stages in (then, now))
            if then != now:
                raise UserError(
                    f"{folder} was trained with other weights of data.sources, or other data.stages, up to step "
                    f"{meta['step']}, so the run cannot resume exactly. Undo the change, or start a new run"
                )
        elif then != now and key == FINGERPRINT:
            which = _changed(then, now)
            raise UserError(
                f"the data{which} changed since {folder}, so the run cannot resume exactly. Restore the data, or start "
                "a new run"
            )
        elif then != now:
            raise UserError(
                f"{folder} was trained with {key} = {then!s:.80}, and now it is {now}, so the run cannot resume "
                "exactly. Undo the change, or start a new run"
            )


def _changed(then: Any, now: Any) -> str:
    """The sources of a mixture that differ, by name; "" without a mixture."""
    if not (isinstance(then, list) and isinstance(now, list)):
        return ""
    before, after = dict(then), dict(now)
    names = [name for name in before | after if before.get(name) != after.get(name)]
    return f" of data.sources ({', '.join(names) or 'their order'})"
