"""`fivefold plan RECIPE --formulas`: activation formulas of a block beside measured bytes."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from fivefold.cli.options import print_json, save_as

DRAWN = ("a block (1)", "selective", "tp (2)", "tp, sp (4)", "tp, sp, selective (6)", "full")


def print_formulas(name: str, sets: list[str], layout: str | None, json: bool, svg: Path | None) -> None:
    """Prints the formulas for the sizes of a recipe: of one block and one microbatch. svg: a file for their bars."""
    from fivefold.host.devices import GIB
    from fivefold.recipe import load
    from fivefold.trace.formulas import Shape, rows

    recipe = load(name, sets, layout)
    model, tp = recipe.model, recipe.layout.tp
    shape = Shape(model.seq_len, recipe.train.microbatch_size or 1, model.dim, model.heads, tp)
    found = rows(shape)
    sizes = ", ".join(f"{key} {value}" for key, value in asdict(shape).items())
    if svg is not None:
        from fivefold.plan.pages.terms_svg import activations

        by_name = {row.name: (row.formula, row.bytes) for row in found}
        drawn = {one: by_name[one] for one in DRAWN if one in by_name}
        title = f"{Path(name).stem}: activations of a block in 16 bits, {sizes}"
        save_as("--svg", svg, activations(drawn, title))
    if json:
        print_json({"sizes": asdict(shape), "formulas": [asdict(row) for row in found], "svg": svg})
        return
    print(f"activations of one block and one microbatch in 16 bits: {sizes}")
    print(f"  {'':24}{'formula':42}{'bytes':>20}{'measured':>20}  more")
    for row in found:
        more = row.measured - row.bytes
        cause = f"{more:+,.0f}: {row.why}" if more else ""
        print(f"  {row.name:24}{row.formula:42}{row.bytes:20,.0f}{row.measured:20,}  {cause}".rstrip())
    total = found[3].bytes * model.layers
    print(f"  {model.layers} blocks without recomputation (5): {total / GIB:,.2f} GiB per microbatch")
    if svg is not None:
        print(svg)
