"""The topology of a cluster: the links that `schedules/collectives` simulates messages on."""

from __future__ import annotations

from pathlib import Path

from fivefold.errors import UserError
from fivefold.host import tables
from fivefold.plan.clusters import links, parse
from fivefold.plan.devices import Cluster, Link
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
    if cluster.machine:
        return local(ranks)
    if 0 < cluster.devices < ranks:
        raise UserError(
            f"topology '{text}': {ranks} ranks need as many devices, but it has {cluster.devices}"
        )
    return of_cluster(cluster, ranks, connected)


def of_cluster(cluster: Cluster, ranks: int, connected: bool = True) -> Topology:
    """The links of a cluster. connected: False if nothing connects its nodes."""
    x = cluster.wiring
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
    table = tables.load_collectives()
    if table is None:
        raise UserError(
            "topology 'local': this machine's messages have not been measured; run `fivefold bench collectives` first"
        )
    return of_fit(table["fit"], ranks)


def of_fit(fit: dict[str, float], ranks: int) -> Topology:
    """Local ranks share the machine: each message costs it time for itself and for its bytes."""
    wire = Wire(fit["alpha"], 1 / fit["beta"])
    return Topology(
        "local",
        ranks,
        max(ranks, 1),
        wire,
        bus=Wire(fit["bus_alpha"], 1 / fit["bus_beta"]),
        reduce_s=fit["gamma"],
    )
