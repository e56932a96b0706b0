"""A rank's part of saving and resuming.

It writes the pieces that it owns into a checkpoint, and reads the parts that it stores from one of any layout.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fivefold.checkpoint import keep, store, write
from fivefold.checkpoint.manifest import DTYPES, Damaged
from fivefold.comm import all_or_none
from fivefold.errors import UserError
from fivefold.optim.card import COMPENSATION
from fivefold.parallel.outer import Outer
from fivefold.schedules.collectives.choose import AUTO
from fivefold.schedules.compression import NONE
from fivefold.spread.layout import to_text
from fivefold.spread.parts import Part, boxes, local_shape
from fivefold.spread.tiers import NOT_OFFLOADED
from fivefold.step.judge import NORM
from fivefold.step.state import State
from fivefold.train.checked import assert_same, check_files, damaged_together, machine_axis
from fivefold.train.job import Job
from fivefold.train.meta import Meta, meta_of

OUTER = "outer."  # prefix of the outer optimizer's states
OFFLOADED_SHARD_BYTES = 64 << 20  # a shard is in memory while it is written
FINGERPRINT = "the data's fingerprint"  # a key of `identity`, stored in checkpoints


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
    whole = {**counts, **measured, **_compression(state), **meta}
    if state.outer is None:
        model, optimizer = owned_pieces(state, state.masters()), moment_pieces(state)
    else:
        model, optimizer = _pieces_of_site(state, state.outer)
        whole["sites"] = {
            "count": state.mesh.size("sites"),  # a site that is a launch of its own saves for itself
            "every": state.outer.sites.every,
            "fragments": state.outer.sites.fragments,
            "aligned": state.outer.aligned,
        }
    optimizer += _copies(write.whole_pieces(state.unsent()))
    shard = write.MAX_SHARD_BYTES if state.parallel.disk is None else OFFLOADED_SHARD_BYTES
    pieces = {"model": [*model, *_copies(buffer_pieces(state))], "optimizer": optimizer}
    folder = store.folder_of(out, state.step)
    return write.Writing(folder, pieces, whole, state.mesh.axis("run"), shard)


def _copies(pieces: list[write.Piece]) -> list[write.Piece]:
    return [replace(piece, tensor=piece.tensor.detach().clone()) for piece in pieces]


def prune(job: Job) -> None:
    """Removes checkpoints that the recipe does not keep."""
    keep.prune(job.out, job.recipe.checkpoint.keep_last, job.recipe.checkpoint.keep_every)


def _pieces_of_site(state: State, outer: Outer) -> tuple[list[write.Piece], list[write.Piece]]:
    """What this rank owns of the common weights, and of everything else. The first site writes what all sites have: the
    common weights and the states of the outer optimizer. Every site writes its moments, and its weights if they
    differ."""
    site = state.mesh.index("sites")
    optimizer = moment_pieces(state, _moments_at(site))
    if not outer.aligned:
        optimizer += owned_pieces(state, state.masters(), before=_weights_at(site))
    if site:
        return [], optimizer
    return owned_pieces(state, outer.weights), optimizer + owned_pieces(
        state, outer.states(), outer.state_names, OUTER
    )


def _moments_at(site: int) -> str:
    """The prefix of a site's moments. The first has none, so that a run of one site reads them."""
    return f"site{site}." if site else ""


def _weights_at(site: int) -> str:
    return f"site{site}.weight."


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


def _compression(state: State) -> dict[str, Any]:
    """Where residuals of compression fit: in the same layout."""
    layout = state.mesh.layout
    if layout.compress == NONE:
        return {}
    idle = {
        "recompute": "none",
        "offload": NOT_OFFLOADED,
        "offload_dir": "",
        "microbatches": None,
        "cp_method": "ring",
        "sp_regather": False,
        "expert_chunks": 1,
        "all_reduce": AUTO,
        "compress_after": None,
    }
    same, sites = to_text(replace(layout, **idle)), state.mesh.size("sites")
    where = f"{same} in {sites} sites" if sites > 1 else same
    return {"compression": {"layout": where}}


def buffer_pieces(state: State) -> list[write.Piece]:
    """The buffers that this rank writes. All ranks of a pipeline stage have the same; the first writes them."""
    buffers = {name: b for stage in state.parallel.stages for name, b in stage.named_buffers()}
    first = not any(state.mesh.index(axis) for axis in ("sites", "batch", "tp"))
    return write.whole_pieces(buffers) if first else []


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


