"""The trainer's interface to a set of parameters, independent of how their states are kept.

Implemented by `data.DataParallel` (ZeRO stage 0: everything on every rank), `zero.Sharded` (stages 1 to 3),
`offload.pages.Paged` (stage 0 with gradients, and perhaps weights, in another tier), `server.Shard` (a parameter
server's) and `Frozen`. A step is: start_step, backward of each microbatch with enable_sync before the last, finish,
update.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from fivefold.comm.compress import CompressedSum
from fivefold.optim.scaling import Norms, sum_of_squares
from fivefold.optim.updater import Updater
from fivefold.parallel.mesh import Mesh
from fivefold.sharding.matrices import Exchange, Hop, Route, exchanges, placed
from fivefold.sharding.parts import Part, local_shape, size_of


class Replica:
    """What training and checkpoints need of a set of parameters. A method that a class leaves out does nothing.

    masters: this rank's part of each parameter (`parts[name].keeps`), which the optimizer updates; fp32, unless the
    mode rounds. gradients: with the same names, shapes and dtype, summed over the batch; valid from `finish` to the
    next `start_step`. updater: the optimizer over the masters; it is set last. working: the weights that compute,
    where they are a copy which the update may write: replicas of stage 0 have it. compressed: the compressed sums.
    idle: parameters of pipeline stages without a microbatch in this step. conditional: True for a user's own module, of
    which a step may leave out parts."""

    masters: dict[str, Tensor]
    gradients: dict[str, Tensor]
    parts: dict[str, Part]
    updater: Updater
    working: dict[str, Tensor] | None = None
    compressed: Sequence[CompressedSum] = ()
    idle: frozenset[str] = frozenset()
    conditional = False

    def start_step(self) -> None:
        """Forgets the gradients of the last step."""

    def enable_sync(self) -> None:
        """Marks the next backward as the last of the step: reductions may start while it runs."""

    def collect(self) -> None:
        """Takes gradients that were set outside of the module's backward: a pipeline's deferred weight gradients."""

    def finish(self) -> None:
        """Waits until all gradients are summed over the ranks that hold the same weights."""

    def allow_zeros(self, names: Iterable[str]) -> None:
        """Called before gradients that no backward of this step has set count as zeros. Raises RuntimeError: one must
        be there. With zeros instead, the model would learn something else, and nobody would see it."""
        if lost := [] if self.conditional else sorted(set(names) - self.idle):
            what = f"{lost[0]} and {len(lost) - 1} more" if lost[1:] else lost[0]
            raise RuntimeError(f"{what}: no gradient in this step, though the stage ran microbatches")

    def update(self, lr: float, scale: Tensor | None, skip: Tensor) -> None:
        """Runs the optimizer: updates the masters with their gradients times `scale` unless `skip` is 1 (both: fp32
        scalars on the device), and the working weights from them."""

    def refresh(self) -> None:
        """Updates the working weights after the masters have changed."""

    def kept(self) -> dict[str, list[Tensor]]:
        """Tensors by category of `trace.memory`. "params": working weights that stay. "buffers": working weights that
        exist only temporarily. "gradients": those not yet summed over ranks. Masters that do not compute are left
        out."""
        return {}

    def norms(self) -> Mapping[str, Norms] | None:
        """Of gradients, if they are known without reading them."""
        return None

    def unsent(self) -> dict[str, Tensor]:
        """What compression keeps from step to step, by a name; empty without it. Checkpoints store it."""
        return {
            f"{number}.{name}": tensor
            for number, one in enumerate(self.compressed)
            for name, tensor in one.state().items()
        }

    def errors(self) -> dict[str, float]:
        """What compression left out in the last step, by parameter (`CompressedSum.errors`); empty without it."""
        return {}

    def watch(self, seen: Callable[[Tensor], None], names: set[str]) -> None:
        """Calls `seen` from now on with the gradients of these parameters, one or several at once, before they are
        added up. They are those of a microbatch, or of the rank's share of a step if ranks sum once per step."""

    def close(self) -> None:
        """Removes its hooks from the module."""


class Hooked(Replica):
    """A replica that takes each gradient from its parameter as soon as backward has it, and frees it. names, params: in
    the same order; a subclass calls `hook` once it can add gradients."""

    names: list[str]
    params: list[nn.Parameter]
    _seen: Callable[[int, Tensor], None] | None = None

    def hook(self) -> None:
        numbered = list(enumerate(self.params))
        self._hooks = [p.register_post_accumulate_grad_hook(partial(self._take, i)) for i, p in numbered]

    def add(self, index: int, gradient: Tensor) -> None:
        """Adds a microbatch's gradient of a parameter to its sum."""

    def added(self, index: int) -> None:
        """The gradient is added, and freed."""

    def _take(self, index: int, p: Tensor) -> None:
        if p.grad is None:  # this backward defers it (parallel/autograd.py)
            return
        if self._seen is not None:
            self._seen(index, p.grad)
        self.add(index, p.grad)
        p.grad = None
        self.added(index)

    def collect(self) -> None:
        for index, p in enumerate(self.params):
            self._take(index, p)

    def watch(self, seen: Callable[[Tensor], None], names: set[str]) -> None:
        """Calls `seen` with the gradient of each of these parameters in every microbatch."""
        self._seen = lambda index, gradient: seen(gradient) if self.names[index] in names else None

    def close(self) -> None:
        """Takes the hooks off the parameters. Those that are not elsewhere keep their working weights."""
        for hook in self._hooks:
            hook.remove()


