"""Walks through a schedule: each rank proceeds through its list as long as the results it needs exist.

A schedule is a list of actions for each rank. An action needs results and makes others. Checks, simulations and
the order of transfers all follow from the walk.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

A = TypeVar("A")
R = TypeVar("R", bound=Hashable)


@dataclass(frozen=True)
class Walk(Generic[A, R]):
    """The steps of a walk. Each step comes after all steps that it needs.

    Step i is `actions[i]` on rank `ranks[i]`. after: the steps of other ranks that made the results it needs. Results
    of its own rank always exist, since a rank keeps to its order. stuck: for each rank that cannot finish, the action
    at which it stops and the missing result. Walks are cached, so they are lists instead of objects.
    """

    ranks: list[int]
    actions: list[A]
    after: list[tuple[int, ...]]
    stuck: dict[int, tuple[A, R]]


def walk(
    rows: Sequence[Sequence[A]], needs: Callable[[A], Sequence[R]], makes: Callable[[A], Sequence[R]]
) -> Walk[A, R]:
    """Walks all ranks through their rows.

    needs: the results that must exist before an action. makes: the results of an action that somebody needs.
    """
    ranks, actions, after = [], [], []
    made: dict[R, tuple[int, int]] = {}  # the step that made each result, and its rank
    done = [0] * len(rows)
    waiting: dict[R, list[int]] = defaultdict(list)
    ready = list(range(len(rows)))[::-1]
    stuck: dict[int, tuple[A, R]] = {}
    while ready:
        rank = ready.pop()
        stuck.pop(rank, None)
        for action in rows[rank][done[rank] :]:
            before: tuple[int, ...] = ()
            for result in needs(action):
                if result not in made:
                    waiting[result].append(rank)
                    stuck[rank] = action, result
                    break
                step, maker = made[result]
                if maker != rank:
                    before += (step,)
            if rank in stuck:
                break
            for result in makes(action):
                made[result] = len(ranks), rank
                if result in waiting:
                    ready += waiting.pop(result)
            ranks.append(rank)
            actions.append(action)
            after.append(before)
            done[rank] += 1
    return Walk(ranks, actions, after, stuck)
