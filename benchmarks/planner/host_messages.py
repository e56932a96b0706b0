"""Part of benchmarks/hosts.py: what single messages cost within hosts and between them, and every all-reduce across
hosts. It goes beyond `bench/collectives.py`, which measures one machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Mapping, Sequence
from functools import partial
from itertools import cycle
from statistics import median
from typing import Any

import torch

from fivefold.comm import Axis
from fivefold.comm.execute import Executor
from fivefold.schedules.collectives import Collective, shape_of
from fivefold.schedules.collectives.registry import LIBRARY
from fivefold_plan.bench.collectives import ARENA, MESSAGES, collectives, ping_pong, timed
from fivefold_plan.bench.collectives import fitted as of_one_machine

PINGS, PAUSE = 9, 0.02  # small messages, and seconds that they follow a large one


def fitted(found: dict[str, Any], local: int, machine: int) -> dict[str, float]:
    """What messages cost, by those that `single_messages` found.

    local: ranks on each node. machine: ranks that share one machine. A message alone takes alpha + bus_alpha + S beta,
    and m on one busy machine at once take alpha + m (bus_alpha + S bus_beta). Between nodes one takes far_alpha +
    far_bus + (S - burst) far_beta, and acks of its bytes come back; see `HostLinks` for the others.
    """
    alone, busy = ("pair", "ring") if local > 1 else ("far", "far both")
    near = {"pair": found[alone], "ring": found[busy], "gamma": found["gamma"]}
    (_, small), *_, (size, seconds), (large, longest) = found["far"]
    beta = (longest - seconds) / (large - size)
    far_bus = max(0.0, (found["far all"][0][1] - small) / max(1, machine - 1))
    return {
        **of_one_machine(near, machine),
        "far_alpha": max(1e-9, small - far_bus),
        "far_beta": beta,
        "far_bus": far_bus,
        "burst": max(0.0, large - (longest - small) / beta),
        "acks": max(0.0, (found["far both"][-1][1] - found["far both"][-2][1]) / (longest - seconds) - 1),
        "queue": found.get("queue", 0.0),
    }


def single_messages(axis: Axis, local: int) -> dict[str, Any]:
    """[bytes, seconds] of a message between two ranks of a node (`pair`), of one from every rank to the next of its
    node (`ring`); between two nodes of one message (`far`), of one in each direction (`far both`), of one from every
    rank (`far all`). queue: see `_queue`. gamma: seconds per byte that is added. local: ranks on each node.
    """
    n, r = axis.size, axis.index
    arena, other = (torch.zeros(ARENA // 4, device=axis.device) for _ in range(2))
    found: dict[str, Any] = {}
    node, place = divmod(r, local)
    next_, previous = (node * local + (place + step) % local for step in (1, -1))
    for size in MESSAGES:
        # The stretches of the arena (fp32), one after the other, again and again
        at = cycle(slice(start, start + size // 4) for start in range(0, len(arena), size // 4))

        def moves(to: int, source: int, at=at) -> None:
            axis.start_moves([(arena[next(at)], to)], [(other[next(at)], source)])()

        def both(moves=moves) -> None:
            if r in (0, local):
                moves(local - r, local - r)

        def add(name: str, run: Callable[[], object], messages: int = 1, size=size) -> None:
            found.setdefault(name, []).append([size, timed(run, axis) / messages])

        if local > 1:
            add("pair", lambda at=at: ping_pong(axis, arena[next(at)], 1), 2)
            add("ring", partial(moves, next_, previous))
        add("far", lambda at=at: ping_pong(axis, arena[next(at)], local), 2)
        add("far both", both)
        if size == MESSAGES[0]:
            add("far all", partial(moves, (r + local) % n, (r - local) % n))
    if local > 1:
        found["queue"] = _queue(axis, arena[: MESSAGES[-1] // 4], local)
    return found | {"gamma": timed(lambda: arena.add_(other), axis) / ARENA}


def _queue(axis: Axis, x: torch.Tensor, local: int) -> float:
    """Seconds that a request or a small message waits behind a large message of other ranks on the same card.

    There and back, a request and a message go each way (gloo's receiver asks for the data). Here they do so while a
    large message is under way in one direction, less the time without it: two waits."""
    times: dict[bool, list[float]] = {False: [], True: []}
    for loaded in (False, True) * PINGS:
        axis.barrier()
        start = time.perf_counter()
        if loaded and axis.index == local + 1:
            axis.start_send(x, 1)()
        elif loaded and axis.index == 1:
            axis.start_receive(x, local + 1)()
        elif axis.index in (0, local):
            time.sleep(PAUSE)  # until the other message is under way
            start = time.perf_counter()
            for _ in range(PINGS):
                ping_pong(axis, x[:16], local)
        times[loaded].append((time.perf_counter() - start) / PINGS)
    return max(0.0, (median(times[True]) - median(times[False])) / 2)


def all_reduces(
    axis: Axis,
    sizes: Sequence[int],
    local: int,
    least: int,
    extra: Mapping[str, Collective],
    only: Container[str],
) -> dict[str, dict[str, float]]:
    """Seconds of every all-reduce by size: the backend's own, ours, and `extra` ones. local: ranks on each node. least:
    number of batches at least. only: names; empty: all."""
    shape, found = shape_of(axis.size, local), {}
    for size in sizes:
        x = torch.zeros(max(1, size // 4), device=axis.device)
        runs: dict[str, Callable[[], object]] = {LIBRARY: partial(axis.all_reduce, x)}
        for name, collective in {**collectives(shape, size), **extra}.items():
            runs[name] = partial(Executor(axis, collective), x)
        found[str(size)] = {
            name: timed(run, axis, least) for name, run in runs.items() if not only or name in only
        }
    return found
