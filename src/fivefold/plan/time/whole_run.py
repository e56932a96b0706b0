"""What a run costs besides its steps: stalls (writing checkpoints, reading data, the slowest device). For sites that
train apart, the link speed from which on that is faster than summing gradients in every step."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from fivefold.host.devices import GB
from fivefold.models.card import card_of
from fivefold.models.section import ModelSection
from fivefold.optim import OPTIMIZERS, kept_in
from fivefold.plan.cluster.devices import Link
from fivefold.plan.setting import Setting
from fivefold.plan.time import rates
from fivefold.plan.time.sync_costs import outer_seconds
from fivefold.plan.time.time import step
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


EVEN = 1.05
"""A step of this ratio counts as equally fast."""
SLOWEST, FASTEST = 1e5, 1e13  # bytes/s of the links that are tried


@dataclass(frozen=True)
class SlowLinks:
    """Training apart beside summing gradients in every step.

    outer: seconds of an outer step of every fragment. apart, together: seconds per inner step. even: bytes/s of the
    link between sites at which both are equally fast (`EVEN`); above, training apart saves no time. None: it is not
    faster at any speed, or always. link: bytes/s of the cluster's.
    """

    outer: float
    apart: float
    together: float
    even: float | None
    link: float | None

    def as_json(self) -> dict[str, Any]:
        return {
            "outer_step_s": self.outer,
            "step_s": self.apart,
            "step_s_if_all": self.together,
            "even_link_bytes_per_s": self.even,
            "link_bytes_per_s": self.link,
        }

    def line(self, sites: int, every: int) -> str:
        ratio = self.together / self.apart
        text = f"{sites}, an outer step of {self.outer:.3g} s every {every}; summing in every step takes {ratio:.3g}x"
        if self.even is None:
            return text
        speed = 8e-9 * self.even
        return (
            f"{text}. Sites win (over {EVEN:g}x) where links between them are slower than {speed:.3g} Gbit/s"
        )


def slow_links(apart: Setting, together: Setting) -> SlowLinks:
    """together: the same run without sites."""

    across = apart.group("sites").nodes > 1
    which = "inter" if across else "intra"
    link: Link = getattr(apart.cluster, which)

    def seconds(s: Setting, speed: float) -> float:
        wire = replace(getattr(s.cluster, which), bandwidth=speed, reduce=None)
        return step(replace(s, cluster=replace(s.cluster, **{which: wire}))).seconds

    outer, both = outer_seconds(apart), (step(apart).seconds, step(together).seconds)
    if apart.cluster.machine and not across:  # its table prices messages, whatever the link
        return SlowLinks(outer, *both, None, None)
    even = crossing(lambda speed: seconds(together, speed) / seconds(apart, speed))
    return SlowLinks(outer, *both, even, link.bandwidth)


def crossing(ratio: Callable[[float], float], tries: int = 24) -> float | None:
    """The speed at which a falling ratio reaches EVEN, by bisection; None if it does not."""
    low, high = math.log(SLOWEST), math.log(FASTEST)
    if not ratio(FASTEST) < EVEN < ratio(SLOWEST):
        return None
    for _ in range(tries):
        middle = (low + high) / 2
        low, high = (middle, high) if ratio(math.exp(middle)) > EVEN else (low, middle)
    return math.exp(high)
