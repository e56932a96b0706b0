"""Finds the layouts that train a recipe fastest on a cluster.

All sizes of the axes, ZeRO stages, schedules, microbatches and modes of recomputation that make a valid layout are
considered. Each is first estimated in microseconds: its stages' costs are those of few distinct settings, computed
once; its bubble and its live microbatches follow from closed forms. The estimates put the candidates in order; the
first of them are then predicted in full, the pipeline simulated.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from fivefold.errors import UserError
from fivefold.layout import Layout, problems, to_text
from fivefold.plan import memory, operations, time
from fivefold.plan.clusters import Cluster
from fivefold.plan.predict import Plan, dtype_of, limit, price, resolved, setting, with_reduce
from fivefold.plan.software import FIVEFOLD, Software
from fivefold.plan.time import Cost
from fivefold.recipe import Recipe
from fivefold.recipe.rules import contradictions
from fivefold.recipe.schema import ModelSection

MOST_STAGES = 64
PREDICTED = 2  # candidates predicted in full for each plan that is asked for
ZERO = (0, 1, 2, 3)
MICROBATCHES = (1, 2, 4, 8, 16, 32)
RECOMPUTE = ("none", "selective", "full")
SCHEDULES = (("1f1b", 1), ("interleaved", 2), ("interleaved", 4), ("zb_h1", 1), ("zbv", 2))


@dataclass(frozen=True)
class Candidate:
    """A layout with its microbatch. seconds, peak: the estimate."""

    layout: Layout
    B: int
    microbatches: int
    seconds: float
    peak: float


@dataclass(frozen=True)
class Found:
    """plans: best first. rejected: how many candidates lost, by reason. near: of those that do not fit the one that
    would take the least memory."""

    plans: list[Plan]
    considered: int
    rejected: dict[str, int]
    near: Plan | None

    def as_json(self) -> dict[str, Any]:
        return {
            "plans": [
                plan.as_json() | {"lost": why} for plan, why in zip(self.plans, self.why(), strict=True)
            ],
            "considered": self.considered,
            "rejected": self.rejected,
        }

    def why(self) -> list[str]:
        """Of each plan what it loses most by, beside the best; empty for the best."""
        return ["", *(_why(plan, self.plans[0]) for plan in self.plans[1:])] if self.plans else []


def _why(plan: Plan, best: Plan) -> str:
    """The part of the step that grew most, as a share of the best plan's step."""
    names = {
        "bubble": plan.step.bubble - best.step.bubble,
        "messages within the model": plan.step.exposed["model"] - best.step.exposed["model"],
        "sums of gradients": plan.step.exposed["data"] - best.step.exposed["data"],
        "computing": plan.step.compute - best.step.compute,
    }
    name = max(names, key=lambda key: names[key])
    return f"{name} +{100 * names[name] / best.step.seconds:.1f}%"


def search(recipe: Recipe, cluster: Cluster, top: int = 10, software: Software = FIVEFOLD) -> Found:
    """The `top` fastest layouts that fit.

    Raises:
        UserError: the cluster has no number of devices; no layout divides the batch over them.
    """
    if not cluster.devices:
        raise UserError(
            f"cluster '{cluster.name}': a search needs a number of devices, for example {cluster.name}:64"
        )
    full, dtype = resolved(recipe), dtype_of(recipe, cluster)
    batch = full.train.global_batch_size
    estimate = _Estimate(full.model, cluster, dtype, with_reduce(software, recipe.precision.reduce))
    found, lost, seen = [], Counter[str](), 0
    most = limit(cluster)
    least: Candidate | None = None
    for layout, B, count in _candidates(full.model, cluster, batch):
        seen += 1
        candidate = estimate(layout, B, count)
        if candidate.peak <= most:
            found.append(candidate)
        else:
            lost["does not fit"] += 1
            least = candidate if least is None or candidate.peak < least.peak else least
    if not seen:
        raise UserError(
            f"no layout of {cluster.devices} devices divides a batch of {batch} sequences: train.global_batch_size "
            f"must be divisible by the data-parallel ranks"
        )
    valid = (c for c in _best_first(found) if not any(contradictions(_with(full, c))))
    plans = _predicted(valid, top, estimate, most, lost)
    lost["slower"] += len(found) - len(plans) - lost["does not fit, predicted in full"]
    near = None if plans or least is None else estimate.plan(least)
    return Found(plans, seen, {reason: n for reason, n in lost.items() if n}, near)


def _best_first(found: list[Candidate]) -> list[Candidate]:
    """By estimated time; of equals that with more room."""
    return sorted(found, key=lambda c: (c.seconds, c.peak))


