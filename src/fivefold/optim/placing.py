"""Which part of an optimizer's states a rank keeps, by the optimizer's card. Trainer, checkpoints and planner read it.
No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from fivefold.optim.card import OptimizerCard, OptimizerState, state_ranges
from fivefold.spread.layout import Layout
from fivefold.spread.matrices import Needs, Outline, Route, outlines, routes
from fivefold.spread.parts import Model, Part, Ranges, held, size_of


def ways(card: OptimizerCard, model: Model, layout: Layout, rank: int) -> dict[str, Route]:
    """How the pieces of matrices come together before an update, for the parameters whose update needs it."""
    return routes(model, layout, rank, _needs(card, model)) if _divides(card, layout) else {}


def planned_ways(card: OptimizerCard, model: Model, layout: Layout, rank: int) -> dict[str, Outline]:
    """The same for the planner, which asks for sizes only."""
    return outlines(model, layout, rank, _needs(card, model)) if _divides(card, layout) else {}


def _divides(card: OptimizerCard, layout: Layout) -> bool:
    return card.needs != "elements" and (layout.tp > 1 or layout.zero > 0)


def _needs(card: OptimizerCard, model: Model) -> dict[str, Needs]:
    return {
        n: card.needs
        for n, shape in model.parameters.items()
        if n not in model.frozen and card.of(n, shape).needs != "elements"
    }


def places(
    card: OptimizerCard, table: Mapping[str, Part], gathered: Mapping[str, Ranges | None]
) -> Iterator[tuple[OptimizerState, str, Part]]:
    """(state, parameter, the part of the state that this rank keeps). table: the rank's parts of the parameters.
    gathered: what it updates of those that come together; None: another rank does."""
    for name, part in table.items():
        kept = gathered.get(name, part.keeps)
        if kept is None or part.frozen:
            continue  # its states are on its owner, or nowhere
        for state, shape in card.states_of(name, part.shape):
            ranges = state_ranges(kept, part.shape, shape)
            yield state, name, replace(part, shape=shape, computes=ranges, keeps=ranges)


def gathered(found: Mapping[str, Route]) -> dict[str, Ranges | None]:
    """What a rank updates of each parameter with a way."""
    return {name: way.whole if way.mine else None for name, way in found.items()}


def state_bytes(card: OptimizerCard, model: Model, layout: Layout, rank: int) -> float:
    """Bytes of all states that a rank keeps."""
    table = held(model, layout, rank)
    if card.uniform:
        return card.bytes * sum(size_of(part.keeps) for part in table.values() if not part.frozen)
    found = {name: way.whole for name, way in planned_ways(card, model, layout, rank).items()}
    return sum(state.bytes * size_of(part.keeps) for state, _, part in places(card, table, found))