def identity(job: Job) -> dict[str, Any]:
    """Settings that determine the position in the data and the optimizer's states.

    A run cannot resume exactly if one of them has changed.
    """
    recipe = job.recipe
    found: dict[str, Any] = {
        "model.seq_len": recipe.model.seq_len,
        "train.global_batch_size": recipe.train.global_batch_size,
        "train.batch_ramp": recipe.train.batch_ramp,
        "train.seed": recipe.train.seed,
        "optim.name": recipe.optim.name,
    }
    if job.data is not None:
        found[FINGERPRINT] = job.data.info.get("fingerprint")
    return found


def load_checkpoint(state: State, checkpoint: store.Reader) -> None:
    """Sets weights, moments, buffers and counts from a checkpoint of any layout.

    All ranks call it and read their own parts.

    Raises:
        Damaged: a file is damaged. On all ranks, before anything has changed.
        UserError: a name is missing, unknown, or has another shape. On all ranks.
    """
    meta = meta_of(checkpoint)
    parts = {name: part for r in state.parallel.replicas for name, part in r.parts.items()}
    buffers = {name: b for stage in state.parallel.stages for name, b in stage.named_buffers()}
    masters = state.masters()
    with all_or_none(state.mesh.axis("run")):
        try:
            _fits(state, checkpoint, parts, buffers)
            source = _source(state, checkpoint.folder, meta)
            needed = _files(checkpoint, {name: parts[name] for name in masters}, source)
            needed |= _moment_files(state, checkpoint, source)
            needed.update(*(checkpoint.files_of("model", name) for name in buffers))
            unsent = _unsent(state, meta)
            whole = {name: store.all_of(tensor.shape) for name, tensor in unsent.items()}
            needed.update(*(checkpoint.files_of("optimizer", name, box) for name, box in whole.items()))
        except (ValueError, KeyError) as error:
            raise UserError(f"{checkpoint.folder} does not fit the recipe: {error}") from None
    here = machine_axis(state.mesh)
    check_files(checkpoint, needed, here, state.mesh.axis("run"))
    with all_or_none(state.mesh.axis("run")):
        _load(state, checkpoint, meta, parts, buffers, source)
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
    before = _moments_at(site % meta.sites)  # a site that joins takes the moments of another
    return Source(
        ("model", "") if meta.aligned else ("optimizer", _weights_at(site)),
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


def _fits(state: State, checkpoint: store.Reader, parts: dict[str, Part], buffers: dict[str, Tensor]) -> None:
    """Raises ValueError if names or shapes are not the model's."""
    shapes = {name: part.shape for name, part in parts.items()} | {
        n: tuple(b.shape) for n, b in buffers.items()
    }
    saved = set(checkpoint.names("model"))
    whole_model = len(state.parallel.stages) == 1 and state.mesh.size("pp") == 1
    wrong = sorted(set(shapes) - saved | (saved - set(shapes) if whole_model else set()))
    wrong += [name for name in shapes if name in saved and checkpoint.shape("model", name) != shapes[name]]
    wrong += [name for name in parts if name in saved and not _real(checkpoint, "model", name)]
    if wrong:
        raise ValueError(f"these weights do not fit the model: {', '.join(wrong[:5])}")


def _real(checkpoint: store.Reader, kind: str, name: str) -> bool:
    """False for a tensor of whole numbers. Formats before 3 do not say."""
    dtype = checkpoint.manifest.tensors[kind][name].dtype
    return dtype is None or getattr(torch, DTYPES[dtype]).is_floating_point


def _unsent(state: State, meta: Meta) -> dict[str, Tensor]:
    """The tensors of compression that the checkpoint has. In another layout residuals start from zero."""
    here, saved = _compression(state).get("compression"), meta.compression
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
) -> None:
    masters, disk = state.masters(), state.parallel.disk
    state.go_to(meta.step)
    state.set_counts(meta.updates, 0)  # a run that had diverged has all its tries again
    usual = torch.tensor(meta.usual or (0.0,) * 6, dtype=torch.float64, device=state.mesh.device)
    state.usual = usual.view(2, 3)
    if meta.usual is None and meta.norms is not None:  # of an older version
        state.usual[NORM].copy_(torch.tensor(meta.norms, dtype=torch.float64))
    state.left_out = meta.left_out
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
