"""What `fivefold plan`, `plan search`, `plan terms` and `plan trace` share: options, how the request is read, answers
to budget questions."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from fivefold.cli.local import ensure_measured
from fivefold.cli.options import flag, option, save_as

if TYPE_CHECKING:
    from fivefold.plan.advice.questions import Questions
    from fivefold.plan.cluster.devices import Cluster
    from fivefold.plan.predict import Plan
    from fivefold.plan.software import Software
    from fivefold.recipe import Recipe

GROUPS = {
    "Assumptions": ("params", "expert_load", "document_tokens"),
    "Budget": ("tokens", "deadline", "price", "noise_scale"),
}
"""Headings of the help, and the options below each."""

ClusterOption = Annotated[
    str,
    option(
        "NAME:DEVICES",
        "A name of `fivefold clusters`, local, or a .toml file. h100:64: 64 devices; h100:8x4: 8 nodes of 4.",
        "--cluster",
    ),
]
ExplainOption = Annotated[bool, flag("Print every term of the prediction.", "--explain")]
SaveOption = Annotated[
    Path | None,
    option("FILE", "Write the recipe with the planned (best) layout to FILE.", "--save"),
]
PicturesOption = Annotated[bool, flag("Draw all pictures, even into a file or a pipe.", "--pictures")]
HtmlOption = Annotated[
    Path | None,
    option("FILE", "Write a page with the pictures and with sliders for the sizes."),
]
ExpertLoadOption = Annotated[
    float | None,
    option("X", "Load of the busiest expert rank relative to an even split. [default: 1]"),
]
DocumentTokensOption = Annotated[
    float | None,
    option(
        "N",
        "Average length of the documents, which attention does not cross. [default: counted in tokenized data]",
    ),
]
ParamsOption = Annotated[
    float | None,
    option("N", "Plan a model with about N parameters instead of the recipe's."),
]
TokensOption = Annotated[
    float | None,
    option("N", "Tokens to train on, such as 1.4e12. [default: the recipe's]"),
]
DeadlineOption = Annotated[
    str | None,
    option("TIME", "Devices needed to finish within TIME, such as 30d (m, h, d, w)."),
]
PriceOption = Annotated[float | None, option("X", "Price per device-hour.")]
NoiseOption = Annotated[
    float | None,
    option("N", "Gradient noise scale in tokens, as a run measured it."),
]


@dataclass(frozen=True)
class Typed:
    """What the user typed: RECIPE, --set, --cluster, --expert-load, --document-tokens."""

    name: str
    sets: list[str]
    cluster: str
    expert_load: float | None = None
    document_tokens: float | None = None


def read(
    typed: Typed, layout: str | None, params: float | None = None, search: bool = False
) -> tuple[Recipe, Cluster, Software]:
    """The recipe, the cluster and the software that a plan is for. search: of layouts and microbatches."""
    from fivefold.plan.advice.budget import shape
    from fivefold.plan.cluster.clusters import parse
    from fivefold.plan.documents import documents_of
    from fivefold.plan.predict import resolved, with_load
    from fivefold.plan.software import of
    from fivefold.recipe import load

    ensure_measured(typed.cluster)
    free = ["train.microbatch_size=none"] if search else []
    recipe, machine = load(typed.name, free + typed.sets, layout), parse(typed.cluster)
    if params is not None:
        recipe = recipe.model_copy(update={"model": shape(params, resolved(recipe).model)})
    software = with_load(of(machine), recipe.model, typed.expert_load)
    return recipe, machine, replace(software, documents=documents_of(recipe, typed.document_tokens))


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


def budget_lines(answers: dict[str, Any]) -> list[str]:
    """The answers to budget questions as lines of text. answers: {"budget": ...}, or {} without questions."""
    from fivefold.plan.advice.questions import lines

    return [f"  {line}" for line in lines(answers["budget"])] if answers else []


def summary(name: str, plan: Plan) -> list[str]:
    from fivefold.plan.advice.explain import summary as lines

    return [f"{name}: predicted", *(f"  {line}" for line in lines(plan))]


def accuracy(plan: Plan) -> str:
    """What was measured of the memory formula on such devices."""
    machine, error = plan.setting.cluster.machine, f"{100 * plan.memory_error:.2g}%"
    if machine and machine.on_cpu:
        return f"memory is from a formula, with a mean error of {error} against measured peaks"
    return f"memory is from a formula, with a mean error of {error} on published peaks of another program"


def save(path: Path | None, recipe: Recipe, plan: Plan) -> None:
    """Writes the recipe with the planned layout, for `fivefold train`."""
    if path is None:
        return
    from fivefold.plan.search.search import apply
    from fivefold.recipe import to_toml

    text = to_toml(apply(recipe, plan), comment=f"{plan.layout.ranks} ranks, as planned by fivefold plan")
    save_as("--save", path, text)
