"""`fivefold plan terms RECIPE --as paper`: what a plan's totals are made of, as papers and courses count it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from fivefold.cli import plan as shared
from fivefold.cli.options import (
    JsonOption,
    LayoutOption,
    RecipeArgument,
    SetOption,
    option,
    print_json,
    require_known,
    require_writable,
    save_as,
)
from fivefold.errors import UserError

if TYPE_CHECKING:
    from fivefold.lessons.terms import Asked, Term

EXAMPLES = [
    "fivefold plan terms llama-7b --cluster h100:64 --layout dp=64,zero=1",
    "fivefold plan terms llama2-7b --layout dp=64 --as paper --psi 7.5e9 --only states --svg states.svg",
    "fivefold plan terms gpt3-175b --as paper --psi 175e9 --deadline 30d --flops 160e12 --only flops",
]
FORMATS = {"parameters": ",.0f", "elements": ",.0f", "devices": ",.0f", "days": ",.1f", "FLOPs": ".3g"}
"""How values of other units than bytes are written."""


def terms(
    recipe: RecipeArgument,
    set_: SetOption = None,
    layout: LayoutOption = None,
    cluster: shared.ClusterOption = "h100",
    convention: Annotated[
        str,
        option(
            "CONVENTION",
            "paper: 2 + 2 + 12 bytes of states (arXiv 1910.02054), activations 34sbh + 5abs^2 (arXiv 2205.05198); "
            "fivefold: what the recipe really has.",
            "--as",
        ),
    ] = "fivefold",
    only: Annotated[
        str | None,
        option(
            "SECTIONS",
            "Of parameters, states, activations, flops, messages, bubble, by commas. [default: all]",
        ),
    ] = None,
    psi: Annotated[
        float | None, option("N", "Count with N parameters, such as 175e9, instead of the recipe's.")
    ] = None,
    flops: Annotated[
        float | None, option("RATE", "FLOP/s of a device, such as 160e12. [default: as predicted]")
    ] = None,
    tokens: shared.TokensOption = None,
    deadline: shared.DeadlineOption = None,
    svg: Annotated[
        Path | None, option("FILE", "Draw the states by ZeRO stage, the activations of a block.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Print what the totals of a plan are made of: name, formula, value and a remark of each term."""
    from fivefold.lessons.terms import CONVENTIONS, SECTIONS, Asked
    from fivefold.lessons.terms import terms as counted
    from fivefold.plan.predict import predict

    sections = only.split(",") if only is not None else list(SECTIONS)
    require_known("--as", [convention], CONVENTIONS)
    require_known("--only", sections, SECTIONS)
    for name, number in (("flops", flops), ("psi", psi)):
        if number is not None and not 0 < number < float("inf"):
            raise UserError(f"--{name} {number:g}: must be above 0 and finite")
    require_writable("--svg", svg)
    loaded, machine, software = shared.read(shared.Typed(recipe, set_ or [], cluster), layout)
    run = shared.questions(loaded, tokens, deadline, None, None)
    plan = predict(loaded, machine, software)
    length, end = (run.tokens, run.deadline) if run else (shared.run_tokens(loaded), None)
    asked = Asked(plan, convention, length, end, psi, flops)
    found = counted(asked, sections)
    if svg is not None:
        save_as("--svg", svg, _drawn(asked, sections, Path(recipe).stem))
    if json:
        values = {name: {term.name: term.as_json() for term in some} for name, some in found.items()}
        print_json({"recipe": recipe, "convention": convention, "psi": psi, "svg": svg} | values)
        return
    print("\n".join([f"{recipe}: terms, as {convention}", *_lines(found), *([str(svg)] if svg else [])]))


def _lines(found: dict[str, list[Term]]) -> Iterator[str]:
    """The terms as lines of text."""
    for section, some in found.items():
        yield ""
        yield f"  {section}"
        rows = [(term.name, term.formula, _value(term), term.note) for term in some]
        name, formula, value, _ = (max(map(len, column)) for column in zip(*rows, strict=True))
        for row in rows:
            yield f"    {row[0]:{name}}  {row[1]:{formula}}  {row[2]:>{value}}  {row[3]}".rstrip()


def _value(term: Term) -> str:
    """A value with its unit. Bytes are decimal, as in the papers, and binary, as in the rest of a plan."""
    from fivefold.lessons.terms import decimal, scaled

    value = term.value
    match term.unit:
        case "bytes":
            return f"{decimal(value)} ({scaled(value, 1024, 'iB')})"
        case "share":
            return f"{100 * value:.1f}%"
        case "FLOP/s":
            return f"{value / 1e12:,.4g} TFLOP/s"
        case unit:
            return f"{value:{FORMATS.get(unit, '.4g')}} {unit}"


def _drawn(asked: Asked, sections: list[str], name: str) -> str:
    """The pictures of these sections, one under the other."""
    from fivefold.draw.canvas import stacked
    from fivefold.lessons import pictures
    from fivefold.lessons.terms import activations_by_way, sharing, states_by_stage
    from fivefold.observe.format import short_number

    drawn = []
    if "states" in sections:
        of = f"{short_number(asked.symbols['Psi'])} parameters, n = {sharing(asked.setting.layout)}"
        title = f"{name}: states of {of}, as {asked.convention}"
        drawn.append(pictures.terms(states_by_stage(asked), pictures.STATES, title))
    if "activations" in sections:
        sizes = ", ".join(f"{key} {asked.symbols[key]:g}" for key in "sbhat")
        rows = {words: {"activations": size} for words, size in activations_by_way(asked).items()}
        title = f"{name}: activations of a block, {sizes}, as {asked.convention}"
        drawn.append(pictures.terms(rows, pictures.ACTIVATIONS, title))
    if not drawn:
        raise UserError("--svg draws states and activations; add one of them to --only")
    return stacked(drawn) if len(drawn) > 1 else drawn[0]
