"""What a checkpoint says besides tensors: counts, averages, where it was made. It and the files are checked, on all
ranks together, before anything is set by them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import torch
from pydantic import AfterValidator, Field, TypeAdapter, ValidationError

from fivefold.checkpoint import store
from fivefold.checkpoint.manifest import MANIFEST, Damaged
from fivefold.checkpoint.store import Reader
from fivefold.comm import Axis, all_or_none, told
from fivefold.errors import BusyError
from fivefold.host import machine_id
from fivefold.kernels.native import Table
from fivefold.parallel.mesh import Mesh

Count = Annotated[int, Field(strict=True, ge=1)]
Whole = Annotated[int, Field(strict=True, ge=0)]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]


@dataclass(frozen=True)
class SavedGroups:
    """count: how many the run has. aligned: all have the common weights. every: steps between outer steps."""

    count: Count = 1
    every: Count = 1
    fragments: Count = 1
    aligned: bool = True


@dataclass(frozen=True)
class SavedCompression:
    """layout: the one whose residuals are saved."""

    layout: str


def _pairs(numbers: list[int]) -> list[int]:
    if len(numbers) % 2:
        raise ValueError("must be pairs of whole numbers")
    return numbers


@dataclass(frozen=True)
class Meta:
    """step: optimizer steps. updates: those that changed the weights. noise, usual, left_out (flat), loss_scale: as in
    `step.State`; None: not saved. products: which library multiplies; None: not saved."""

    step: Whole
    updates: Whole
    noise: Annotated[list[Number], Field(min_length=2, max_length=2)] | None = None
    usual: Annotated[list[Number], Field(min_length=6, max_length=6)] | None = None
    left_out: Annotated[list[Whole], AfterValidator(_pairs)] = field(default_factory=list[Whole])
    loss_scale: Annotated[list[Number], Field(min_length=2, max_length=3)] | None = None
    replica_groups: SavedGroups = SavedGroups()
    compression: SavedCompression | None = None
    products: Table | None = None


_META = TypeAdapter(Meta)


def meta_of(checkpoint: Reader) -> Meta:
    """Raises Damaged: something is missing, or not of its type or range."""
    meta = checkpoint.meta
    try:
        return _META.validate_python({"updates": meta.get("step"), **meta})
    except ValidationError as error:
        wrong = error.errors()[0]
        where = ".".join(map(str, ("meta", *wrong["loc"])))
        raise Damaged(f"{checkpoint.folder / MANIFEST} is damaged: {where:.80}: {wrong['msg']}") from None


def assert_same(folders: list[Path], mesh: Mesh) -> None:
    """Refuses to resume if ranks see different checkpoints: their names, and the manifest of the newest. All ranks
    call it.

    folders: newest first. Raises BusyError: they differ, because the disk is not shared, or hosts see it late."""
    if mesh.size("run") == 1:
        return
    step = store.step_in(folders[0]) if folders else -1
    newest = b""
    with suppress(OSError, IndexError):
        newest = (folders[0] / MANIFEST).read_bytes()
    number = _number(b"\n".join([*(folder.name.encode() for folder in folders), newest]))
    extremes = torch.tensor([step, -step, number, -number], device=mesh.device)
    mesh.axis("run").all_reduce(extremes, "max")
    last, first, high, low = extremes.tolist()
    if last != -first:
        seen = "none" if first == 1 else f"step {-first}"
        raise BusyError(f"ranks see different checkpoints: {seen} to step {last}. Is the disk shared?")
    if high != -low:
        raise BusyError(f"ranks see different checkpoints of step {step}. Is the disk shared?")


def anywhere(flag: bool, axis: Axis) -> bool:
    """True if this is true of any rank of the axis. All of them call it."""
    return bool(axis.all_reduce(torch.tensor(float(flag), device=axis.device), "max"))


@contextmanager
def damaged_together(axis: Axis) -> Iterator[None]:
    """Like `all_or_none`, and damage that one rank finds is damage on all of them. Raises Damaged: on all ranks."""
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
    axis call it. Raises Damaged: a file is missing, truncated or changed. On all ranks."""
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
    machines = run.all_gather(torch.tensor([machine], device=run.device)).tolist()
    return [index for index, other in enumerate(machines) if other == machine]


def _number(content: bytes) -> int:
    """A hash that fits into an int64, also when negated."""
    return int.from_bytes(hashlib.sha256(content).digest()[:7])
