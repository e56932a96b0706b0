"""The link speed between sites from which on training apart is faster than summing gradients in every step."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from fivefold.plan.cluster.devices import Link
from fivefold.plan.setting import Setting
from fivefold.plan.time.sync_costs import outer_seconds
from fivefold.plan.time.time import step

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


def compare(apart: Setting, together: Setting) -> SlowLinks:
    """together: the same run without sites."""

    def ratio(link: float) -> float:
        found = [step(replace(s, cluster=faster(s, link))).seconds for s in (together, apart)]
        return found[0] / found[1]

    across = apart.group("sites").nodes > 1

    def faster(s: Setting, speed: float) -> Any:
        wire = replace(s.cluster.inter if across else s.cluster.intra, bandwidth=speed, reduce=None)
        return replace(s.cluster, **{"inter" if across else "intra": wire})

    wire: Link = apart.cluster.inter if across else apart.cluster.intra
    measured = (
        apart.cluster.machine is not None and not across
    )  # its table prices messages, whatever the link
    even = None if measured else crossing(ratio)
    seconds = step(apart).seconds, step(together).seconds
    return SlowLinks(outer_seconds(apart), *seconds, even, None if measured else wire.bandwidth)


def crossing(ratio: Callable[[float], float], tries: int = 24) -> float | None:
    """The speed at which a falling ratio reaches EVEN, by bisection; None if it does not."""
    low, high = math.log(SLOWEST), math.log(FASTEST)
    if not ratio(FASTEST) < EVEN < ratio(SLOWEST):
        return None
    for _ in range(tries):
        middle = (low + high) / 2
        low, high = (middle, high) if ratio(math.exp(middle)) > EVEN else (low, middle)
    return math.exp(high)
