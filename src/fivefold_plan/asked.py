"""What is asked of a plan, by the command line and by the page, and the recipe, cluster and program that it names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from fivefold.recipe import Recipe, load
from fivefold_plan.advice.budget import shape
from fivefold_plan.cluster.clusters import parse, with_margin
from fivefold_plan.cluster.devices import Cluster
from fivefold_plan.predict import resolved, with_load
from fivefold_plan.setting import Software, documents_of
from fivefold_plan.software import OWN, program


@dataclass(frozen=True)
class Typed:
    """What is asked of a plan: RECIPE, --set, --cluster, what to assume, by option, and --software ("": this
    program). rough: in round numbers on this machine, if it was not measured."""

    name: str
    sets: list[str]
    cluster: str
    given: Mapping[str, float] = field(default_factory=dict)
    software: str = ""
    rough: bool = False


def read(
    typed: Typed, layout: str | None, params: float | None = None, search: bool = False
) -> tuple[Recipe, Cluster, Software]:
    """The recipe, the cluster and the software that a plan is for. search: of layouts and microbatches. Raises
    UserError: something of it is wrong."""
    free = ["train.microbatch_size=none"] if search else []
    machine = with_margin(parse(typed.cluster, typed.rough), typed.given.get("--margin"))
    recipe = load(typed.name, free + typed.sets, layout, devices=machine.devices)
    if params is not None:
        recipe = recipe.model_copy(update={"model": shape(params, resolved(recipe).model)})
    software = with_load(
        program(typed.software or OWN, machine), recipe.model, typed.given.get("--expert-load")
    )
    documents = documents_of(recipe, typed.given.get("--document-tokens"))
    return recipe, machine, replace(software, documents=documents)
