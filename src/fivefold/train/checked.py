"""What a checkpoint says besides tensors: counts, averages, where it was made. It and the files are checked, on all
ranks together, before anything is set by them."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
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
from fivefold.kernels.native import Table
from fivefold.parallel.mesh import Mesh


@dataclass(frozen=True)
class Meta:
    """step: optimizer steps. updates: those that changed the weights. noise, usual, left_out, loss_scale: as in
    `step.State`; None: not saved. sites: how many the run has, whether all have the common weights, steps between outer
    steps, fragments. compression: the layout whose residuals are saved. products: which library multiplies; None: not
    saved."""

    step: int
    updates: int
    noise: tuple[float, float] | None
    usual: list[float] | None
    left_out: tuple[tuple[int, int], ...]
    loss_scale: list[float] | None
    sites: int
    aligned: bool
    every: int
    fragments: int
    compression: str | None
    products: Table | None


def meta_of(checkpoint: Reader) -> Meta:
    """Raises Damaged: something is missing, or not of its type or range."""

    def checked(name: str, default: Any, valid: Callable[[Any], bool], must: str) -> Any:
        value = checkpoint.meta.get(name, default)
        if value != default and not valid(value):
            where = f"{checkpoint.folder / MANIFEST} is damaged"
            raise Damaged(f"{where}: meta.{name} must be {must}, not {value!r:.80}")
        return value

    step = checked("step", "missing", lambda value: type(value) is int, "a number")
    if step == "missing":
        raise Damaged(f"{checkpoint.folder / MANIFEST} is damaged: meta.step is missing")
    noise = checked("noise", None, lambda value: _finite(value, 2), "2 finite numbers")
    flat = checked("left_out", [], _pairs, "pairs of whole numbers")
    sites = checked("sites", {}, _sites, "whole numbers >= 1 by name")
    compression = checked("compression", None, _layout, "a layout")
    products = checked("products", None, _products, "a processor and a list of matmuls")
    return Meta(
        step,
        int(checkpoint.meta.get("updates", step)),
        noise and (noise[0], noise[1]),
        checked("usual", None, lambda value: _finite(value, 6), "6 finite numbers"),
        tuple(zip(flat[::2], flat[1::2], strict=True)),
        checked("loss_scale", None, lambda value: _finite(value, 2, 3), "2 finite numbers"),
        sites.get("count", 1),
        bool(sites.get("aligned", True)),
        sites.get("every", 1),
        sites.get("fragments", 1),
        compression and compression["layout"],
        products and Table(**products),
    )


def _finite(value: Any, *counts: int) -> bool:
    numbers = isinstance(value, list) and len(value) in counts
    return numbers and all(type(n) in (int, float) and math.isfinite(n) for n in value)


def _pairs(value: Any) -> bool:
    return isinstance(value, list) and len(value) % 2 == 0 and all(type(n) is int and n >= 0 for n in value)


def _sites(value: Any) -> bool:
    counts = (
        [value.get(name, 1) for name in ("count", "every", "fragments")] if isinstance(value, dict) else []
    )
    return bool(counts) and all(type(n) is int and n >= 1 for n in counts)


def _layout(value: Any) -> bool:
    return isinstance(value, dict) and type(value.get("layout")) is str


def _products(value: Any) -> bool:
    match value:
        case {"processor": str(), "onednn": [*names], **more}:
            return not more and all(type(name) is str for name in names)
    return False


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
    machines = run.all_gather(torch.tensor([machine], device=run.device)).tolist()
    return [index for index, other in enumerate(machines) if other == machine]


def _number(content: bytes) -> int:
    """A hash that fits into an int64, also when negated."""
    return int.from_bytes(hashlib.sha256(content).digest()[:7])
