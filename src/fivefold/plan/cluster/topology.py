"""The topology of a cluster: the links that `schedules/collectives` simulates messages on."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

from fivefold.errors import UserError
from fivefold.host import tables
from fivefold.plan.cluster.clusters import links, parse
from fivefold.plan.cluster.devices import Cluster, Link
from fivefold.schedules.collectives import Wire
from fivefold.schedules.collectives.topology import Topology


def topology(text: str, ranks: int) -> Topology:
    """Reads `h100`, `h100:8x4`, `my.toml` or `local` as the topology of `ranks` ranks. A file without a base describes
    links only.

    Raises:
        UserError: unknown cluster, broken file, missing link, more ranks than devices, or a machine without table.
    """
    if text.lower() == "local":
        return local(ranks)
    connected = True
    cluster, connected = links(Path(text)) if text.endswith(".toml") else (parse(text), True)
    if cluster.machine and not cluster.connected:
        return local(ranks)
    if 0 < cluster.devices < ranks:
        raise UserError(
            f"topology '{text}': {ranks} ranks need as many devices, but it has {cluster.devices}"
        )
    return of_cluster(cluster, ranks, connected)


def of_cluster(cluster: Cluster, ranks: int, connected: bool = True) -> Topology:
    """The links of a cluster. connected: False if nothing connects its nodes."""
    x = cluster.wiring
    if cluster.machine:
        fit = _fit(min(ranks, cluster.per_node * cluster.hosts))
        fit = fit | {"far_alpha": cluster.inter.latency, "far_beta": 1 / cluster.inter.achieved}
        hosts = of_fit(fit, ranks, cluster.per_node, cluster.hosts)
        return replace(
            hosts, name=cluster.name, cards=x.cards, leaf=x.leaf, oversubscription=x.oversubscription
        )
    return Topology(
        cluster.name,
        ranks,
        cluster.per_node,
        _wire(cluster.intra),
        _wire(cluster.inter) if connected else None,
        cards=x.cards,
        domain=x.domain,
        pcie=_wire(x.pcie) if x.pcie else None,
        leaf=x.leaf,
        oversubscription=x.oversubscription,
        torus=x.torus,
        pairs=cluster.intra.mesh,
    )


def _wire(link: Link) -> Wire:
    return Wire(link.latency, link.achieved)


def local(ranks: int) -> Topology:
    """This machine, as `fivefold bench collectives` measured it.

    Raises:
        UserError: it has not been measured.
    """
    return of_fit(_fit(ranks), ranks)


def _fit(ranks: int) -> dict[str, float]:
    """What messages cost where so many ranks share this machine, or the nearest number that was measured."""
    table = tables.load_collectives()
    if table is None:
        raise UserError(
            "topology 'local': this machine's messages have not been measured; run `fivefold bench collectives` first"
        )
    fits = table["fit"]
    return fits[min(fits, key=lambda measured: abs(math.log(int(measured) / ranks)))]


def of_fit(fit: dict[str, float], ranks: int, local: int = 0, hosts: int = 1) -> Topology:
    """The topology of ranks that share a machine, or several: each message costs it time for itself and for its bytes.

    fit: of `bench/collectives.py`. local: ranks on each node, 0 for all. hosts: nodes on each machine.
    """
    far = Wire(fit["far_alpha"], 1 / fit["far_beta"]) if "far_alpha" in fit else None
    return Topology(
        "local",
        ranks,
        local or max(ranks, 1),
        Wire(fit["alpha"], 1 / fit["beta"]),
        far,
        cards=1 if far else 0,
        bus=Wire(fit["bus_alpha"], 1 / fit["bus_beta"]),
        far_bus=fit.get("far_bus", 0.0),
        hosts=hosts,
        burst=fit.get("burst", 0.0),
        acks=fit.get("acks", 0.0),
        queue=fit.get("queue", 0.0),
        reduce_s=fit["gamma"],
    )
