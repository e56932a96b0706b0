"""What a checkpoint says besides tensors: counts, averages, where it was made. It and the files are checked, on all
ranks together, before anything is set by them."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fivefold.checkpoint import store
from fivefold.checkpoint.manifest import MANIFEST, Damaged
from fivefold.checkpoint.store import Reader
from fivefold.comm import Axis, all_or_none, told
from fivefold.errors import BusyError
from fivefold.host import machine_id
from fivefold.kernels.fastest import Table
from fivefold.parallel.mesh import Mesh


@dataclass(frozen=True)
class Meta:
    """step: optimizer steps. updates: those that changed the weights. skipped: the last ones in a row that did not.
    noise, usual, left_out, loss_scale: as in `step.State`; None: not saved. sites: how many the run has, whether all
    have the common weights, steps between outer steps, fragments. compression: the layout whose residuals are saved.
    products: which library multiplies; None: not saved."""

    step: int
    updates: int
    skipped: int
    noise: tuple[float, ...] | None
    usual: tuple[float, ...] | None
    left_out: tuple[tuple[int, int], ...]
    loss_scale: tuple[float, ...] | None
    sites: int
    aligned: bool
    every: int
    fragments: int
    compression: str | None
    products: Table | None


def meta_of(checkpoint: Reader) -> Meta:
    """Raises Damaged: something is missing, or not of its type or range."""
    meta, where = checkpoint.meta, checkpoint.folder / MANIFEST
    if "step" not in meta:
        raise Damaged(f"{where} is damaged: meta.step is missing")
    step = int(meta["step"])
    sites = meta.get("sites", {})
    if not isinstance(sites, dict):
        raise Damaged(f"{where} is damaged: meta.sites is not an object")
    compression = meta.get("compression")
    layout = compression.get("layout") if isinstance(compression, dict) else compression
    if layout is not None and not isinstance(layout, str):
        raise Damaged(f"{where} is damaged: meta.compression is not a layout")
    return Meta(
        step,
        int(meta.get("updates", step)),
        int(meta.get("skipped", 0)),
        _numbers(where, meta, "noise", 2),
        _numbers(where, meta, "usual", 6),
        _left_out(where, meta),
        _numbers(where, meta, "loss_scale", 2, 3),
        _whole(where, sites, "count", 1),
        bool(sites.get("aligned", True)),
        _whole(where, sites, "every", 1),
        _whole(where, sites, "fragments", 1),
        layout,
        _products(where, meta),
    )


def _products(where: Path, found: Mapping[str, Any]) -> Table | None:
    match found.get("products"):
        case None:
            return None
        case {"processor": str(processor), "onednn": [*names]} if all(type(name) is str for name in names):
            return Table(processor, names)
    raise Damaged(f"{where} is damaged: meta.products must name a processor and a list of matmuls")


def _whole(where: Path, found: Mapping[str, Any], name: str, default: int) -> int:
    value = found.get(name, default)
    if type(value) is not int or value < 1:
        raise Damaged(f"{where} is damaged: {name} must be a whole number >= 1, not {value!r:.40}")
    return value


def _left_out(where: Path, found: Mapping[str, Any]) -> tuple[tuple[int, int], ...]:
    flat = found.get("left_out", [])
    if not isinstance(flat, list) or len(flat) % 2 or not all(type(n) is int and n >= 0 for n in flat):
        raise Damaged(f"{where} is damaged: left_out must be pairs of whole numbers, not {flat!r:.80}")
    return tuple(zip(flat[::2], flat[1::2], strict=True))


def _numbers(where: Path, found: Mapping[str, Any], name: str, *counts: int) -> tuple[float, ...] | None:
    values = found.get(name)
    if values is None:
        return None
    known = isinstance(values, list) and len(values) in counts
    if not known or not all(type(n) in (int, float) and math.isfinite(n) for n in values):
        raise Damaged(f"{where} is damaged: {name} must be {counts[0]} finite numbers, not {values!r:.80}")
    return tuple(map(float, values))


def assert_same(folders: list[Path], mesh: Mesh) -> None:
    """Refuses to resume if ranks see different checkpoints: their names, and the manifest of the newest. All ranks
    call it.

    folders: newest first.

    Raises:
        BusyError: they differ, because the disk is not shared, or hosts see it late.
    """
    if mesh.size("run") == 1:
        return
    step = store.step_in(folders[0]) if folders else -1
    number = _number(b"\n".join([*(folder.name.encode() for folder in folders), *map(_content, folders[:1])]))
    extremes = torch.tensor([step, -step, number, -number], device=mesh.device)
    mesh.axis("run").all_reduce(extremes, "max")
    last, first, high, low = extremes.tolist()
    if last != -first:
        seen = "none" if first == 1 else f"step {-first}"
        raise BusyError(f"ranks see different checkpoints: {seen} to step {last}. Is the disk shared?")
    if high != -low:
        raise BusyError(f"ranks see different checkpoints of step {step}. Is the disk shared?")


def _content(folder: Path) -> bytes:
    try:
        return (folder / MANIFEST).read_bytes()
    except OSError:
        return b""


@contextmanager
def damaged_together(axis: Axis) -> Iterator[None]:
    """Like `all_or_none`, and damage that one rank finds is damage on all of them.

    Raises:
        Damaged: on all ranks.
    """
    said = ""
    with all_or_none(axis):
        try:
            yield
        except Damaged as error:
            said = str(error)
    finder = int(axis.all_reduce(torch.tensor(axis.index if said else -1, device=axis.device), "max"))
    if finder >= 0:
        raise Damaged(told(said or "-", finder, axis))


def check_files(checkpoint: store.Reader, needed: set[str], run: Axis) -> None:
    """Checks this rank's share of the files that any rank of its machine needs, in several threads. All ranks of the
    axis call it.

    Raises:
        Damaged: a file is missing, truncated or changed. On all ranks.
    """
    with all_or_none(run):
        files = sorted(checkpoint.files)
        wanted = torch.tensor([file in needed for file in files], dtype=torch.uint8, device=run.device)
    here = _on_this_machine(run)
    by_rank = run.all_gather(wanted[None])  # (ranks, files)
    shared = by_rank[here].any(0).nonzero().view(-1).tolist()
    with damaged_together(run):
        mine = [files[number] for number in shared[here.index(run.index) :: len(here)]]
        checkpoint.check(*mine, threads=store.threads(len(here)))
    checkpoint.trust(files[number] for number in shared)


def _on_this_machine(run: Axis) -> list[int]:
    """The indices of the ranks on this rank's machine. Without a group of their own: parameter servers resume while
    workers do something else, and torch wants all ranks of a launch for new groups."""
    machine = _number(machine_id())
    every = run.all_gather(torch.tensor([machine], device=run.device)).tolist()
    return [index for index, other in enumerate(every) if other == machine]


def _number(content: bytes) -> int:
    """A hash that fits into an int64, also when negated."""
    return int.from_bytes(hashlib.sha256(content).digest()[:7])
