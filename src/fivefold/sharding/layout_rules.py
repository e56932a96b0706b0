"""The rules of a layout that do not depend on the model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fivefold.errors import UserError, did_you_mean
from fivefold.schedules.collectives import choose
from fivefold.schedules.collectives.choose import ALL_REDUCES
from fivefold.schedules.compression import NONE, problem
from fivefold.schedules.pipeline import SCHEDULES, stages_per_rank
from fivefold.sharding.layout import AXES, Layout, groups, summing_groups
from fivefold.sharding.layout_text import to_text
from fivefold.sharding.syncs import zeropp
from fivefold.sharding.tiers import NOT_OFFLOADED, OFFLOADS, partitions

MOST_RANKS = 1_000_000
"""Ranks of a layout: ten times as many as the largest run had so far."""


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
    if (layout.dp * layout.cp) % layout.ep:
        yield (
            {"ep", "dp_replicate", "dp_shard", "cp"},
            f"ep={layout.ep} must divide dp_replicate x dp_shard x cp = {layout.dp * layout.cp}",
        )
    shard = layout.dp_shard * layout.cp
    if layout.zero and shard % layout.ep:
        yield (
            {"ep", "zero", "dp_shard", "cp"},
            f"with zero={layout.zero}, ep={layout.ep} must divide dp_shard x cp = {shard}",
        )
    if layout.sp and layout.tp == 1:
        yield {"sp", "tp"}, "sp=true cuts the sequence between tensor-parallel ranks: it needs tp > 1"
    if layout.sp_regather and not layout.sp:
        yield {"sp_regather", "sp"}, "sp_regather=true gathers what sp has cut: it needs sp=true"
    if message := problem(layout.compress):
        yield {"compress"}, message
    elif layout.compress != NONE and layout.zero:
        yield (
            {"compress", "zero"},
            f"compress={layout.compress} sums whole gradients of replicas: it needs zero=0, not zero={layout.zero}",
        )
    yield from _zeropp_problems(layout)
    yield from _offload_problems(layout)
    if layout.all_reduce not in ALL_REDUCES:
        near = did_you_mean(layout.all_reduce, ALL_REDUCES)
        yield (
            {"all_reduce"},
            f"all_reduce={layout.all_reduce} is unknown{near} (valid: {', '.join(ALL_REDUCES)})",
        )
    else:
        for name in summing_groups(layout):
            if message := choose.problem(layout.all_reduce, groups(layout)[name][0]):
                yield {"all_reduce", "dp_replicate", "dp_shard", "cp", "ep"}, f"all_reduce: {message}"
    try:
        if layout.pp > 1 or layout.schedule not in SCHEDULES:
            stages_per_rank(layout.schedule, layout.virtual_stages)
    except UserError as error:
        yield {"schedule", "virtual_stages"}, str(error).removeprefix("layout.")


def _offload_problems(layout: Layout) -> Iterator[tuple[set[str], str]]:
    if layout.offload not in OFFLOADS:
        near = did_you_mean(layout.offload, OFFLOADS)
        yield {"offload"}, f"offload={layout.offload} is unknown{near} (valid: {', '.join(OFFLOADS)})"
        return
    away = OFFLOADS[layout.offload]
    if away.divided and away.stays and not partitions(layout.offload, layout.recompute, layout.tp, layout.sp):
        yield (
            {"offload", "recompute", "tp", "sp"},
            f"offload={layout.offload} divides the inputs of recomputed blocks over tensor-parallel ranks, so it needs "
            f"recompute=full and tp > 1 without sp. Nearest valid: offload={NOT_OFFLOADED}",
        )
    if away.working != "device" and (layout.zero or layout.pp > 1):
        other = f"zero={layout.zero}" if layout.zero else f"pp={layout.pp}"
        why = (
            "gathers weights from rows in memory"
            if layout.zero
            else "has several microbatches in every block"
        )
        yield (
            {"offload", "zero", "pp"},
            f"offload={layout.offload} does not combine with {other}, which {why}. Nearest valid: offload=states:disk",
        )
    if away.gradients != "device" and layout.compress != NONE:
        yield (
            {"offload", "compress"},
            f"offload={layout.offload} does not combine with compress={layout.compress}, whose residuals belong to "
            "buckets in memory. Nearest valid: offload=states:disk",
        )


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
    if layout.ep > 1:
        yield (
            {"zeropp", "ep"},
            f"zeropp={layout.zeropp} does not combine with ep={layout.ep}: experts are shared by groups of their own",
        )
    if message := node_problem(layout):
        yield {"zeropp", "ranks_per_node", "dp_shard", "cp", "tp"}, message


def on_nodes(layout: Layout, per_node: int) -> Layout:
    """The layout on nodes of so many ranks, unless it says how many. Only ZeRO++ depends on it.

    Raises:
        UserError: ZeRO++ would not fill the nodes evenly.
    """
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
