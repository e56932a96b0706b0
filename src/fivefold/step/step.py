"""One optimizer step: forward and backward of each microbatch, clipping, update. Gradients add up in fp32, and are
summed over the ranks while the last backward runs. Also computes the loss without a step, for validation."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fivefold.optim import learning_rate
from fivefold.optim.clip import clip_scale
from fivefold.parallel.mesh import Mesh
from fivefold.parallel.parallelize import Parallel
from fivefold.parallel.pipeline import Microbatch
from fivefold.parallel.replica import gradient_norm
from fivefold.recipe import OptimSection, Recipe
from fivefold.step.state import State


class Done(NamedTuple):
    """The result of a step: the loss and the gradient norm over all ranks, the learning rate, and True if any rank was
    asked to stop."""

    loss: float
    norm: float
    lr: float
    stop: bool


def take_step(
    state: State,
    recipe: Recipe,
    microbatches: list[Microbatch],
    stop_wanted: Callable[[], bool] = lambda: False,
    inspect: Callable[[], None] = lambda: None,
) -> Done:
    """Takes one step of a resolved recipe: gradients, clipping, update.

    stop_wanted: returns True if this rank was asked to stop. inspect: called when `state` has the whole gradient,
    before it is clipped.
    """
    assert recipe.train.steps, "a resolved recipe has steps"
    loss = forward_backward(state, microbatches, recipe.train.seed)
    inspect()
    norm = gradient_norm(state.parallel.replicas, state.mesh)
    lr = update(state, recipe.optim, norm, recipe.train.steps)
    found, stop = agree(loss, stop_wanted(), state.mesh)
    state.step += 1
    return Done(found, norm, lr, stop)


def forward_backward(state: State, microbatches: list[Microbatch], seed: int) -> Tensor:
    """Computes the mean gradient of the global batch in the replicas. Returns this rank's share of the mean loss
    (scalar); the shares of all ranks add up to it."""
    parallel, mesh = state.parallel, state.mesh
    scale = 1 / (
        len(microbatches) * mesh.size("batch")
    )  # gradients and losses of all microbatches are summed; this makes the sum a mean

    def seeds(microbatch: int, stage: int = 0) -> None:
        """stage: which of this rank's."""
        seed_dropout(seed, state.step, microbatch, dropout_rank(mesh) + stage * mesh.size("all"))

    for replica in parallel.replicas:
        replica.start_step()
    if parallel.balance is not None:
        parallel.balance.start_step(scale)
    if parallel.pipeline is not None:
        total = parallel.pipeline.forward_backward(microbatches, scale, seeds, parallel.positions)
    else:
        total = accumulate(state, microbatches, scale, seeds)
    for replica in parallel.replicas:
        replica.finish()
    for reduction in parallel.reductions:
        reduction()
    if parallel.balance is not None:
        parallel.balance.finish()
    return total * scale * counted_once(mesh)


def accumulate(
    state: State, microbatches: list[Microbatch], scale: float, seeds: Callable[[int], None]
) -> Tensor:
    """Runs forward and backward of one microbatch after the other, if this rank has the whole model. Returns the sum of
    the losses."""
    parallel, total = state.parallel, torch.zeros((), device=state.mesh.device)
    for index, (inputs, targets) in enumerate(microbatches):
        seeds(index)
        if index == len(microbatches) - 1:
            for replica in parallel.replicas:
                replica.enable_sync()
        loss = state.module(inputs, targets, **positions(parallel))
        loss.backward(torch.full_like(loss, scale))
        total += loss.detach()
    return total


def positions(parallel: Parallel) -> dict[str, Tensor]:
    """The model's argument with the positions of this rank's tokens, if they are not 0, 1, 2, ..."""
    return {} if parallel.positions is None else {"positions_T": parallel.positions}


def counted_once(mesh: Mesh) -> float:
    """1 on the rank that counts a loss which several ranks compute, else 0."""
    return float(mesh.index("tp") == 0)


def dropout_rank(mesh: Mesh) -> int:
    """The seed number of this rank. Ranks of a tensor axis drop the same elements of activations that each has whole.
    With sp each has its own piece, and draws its own numbers."""
    return mesh.rank if mesh.layout.sp else mesh.rank - mesh.index("tp")  # tp is the innermost axis


def seed_dropout(seed: int, step: int, microbatch: int, rank: int) -> None:
    """Sets the random state from the position in the run, so a resumed run draws the same numbers."""
    mixed = (seed * 1_000_003 + step) * 1_000_003 + microbatch * 65_537 + rank
    torch.manual_seed(mixed % 2**63)


def update(state: State, optim: OptimSection, norm: float, steps: int) -> float:
    """Clips the gradient, given its norm, and updates the weights. Returns the schedule's learning rate. A gradient
    that is not finite is skipped: it would destroy the weights."""
    assert optim.warmup_steps is not None, "a resolved recipe has warmup_steps"
    lowest = optim.lr if optim.min_lr is None else optim.min_lr  # only a constant one has none
    lr = learning_rate(
        state.step, total=steps, warmup=optim.warmup_steps, lr=optim.lr, min_lr=lowest,
        schedule=optim.schedule, decay_fraction=optim.decay_fraction,
    )  # fmt: skip
    if not math.isfinite(norm):
        state.skipped += 1
        return lr
    state.skipped = 0
    state.updates += 1
    scale = clip_scale(norm, optim.grad_clip)
    for replica in state.parallel.replicas:
        replica.update(lr, scale)
    if state.parallel.balance is not None:
        state.parallel.balance.update()
    return lr


def agree(loss: Tensor, stop: bool, mesh: Mesh) -> tuple[float, bool]:
    """(mean loss, True if any rank was asked to stop), equal on all ranks, so all stop at the same step."""
    both = torch.stack([loss.float(), torch.tensor(float(stop), device=loss.device)])
    mesh.axis("all").all_reduce(both)
    return both[0].item(), both[1].item() > 0


@torch.no_grad()
def evaluate(state: State, microbatches: list[Microbatch], token_bytes: Tensor | None) -> dict[str, float]:
    """Validates on every rank's microbatches. Returns val_loss (nats per target) and, given token_bytes (V), the bytes
    of text per token, val_bits_per_byte."""
    parallel, mesh = state.parallel, state.mesh
    for stage in parallel.stages:
        stage.eval()
    if parallel.pipeline is not None:  # only the last stage has losses
        losses = parallel.pipeline.losses(microbatches, parallel.positions)
    else:
        losses = (state.module(*microbatch, **positions(parallel)) for microbatch in microbatches)
    sums = torch.zeros(3, dtype=torch.float64, device=mesh.device)  # nats, targets, bytes
    for loss, (_, targets) in zip(losses, microbatches, strict=False):
        counted = targets >= 0
        sums[0] += loss.double() * counted.sum()
        sums[1] += counted.sum()
        if token_bytes is not None:
            sums[2] += token_bytes[targets[counted]].sum()
    for stage in parallel.stages:
        stage.train()
    sums = mesh.axis("all").all_reduce(sums * counted_once(mesh))
    nats, targets, size = sums.tolist()
    found = {"val_loss": nats / max(1, targets)}
    if size:
        found["val_bits_per_byte"] = nats / size / math.log(2)
    return found
