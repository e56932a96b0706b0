"""What `fivefold plan` prints as lessons: terms by a convention, and --formulas, activation formulas of a block beside
measured bytes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fivefold.cli.options import print_json, save_as
from fivefold.errors import UserError, did_you_mean

if TYPE_CHECKING:
    from fivefold.lessons.conventions import Conventions
    from fivefold.lessons.terms import Asked, Term
    from fivefold.plan.advice.questions import Questions
    from fivefold.plan.predict import Plan
    from fivefold.recipe import Recipe

DRAWN = ("a block (1)", "selective", "tp (2)", "tp, sp (4)", "tp, sp, selective (6)", "full")


def conventions(
    every: bool,
    states: str | None,
    activations: str | None,
    bubble: str | None,
    flops: float | None,
    psi: float | None,
) -> Conventions | None:
    """The conventions asked for on the command line, or None. An option asks for its section, --terms for all.

    Raises:
        UserError: there is no such convention, or a number is not positive and finite.
    """
    given = {"states": states, "activations": activations, "bubble": bubble, "flops": flops}
    if not every and psi is None and all(value is None for value in given.values()):
        return None
    from fivefold.lessons.conventions import ACTIVATIONS, BUBBLES, OWN, STATES, Conventions
    from fivefold.lessons.terms import SECTIONS

    for name, known in (("states", STATES), ("activations", ACTIVATIONS), ("bubble", BUBBLES)):
        value = given[name]
        if value is not None and value not in known:
            raise UserError(
                f"--{name} {value}: must be {' or '.join(known)}{did_you_mean(str(value), known)}"
            )
    for name, number in (("flops", flops), ("psi", psi)):
        if number is not None and not 0 < number < float("inf"):
            raise UserError(f"--{name} {number:g}: must be above 0 and finite")
    some = tuple(name for name, value in given.items() if value is not None)
    sections = tuple(SECTIONS) if every or not some else some
    return Conventions(states or OWN, activations or OWN, bubble, flops, psi, sections)


def answers(
    how: Conventions | None, plan: Plan, recipe: Recipe, questions: Questions | None
) -> dict[str, Any]:
    """{"conventions": terms} for a plan, or {} if nobody asked."""
    if how is None:
        return {}
    from fivefold.lessons.terms import as_json, terms

    asked = _asked(how, plan, recipe, questions)
    return {"conventions": as_json(asked, terms(asked))}


def print_terms(how: Conventions | None, plan: Plan, recipe: Recipe, questions: Questions | None) -> None:
    if how is None:
        return
    from fivefold.lessons.terms import terms

    asked = _asked(how, plan, recipe, questions)
    print("\n".join(f"  {line}".rstrip() for line in _lines(asked, terms(asked))))


def _lines(asked: Asked, found: dict[str, list[Term]]) -> Iterator[str]:
    """The terms as lines of text."""
    titles = {
        "states": f"states, convention {asked.how.states}",
        "activations": f"activations, convention {asked.how.activations}",
        "flops": "FLOPs",
    }
    for section, some in found.items():
        yield ""
        yield titles.get(section, section)
        rows = [(term.name, term.formula, _value(term), term.note) for term in some]
        name, formula, value, _ = (max(map(len, column)) for column in zip(*rows, strict=True))
        for row in rows:
            yield f"  {row[0]:{name}}  {row[1]:{formula}}  {row[2]:>{value}}  {row[3]}".rstrip()


def _value(term: Term) -> str:
    """A value with its unit. Bytes are decimal, as in the papers, and binary, as in the rest of a plan."""
    match term.unit:
        case "bytes":
            from fivefold.lessons.terms import scaled

            return f"{scaled(term.value, 1000, 'B')} ({scaled(term.value, 1024, 'iB')})"
        case "parameters" | "elements" | "devices":
            return f"{term.value:,.0f} {term.unit}"
        case "share":
            return f"{100 * term.value:.1f}%"
        case "days":
            return f"{term.value:,.1f} days"
        case "FLOPs":
            return f"{term.value:.3g} FLOPs"
        case "FLOP/s":
            return f"{term.value / 1e12:,.4g} TFLOP/s"
        case _:
            return f"{term.value:.4g} {term.unit}"


def require_states(svg: Path | None, how: Conventions | None, search: bool) -> None:
    """Refuses --svg where no states are among the terms.

    Raises:
        UserError: they are not, or --search has no layout yet.
    """
    if svg is not None and (search or how is None or "states" not in how.sections):
        other = "leave out --search" if search else "add --terms, --states CONVENTION or --formulas"
        raise UserError(f"--svg draws the states of one layout, or the activations of --formulas; {other}")


def drawn_states(how: Conventions, plan: Plan, recipe: Recipe, questions: Questions | None, name: str) -> str:
    """The picture of the states on a rank by ZeRO stage."""
    from fivefold.lessons import terms_svg
    from fivefold.lessons.terms import sharing, states_by_stage
    from fivefold.observe.format import short_number

    asked = _asked(how, plan, recipe, questions)
    of = f"{short_number(asked.symbols['Psi'])} parameters, n = {sharing(asked.setting.layout)}"
    title = f"{Path(name).stem}: states of {of}, convention {how.states}"
    return terms_svg.states(states_by_stage(asked), title)


def _asked(how: Conventions, plan: Plan, recipe: Recipe, questions: Questions | None) -> Asked:
    from fivefold.cli.budget import run_tokens
    from fivefold.lessons.terms import Asked

    tokens = questions.tokens if questions else run_tokens(recipe)
    return Asked(plan, how, tokens, questions.deadline if questions else None)


def print_formulas(name: str, sets: list[str], layout: str | None, json: bool, svg: Path | None) -> None:
    """Prints the formulas for the sizes of a recipe: of one block and one microbatch. svg: a file for their bars."""
    from fivefold.host.devices import GIB
    from fivefold.lessons.formulas import Shape, rows
    from fivefold.recipe import load

    recipe = load(name, sets, layout)
    model, tp = recipe.model, recipe.layout.tp
    shape = Shape(model.seq_len, recipe.train.microbatch_size or 1, model.dim, model.heads, tp)
    found = rows(shape)
    sizes = ", ".join(f"{key} {value}" for key, value in asdict(shape).items())
    if svg is not None:
        from fivefold.lessons.terms_svg import activations

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
