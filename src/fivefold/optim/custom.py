"""An optimizer of the user's: an `OptimizerCard`, or a torch optimizer for plain data parallelism."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fivefold.errors import UserError
from fivefold.optim.card import OptimizerCard, OptimizerState
from fivefold.precision import DTYPES, torch_dtype

Make = Callable[..., torch.optim.Optimizer]
"""make(groups, lr=...): a class of `torch.optim`, or a function that builds its optimizer like one. groups: lists of
parameters with their weight decay."""
STEPS = 12
"""Tried steps of an optimizer. Some of its states may not be there after the first."""
COUNT = "step"
"""The state in which torch's optimizers count their steps."""


def card_from(given: object, name: str) -> OptimizerCard:
    """The card of what the user brings.

    Steps on two small parameters say which states a torch optimizer keeps. Raises UserError: it is neither a card nor
    builds a torch optimizer, or checkpoints have no place for its states."""
    if isinstance(given, OptimizerCard):
        return given
    if isinstance(given, torch.optim.Optimizer) or not callable(given):
        raise UserError(
            f"optimizer = {name}: must be an OptimizerCard, a class of torch.optim, or a function (groups, lr) that "
            "returns a torch optimizer; ranks build it over their own weights"
        )
    make: Any = given
    weights = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3, 2))]
    try:
        optimizer = make([{"params": [weight], "weight_decay": 0.0} for weight in weights], lr=0.1)
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"it returns {type(optimizer).__name__}, not a torch.optim.Optimizer")
        settings = _settings(optimizer)
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        for _ in range(STEPS):
            optimizer.step()
    except Exception as error:
        raise UserError(
            f"optimizer = {name}: a step on small weights fails: {type(error).__name__}: {error}"
        ) from error
    if changed := [key for key, value in _settings(optimizer).items() if settings.get(key) != value]:
        raise UserError(
            f'optimizer = {name}: it counts in its groups ("{changed[0]}"), and checkpoints have no place for that: a '
            "resumed run would begin anew. Only states of the weights are kept"
        )
    kept = [(key, value, weight) for weight in weights for key, value in optimizer.state[weight].items()]
    states: dict[str, OptimizerState] = {}
    for key, value, weight in kept:
        if key == COUNT or value is None:
            continue
        if not isinstance(value, Tensor) or value.shape != weight.shape:
            raise UserError(
                f'optimizer = {name}: checkpoints have no place for its state "{key}"; only for tensors with the shape '
                f'of the weight, and "{COUNT}"'
            )
        dtypes = [dtype for dtype, it in DTYPES.items() if it.stored and torch_dtype(dtype) == value.dtype]
        if not dtypes:
            raise UserError(
                f'optimizer = {name}: its state "{key}" is of {value.dtype}, which checkpoints lack'
            )
        states[key] = OptimizerState(key, dtypes[0])
    return OptimizerCard(
        name,
        source="the user's",
        build=lambda groups, lr: _guarded(make(groups, lr=lr)),
        states=tuple(states.values()),
        counts=any(key == COUNT for key, *_ in kept),
    )


def _settings(optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """What the groups hold beside parameters."""
    pairs = [pair for group in optimizer.param_groups for pair in group.items()]
    return {key: repr(value) for key, value in pairs if key != "params"}


def _guarded(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Lets the optimizer do nothing where a step is to be skipped. It cannot read that on the device, so the host
    waits."""
    step = optimizer.step

    def guarded() -> None:
        skip = vars(optimizer).pop("found_inf", None)  # some refuse it, others take it for a scaler's
        if skip is None or not skip.item():
            step()

    optimizer.step = guarded  # pyright: ignore[reportAttributeAccessIssue]
    return optimizer
