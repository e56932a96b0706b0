"""A rank's part of saving and resuming.

It writes the pieces that it owns into a checkpoint, and reads the parts that it stores from one of any layout.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fivefold.checkpoint import store, write
from fivefold.comm import all_or_none
from fivefold.errors import UserError
from fivefold.schedules.compression import NONE
from fivefold.spread.layout import to_text
from fivefold.spread.parts import Part, boxes, local_shape
from fivefold.step.state import State
from fivefold.train.checked import assert_same, check_files, machine_axis
from fivefold.train.job import Job

FINGERPRINT = "the data's fingerprint"  # a key of `identity`, stored in checkpoints


def save_state(state: State, out: Path, meta: dict[str, Any], keep_last: int) -> Path:
    """Writes a checkpoint of the state, with `meta`, into the run folder, and removes those beyond `keep_last`.

    All ranks call it, and each writes its own pieces.
    """
    counts = {"step": state.step, "updates": state.updates, "skipped": state.skipped}
    measured = {"noise": list(state.noise)} if any(state.noise) else {}
    folder = store.folder_of(out, state.step)
    model = [*owned_pieces(state, state.masters()), *buffer_pieces(state)]
    optimizer = [*owned_pieces(state, state.moments()), *write.whole_pieces(state.unsent())]
    whole = counts | measured | _compression(state) | meta
    write.save(folder, model, optimizer, whole, axis=state.mesh.axis("all"))
    if state.mesh.rank == 0:
        store.prune(out, keep_last)
    return folder


def owned_pieces(state: State, tensors: dict[str, Tensor]) -> list[write.Piece]:
    """What this rank owns of tensors that have the shapes of its masters; their names are a parameter's, perhaps with
    "exp_avg." or the like before it."""
    parts = {name: part for r in state.parallel.replicas for name, part in reversed(r.parts.items())}
    prefixes = ("", *(f"{moment}." for moment in moments_of(state)))
    return [
        write.Piece(prefix + name, tensors[prefix + name][where], part.shape, box)
        for name, part in parts.items()
        if part.owned
        for prefix in prefixes
        if prefix + name in tensors
        for where, box in boxes(part.keeps)
    ]


def moments_of(state: State) -> tuple[str, ...]:
    """Names of the optimizer's states, which are the same for all parameters."""
    return next((replica.updater.card.state_names for replica in state.parallel.replicas), ())


def _compression(state: State) -> dict[str, Any]:
    """Where residuals of compression fit: in the same layout. And the number of compressed sums."""
    layout = state.mesh.layout
    if layout.compress == NONE:
        return {}
    same = to_text(replace(layout, recompute="none", microbatches=None, cp_method="ring", sp_regather=False))
    return {"compression": {"layout": same, "steps": state.compressed_steps}}


def buffer_pieces(state: State) -> list[write.Piece]:
    """The buffers that this rank writes. All ranks of a pipeline stage have the same; the first writes them."""
    buffers = {name: b for stage in state.parallel.stages for name, b in stage.named_buffers()}
    first = state.mesh.index("batch") == 0 and state.mesh.index("tp") == 0
    return write.whole_pieces(buffers) if first else []


def resume(state: State, job: Job) -> bool:
    """Loads the latest checkpoint. Returns False if there is none yet. All ranks call it."""
    checkpoint = None
    with all_or_none(state.mesh.axis("all")):
        if store.checkpoints(job.out):
            checkpoint = store.Reader(store.latest(job.out))
    assert_same(checkpoint, state.mesh)
    if checkpoint is None:
        return False
    folder, meta, steps = checkpoint.folder, checkpoint.meta, job.recipe.train.steps or 0
    with all_or_none(state.mesh.axis("all")):  # each machine prepares its own data
        for key, now in identity(job).items():
            if key in meta and meta[key] != now:
                if key == FINGERPRINT:
                    raise UserError(
                        f"the data changed since {folder}, so the run cannot resume exactly. Restore the data, or "
                        "start a new run"
                    )
                raise UserError(
                    f"{folder} was trained with {key} = {meta[key]}, and now it is {now}, so the run cannot resume "
                    "exactly. Undo the change, or start a new run"
                )
    load_checkpoint(state, checkpoint)
    if state.step > steps:
        raise UserError(f"train.steps = {steps}, but {folder} is beyond it; set at least {state.step}")
    return True


