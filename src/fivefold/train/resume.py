"""Reads weights and states into a run, in any layout: a resumed run's from its newest valid checkpoint that fits it, a
new run's from where it starts. Damaged checkpoints are set aside."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from fivefold.checkpoint import keep, store
from fivefold.checkpoint.manifest import DTYPES, MANIFEST, Box, Damaged
from fivefold.checkpoint.source import Elsewhere, Source
from fivefold.comm import all_or_none
from fivefold.data.tokens import Commit
from fivefold.errors import UserError
from fivefold.files import BROKEN
from fivefold.models.card import copied
from fivefold.observe.metrics import last_line
from fivefold.optim.card import COMPENSATION
from fivefold.recipe import sequences_before
from fivefold.sharding.parts import Ranges, boxes, local_shape, whole
from fivefold.step.state import State
from fivefold.step.step import scheduled
from fivefold.train.checked import Meta, assert_same, check_files, damaged_together, meta_of
from fivefold.train.job import FINGERPRINT, STAGES, Initial, Job, identity
from fivefold.train.saver import OUTER, compression, moments_at, weights_at
from fivefold.train.share import STREAMS, streams


def resume(state: State, job: Job) -> list[str] | None:
    """Loads the newest valid checkpoint, but none after the one that the user chose. Returns what there is to say about
    others that were damaged; None if there is no checkpoint yet. All ranks call it.

    A damaged one is set aside, and the one before it is loaded. Raises UserError: the checkpoints cannot be read, all
    are damaged, or the run cannot resume from the newest valid one. On all ranks."""
    run, steps, folders = state.mesh.axis("run"), job.recipe.train.steps or 0, list[Path]()
    with all_or_none(run):
        if run.index == 0:
            with suppress(OSError):  # of a disk that is read-only
                keep.recover(job.out)
    with all_or_none(run):
        folders = store.checkpoints(job.out)[::-1]
        if job.resume_from is not None:
            chosen, paths = job.resume_from.resolve(), [folder.resolve() for folder in folders]
            inside = chosen in paths
            folders = folders[: paths.index(chosen) + 1] if inside else [*folders, job.resume_from]
    assert_same(folders, state.mesh)
    checkpoint, damages = load_newest(state, job, folders)
    if checkpoint is None:
        if not folders:
            return None
        raise UserError(
            f"{job.out} has no valid checkpoint. Start a new run, or put a copy back\n"
            + "\n".join(f"  {text}" for text in damages.values())
        )
    # Streams whose tokens are not in the cache are tokenized from where the checkpoint wants to have them
    with all_or_none(state.mesh.axis("run")), suppress(*BROKEN):  # broken: they begin at the beginning
        for stream, begin in zip(streams(job), checkpoint.meta.get(STREAMS, ()), strict=False):
            stream.begin_at(Commit.of(begin))
    if state.step > steps:
        raise UserError(
            f"train.steps = {steps}, but {checkpoint.folder} is beyond it; set at least {state.step}"
        )
    alarms = []
    for folder, text in damages.items():
        where = ""
        if run.index == 0:
            try:
                where = f", set aside as {keep.set_aside(folder, keep.DAMAGED).name}"
            except OSError as error:
                where = f", which cannot be renamed ({error.strerror})"
        alarms.append(f"{text}. Resumed from step {state.step} instead of {folder.name}{where}")
    return alarms


JUMP = 0.01
"""Change of the last step's rate, of itself, from which the user is told."""


def rate_jump(state: State, job: Job) -> str:
    """A sentence with both rates if the last step would have another one now, as in a run that was made longer; else
    ""."""
    optim, steps, line = job.recipe.optim, job.recipe.train.steps or 0, last_line(job.out) or {}
    if line.get("step") != state.step or state.step == steps or "lr" not in line:
        return ""
    before, now = line["lr"], scheduled(state, optim, steps, ahead=-1)
    if abs(now - before) <= JUMP * max(now, before):
        return ""
    shape = "your schedule" if state.functions.schedule else f'optim.schedule = "{optim.schedule}"'
    return (
        f"the learning rate goes from {before:.2e} to {scheduled(state, optim, steps):.2e}, as {shape} wants it of a "
        f'run of {steps:,} steps. To go on evenly, set optim.schedule = "constant" and optim.lr, or start a new run '
        f"with train.init_from = {job.out}"
    )


