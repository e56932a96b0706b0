"""Seconds of a pipeline schedule, which the simulator runs with the costs of its stages."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

from fivefold.plan.messages import communication
from fivefold.plan.setting import Setting, schedule
from fivefold.plan.time.cost import Cost
from fivefold.schedules.pipeline import SCHEDULES, Costs, shown, simulate, simulate_oversubscribed

PipelineTimer = Callable[[Setting, Sequence[Cost]], tuple[float, list[float], list[float]]]
"""(setting, costs of the stages) -> (makespan of the schedule, end of each rank, compute time of each), seconds."""


def pipeline(s: Setting, costs: Sequence[Cost]) -> tuple[float, list[float], list[float]]:
    """Makespan of a step's schedule, end of each rank, and compute time of each rank.

    Only some of many microbatches are simulated. Once the pipeline is full, each further one takes as long as on the
    busiest rank.
    """
    m, p, v = s.microbatches, s.layout.pp, s.layout.virtual_stages
    oversubscription = s.cluster.oversubscription
    if p == 1:
        busy = m * costs[0].slowed(oversubscription).seconds
        return busy, [busy], [busy]
    rank_of = s.schedule(min(m, 2)).rank_of
    once = [0.0] * p
    for stage, cost in enumerate(costs):
        once[rank_of[stage]] += cost.seconds
    few = shown(m, p)
    parts = tuple(cost.timed for cost in costs)
    at_once = p / oversubscription  # number of pipeline ranks that can compute at full speed
    makespan, ends = _simulated(s.layout.schedule, p, few, v, parts, tuple(transfers(s).items()), at_once)
    once = [seconds - hidden_by_pairs(s, costs, rank) for rank, seconds in enumerate(once)]
    once = [max(seconds, sum(once) / at_once) if oversubscription > 1 else seconds for seconds in once]
    more = (m - few) * max(once)
    return makespan + more, [end + more for end in ends], [m * seconds for seconds in once]


def pipeline_costs(costs: Sequence[tuple[float, ...]], transfers: Mapping[tuple[int, int], float]) -> Costs:
    """What a schedule's simulation takes. costs: of each stage forward, input, weight, and the waits for experts' rows
    in forward and in backward, which pairs hide."""
    forward, inputs, weight, *rows = ([cost[i] for cost in costs] for i in range(len(costs[0])))
    return Costs(forward, inputs, weight, transfer=transfers, messages=list(zip(*rows, strict=True)))


def hidden_by_pairs(s: Setting, costs: Sequence[Cost], rank: int) -> float:
    """Seconds per microbatch that a rank's pairs hide once the pipeline is full."""
    if not SCHEDULES[s.layout.schedule].paired:
        return 0.0
    schedule = s.schedule(2 * s.layout.pp)
    price = pipeline_costs([cost.timed for cost in costs], {})
    pairs = {(a.stage, b.stage) for a, b in schedule.pairs.items() if schedule.rank_of[a.stage] == rank}
    return sum(price.hidden(*pair) for pair in pairs)


@lru_cache(maxsize=512)
def _simulated(
    name: str,
    p: int,
    m: int,
    v: int,
    costs: tuple[tuple[float, ...], ...],
    transfers: tuple[tuple[tuple[int, int], float], ...],
    at_once: float = math.inf,
) -> tuple[float, list[float]]:
    """Makespan and the end of each rank."""
    price = pipeline_costs(costs, dict(transfers))
    built = schedule(name, p, m, v)
    timeline = simulate_oversubscribed(built, price, at_once) if at_once < p else simulate(built, price)
    return timeline.makespan, [row[-1].end for row in timeline.rows]


def transfers(s: Setting) -> dict[tuple[int, int], float]:
    """Seconds to send an activation from one pipeline rank to another."""
    stride, size, gather = s.layout.ranks // s.layout.pp, s.activation, 0.0
    if s.software.scatters_transfers and s.layout.tp > 1 and not s.layout.sp:
        gather = communication.collective("all_gather", size, s.group("tp"), s.cluster)
        size /= s.layout.tp
    found, p = {}, s.layout.pp
    for a, b in [(a, (a + step) % p) for a in range(p) for step in (1, -1)]:
        crosses = a * stride // s.cluster.per_node != b * stride // s.cluster.per_node
        found[a, b] = communication.send(size, crosses, s.cluster) + gather
    return found
