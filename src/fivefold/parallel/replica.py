"""What the trainer asks of a set of parameters, however their states are kept.

Two things implement it: `data.DataParallel` (ZeRO stage 0: everything on every rank) and `zero.Sharded` (stages 1 to
3). A step is: start_step, backward of each microbatch with arm before the last, finish, the optimizer's step over
`masters`, refresh.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.parallel.mesh import Mesh
from fivefold.sharding import Part


class Replica(Protocol):
    """masters: fp32, this rank's part of each parameter (`parts[name].keeps`), which the optimizer updates.
    gradients: of the same names and shapes, fp32, summed over the batch; they hold after `finish`, until
    `start_step`."""

    masters: dict[str, Tensor]
    gradients: dict[str, Tensor]
    parts: dict[str, Part]

    def start_step(self) -> None:
        """Forgets the gradients of the last step."""
        ...

    def arm(self) -> None:
        """The next backward is the last of the step: reductions may start while it runs."""
        ...

    def collect(self) -> None:
        """Takes gradients that no backward through the module has made: a pipeline's separate weight gradients."""
        ...

    def finish(self) -> None:
        """Until all gradients are summed over the ranks that hold the same weights."""
        ...

    def refresh(self) -> None:
        """The masters have changed: the weights that the module computes with follow."""
        ...

    def kept(self) -> dict[str, list[Tensor]]:
        """What it keeps now besides masters and gradients, as categories of `observe.tracking`: the weights that
        compute, under "params" or where they are there for a while only under "buffers", and "gradients" that are not
        yet summed over ranks."""
        ...

    def watch(self, seen: Callable[[Tensor], None], names: set[str]) -> None:
        """From now on calls `seen` with the gradients of these parameters, or of several at once, before they are
        added up: of a microbatch, or of the rank's share of a step where they are summed over ranks once a step."""
        ...

    def close(self) -> None:
        """Takes its hooks off the module."""
        ...


def clip_(replicas: Iterable[Replica], max_norm: float, mesh: Mesh) -> float:
    """Scales the whole gradient down to max_norm where its norm is larger (0: never). Returns the norm before.

    Each element counts once, on the rank that owns it; the squares are summed over all ranks where states are divided.
    A norm that is not finite leaves the gradient as it is: the caller decides. (Clipping: arXiv 1211.5063.)
    """
    replicas = list(replicas)
    divided = mesh.layout.divided
    owned = [r.gradients[n] for r in replicas for n in r.gradients if not divided or r.parts[n].owned]
    owned = [g for g in owned if g.numel()]
    norms = torch._foreach_norm(owned) if owned else []
    square = torch.stack(norms).double().square().sum() if norms else torch.zeros((), dtype=torch.float64)
    if divided:
        square = square.to(mesh.device)
        dist.all_reduce(square, group=mesh.group("all"))
    norm = square.sqrt().item()
    if 0 < max_norm < norm < float("inf"):
        torch._foreach_mul_([g for r in replicas for g in r.gradients.values()], max_norm / norm)
    return norm


def assert_owned_once(replicas: Iterable[Replica], mesh: Mesh, total: int) -> None:
    """Every element of the model is owned by exactly one rank: the counts add up to `total`."""
    mine = sum(t.numel() for r in replicas for n, t in r.masters.items() if r.parts[n].owned)
    count = torch.tensor(mine, device=mesh.device)
    if mesh.layout.ranks > 1:
        dist.all_reduce(count, group=mesh.group("all"))
    assert count.item() == total, f"{count.item():,} parameters owned, the model has {total:,}"