def _with(recipe: Recipe, candidate: Candidate) -> Recipe:
    """The recipe with this layout and microbatch."""
    names = type(recipe.layout).model_fields
    layout = {name: value for name, value in vars(candidate.layout).items() if name in names}
    train = recipe.train.model_copy(update={"microbatch_size": candidate.B})
    return recipe.model_copy(
        update={"layout": recipe.layout.model_copy(update=layout | {"microbatches": None}), "train": train}
    )


def apply(recipe: Recipe, plan: Plan) -> Recipe:
    """The recipe that trains as planned."""
    return _with(recipe, Candidate(plan.layout, plan.setting.sizes.B, plan.setting.microbatches, 0.0, 0.0))


def _predicted(
    order: Iterable[Candidate], top: int, estimate: _Estimate, most: int, lost: Counter[str]
) -> list[Plan]:
    plans: list[Plan] = []
    for candidate in order:
        plan = estimate.plan(candidate)
        if plan.peak_bytes <= most:
            plans.append(plan)
        else:
            lost["does not fit, predicted in full"] += 1
        if len(plans) >= PREDICTED * top:
            break
    return sorted(plans, key=lambda plan: plan.step.seconds)[:top]


def _candidates(model: ModelSection, cluster: Cluster, batch: int) -> Iterator[tuple[Layout, int, int]]:
    """(layout, sequences of a microbatch, microbatches)."""
    for sizes in _axes(model, cluster, batch):
        for layout in _options(model, sizes, cluster):
            share = batch // layout.dp
            for B in MICROBATCHES:
                if share % B == 0:
                    yield layout, B, share // B


