"""What a user might bring to a run, importable as `brought:NAME`."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import fivefold
from fivefold.comm.progress import progress
from fivefold.optim import OPTIMIZERS

LION = replace(OPTIMIZERS["lion"], name="mine")


class Counting(torch.optim.SGD):
    """As optimizers without a schedule do."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1


class Late(torch.optim.SGD):
    """Has a state from its fifth step on only."""

    steps = 0

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        self.steps += 1
        for weight in self.param_groups[0]["params"] if self.steps == 5 else ():
            self.state[weight]["slow"] = 3


class Notes(fivefold.Callback):
    """Notes what it is told, and stops the run."""

    def __init__(self, stop_after: int = 10**9):
        self.stop_after = stop_after
        self.told: list[tuple[str, int]] = []
        self.seen: dict[str, Any] = {}

    def on_step(self, event: fivefold.Event) -> Mapping[str, float]:
        self.told.append(("step", event.step))
        assert event.figures["loss"] > 0
        assert [name for name, _ in progress.phases] == ["a callback"], "ranks that wait for it are patient"
        if event.step >= self.stop_after:
            event.stop("enough")
        return {"double": 2.0 * event.step}

    def on_validation(self, event: fivefold.Event) -> Mapping[str, float] | None:
        self.told.append(("validation", event.step))
        self.seen |= dict(event.figures)
        return None

    def on_save(self, event: fivefold.Event) -> None:
        self.told.append(("save", event.step))
        assert event.checkpoint is not None
        assert (event.checkpoint / "manifest.json").is_file()

    def on_end(self, event: fivefold.Event) -> None:
        self.told.append(("end", event.step))
        self.seen |= dict(event.figures)


def accuracy(logits: Tensor, targets: Tensor) -> Tensor:
    return (logits.argmax(-1) == targets).float().mean()


def up(step: int, steps: int) -> float:
    return 1e-3 * (step + 1)
