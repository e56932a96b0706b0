"""What a user might bring to a run, importable as `brought:NAME`."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

import fivefold
from fivefold.comm.progress import progress
from fivefold.optim import OPTIMIZERS

LION = replace(OPTIMIZERS["lion"], name="mine")


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
