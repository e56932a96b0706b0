"""Proves that a collective computes what its primitive promises."""

from __future__ import annotations

from fivefold.errors import UserError
from fivefold.schedules.collectives.move import Collective, Round

Sum = tuple[int, int]
"""(contributions as bits, the order in which they were added). The order is equal where the bits of a sum are equal:
a + b is b + a, but (a + b) + c is not a + (b + c)."""
State = list[dict[int, Sum]]
"""By rank, the chunks it has."""


def prove(collective: Collective) -> list[State]:
    """Follows every chunk through the rounds. Returns what the ranks have before the first round and after each.

    In the end every rank has what it wants, with each contribution exactly once (in a barrier: at least once). Ranks
    that end with the same chunk have added it in the same order, so they have the same bits.

    Raises:
        UserError: names the round and the move that is wrong, or the contribution that is missing.
    """
    state: State = [
        {chunk: (1 << rank, hash(("input", rank, chunk))) for chunk in collective.holds(rank)}
        for rank in range(collective.ranks)
    ]
    states = [state]
    for number, moves in enumerate(collective.rounds, 1):
        state = _after(collective, number, moves, state)
        states.append(state)
    _check_end(collective, state)
    return states


def _after(collective: Collective, number: int, moves: Round, before: State) -> State:
    after = [dict(row) for row in before]
    sent = {(move.source, chunk) for move in moves for chunk in move.chunks}
    copied: set[tuple[int, int]] = set()
    for move in moves:
        source, target, chunks, reduce = move
        if not (0 <= source < collective.ranks and 0 <= target < collective.ranks and source != target):
            raise _wrong(collective, number, f"a move from rank {source} to rank {target} is not possible")
        for chunk in chunks:
            what = f"rank {source} sends chunk {chunk} to rank {target}"
            if chunk not in before[source]:
                raise _wrong(collective, number, f"{what}, but does not have it")
            arrived, here = before[source][chunk], after[target].get(chunk)
            if (target, chunk) in copied or (here != before[target].get(chunk) and not reduce):
                raise _wrong(collective, number, f"{what}, which gets it twice")
            if reduce:
                after[target][chunk] = _added(collective, number, what, here, arrived)
            elif (target, chunk) in sent:
                raise _wrong(collective, number, f"{what}, which sends its own away in the same round")
            else:
                copied.add((target, chunk))
                after[target][chunk] = arrived
    return after


def _added(collective: Collective, number: int, what: str, here: Sum | None, arrived: Sum) -> Sum:
    if here is None:
        raise _wrong(collective, number, f"{what}, which has nothing to add it to")
    if here[0] & arrived[0] and collective.primitive != "barrier":
        twice = (here[0] & arrived[0]).bit_length() - 1
        raise _wrong(collective, number, f"{what}, so that rank {twice}'s contribution counts twice")
    return here[0] | arrived[0], hash((min(here[1], arrived[1]), max(here[1], arrived[1])))


def _check_end(collective: Collective, state: State) -> None:
    everyone: dict[int, int] = {}
    for rank in range(collective.ranks):
        for chunk in collective.holds(rank):
            everyone[chunk] = everyone.get(chunk, 0) | 1 << rank
    order: dict[int, int] = {}
    for rank in range(collective.ranks):
        for chunk in collective.wants(rank):
            bits, added = state[rank].get(chunk, (0, 0))
            if missing := everyone[chunk] & ~bits:
                least = (missing & -missing).bit_length() - 1
                text = f"rank {rank} ends without rank {least}'s contribution to chunk {chunk}"
                raise _wrong(collective, None, text)
            if order.setdefault(chunk, added) != added and collective.primitive != "barrier":
                text = f"rank {rank} adds chunk {chunk} in another order than other ranks: the bits differ"
                raise _wrong(collective, None, text)


def _wrong(collective: Collective, number: int | None, message: str) -> UserError:
    where = f", round {number}" if number is not None else ""
    return UserError(f"{collective.primitive} '{collective.algorithm}'{where}: {message}")
