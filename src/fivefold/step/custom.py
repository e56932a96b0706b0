"""What a user brings to training: a module in place of the model (what it does not train with, the same weights on
every rank), a loss, an optimizer, a schedule; and metrics of validation.

Loss and metrics are functions of logits and targets, so they stand around the model's `Output`, whatever divides it.
Legend: N tokens of a microbatch, n those that count, V vocabulary.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fivefold.checkpoint.store import odd_numbers
from fivefold.data import Batch
from fivefold.errors import UserError
from fivefold.host.machine import available
from fivefold.kernels.blockwise_attention import Documents
from fivefold.models.custom import CustomModel, ModuleCard, buffers_of, problems
from fivefold.models.layers import Output
from fivefold.models.recomputation import budget_of
from fivefold.optim import OPTIMIZERS, OptimizerCard
from fivefold.parallel.mesh import Mesh
from fivefold.parallel.parallelize import rounding
from fivefold.recipe import Recipe, TrainSection
from fivefold.sharding.layout import Layout
from fivefold.sharding.tiers import OFFLOADS, partitions

Loss = Callable[[Tensor, Tensor], Tensor]
"""loss(logits_NV, targets_N): logits in fp32, targets of -100 do not count -> the mean over those that do, a scalar. So
`torch.nn.functional.cross_entropy` is one."""
Metric = Callable[[Tensor, Tensor], Tensor | float]
"""metric(logits_nV, targets_n): of targets that count -> their mean, a scalar."""
Schedule = Callable[[int, int], float]
"""schedule(step, steps): the learning rate of step 0 to steps - 1. It depends on nothing else, so resuming is exact."""

NOT_THEIRS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
"""Folders whose code is not the user's."""


@dataclass(frozen=True)
class UserFunctions:
    """What takes the place of the recipe's; None: the recipe's stays."""

    loss: Loss | None = None
    card: OptimizerCard | None = None
    schedule: Schedule | None = None

    def rate(self, step: int, steps: int) -> float:
        """The learning rate of a step, by the user's schedule. Raises UserError: it fails, or gives no learning
        rate."""
        assert self.schedule is not None
        rate = called("schedule", self.schedule, step, steps)
        if not isinstance(rate, int | float) or not 0 <= rate < math.inf:
            raise UserError(
                f"schedule({step}, {steps}) = {rate!r:.60}: a learning rate must be a number >= 0 and finite"
            )
        return float(rate)


NOTHING = UserFunctions()


