"""The reference that `fivefold verify` compares layouts with: one process, the whole model, plain autograd.

It shares the models' code, the step and the optimizer with the trainer, but not the way weights are kept: it has no
flat buffers, no buckets, no sharding, no recomputation and no compilation. Each parameter has its own master and
gradient.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from fivefold.launch.ranks import Ranks
from fivefold.models.base import LanguageModel
from fivefold.models.card import card_of
from fivefold.models.init import build
from fivefold.parallel.expert import Balance
from fivefold.parallel.mesh import Mesh
from fivefold.parallel.parallelize import Parallel, round_matmuls
from fivefold.parallel.replica import Replica
from fivefold.precision import Mode, torch_dtype
from fivefold.recipe import Recipe
from fivefold.sharding.layout import Layout
from fivefold.sharding.parts import Part, held
from fivefold.step.state import State, compute_mode, with_optimizer


class Plain(Replica):
    """The simplest replica. The module must be in fp32 when this is built; afterwards
    it computes as the mode says."""

    def __init__(self, module: nn.Module, parts: dict[str, Part], mode: Mode):
        self.parts, self.params = parts, dict(module.named_parameters())
        kept, working = torch_dtype(mode.master), torch_dtype(mode.working)
        self.masters = {
            name: p.detach().to(working if parts[name].frozen else kept, copy=True)
            for name, p in self.params.items()
        }
        self.gradients = {n: torch.zeros_like(w) for n, w in self.masters.items() if not parts[n].frozen}
        for name, p in self.params.items():
            p.data = p.data.to(working)
            p.requires_grad_(not parts[name].frozen)
            if p.requires_grad:
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

    def update(self, lr: float, scale: Tensor | None, skip: Tensor) -> None:
        self.updater.step(self.gradients, lr, scale, skip)
        self.refresh()

    def refresh(self) -> None:
        for name, p in self.params.items():
            p.data.copy_(self.masters[name])

    def kept(self) -> dict[str, list[Tensor]]:
        return {"params": [p.data for p in self.params.values()]}

    def watch(self, seen: Callable[[Tensor], None], names: set[str]) -> None:
        for name in names:
            self.params[name].register_hook(seen)


def reference_state(recipe: Recipe, one: Ranks) -> State:
    """The state of a resolved recipe at step 0 on one process; the recipe's layout is ignored."""
    model, mesh = recipe.model, Mesh(Layout(), one)
    module = build(model, device=one.device, seed=recipe.train.seed)
    assert isinstance(module, LanguageModel)
    round_matmuls(module, recipe)
    mode = compute_mode(recipe, one.device)
    replica = Plain(module, held(card_of(model), Layout(), 0), mode)
    balance = Balance([module], mesh, model) if card_of(model).has_experts else None
    return with_optimizer(Parallel([module], [replica], balance=balance), mesh, recipe, mode)
