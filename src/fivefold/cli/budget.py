"""Budget questions of `fivefold plan`: reads them from its options and prints the answers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fivefold.plan.advice.questions import Questions
    from fivefold.plan.cluster.devices import Cluster
    from fivefold.plan.predict import Plan
    from fivefold.plan.software import Software
    from fivefold.recipe import Recipe


def questions(
    recipe: Recipe, tokens: float | None, deadline: str | None, price: float | None, noise_scale: float | None
) -> Questions | None:
    """The budget questions asked on the command line, or None."""
    if all(value is None for value in (tokens, deadline, price, noise_scale)):
        return None
    from fivefold.plan.advice.questions import ask

    return ask(tokens, deadline, price, noise_scale, run_tokens(recipe))


def run_tokens(recipe: Recipe) -> float:
    """Tokens of the recipe's run."""
    from fivefold.recipe import tokens_before, total_steps

    return float(tokens_before(recipe, total_steps(recipe)))


def answers(
    asked: Questions | None, plan: Plan, recipe: Recipe, machine: Cluster, search: Software | None = None
) -> dict[str, Any]:
    """{"budget": answers} for a plan, or {} without questions.

    With `search`, the answers include the fewest devices whose best layout meets the deadline in that software.
    """
    if asked is None:
        return {}
    from fivefold.plan.advice.questions import answer, fewest_devices
    from fivefold.spread.layout_text import to_text

    found = answer(plan, asked)
    if search and asked.deadline:
        best = fewest_devices(recipe, machine, asked, found["devices_for_deadline"], search)
        found["searched_devices"] = best.layout.ranks if best else None
        found["searched"] = "no number of whole nodes tried meets the deadline"
        if best:
            days = asked.tokens / best.tokens_per_s / 86400
            found["searched"] = (
                f"searched: {best.layout.ranks} devices finish in {days:.4g} days with {to_text(best.layout)}"
            )
    return {"budget": found}


def print_answers(found: dict[str, Any]) -> None:
    if found:
        from fivefold.plan.advice.questions import lines

        print("\n".join(f"  {line}" for line in lines(found["budget"])))


def sized(recipe: Recipe, params: float | None) -> Recipe:
    """The recipe with its model resized to about `params` parameters (unchanged for None)."""
    if params is None:
        return recipe
    from fivefold.plan.advice.budget import shape
    from fivefold.plan.predict import resolved

    return recipe.model_copy(update={"model": shape(params, resolved(recipe).model)})