def load_newest(state: State, job: Job, folders: list[Path]) -> tuple[store.Reader | None, dict[Path, str]]:
    """Loads the first valid one of these checkpoints, newest first. Returns it (None: all are damaged), and what is
    wrong with those before it. All ranks call it. Raises UserError: the run cannot resume from the first valid one. On
    all ranks."""
    run, damages = state.mesh.axis("run"), dict[Path, str]()
    for folder in folders:
        try:
            with damaged_together(run):
                checkpoint = store.Reader(folder)
                meta = meta_of(checkpoint)
                # Each share of an asynchronous server is an update, and the run may have had some before
                most = meta.step * job.recipe.train.global_batch_size
                if meta.updates > most:
                    wrong = f"meta.updates is {meta.updates}, and step {meta.step} has at most {most}"
                    raise Damaged(f"{folder / MANIFEST} is damaged: {wrong}")
            with all_or_none(run):  # each machine prepares its own data
                assert_identity(job, checkpoint)
            load_checkpoint(state, checkpoint)
        except Damaged as error:
            damages[folder] = str(error)
            continue
        return checkpoint, damages
    return None, damages


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
            mixture, undo = "", "Restore the data"
            if isinstance(then, list) and isinstance(now, list):
                before, after = dict(then), dict(now)
                names = [name for name in before | after if before.get(name) != after.get(name)]
                mixture = f" of data.sources ({', '.join(names) or 'their order'})"
            what = f"the data{mixture} changed since {folder}"
        else:
            what = f"{folder} was trained with {key} = {then!s:.80}, and now it is {now}"
        if then != now:
            raise UserError(f"{what}, so the run cannot resume exactly. {undo}, or start a new run")


class Saved(NamedTuple):
    """The part of a saved tensor that this rank keeps. read_box: reads a box of it. files_of: the checkpoint's files
    that this opens."""

    keeps: Ranges
    read_box: Callable[[Box], Tensor]
    files_of: Callable[[Box], set[str]] = lambda box: set()

    def files(self) -> set[str]:
        return set[str]().union(*(self.files_of(box) for _, box in boxes(self.keeps)))

    def read(self) -> Tensor:
        pieces = [(place, self.read_box(box)) for place, box in boxes(self.keeps)]
        out = torch.empty(local_shape(self.keeps), dtype=pieces[0][1].dtype if pieces else None)
        for place, piece in pieces:
            out[place] = piece
        return out


def _saved(checkpoint: store.Reader, kind: str, name: str, keeps: Ranges) -> Saved:
    return Saved(keeps, partial(checkpoint.read, kind, name), partial(checkpoint.files_of, kind, name))


def _upcycled(source: Source, dense: str, keeps: Ranges) -> Saved:
    """Experts, each a copy of a dense weight."""

    def read(box: Box) -> Tensor:
        one = source.read(dense, box[1:])
        return one.expand(box[0][1] - box[0][0], *one.shape)

    reader = source.reader
    return Saved(keeps, read, lambda box: reader.files_of("model", dense, box[1:]) if reader else set())


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


def _set(state: State, copies: Iterable[tuple[Tensor, Saved]]) -> None:
    """Sets weights, buffers, residuals of compression."""
    for tensor, saved in copies:
        for place, box in boxes(saved.keeps):
            tensor[place].copy_(saved.read_box(box))
        if state.parallel.disk is not None:
            state.parallel.disk.touched(tensor.nbytes)
    for replica in state.parallel.replicas:
        replica.refresh()


