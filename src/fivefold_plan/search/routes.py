"""What a pipeline computes one after the other, under any of its schedules: a lower bound of a step's seconds before
single schedules are looked at."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from fivefold.schedules.pipeline import SCHEDULES, ends_upwards
from fivefold.sharding.layout import Layout, changed
from fivefold_plan.search.shared import Costs, Share, SharedCosts


class Route(NamedTuple):
    """To a rank, through its microbatches, and perhaps back. before, part: see `Position`. back: the backward of the
    stages before follows."""

    before: Share
    part: Share
    back: bool

    def under(self, other: Route) -> bool:
        """True if it is no longer, whatever a block takes."""
        parts = zip(
            (*self.before, *self.part, self.back), (*other.before, *other.part, other.back), strict=True
        )
        return all(one <= two for one, two in parts)


class Routes(NamedTuple):
    """Those of a schedule; another one is that of a microbatch through all stages and back. copies: of the model, each
    of which has its share of the microbatches. splits, paired: as of the schedule."""

    copies: int
    splits: bool
    paired: bool
    all: list[Route]

    def under(self, other: Routes) -> bool:
        """True if the schedule takes no longer, whatever a block takes, split or whole."""
        alike = self.copies == other.copies and self.splits == other.splits and self.paired >= other.paired
        return alike and all(any(one.under(two) for two in other.all) for one in self.all)

    def seconds(self, costs: Costs, whole: Share) -> list[tuple[float, float]]:
        """Seconds of each route: once, and for each microbatch."""
        found = [(sum(passing(costs, self.splits).of(whole)), 0.0)]
        for before, part, back in self.all:
            ahead, behind = costs.of(before)
            busy = sum(costs.of(part)) - (costs.hidden(part) if self.paired else 0.0)
            found.append((ahead + behind * back, busy))
        return found


def passing(costs: Costs, splits: bool) -> Costs:
    """Costs of what a microbatch waits for: not for gradients of weights that a schedule computes later."""
    return Costs(*(cost._replace(weight=0.0) for cost in costs)) if splits else costs


def fastest(
    shared: SharedCosts, x: Layout, schedules: Sequence[dict[str, Any]], microbatches: int
) -> list[Routes]:
    """The routes of these schedules, but not of those that are never faster than another one."""
    every, found = [_routes(shared, changed(x, **way), microbatches) for way in schedules], list[Routes]()
    for one in sorted(every, key=lambda one: (-one.paired, _longest(one))):
        if not any(other.under(one) for other in found):
            found.append(one)
    return found


def _longest(one: Routes) -> float:
    return max(sum(route.before) + sum(route.part) for route in one.all)


def _routes(shared: SharedCosts, x: Layout, microbatches: int) -> Routes:
    upwards = x.pp == 1 or ends_upwards(x.schedule, x.pp, microbatches, x.stages_per_rank)
    every = [Route(at.before, at.part, upwards) for at in shared.groups(x)]
    longest = [one for one in every if not any(one != other and one.under(other) for other in every)]
    return Routes(x.copies, x.splits_backward, SCHEDULES[x.schedule].paired, longest)
