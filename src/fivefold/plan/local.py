"""The machine at hand as a cluster, from its measured table."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache

from fivefold.errors import UserError
from fivefold.plan import measured
from fivefold.plan.clusters import Cluster, Device, Link
from fivefold.plan.measured import Measured

RUNTIME = 0.25 * 2**30
"""Bytes a process takes for Python and PyTorch's libraries on a CPU."""


def cluster() -> Cluster:
    """The cluster `local`.

    Raises:
        UserError: nothing was measured here yet.
    """
    table = measured.load()
    if table is None:
        raise UserError(
            "cluster 'local': this machine is not measured yet: run `fivefold bench hardware` first"
        )
    return of(table)


def of(table: Measured) -> Cluster:
    """The cluster that a table describes, before it is known how many ranks share it."""
    wire = Link(math.inf, 1.0, 0.0)  # messages are priced by the table
    return shared(Cluster("local", _device(table, 1), 0, 2**30, wire, wire, table), 1, 0)


@lru_cache(maxsize=64)
def shared(cluster: Cluster, ranks: int, devices: int | None = None) -> Cluster:
    """The cluster for so many ranks: each gets its share of the cores and of the memory."""
    assert cluster.machine is not None
    device = _device(cluster.machine, ranks)
    return replace(
        cluster, device=device, disk=cluster.machine.disk, devices=ranks if devices is None else devices
    )


def _device(table: Measured, ranks: int) -> Device:
    on_each = max(1, ranks) if table.on_cpu else table.cores
    share = table.share(ranks)
    copied = min(rates["copy"][0] for rates in share.streams.values())
    return Device(
        name=f"local ({share.threads} core{'s' * (share.threads > 1)})" if table.on_cpu else "local",
        peak={dtype: rate / on_each for dtype, rate in table.peak.items()},
        matmul=1.0,
        units=1,
        memory=table.memory / on_each,
        bandwidth=copied * share.speed,
        streaming=1.0,
        reserve=RUNTIME,
        spread=table.spread,
        measured=share,
    )