def _axes(model: ModelSection, cluster: Cluster, batch: int) -> Iterator[Layout]:
    """Sizes of the axes; the data axis as replicas."""
    devices, kv_heads = cluster.devices, model.kv_heads or model.heads
    for tp in _divisors(math.gcd(devices, kv_heads), cluster.per_node):
        if any(size % tp for size in (model.ffn_dim or tp, model.vocab_size or tp)):
            continue
        for pp in _divisors(devices // tp, min(MOST_STAGES, model.layers)):
            for cp in _divisors(devices // tp // pp, max(1, model.seq_len // 2048)):
                dp = devices // tp // pp // cp
                sp = tp > 1 and model.seq_len // cp % tp == 0
                if batch % dp == 0 and model.seq_len % (2 * cp) == 0 and (cp == 1 or cp & (cp - 1) == 0):
                    yield Layout(pp=pp, dp_replicate=dp, cp=cp, tp=tp, sp=sp)


def _options(model: ModelSection, sizes: Layout, cluster: Cluster) -> Iterator[Layout]:
    """How the axes are used."""
    schedules = SCHEDULES if sizes.pp > 1 else (("1f1b", 1),)
    for data in _shared(sizes, cluster):
        for experts in _divisors(math.gcd(data.dp * data.cp, model.experts or 1), 10**9):
            for name, virtual in schedules:
                for recompute in RECOMPUTE:
                    layout = replace(
                        data, ep=experts, schedule=name, virtual_stages=virtual, recompute=recompute
                    )
                    fits = sizes.pp == 1 or sizes.pp * virtual <= model.layers
                    simple = data.zero < 2 or sizes.pp == 1 or name == "1f1b"
                    if fits and simple and not any(problems(layout)):
                        yield layout


def _shared(sizes: Layout, cluster: Cluster) -> Iterator[Layout]:
    """Who shares states with whom: nobody, all data-parallel ranks, or those of a node."""
    yield sizes
    dp = sizes.dp_replicate
    inside = math.gcd(dp, max(1, cluster.per_node // (sizes.tp * sizes.cp)))
    for zero in ZERO[1:]:
        if dp * sizes.cp > 1:
            yield replace(sizes, dp_replicate=1, dp_shard=dp, zero=zero)
        if 1 < inside < dp and zero in (1, 3):
            yield replace(sizes, dp_replicate=dp // inside, dp_shard=inside, zero=zero)


def _divisors(number: int, most: int) -> list[int]:
    return [d for d in range(1, min(number, most) + 1) if number % d == 0]


class _Estimate:
    """Seconds and peak bytes of a candidate from few numbers, each computed once."""

    def __init__(self, model: ModelSection, cluster: Cluster, dtype: str, software: Software):
        self.model, self.cluster, self.dtype, self.software = model, cluster, dtype, software
        self.costs: dict[tuple[object, ...], tuple[Cost, Cost, float, float, float, float]] = {}
        self.rest: dict[tuple[object, ...], tuple[float, float, float, float]] = {}

    def plan(self, candidate: Candidate) -> Plan:
        return price(self._setting(candidate.layout, candidate.B, candidate.microbatches))

    def _setting(self, layout: Layout, B: int, microbatches: int) -> time.Setting:
        return setting(self.model, layout, self.cluster, B, microbatches, self.dtype, self.software)

    def __call__(self, layout: Layout, B: int, microbatches: int) -> Candidate:
        block, ends, kept, kept_ends, inside, loss = self._block(layout, B, microbatches)
        p, m = layout.pp, microbatches
        v = 2 if layout.schedule in ("zbv", "dualpipev") else layout.virtual_stages
        stages = p * v if p > 1 else 1
        each = math.ceil(self.model.layers / stages) * (v if p > 1 else 1)
        busy = max(
            self.model.layers / p * block.seconds + ends.seconds / p, ends.seconds + block.seconds * (p == 1)
        )
        busy = max(busy, (each - 1 + (p == 1)) * block.seconds)
        idle = (
            {"1f1b": 1.0, "interleaved": 1 / v, "zb_h1": 0.4, "zbv": 0.2}[layout.schedule] if p > 1 else 0.0
        )
        states, buffers, data = self._states(layout, m, busy)
        seconds = busy * (m + idle * (p - 1)) + data
        live = float(min(m, p))
        if layout.schedule == "interleaved" and p > 1:
            live = min(m, p * (1 + (p - 1) / (p * v)))
        peak = states + buffers + live * kept * self.model.layers / p + max(inside, loss)
        return Candidate(layout, B, m, seconds, peak + kept_ends / p)

    def _block(self, layout: Layout, B: int, m: int) -> tuple[Cost, Cost, float, float, float, float]:
        """Of a block: cost and kept bytes; of both ends; the workspaces."""
        gathers = (layout.zero, layout.dp_shard) if layout.zero > 1 else 0
        key = (layout.tp, layout.cp, layout.ep, layout.sp, layout.recompute, B, gathers, m == 1)
        if key not in self.costs:
            flat = replace(layout, pp=1, schedule="1f1b", virtual_stages=1)
            s = self._setting(flat, B, m)
            mixed = operations.is_mixed(self.model, self.model.layers - 1)
            block = operations.block(s.sizes, self.software, mixed)
            ends = [*operations.begin(s.sizes, self.software), *operations.end(s.sizes, self.software)]
            kept = operations.kept(block, layout.recompute, self.software)
            again = (
                operations.kept(block, "none", self.software) - kept if layout.recompute != "none" else 0.0
            )
            self.costs[key] = (
                time.block_cost(s, self.model.layers - 1),
                time.part(ends, s),
                kept,
                operations.kept(ends, "none", self.software),
                max(op.workspace for op in block) + again,
                max(op.workspace for op in ends),
            )
        return self.costs[key]

    def _states(self, layout: Layout, m: int, busy: float) -> tuple[float, float, float]:
        """Bytes of states and buffers, and seconds of gradients and optimizer, of the fullest rank."""
        key = (
            layout.pp,
            layout.dp_replicate,
            layout.dp_shard,
            layout.cp,
            layout.tp,
            layout.ep,
            layout.zero,
            m == 1,
        )
        if key not in self.rest:
            flat = replace(layout, schedule="1f1b", virtual_stages=1)
            s, b = self._setting(flat, 1, m), self.software.states[self.dtype]
            blocks, before, behind, _ = memory.elements(self.model, flat)
            each = math.ceil(self.model.layers / layout.pp)
            own = max(before, behind, key=lambda part: part.computes) if layout.pp > 1 else before + behind
            one = blocks[-1]
            own += memory.Elements(
                each * one.computes,
                each * one.keeps,
                one.largest,
                each * one.experts,
                each * one.experts_keep,
            )
            size = sum(memory.state_bytes(b, layout.zero, own.computes, own.keeps, m))
            reduced, gathered = time.data_parallel(s, own, 0.0, 0.0)
            self.rest[key] = (
                size,
                memory.buffers(self.model, flat, own, b),
                time.optimizer(s, own) + self.software.step,
                reduced + gathered,
            )
        size, buffers, after, sums = self.rest[key]
        hidden = max(0.1 * sums, sums - 0.9 * busy) if self.software.overlap_data else sums
        return size, buffers, after + hidden


def describe_nothing(found: Found) -> str:
    """What to say where no layout fits."""
    if found.near is None:
        return "no layout is valid"
    plan = found.near
    return (
        f"no layout fits: the one that takes least, {to_text(plan.layout)} with microbatches of "
        f"{plan.setting.sizes.B}, needs {plan.peak_bytes / 2**30:.1f} GiB of {plan.limit / 2**30:.1f} GiB"
    )
