"""Parameters that are not trained, whole on a rank: weights in the dtype of computation, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from fivefold.optim.updater import Updater
from fivefold.spread.parts import Part


class Frozen:
    """See `replica.Replica`. The masters are the working weights. There are no gradients."""

    updater: Updater

    def __init__(
        self, params: Mapping[str, nn.Parameter], parts: Mapping[str, Part], compute_dtype: torch.dtype
    ):
        for parameter in params.values():
            parameter.requires_grad_(False)
            parameter.data = parameter.data.to(compute_dtype)
        self.parts = {name: parts[name] for name in params}
        self.masters = {name: parameter.data for name, parameter in params.items()}
        self.gradients: dict[str, Tensor] = {}

    def start_step(self) -> None:
        """Does nothing: there are no gradients."""

    def enable_sync(self) -> None:
        """Does nothing."""

    def collect(self) -> None:
        """Does nothing."""

    def finish(self) -> None:
        """Does nothing."""

    def update(self, lr: float, scale: Tensor | None, skip: Tensor) -> None:
        """Does nothing."""

    def refresh(self) -> None:
        """Does nothing: the masters compute."""

    def close(self) -> None:
        """Does nothing: there are no hooks."""

    def kept(self) -> dict[str, list[Tensor]]:
        return {"params": list(self.masters.values())}

    def watch(self, seen: Callable[[Tensor], None], names: set[str]) -> None:
        """Does nothing: there are no gradients."""


def stop_gradients(stages: Sequence[nn.Module], frozen: frozenset[str]) -> None:
    """Marks the parameters that are not trained, before anything is built around them."""
    if frozen:
        for stage in stages:
            for name, parameter in stage.named_parameters():
                if name in frozen:
                    parameter.requires_grad_(False)
