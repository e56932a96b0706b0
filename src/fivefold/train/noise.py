"""The gradient noise scale while training (arXiv 1812.06162, appendix A.1): the batch at which noise and signal of the
gradient are equal, and so about the largest that still saves nearly as many steps as it costs tokens.

The squared norm of a gradient over b sequences is |G|^2 + tr(Sigma) / b on average. Two batch sizes give both unknowns:
the whole batch, whose norm clipping needs anyway, and the gradients that are added up to it. These are seen as they
come, before they are summed: of each microbatch, or of each rank's share where ZeRO scatters once a step.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.errors import UserError
from fivefold.plan.budget import noise_parts
from fivefold.recipe import Recipe, tokens_per_step
from fivefold.sharding import Part, size_of
from fivefold.train.state import State

MEMORY = 0.98
"""Weight of what was known before a step: each step's estimate alone is far too noisy (the paper averages, too)."""


class NoiseScale:
    """Measures on every rank together. Both estimates, of |G|^2 and of tr(Sigma) over the batch, are unbiased; they are
    averaged over steps, in `state.noise`, before they are divided. A run that resumes goes on with its averages.

    Raises:
        UserError: a step has one microbatch on one rank only, so there is nothing to compare.
    """

    def __init__(self, state: State, recipe: Recipe, memory: float = MEMORY):
        layout, train = recipe.layout, recipe.train
        self.state, self.mesh = state, state.mesh
        self.tokens, self.memory = tokens_per_step(recipe), memory
        shared = layout.zero > 0 and state.mesh.size("shard") > 1
        once = shared and (layout.zero == 1 or layout.pp > 1)  # scattered once a step
        self.parts = state.mesh.size("dp")  # gradients that are added up to the batch's
        if not once:
            self.parts = train.global_batch_size // (train.microbatch_size or 1)
        if self.parts < 2:
            raise UserError(
                "observe.noise_scale: a step is one gradient, and noise shows only between two. Nearest valid: "
                f"train.microbatch_size = {max(1, train.global_batch_size // 2)}, or two data-parallel ranks"
            )
        self.square = torch.zeros((), dtype=torch.float64, device=state.mesh.device)
        for replica in state.parallel.replicas:
            replica.watch(self._see, {name for name, part in replica.parts.items() if self._counts(part)})

    def _counts(self, part: Part) -> bool:
        """Tensor-parallel ranks count what they share once."""
        return self.mesh.index("tp") == 0 or size_of(part.computes) < math.prod(part.shape)

    def _see(self, gradient: Tensor) -> None:
        """A gradient, divided by their number (the loop scales losses so that gradients add up to the mean)."""
        self.square += torch.linalg.vector_norm(gradient, dtype=torch.float32).double().square()

    def figures(self, norm: float) -> dict[str, float]:
        """What is known after a step whose whole gradient has this norm; all ranks call it. noise_scale: in tokens;
        absent while noise hides the gradient."""
        if self.mesh.size("all") > 1:
            dist.all_reduce(self.square)
        small = self.parts * self.square.item()  # the mean square of one
        self.square.zero_()
        if not math.isfinite(small + norm):
            return {}
        now = noise_parts(1.0 / self.parts, 1.0, small, norm * norm)
        gradient, trace = (
            before + (1 - self.memory) * (seen - before)
            for before, seen in zip(self.state.noise, now, strict=True)
        )
        self.state.noise = gradient, trace
        return {"noise_scale": self.tokens * trace / gradient} if gradient > 0 else {}
