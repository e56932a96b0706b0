"""Resuming a run: the newest valid checkpoint that fits it is loaded, in any layout; damaged ones are set aside."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fivefold.checkpoint import keep, store
from fivefold.checkpoint.manifest import DTYPES, MANIFEST, Damaged
from fivefold.checkpoint.source import Elsewhere
from fivefold.comm import all_or_none
from fivefold.errors import UserError
from fivefold.models.custom import buffers_of
from fivefold.optim.card import COMPENSATION
from fivefold.parallel.diloco import Outer
from fivefold.recipe import sequences_before
from fivefold.sharding.parts import Part, boxes, local_shape
from fivefold.step.state import State
from fivefold.train.checked import Meta, assert_same, check_files, damaged_together, meta_of
from fivefold.train.job import Job
from fivefold.train.saved import FINGERPRINT, OUTER, STAGES, compression, identity, moments_at, weights_at
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


def load_checkpoint(state: State, checkpoint: store.Reader) -> None:
    """Sets weights, moments, buffers and counts from a checkpoint of any layout.

    All ranks call it and read their own parts.

    Raises:
        Damaged: a file is damaged. On all ranks, before anything has changed.
        UserError: a name is missing, unknown, or has another shape. On all ranks.
    """
    meta = meta_of(checkpoint)
    parts = {name: part for r in state.parallel.replicas for name, part in r.parts.items()}
    buffers = state.buffers()
    elsewhere = Elsewhere.of(checkpoint.folder, checkpoint.meta)
    gone = elsewhere.names if elsewhere is not None else {}
    masters = {name: w for name, w in state.masters().items() if name not in gone}
    with all_or_none(state.mesh.axis("run")):
        try:
            _fits(state, checkpoint, parts, buffers, gone)
            source = _source(state, checkpoint.folder, meta)
            needed = _files(checkpoint, {name: parts[name] for name in masters}, source)
            needed |= _moment_files(state, checkpoint, source)
            needed.update(*(checkpoint.files_of("model", name) for name in buffers))
            unsent = _unsent(state, meta)
            whole = {name: store.all_of(tensor.shape) for name, tensor in unsent.items()}
            needed.update(*(checkpoint.files_of("optimizer", name, box) for name, box in whole.items()))
        except (ValueError, KeyError) as error:
            raise UserError(f"{checkpoint.folder} does not fit the recipe: {error}") from None
    check_files(checkpoint, needed, state.mesh.axis("run"))
    with all_or_none(state.mesh.axis("run")):
        if elsewhere is not None:
            _load_elsewhere(state, elsewhere, parts)
        _load(state, checkpoint, meta, parts, buffers, source, gone)
        for name, tensor in unsent.items():
            tensor.copy_(checkpoint.read("optimizer", name, whole[name]))


@dataclass(frozen=True)
class Source:
    """Where a checkpoint has what this rank's site reads: (kind, what stands before the names of parameters) of its
    weights, of the common weights and of each state of the outer optimizer. moments: what stands before the names of
    its optimizer's states; None: there are none yet."""

    weights: tuple[str, str]
    moments: str | None
    common: tuple[str, str]
    outer: dict[str, tuple[str, str]]

    @property
    def all(self) -> set[tuple[str, str]]:
        return {self.weights, self.common, *self.outer.values()}


def _source(state: State, folder: Path, meta: Meta) -> Source:
    """Raises UserError if the checkpoint has sites with different weights, and another number of them than this run."""
    site = state.mesh.index("sites")
    if meta.sites != state.mesh.size("sites") and not meta.aligned:
        raise UserError(_between(folder, meta, state.mesh.size("sites")))
    before = moments_at(site % meta.sites)  # a site that joins takes the moments of another
    return Source(
        ("model", "") if meta.aligned else ("optimizer", weights_at(site)),
        before if meta.updates else None,
        ("model", ""),
        {name: ("optimizer", f"{OUTER}{name}.") for name in (state.outer.state_names if state.outer else ())},
    )


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


def _load_elsewhere(state: State, found: Elsewhere, parts: dict[str, Part]) -> None:
    """Reads the weights that the checkpoint leaves to a source."""
    source, masters = found.open(), state.masters()
    for name, there in found.names.items():
        if name in masters:
            weight = masters[name]
            if source.shape(there) != parts[name].shape or not parts[name].frozen:
                raise UserError(f"{source.folder}: {there} is not the frozen weight {name} of this run")
            for place, box in boxes(parts[name].keeps):
                weight[place].copy_(source.read(there, box))
    state.elsewhere = found


def _fits(
    state: State,
    checkpoint: store.Reader,
    parts: dict[str, Part],
    buffers: dict[str, Tensor],
    gone: Mapping[str, str],
) -> None:
    """Raises ValueError if names or shapes are not the model's. gone: weights that are elsewhere."""
    shapes = {name: part.shape for name, part in parts.items() if name not in gone} | {
        n: tuple(b.shape) for n, b in buffers.items()
    }
    saved = set(checkpoint.names("model"))
    whole_model = len(state.parallel.stages) == 1 and state.mesh.size("pp") == 1
    unsaved = {name for stage in state.parallel.stages for name in buffers_of(stage)[1]}  # older versions did
    wrong = sorted(set(shapes) - saved | (saved - set(shapes) - unsaved if whole_model else set()))
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


