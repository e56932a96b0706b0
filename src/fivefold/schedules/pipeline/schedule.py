"""A pipeline schedule: the blocks and the rank of each stage, and the order in which each rank computes.

A schedule is a list of actions for each rank. An action needs results and makes others. Checks, simulations and the
order of transfers all follow from one walk through the lists.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from typing import Generic, Literal, NamedTuple, TypeVar

from fivefold.errors import UserError

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


def needs(action: Action, length: int) -> tuple[Result, ...]:
    """The results that a computation waits for. length: number of stages of the model."""
    stage, kind, microbatch = action
    if kind == "F":
        return (("output", stage - 1, microbatch),) if stage % length else ()
    if kind == "W":
        return (("gradient", stage, microbatch),)
    if (stage + 1) % length == 0:
        return (("output", stage, microbatch),)
    return ("output", stage, microbatch), ("gradient", stage + 1, microbatch)


Step = tuple[Kind, int]
"""What a generator lists: the next action of this kind of a stage."""
W: Step = ("W", -1)
"""The weight gradients of the oldest I whose W is still to come, if there is one. Those that are left come last."""

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
    `pairs`. copies: of the model. Its stages are numbered one copy after the other, and each copy has its share of the
    microbatches: the first ones, and so on."""

    name: str
    microbatches: int
    rank_of: tuple[int, ...]
    rows: tuple[tuple[Action, ...], ...]
    paired: bool = False
    copies: int = 1

    @property
    def length(self) -> int:
        """Number of stages of one copy of the model."""
        return self.stages // self.copies

    def microbatches_of(self, stage: int) -> range:
        """The microbatches that pass a stage."""
        return shares(self.microbatches, self.copies)[stage // self.length]

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
        """The walk of all ranks through their rows. A pair needs what both need, and makes what both make at its
        end."""
        length, pairs, ahead = self.length, self.pairs, self.ahead

        def needed(action: Action) -> tuple[Result, ...]:
            return needs(action, length) + (needs(pairs[action], length) if action in pairs else ())

        def made(action: Action) -> list[Result]:
            done = () if action in pairs else (action, ahead[action]) if action in ahead else (action,)
            return [result for result in map(makes, done) if result]

        return walk(self.rows, needed, made)

    @cached_property
    def pairs(self) -> dict[Action, Action]:
        """Each F that runs together with the B behind it, which is of another stage (DualPipe: arXiv 2412.19437). The
        messages of one are under way while the other computes. A pair begins when both have their inputs, and gives
        both results at its end."""
        neighbours = (pair for row in self.rows for pair in pairwise(row)) if self.paired else ()
        return {a: b for a, b in neighbours if (a.kind, b.kind) == ("F", "B") and a.stage != b.stage}

    @cached_property
    def ahead(self) -> dict[Action, Action]:
        """The F of each B that runs in a pair."""
        return {behind: ahead for ahead, behind in self.pairs.items()}


def shares(microbatches: int, copies: int) -> list[range]:
    """The microbatches of each copy of the model, as equally many as can be."""
    ends = [-(-microbatches * copy // copies) for copy in range(copies + 1)]
    return [range(start, stop) for start, stop in pairwise(ends)]


def place(placement: Placement, ranks: int, chunks: int) -> tuple[int, ...]:
    """The rank of each of `ranks x chunks` stages. `loop` starts over at rank 0, `v` turns around (0 1 1 0)."""
    forth = list(range(ranks))
    back = forth[::-1] if placement == "v" else forth
    return tuple(rank for chunk in range(chunks) for rank in (back if chunk % 2 else forth))


def peak_live(
    schedule: Schedule, size: Sequence[float] | None = None, after_input: Sequence[float] | None = None
) -> list[float]:
    """The most activations that each rank holds at once. Arguments: see `live_phases`."""
    return [max(most for _, most in phases) for phases in live_phases(schedule, size, after_input)]


def live_phases(
    schedule: Schedule,
    size: Sequence[float] | None = None,
    after_input: Sequence[float] | None = None,
    together: Sequence[int] = (),
    sooner: bool = False,
) -> list[list[tuple[frozenset[int], float]]]:
    """The phases of each rank's step: (stages whose weight gradients add up, the most activations held at once). A
    stage's gradients add up from the end of its first backward until its last one is done.

    `size[s]`: bytes that a microbatch holds at stage s, from its F to its B or W. The default is 1, which counts
    microbatches times stages. `after_input[s]`: the bytes still held from I to W. The default is all. together: stages
    whose gradients are done together. sooner: a phase begins before the action that changes the stages, as an upper
    bound where each microbatch stands for several.
    """
    size = size or [1] * schedule.stages
    after_input = after_input or size
    change = {
        "F": size,
        "B": [-s for s in size],
        "I": [left - s for s, left in zip(size, after_input, strict=True)],
        "W": [-left for left in after_input],
    }
    ranks = []
    for row in schedule.rows:
        ends = {stage: number for number, (stage, kind, _) in enumerate(row) if kind in "BW"}
        if ends.keys() >= set(together):
            ends |= dict.fromkeys(together, max((ends[stage] for stage in together), default=0))
        done = set(ends.values())
        phases, whole, held, peak = list[tuple[frozenset[int], float]](), frozenset[int](), 0.0, 0.0
        for number, (stage, kind, _) in enumerate(row):
            before = held
            held += change[kind][stage]
            if number in done or (kind in "BI" and stage not in whole):
                phases.append((whole, peak))
                whole = frozenset(s for s in {*whole, stage} if ends[s] > number)
                peak = before if sooner else held
            elif held > peak:
                peak = held
        ranks.append([*phases, (whole, peak)])
    return ranks


def owed_together(row: Sequence[Action], size: Sequence[float]) -> float:
    """A rank's largest sum of `size[s]` over the stages that owe weight gradients at once: their I is done for more
    microbatches than their W."""
    owed, sums = [0] * len(size), [0.0]
    for stage, kind, _ in row:
        owed[stage] += (kind == "I") - (kind == "W")
        sums.append(sum(size[other] for other, count in enumerate(owed) if count))
    return max(sums)


def check(schedule: Schedule) -> list[float]:
    """Proves that a schedule can run, and that it trains on every microbatch once. Returns each rank's largest number
    of live activations, in microbatches times stages. Raises UserError: names the action that is duplicated, missing,
    on the wrong rank, or waits forever."""
    if problem := next(_problems(schedule), None):
        raise UserError(f"schedule '{schedule.name}': {problem}")
    return peak_live(schedule)


def _problems(schedule: Schedule) -> Iterator[str]:
    """What is wrong with a schedule. Later checks count on earlier ones."""
    places: dict[Action, int] = {}
    stages, microbatches = schedule.stages, schedule.microbatches
    for rank, row in enumerate(schedule.rows):
        for place, action in enumerate(row):
            if not action.computes:
                yield f"{action} on rank {rank} is a transfer; those are added later"
            elif action.stage >= stages:
                yield f"{action} on rank {rank}: the last of {stages} stages is {stages - 1}"
            elif action.microbatch >= microbatches:
                yield f"{action} on rank {rank}: the last of {microbatches} microbatches is {microbatches - 1}"
            elif action.microbatch not in schedule.microbatches_of(action.stage):
                yield f"{action} on rank {rank}: this microbatch passes another copy of the model"
            elif rank != (owner := schedule.rank_of[action.stage]):
                yield f"{action} is on rank {rank}, but stage {action.stage} is on rank {owner}"
            elif action in places:
                yield f"{action} is there twice"
            places[action] = place
    for stage, microbatch in ((s, m) for s in range(stages) for m in schedule.microbatches_of(s)):
        forward, whole, inputs, weights = (Action(stage, kind, microbatch) for kind in COMPUTE)
        parts = [part for part in (inputs, weights) if part in places]
        if forward not in places:
            yield f"{forward} is missing"
        elif whole in places and parts:
            yield f"{parts[0]} is there beside {whole}, which contains it"
        elif whole not in places and not parts:
            yield f"{whole} is missing (or {inputs} and {weights})"
        elif len(parts) == 1:
            absent = weights if inputs in places else inputs
            yield f"{absent} is missing: {parts[0]} is only one part of a backward"
        elif parts and places[weights] < places[inputs]:
            yield f"{weights} comes before {inputs}"
    # PyTorch's runtime counts losses in order of arrival
    last = [action for action in schedule.rows[schedule.rank_of[-1]] if action[:2] == (stages - 1, "F")]
    for number, action in zip(schedule.microbatches_of(stages - 1), last, strict=True):
        if action.microbatch != number:
            due = action._replace(microbatch=number)
            yield f"{action} comes before {due}: the last stage meets microbatches in order"
    if stuck := sorted(schedule.walked.stuck.items()):
        waits = "; ".join(
            f"rank {rank} at {action} for the {what} of stage {stage} for microbatch {microbatch}"
            for rank, (action, (what, stage, microbatch)) in stuck
        )
        yield f"it comes to a halt: waiting are {waits}"


StageCost = Callable[[int, int, int], float]
"""(stage, its first block, the block after its last) -> cost of the stage."""


def cut(
    costs: Sequence[float], stages: int, first: float = 0.0, last: float = 0.0, bare_ends: bool = False
) -> tuple[range, ...]:
    """Divides blocks into `stages` runs of at least one block each. The most expensive stage is as cheap as possible.
    Of these cuts it takes the most even one (least sum of squares).

    costs: of each block. first, last: extra cost of the first and the last stage (the embedding, the head). Any unit
    works, for example FLOPs per token. bare_ends: the first and the last stage may have no block.
    """
    least = [int(not (bare_ends and stage in (0, stages - 1))) for stage in range(stages)]
    assert stages >= 1, stages
    assert sum(least) <= len(costs), f"{stages} stages of {len(costs)} blocks"
    before = [0.0, *accumulate(costs)]

    def cost(stage: int, start: int, stop: int) -> float:
        return before[stop] - before[start] + first * (stage == 0) + last * (stage == stages - 1)

    if stages == 1:
        return (range(len(costs)),)
    possible = _run_costs(tuple(before), first, last)
    worst = bisect_left(possible, True, key=lambda limit: _possible(len(costs), least, cost, limit))
    limit = possible[worst] * (1 + 1e-9)
    ends = _most_even(len(costs), least, cost, limit)
    return tuple(range(start, stop) for start, stop in zip([0, *ends], ends, strict=False))


@lru_cache(maxsize=64)
def _run_costs(before: tuple[float, ...], first: float, last: float) -> list[float]:
    """Every possible cost of a stage, ascending. before: prefix sums of the blocks' costs."""
    runs = {stop - start for i, start in enumerate(before) for stop in before[i:]}
    return sorted(run + extra for run in runs for extra in (0.0, first, last))


def _possible(blocks: int, least: Sequence[int], cost: StageCost, limit: float) -> bool:
    """True if no stage needs to cost more than `limit`. Each stage takes as many blocks as it may, and leaves each
    later stage the least that it needs."""
    start, last = 0, len(least) - 1
    for stage in range(last):
        stop, most = start, blocks - sum(least[stage + 1 :])
        while stop < most and cost(stage, start, stop + 1) <= limit:
            stop += 1
        if stop - start < least[stage] or cost(stage, start, stop) > limit:
            return False
        start = stop
    return cost(last, start, blocks) <= limit


def _most_even(blocks: int, least: Sequence[int], cost: StageCost, limit: float) -> list[int]:
    """The ends of the stages such that none costs more than `limit` and the sum of squares is least."""
    totals: list[dict[int, tuple[float, int]]] = [{0: (0.0, 0)}]  # after each stage: {end: (sum, its start)}
    for stage in range(len(least)):
        best = {}
        for stop in range(sum(least[: stage + 1]), blocks - sum(least[stage + 1 :]) + 1):
            choices = []
            for start in range(stop - least[stage], -1, -1):
                run = cost(stage, start, stop)
                if run > limit:
                    break
                if start in totals[-1]:
                    choices.append((totals[-1][start][0] + run * run, start))
            if choices:
                best[stop] = min(choices)
        totals.append(best)
    ends = [blocks]
    for best in reversed(totals[2:]):
        ends.append(best[ends[-1]][1])
    return ends[::-1]
