"""The schedules: one function each, which lists a rank's computations in order.

A function gets (rank, ranks, microbatches, stages per rank) and returns the rank's steps: (kind, stage). Each stage
processes its microbatches in order, so `build_row` numbers them. To add a schedule, write such a function and name it
in `SCHEDULES`.

Symbols: p ranks, v stages per rank, m microbatches; F, I, W seconds of forward, input and weight gradients.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

from fivefold.errors import UserError, did_you_mean, several
from fivefold.schedules.pipeline.schedule import Action, Kind, Placement, Schedule, Step, W, place, shares
from fivefold.schedules.pipeline.zero_bubble import zb_auto, zb_h1, zb_h2


def breadth_first(rank: int, ranks: int, microbatches: int, chunks: int) -> list[Step]:
    """All forwards, then all backwards: GPipe (arXiv 1811.06965); with several stages per rank, looped breadth-first
    (arXiv 2211.05953). A stage processes every microbatch before the rank's next stage begins.

    Idle share (p-1) / (vm+p-1) for m >= p. Every microbatch is live at once.
    """
    stages = range(rank, ranks * chunks, ranks)
    forwards: list[Step] = [("F", stage) for stage in stages for _ in range(microbatches)]
    return forwards + [("B", stage) for stage in reversed(stages) for _ in range(microbatches)]


def one_f_one_b(rank: int, ranks: int, microbatches: int, chunks: int) -> list[Step]:
    """One forward, one backward (arXiv 2006.09503): a rank runs a backward as soon as it can, so at most `ranks - rank`
    microbatches are live.

    Idle share (p-1) / (m+p-1), as in GPipe.
    """
    assert chunks == 1
    return _alternate([rank] * microbatches, [rank] * microbatches, warmup=ranks - rank - 1)


def interleaved(
    rank: int, ranks: int, microbatches: int, chunks: int, round_microbatches: int | None = None
) -> list[Step]:
    """1F1B with several stages per rank (arXiv 2104.04473). Microbatches go through the first stage in rounds, and a
    round reaches the rank's next stage before the next round starts.

    round_microbatches: of a round, if there are that many (N in section 3.3.2 of the Llama 3 report, arXiv 2407.21783);
    None: p. Their number need not be a multiple of it. Idle share (p-1) / (vm+p-1) for m, N >= p. With N = m this is
    breadth-first. A smaller N holds fewer microbatches, but below p ranks wait for each round to come back.
    """
    # A later round larger than the first would need activations that the warm-up has not made, so the remainder is
    # spread over the first rounds.
    count = max(1, microbatches // (round_microbatches or ranks))
    size, rest = divmod(microbatches, count)
    rounds = [size + (number < rest) for number in range(count)]
    behind = ranks - rank - 1
    warmup = 2 * behind
    if count > 1 and size < ranks:
        # The first rank's forwards wait for the last rank's backwards of two rounds before: more than 2 rounds between
        # their warm-ups would halt. Microbatches that come back late are not worth holding, so 1F1B's warm-up suffices.
        warmup = min(behind, 2 * size * behind // (ranks - 1))
    stages = range(rank, ranks * chunks, ranks)
    forwards = [stage for size in rounds for stage in stages for _ in range(size)]
    backwards = [stage for size in rounds for stage in reversed(stages) for _ in range(size)]
    return _alternate(forwards, backwards, warmup=(chunks - 1) * rounds[0] + warmup)


def _alternate(forwards: list[int], backwards: list[int], warmup: int) -> list[Step]:
    """`warmup` forwards, then forward and backward in turn, then the remaining backwards. Both: stages in order."""
    warmup = min(warmup, len(forwards))
    steps: list[Step] = [("F", stage) for stage in forwards[:warmup]]
    for position, stage in enumerate(backwards, warmup):
        if position < len(forwards):
            steps.append(("F", forwards[position]))
        steps.append(("B", stage))
    return steps


def zbv(rank: int, ranks: int, microbatches: int, chunks: int) -> list[Step]:
    """ZB-V (arXiv 2405.15362): each rank has one stage on the way down the V and one on the way up. The last stage is
    therefore on rank 0, and the first backward starts there.

    If F, I and W take equal time and m >= 2p-1, no rank is idle between its first and its last action. The only idle
    time is the shifted start: p-1 forwards of one stage, which has half a rank's layers. Memory is that of 1F1B: at
    most 2p stages of half the size are live.

    Needs microbatches >= 2 ranks - 1 (`build` drops the surplus).
    """
    assert chunks == 2
    assert microbatches >= 2 * ranks - 1
    forward, forward_up, inputs, inputs_up, after = _ways(rank, ranks, "I")
    steps = [forward] * (2 * after + 1)
    steps += [forward_up, forward] * rank
    steps += [forward_up, inputs_up, W] * (after + 1)
    steps += [forward, inputs, W, forward_up, inputs_up, W] * (microbatches - ranks - after)
    steps += [inputs, W, forward_up, inputs_up, W] * after
    steps += [inputs, inputs_up] * rank  # no forwards are left: gradients first, W last
    return steps + [inputs, W] * (after + 1)


def dualpipev(rank: int, ranks: int, microbatches: int, chunks: int) -> list[Step]:
    """DualPipeV: DualPipe (DeepSeek-V3, arXiv 2412.19437) cut in half, without a second copy of the parameters. One
    stage is on the way down the V, one on the way up. In the main part, a forward and a backward of different
    microbatches alternate, so that the transfers of one overlap with the other.

    Idle time per rank for m >= 2p and F = I >= W of one stage: (p-1) (F + I - W). Each result is sent at once. As
    `dualpipev_paired`, pairs run as one and deliver both results at the end, as in the paper: (p-1) (F&B + B - 3W). At
    most 2p+1 stages of half a rank's layers are live.

    Needs microbatches >= 2 ranks (`build` drops the surplus).
    """
    assert chunks == 2
    assert microbatches >= 2 * ranks
    forward, forward_up, inputs, inputs_up, after = _ways(rank, ranks, "I")
    *_, backward, backward_up, _ = _ways(rank, ranks, "B")
    steps = [forward] * (2 * after)
    steps += [forward, forward_up] * (rank + 1)
    steps += [inputs_up, W, forward_up] * after
    # the main part: pairs of forward and backward
    steps += [forward, backward_up, forward_up, backward] * (microbatches - 2 * ranks + rank + 1)
    steps += [backward_up, forward_up, backward] * after
    # the second half is split: its W fill what follows
    last = [backward_up, backward] * (rank + 1)
    split = [inputs_up, inputs] * (rank + 1)
    steps += last[: rank + 1] + split[rank + 1 :]
    return steps + [W, inputs] * after


def dualpipe(rank: int, ranks: int, microbatches: int, chunks: int) -> list[Step]:
    """DualPipe (DeepSeek-V3, arXiv 2412.19437): two copies of the model, whose stages lie on the ranks in opposite
    directions. Half of the microbatches enter at the first rank, the other half at the last one.

    Each half of the ranks runs what `dualpipev` runs on as many ranks: the V's way up is the other direction. So with
    p ranks idle time per rank is (p/2-1) (F + I - W), or (p/2-1) (F&B + B - 3W) in pairs, and at most p+1 stages are
    live, each of a p-th of the model. A rank has two of these, so the parameters are there twice.

    Needs microbatches >= 2 ranks (`build` drops the surplus) and an even number of ranks.
    """
    half, mine = ranks // 2, min(rank, ranks - 1 - rank)
    down, up = (rank, 2 * ranks - 1 - rank) if rank < half else (2 * ranks - 1 - rank, rank)
    stages, steps = {mine: down, 2 * half - 1 - mine: up}, dualpipev(mine, half, microbatches // 2, chunks)
    return [(kind, stages.get(stage, stage)) for kind, stage in steps]


def _ways(rank: int, ranks: int, kind: Kind) -> tuple[Step, Step, Step, Step, int]:
    """Of a V: the rank's forward on the way down and on the way up, its backwards of a kind on both, and the number of
    ranks further down."""
    down, up = rank, 2 * ranks - 1 - rank
    return ("F", down), ("F", up), (kind, down), (kind, up), ranks - rank - 1


def v_half(rank: int, ranks: int, microbatches: int, chunks: int) -> list[Step]:
    """V-Half (arXiv 2405.15362): a V as in ZB-V, with half of 1F1B's activation memory.

    Time is counted in slots of one F, I or W of a stage. A microbatch takes six slots on each rank, so one enters every
    six slots. Its F and I go down the V by one rank per slot and up by one rank per two slots. Then the slots of
    different microbatches never collide, and a rank's two free slots are for W. At most 2 floor((p+2)/2) stages of half
    a rank's layers are live. If F, I and W take equal time and m >= p, a rank is idle for floor((7p-8)/2) slots; in
    1F1B it is 6 (p-1).
    """
    assert chunks == 2
    forward, forward_up, inputs, inputs_up, after = _ways(rank, ranks, "I")
    pause = 0 if ranks % 2 else 3  # at the bottom of the V: keeps the slots of both ways apart
    turned = 3 * (ranks - 1) + 2 + pause + 1  # the first backward of the microbatch, on rank 0
    begins = {
        rank: forward,
        ranks - 1 + 2 + pause + 2 * after: forward_up,
        turned + rank: inputs_up,
        turned + ranks - 1 + 1 + pause + 2 * after: inputs,
    }  # slot of the first microbatch: step
    block = {slot % 6: (slot, step) for slot, step in begins.items()}
    assert len(block) == 4, "slots collide"
    steps = []
    for slot in range(max(begins) + 6 * (microbatches - 1) + 1):
        begin, step = block.get(slot % 6, (slot, W))
        if begin <= slot < begin + 6 * microbatches:
            steps.append(step)
    return steps


@dataclass(frozen=True)
class Generator:
    """The generator of a schedule. All other properties of the schedule follow from its rows.

    row: (rank, ranks, microbatches, stages per rank) -> the rank's steps. stages: the fewest and the most stages
    per rank (None: no limit). instead: the schedule for another number. fill: the fewest microbatches that `row` needs,
    given the ranks. paired: neighbouring forwards and backwards run together (`Schedule.pairs`). copies: of the
    model (`Schedule.copies`); the ranks must be a multiple. takes: fields of a layout that `row` takes, too, None or ""
    if unset. tries: of (ranks, microbatches, `zb_costs` as planned), values of these fields for `plan search` to try.
    varies: the middle of many microbatches is not a repetition.
    """

    row: Callable[..., list[Step]]
    placement: Placement = "loop"
    stages: tuple[int, int | None] = (1, 1)
    instead: str = "interleaved"
    fill: Callable[[int], int] = lambda ranks: 1
    paired: bool = False
    copies: int = 1
    takes: tuple[str, ...] = ()
    tries: Callable[[int, int, str], list[dict[str, int | str]]] = lambda *_: []
    varies: bool = False


MOST_TRIED = 2048
"""Microbatches times ranks where `plan search` tries what it has to simulate to the end: tenths of a second each."""


def _twice(ranks: int) -> int:
    return 2 * ranks


def _rounds(ranks: int, microbatches: int, costs: str) -> list[dict[str, int | str]]:
    """Shorter rounds, which hold less, and longer ones, which hide transfers: one of each number of rounds."""
    shorter = (3 * ranks // 4, ranks - 1) if ranks * microbatches <= MOST_TRIED else ()
    sizes = {max(1, microbatches // n): n for n in (*shorter, ranks + 1, 3 * ranks // 2)}
    return [{"round_microbatches": n} for count, n in sizes.items() if count != max(1, microbatches // ranks)]


def _lives(ranks: int, microbatches: int, costs: str) -> list[dict[str, int | str]]:
    """Memory from that of H1 to that of H2, where every microbatch on every rank is soon gone through."""
    lives = (ranks, 3 * ranks // 2, 2 * ranks - 1) if ranks * microbatches <= MOST_TRIED else ()
    return [{"zb_costs": costs, "zb_live": live} for live in lives]


SCHEDULES = {
    "gpipe": Generator(breadth_first, instead="looped_bfs"),
    "1f1b": Generator(one_f_one_b),
    "interleaved": Generator(
        interleaved, stages=(2, None), instead="1f1b", takes=("round_microbatches",), tries=_rounds
    ),
    "looped_bfs": Generator(breadth_first, stages=(2, None), instead="gpipe"),
    "zb_h1": Generator(zb_h1),
    "zb_h2": Generator(zb_h2),
    "zb_auto": Generator(zb_auto, takes=("zb_costs", "zb_live"), tries=_lives, varies=True),
    "zbv": Generator(zbv, "v", stages=(2, 2), fill=lambda ranks: 2 * ranks - 1),
    "dualpipev": Generator(dualpipev, "v", (2, 2), fill=_twice),
    "dualpipev_paired": Generator(dualpipev, "v", (2, 2), fill=_twice, paired=True),
    "dualpipe": Generator(dualpipe, "v", (2, 2), fill=_twice, copies=2),
    "dualpipe_paired": Generator(dualpipe, "v", (2, 2), fill=_twice, paired=True, copies=2),
    "v_half": Generator(v_half, "v", stages=(2, 2)),
}
TUNED = tuple(field for made in SCHEDULES.values() for field in made.takes)
"""Fields of a layout that some schedules take. None or "": unset."""
DEFAULT = "1f1b"
"""The default schedule. It has one stage per rank, so it also stands for no pipeline at all."""


def build(
    name: str, ranks: int, microbatches: int, virtual_stages: int = 1, **tuned: int | str | None
) -> Schedule:
    """Builds the schedule `name` for any number of ranks and microbatches. virtual_stages: stages per rank. If a
    schedule allows only one number, 1 (a layout's default) stands for it. tuned: values of `TUNED`. Raises UserError:
    names the layout's field, its value and the nearest valid one."""
    chunks = stages_per_rank(name, virtual_stages)
    for field, value in (("pp", ranks), ("microbatches", microbatches)):
        if value < 1:
            raise UserError(f"layout.{field}: {value} is not possible with a pipeline; must be at least 1")
    if message := tuning_problem(name, tuned) or copies_problem(name, ranks):
        raise UserError(f"layout.{message}")
    rows = tuple(tuple(build_row(name, rank, ranks, microbatches, chunks, **tuned)) for rank in range(ranks))
    made = SCHEDULES[name]
    rank_of = place(made.placement, ranks, chunks)
    return Schedule(name, microbatches, rank_of, rows, made.paired, made.copies)


def tuning_problem(name: str, tuned: Mapping[str, int | str | None]) -> str:
    """Says which field of `TUNED` is set that the schedule `name` does not take; "" if there is none."""
    for field, value in tuned.items():
        if value and field not in SCHEDULES[name].takes:
            others = " or ".join(other for other, made in SCHEDULES.items() if field in made.takes)
            nearest = f"Nearest valid: leave it out, or schedule={others}"
            return f"{field}={value}: schedule '{name}' does not take it. {nearest}"
    return ""


def copies_problem(name: str, ranks: int) -> str:
    """Says why the schedule `name` cannot place its copies of the model on so many pipeline ranks; "" if it can."""
    if ranks % (copies := SCHEDULES[name].copies) == 0:
        return ""
    which = f"{copies}, the copies of the model of schedule '{name}'"
    return f"pp={ranks} must be divisible by {which}. Nearest valid: pp={-(-ranks // copies) * copies}"


def build_row(
    name: str, rank: int, ranks: int, microbatches: int, chunks: int, **tuned: int | str | None
) -> list[Action]:
    """One rank's computations under schedule `name`, with `chunks` stages per rank. tuned: values of `TUNED`."""
    # A schedule stays in order if some microbatches are left out, so build enough and drop the surplus.
    copies = SCHEDULES[name].copies
    enough = max(-(-microbatches // copies) * copies, SCHEDULES[name].fill(ranks))
    row: list[Action] = []
    forwards, backwards = [0] * (ranks * chunks), [0] * (ranks * chunks)  # of each stage, up to here
    owed: deque[Action] = deque()  # W still to come
    given = {field: tuned[field] for field in SCHEDULES[name].takes if field in tuned}
    for kind, stage in SCHEDULES[name].row(rank, ranks, enough, chunks, **given):
        if kind == "W":
            row += [owed.popleft()] if owed else []
            continue
        done = forwards if kind == "F" else backwards
        row.append(Action(stage, kind, done[stage]))
        if kind == "I":
            owed.append(Action(stage, "W", done[stage]))
        done[stage] += 1
    row += owed
    if enough == microbatches and copies == 1:
        return row
    share = {stage: shares(microbatches, copies)[stage * copies // (ranks * chunks)] for stage, _, _ in row}
    return [Action(s, kind, share[s][number]) for s, kind, number in row if number < len(share[s])]


def stages_per_rank(name: str, virtual_stages: int) -> int:
    """The number of stages per rank under schedule `name`, given the layout's `virtual_stages`. Raises UserError: there
    is no such schedule, or it does not allow that number."""
    if name not in SCHEDULES:
        near = did_you_mean(name, SCHEDULES)
        raise UserError(f"layout.schedule: '{name}' is unknown{near} (valid: {', '.join(SCHEDULES)})")
    least, most = SCHEDULES[name].stages
    if least == most and virtual_stages == 1:
        return least
    if virtual_stages < least or (most and virtual_stages > most):
        allowed = f"{'exactly' if least == most else 'at least'} {several(least, 'stage')}"
        other = f", or schedule={SCHEDULES[name].instead}" if virtual_stages >= 1 else ""
        raise UserError(
            f"layout.virtual_stages: schedule '{name}' needs {allowed} per rank, not "
            f"{virtual_stages}. Nearest valid: virtual_stages={least}{other}"
        )
    return virtual_stages


FILLING = 2
"""Microbatches per pipeline rank that fill the pipeline. More do not raise any rank's memory, unless it holds all."""


def few(microbatches: int, ranks: int, each: int | None = None, rounds: int = FILLING) -> int:
    """Fewer microbatches that are held as all of them are, if there are fewer: at least `rounds` rounds. each:
    microbatches of a round; None: one per rank.

    They have the same remainder modulo a round. `interleaved` spreads it over its rounds, so there are at least as
    many rounds; with fewer, each is longer, and more is held. Below p a round of the length `each` must be among them.
    """
    each = each or ranks
    rest = microbatches % each
    return min(microbatches, each * max(rounds, rest + (each < ranks)) + rest)


def shown(microbatches: int, ranks: int, each: int | None = None) -> int:
    """Microbatches that show how the pipeline fills and drains. Each further one only repeats the middle. each: as in
    `few`. With rounds of fewer microbatches than ranks, every round has idle time of its own, so all are shown."""
    each = each or ranks
    return microbatches if each < ranks else min(microbatches, FILLING * each + microbatches % each)


@cache
def splits_backward(name: str, ranks: int, chunks: int) -> bool:
    """True if the schedule computes weight gradients separately (I and W)."""
    return any(kind == "I" for _, kind, _ in build_row(name, 0, ranks, ranks, chunks))


def most_live(
    name: str, rank: int, ranks: int, microbatches: int, chunks: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Microbatches in each of a rank's stages, ascending, at a moment when it holds most: (those between F and B or I,
    those between I and W). The whole schedule needs at least this memory at its peak.

    chunks: stages per rank.
    """
    filling = min(microbatches, FILLING * ranks)
    if filling < microbatches and holds_all(name, ranks, chunks):
        return (microbatches,) * chunks, (0,) * chunks
    return _most_live(name, rank, ranks, filling, chunks)


@cache
def holds_all(name: str, ranks: int, chunks: int) -> bool:
    """True if all microbatches are live at once, for any number. It suffices to check enough to fill the pipeline."""
    live, _ = _most_live(name, 0, ranks, FILLING * ranks, chunks)
    return sum(live) == FILLING * ranks * chunks


@cache
def holds_again(name: str, rank: int, ranks: int, chunks: int) -> bool:
    """True if a rank holds as much as in `most_live` also while the gradients of all its stages add up: behind the
    first backward and before the last one of each, of enough microbatches to fill the pipeline. Where all of them are
    live at once (`holds_all`), the first backward of the only stage begins then."""
    if holds_all(name, ranks, chunks):
        return chunks == 1
    row = build_row(name, rank, ranks, FILLING * ranks, chunks)
    most = _most_live(name, rank, ranks, FILLING * ranks, chunks)
    stages = sorted({stage for stage, _, _ in row})
    ends = {stage: number for number, (stage, kind, _) in enumerate(row) if kind in "BW"}
    count, begun = Counter[tuple[int, str]](), set[int]()
    for number, (stage, kind, _) in enumerate(row):
        count[stage, kind] += 1
        begun |= {stage} if kind in "BI" else set()
        whole = len(begun) == chunks and number < min(ends.values())
        if whole and _live(count, stages) == most:
            return True
    return False


def _live(count: Counter[tuple[int, str]], stages: list[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """See `most_live`, after so many actions of each kind."""
    return (
        tuple(count[stage, "F"] - count[stage, "B"] - count[stage, "I"] for stage in stages),
        tuple(count[stage, "I"] - count[stage, "W"] for stage in stages),
    )


@cache
def _most_live(
    name: str, rank: int, ranks: int, microbatches: int, chunks: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    row = build_row(name, rank, ranks, microbatches, chunks)
    held = most = peak = 0  # peak: number of actions until the rank first holds most
    for number, (_, kind, _) in enumerate(row, 1):
        if kind == "F":
            held += 1
            if held > most:
                most, peak = held, number
        elif kind != "I":
            held -= 1
    count = Counter((stage, kind) for stage, kind, _ in row[:peak])
    stages = [
        stage for stage, owner in enumerate(place(SCHEDULES[name].placement, ranks, chunks)) if owner == rank
    ]
    return _live(count, stages)


def ends_upwards(name: str, ranks: int, microbatches: int, chunks: int) -> bool:
    """True if every backward is one action, and each rank's last action is the backward of its first stage. Then the
    backward of all earlier stages comes after a rank's end."""
    return _ends_upwards(name, ranks, min(microbatches, FILLING * ranks), chunks)


@cache
def _ends_upwards(name: str, ranks: int, microbatches: int, chunks: int) -> bool:
    for rank in range(ranks):
        row = build_row(name, rank, ranks, microbatches, chunks)
        if row[-1].kind != "B" or row[-1].stage != min(row).stage or any(kind == "I" for _, kind, _ in row):
            return False
    return True
