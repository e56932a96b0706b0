"""The trainer's interface to a set of parameters, independent of how their states are kept.

Three classes implement it: `data.DataParallel` (ZeRO stage 0: everything on every rank), `zero.Sharded` (stages 1 to
3) and `offload.pages.Paged` (stage 0 with gradients, and perhaps weights, in another tier). A step is: start_step,
backward of each microbatch with enable_sync before the last, finish, update.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from fivefold.optim.scaling import Norms, sum_of_squares
from fivefold.optim.updater import Updater
from fivefold.parallel.mesh import Mesh
from fivefold.parallel.offload.pages import Paged
from fivefold.spread.parts import Part


class Kept(Protocol):
    """What checkpoints need of a set of parameters.

    masters: this rank's part of each parameter (`parts[name].keeps`), which the optimizer updates; fp32, unless the
    mode rounds. gradients: with the same names, shapes and dtype, summed over the batch; valid from `finish` to the
    next `start_step`. updater: the optimizer over the masters; it is set last."""

    masters: dict[str, Tensor]
    gradients: dict[str, Tensor]
    parts: dict[str, Part]
    updater: Updater

    def refresh(self) -> None:
        """Updates the working weights after the masters have changed."""
        ...


class Replica(Kept, Protocol):
    """What training needs of them."""

    def start_step(self) -> None:
        """Forgets the gradients of the last step."""
        ...

    def enable_sync(self) -> None:
        """Marks the next backward as the last of the step: reductions may start while it runs."""
        ...

    def collect(self) -> None:
        """Takes gradients that were set outside of the module's backward: a pipeline's deferred weight gradients."""
        ...

    def finish(self) -> None:
        """Waits until all gradients are summed over the ranks that hold the same weights."""
        ...

    def update(self, lr: float, scale: Tensor | None, skip: Tensor) -> None:
        """Runs the optimizer: updates the masters with their gradients times `scale` unless `skip` is 1 (both: fp32
        scalars on the device), and the working weights from them."""
        ...

    def kept(self) -> dict[str, list[Tensor]]:
        """Tensors by category of `trace.memory`. "params": working weights that stay. "buffers": working weights that
        exist only temporarily. "gradients": those not yet summed over ranks. Masters that do not compute are left
        out."""
        ...

    def watch(self, seen: Callable[[Tensor], None], names: set[str]) -> None:
        """Calls `seen` from now on with the gradients of these parameters, one or several at once, before they are
        added up. They are those of a microbatch, or of the rank's share of a step if ranks sum once per step."""
        ...

    def close(self) -> None:
        """Removes its hooks from the module."""
        ...


def gradient_square(replicas: Sequence[Replica], mesh: Mesh) -> Tensor:
    """This rank's share of the squared norm of the gradient, a scalar in fp64: each element counts once, on the rank
    that owns it. Where nothing is divided, every rank has the whole gradient, and its whole norm.

    What a rank has and does not own counts as 0 if it is finite. If not, nor is the sum: the rank would take it into
    its weights."""
    total = torch.zeros((), dtype=torch.float64, device=mesh.device)
    for owned in (True, False):
        mine, found = list[Tensor](), list[Norms]()
        for replica in replicas:
            names = [
                n for n in replica.gradients if (not mesh.layout.divided or replica.parts[n].owned) == owned
            ]
            known = replica.norms() if isinstance(replica, Paged) else None
            if known is None:
                mine += [replica.gradients[name] for name in names]
            else:
                found += [known[name] for name in names]
        if mine or found:
            square = sum_of_squares(mine, mesh.device, found)
            total += square if owned else 0 * square
    return total


def assert_owned_once(replicas: Iterable[Replica], mesh: Mesh, total: int) -> None:
    """Asserts that exactly one rank owns each element of the model: the counts add up to `total`."""
    mine = sum(t.numel() for r in replicas for n, t in r.masters.items() if r.parts[n].owned)
    count = torch.tensor(mine, device=mesh.device)
    mesh.axis("all").all_reduce(count)
    assert count.item() == total, f"{count.item():,} parameters owned, the model has {total:,}"
