"""Which part of an optimizer's states a rank keeps, by the optimizer's card. Trainer, checkpoints and planner read it.
No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from fivefold.optim.card import OptimizerCard, OptimizerState, state_ranges
from fivefold.spread.layout import Layout
from fivefold.spread.matrices import Exchange, Route, exchanges, routes
from fivefold.spread.parts import Model, Part, held, size_of


def ways(card: OptimizerCard, model: Model, layout: Layout, rank: int) -> dict[str, Route]:
    """How the pieces of matrices come together before an update, for the parameters whose update needs it."""
    if card.needs == "elements" or (layout.tp == 1 and not layout.zero):
        return {}
    needs = {n: card.needs for n, shape in model.parameters.items() if card.of(n, shape).needs != "elements"}
    return routes(model, layout, rank, needs)


def places(
    card: OptimizerCard, table: Mapping[str, Part], found: Mapping[str, Route]
) -> Iterator[tuple[OptimizerState, str, Part]]:
    """(state, parameter, the part of the state that this rank keeps). table: the rank's parts of the parameters. found:
    their ways."""
    for name, part in table.items():
        way = found.get(name)
        if way is not None and not way.mine:
            continue  # its states are on its owner
        kept, owned = (way.whole, part.owned) if way else (part.keeps, part.owned)
        for state, shape in card.states_of(name, part.shape):
            ranges = state_ranges(kept, part.shape, shape)
            yield state, name, replace(part, shape=shape, computes=ranges, keeps=ranges, owned=owned)


def state_bytes(card: OptimizerCard, model: Model, layout: Layout, rank: int) -> float:
    """Bytes of all states that a rank keeps."""
    table, found = held(model, layout, rank), ways(card, model, layout, rank)
    return sum(state.bytes * size_of(part.keeps) for state, _, part in places(card, table, found))


def gatherings(card: OptimizerCard, model: Model, layout: Layout, rank: int) -> list[Exchange]:
    """The messages that bring pieces of matrices together before an update; as many send them back."""
    return exchanges(ways(card, model, layout, rank), layout, rank)
