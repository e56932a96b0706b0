"""Resuming on several ranks: they must see the same checkpoint, and each machine checks each of its files once.

Hashing a file takes as long as reading it, and every rank reads from many files. So the ranks of a machine divide the
files that any of them needs. One rank compares each whole file with the manifest before anything is read. Another
machine may see other bytes, from its own disk or cache, so it checks for itself.
"""

from __future__ import annotations

import hashlib

import torch

from fivefold.checkpoint import store
from fivefold.comm import Axis
from fivefold.errors import UserError
from fivefold.host import machine_id
from fivefold.parallel.mesh import Mesh


def assert_same(checkpoint: store.Reader | None, mesh: Mesh) -> None:
    """Refuses to resume if ranks see different checkpoints. None: this rank sees none. All ranks call it.

    Raises:
        UserError: they differ, for example because the disk is not shared.
    """
    if mesh.size("run") == 1:
        return
    step = -1 if checkpoint is None else int(checkpoint.meta.get("step", 0))
    number = 0 if checkpoint is None else _number((checkpoint.folder / store.MANIFEST).read_bytes())
    extremes = torch.tensor([step, -step, number, -number], device=mesh.device)
    mesh.axis("run").all_reduce(extremes, "max")
    last, first, high, low = extremes.tolist()
    if last != -first:
        seen = "none" if first == 1 else f"step {-first}"
        raise UserError(f"ranks see different checkpoints: {seen} to step {last}. Is the disk shared?")
    if high != -low:
        raise UserError(f"ranks see different checkpoints of step {step}. Is the disk shared?")


def check_files(checkpoint: store.Reader, needed: set[str], here: Axis) -> None:
    """Checks this rank's share of the files that any rank of its machine needs. All these ranks call it, and read only
    if none has found damage (`comm.all_or_none`).

    Raises:
        UserError: a file is missing, truncated or changed.
    """
    if here.size == 1:
        return  # the reader checks each file when it opens it
    files = sorted(checkpoint.files)
    wanted = torch.tensor([file in needed for file in files], dtype=torch.int32, device=here.device)
    here.all_reduce(wanted, "max")
    shared = [number for number, anybody in enumerate(wanted.tolist()) if anybody]
    for number in shared[here.index :: here.size]:
        checkpoint.check(files[number])
    checkpoint.trust(files[number] for number in shared)


def machine_axis(mesh: Mesh) -> Axis:
    """The axis of the ranks on this rank's machine. All ranks call it."""
    mine = torch.tensor([_number(machine_id())], device=mesh.device)
    every = mesh.axis("run").all_gather(mine).tolist()
    machines = [[rank for rank, other in enumerate(every) if other == one] for one in dict.fromkeys(every)]
    return mesh.new_axes("machine", machines)


def _number(content: bytes) -> int:
    """A hash that fits into an int64, also when negated."""
    return int.from_bytes(hashlib.sha256(content).digest()[:7])
