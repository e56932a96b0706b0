"""`fivefold optimizers`: lists the optimizers with their states, and draws their paths over surfaces."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from fivefold.cli.options import JsonOption, option, print_json, require_writable, save_as
from fivefold.errors import UserError, did_you_mean

if TYPE_CHECKING:
    from fivefold.optim import OptimizerCard

EXAMPLES = [
    "fivefold optimizers",
    "fivefold optimizers --draw ravine --only sgd,momentum,adam",
    "fivefold optimizers --svg optimizers.svg",
]
MATRIX = 4096  # rows and columns of the matrix by which states are compared


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
    for flag_name, given, valid in (
        ("--only", names, OPTIMIZERS),
        ("--draw", [draw] if draw else [], SURFACES),
    ):
        for name in given:
            if name not in valid:
                raise UserError(
                    f"{flag_name} {name}: must be {' or '.join(valid)}{did_you_mean(name, list(valid))}"
                )
    require_writable("--svg", svg)
    found: dict[str, Any] = {"optimizers": [_row(OPTIMIZERS[name]) for name in names]}
    lines = _table(found["optimizers"])
    wanted = list(SURFACES) if svg else [draw] if draw else []
    paths = {name: {one: tuned(one, SURFACES[name]) for one in names} for name in wanted}
    if draw:
        width = max(40, min(110, shutil.get_terminal_size().columns - 1))
        lines = [to_text(SURFACES[draw], paths[draw], width)]
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
