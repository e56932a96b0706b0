"""What `fivefold verify` compares layouts with: one process, the whole model, plain autograd.

It shares the models' code, the loop's step and AdamW with the trainer, and none of its ways of keeping weights: no flat
buffers, no buckets, nothing divided, nothing computed again, nothing compiled. Each parameter has a master and a
gradient of its own, in fp32.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from fivefold.layout import Layout
from fivefold.models import LanguageModel, build
from fivefold.parallel.expert import Balance
from fivefold.parallel.mesh import Mesh
from fivefold.parallel.parallelize import Parallel
from fivefold.parallel.ranks import Ranks
from fivefold.recipe import Recipe
from fivefold.sharding import Part, held
from fivefold.train.state import DTYPES, State, compute_mode, with_optimizer


class Plain:
    """The plainest replica (see `parallel.replica.Replica`) of a module that is in fp32 when it is built and computes
    in `compute_dtype` from then on."""

    def __init__(self, module: nn.Module, parts: dict[str, Part], compute_dtype: torch.dtype):
        self.parts, self.params = parts, dict(module.named_parameters())
        self.masters = {name: p.detach().clone() for name, p in self.params.items()}
        self.gradients = {name: torch.zeros_like(w) for name, w in self.masters.items()}
        for name, p in self.params.items():
            p.data = p.data.to(compute_dtype)
            p.register_post_accumulate_grad_hook(self._adder(name))

    def _adder(self, name: str) -> Callable[[Tensor], None]:
        def add(p: Tensor) -> None:
            assert p.grad is not None
            self.gradients[name] += p.grad
            p.grad = None

        return add

    def start_step(self) -> None:
        for gradient in self.gradients.values():
            gradient.zero_()

    def arm(self) -> None:
        """Nothing to send."""

    def collect(self) -> None:
        """Nothing is left for later."""

    def finish(self) -> None:
        """Nothing to wait for."""

    def refresh(self) -> None:
        for name, p in self.params.items():
            p.data.copy_(self.masters[name])

    def kept(self) -> dict[str, list[Tensor]]:
        return {"params": [p.data for p in self.params.values()]}

    def watch(self, seen: Callable[[Tensor], None], names: set[str]) -> None:
        for name in names:
            self.params[name].register_hook(seen)

    def close(self) -> None:
        """Nothing: the module ends with it."""


def reference_state(recipe: Recipe, one: Ranks) -> State:
    """The state of a resolved recipe at step 0 on one process, whatever its layout says."""
    model, mesh = recipe.model, Mesh(Layout(), one)
    module = build(model, device=one.device, seed=recipe.train.seed)
    assert isinstance(module, LanguageModel)
    replica = Plain(module, held(model, Layout(), 0), DTYPES[compute_mode(recipe, one.device)])
    balance = Balance([module], mesh, model) if model.arch == "moe" else None
    return with_optimizer(Parallel([module], [replica], balance=balance), mesh, recipe.optim)
