"""The training loop.

One step: read the microbatches of this rank; forward and backward for each, gradients adding up in fp32; sum them
over the ranks while the last backward runs; clip; update. Then, when due: validate, sample, save.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fivefold.errors import UserError
from fivefold.optim import clip_, learning_rate
from fivefold.parallel.data import GradientSum
from fivefold.parallel.ranks import Ranks
from fivefold.precision import Weights
from fivefold.recipe import OptimSection, Recipe

MAX_SKIPPED = 5  # steps in a row whose gradient is not finite, before the run is given up

Microbatch = tuple[Tensor, Tensor]  # inputs, targets: (rows, T) int64


@dataclass
class State:
    """What changes while training; `step` counts the optimizer steps done."""

    module: nn.Module
    weights: Weights
    optimizer: torch.optim.Optimizer
    gradients: GradientSum
    step: int = 0
    updates: int = 0  # steps that changed the weights: those with a finite gradient
    skipped: int = 0  # steps skipped in a row


@dataclass(frozen=True)
class Hooks:
    """What the loop calls around its steps; none of them changes the state."""

    next_batch: Callable[[], tuple[list[Microbatch], float]]  # this rank's microbatches, seconds waited
    stop_wanted: Callable[[], bool]  # was this rank asked to stop?
    record: Callable[[dict[str, Any]], None]
    validate: Callable[[int], None]
    sample: Callable[[int], None]
    save: Callable[[int], None]


def train_loop(state: State, recipe: Recipe, ranks: Ranks, hooks: Hooks) -> bool:
    """Trains to the recipe's last step. Returns False if it was stopped before; the state is saved either way.

    Raises:
        UserError: the gradient stays not finite for MAX_SKIPPED steps.
    """
    train = recipe.train
    assert train.steps, "a resolved recipe has steps"
    while state.step < train.steps:
        began = time.perf_counter()
        microbatches, waited = hooks.next_batch()
        loss = forward_backward(state, microbatches, train.seed, ranks)
        norm = clip_(state.weights.flat_grads, recipe.optim.grad_clip)
        lr = update(state, recipe.optim, norm, train.steps)
        loss, stop = agree(loss, hooks.stop_wanted(), ranks)
        state.step += 1
        hooks.record(
            {"step": state.step, "loss": loss, "grad_norm": norm, "lr": lr, "data_wait_s": waited}
            | {"step_s": time.perf_counter() - began}
        )
        diverged, last = state.skipped >= MAX_SKIPPED, state.step == train.steps
        if stop or diverged or last or due(recipe.checkpoint.every, state.step):
            hooks.save(state.step)  # first: who sends a signal may not wait long
        if diverged:
            raise UserError(
                f"the gradient was not finite in {MAX_SKIPPED} steps in a row, up to step {state.step}: the run has "
                "diverged. The weights before that are saved; resume with a smaller optim.lr or optim.grad_clip"
            )
        if stop:
            return last
        if last or due(train.val_every, state.step):
            hooks.validate(state.step)
        if last or due(train.sample_every, state.step):
            hooks.sample(state.step)
    return True


def due(every: int, step: int) -> bool:
    """Whether something that happens every so many steps happens after this one. 0: never."""
    return every > 0 and step % every == 0


def forward_backward(state: State, microbatches: list[Microbatch], seed: int, ranks: Ranks) -> Tensor:
    """Leaves the mean gradient of the global batch in `state.weights`; returns this rank's mean loss (scalar)."""
    state.module.train()
    state.weights.start_step()
    scale = 1 / (len(microbatches) * ranks.world)  # the gradients of all are summed: makes it their mean
    total = torch.zeros((), device=ranks.device)
    for index, (inputs, targets) in enumerate(microbatches):
        seed_dropout(seed, state.step, index, ranks.rank)
        if index == len(microbatches) - 1:
            state.gradients.arm()
        loss = state.module(inputs, targets)
        loss.backward(torch.full_like(loss, scale))
        total += loss.detach()
    state.gradients.wait()
    return total / len(microbatches)


def seed_dropout(seed: int, step: int, microbatch: int, rank: int) -> None:
    """Random state as a function of the place in the run: a resumed run draws the same."""
    mixed = (seed * 1_000_003 + step) * 1_000_003 + microbatch * 65_537 + rank
    torch.manual_seed(mixed % 2**63)


def update(state: State, optim: OptimSection, norm: float, steps: int) -> float:
    """One optimizer step at the schedule's learning rate, which it returns. A gradient that is not finite is
    skipped, for it would destroy the weights."""
    assert optim.warmup_steps is not None, "a resolved recipe has warmup_steps"
    assert optim.min_lr is not None, "a resolved recipe has min_lr"
    lr = learning_rate(
        state.step, total=steps, warmup=optim.warmup_steps, lr=optim.lr, min_lr=optim.min_lr,
        schedule=optim.schedule, decay_fraction=optim.decay_fraction,
    )  # fmt: skip
    if not math.isfinite(norm):
        state.skipped += 1
        return lr
    state.skipped = 0
    state.updates += 1
    for group in state.optimizer.param_groups:
        group["lr"] = lr
    state.optimizer.step()
    state.weights.refresh()
    return lr


def agree(loss: Tensor, stop: bool, ranks: Ranks) -> tuple[float, bool]:
    """The mean loss of all ranks, and whether any was asked to stop: all stop at the same step."""
    both = torch.stack([loss.float(), torch.tensor(float(stop), device=loss.device)])
    if ranks.world > 1:
        dist.all_reduce(both)
    return both[0].item() / ranks.world, both[1].item() > 0


@torch.no_grad()
def evaluate(
    module: nn.Module, microbatches: list[Microbatch], token_bytes: Tensor | None, ranks: Ranks
) -> dict[str, float]:
    """Validation over every rank's microbatches: val_loss (nats a target) and, with token_bytes (V), the bytes of
    text each token stands for, val_bits_per_byte."""
    module.eval()
    sums = torch.zeros(3, dtype=torch.float64, device=ranks.device)  # nats, targets, bytes
    for inputs, targets in microbatches:
        counted = targets >= 0
        sums[0] += module(inputs, targets).double() * counted.sum()
        sums[1] += counted.sum()
        if token_bytes is not None:
            sums[2] += token_bytes[targets[counted]].sum()
    if ranks.world > 1:
        dist.all_reduce(sums)
    nats, targets, size = sums.tolist()
    found = {"val_loss": nats / max(1, targets)}
    if size:
        found["val_bits_per_byte"] = nats / size / math.log(2)
    return found
