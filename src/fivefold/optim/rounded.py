"""An optimizer over masters that are kept in lower precision: it updates fp32 copies of a few parameters at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from fivefold.optim.card import COMPENSATION
from fivefold.optim.rounding import Rounder, Rounding, cut_off
from fivefold.optim.updater import Updater, largest
from fivefold.spread.parts import Part, local_shape
from fivefold.spread.units import updated_together


class Rounded(Updater):
    """Updates masters that are kept in a lower precision, with any optimizer that updates element by element.

    make: the optimizer over some fp32 masters. It has them and its states only while it runs.
    """

    rules = None

    def __init__(
        self,
        rounding: Rounding,
        masters: Mapping[str, Tensor],
        parts: Mapping[str, Part],
        make: Callable[[Mapping[str, Tensor]], Updater],
    ):
        self.rounding, self.masters, self.parts, self.card = rounding, masters, parts, rounding.card
        self.rounder = Rounder(rounding, parts)
        self.rounded: dict[str, Tensor] = {}  # states, by their checkpoint names
        sizes = {name: math.prod(parts[name].shape) for name in masters}
        self.inner = [
            make({name: _no_memory(masters[name]) for name in some}) for some in updated_together(sizes)
        ]

    def step(
        self,
        gradients: Mapping[str, Tensor],
        lr: float,
        scale: Tensor | None = None,
        skip: Tensor | None = None,
    ) -> None:
        for inner in self.inner:
            self._enter(inner)
            inner.step({name: gradients[name].float() for name in inner.masters}, lr, scale, skip)
            self._leave(inner)
        self.largest = largest([inner.largest for inner in self.inner if inner.largest is not None])
        self._count()

    def states(self) -> dict[str, Tensor]:
        kept = {name: t for inner in self.inner for name, t in inner.states().items()}
        return kept | self.rounded

    def load(self, tensors: Mapping[str, Tensor], steps: int, number: int | None = None) -> None:
        """Without a compensation, it starts from zero."""
        for inner in self.inner:
            names = [f"{state}.{name}" for name in inner.masters for state in inner.card.state_names]
            inner.load({name: tensors[name].float() for name in names}, steps, number)
            self._leave_states(inner)
            if self.rounding.how == "kahan":
                for name in inner.masters:
                    key, weight = f"{COMPENSATION}.{name}", self.masters[name]
                    found = tensors.get(key)
                    self.rounded[key] = (
                        torch.zeros_like(weight) if found is None else found.to(weight, copy=True)
                    )

    def begin(self, number: int) -> None:
        self.rounded.clear()
        for inner in self.inner:
            inner.begin(number)

    def clear(self) -> None:
        self.rounded.clear()
        for inner in self.inner:
            inner.clear()

    def kept(self) -> list[Tensor]:
        hidden = {id(t) for inner in self.inner for t in inner.states().values() if _hidden(t)}
        return [
            *(t for inner in self.inner for t in inner.kept() if id(t) not in hidden),
            *self.rounded.values(),
        ]

    def _enter(self, inner: Updater) -> None:
        """Gives an optimizer its masters and states in fp32."""
        for name, copy in inner.masters.items():
            exact = self.masters[name].float()
            if (compensation := self.rounded.get(f"{COMPENSATION}.{name}")) is not None:
                exact += compensation
            copy.data = exact
        for name, state in inner.states().items():
            if name in self.rounded:
                state.data = self.rounded[name].float()

    def _leave(self, inner: Updater) -> None:
        """Rounds them back, and frees the copies."""
        for name, copy in inner.masters.items():
            exact, weight = copy.data, self.masters[name]
            weight.copy_(self._round(exact, name, name, weight.dtype))
            if self.rounding.how == "kahan":
                self.rounded[f"{COMPENSATION}.{name}"] = cut_off(exact, weight)
            copy.data, copy.grad = _no_memory(copy), None
        self._leave_states(inner)

    def _leave_states(self, inner: Updater) -> None:
        owners = {f"{state}.{name}": name for name in inner.masters for state in self.card.state_names}
        for name, state in inner.states().items():
            if state.dtype != torch.float32:
                continue  # it has a format of its own
            found = self._round(state, name, owners[name], self.rounding.dtype)
            if name in self.rounded:
                self.rounded[name].copy_(found)
            else:
                self.rounded[name] = found
            state.data = _no_memory(state)

    def _round(self, exact: Tensor, key: str, name: str, dtype: torch.dtype) -> Tensor:
        """Rounds a weight or a state of parameter `name`, at random only if it has the shape of this rank's part."""
        if tuple(exact.shape) != local_shape(self.parts[name].keeps):
            return exact.to(dtype)
        assert self.rounder is not None
        return self.rounder.round(exact, key, name, dtype)


def _no_memory(like: Tensor) -> Tensor:
    """An fp32 tensor of the same shape, with the memory of one number."""
    return like.new_zeros((), dtype=torch.float32).expand(like.shape)


def _hidden(x: Tensor) -> bool:
    return x.dim() > 0 and not any(x.stride()) and x.numel() > 1
