"""Resuming a run: the newest valid checkpoint that fits it is loaded; damaged ones are set aside."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from fivefold.checkpoint import keep, store
from fivefold.checkpoint.manifest import Damaged
from fivefold.comm import all_or_none
from fivefold.errors import UserError
from fivefold.step.state import State
from fivefold.train.checked import assert_same, damaged_together
from fivefold.train.job import Job
from fivefold.train.loaded import load_checkpoint
from fivefold.train.meta import meta_of
from fivefold.train.saved import FINGERPRINT, identity


@dataclass(frozen=True)
class Resumed:
    """folder: the checkpoint that was loaded. notes, alarms: what there is to say about it, and about others that were
    damaged."""

    folder: Path
    notes: list[str]
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
                meta_of(checkpoint)
            with all_or_none(run):  # each machine prepares its own data
                _assert_identity(job, checkpoint)
            load_checkpoint(state, checkpoint)
        except Damaged as error:
            damages[folder] = str(error)
            continue
        steps = job.recipe.train.steps or 0
        if state.step > steps:
            raise UserError(f"train.steps = {steps}, but {folder} is beyond it; set at least {state.step}")
        notes = [checkpoint.note] if checkpoint.note else []
        return Resumed(folder, notes, _set_aside(damages, run.index == 0, state.step))
    if not folders:
        return None
    raise UserError(
        f"{job.out} has no valid checkpoint. Start a new run, or put a copy back\n"
        + "\n".join(f"  {text}" for text in damages.values())
    )


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


def _assert_identity(job: Job, checkpoint: store.Reader) -> None:
    folder, meta = checkpoint.folder, checkpoint.meta
    for key, now in identity(job).items():
        if key in meta and meta[key] != now:
            if key == FINGERPRINT:
                raise UserError(
                    f"the data changed since {folder}, so the run cannot resume exactly. Restore the data, or start a "
                    "new run"
                )
            raise UserError(
                f"{folder} was trained with {key} = {meta[key]!s:.80}, and now it is {now}, so the run cannot resume "
                "exactly. Undo the change, or start a new run"
            )
