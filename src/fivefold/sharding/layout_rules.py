"""The rules of a layout that do not depend on the model, and the valid layouts that are most like one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import combinations, islice, product
from typing import Any

from fivefold.errors import UserError, did_you_mean
from fivefold.schedules.collectives.registry import AUTO, CHOICES, LIBRARY, algorithm_problem
from fivefold.schedules.compression import NONE, problem
from fivefold.schedules.pipeline import SCHEDULES, copies_problem, costs_of, stages_per_rank, tuning_problem
from fivefold.sharding.layout import AXES, Layout, divisors, equation, groups, summing_groups, to_text
from fivefold.sharding.parts import sharing_group
from fivefold.sharding.tiers import NOT_OFFLOADED, OFFLOADS, partitions
from fivefold.sharding.units import zeropp

MOST_RANKS = 1_000_000
"""Ranks of a layout: ten times as many as the largest run had so far."""
MANY_DIVISORS = 40
"""Numbers of ranks with more divisors can be divided between the axes in more than 10,000 ways."""


PLAIN = {"all_reduce": AUTO, "all_gather": LIBRARY, "reduce_scatter": LIBRARY, "zeropp": NONE}
"""How messages are sent that any number of ranks can send."""


def problems(layout: Layout) -> Iterator[tuple[set[str], str]]:
    """Yields the errors of a layout that do not depend on the model: (fields, message)."""
    if layout.ranks > MOST_RANKS:
        used = [axis for axis in AXES if getattr(layout, axis) > 1]
        yield {*used}, f"{' x '.join(used)} = {layout.ranks:,} ranks; at most {MOST_RANKS:,}"
        return
    if layout.dp_shard > 1 and layout.zero == 0:
        yield (
            {"dp_shard", "zero"},
            f"dp_shard={layout.dp_shard} shards states between ranks: it needs zero=1, 2 or 3",
        )
    if layout.zero and layout.ranks > 1 and layout.dp_shard * layout.cp == 1:
        yield (
            {"zero", "dp_shard", "cp"},
            f"zero={layout.zero} shards states between ranks: it needs dp_shard > 1 (or cp > 1)",
        )
    yield from _expert_problems(layout)
    if layout.sp and layout.tp == 1:
        yield {"sp", "tp"}, "sp=true cuts the sequence between tensor-parallel ranks: it needs tp > 1"
    if layout.sp_regather and not layout.sp:
        yield {"sp_regather", "sp"}, "sp_regather=true gathers what sp has cut: it needs sp=true"
    if layout.tp_chunks > 1 and not layout.sp:
        cuts = f"tp_chunks={layout.tp_chunks} cuts the messages of sequence parallelism and the products beside them"
        yield {"tp_chunks", "sp"}, f"{cuts}: it needs sp=true. Nearest valid: tp_chunks=1"
    if message := problem(layout.compress):
        yield {"compress"}, message
    elif layout.compress != NONE and layout.zero:
        yield (
            {"compress", "zero"},
            f"compress={layout.compress} sums whole gradients of replicas: it needs zero=0, not zero={layout.zero}",
        )
    yield from _zeropp_problems(layout)
    yield from _offload_problems(layout)
    yield from _algorithm_problems(layout)
    try:
        if layout.pp > 1 or layout.schedule not in SCHEDULES:
            stages_per_rank(layout.schedule, layout.virtual_stages)
            yield from _copies_problems(layout)
            if message := tuning_problem(layout.schedule, layout.tuned):
                yield {"schedule", *layout.tuned}, message
            costs_of(layout.zb_costs)
    except UserError as error:
        yield {"schedule", "virtual_stages"}, str(error).removeprefix("layout.")


def _expert_problems(layout: Layout) -> Iterator[tuple[set[str], str]]:
    """The expert axis divides the ranks with different tokens, with ZeRO those that share states."""
    ep, fold, ways = layout.ep, layout.ep_fold, [("", "dp_replicate x dp_shard x cp", layout.dp * layout.cp)]
    if fold and layout.tp > 1 and not layout.sp:
        yield {"ep_fold", "sp"}, "ep_fold=true sends tokens of each tensor-parallel rank: it needs sp=true"
    if layout.zero:
        ways.append((f"with zero={layout.zero}, ", "dp_shard x cp", layout.dp_shard * layout.cp))
    for where, factors, ranks in ways:
        if ranks * layout.folded % ep:
            names = {"ep", *factors.split(" x "), *["zero"] * bool(where), *["ep_fold", "tp"] * fold}
            message = f"{where}ep={ep} must divide {factors}{' x tp' * fold} = {ranks * layout.folded}"
            if not fold and layout.sp and ranks * layout.tp % ep == 0:
                message += f" (ep_fold=true counts tp={layout.tp}, too)"
            yield names, message


def _copies_problems(layout: Layout) -> Iterator[tuple[set[str], str]]:
    """What two copies of the model in a pipeline do not combine with."""
    name = layout.schedule
    if layout.copies == 1:
        return
    if message := copies_problem(name, layout.pp):
        yield {"schedule", "pp"}, message
    hidden, counted = "whose messages pairs do not hide", "which counts with one copy of the model"
    pairs = [("tp", 1, hidden), ("cp", 1, hidden)] * SCHEDULES[name].paired
    for field, plain, why in (*pairs, ("offload", NOT_OFFLOADED, counted), ("compress", NONE, counted)):
        if (value := getattr(layout, field)) != plain:
            other = f", or schedule={name.removesuffix('_paired')}" if why == hidden else ""
            message = f"schedule={name} does not combine with {field}={value}, {why}"
            yield {"schedule", field}, f"{message}. Nearest valid: {field}={plain}{other}"


def _unknown(field: str, value: str, valid: Iterable[str]) -> tuple[set[str], str]:
    return {field}, f"{field}={value} is unknown{did_you_mean(value, valid)} (valid: {', '.join(valid)})"


def _offload_problems(layout: Layout) -> Iterator[tuple[set[str], str]]:
    if layout.offload not in OFFLOADS:
        yield _unknown("offload", layout.offload, OFFLOADS)
        return
    away = OFFLOADS[layout.offload]
    if away.divided and away.stays and not partitions(layout.offload, layout.recompute, layout.tp, layout.sp):
        yield (
            {"offload", "recompute", "tp", "sp"},
            f"offload={layout.offload} divides the inputs of recomputed blocks over tensor-parallel ranks, so it needs "
            f"recompute=full and tp > 1 without sp. Nearest valid: offload={NOT_OFFLOADED}",
        )
    if layout.offload_window == 1:
        yield {"offload_window"}, "offload_window=1 reads no block ahead. Nearest valid: offload_window=2"
    if layout.early and (away.gradients == "device" or layout.tp > 1):
        other, why = "offload", f"offload={layout.offload}, which leaves gradients on the device"
        if layout.tp > 1:
            other, why = "tp", f"tp={layout.tp}, with which no gradient is complete before the last one"
        yield (
            {"offload_update", other},
            f"offload_update=early does not combine with {why}. Nearest valid: beside",
        )
    if away.gradients != "device" and layout.compress != NONE:
        yield (
            {"offload", "compress"},
            f"offload={layout.offload} does not combine with compress={layout.compress}, whose residuals belong to "
            "buckets in memory. Nearest valid: offload=states:disk",
        )


def _algorithm_problems(layout: Layout) -> Iterator[tuple[set[str], str]]:
    for primitive, valid in CHOICES.items():
        name = getattr(layout, primitive)
        if name not in valid:
            yield _unknown(primitive, name, valid)
        if name in (LIBRARY, AUTO) or name not in valid:
            continue
        sharing = dict.fromkeys(sharing_group(layout, expert) for expert in (False, layout.ep > 1))
        summing = [(group, groups(layout)[group][0]) for group in summing_groups(layout)]
        for _, ranks in summing if primitive == "all_reduce" else sharing:
            if message := algorithm_problem(primitive, name, ranks):
                yield {primitive, "dp_replicate", "dp_shard", "cp", "ep"}, f"{primitive}: {message}"


def _zeropp_problems(layout: Layout) -> Iterator[tuple[set[str], str]]:
    if layout.zeropp == NONE:
        return
    try:
        zeropp(layout.zeropp)
    except UserError as error:
        yield {"zeropp"}, str(error)
        return
    if layout.zero != 3:
        yield (
            {"zeropp", "zero"},
            f"zeropp={layout.zeropp} changes what zero=3 sends: it needs zero=3, not zero={layout.zero}",
        )
    plus = zeropp(layout.zeropp)
    for field, part in (("all_gather", plus.two_gathers), ("reduce_scatter", plus.gradients)):
        if part and (by := getattr(layout, field)) != LIBRARY:
            yield (
                {"zeropp", field},
                f"zeropp={layout.zeropp} sends messages of its own in place of {field}={by}: it needs "
                f"{field}={LIBRARY}",
            )
    if layout.ep > 1:
        yield (
            {"zeropp", "ep"},
            f"zeropp={layout.zeropp} does not combine with ep={layout.ep}: experts are shared by groups of their own",
        )
    if message := node_problem(layout):
        yield {"zeropp", "ranks_per_node", "dp_shard", "cp", "tp"}, message


def on_nodes(layout: Layout, per_node: int) -> Layout:
    """The layout on nodes of so many ranks, unless it says how many. Only ZeRO++ depends on it. Raises UserError:
    ZeRO++ would not fill the nodes evenly."""
    if layout.zeropp == NONE:
        return layout
    found = layout if layout.ranks_per_node else replace(layout, ranks_per_node=per_node)
    if message := node_problem(found):
        raise UserError(f"layout '{to_text(layout)}': {message}")
    return found


def node_problem(layout: Layout) -> str:
    """Says why the ranks that share states do not fill nodes evenly; "" if they do."""
    node, shard = layout.ranks_per_node or layout.ranks, groups(layout)["shard"][0]
    inside = groups(layout)["inside"][0]
    if shard % inside == 0 and (inside == 1 or layout.ranks <= node or node % (inside * layout.tp) == 0):
        return ""
    apart = f" with {layout.tp} tensor-parallel ranks each" if layout.tp > 1 else ""
    return (
        f"zeropp={layout.zeropp} shares states evenly over nodes, but {shard} ranks{apart} share them and a node has "
        f"{node} (ranks_per_node)"
    )


def validate(layout: Layout, ranks: int, allowed: Callable[[Layout], bool] = lambda layout: True) -> None:
    """Checks that a layout is valid and fills exactly `ranks` ranks. allowed: True for the layouts that suit the model
    and its batch; only these are proposed. Raises UserError: with the equation that does not hold and the nearest
    layouts that do."""
    found = [message for _, message in problems(layout)]
    if layout.ranks != ranks:
        product = equation(layout).removesuffix("s").removesuffix(" rank")
        found.insert(0, f"{product}, but there are {ranks} rank{'s' * (ranks != 1)}")
    if not found:
        return
    proposal, powers = "", (2**k for k in range(ranks.bit_length() - 1, -1, -1))
    for fewer in (*range(ranks, max(0, ranks - 9), -1), *powers):
        if near := nearest(layout, fewer, 3 if fewer == ranks else 1, allowed):
            proposal = f". Nearest valid: {' or '.join(to_text(candidate) for candidate in near)}"
            if fewer != ranks:
                proposal += f" ({fewer} rank{'s' * (fewer != 1)}; the model has no layout for {ranks})"
            break
    raise UserError(f"layout '{to_text(layout)}': {'; '.join(found)}{proposal}")


def nearest(
    layout: Layout, ranks: int, count: int = 3, allowed: Callable[[Layout], bool] = lambda layout: True
) -> list[Layout]:
    """The valid layouts with `ranks` ranks that are most like `layout`: the axes change by the fewest doublings, and
    unused axes stay unused if possible. ZeRO is set to 1 where states must be shared, and to 0 where no ranks can share
    them. Messages are sent as `PLAIN` says where their algorithm, or ZeRO++, is not for so many ranks."""

    costs = [
        {new: abs(math.log2(new / old)) + (old == 1 < new) for new in divisors(ranks)}
        for old in (getattr(layout, axis) for axis in AXES)
    ]
    own = tuple(getattr(layout, name) for name in ("zero", *PLAIN))

    def distance(candidate: tuple[tuple[Any, ...], tuple[int, ...], int]) -> float:
        how, sizes, zero = candidate
        doublings = sum(cost[new] for cost, new in zip(costs, sizes, strict=True))
        return doublings + 0.5 * sum(new != old for new, old in zip((zero, *how), own, strict=True))

    stages = {0, layout.zero, layout.zero or (1 if layout.dp_shard > 1 else 0)}
    ways = product(*(dict.fromkeys((getattr(layout, name), usual)) for name, usual in PLAIN.items()))
    # there are thousands, and few of them become layouts
    candidates = sorted(product(ways, _sizes(layout, ranks), sorted(stages)), key=distance)
    found = (
        replace(
            layout, zero=zero, **dict(zip(PLAIN, how, strict=True)), **dict(zip(AXES, sizes, strict=True))
        )
        for how, sizes, zero in candidates
    )
    return list(islice((c for c in found if not any(problems(c)) and allowed(c)), count))


def _sizes(layout: Layout, ranks: int) -> Iterator[tuple[int, ...]]:
    """Sizes of all axes whose product is `ranks`. If there are too many of them (720720 ranks have 656250), those with
    at most two other sizes than the layout, or than one rank."""
    if len(divisors(ranks)) <= MANY_DIVISORS:
        yield from _factor(ranks, len(AXES))
        return
    found = set()
    for base in (tuple(layout.sizes.values()), (1,) * len(AXES)):
        for first, second in combinations(range(len(AXES)), 2):
            kept = math.prod(size for axis, size in enumerate(base) if axis not in (first, second))
            if ranks % kept == 0:
                for sizes_of_two in _factor(ranks // kept, 2):
                    sizes = list(base)
                    sizes[first], sizes[second] = sizes_of_two
                    found.add(tuple(sizes))
    yield from sorted(found)


def _factor(product: int, count: int) -> Iterator[tuple[int, ...]]:
    """All ways to write `product` as `count` ordered factors."""
    if count == 1:
        yield (product,)
        return
    for first in divisors(product):
        for rest in _factor(product // first, count - 1):
            yield (first, *rest)
