"""Lists of what there is: `fivefold clusters`, devices and clusters with their links; `fivefold formats`, the formats
of numbers, and how the numbers of a run lie in their ranges; `fivefold optimizers`, their states, and their paths over
surfaces."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fivefold.cli.options import (
    JsonOption,
    columns,
    option,
    print_json,
    require_known,
    require_run,
    require_writable,
    save_as,
)
from fivefold.errors import UserError

if TYPE_CHECKING:
    from fivefold.optim import OptimizerCard

EXAMPLES = [
    "fivefold clusters",
    "fivefold clusters h100",
    "fivefold clusters 64xv100 --json",
    "fivefold formats",
    "fivefold formats --run runs/quickstart-1 --svg formats.svg",
    "fivefold optimizers",
    "fivefold optimizers --draw ravine --only sgd,momentum,adam",
    "fivefold optimizers --svg optimizers.svg",
]
MATRIX = 4096  # rows and columns of the matrix by which states of optimizers are compared


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


def optimizers(
    draw: Annotated[
        str | None, option("SURFACE", "Draw paths over a surface: contours, ravine, saddle or local.")
    ] = None,
    only: Annotated[str | None, option("NAMES", "Only these optimizers, by commas.")] = None,
    svg: Annotated[Path | None, option("FILE", "Write the paths over all surfaces as a picture.")] = None,
    json: JsonOption = False,
) -> None:
    """List the optimizers: bytes of their states, where they come from. Draw their paths over surfaces.

    Paths are those of the optimizers that train models, each at the best of eleven learning rates.
    """
    from fivefold.lessons.optimizer_paths import SURFACES, to_svg, to_text, tuned
    from fivefold.optim import OPTIMIZERS

    names = only.split(",") if only else list(OPTIMIZERS)
    require_known("--only", names, OPTIMIZERS)
    require_known("--draw", [draw] if draw else [], SURFACES)
    require_writable("--svg", svg)
    found: dict[str, Any] = {"optimizers": [_row(OPTIMIZERS[name]) for name in names]}
    lines = _table(found["optimizers"])
    wanted = list(SURFACES) if svg else [draw] if draw else []
    paths = {name: {one: tuned(one, SURFACES[name]) for one in names} for name in wanted}
    if draw:
        lines = [to_text(SURFACES[draw], paths[draw], columns(40, 111, words=1))]
    if svg:
        save_as("--svg", svg, to_svg(paths))
        lines = [*(lines if draw else []), str(svg)]
        found["picture"] = str(svg)
    found["paths"] = {
        surface: {name: {"lr": lr, "points": path} for name, (lr, path) in drawn.items()}
        for surface, drawn in paths.items()
    }
    if json:
        print_json(found)
    else:
        print("\n".join(lines))


def _row(card: OptimizerCard) -> dict[str, Any]:
    shape = (MATRIX, MATRIX)
    return {
        "name": card.name,
        "bytes_per_parameter": card.state_bytes("blocks.0.matrix", shape) / MATRIX**2,
        "rest_bytes_per_parameter": card.state_bytes("embed.weight", shape) / MATRIX**2,
        "states": [state.name for state, _ in card.states_of("blocks.0.matrix", shape)],
        "needs": card.needs,
        "source": card.source,
        "fields": dict(card.fields),
    }


def _table(rows: list[dict[str, Any]]) -> list[str]:
    lines = [f"{'optimizer':10}{'bytes':>8}{'embed':>9}  {'needs':10}{'source':40}states"]
    for row in rows:
        lines.append(
            f"{row['name']:10}{row['bytes_per_parameter']:8.3g}{row['rest_bytes_per_parameter']:9.3g}  "
            f"{row['needs']:10}{row['source']:40}{', '.join(row['states'])}"
        )
    lines += [
        "",
        f"bytes: of the states, per parameter of a matrix ({MATRIX} x {MATRIX}) in a block; embed: of an embedding.",
        "needs: what the update of one element depends on. Matrices come together on one rank under ZeRO and tp.",
    ]
    return lines
