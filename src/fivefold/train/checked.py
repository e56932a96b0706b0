"""Resuming on several ranks: they must see the same checkpoint, and check each of its files once on each machine.

A file's hash takes as long as reading it does, and every rank reads from many files. So the ranks of a machine divide
the files that any of them needs; each is compared with the manifest as a whole by one of them, before anything is read.
Another machine may see other bytes, of a disk or a cache of its own: it checks for itself.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.checkpoint import store
from fivefold.errors import UserError
from fivefold.host import machine_id
from fivefold.parallel.mesh import Mesh


@contextmanager
def together(mesh: Mesh) -> Iterator[None]:
    """What one rank cannot do, none goes on with: an error inside is one on every rank. Else the others would wait for
    it in their next collective until that fails, where nobody stops them (as under Slurm). Nothing inside may need all
    ranks. All ranks call it.

    Raises:
        UserError: an error of this or another rank; of what this one did not expect, its own.
    """
    error = None
    try:
        yield
    except Exception as found:  # also what nobody thought of: the others wait
        error = found
    if mesh.size("all") > 1:
        failed = torch.tensor(-1 if error is None else mesh.rank, device=mesh.device)
        dist.all_reduce(failed, dist.ReduceOp.MAX)
        if failed.item() >= 0:
            text = str(error) if isinstance(error, UserError) else f"rank {mesh.rank}: {error!r}"
            told = UserError(_told(text, int(failed), mesh))
            raise error if error is not None and not isinstance(error, UserError) else told
    if error is not None:
        raise error


def _told(text: str, rank: int, mesh: Mesh) -> str:
    """The text of one rank, on all."""
    mine = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).to(mesh.device)
    length = torch.tensor(len(mine), device=mesh.device)
    dist.broadcast(length, rank)
    content = mine if mesh.rank == rank else torch.empty(int(length), dtype=torch.uint8, device=mesh.device)
    dist.broadcast(content, rank)
    return bytes(content.tolist()).decode()


def assert_same(checkpoint: store.Reader | None, mesh: Mesh) -> None:
    """Refuses to go on where ranks see different checkpoints; None: this one sees none. All ranks call it.

    Raises:
        UserError: they do, as on disks that are not shared.
    """
    if mesh.size("all") == 1:
        return
    step = -1 if checkpoint is None else int(checkpoint.meta.get("step", 0))
    number = 0 if checkpoint is None else _number((checkpoint.folder / store.MANIFEST).read_bytes())
    extremes = torch.tensor([step, -step, number, -number], device=mesh.device)
    dist.all_reduce(extremes, dist.ReduceOp.MAX)
    last, first, high, low = extremes.tolist()
    if last != -first:
        seen = "none" if first == 1 else f"step {-first}"
        raise UserError(f"ranks see different checkpoints: {seen} to step {last}. Is the disk shared?")
    if high != -low:
        raise UserError(f"ranks see different checkpoints of step {step}. Is the disk shared?")


@dataclass(frozen=True)
class Machine:
    """The ranks of one machine: their group, this one's index in it, their number."""

    group: dist.ProcessGroup | None = None
    index: int = 0
    count: int = 1


def check_files(checkpoint: store.Reader, needed: set[str], here: Machine, device: torch.device) -> None:
    """Checks this rank's share of the files that any rank of its machine needs. All of these call it, and read only if
    no other has found damage (`together`).

    Raises:
        UserError: a file is missing, truncated or changed.
    """
    if here.count == 1:
        return  # the reader checks each file when it opens it
    files = sorted(checkpoint.files)
    wanted = torch.tensor([file in needed for file in files], dtype=torch.int32, device=device)
    dist.all_reduce(wanted, dist.ReduceOp.MAX, group=here.group)
    shared = [number for number, anybody in enumerate(wanted.tolist()) if anybody]
    for number in shared[here.index :: here.count]:
        checkpoint.check(files[number])
    checkpoint.trust(files[number] for number in shared)


def machine(mesh: Mesh) -> Machine:
    """This rank's. All ranks call it."""
    if mesh.size("all") == 1:
        return Machine()
    mine = torch.tensor(_number(machine_id()), device=mesh.device)
    every: list[Tensor] = [torch.empty_like(mine) for _ in range(mesh.size("all"))]
    dist.all_gather(every, mine)
    here = [rank for rank, other in enumerate(every) if other == mine]
    group = dist.group.WORLD
    if 1 < len(here) < len(every):
        group = dist.new_group(here, use_local_synchronization=True)
        assert isinstance(group, dist.ProcessGroup)
    return Machine(group, here.index(mesh.rank), len(here))


def _number(content: bytes) -> int:
    """A hash that an int64 holds, also when negated."""
    return int.from_bytes(hashlib.sha256(content).digest()[:7])
