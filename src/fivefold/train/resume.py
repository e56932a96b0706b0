"""Resuming a run: the newest valid checkpoint that fits it is loaded, in any layout; damaged ones are set aside."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fivefold.checkpoint import keep, store
from fivefold.checkpoint.manifest import DTYPES, MANIFEST, Damaged
from fivefold.checkpoint.source import Elsewhere
from fivefold.comm import all_or_none
from fivefold.errors import UserError
from fivefold.optim.card import COMPENSATION
from fivefold.recipe import sequences_before
from fivefold.sharding.parts import Ranges, boxes, local_shape
from fivefold.step.state import State
from fivefold.train.checked import Meta, assert_same, check_files, damaged_together, meta_of
from fivefold.train.job import FINGERPRINT, STAGES, Job, identity
from fivefold.train.saver import OUTER, compression, moments_at, weights_at
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
    run = state.mesh.axis("run")
    with all_or_none(run):
        if run.index == 0:
            with suppress(OSError):  # of a disk that is read-only
                keep.recover(job.out)
    with all_or_none(run):
        folders = _candidates(job)
    assert_same(folders, state.mesh)
    checkpoint, damages = load_newest(state, job, folders)
    if checkpoint is not None:
        begin_streams(job, checkpoint.meta)
        steps, folder = job.recipe.train.steps or 0, checkpoint.folder
        if state.step > steps:
            raise UserError(f"train.steps = {steps}, but {folder} is beyond it; set at least {state.step}")
        return Resumed(folder, _set_aside(damages, run.index == 0, state.step))
    if not folders:
        return None
    raise UserError(
        f"{job.out} has no valid checkpoint. Start a new run, or put a copy back\n"
        + "\n".join(f"  {text}" for text in damages.values())
    )


def load_newest(state: State, job: Job, folders: list[Path]) -> tuple[store.Reader | None, dict[Path, str]]:
    """Loads the first valid one of these checkpoints, newest first. Returns it (None: all are damaged), and what is
    wrong with those before it. All ranks call it.

    Raises:
        UserError: the run cannot resume from the first valid one. On all ranks.
    """
    run, damages = state.mesh.axis("run"), dict[Path, str]()
    for folder in folders:
        try:
            with damaged_together(run):
                checkpoint = store.Reader(folder)
                _assert_updates(job, checkpoint)
            with all_or_none(run):  # each machine prepares its own data
                assert_identity(job, checkpoint)
            load_checkpoint(state, checkpoint)
        except Damaged as error:
            damages[folder] = str(error)
            continue
        return checkpoint, damages
    return None, damages


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
        then, undo = meta.get(key, now), "Undo the change"
        if key == STAGES:  # a stage that has not begun may change
            place = sequences_before(job.recipe.train, meta["step"])
            then, now = ([stage for stage in stages if stage[0] < max(1, place)] for stages in (then, now))
            sources = "other weights of data.sources, or other data.stages"
            what = f"{folder} was trained with {sources}, up to step {meta['step']}"
        elif key == FINGERPRINT:
            what, undo = f"the data{_changed(then, now)} changed since {folder}", "Restore the data"
        else:
            what = f"{folder} was trained with {key} = {then!s:.80}, and now it is {now}"
        if then != now:
            raise UserError(f"{what}, so the run cannot resume exactly. {undo}, or start a new run")


def _changed(then: Any, now: Any) -> str:
    """The sources of a mixture that differ, by name; "" without a mixture."""
    if not (isinstance(then, list) and isinstance(now, list)):
        return ""
    before, after = dict(then), dict(now)
    names = [name for name in before | after if before.get(name) != after.get(name)]
    return f" of data.sources ({', '.join(names) or 'their order'})"


class Saved(NamedTuple):
    """The part of a saved tensor that this rank stores."""

    checkpoint: store.Reader
    kind: str
    name: str
    keeps: Ranges

    def exists(self) -> bool:
        return self.name in self.checkpoint.manifest.tensors[self.kind]

    def files(self) -> set[str]:
        """The files that hold it."""
        parts = [self.checkpoint.files_of(self.kind, self.name, box) for _, box in boxes(self.keeps)]
        return set[str]().union(*parts)

    def copy_to(self, tensor: Tensor) -> None:
        for place, box in boxes(self.keeps):
            tensor[place].copy_(self.checkpoint.read(self.kind, self.name, box))

    def read(self) -> Tensor:
        pieces = [
            (place, self.checkpoint.read(self.kind, self.name, box)) for place, box in boxes(self.keeps)
        ]
        out = torch.empty(local_shape(self.keeps), dtype=pieces[0][1].dtype if pieces else None)
        for place, piece in pieces:
            out[place] = piece
        return out


class Lazily(Mapping[str, Tensor]):
    """Tensors that are read when they are asked for: all moments at once may not fit into memory."""

    def __init__(self, saved: Mapping[str, Saved]):
        self.saved = saved

    def __getitem__(self, name: str) -> Tensor:
        return self.saved[name].read()

    def __iter__(self) -> Iterator[str]:
        return iter(self.saved)

    def __len__(self) -> int:
        return len(self.saved)


@dataclass(frozen=True)
class Plan:
    """What this rank reads of a checkpoint. copies: (what is set, what is read) of weights, buffers, residuals of
    compression. moments, outer: states of the optimizer (None: it has none yet) and of the outer one, by name."""

    copies: list[tuple[Tensor, Saved]]
    moments: dict[str, Saved] | None
    outer: dict[str, Saved]

    def files(self) -> set[str]:
        saved = [*(saved for _, saved in self.copies), *(self.moments or {}).values(), *self.outer.values()]
        return set[str]().union(*(part.files() for part in saved))


def load_checkpoint(state: State, checkpoint: store.Reader) -> None:
    """Sets weights, moments, buffers and counts from a checkpoint of any layout.

    All ranks call it and read their own parts.

    Raises:
        Damaged: a file is damaged. On all ranks, before anything has changed.
        UserError: a name is missing, unknown, or has another shape. On all ranks.
    """
    meta, run = meta_of(checkpoint), state.mesh.axis("run")
    elsewhere = Elsewhere.of(checkpoint.folder, checkpoint.meta)
    gone = elsewhere.names if elsewhere is not None else {}
    with all_or_none(run):
        try:
            _fits(state, checkpoint, gone)
            plan = _plan(state, checkpoint, meta, gone)
            needed = plan.files()
        except (ValueError, KeyError) as error:
            raise UserError(f"{checkpoint.folder} does not fit the recipe: {error}") from None
    check_files(checkpoint, needed, run)
    with all_or_none(run):
        if elsewhere is not None:
            _load_elsewhere(state, elsewhere)
        _set_counts(state, meta)
        _load(state, plan, meta)


def _plan(state: State, checkpoint: store.Reader, meta: Meta, gone: Mapping[str, str]) -> Plan:
    """gone: weights that are elsewhere.

    Raises:
        UserError: the checkpoint has sites with different weights, and another number of them than this run.
        KeyError, ValueError: the checkpoint lacks a tensor, or it has another shape.
    """
    site, parts, outer = state.mesh.index("sites"), state.parts(), state.outer
    if meta.sites != state.mesh.size("sites") and not meta.aligned:
        raise UserError(_between(checkpoint.folder, meta, state.mesh.size("sites")))

    def whole(kind: str, name: str, tensor: Tensor) -> tuple[Tensor, Saved]:
        return tensor, Saved(checkpoint, kind, name, tuple(((0, size),) for size in tensor.shape))

    kind, before = ("model", "") if meta.aligned else ("optimizer", weights_at(site))
    weights = {name: w for name, w in state.masters().items() if name not in gone}
    copies = [(w, Saved(checkpoint, kind, before + name, parts[name].keeps)) for name, w in weights.items()]
    copies += [whole("model", name, buffer) for name, buffer in state.buffers().items()]
    copies += [whole("optimizer", name, tensor) for name, tensor in _unsent(state, meta).items()]
    moments, common = None, dict[str, Saved]()
    if meta.updates:
        before = moments_at(site % meta.sites)  # a site that joins takes the moments of another
        moments = {
            f"{moment}.{name}": Saved(checkpoint, "optimizer", f"{before}{moment}.{name}", part.keeps)
            for (moment, name), part in state.moment_parts().items()
        }
        for name in [name for name in moments if name.startswith(f"{COMPENSATION}.")]:
            if not moments[name].exists():  # of a run with another rounding: it starts from zero
                del moments[name]
    if outer is not None:
        copies += [(w, Saved(checkpoint, "model", n, parts[n].keeps)) for n, w in outer.weights.items()]
        common = {
            f"{moment}.{name}": Saved(checkpoint, "optimizer", f"{OUTER}{moment}.{name}", parts[name].keeps)
            for name in outer.weights
            for moment in outer.state_names
        }
    # An outer optimizer has no states before its first step
    return Plan(copies, moments, {name: saved for name, saved in common.items() if saved.exists()})


def _between(folder: Path, meta: Meta, sites: int) -> str:
    """The message for a checkpoint whose sites have different weights."""
    step, every = meta.step, meta.every
    near = [n for n in (step // every * every, (step // every + 1) * every) if n]
    where = (
        f"{' or '.join(map(str, near))} (multiples of sync.every = {every})"
        if meta.fragments == 1
        else f"0 or the last, as sync.fragments = {meta.fragments} never synchronise together"
    )
    return (
        f"{folder} lies between outer steps: its {meta.sites} sites have different weights, so it resumes with as "
        f"many sites only, and now there are {sites}. Nearest valid: {meta.sites} sites, or a checkpoint of step "
        f"{where}"
    )


def _load_elsewhere(state: State, found: Elsewhere) -> None:
    """Reads the weights that the checkpoint leaves to a source."""
    source, masters, parts = found.open(), state.masters(), state.parts()
    for name, there in found.names.items():
        if name in masters:
            weight = masters[name]
            if source.shape(there) != parts[name].shape or not parts[name].frozen:
                raise UserError(f"{source.folder}: {there} is not the frozen weight {name} of this run")
            for place, box in boxes(parts[name].keeps):
                weight[place].copy_(source.read(there, box))
    state.elsewhere = found


def _fits(state: State, checkpoint: store.Reader, gone: Mapping[str, str]) -> None:
    """Raises ValueError if names or shapes are not the model's. gone: weights that are elsewhere."""
    parts = state.parts()
    shapes = {name: part.shape for name, part in parts.items() if name not in gone}
    shapes |= {name: tuple(buffer.shape) for name, buffer in state.buffers().items()}
    saved = set(checkpoint.names("model"))
    whole_model = len(state.parallel.stages) == 1 and state.mesh.size("pp") == 1
    wrong = sorted(set(shapes) ^ saved if whole_model else set(shapes) - saved)
    wrong += [name for name in shapes if name in saved and checkpoint.shape("model", name) != shapes[name]]
    wrong += [name for name in parts if name in saved and not _real(checkpoint, "model", name)]
    if wrong:
        raise ValueError(f"these weights do not fit the model: {', '.join(wrong[:5])}")


