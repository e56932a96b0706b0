"""An optimizer over named fp32 masters: its step, and its states to and from checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fivefold.optim.card import OptimizerCard


class Updater:
    """Runs a card's optimizer over `masters`, in place.

    fields: values of the card's fields. Weight decay applies to matrices only: norms and biases have one dim. streamed:
    True if a step goes on beside the next forward, and writes the working weights itself (parallel/offload).
    """

    streamed = False

    def __init__(
        self,
        card: OptimizerCard,
        masters: Mapping[str, Tensor],
        lr: float,
        weight_decay: float,
        fields: Mapping[str, Any],
    ):
        assert fields.keys() == card.fields.keys(), f"{card.name} has {[*card.fields]}, not {[*fields]}"
        self.card, self.masters = card, masters
        groups = [
            {"params": [w for w in masters.values() if w.dim() >= 2], "weight_decay": weight_decay},
            {"params": [w for w in masters.values() if w.dim() < 2], "weight_decay": 0.0},
        ]
        self.optimizer = card.build([group for group in groups if group["params"]], lr, **fields)

    def step(
        self,
        gradients: Mapping[str, Tensor],
        lr: float,
        scale: Tensor | None = None,
        skip: Tensor | None = None,
    ) -> None:
        """Updates the masters with their gradients times `scale`, which changes the gradients, too.

        skip: fp32 scalar; where it is 1, masters and states stay as they are. The fused kernels read it on the device,
        under the name that gradient scalers gave it. Only the first update is decided on the host: it also makes the
        states, and a momentum that starts from its gradient must not start from a skipped one.
        """
        if skip is not None and self.card.states and not self.optimizer.state and skip.item():
            return
        self.optimizer.found_inf = skip  # pyright: ignore[reportAttributeAccessIssue]
        if scale is not None:
            torch._foreach_mul_(list(gradients.values()), scale)
        for name, weight in self.masters.items():
            weight.grad = gradients[name]
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()

    def settle(self) -> None:
        """Waits until the last step is done. Here it is."""

    def states(self) -> dict[str, Tensor]:
        """The states under their checkpoint names, {"exp_avg.NAME": ..., "exp_avg_sq.NAME": ...}; empty before the
        first step."""
        return {
            f"{state}.{name}": self.optimizer.state[weight][state]
            for name, weight in self.masters.items()
            if weight in self.optimizer.state
            for state in self.card.state_names
        }

    def load(self, tensors: Mapping[str, Tensor], steps: int) -> None:
        """Restores the states from tensors named as in `states`, and the number of steps.

        Raises:
            KeyError: a state is missing.
        """
        for name, weight in self.masters.items():
            found: dict[str, Any] = {
                state: tensors[f"{state}.{name}"].to(weight.device, copy=True)
                for state in self.card.state_names
            }
            if self.card.counts:
                found["step"] = torch.tensor(float(steps), device=weight.device)
            self.optimizer.state[weight] = found

    def kept(self) -> list[Tensor]:
        """Every tensor that the optimizer keeps now, step counts included."""
        return [
            t for values in self.optimizer.state.values() for t in values.values() if isinstance(t, Tensor)
        ]
