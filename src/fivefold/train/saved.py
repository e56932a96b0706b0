"""A rank's part of saving: the pieces of weights and states that it owns, and what a checkpoint says beside them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from fivefold.checkpoint import store, write
from fivefold.checkpoint.source import ELSEWHERE, FROZEN, TOKENIZER
from fivefold.data.mixture import amounts, order_of
from fivefold.data.tokenizer import Tokenizer
from fivefold.files import expanded
from fivefold.parallel.diloco import Outer
from fivefold.schedules.collectives.choose import AUTO
from fivefold.schedules.compression import NONE
from fivefold.sharding.layout_text import to_text
from fivefold.sharding.parts import Part, boxes
from fivefold.sharding.tiers import NOT_OFFLOADED
from fivefold.step.state import State
from fivefold.train.initial import recorded
from fivefold.train.job import Job

OUTER = "outer."  # prefix of the outer optimizer's states
OFFLOADED_SHARD_BYTES = 64 << 20  # a shard is in memory while it is written
FINGERPRINT = "the data's fingerprint"  # a key of `identity`, stored in checkpoints
OWN = ("data", "checkpoint", "observe", "launch", "train.init_from", "layout.offload_dir", "layout.recompute")
"""Sections and fields in which the machines of a run may differ: paths (their contents count), what is kept and shown,
how long ranks wait, and what is computed again, which each site may choose by its own speed."""
STAGES = "data.stages"  # [place at which it begins, weight of each source] of each stage


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
    parts = {name: part for r in state.parallel.replicas for name, part in r.parts.items()}
    masters = state.masters()
    if frozen := [name for name, part in parts.items() if part.frozen]:
        whole[FROZEN] = True
        masters |= {
            name: masters[name].to(state.parallel.computes) for name in frozen
        }  # rows of FSDP2 are fp32
    if state.products is not None:
        whole["products"] = state.products._asdict()
    if state.elsewhere is not None:
        whole[ELSEWHERE] = asdict(state.elsewhere)
    if state.outer is None:
        gone = state.elsewhere.names if state.elsewhere is not None else {}
        kept = {name: w for name, w in masters.items() if name not in gone}
        model, optimizer = owned_pieces(state, kept), moment_pieces(state)
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


def _pieces_of_site(state: State, outer: Outer) -> tuple[list[write.Piece], list[write.Piece]]:
    """What this rank owns of the common weights, and of everything else. The first site writes what all sites have: the
    common weights and the states of the outer optimizer. Every site writes its moments, and its weights if they
    differ."""
    site = state.mesh.index("sites")
    optimizer = moment_pieces(state, moments_at(site))
    if not outer.aligned:
        optimizer += owned_pieces(state, state.masters(), before=weights_at(site))
    if site:
        return [], optimizer
    return owned_pieces(state, outer.weights), optimizer + owned_pieces(
        state, outer.states(), outer.state_names, OUTER
    )


def moments_at(site: int) -> str:
    """The prefix of a site's moments. The first has none, so that a run of one site reads them."""
    return f"site{site}." if site else ""


def weights_at(site: int) -> str:
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


def compression(state: State) -> dict[str, Any]:
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
    first = not any(state.mesh.index(axis) for axis in ("sites", "batch", "tp"))
    return write.whole_pieces(state.buffers(), buffers=True) if first else []


def tokenizer_to_keep(job: Job) -> Tokenizer | None:
    """The tokenizer whose file the run folder keeps. None: there is none, or `data.tokenizer` is that very file, as in
    an imported run."""
    own, named = job.out.absolute() / "tokenizer.json", job.recipe.data.tokenizer
    return job.data.tokenizer if job.data and expanded("data.tokenizer", named).absolute() != own else None


def shared(job: Job) -> dict[str, Any]:
    """What all ranks of a run must have in common, its sites and servers included, by name: the recipe's fields but
    those of `OWN`, and the contents of data and first weights, wherever they lie."""
    found = {
        f"{section}.{key}": value
        for section, fields in job.recipe.model_dump(mode="json").items()
        if section not in OWN
        for key, value in fields.items()
        if f"{section}.{key}" not in OWN
    }
    first = job.initial.fingerprint if job.initial else recorded(job.out)
    return found | {"the first weights": first} | identity(job)


def identity(job: Job) -> dict[str, Any]:
    """Those of the `shared` settings that determine the position in the data and the optimizer's states.

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
        found["data.packing"] = recipe.data.packing
        if (tokenizer := tokenizer_to_keep(job)) is not None:
            found[TOKENIZER] = tokenizer.fingerprint
        if any(
            spec.startswith("tokens:") for spec in recipe.data.specs.values()
        ):  # the fingerprint is the files'
            found["data.val_fraction"] = recipe.data.val_fraction
            if recipe.data.packing == "best_fit":
                found["data.end_token"] = recipe.data.end_token
        if job.data.mixed:
            stages = order_of(recipe, amounts(recipe, job.data)).stages
            found[STAGES] = [[stage.begin, *stage.weights] for stage in stages]
    return found | job.own.identity()