def _real(checkpoint: store.Reader, kind: str, name: str) -> bool:
    """False for a tensor of whole numbers, or a buffer."""
    entry = checkpoint.manifest.tensors[kind][name]
    return not entry.buffer and getattr(torch, DTYPES[entry.dtype]).is_floating_point


def _unsent(state: State, meta: Meta) -> dict[str, Tensor]:
    """The tensors of compression that the checkpoint has. In another layout residuals start from zero."""
    here, saved = compression(state).get("compression"), meta.compression
    if here is None:
        return {}
    if saved is None or saved != here["layout"]:
        of = f"the layout {saved}" if saved else "a run without compression"
        state.forgotten = f"compression: residuals start from zero, because the checkpoint is of {of}"
        return {}
    return state.unsent()


def _set_counts(state: State, meta: Meta) -> None:
    state.go_to(meta.step)
    state.set_counts(meta.updates, 0)  # a run that had diverged has all its tries again
    usual = torch.tensor(meta.usual or (0.0,) * 6, dtype=torch.float64, device=state.mesh.device)
    state.usual = usual.view(2, 3)
    state.left_out = meta.left_out
    state.products = meta.products or state.products
    if state.loss_scale is not None and meta.loss_scale is not None:
        state.loss_scale.set(*meta.loss_scale)
    state.noise = meta.noise or (0.0, 0.0)


def _load(state: State, plan: Plan, meta: Meta) -> None:
    disk = state.parallel.disk
    for tensor, saved in plan.copies:
        saved.copy_to(tensor)
        if disk is not None:
            disk.touched(tensor.nbytes)
    for replica in state.parallel.replicas:
        replica.refresh()
        if plan.moments is None:
            replica.updater.begin(state.step)
        else:
            replica.updater.load(Lazily(plan.moments), meta.updates, state.step)
    if state.outer is not None:
        state.outer.aligned = meta.aligned
        state.outer.load({name: saved.read() for name, saved in plan.outer.items()})