def _load(
    state: State,
    checkpoint: store.Reader,
    meta: Meta,
    parts: dict[str, Part],
    buffers: dict[str, Tensor],
    source: Source,
    gone: Mapping[str, str],
) -> None:
    masters = {name: w for name, w in state.masters().items() if name not in gone}
    disk = state.parallel.disk
    state.go_to(meta.step)
    state.set_counts(meta.updates, 0)  # a run that had diverged has all its tries again
    usual = torch.tensor(meta.usual or (0.0,) * 6, dtype=torch.float64, device=state.mesh.device)
    state.usual = usual.view(2, 3)
    state.left_out = meta.left_out
    state.products = meta.products or state.products
    if state.loss_scale is not None and meta.loss_scale is not None:
        state.loss_scale.set(*meta.loss_scale)
    gradient, trace = meta.noise or (0.0, 0.0)
    state.noise = gradient, trace
    for name, weight in masters.items():
        weight.copy_(_read(checkpoint, source.weights, name, parts[name]))
        if disk is not None:
            disk.touched(weight.nbytes)
    for name, buffer in buffers.items():
        buffer.copy_(checkpoint.read("model", name))
    for replica in state.parallel.replicas:
        replica.refresh()
    if source.moments is not None:
        found = {
            f"{moment}.{name}": partial(
                _read, checkpoint, ("optimizer", f"{source.moments}{moment}."), name, part
            )
            for (moment, name), part in _moment_parts(state, checkpoint, source.moments)
        }
        for replica in state.parallel.replicas:
            replica.updater.load(Lazily(found), meta.updates, state.step)
    else:
        for replica in state.parallel.replicas:
            replica.updater.begin(state.step)
    if state.outer is not None:
        _load_outer(state.outer, checkpoint, parts, source)


class Lazily(Mapping[str, Tensor]):
    """Tensors that are read when they are asked for: all moments at once may not fit into memory."""

    def __init__(self, reads: Mapping[str, Callable[[], Tensor]]):
        self.reads = reads

    def __getitem__(self, name: str) -> Tensor:
        return self.reads[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self.reads)

    def __len__(self) -> int:
        return len(self.reads)


def _load_outer(outer: Outer, checkpoint: store.Reader, parts: dict[str, Part], source: Source) -> None:
    """Sets the common weights, the states of the outer optimizer, and what was under way."""
    outer.aligned = source.weights == source.common
    for name, weight in outer.weights.items():
        weight.copy_(_read(checkpoint, source.common, name, parts[name]))
    outer.load(
        {
            f"{state}.{name}": _read(checkpoint, where, name, parts[name])
            for name in outer.weights
            for state, where in source.outer.items()
            if _has(checkpoint, where, name)
        }
    )


def _moment_parts(
    state: State, checkpoint: store.Reader, before: str
) -> Iterator[tuple[tuple[str, str], Part]]:
    """The parts of optimizer states that are read. A run with another rounding has no compensation: it starts from
    zero."""
    for (moment, name), part in state.moment_parts().items():
        if moment != COMPENSATION or _has(checkpoint, ("optimizer", f"{before}{moment}."), name):
            yield (moment, name), part


def _has(checkpoint: store.Reader, where: tuple[str, str], name: str) -> bool:
    kind, before = where
    return before + name in checkpoint.manifest.tensors[kind]


def _files(checkpoint: store.Reader, parts: dict[str, Part], source: Source) -> set[str]:
    """The files that hold what a rank with these parts reads."""
    optional = set(source.outer.values())  # an outer optimizer has no states before its first step
    return {
        file
        for name, part in parts.items()
        for where in source.all
        if where not in optional or _has(checkpoint, where, name)
        for _, box in boxes(part.keeps)
        for file in checkpoint.files_of(where[0], where[1] + name, box)
    }


def _moment_files(state: State, checkpoint: store.Reader, source: Source) -> set[str]:
    """The files that hold this rank's optimizer states."""
    if source.moments is None:
        return set()
    return {
        file
        for (moment, name), part in _moment_parts(state, checkpoint, source.moments)
        for _, box in boxes(part.keeps)
        for file in checkpoint.files_of("optimizer", f"{source.moments}{moment}.{name}", box)
    }


def _read(checkpoint: store.Reader, where: tuple[str, str], name: str, part: Part) -> Tensor:
    """The part of a tensor that this rank stores."""
    found = [(place, checkpoint.read(where[0], where[1] + name, box)) for place, box in boxes(part.keeps)]
    out = torch.empty(local_shape(part.keeps), dtype=found[0][1].dtype if found else None)
    for place, piece in found:
        out[place] = piece
    return out
