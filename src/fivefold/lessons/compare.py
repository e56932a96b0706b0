"""Compares layouts of a recipe on a cluster by three criteria: redundant computing, peak memory, bytes sent."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from fivefold.errors import UserError
from fivefold.lessons import criteria, overlap
from fivefold.lessons.criteria import Moment, Redundant
from fivefold.lessons.overlap import Rule
from fivefold.models.card import card_of
from fivefold.observe.format import memory_text
from fivefold.plan.cluster.devices import Cluster
from fivefold.plan.memory import memory
from fivefold.plan.messages import volume
from fivefold.plan.predict import Plan, predict
from fivefold.recipe import Recipe
from fivefold.recipe.resolve import in_layout
from fivefold.recipe.rules import contradictions, synchronous
from fivefold.sharding.layout import Layout, divisors, parse, to_text
from fivefold.sharding.layout_rules import problems
from fivefold.sharding.parts import block_of, cuts_in

MICROBATCH = 1
"""Sequences of a microbatch, if the recipe leaves that open: the same for all layouts, so that they compare."""


@dataclass(frozen=True)
class Technique:
    """A form of parallelism. dimension: the one of the five that it divides. layout: it alone on so many ranks; `rest`
    more replicas divide the batch."""

    name: str
    dimension: str
    layout: Callable[[int, int], Layout]


def _data(zero: int) -> Callable[[int, int], Layout]:
    return lambda ranks, rest: Layout(dp_replicate=rest, dp_shard=ranks, zero=zero)


TECHNIQUES = (
    Technique("DDP", "data", lambda ranks, rest: Layout(dp_replicate=ranks * rest)),
    Technique("ZeRO-1", "data", _data(1)),
    Technique("ZeRO-2", "data", _data(2)),
    Technique("ZeRO-3", "data", _data(3)),
    Technique("TP", "tensor", lambda ranks, rest: Layout(tp=ranks, dp_replicate=rest)),
    Technique("TP + SP", "tensor", lambda ranks, rest: Layout(tp=ranks, sp=True, dp_replicate=rest)),
    Technique("CP", "context", lambda ranks, rest: Layout(cp=ranks, dp_replicate=rest)),
    Technique("PP", "pipeline", lambda ranks, rest: Layout(pp=ranks, dp_replicate=rest)),
    Technique("EP", "expert", lambda ranks, rest: Layout(ep=ranks, dp_replicate=ranks * rest)),
)
DIMENSIONS = tuple(dict.fromkeys(one.dimension for one in TECHNIQUES))
"""The five dimensions of parallelism, in the order of the table."""
DIMENSION_OF = {"dp": "data", "tp": "tensor", "cp": "context", "pp": "pipeline", "ep": "expert"}


@dataclass(frozen=True)
class Row:
    """One layout. asked: the layout that was asked for. why: why it is not possible; then `plan` is of the nearest one
    with the same technique, or None. measured: its figures on this machine, or why there are none."""

    technique: str
    dimension: str
    asked: Layout
    plan: Plan | None
    why: str = ""
    measured: dict[str, Any] | str | None = None

    @property
    def layout(self) -> str:
        return to_text(self.plan.layout if self.plan else self.asked)

    @property
    def short(self) -> str:
        """The layout without its mode of recomputation."""
        return to_text(replace(self.plan.layout if self.plan else self.asked, recompute="none"))

    def sent(self, as_counted: bool = False) -> dict[str, int]:
        """Bytes per step by axis that leave the rank that sends most. as_counted: groups with the same ranks are
        merged, as a measurement does."""
        return volume.sent(self._plan.setting, as_counted=True) if as_counted else self._plan.sent

    @cached_property
    def redundant(self) -> Redundant:
        return criteria.redundant(self._plan.setting)

    @cached_property
    def moments(self) -> list[Moment]:
        return criteria.moments(self._plan.setting)

    @cached_property
    def rules(self) -> list[Rule]:
        """When its messages hide: those of its dimension, or of all axes if it has several."""
        found = overlap.rules(self._plan.setting)
        return [rule for rule in found if self.dimension in ("", DIMENSION_OF[rule.axis])]

    @cached_property
    def idle(self) -> float:
        """Share of the step in which ranks wait for other stages, on average."""
        return criteria.idle(self._plan.setting, self._plan.step)

    @property
    def undivided(self) -> tuple[float, list[str]]:
        """(share of the parameters that its tensor parallelism divides only without sp, the modules they belong to)."""
        card, layout = card_of(self._plan.setting.model), self._plan.layout
        if layout.tp == 1 or not layout.sp:
            return 0.0, []
        names = [name for name, cut in card.cuts.items() if cuts_in(cut, True) != cuts_in(cut, False)]
        within = (name.removeprefix(f"{card.stack}.{block_of(card, name)}.") for name in names)
        modules = dict.fromkeys(name.removesuffix(".weight").rpartition(".")[0] for name in within)
        return sum(math.prod(card.parameters[name]) for name in names) / card.count, [*modules]

    @property
    def exposed(self) -> float:
        """Share of the step in which a rank waits for messages."""
        return sum(self._plan.step.exposed.values()) / self._plan.step.seconds

    @property
    def _plan(self) -> Plan:
        assert self.plan is not None
        return self.plan

    def words(self) -> dict[str, str]:
        """The criteria of a row with a plan, in words."""
        return {
            "redundant": f"{self.redundant.share:.1%}",
            "memory": memory_text(self._plan.peak_bytes),
            "fits": "yes" if self._plan.fits else "no",
            "exposed": f"{self.exposed:.1%}",
            "idle": f"{self.idle:.1%}",
            "step": f"{self._plan.step.seconds:.4g}",
            "mfu": f"{self._plan.mfu:.1%}",
        }

    def as_json(self, overlap: bool = False) -> dict[str, Any]:
        found = {
            "technique": self.technique,
            "dimension": self.dimension,
            "asked": to_text(self.asked),
            "why": self.why,
            "layout": self.layout if self.plan else None,
        }
        if self.plan is None:
            return found
        s = self.plan.setting
        once, each = criteria.data_units(s.layout)
        return found | {
            "redundant": self.redundant.as_json(),
            "idle": self.idle,
            "exposed": self.exposed,
            "psi": once + each * s.microbatches if s.layout.dp * s.layout.cp > 1 else 0.0,
            "live_microbatches": memory.live_microbatches(s.layout, s.microbatches),
            "messages": [moment._asdict() for moment in self.moments],
            "plan": self.plan.as_json(),
            **({"overlap": [rule.as_json() for rule in self.rules]} if overlap else {}),
            **({"measured": self.measured, "sent_as_counted": self.sent(True)} if self.measured else {}),
        }


def compare(
    recipe: Recipe,
    cluster: Cluster,
    ranks: int,
    layouts: Sequence[str] = (),
) -> list[Row]:
    """A row for each layout, or for one process and each technique on so many ranks.

    Raises:
        UserError: a layout cannot be read, or the recipe cannot be predicted at all.
    """
    recipe = alike(recipe)
    if layouts:
        return [_named(recipe, cluster, text) for text in layouts]
    one = Layout(recompute=recipe.layout.recompute)
    rows = [Row("one device", "", one, _predicted(recipe, replace(cluster, devices=0), one))]
    return rows + [_row(recipe, cluster, technique, ranks) for technique in TECHNIQUES]


def alike(recipe: Recipe) -> Recipe:
    """The recipe with what all layouts have in common: one size of microbatches, and synchronous steps."""
    train = recipe.train.model_copy(update={"microbatch_size": recipe.train.microbatch_size or MICROBATCH})
    layout = recipe.layout.model_copy(update={"microbatches": None})
    return synchronous(recipe.model_copy(update={"train": train, "layout": layout}))


def _named(recipe: Recipe, cluster: Cluster, text: str) -> Row:
    values: dict[str, Any] = parse(text)
    layout = Layout(**values)
    name, dimension = named(layout)
    try:
        return Row(name, dimension, layout, _checked(recipe, cluster, layout))
    except UserError as error:
        return Row(name, dimension, layout, None, _plain(error))


def named(layout: Layout) -> tuple[str, str]:
    """(names of the techniques in a layout, the dimension if it is one)."""
    replicas = layout.dp > 1 and layout.ep == 1  # else they are the ranks of the experts
    names = {
        "dp": f"ZeRO-{layout.zero}" if layout.zero else "DDP" * replicas,
        "tp": ("TP + SP" if layout.sp else "TP") * (layout.tp > 1),
        **{axis: axis.upper() * (getattr(layout, axis) > 1) for axis in ("cp", "pp", "ep")},
    }
    found = [axis for axis, name in names.items() if name]
    dimension = DIMENSION_OF[found[0]] if len(found) == 1 else ""
    return " + ".join(names[axis] for axis in found) or "one device", dimension


def _row(recipe: Recipe, cluster: Cluster, technique: Technique, ranks: int) -> Row:
    """The technique on so many ranks. If they do not divide the model, on the most that do, with replicas."""
    asked = why = None
    for size in sorted(divisors(ranks), reverse=True):
        layout = replace(technique.layout(size, ranks // size), recompute=recipe.layout.recompute)
        asked = asked or layout
        if size == 1 < ranks:
            break  # nothing is left of the technique
        try:
            plan = _checked(recipe, cluster, layout)
            return Row(technique.name, technique.dimension, asked, plan, why or "")
        except UserError as error:
            why = why or _plain(error)
    assert asked is not None
    return Row(technique.name, technique.dimension, asked, None, why or "")


def _checked(recipe: Recipe, cluster: Cluster, layout: Layout) -> Plan:
    """The prediction of a layout.

    Raises:
        UserError: it breaks a rule.
    """
    if layout.ep > 1 and not card_of(recipe.model).has_experts:
        raise UserError("the model has no experts")
    broken = [*problems(layout)] or [*contradictions(in_layout(recipe, layout))]
    if broken:
        raise UserError(broken[0][1])
    return _predicted(recipe, cluster, layout)


def _predicted(recipe: Recipe, cluster: Cluster, layout: Layout) -> Plan:
    return predict(in_layout(recipe, layout), cluster)


def _plain(error: UserError) -> str:
    """The reason in one line, without the proposals."""
    return str(error).removeprefix("recipe: ").split(". Nearest valid")[0]


def by_dimension(rows: Sequence[Row]) -> Iterator[tuple[str, list[Row]]]:
    """The rows of each of the five dimensions."""
    for dimension in DIMENSIONS:
        yield dimension, [row for row in rows if row.dimension == dimension]
