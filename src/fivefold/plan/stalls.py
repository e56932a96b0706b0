"""What holds a run up besides its steps: checkpoints on their way to the disk, data on its way from it, the spread of
the devices' speeds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fivefold.plan import rates
from fivefold.plan.cost import Setting
from fivefold.recipe import Recipe, count_parameters

SAVED = 4 + 8  # bytes a parameter: fp32 weights and two moments
SMALL_VOCABULARY = 2**16  # ids below it are kept in two bytes, others in four (data/tokenfiles.py)


@dataclass(frozen=True)
class Stalls:
    """checkpoint: bytes of one, written by all nodes at once; saving: seconds that the run stands still for it; every:
    steps between two, 0: only at the end. reading: seconds to read a step's tokens, which happens beside the step
    before; waiting: seconds of it that stick out. slowest: how much longer the slowest device takes than the mean."""

    checkpoint: int
    saving: float
    every: int
    reading: float
    waiting: float
    slowest: float

    @property
    def a_step(self) -> float:
        """Seconds that a step takes longer on average."""
        return self.waiting + (self.saving / self.every if self.every else 0.0)

    def as_json(self) -> dict[str, Any]:
        return {
            "checkpoint_bytes": self.checkpoint,
            "checkpoint_s": self.saving,
            "checkpoint_every": self.every,
            "data_wait_s": self.waiting,
            "a_step_s": self.a_step,
        }

    def lines(self) -> list[str]:
        """For `--explain`."""
        often = f"every {self.every:,} steps" if self.every else "at the end"
        return [
            "besides the steps",
            f"  {'checkpoint, GB':38}{self.checkpoint / 1e9:10.4f}  {often}",
            f"  {'standing still for one, s':38}{self.saving:10.4f}",
            f"  {'reading the tokens of a step, s':38}{self.reading:10.4f}  of which waited for: {self.waiting:.4f}",
            f"  {'added to a step on average, s':38}{self.a_step:10.4f}",
            f"  {'slowest device over the mean one':38}{self.slowest:10.4f}",
        ]


def stalls(recipe: Recipe, s: Setting, step: float) -> Stalls:
    """Of a resolved recipe whose steps take so many seconds."""
    nodes = max(1, s.cluster.nodes)
    size = SAVED * count_parameters(recipe.model)
    tokens = recipe.train.global_batch_size * recipe.model.seq_len
    width = 2 if (recipe.model.vocab_size or 0) <= SMALL_VOCABULARY else 4
    reading = tokens * width / nodes / s.cluster.disk
    return Stalls(
        checkpoint=size,
        saving=size / nodes / s.cluster.disk,
        every=recipe.checkpoint.every,
        reading=reading,
        waiting=max(0.0, reading - step),
        slowest=rates.slowest(s.layout.ranks, s.cluster.device.spread),
    )