def called(what: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """What a function of the user's returns. Raises UserError: it fails. It would fail again, so nobody starts the
    ranks again for it."""
    try:
        return function(*arguments)
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        theirs = [f for f in frames if not f.filename.startswith(NOT_THEIRS)]
        where = f" ({theirs[-1].filename}:{theirs[-1].lineno}: {theirs[-1].line})" if theirs else ""
        raise UserError(f"{what} failed: {type(error).__name__}: {error}{where}") from error


def use_loss(stages: Iterable[nn.Module], loss: Loss) -> None:
    """Trains with a loss of the user's. Validation stays with cross-entropy."""
    for output in _outputs(stages):
        output.forward = _with_loss(output, loss)


def _with_loss(output: Output, loss: Loss) -> Any:
    plain = output.forward

    def forward(x: Tensor, weight: Tensor, targets: Tensor | None, bias: Tensor | None = None) -> Tensor:
        if targets is None or not output.training:
            return plain(x, weight, targets, bias)
        logits = plain(x, weight, None, bias)
        if not bool((targets >= 0).any()):
            return logits.sum() * 0.0  # other ranks expect a gradient
        logits_NV, targets_N = logits.reshape(-1, logits.shape[-1]), targets.long().flatten()
        value = called("loss(logits, targets)", loss, logits_NV, targets_N)
        if not isinstance(value, Tensor) or value.dim() > 0 or not value.requires_grad:
            raise UserError(
                f"loss(logits, targets) = {_shown(value)}: must be a scalar tensor that depends on the logits"
            )
        return value.float()

    return forward


def _shown(value: object) -> str:
    return f"a tensor {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)[:60]


@contextmanager
def measuring(
    stages: Iterable[nn.Module], metrics: Mapping[str, Metric], mesh: Mesh
) -> Iterator[Callable[[], dict[str, float]]]:
    """Applies metrics to all that the model sees inside the block. Yields a function that returns their means over the
    tokens of all ranks, which all of them call."""
    sums = torch.zeros(len(metrics), 2, dtype=torch.float64, device=mesh.device)  # of values, of tokens
    outputs = list(_outputs(stages))
    plain = [output.forward for output in outputs]
    for output, forward in zip(outputs, plain, strict=True):
        output.forward = _measured(forward, metrics, sums)

    def means() -> dict[str, float]:
        counted = sums * float(mesh.index("tp") == 0)  # ranks of a tensor axis see the same tokens
        values, tokens = mesh.axis("run").all_reduce(counted).T.tolist()
        return {name: v / n if n else math.nan for name, v, n in zip(metrics, values, tokens, strict=True)}

    try:
        yield means
    finally:
        for output, forward in zip(outputs, plain, strict=True):
            output.forward = forward


def _measured(plain: Callable[..., Tensor], metrics: Mapping[str, Metric], sums: Tensor) -> Any:
    """A forward that also adds up metrics, of the logits of one sequence at a time."""

    def forward(x: Tensor, weight: Tensor, targets: Tensor | None, bias: Tensor | None = None) -> Tensor:
        if targets is None:
            return plain(x, weight, None, bias)
        for row in range(len(x)):
            part = slice(row, row + 1)
            logits = plain(x[part], weight, None, bias).flatten(0, -2)  # (N, V)
            targets_N = targets[part].flatten()
            counted = targets_N >= 0
            if n := int(counted.sum()):
                for place, (name, metric) in enumerate(metrics.items()):
                    value = called(f"metric {name}", metric, logits[counted], targets_N[counted].long())
                    try:
                        sums[place, 0] += float(value) * n
                    except (TypeError, ValueError, RuntimeError):
                        wrong = f"metric {name}(logits, targets) = {value!r:.60}: must be one number"
                        raise UserError(wrong) from None
                    sums[place, 1] += n
        return plain(x, weight, targets, bias)

    return forward


def _outputs(stages: Iterable[nn.Module]) -> Iterator[Output]:
    """Those that compute: context parallelism puts another one around them."""
    for stage in stages:
        for module in stage.modules():
            if isinstance(module, Output) and not any(isinstance(one, Output) for one in module.children()):
                yield module


def custom_model(recipe: Recipe, module: nn.Module, card: ModuleCard | None = None) -> CustomModel:
    """The module as data. Raises UserError: it does not train with this recipe and layout. The message says what to
    change."""
    model = CustomModel(module, card, recipe.model.freeze)
    if problem := next(_problems(recipe, model, card is not None), None):
        raise UserError(problem)
    return model


def _problems(recipe: Recipe, model: CustomModel, given: bool) -> Iterator[str]:
    """Yields why a module does not train with this recipe. given: the user gave a card."""
    name, layout = type(model.module).__name__, Layout.from_recipe(recipe.layout)
    offload, optimizer = f'layout.offload = "{layout.offload}"', OPTIMIZERS[recipe.optim.name]
    if recipe.servers.count:
        yield 'a module of your own does not train with sync.method = "server". Use sync.method = "all"'
    if rounding(recipe) is not None:
        yield f'custom modules do not train in {recipe.precision.mode}. Use precision.mode = "bf16" or "auto"'
    if OFFLOADS[layout.offload].streams:
        yield f'{offload}: custom modules keep their states on the device. Nearest valid: "activations"'
    if partitions(layout.offload, layout.recompute, layout.tp, layout.sp):
        yield (
            f"{offload}: of a custom module, tp does not divide the inputs of recomputed blocks. Nearest valid: "
            'offload = "none", or recompute = "none"'
        )
    if budget_of(layout.recompute) is not None:
        yield (
            f'layout.recompute = "{layout.recompute}": the planner does not know {name}. Nearest valid: recompute=full'
        )
    yield from problems(model, layout, given)
    for where, buffer in buffers_of(model.module)[0].items():
        if why := odd_numbers(buffer, buffer=True):
            yield f"{name}: the buffer {where} {why}, which no checkpoint holds. Register it with persistent=False"
    if not any(optimizer.of(n, shape) is optimizer for n, shape in model.parameters.items()):
        yield (
            f'optim.name = "{recipe.optim.name}" updates the matrices of "blocks.N...", and leaves all others to '
            f"{optimizer.rest.name if optimizer.rest else 'none'}. This module has no such names. Rename them, or use "
            "adamw"
        )
    if given and model.stack == "blocks" and model.blocks != recipe.model.layers and layout.pp > 1:
        yield (
            f"model.layers = {recipe.model.layers}, and {name} has {model.blocks} blocks. Set "
            f"model.layers={model.blocks}: the rules of layouts read it"
        )


def try_out(module: nn.Module, batches: Any, train: TrainSection) -> None:
    """Forward and backward of a copy on the first two microbatches, so that what is wrong with a module is said before
    anything is made of the run. Nothing is tried where it cannot be copied, or where memory is too short for that.
    Raises UserError: it fails, or does not return a loss. The message has the user's own line."""
    name, room, B = type(module).__name__, available(), train.microbatch_size or 1
    if room is not None and 3 * sum(p.nbytes for p in module.parameters()) > room:
        return
    try:
        copied = deepcopy(module).train()
    except Exception:  # whatever the user's own classes raise
        return
    with torch.random.fork_rng():
        for row in range(0, train.global_batch_size, B)[:2]:
            batch = Batch(*batches.batch(0, range(row, row + B)))
            inputs, targets = (torch.as_tensor(x).long() for x in (batch.inputs, batch.targets))
            more: dict[str, Any] = {}
            if batch.first is not None:
                more["documents"] = Documents(np.asarray(batch.first), inputs.device)
            call = f"{name}(inputs, targets) with tokens {inputs.min()} to {inputs.max()} of shape {(*inputs.shape,)}"
            loss = called(call, partial(copied, inputs, targets, **more))
            if not isinstance(loss, Tensor) or loss.dim():
                raise UserError(
                    f"{name}(inputs, targets) = {_shown(loss)}: must be the mean loss, a scalar tensor"
                )
            called(f"backward of the loss of {name}", loss.backward)


@torch.no_grad()
def make_equal(module: nn.Module, mesh: Mesh) -> None:
    """Broadcasts rank 0's weights and buffers: a module may have been initialised differently on each rank."""
    run = mesh.axis("run")
    if run.size > 1:
        for tensor in (*module.parameters(), *module.buffers()):
            if tensor.numel():
                run.broadcast(tensor.data, 0)
