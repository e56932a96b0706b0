"""A pipeline schedule: the rank of each stage, and the order in which each rank computes.

A schedule is a list of actions for each rank. An action needs results and makes others. Checks, simulations and the
order of transfers all follow from one walk through the lists.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Generic, Literal, NamedTuple, TypeVar

Kind = Literal["F", "B", "I", "W", "SEND_F", "RECV_F", "SEND_B", "RECV_B"]
COMPUTE = ("F", "B", "I", "W")


class Action(NamedTuple):
    """One action of a rank: one microbatch at one of its stages. Its text is that of PyTorch's runtime.

    F: forward. B: the whole backward. I: the gradient of the input alone, which the previous stage waits for. W: the
    gradients of the weights, which nothing waits for (arXiv 2401.10241). SEND_F, RECV_F: transfer of activations to the
    next stage. SEND_B, RECV_B: transfer of gradients to the previous stage. `stage` belongs to the rank that acts:
    0SEND_F3 arrives as 1RECV_F3.
    """

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @property
    def computes(self) -> bool:
        """True for F, B, I and W."""
        return self.kind in COMPUTE


Result = tuple[Literal["output", "gradient"], int, int]
"""(what, stage, microbatch): a stage's output, or the gradient of its input. A plain tuple, since walks make many."""


def makes(action: Action) -> Result | None:
    """The result of a computation. W has none: nobody waits for it."""
    stage, kind, microbatch = action
    if kind == "W":
        return None
    return ("output" if kind == "F" else "gradient", stage, microbatch)


def needs(action: Action, last: int) -> tuple[Result, ...]:
    """The results that a computation waits for. last: the last stage of the model."""
    stage, kind, microbatch = action
    if kind == "F":
        return (("output", stage - 1, microbatch),) if stage else ()
    if kind == "W":
        return (("gradient", stage, microbatch),)
    if stage == last:
        return (("output", stage, microbatch),)
    return ("output", stage, microbatch), ("gradient", stage + 1, microbatch)


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


Placement = Literal["loop", "v"]


@dataclass(frozen=True)
class Schedule:
    """`rank_of[s]` is the rank of stage s; `rows[r]` are the computations of rank r, in their order. paired: see
    `pairs`."""

    name: str
    microbatches: int
    rank_of: tuple[int, ...]
    rows: tuple[tuple[Action, ...], ...]
    paired: bool = False

    @property
    def ranks(self) -> int:
        return len(self.rows)

    @property
    def stages(self) -> int:
        return len(self.rank_of)

    @property
    def splits_backward(self) -> bool:
        """True if any backward is split into I and W."""
        return any(action.kind == "I" for row in self.rows for action in row)

    @cached_property
    def walked(self) -> Walk[Action, Result]:
        """The walk of all ranks through their rows."""
        return walk(self.rows, self._needs, self._makes)

    @cached_property
    def pairs(self) -> dict[Action, Action]:
        """Each F that runs together with the B behind it, which is of another stage (DualPipe: arXiv 2412.19437). The
        messages of one are under way while the other computes. A pair begins when both have their inputs, and gives
        both results at its end."""
        neighbours = (pair for row in self.rows for pair in pairwise(row)) if self.paired else ()
        return {a: b for a, b in neighbours if (a.kind, b.kind) == ("F", "B") and a.stage != b.stage}

    def _needs(self, action: Action) -> tuple[Result, ...]:
        own, behind = needs(action, self.stages - 1), self.pairs.get(action)
        return own if behind is None else own + needs(behind, self.stages - 1)

    def _makes(self, action: Action) -> tuple[Result, ...]:
        if action in self.pairs:
            return ()
        both = (makes(action), makes(self.ahead[action]) if action in self.ahead else None)
        return tuple(result for result in both if result)

    @cached_property
    def ahead(self) -> dict[Action, Action]:
        """The F of each B that runs in a pair."""
        return {behind: ahead for ahead, behind in self.pairs.items()}


def place(placement: Placement, ranks: int, chunks: int) -> tuple[int, ...]:
    """The rank of each of `ranks x chunks` stages. `loop` starts over at rank 0, `v` turns around (0 1 1 0)."""
    forth = list(range(ranks))
    back = forth[::-1] if placement == "v" else forth
    return tuple(rank for chunk in range(chunks) for rank in (back if chunk % 2 else forth))