def load_initial(
    state: State, initial: Initial, named: Callable[[str], str] = str, keep: bool = True
) -> None:
    """Sets the weights that a run starts from. All ranks call it, and each reads its own part. keep: checkpoints keep
    frozen weights, too. Raises UserError: a file is damaged or cannot be read. On all ranks."""
    run, copies = state.mesh.axis("run"), list[tuple[Tensor, Saved]]()
    with all_or_none(run):
        source = Source(Path(initial.where), Path(initial.checkpoint) if initial.checkpoint else None)
        parts = state.parts()
        wanted = [(name, w, parts[name].keeps) for name, w in state.masters().items()]
        wanted += [(name, buffer, whole(buffer.shape)) for name, buffer in state.buffers().items()]
        known = set(source.names())
        for name, tensor, keeps in wanted:
            if name in initial.new:
                continue
            saved = Saved(keeps, partial(source.read, named(name)))
            if (dense := copied(named(name))) in known and named(name) not in known:
                saved = _upcycled(source, dense, keeps)
            elif source.reader is not None:
                saved = _saved(source.reader, "model", named(name), keeps)
            copies.append((tensor, saved))
    if source.reader is not None:
        check_files(source.reader, set[str]().union(*(saved.files() for _, saved in copies)), run)
    with all_or_none(run):
        _set(state, copies)
    if state.outer is not None:
        for name, weight in state.outer.weights.items():  # the masters are the same in all replica groups
            weight.copy_(state.outer.masters[name])
    if initial.frozen and not keep:
        state.elsewhere = Elsewhere(initial.where, initial.checkpoint, initial.fingerprint, initial.frozen)


def load_checkpoint(state: State, checkpoint: store.Reader) -> None:
    """Sets weights, moments, buffers and counts from a checkpoint of any layout.

    All ranks call it and read their own parts.

    Raises:
        Damaged: a file is damaged. On all ranks, before anything has changed.
        UserError: a name is missing, unknown, or has another shape. On all ranks.
    """
    meta, run = meta_of(checkpoint), state.mesh.axis("run")
    elsewhere = Elsewhere.of(checkpoint.folder, checkpoint.meta)
    with all_or_none(run):
        try:
            copies = _weights(state, checkpoint, meta, elsewhere)
            moments, outer = _states(state, checkpoint, meta)
            parts = [*(saved for _, saved in copies), *moments.values(), *outer.values()]
            needed = set[str]().union(*(saved.files() for saved in parts))
        except (ValueError, KeyError) as error:
            raise UserError(f"{checkpoint.folder} does not fit the recipe: {error}") from None
    check_files(checkpoint, needed, run)
    with all_or_none(run):
        state.elsewhere = elsewhere or state.elsewhere
        state.go_to(meta.step)
        state.set_counts(meta.updates, 0)  # a run that had diverged has all its tries again
        usual = torch.tensor(meta.usual or [0.0] * 6, dtype=torch.float64, device=state.mesh.device)
        state.usual, state.products = usual.view(2, 3), meta.products or state.products
        state.left_out = tuple(zip(meta.left_out[::2], meta.left_out[1::2], strict=True))
        state.noise = (meta.noise[0], meta.noise[1]) if meta.noise else (0.0, 0.0)
        if state.loss_scale is not None and meta.loss_scale is not None:
            state.loss_scale.set(*meta.loss_scale)
        _set(state, copies)
        for replica in state.parallel.replicas:
            if meta.updates:
                replica.updater.load(Lazily(moments), meta.updates, state.step)
            else:
                replica.updater.begin(state.step)
        if state.outer is not None:
            state.outer.aligned = meta.replica_groups.aligned
            state.outer.load({name: saved.read() for name, saved in outer.items()})


