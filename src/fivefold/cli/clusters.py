"""`fivefold clusters`: the devices and clusters that have names, and one of them with all its links."""

from __future__ import annotations

from typing import Annotated

import typer

from fivefold.cli.options import JsonOption, print_json

EXAMPLES = [
    "fivefold clusters",
    "fivefold clusters h100",
    "fivefold clusters 64xv100 --json",
]


def clusters(
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", help="A cluster as after --cluster: h100, 64xv100, lab.toml, local."),
    ] = None,
    json: JsonOption = False,
) -> None:
    """List devices and clusters: memory, rates by format, links, and where the figures come from.

    With a name: that cluster with all its links, from the device's memory to the disk.
    """
    from fivefold.host.devices import SHEETS
    from fivefold.plan.cluster import catalog
    from fivefold.plan.cluster.clusters import PRESETS, parse

    if name is not None:
        cluster = parse(name)
        print_json(catalog.cluster_json(cluster)) if json else print(catalog.description(cluster), end="")
        return
    if json:
        devices = [catalog.device_json(sheet) for sheet in SHEETS]
        print_json({"devices": devices, "clusters": [catalog.cluster_json(one) for one in PRESETS.values()]})
        return
    print(catalog.listing(), end="")
