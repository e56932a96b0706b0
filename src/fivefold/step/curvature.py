"""Estimates of the diagonal of the Hessian, which Sophia (arXiv 2305.14342) divides by, every `estimate_every` steps.

Gauss-Newton-Bartlett (algorithm 2): B g^2, where g is the mean gradient of the batch's B targets with labels that the
model draws; B counts those of a full batch, also where data leaves some out, so prompts of conversations make the
estimate larger. The output layer draws them in the forward that needs them (`kernels.cross_entropy.drawn`).

Hutchinson (algorithm 1): u * (H u) with u of normal numbers. H u is the difference of two gradients of the same batch,
(g(w + s u) - g(w)) / s, because no fused kernel, message or shard has a second derivative. Its error of the order s is
odd in u, so its mean is zero.

Either takes one forward and backward more, by the code of every step. Labels and u depend on (seed, step, place) alone,
so every layout estimates the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from fivefold.errors import UserError
from fivefold.kernels.hashing import keys
from fivefold.models.base import fill_normal_
from fivefold.models.layers import Output
from fivefold.optim.signs import FISHER, LABELS, PASSES
from fivefold.optim.updater import Rules
from fivefold.parallel.mesh import Microbatch, Share
from fivefold.parallel.replica import Replica
from fivefold.recipe import OptimSection, Recipe
from fivefold.sharding.layout import share as share_of
from fivefold.sharding.parts import boxes
from fivefold.step.state import State

MOVED = 1 / 200
"""Hutchinson's displacement s, in standard deviations of the initial weights. A smaller one divides the gradients'
rounding by less, a larger one leaves more of the third derivative (docs/optimizers.md has the errors)."""
Compute = Callable[[State, Sequence[Microbatch], int], object]
"""Computes the mean gradient of the global batch in the replicas: `step.forward_backward`."""


def due(optim: OptimSection, step: int) -> bool:
    """True if a step (0, 1, ...) takes a pass that estimates the curvature."""
    return optim.estimator in PASSES and step % (optim.estimate_every or 1) == 0


def estimate(
    state: State, recipe: Recipe, microbatches: Sequence[Microbatch], compute: Compute
) -> Callable[[], None] | None:
    """Estimates the curvature for the update that follows by an estimator of `PASSES`, if it is due or no step has
    updated yet, because the first ones were skipped. Returns what the step calls once it has its own gradient, before
    it clips it; None: not due."""
    optim, seed = recipe.optim, recipe.train.seed
    fresh = not all(one.updater.begun for one in state.parallel.replicas)
    if not (fresh or due(optim, state.step)):
        return None
    text = f"{seed}/{optim.estimator}/{state.step}"
    if optim.estimator == LABELS:
        return _of_labels(state, lambda some: compute(state, some, seed), microbatches, text)
    again = partial(compute, state, microbatches, seed)
    return _of_difference(state, again, MOVED * recipe.model.init_std, text)


def _of_labels(
    state: State, compute: Callable[[Share], object], microbatches: Sequence[Microbatch], text: str
) -> Callable[[], None]:
    outputs = [m for stage in state.parallel.stages for m in stage.modules() if isinstance(m, Output)]
    if not outputs or state.functions.loss is not None:
        raise UserError(
            f'optim.estimator = "{LABELS}" draws labels from the output layer of our own models, with their own loss. '
            f'Nearest valid: optim.estimator = "{FISHER}"'
        )
    for output in outputs:
        output.drawing = keys(text)
    try:
        compute(_numbered(microbatches, state))
    finally:
        for output in outputs:
            output.drawing = None
    for replica, rules in _updated(state):
        factor = 1.0 if state.loss_scale is None else 1 / state.loss_scale.factor
        rules.estimates = {n: (g * factor).square_().mul_(rules.tokens) for n, g in replica.gradients.items()}
    return lambda: None


def _of_difference(state: State, compute: Callable[[], object], s: float, text: str) -> Callable[[], None]:
    kept = [{n: w.clone() for n, w in rules.masters.items()} for _, rules in _updated(state)]
    for replica, rules in _updated(state):
        for name, weight in rules.masters.items():
            weight.add_(_normal(replica, name, text), alpha=s)
        replica.refresh()
    compute()
    for (replica, rules), before in zip(_updated(state), kept, strict=True):
        for name, weight in rules.masters.items():
            weight.copy_(before[name])
        replica.refresh()
        rules.estimates = {name: gradient.clone() for name, gradient in replica.gradients.items()}

    def complete() -> None:
        for replica, rules in _updated(state):
            for name, moved in rules.estimates.items():
                moved.sub_(replica.gradients[name]).mul_(_normal(replica, name, text)).div_(s)

    return complete


def _updated(state: State) -> list[tuple[Replica, Rules]]:
    """The replicas with the rules of their updates."""
    return [(one, rules) for one in state.parallel.replicas if (rules := one.updater.rules) is not None]


def _normal(replica: Replica, name: str, text: str) -> Tensor:
    """Normal numbers for this rank's part of a parameter."""
    part, out = replica.parts[name], torch.empty_like(replica.masters[name])
    for where, box in boxes(part.keeps):
        fill_normal_(out[where], keys(f"{text}/{name}"), 1.0, part.shape, box)
    return out


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
