"""Master weights, working weights and gradient sums of a set of parameters, each in one flat buffer.

fp32 masters are what the optimizer updates and a checkpoint holds. The module computes with its working weights:
the masters themselves in fp32, a bf16 copy of them in bf16 (refreshed once a step, so forward casts nothing).
Gradients are summed over microbatches in fp32, whatever the compute dtype: a hook adds each parameter's gradient to
its place in the flat buffer as soon as backward has it, and frees it.

The order of the buffers is the reverse of the module's: roughly the order in which backward finishes, so that the
all-reduce of a bucket (parallel/data.py), which is a slice of the buffer, can start while backward goes on.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from fivefold.kernels import native


class Weights:
    """The flat state of `params` (by name, in the module's order), which are on their device in fp32 when it is built.

    master, grads: {parameter name: fp32 view of the flat buffer, in the parameter's shape}.
    on_gradient: called with a parameter's index (in buffer order) when its gradient of this backward has been added.
    seen: called with the index and that gradient before.
    """

    def __init__(self, params: dict[str, nn.Parameter], compute_dtype: torch.dtype):
        self.names, self.params = list(reversed(params)), list(reversed(params.values()))
        assert all(p.dtype == torch.float32 for p in self.params), "build the module in fp32"
        self.offsets = [0]
        for p in self.params:
            self.offsets.append(self.offsets[-1] + p.numel())
        device = self.params[0].device
        self.flat_master = torch.cat([p.detach().reshape(-1) for p in self.params])
        self.flat_grads = torch.zeros_like(self.flat_master)
        self.flat_working = self.flat_master
        if compute_dtype != torch.float32:
            self.flat_working = torch.empty(self.offsets[-1], dtype=compute_dtype, device=device)
        self.master = self._views(self.flat_master)
        self.grads = self._views(self.flat_grads)
        for p, working in zip(self.params, self._views(self.flat_working).values(), strict=True):
            p.data = working
        self.on_gradient: Callable[[int], None] = lambda index: None
        self.seen: Callable[[int, Tensor], None] | None = None
        self._fresh = [True] * len(self.params)  # no gradient yet in this step
        self._hooks = [
            p.register_post_accumulate_grad_hook(self._adder(i)) for i, p in enumerate(self.params)
        ]
        self.refresh()

    def _views(self, flat: Tensor) -> dict[str, Tensor]:
        parts = flat.split([p.numel() for p in self.params])
        return {
            name: part.view(p.shape) for name, part, p in zip(self.names, parts, self.params, strict=True)
        }

    def _adder(self, index: int) -> Callable[[Tensor], None]:
        start, end = self.offsets[index], self.offsets[index + 1]

        def add(p: Tensor) -> None:
            if p.grad is None:  # this backward leaves it for later (parallel/later.py)
                return
            if self.seen is not None:
                self.seen(index, p.grad)
            add_gradient(self.flat_grads[start:end], p.grad, self._fresh[index])
            self._fresh[index] = False
            p.grad = None
            self.on_gradient(index)

        return add

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
        """After the last backward of a step: parameters that got no gradient have zeros, not last step's."""
        for index, fresh in enumerate(self._fresh):
            if fresh:
                self.flat_grads[self.offsets[index] : self.offsets[index + 1]].zero_()

    def refresh(self) -> None:
        """Copies the masters into the working weights, after the optimizer's step."""
        if self.flat_working is not self.flat_master:
            self.flat_working.copy_(self.flat_master)


def add_gradient(total: Tensor, grad: Tensor, first: bool) -> None:
    """total += grad, or total = grad when it is the first of the step. total: flat fp32; grad: any shape and dtype."""
    if grad.dtype == torch.bfloat16 and grad.is_contiguous() and native.usable(grad):
        native.call("accumulate", grad.dtype, total, grad, grad.numel(), int(first))
    elif first:
        total.view(grad.shape).copy_(grad)
    else:
        total.view(grad.shape).add_(grad)
