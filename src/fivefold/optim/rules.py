"""Runs an optimizer that is no fused kernel: a rule, tensor by tensor, over the masters or over gathered matrices.

A rule (`card.Rule`) returns a direction. The weights then move by -lr times it, and by -lr * weight_decay of
themselves. Where its card needs whole matrices, the pieces of the gradients come together first (`Gathering`). Then the
rule runs on the matrices that this rank owns, and the pieces of the directions go back.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from fivefold.optim.card import CODES, OptimizerCard, Update
from fivefold.precision import torch_dtype


class Gathering(Protocol):
    """Brings pieces of matrices together on their owners, and back (parallel/matrices.py).

    shapes: of the gathered tensors that this rank owns, by parameter. members: all parameters that are gathered.
    """

    shapes: Mapping[str, tuple[int, ...]]
    members: frozenset[str]

    def bring(self, pieces: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What this rank owns, put together from the pieces of all ranks."""
        ...

    def back(self, wholes: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """This rank's pieces of what the owners have."""
        ...


class Rules:
    """The optimizer of a card with a rule, over some masters.

    decays: weight decay of each. gathering: None: every parameter is whole, or needs nothing. states: of each
    parameter, by name; empty before the first step. number: see `Update`.
    """

    def __init__(
        self,
        card: OptimizerCard,
        masters: Mapping[str, Tensor],
        decays: Mapping[str, float],
        fields: Mapping[str, Any],
        compute: torch.dtype,
        gathering: Gathering | None = None,
        tokens: int = 1,
    ):
        assert card.rule is not None
        self.card, self.masters, self.decays, self.compute = card, masters, decays, compute
        self.fields, self.gathering, self.tokens = fields, gathering, tokens
        self.states: dict[str, dict[str, Tensor]] = {}
        self.number = 0
        self.constants: dict[Any, Tensor] = {}

    @torch.no_grad()
    def step(self, gradients: Mapping[str, Tensor], rates: Mapping[str, float], skip: Tensor | None) -> None:
        """Updates the masters of these gradients. rates: the learning rate of each. skip: where it is 1, nothing
        changes."""
        away = self.gathering.members & gradients.keys() if self.gathering else frozenset()
        for name, gradient in gradients.items():
            if name not in away:
                self._apply(name, self._direction(name, gradient, rates[name], skip), rates[name], skip)
        if away:
            assert self.gathering is not None
            wholes = self.gathering.bring({n: g for n, g in gradients.items() if n in away})
            for name in list(wholes):
                wholes[name] = self._direction(name, wholes[name], rates[name], skip)
            for name, direction in self.gathering.back(wholes).items():
                self._apply(name, direction, rates[name], skip)

    def _direction(self, name: str, gradient: Tensor, lr: float, skip: Tensor | None) -> Tensor:
        states, fresh = self.states.get(name), False
        if states is None:
            states, fresh = self._made(name, gradient), True
            self.states[name] = states
        before = {key: t.clone() for key, t in states.items()} if skip is not None else {}
        step = torch.ones((), dtype=torch.float64, device=gradient.device)
        if self.card.counts:
            step = states["step"].add_(1).double()
        weight = self.masters[name] if self.card.needs == "elements" else None
        if weight is not None and self.card.coupled and self.decays[name]:
            gradient = gradient.add(weight, alpha=self.decays[name])
        update = Update(
            step, self.number, fresh, lr, self.compute, self.fields, self.tokens, weight, self.constants
        )
        assert self.card.rule is not None
        direction = self.card.rule(gradient, states, update)
        for key, old in before.items():
            states[key].copy_(torch.where(skip.bool(), old, states[key]))  # pyright: ignore[reportOptionalMemberAccess]
        return direction

    def _made(self, name: str, like: Tensor) -> dict[str, Tensor]:
        """Zero states for a parameter, which is whole or needs no other part."""
        found = {}
        for state, shape in self.card.states_of(name, tuple(like.shape)):
            dtype = torch.uint8 if state.dtype == CODES else torch_dtype(state.dtype)
            found[state.name] = torch.zeros(shape, dtype=dtype, device=like.device)
        if self.card.counts:
            found["step"] = torch.zeros((), device=like.device)
        return found

    def _apply(self, name: str, direction: Tensor, lr: float, skip: Tensor | None) -> None:
        weight = self.masters[name]
        decay = 0.0 if self.card.coupled else self.decays[name]
        if skip is None:
            weight.mul_(1 - lr * decay).add_(direction, alpha=-lr)
        else:
            moved = (weight * (1 - lr * decay)).add_(direction, alpha=-lr)
            weight.copy_(torch.where(skip.bool(), weight, moved))
