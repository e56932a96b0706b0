"""Resuming on several ranks: they must see the same checkpoint, and each machine checks each of its files once.

Hashing a file takes as long as reading it, and every rank reads from many files. So the ranks of a machine divide the
files that any of them needs. One rank compares each whole file with the manifest before anything is read. Another
machine may see other bytes, from its own disk or cache, so it checks for itself.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from fivefold.checkpoint import store
from fivefold.checkpoint.manifest import MANIFEST, Damaged
from fivefold.comm import Axis, all_or_none, told
from fivefold.errors import BusyError
from fivefold.host import machine_id
from fivefold.parallel.mesh import Mesh


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