def _weights(
    state: State, checkpoint: store.Reader, meta: Meta, elsewhere: Elsewhere | None
) -> list[tuple[Tensor, Saved]]:
    """Weights, buffers and residuals of compression: what is set, and what is read for it. elsewhere: where the weights
    are that the checkpoint lacks.

    Raises:
        UserError: the checkpoint has replica groups with different weights, and another number of them than this run.
        KeyError, ValueError: the checkpoint lacks a tensor, or it has another shape.
    """
    masters, parts, buffers = state.masters(), state.parts(), state.buffers()
    gone, tensors = elsewhere.names if elsewhere else {}, checkpoint.manifest.tensors["model"]
    shapes = {name: part.shape for name, part in parts.items() if name not in gone}
    shapes |= {name: tuple(buffer.shape) for name, buffer in buffers.items()}
    whole_model = len(state.parallel.stages) == 1 and state.mesh.size("pp") == 1
    wrong = sorted(shapes.keys() ^ tensors.keys() if whole_model else shapes.keys() - tensors.keys())
    wrong += [name for name, shape in shapes.items() if name in tensors and tensors[name].shape != shape]
    for name in (name for name in parts if name in tensors):  # whole numbers, or a buffer
        if tensors[name].buffer or not getattr(torch, DTYPES[tensors[name].dtype]).is_floating_point:
            wrong.append(name)
    if wrong:
        raise ValueError(f"these weights do not fit the model: {', '.join(wrong[:5])}")
    replica_group, replica_groups = state.mesh.index("replica_groups"), state.mesh.size("replica_groups")
    if meta.replica_groups.count != replica_groups and not meta.replica_groups.aligned:
        raise UserError(_between(checkpoint.folder, meta, replica_groups))
    kind, prefix = ("model", "") if meta.replica_groups.aligned else ("optimizer", weights_at(replica_group))
    copies = list[tuple[Tensor, Saved]]()
    for name, weight in masters.items():
        if name not in gone:
            copies.append((weight, _saved(checkpoint, kind, prefix + name, parts[name].keeps)))
    if elsewhere is not None:
        source = elsewhere.open()
        for name, there in gone.items():
            if name in masters:
                if source.shape(there) != parts[name].shape or not parts[name].frozen:
                    raise UserError(f"{source.folder}: {there} is not the frozen weight {name} of this run")
                copies.append((masters[name], Saved(parts[name].keeps, partial(source.read, there))))
    copies += [(b, _saved(checkpoint, "model", name, whole(b.shape))) for name, b in buffers.items()]
    if state.outer is not None:
        for name, weight in state.outer.weights.items():
            copies.append((weight, _saved(checkpoint, "model", name, parts[name].keeps)))
    here, there = compression(state).get("compression"), meta.compression and meta.compression.layout
    if here is not None and there == here["layout"]:
        copies += [(t, _saved(checkpoint, "optimizer", n, whole(t.shape))) for n, t in state.unsent().items()]
    elif here is not None:
        of = f"the layout {there}" if there else "a run without compression"
        state.forgotten = f"compression: residuals start from zero, because the checkpoint is of {of}"
    return copies


def _states(state: State, checkpoint: store.Reader, meta: Meta) -> tuple[dict[str, Saved], dict[str, Saved]]:
    """The optimizer's states, and the outer optimizer's. They have none before the first step."""
    tensors, outer = checkpoint.manifest.tensors["optimizer"], state.outer
    # A replica group that joins takes those of another
    prefix = moments_at(state.mesh.index("replica_groups") % meta.replica_groups.count)
    moments = dict[str, Saved]()
    for (moment, name), part in state.moment_parts().items() if meta.updates else ():
        there = f"{prefix}{moment}.{name}"
        if there not in tensors and (joined := there.rpartition(".")[0]) in tensors:
            raise ValueError(
                f"it has one {joined} for several matrices, and now each is updated by itself. Start a new run from "
                "its weights (train.init_from), or resume with the version of Fivefold that wrote it"
            )
        # Without it: of a run with another rounding, so it starts from zero
        if moment != COMPENSATION or there in tensors:
            moments[f"{moment}.{name}"] = _saved(checkpoint, "optimizer", there, part.keeps)
    parts = state.parts()
    common = {
        f"{moment}.{name}": _saved(checkpoint, "optimizer", f"{OUTER}{moment}.{name}", parts[name].keeps)
        for name in (outer.weights if outer else ())
        for moment in (outer.state_names if outer else ())
        if f"{OUTER}{moment}.{name}" in tensors
    }
    return moments, common


def _between(folder: Path, meta: Meta, replica_groups: int) -> str:
    """The message for a checkpoint whose replica groups have different weights."""
    saved, every = meta.replica_groups, meta.replica_groups.every
    near = [n for n in (meta.step // every * every, (meta.step // every + 1) * every) if n]
    where = (
        f"{' or '.join(map(str, near))} (multiples of sync.every = {every})"
        if saved.fragments == 1
        else f"0 or the last, as sync.fragments = {saved.fragments} never synchronise together"
    )
    return (
        f"{folder} lies between outer steps: its {saved.count} replica groups have different weights, so it resumes "
        f"with as many only, and now there are {replica_groups}. Nearest valid: {saved.count} replica groups, or a "
        f"checkpoint of step {where}"
    )
