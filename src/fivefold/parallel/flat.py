"""Master weights, working weights and gradient sums of a set of parameters, each in one flat buffer.

The optimizer updates the masters, and a checkpoint holds them. The module computes with working weights: the masters
themselves, or a copy of them in another dtype (refreshed once per step, so forward casts nothing). Gradients are summed
over microbatches in the masters' dtype, fp32 in most modes (`precision`): a hook adds each parameter's gradient
to the flat buffer as soon as backward has it, and frees it.

The order of the buffers is roughly the order in which backward finishes. A bucket is a slice of the buffer, so its
all-reduce (parallel/data.py) can start while backward runs.

`allocate` makes the buffer of masters before the module has memory, and initial values are written into its views. So
start-up never holds the weights twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from fivefold.kernels.elementwise import add_gradient
from fivefold.sharding.units import buffer_order


def allocate(params: Mapping[str, Tensor], device: torch.device) -> tuple[Tensor, dict[str, Tensor]]:
    """The flat buffer of masters for parameters in the module's order, in their dtype, and its views by name."""
    (dtype,) = {p.dtype for p in params.values()}
    flat = torch.empty(sum(p.numel() for p in params.values()), dtype=dtype, device=device)
    return flat, views(flat, dict(buffer_order(list(params.items()))))


def views(flat: Tensor, params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The parts of a flat buffer in the shapes of `params`, one after the other."""
    parts = flat.split([p.numel() for p in params.values()])
    return {name: part.view(p.shape) for (name, p), part in zip(params.items(), parts, strict=True)}


class Weights:
    """The flat state of `params` (by name, in the module's order), which must be on their device in the masters' dtype.

    flat_master: the buffer that `allocate` made for them and that they are views of. None: the parameters have memory
    of their own, as in a user's module, and are copied. masters: they lie elsewhere, in host memory or on disk, and
    do not compute (parallel/offload); device: of the weights that do. master, grads: {parameter name: view of the
    flat buffer, in the parameter's shape}. on_gradient: called with a parameter's index (in buffer order) after its
    gradient of this backward has been added. seen: called with the index and the gradient before it is added.
    """

    def __init__(
        self,
        params: dict[str, nn.Parameter],
        compute_dtype: torch.dtype,
        flat_master: Tensor | None = None,
        masters: dict[str, Tensor] | None = None,
        device: torch.device | None = None,
    ):
        self.names, self.params = buffer_order(list(params)), buffer_order(list(params.values()))
        (dtype,) = {p.dtype for p in self.params}
        self.offsets = [0]
        for p in self.params:
            self.offsets.append(self.offsets[-1] + p.numel())
        device = device or self.params[0].device
        by_name = dict(zip(self.names, self.params, strict=True))
        self.flat_grads = torch.zeros(self.offsets[-1], dtype=dtype, device=device)
        if masters is None:
            if flat_master is None:
                flat_master = torch.cat([p.detach().reshape(-1) for p in self.params])
            assert flat_master.shape == (self.offsets[-1],), "another set of parameters"
            masters = views(flat_master, by_name)
        self.flat_master, self.master, self.grads = flat_master, masters, views(self.flat_grads, by_name)
        if flat_master is None or compute_dtype != dtype:
            self.flat_working = torch.empty(self.offsets[-1], dtype=compute_dtype, device=device)
        else:
            self.flat_working = flat_master
        self.working = views(self.flat_working, by_name)
        for p, working in zip(self.params, self.working.values(), strict=True):
            p.data = working
        self.on_gradient: Callable[[int], None] = lambda index: None
        self.seen: Callable[[int, Tensor], None] | None = None
        self._fresh = [True] * len(self.params)  # no gradient yet in this step
        self._hooks = [
            p.register_post_accumulate_grad_hook(self._adder(i)) for i, p in enumerate(self.params)
        ]
        self.refresh()

    def _adder(self, index: int) -> Callable[[Tensor], None]:
        start, end = self.offsets[index], self.offsets[index + 1]

        def add(p: Tensor) -> None:
            if p.grad is None:  # this backward defers it (parallel/deferred.py)
                return
            if self.seen is not None:
                self.seen(index, p.grad)
            add_gradient(self.flat_grads[start:end], p.grad, self._fresh[index])
            self._fresh[index] = False
            p.grad = None
            self.on_gradient(index)

        return add

    def forget_masters(self) -> None:
        """The working weights are all that is left."""
        self.flat_master, self.master = self.flat_working, self.working

    def close(self) -> None:
        """Takes the hooks off the module, which then keeps its working weights."""
        for hook in self._hooks:
            hook.remove()

    def collect(self) -> None:
        """Takes gradients that were set without the hooks (a pipeline's separate weight gradients)."""
        for index, p in enumerate(self.params):
            if p.grad is not None:
                self._adder(index)(p)

    def start_step(self) -> None:
        """Forgets the gradients of the last step: the next ones overwrite them."""
        self._fresh = [True] * len(self.params)

    def finish_gradients(self) -> None:
        """Zeroes the gradients that no backward of this step has set; they still hold the last step's values."""
        for index, fresh in enumerate(self._fresh):
            if fresh:
                self.flat_grads[self.offsets[index] : self.offsets[index + 1]].zero_()

    def refresh(self) -> None:
        """Copies the masters into the working weights, after the optimizer's step."""
        if self.flat_master is None:
            for name, working in self.working.items():
                working.copy_(self.master[name])
        elif self.flat_working is not self.flat_master:
            self.flat_working.copy_(self.flat_master)
