"""Lists of what there is: `fivefold clusters`, devices and clusters with their links; `fivefold formats`, the formats
of numbers, and how the numbers of a run lie in their ranges."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fivefold.cli.options import JsonOption, option, print_json, require_run, require_writable, save_as

EXAMPLES = [
    "fivefold clusters",
    "fivefold clusters h100",
    "fivefold clusters 64xv100 --json",
    "fivefold formats",
    "fivefold formats --run runs/quickstart-1 --svg formats.svg",
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


def formats(
    run: Annotated[
        Path | None, option("RUN", "Compare with the numbers of a run trained with observe.histogram_step.")
    ] = None,
    svg: Annotated[Path | None, option("FILE", "Also draw them to FILE. With --run.")] = None,
    json: JsonOption = False,
) -> None:
    """List the formats of numbers, from fp64 to fp4: bits, range, precision, hardware.

    With --run: weights, activations and gradients of a step by exponent, and what each format makes of them.
    """
    from fivefold.errors import UserError
    from fivefold.observe import number_formats

    require_writable("--svg", svg)
    if run is None:
        if svg is not None:
            raise UserError("--svg draws the numbers of a run: add --run RUN")
        print_json({"formats": number_formats.table()}) if json else print(number_formats.to_text(), end="")
        return
    step, found = number_formats.read(require_run(run))
    title = f"{run.resolve().name}, step {step}: numbers by exponent"
    if svg is not None:
        save_as("--svg", svg, number_formats.histogram_svg(found, title))
    if json:
        print_json({"step": step, "kinds": found.as_json(), "svg": svg})
        return
    print(f"{title}\n\n{number_formats.histogram_text(found)}", end="")
    if svg is not None:
        print(svg)
