"""`fivefold formats`: the formats of numbers, and how the numbers of a run lie in their ranges."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from fivefold.cli.options import (
    JsonOption,
    option,
    print_json,
    require_run,
    require_writable,
    save_as,
)

EXAMPLES = [
    "fivefold formats",
    "fivefold formats --run runs/quickstart-1 --svg formats.svg",
]


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
