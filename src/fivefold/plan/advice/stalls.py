"""Time that a run loses beside its steps: writing checkpoints, reading data, waiting for the slowest device."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from fivefold.host.devices import GB
from fivefold.models.card import card_of
from fivefold.models.section import ModelSection
from fivefold.optim import OPTIMIZERS, kept_in
from fivefold.plan.setting import Setting
from fivefold.plan.time import rates
from fivefold.precision import PRECISIONS, token_bytes
from fivefold.recipe import Recipe, count_parameters


@dataclass(frozen=True)
class Stalls:
    """Stalls of a run.

    checkpoint: bytes of one checkpoint, which all nodes write at once. saving: seconds that the run waits for it.
    every: steps between checkpoints, also if they are due by time; 0: one at the end. reading: seconds to read a step's
    tokens, overlapped with the step before. waiting: the exposed part of it. slowest: time of the slowest device over
    the mean.
    """

    checkpoint: int
    saving: float
    every: int
    reading: float
    waiting: float
    slowest: float

    @property
    def per_step(self) -> float:
        """Average seconds that stalls add per step."""
        return self.waiting + (self.saving / self.every if self.every else 0.0)

    def as_json(self) -> dict[str, Any]:
        return {
            "checkpoint_bytes": self.checkpoint,
            "checkpoint_s": self.saving,
            "checkpoint_every": self.every,
            "data_wait_s": self.waiting,
            "a_step_s": self.per_step,
        }

    def lines(self) -> list[str]:
        """The lines of `--explain`."""
        often = f"every {self.every:,} steps" if self.every else "at the end"
        return [
            "stalls",
            f"  {'checkpoint, GB':38}{self.checkpoint / GB:10.4f}  {often}",
            f"  {'waiting for a checkpoint, s':38}{self.saving:10.4f}",
            f"  {'reading the tokens of a step, s':38}{self.reading:10.4f}  exposed: {self.waiting:.4f}",
            f"  {'average per step, s':38}{self.per_step:10.4f}",
            f"  {'slowest device over the mean':38}{self.slowest:10.4f}",
        ]


def steps_between(recipe: Recipe, step: float) -> int:
    """Steps between the checkpoints of a run whose steps take `step` seconds; 0: there is one at the end."""
    section = recipe.checkpoint
    by_time = math.ceil(60 * section.minutes / step) if section.minutes and step else 0
    return min((n for n in (section.every, by_time) if 0 < n < (recipe.train.steps or n + 1)), default=0)


def stalls(recipe: Recipe, s: Setting, step: float) -> Stalls:
    """The stalls of a resolved recipe whose steps take `step` seconds."""
    nodes = max(1, s.cluster.nodes)
    states = _state_bytes(recipe.optim.name, s.mode, recipe.precision.rounding, recipe.model)
    size = round((s.states.master or s.states.working) * count_parameters(recipe.model) + states)
    tokens = recipe.train.global_batch_size * recipe.model.seq_len
    reading = tokens * token_bytes(recipe.model.vocab_size or 0) / nodes / s.cluster.storage.read
    return Stalls(
        checkpoint=size,
        saving=size / nodes / s.cluster.storage.write,
        every=steps_between(recipe, step),
        reading=reading,
        waiting=max(0.0, reading - step),
        slowest=rates.slowest(s.layout.ranks, s.cluster.device.spread),
    )


@lru_cache(maxsize=1024)
def _state_bytes(optimizer: str, mode: str, rounding: str, model: ModelSection) -> float:
    """Bytes of the optimizer's states of a whole model."""
    kept = kept_in(OPTIMIZERS[optimizer], PRECISIONS[mode], rounding)
    return sum(kept.state_bytes(name, shape) for name, shape in card_of(model).parameters.items())