def identity(job: Job) -> dict[str, Any]:
    """Settings that determine the position in the data and the optimizer's states.

    A run cannot resume exactly if one of them has changed.
    """
    recipe = job.recipe
    found: dict[str, Any] = {
        "model.seq_len": recipe.model.seq_len,
        "train.global_batch_size": recipe.train.global_batch_size,
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
        UserError: a name is missing, unknown, or has another shape; a file is damaged. On all ranks.
    """
    parts = {name: part for r in state.parallel.replicas for name, part in r.parts.items()}
    buffers = {name: b for stage in state.parallel.stages for name, b in stage.named_buffers()}
    masters, meta = state.masters(), checkpoint.meta
    with all_or_none(state.mesh.axis("all")):
        try:
            _fits(state, checkpoint, parts, buffers)
            moments = moments_of(state) if int(meta.get("updates", meta["step"])) else ()
            needed = _files(checkpoint, {name: parts[name] for name in masters}, moments)
            needed.update(*(checkpoint.files_of("model", name) for name in buffers))
            unsent = _unsent(state, checkpoint)
            needed.update(*(checkpoint.files_of("optimizer", name) for name in unsent))
        except (ValueError, KeyError) as error:
            raise UserError(f"{checkpoint.folder} does not fit the recipe: {error}") from None
    here = machine_axis(state.mesh)
    with all_or_none(state.mesh.axis("all")):
        check_files(checkpoint, needed, here)
    with all_or_none(state.mesh.axis("all")):
        _load(state, checkpoint, parts, buffers, moments)
        for name, tensor in unsent.items():
            tensor.copy_(checkpoint.read("optimizer", name))
        if unsent:
            state.compressed_steps = int(meta["compression"]["steps"])


def _fits(state: State, checkpoint: store.Reader, parts: dict[str, Part], buffers: dict[str, Tensor]) -> None:
    """Raises ValueError if names or shapes are not the model's."""
    shapes = {name: part.shape for name, part in parts.items()} | {
        n: tuple(b.shape) for n, b in buffers.items()
    }
    saved = set(checkpoint.names("model"))
    whole_model = len(state.parallel.stages) == 1 and state.mesh.size("pp") == 1
    wrong = sorted(set(shapes) - saved | (saved - set(shapes) if whole_model else set()))
    wrong += [name for name in shapes if name in saved and checkpoint.shape("model", name) != shapes[name]]
    if wrong:
        raise ValueError(f"these weights do not fit the model: {', '.join(wrong[:5])}")


def _unsent(state: State, checkpoint: store.Reader) -> dict[str, Tensor]:
    """The tensors of compression that the checkpoint has. In another layout residuals start from zero."""
    here, saved = _compression(state).get("compression"), checkpoint.meta.get("compression")
    if here is None:
        return {}
    if saved is None or saved["layout"] != here["layout"]:
        of = f"the layout {saved['layout']}" if saved else "a run without compression"
        state.forgotten = f"compression: residuals start from zero, because the checkpoint is of {of}"
        return {}
    return state.unsent()


def _load(
    state: State,
    checkpoint: store.Reader,
    parts: dict[str, Part],
    buffers: dict[str, Tensor],
    moments: Iterable[str],
) -> None:
    masters, meta = state.masters(), checkpoint.meta
    state.step, updates = int(meta["step"]), int(meta.get("updates", meta["step"]))
    state.set_counts(updates, int(meta.get("skipped", 0)))
    gradient, trace = meta.get("noise", (0.0, 0.0))  # older checkpoints have none
    state.noise = float(gradient), float(trace)
    for name, weight in masters.items():
        weight.copy_(_read(checkpoint, "model", name, parts[name]))
    for name, buffer in buffers.items():
        buffer.copy_(checkpoint.read("model", name))
    for replica in state.parallel.replicas:
        replica.refresh()
    if moments:
        found = {
            f"{moment}.{name}": _read(checkpoint, "optimizer", f"{moment}.{name}", parts[name])
            for name in masters
            for moment in moments
        }
        for replica in state.parallel.replicas:
            replica.updater.load(found, updates)


def _files(checkpoint: store.Reader, parts: dict[str, Part], moments: Iterable[str]) -> set[str]:
    """The files that hold these parts of weights and moments."""
    return {
        file
        for name, part in parts.items()
        for kind, key in (("model", name), *(("optimizer", f"{moment}.{name}") for moment in moments))
        for _, box in boxes(part.keeps)
        for file in checkpoint.files_of(kind, key, box)
    }


def _read(checkpoint: store.Reader, kind: str, name: str, part: Part) -> Tensor:
    """The part of a tensor that this rank stores."""
    out = torch.empty(local_shape(part.keeps))
    for where, box in boxes(part.keeps):
        out[where] = checkpoint.read(kind, name, box)
    return out
