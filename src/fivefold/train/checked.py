"""Resuming on several ranks: they must see the same checkpoint, and check each of its files once on each machine.

A file's hash takes as long as reading it does, and every rank reads from many files. So the ranks of a machine divide
the files that any of them needs; each is compared with the manifest as a whole by one of them, before anything is read.
Another machine may see other bytes, of a disk or a cache of its own: it checks for itself.
"""

from __future__ import annotations

import hashlib

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.checkpoint import store
from fivefold.errors import UserError
from fivefold.host import machine_id
from fivefold.parallel.mesh import Mesh


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


def check_files(checkpoint: store.Reader, needed: set[str], mesh: Mesh) -> None:
    """Checks the files that this rank needs, together with the other ranks of its machine. All ranks call it.

    Raises:
        UserError: a file is missing, truncated or changed. Every rank of the machine raises it.
    """
    group, index, count = _machine(mesh)
    if count == 1:
        return  # the reader checks each file when it opens it
    files = sorted(checkpoint.files)
    wanted = torch.tensor([file in needed for file in files], dtype=torch.int32, device=mesh.device)
    dist.all_reduce(wanted, dist.ReduceOp.MAX, group=group)
    together = [number for number, anybody in enumerate(wanted.tolist()) if anybody]
    damaged, error = -1, None
    for number in together[index::count]:
        try:
            checkpoint.check(files[number])
        except UserError as found:
            damaged, error = number, found
            break
    worst = torch.tensor(damaged, device=mesh.device)
    dist.all_reduce(worst, dist.ReduceOp.MAX, group=group)
    if error is not None:
        raise error
    if worst.item() >= 0:
        checkpoint.check(files[int(worst)])  # says what is wrong with it
        raise UserError(f"{checkpoint.folder / files[int(worst)]} is damaged: another rank read other bytes")
    checkpoint.trust(files[number] for number in together)


def _machine(mesh: Mesh) -> tuple[dist.ProcessGroup | None, int, int]:
    """The ranks of this machine: their group, this one's index in it, their number."""
    if mesh.size("all") == 1:
        return None, 0, 1
    mine = torch.tensor(_number(machine_id()), device=mesh.device)
    every: list[Tensor] = [torch.empty_like(mine) for _ in range(mesh.size("all"))]
    dist.all_gather(every, mine)
    here = [rank for rank, other in enumerate(every) if other == mine]
    group = dist.group.WORLD
    if 1 < len(here) < len(every):
        group = dist.new_group(here, use_local_synchronization=True)
        assert isinstance(group, dist.ProcessGroup)
    return group, here.index(mesh.rank), len(here)


def _number(content: bytes) -> int:
    """A hash that an int64 holds, also when negated."""
    return int.from_bytes(hashlib.sha256(content).digest()[:7])
