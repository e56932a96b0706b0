"""Measures the gradient noise scale in training (arXiv 1812.06162, appendix A.1): the batch size at which the
gradient's noise equals its signal. A larger batch costs more tokens than it saves steps.

The squared norm of a gradient over b sequences is |G|^2 + tr(Sigma) / b on average. Two batch sizes give both unknowns:
the whole batch, whose norm clipping needs anyway, and the gradients that add up to it. These are measured before they
are summed: per microbatch, or per rank if ZeRO scatters once per step.

Parts may count unequally (packed documents, answers). Part k has the share w_k of the batch's B targets, and its
gradient is w_k times a mean over w_k B targets. So the squared norms of all parts sum to q |G|^2 + tr(Sigma) / B on
average, where q is the sum of w_k^2: as if a part had q B targets. Equal parts have q = 1 / their number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fivefold.errors import UserError
from fivefold.parallel.mesh import Microbatch, Share
from fivefold.plan.advice.budget import noise_parts
from fivefold.recipe import Recipe, microbatches_per_step, tokens_per_step
from fivefold.sharding.parts import size_of
from fivefold.sharding.units import scattered_once
from fivefold.step.state import State

MEMORY = 0.98
"""Weight of earlier steps in the averages. A single step's estimate is far too noisy (the paper averages, too)."""
ONE_PART = 0.999
"""Sum of squared shares from which on a step has only one part that counts."""


class NoiseScale:
    """Measures on all ranks together. The estimates of |G|^2 and of tr(Sigma) over the batch are unbiased. They are
    averaged over steps in `state.noise` before they are divided. A resumed run continues with its averages.

    Raises:
        UserError: a step has only one microbatch on one rank, so there is nothing to compare.
    """

    def __init__(self, state: State, recipe: Recipe, memory: float = MEMORY):
        layout, train = recipe.layout, recipe.train
        self.state, self.mesh = state, state.mesh
        self.tokens, self.memory = tokens_per_step(recipe), memory
        shared = layout.zero > 0 and state.mesh.size("shard") > 1
        once = shared and scattered_once(layout.zero, layout.pp)
        parts = state.mesh.size("dp") * (1 if once else microbatches_per_step(recipe))
        if parts < 2:
            raise UserError(
                "observe.noise_scale compares gradients within a step, but a step of this run has only one. Nearest "
                f"valid: train.microbatch_size = {max(1, train.global_batch_size // 2)}, or two data-parallel ranks"
            )
        self.once = once
        self.square, self.uneven = torch.zeros(2, dtype=torch.float64, device=state.mesh.device)
        for replica in state.parallel.replicas:
            # One tensor-parallel rank counts the parameters that all of them share
            first, parts_of = state.mesh.index("tp") == 0, replica.parts.items()
            counted = {n for n, p in parts_of if first or size_of(p.computes) < math.prod(p.shape)}
            replica.watch(self._see, counted)

    def begin(self, microbatches: Sequence[Microbatch]) -> None:
        """A step begins. Every rank gives its own microbatches."""
        share, mesh = Share.of(microbatches, self.mesh), self.mesh
        weights = [one.weight / share.total for one in share[: share.counted]]
        parts = [math.fsum(weights)] if self.once else weights
        # Ranks of tp and pp compute with the same microbatches: the first one counts.
        counts = mesh.index("tp") == 0 and mesh.index("pp") == 0
        self.uneven.fill_(math.fsum(part * part for part in parts) if counts else 0.0)

    def _see(self, gradient: Tensor) -> None:
        """Adds the squared norm of a partial gradient. Losses are scaled so that the partial gradients sum to the
        mean."""
        self.square += torch.linalg.vector_norm(gradient, dtype=torch.float32).double().square()

    def take(self) -> Tensor:
        """The sum of the squared norms of this step's partial gradients, and that of the squares of their shares of the
        batch: (2,). All ranks call it, once the whole gradient is there."""
        square, self.square = self.square, torch.zeros_like(self.square)
        if self.state.loss_scale is not None:
            square = square / self.state.loss_scale.values[0] ** 2
        return self.mesh.axis("all").all_reduce(torch.stack([square, self.uneven]))

    def figures(self, norm: float, square: float, uneven: float) -> dict[str, float]:
        """The figures of a step whose whole gradient has this norm, given what `take` returned in it. noise_scale: in
        tokens; left out while noise hides the gradient. A step with all its targets in one part says nothing."""
        if not math.isfinite(square + norm) or not 0 < uneven < ONE_PART:
            return {}
        now = noise_parts(uneven, 1.0, square / uneven, norm * norm)
        gradient, trace = (
            before + (1 - self.memory) * (seen - before)
            for before, seen in zip(self.state.noise, now, strict=True)
        )
        self.state.noise = gradient, trace
        return {"noise_scale": self.tokens * trace / gradient} if gradient > 0 else {}
