"""The training loop.

One step: read the microbatches of this rank; forward and backward for each, gradients adding up in fp32; sum them
over the ranks while the last backward runs; clip; update. Then, when due: validate, sample, save.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.errors import UserError
from fivefold.optim import learning_rate
from fivefold.parallel.mesh import Mesh
from fivefold.parallel.parallelize import Parallel
from fivefold.parallel.replica import clip_
from fivefold.recipe import OptimSection, Recipe
from fivefold.train.share import Microbatch
from fivefold.train.state import State

MAX_SKIPPED = 5  # steps in a row whose gradient is not finite, before the run is given up


class Hooks(Protocol):
    """What the loop calls around its steps. None of them changes what is trained; `record` may average figures."""

    next_batch: Callable[[], tuple[list[Microbatch], float]]  # this rank's microbatches, seconds waited
    stop_wanted: Callable[[], bool]  # was this rank asked to stop?

    def record(self, line: dict[str, Any]) -> None:
        """What is known of a step that is done."""
        ...

    def validate(self, step: int) -> None: ...
    def sample(self, step: int) -> None: ...
    def save(self, step: int) -> None: ...


def train_loop(state: State, recipe: Recipe, hooks: Hooks) -> bool:
    """Trains to the recipe's last step. Returns False if it was stopped before; the state is saved either way.

    Raises:
        UserError: the gradient stays not finite for MAX_SKIPPED steps.
    """
    train = recipe.train
    assert train.steps, "a resolved recipe has steps"
    while state.step < train.steps:
        began = time.perf_counter()
        microbatches, waited = hooks.next_batch()
        if state.parallel.pipeline is not None:
            state.parallel.pipeline.recording = state.step + 1 == recipe.observe.trace_step
        done = take_step(state, recipe, microbatches, hooks.stop_wanted)
        stop = done.stop
        hooks.record(
            {
                "step": state.step,
                "loss": done.loss,
                "grad_norm": done.norm,
                "lr": done.lr,
                "data_wait_s": waited,
            }
            | (state.parallel.balance.figures if state.parallel.balance else {})
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


class Done(NamedTuple):
    """What is known of a step: the loss and the gradient's norm of all ranks, the learning rate, whether any rank was
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
) -> Done:
    """One step of a resolved recipe: gradients, clipping, update."""
    loss = forward_backward(state, microbatches, recipe.train.seed)
    norm = clip_(state.parallel.replicas, recipe.optim.grad_clip, state.mesh)
    assert recipe.train.steps, "a resolved recipe has steps"
    lr = update(state, recipe.optim, norm, recipe.train.steps)
    found, stop = agree(loss, stop_wanted(), state.mesh)
    state.step += 1
    return Done(found, norm, lr, stop)


def due(every: int, step: int) -> bool:
    """Whether something that happens every so many steps happens after this one. 0: never."""
    return every > 0 and step % every == 0


def forward_backward(state: State, microbatches: list[Microbatch], seed: int) -> Tensor:
    """Leaves the mean gradient of the global batch in the replicas; returns this rank's share of the mean loss
    (scalar): the shares of all ranks add up to it."""
    parallel, mesh = state.parallel, state.mesh
    scale = 1 / (
        len(microbatches) * mesh.size("batch")
    )  # gradients and losses of all are summed: makes it a mean

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
    """Forward and backward of one microbatch after the other, where this rank has the whole model. Returns the sum of
    the losses."""
    parallel, total = state.parallel, torch.zeros((), device=state.mesh.device)
    for index, (inputs, targets) in enumerate(microbatches):
        seeds(index)
        if index == len(microbatches) - 1:
            for replica in parallel.replicas:
                replica.arm()
        loss = state.module(inputs, targets, **positions(parallel))
        loss.backward(torch.full_like(loss, scale))
        total += loss.detach()
    return total


def positions(parallel: Parallel) -> dict[str, Tensor]:
    """The argument that says which positions a rank's tokens have, where they are not 0, 1, 2, ..."""
    return {} if parallel.positions is None else {"positions_T": parallel.positions}


def counted_once(mesh: Mesh) -> float:
    """1 on the one rank of those that compute the same loss which counts it, else 0."""
    return float(mesh.index("tp") == 0)


def dropout_rank(mesh: Mesh) -> int:
    """The number from which this rank draws: ranks of a tensor axis drop the same elements of the activations that
    each has as a whole; with sp each has its own piece of them, and draws for itself."""
    return mesh.rank if mesh.layout.sp else mesh.rank - mesh.index("tp")  # tp is the innermost axis


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
    gradients = state.gradients()
    for name, weight in state.masters().items():
        weight.grad = gradients[name]
    for group in state.optimizer.param_groups:
        group["lr"] = lr
    state.optimizer.step()
    for replica in state.parallel.replicas:
        replica.refresh()
    if state.parallel.balance is not None:
        state.parallel.balance.update()
    return lr


def agree(loss: Tensor, stop: bool, mesh: Mesh) -> tuple[float, bool]:
    """The loss, of which every rank has a share, and whether any was asked to stop: all stop at the same step."""
    both = torch.stack([loss.float(), torch.tensor(float(stop), device=loss.device)])
    if mesh.size("all") > 1:
        dist.all_reduce(both)
    return both[0].item(), both[1].item() > 0


@torch.no_grad()
def evaluate(state: State, microbatches: list[Microbatch], token_bytes: Tensor | None) -> dict[str, float]:
    """Validation over every rank's microbatches: val_loss (nats a target) and, with token_bytes (V), the bytes of
    text each token stands for, val_bits_per_byte."""
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
    if mesh.size("all") > 1:
        sums *= counted_once(mesh)
        dist.all_reduce(sums)
    nats, targets, size = sums.tolist()
    found = {"val_loss": nats / max(1, targets)}
    if size:
        found["val_bits_per_byte"] = nats / size / math.log(2)
    return found
