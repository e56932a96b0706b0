"""Budget questions of `fivefold plan` and `plan search`, their answers, and several clusters side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from fivefold.cli import options
from fivefold.cli.options import option, print_json
from fivefold.errors import UserError, several

if TYPE_CHECKING:
    from fivefold.recipe import Recipe
    from fivefold_plan.advice.budget import Questions
    from fivefold_plan.cluster.devices import Cluster
    from fivefold_plan.predict import Plan
    from fivefold_plan.setting import Software

TokensOption = Annotated[
    float | None,
    option("N", "Tokens to train on, such as 15T. [default: the recipe's]", parser=options.number),
]
DeadlineOption = Annotated[str | None, option("TIME", "Time to finish in, such as 30d (m, h, d, w).")]
PriceOption = Annotated[
    list[float] | None, option("X", "Per device-hour, of all clusters or of each in turn.")
]
MtbfOption = Annotated[str | None, option("TIME", "Between failures of one device, such as 1900d.")]
RestartOption = Annotated[
    str | None, option("TIME", "Until a failed run begins to read its checkpoint. [default: the cluster's]")
]
NoiseOption = Annotated[
    float | None, option("N", "Gradient noise scale in tokens, as a run measured it.", parser=options.number)
]


@dataclass(frozen=True)
class Asked:
    """The budget questions as they were typed. price: one for all clusters, or one for each."""

    tokens: float | None = None
    deadline: str | None = None
    price: list[float] | None = None
    noise_scale: float | None = None
    mtbf: str | None = None
    restart: str | None = None

    def of(self, recipe: Recipe, number: int = 0, always: bool = False) -> Questions | None:
        """Those about the cluster of this number, or None if nothing was asked. Raises UserError: one is malformed."""
        if not (always or any(value is not None for value in vars(self).values())):
            return None
        from fivefold_plan.advice.budget import ask

        price = self.price[number if len(self.price) > 1 else 0] if self.price else None
        default = run_tokens(recipe)
        return ask(self.tokens, self.deadline, price, self.noise_scale, default, self.mtbf, self.restart)


COLUMNS = [
    "cluster", "devices", "step s", "MFU %", "GiB", "tokens/day", "days", "MWh", "cost", "per 1B tokens", "layout"
]  # fmt: skip

NO_BUDGET = "budget        none: the layout does not fit (`plan search` lists those that do)"


def side_by_side(
    name: str,
    plans: Sequence[tuple[str, Callable[[], tuple[Recipe, Plan, str]]]],
    asked: Asked,
    json: bool,
    **alone: object,
) -> bool:
    """If there are several clusters, prints a row for each: its plan, and the budget of the run there, or why it has
    none. plans: for each cluster what makes its plan, with the recipe and what was searched. alone: options for one
    cluster. Raises UserError: one of these was given, another number of prices than one and that of the clusters, or no
    cluster has a plan."""
    from fivefold.observe.format import aligned, short_number
    from fivefold.sharding.layout import to_text
    from fivefold_plan.advice.budget import answer

    clusters = len(plans)
    if asked.price and len(asked.price) not in (1, clusters):
        there = f"{len(asked.price)} --price for {several(clusters, 'cluster')}"
        raise UserError(f"{there}: give one, or one for each")
    if clusters == 1:
        return False
    for option_ in (option_ for option_, value in alone.items() if value):
        raise UserError(f"--{option_} is for one --cluster; leave it out, or the other clusters")
    rows, found, reasons = [COLUMNS], list[dict[str, Any]](), list[str]()
    for number, (cluster, make) in enumerate(plans):
        try:
            recipe, plan, searched = make()
            questions = asked.of(recipe, number, always=True)
            budget = answer(plan, questions) if questions and plan.fits else {}
        except UserError as error:
            reasons.append(str(error))
            rows.append([cluster, *["-"] * (len(COLUMNS) - 2), str(error)])
            found.append({"cluster": cluster, "error": str(error)})
            continue
        found.append(plan.as_json() | {"searched": searched} | {"budget": budget})
        figures = map(budget.get, ("tokens_per_day", "days", "energy_mwh", "cost", "cost_per_1e9_tokens"))
        cells = [f"{plan.step.seconds:.4g}", f"{100 * plan.mfu:.1f}", f"{plan.peak_bytes / 2**30:.3g}"]
        cells += ["-" if x is None else f"{x:,.0f}" if 1e4 <= x < 1e10 else short_number(x) for x in figures]
        text = to_text(plan.layout) + "  (searched)" * bool(searched) + "  (DOES NOT FIT)" * (not plan.fits)
        rows.append([plan.setting.cluster.name, f"{plan.ranks:,}", *cells, text])
    if len(reasons) == clusters:
        raise UserError("; ".join(dict.fromkeys(reasons)))
    tokens = next((one["budget"]["tokens"] for one in found if one.get("budget")), None)
    of = f"{name}, {short_number(tokens)} tokens" if tokens else name
    lines = [f"{of}, predicted", *aligned(rows, (0, 10))]
    print_json({"clusters": found}) if json else print("\n  ".join(lines))
    return True


def run_tokens(recipe: Recipe) -> float:
    from fivefold.recipe import tokens_before, total_steps

    return float(tokens_before(recipe, total_steps(recipe)))


def budget_lines(answers: dict[str, Any]) -> list[str]:
    """The answers to budget questions as lines of text. answers: {"budget": ...}, or {} without questions."""
    from fivefold_plan.advice.budget import lines

    return [f"  {line}" for line in lines(answers["budget"])] if answers else []


def answers(
    asked: Questions, first: Plan, recipe: Recipe, machine: Cluster, software: Software
) -> dict[str, Any]:
    """The answers for the best plan of a search, and the fewest nodes whose best layout meets the deadline."""
    from fivefold.sharding.layout import to_text
    from fivefold_plan.advice.budget import answer
    from fivefold_plan.predict import with_stalls
    from fivefold_plan.search.search import fewest_devices

    answers = answer(with_stalls(first, recipe), asked)
    if asked.deadline and machine.connected:
        best, stride = fewest_devices(recipe, machine, asked, software)
        answers["searched_devices"] = best.layout.ranks if best else None
        answers["searched"] = "no number of whole nodes tried meets the deadline"
        if best:
            ranks, days = best.layout.ranks, answer(best, asked)["days"]
            answers["searched"] = (
                f"searched: {ranks} devices finish in {days:.4g} days with {to_text(best.layout)}"
            )
            answers["searched"] += uneven(recipe, ranks, answers["devices_for_deadline"])
        if stride > 1:
            answers["searched"] += f" (one in {stride} numbers of nodes was tried)"
    return {"budget": answers}


def uneven(recipe: Recipe, ranks: int, fewer: int) -> str:
    """Why fewer devices than were found do not meet a deadline at the same speed each, if their shares are uneven."""
    batch = recipe.train.global_batch_size
    if fewer >= ranks or batch % fewer == 0:
        return ""
    return f". {fewer:,} have no even share of {batch:,} sequences; a multiple of {fewer:,} divides evenly"
