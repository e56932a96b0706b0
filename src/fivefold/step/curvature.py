"""The estimate of the Hessian's diagonal, by which Sophia (arXiv 2305.14342) divides, every `estimate_every` steps.

Gauss-Newton-Bartlett (algorithm 2): B g^2, where g is the mean gradient of the batch's B targets with labels that the
model draws; B counts those of a full batch, also where data leaves some out, so prompts of conversations make the
estimate larger. The output layer draws them in the forward that needs them (`kernels.cross_entropy.drawn`).

It takes one forward and backward more. Labels depend on (seed, step, place) alone, so all layouts estimate the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from fivefold.errors import UserError
from fivefold.kernels.hashing import keys
from fivefold.models.layers import Output
from fivefold.optim.signs import FISHER, LABELS
from fivefold.parallel.mesh import Microbatch, Share
from fivefold.recipe import OptimSection, Recipe
from fivefold.sharding.layout import share as share_of
from fivefold.step.state import State

Compute = Callable[[State, Sequence[Microbatch], int], object]
"""Computes the mean gradient of the global batch in the replicas: `step.forward_backward`."""


def due(optim: OptimSection, step: int) -> bool:
    """True if a step (0, 1, ...) takes a pass that estimates the curvature."""
    return optim.estimator == LABELS and step % (optim.estimate_every or 1) == 0


def estimate(state: State, recipe: Recipe, microbatches: Sequence[Microbatch], compute: Compute) -> None:
    """Estimates the curvature for the next update, if it is due or no step has updated yet (the first were skipped)."""
    seed = recipe.train.seed
    if all(one.updater.begun for one in state.parallel.replicas) and not due(recipe.optim, state.step):
        return
    outputs = [m for stage in state.parallel.stages for m in stage.modules() if isinstance(m, Output)]
    if not outputs or state.functions.loss is not None:
        raise UserError(
            f'optim.estimator = "{LABELS}" draws labels from the output layer of our own models, with their own loss. '
            f'Nearest valid: optim.estimator = "{FISHER}"'
        )
    for output in outputs:
        output.drawing = keys(f"{seed}/{LABELS}/{state.step}")
    try:
        compute(state, _numbered(microbatches, state), seed)
    finally:
        for output in outputs:
            output.drawing = None
    factor = 1.0 if state.loss_scale is None else 1 / state.loss_scale.factor
    for each in state.parallel.replicas:
        if (rules := each.updater.rules) is not None:
            rules.estimates = {
                n: (g * factor).square_().mul_(rules.tokens) for n, g in each.gradients.items()
            }


def _numbered(microbatches: Sequence[Microbatch], state: State) -> Share:
    """The microbatches with the number of each token in the global batch in place of a target that counts."""
    mesh, share = state.mesh, Share.of(microbatches, state.mesh)
    dp, groups = mesh.axis("dp"), mesh.replica_groups
    first = share_of(share.total * groups, mesh.replica_group * dp.size + dp.index, groups * dp.size).start
    found = list[Microbatch]()
    for number, microbatch in enumerate(share, first):
        B, t = microbatch.targets.shape
        rows = torch.arange(number * B, (number + 1) * B, device=mesh.device)[:, None]
        columns = (
            torch.arange(t, device=mesh.device) if microbatch.positions is None else microbatch.positions
        )
        tokens = rows * (t * mesh.size("cp")) + columns
        found.append(microbatch._replace(targets=microbatch.targets.where(microbatch.targets < 0, tokens)))
    return Share(found, share.counted, share.total)
