"""Bytes that a rank sends in a step, by axis, counted as ring algorithms send them (see communication.py)."""

from __future__ import annotations

from collections import Counter

from fivefold.plan import memory, operations
from fivefold.plan.communication import group
from fivefold.plan.operations import Message, Operation
from fivefold.plan.time import Setting
from fivefold.sharding import stages_of


def sent(s: Setting) -> dict[str, int]:
    """Of the rank that sends most on each axis."""
    by_stage = memory.stages(s.model, s.layout, s.software.partition)
    most: Counter[str] = Counter()
    for position in range(s.layout.pp):
        total: Counter[str] = Counter()
        for stage in stages_of(s.layout, position):
            for number in by_stage[stage]:
                ops = operations.block(s.sizes, s.software, operations.is_mixed(s.model, number))
                total.update(_messages(ops, s, s.layout.recompute))
            if stage == 0:
                total.update(_messages(operations.begin(s.sizes, s.software), s, "none"))
            if stage == len(by_stage) - 1:
                total.update(_messages(operations.end(s.sizes, s.software), s, "none"))
            edges = (stage > 0) + (stage < len(by_stage) - 1)
            if s.layout.pp > 1:
                total["pp"] += int(edges * s.microbatches * s.sizes.n * s.model.dim * s.sizes.e)
        total["dp"] += _data(s, position)
        for axis, size in total.items():
            most[axis] = max(most[axis], size)
    return {axis: most[axis] for axis in ("tp", "cp", "pp", "ep", "dp") if most[axis]}


def _messages(ops: list[Operation], s: Setting, recompute: str) -> Counter[str]:
    """Of all microbatches of a step."""
    found: Counter[str] = Counter()
    for op in ops:
        forward = 1 + (recompute == "full" or (recompute == "selective" and op.part == "core"))
        for times, messages in ((forward, op.sent_forward), (1, op.sent_backward)):
            for message in messages:
                found[message.axis] += int(times * s.microbatches * share(message, s))
    return found


def share(message: Message, s: Setting) -> float:
    """Bytes that one rank sends of a collective."""
    if message.what == "ring":
        return message.size
    n = group(s.layout, s.cluster, message.axis).ranks
    return message.size * (n - 1) / n * (2 if message.what == "all_reduce" else 1)


def _data(s: Setting, position: int) -> int:
    """Sums of gradients and gathered weights (see parallel/zero.py): 2 Psi at stages 0 and 1, (1 + m) Psi at 2, 3 m Psi
    at 3, each times (n-1)/n and its dtype's bytes."""
    own = memory.rank_elements(s.model, s.layout, s.software.partition)[position]
    b, total = s.software.states[s.dtype], 0.0
    for computes, keeps, kind in own.groups():
        if s.layout.zero == 0:
            n = group(s.layout, s.cluster, f"{kind}dp" if kind else "batch").ranks
            total += 2 * (n - 1) / n * computes * b.reduce
            continue
        n, replicas = group(s.layout, s.cluster, f"{kind}shard").ranks, s.layout.dp_replicate
        gathers = 2 * s.microbatches if s.layout.zero == 3 else 1
        scatters = 1 if s.layout.zero == 1 else s.microbatches
        total += (n - 1) / n * computes * (gathers * b.working + scatters * b.reduce)
        total += 2 * (replicas - 1) / replicas * keeps * b.reduce
    return int(total)