class Frozen(Replica):
    """Parameters that are not trained, whole on a rank: weights in the dtype of computation, which are the masters.
    There are no gradients."""

    def __init__(
        self, params: Mapping[str, nn.Parameter], parts: Mapping[str, Part], compute_dtype: torch.dtype
    ):
        for parameter in params.values():
            parameter.requires_grad_(False)
            parameter.data = parameter.data.to(compute_dtype)
        self.parts = {name: parts[name] for name in params}
        self.masters = {name: parameter.data for name, parameter in params.items()}
        self.gradients = {}

    def kept(self) -> dict[str, list[Tensor]]:
        return {"params": list(self.masters.values())}


def gradient_square(replicas: Sequence[Replica], mesh: Mesh) -> Tensor:
    """This rank's share of the squared norm of the gradient, a scalar in fp64: each element counts once, on the rank
    that owns it. Where nothing is divided, every rank has the whole gradient, and its whole norm.

    What a rank has and does not own counts as 0 if it is finite. If not, nor is the sum: the rank would take it into
    its weights."""
    total = torch.zeros((), dtype=torch.float64, device=mesh.device)
    for owned in (True, False):
        mine, found = list[Tensor](), list[Norms]()
        for replica in replicas:
            whole, known = not mesh.divided, replica.norms()
            names = [name for name in replica.gradients if (whole or replica.parts[name].owned) == owned]
            if known is None:
                mine += [replica.gradients[name] for name in names]
            else:
                found += [known[name] for name in names]
        if mine or found:
            square = sum_of_squares(mine, mesh.device, found)
            total += square if owned else 0 * square
    return total


class Gathered:
    """The gathering of some parameters of a replica (see `optim.updater.Gathering`). routes: their ways."""

    def __init__(self, routes: Mapping[str, Route], mesh: Mesh):
        self.routes, self.members, self.device = routes, frozenset(routes), mesh.device
        self.shapes: Mapping[str, tuple[int, ...]] = {
            name: local_shape(route.whole) for name, route in routes.items() if route.mine
        }
        self.exchanges = exchanges(routes, mesh.layout, mesh.rank)
        self.axes = {e.group: mesh.axis(e.group).for_purpose("matrices") for e in self.exchanges}

    def bring(self, pieces: Mapping[str, Tensor]) -> dict[str, Tensor]:
        here = dict(pieces)
        for exchange in self.exchanges:
            hops, axis, ranks = self._hops(exchange), self.axes[exchange.group], range(len(exchange.taken))
            leaving = self._flat(here.pop(name) for name in hops)
            arrived = axis.all_to_all(leaving, exchange.taken, exchange.given)
            mine = [name for name, hop in hops.items() if hop.owner == axis.index]
            for name in mine:
                here[name] = torch.empty(local_shape(hops[name].whole), device=self.device)
            order = [(name, hops[name].pieces[rank]) for rank in ranks for name in mine]
            flat = arrived.split([size_of(ranges) for _, ranges in order])
            for (name, ranges), part in zip(order, flat, strict=True):
                piece = part.view(local_shape(ranges))
                for inner, outer in placed(ranges, hops[name].whole):
                    here[name][outer] = piece[inner]
        return here

    def back(self, wholes: Mapping[str, Tensor]) -> dict[str, Tensor]:
        here = dict(wholes)
        for exchange in reversed(self.exchanges):
            hops, axis, pieces = self._hops(exchange), self.axes[exchange.group], list[Tensor]()
            mine = {name: here.pop(name) for name, hop in hops.items() if hop.owner == axis.index}
            for rank in range(len(exchange.taken)):
                for name, whole in mine.items():
                    ranges = hops[name].pieces[rank]
                    pieces.append(whole.new_empty(local_shape(ranges)))
                    for inner, outer in placed(ranges, hops[name].whole):
                        pieces[-1][inner] = whole[outer]
            leaving = self._flat(pieces)
            del pieces  # the messages need their memory
            arrived = axis.all_to_all(leaving, exchange.given, exchange.taken)
            back = {name: hop.pieces[axis.index] for name, hop in hops.items()}
            flat = arrived.split([size_of(ranges) for ranges in back.values()])
            for (name, ranges), part in zip(back.items(), flat, strict=True):
                here[name] = part.view(local_shape(ranges))
        return here

    def _hops(self, exchange: Exchange) -> dict[str, Hop]:
        """By name, in the order of their owners."""
        ways = {name: self.routes[name].hops for name in exchange.names}
        hops = {name: next(h for h in way if h.group == exchange.group) for name, way in ways.items()}
        return dict(sorted(hops.items(), key=lambda named: named[1].owner))

    def _flat(self, tensors: Iterable[Tensor]) -> Tensor:
        flat = [tensor.reshape(-1) for tensor in tensors]
        return torch.cat(flat) if flat else torch.empty(0, device=self.device)
