"""Conventions of `fivefold plan`: reads them from its options and prints the terms."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from fivefold.errors import UserError, did_you_mean

if TYPE_CHECKING:
    from fivefold.plan.conventions import Conventions
    from fivefold.plan.predict import Plan
    from fivefold.plan.questions import Questions
    from fivefold.plan.terms import Asked
    from fivefold.recipe import Recipe


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
    from fivefold.plan.conventions import ACTIVATIONS, BUBBLES, OWN, STATES, Conventions
    from fivefold.plan.terms import SECTIONS

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
    from fivefold.plan.terms import as_json, terms

    asked = _asked(how, plan, recipe, questions)
    return {"conventions": as_json(asked, terms(asked))}


def print_terms(how: Conventions | None, plan: Plan, recipe: Recipe, questions: Questions | None) -> None:
    if how is None:
        return
    from fivefold.plan.terms import terms
    from fivefold.plan.terms_text import lines

    asked = _asked(how, plan, recipe, questions)
    print("\n".join(f"  {line}".rstrip() for line in lines(asked, terms(asked))))


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
    from fivefold.observe.format import short_number
    from fivefold.plan.pages import terms_svg
    from fivefold.plan.terms import sharing, states_by_stage

    asked = _asked(how, plan, recipe, questions)
    of = f"{short_number(asked.symbols['Psi'])} parameters, n = {sharing(asked.setting.layout)}"
    title = f"{Path(name).stem}: states of {of}, convention {how.states}"
    return terms_svg.states(states_by_stage(asked), title)


def _asked(how: Conventions, plan: Plan, recipe: Recipe, questions: Questions | None) -> Asked:
    from fivefold.cli.budget import run_tokens
    from fivefold.plan.terms import Asked

    tokens = questions.tokens if questions else run_tokens(recipe)
    return Asked(plan, how, tokens, questions.deadline if questions else None)
