"""The schedules: one function each, which lists a rank's computations in order.

A function gets (rank, ranks, microbatches, stages per rank) and returns the rank's computations. To add a schedule,
write such a function and name it in `registry.py`.

Symbols: p ranks, v stages per rank, m microbatches; F, I, W seconds of forward, input and weight gradients.
"""

from __future__ import annotations

from collections import Counter, deque

from fivefold.schedules.pipeline.schedule import Action, Kind


class Row:
    """The actions of one rank. Each stage processes its microbatches in order, so callers name only the stage."""

    def __init__(self) -> None:
        self.actions: list[Action] = []
        self._forwards: Counter[int] = Counter()
        self._backwards: Counter[int] = Counter()
        self._owed: deque[tuple[int, int]] = deque()  # (stage, microbatch) with W still to come

    def add(self, kind: Kind, stage: int) -> None:
        """Adds F, B or I of the stage's next microbatch."""
        counter = self._forwards if kind == "F" else self._backwards
        microbatch = counter[stage]
        counter[stage] += 1
        self.actions.append(Action(stage, kind, microbatch))
        if kind == "I":
            self._owed.append((stage, microbatch))

    def weight(self) -> None:
        """Adds the oldest W still to come, if any."""
        if self._owed:
            stage, microbatch = self._owed.popleft()
            self.actions.append(Action(stage, "W", microbatch))

    def weights(self) -> None:
        """Adds every W still to come."""
        while self._owed:
            self.weight()


def breadth_first(rank: int, ranks: int, microbatches: int, chunks: int) -> list[Action]:
    """All forwards, then all backwards: GPipe (arXiv 1811.06965); with several stages per rank, looped breadth-first
    (arXiv 2211.05953). A stage processes every microbatch before the rank's next stage begins.

    Idle share (p-1) / (vm+p-1) for m >= p. Every microbatch is live at once.
    """
    row = Row()
    stages = range(rank, ranks * chunks, ranks)
    for stage in stages:
        for _ in range(microbatches):
            row.add("F", stage)
    for stage in reversed(stages):
        for _ in range(microbatches):
            row.add("B", stage)
    return row.actions


def one_f_one_b(rank: int, ranks: int, microbatches: int, chunks: int) -> list[Action]:
    """One forward, one backward (arXiv 2006.09503): a rank runs a backward as soon as it can, so at most `ranks - rank`
    microbatches are live.

    Idle share (p-1) / (m+p-1), as in GPipe.
    """
    assert chunks == 1
    return _alternate([rank] * microbatches, [rank] * microbatches, warmup=ranks - rank - 1)


def interleaved(rank: int, ranks: int, microbatches: int, chunks: int) -> list[Action]:
    """1F1B with several stages per rank (arXiv 2104.04473). Microbatches go through the first stage in rounds, and a
    round reaches the rank's next stage before the next round starts.

    Idle share (p-1) / (vm+p-1) for m >= p. A round has at least p microbatches if there are that many. Their number
    need not be a multiple of p (section 3.3.2 of the Llama 3 report, arXiv 2407.21783).
    """
    rounds = _split_into_rounds(microbatches, ranks)
    stages = range(rank, ranks * chunks, ranks)
    forwards = [stage for size in rounds for stage in stages for _ in range(size)]
    backwards = [stage for size in rounds for stage in reversed(stages) for _ in range(size)]
    return _alternate(forwards, backwards, warmup=(chunks - 1) * rounds[0] + 2 * (ranks - rank - 1))


def _split_into_rounds(microbatches: int, ranks: int) -> list[int]:
    """Sizes of the rounds: `ranks` each; the remainder is spread over the first rounds.

    A round of fewer than `ranks` would leave ranks idle. A later round larger than the first would need activations
    that the warm-up has not made.
    """
    count = max(1, microbatches // ranks)
    size, rest = divmod(microbatches, count)
    return [size + (number < rest) for number in range(count)]


def _alternate(forwards: list[int], backwards: list[int], warmup: int) -> list[Action]:
    """`warmup` forwards, then forward and backward in turn, then the remaining backwards."""
    row = Row()
    warmup = min(warmup, len(forwards))
    for stage in forwards[:warmup]:
        row.add("F", stage)
    for position, stage in enumerate(backwards):
        if warmup + position < len(forwards):
            row.add("F", forwards[warmup + position])
        row.add("B", stage)
    return row.actions


def zb_h1(rank: int, ranks: int, microbatches: int, chunks: int) -> list[Action]:
    """Zero bubble H1 (arXiv 2401.10241): 1F1B with each W delayed by `rank` microbatches. Later ranks send gradients to
    earlier ones sooner, and have W left for the end, where they would otherwise be idle.

    Every rank holds at most `ranks` microbatches, as rank 0 does in 1F1B. Idle time per rank for m >= p and F, I >= W:
    (p-1) (F + I - W), a third of 1F1B's if they are equal.
    """
    assert chunks == 1
    row = Row()
    warmup = min(ranks - rank - 1, microbatches)
    for _ in range(warmup):
        row.add("F", rank)
    for position in range(microbatches):
        if warmup + position < microbatches:
            row.add("F", rank)
        row.add("I", rank)
        if position >= rank:
            row.weight()
    row.weights()
    return row.actions


def zbv(rank: int, ranks: int, microbatches: int, chunks: int) -> list[Action]:
    """ZB-V (arXiv 2405.15362): each rank has one stage on the way down the V and one on the way up. The last stage is
    therefore on rank 0, and the first backward starts there.

    If F, I and W take equal time and m >= 2p-1, no rank is idle between its first and its last action. The only idle
    time is the shifted start: p-1 forwards of one stage, which has half a rank's layers. Memory is that of 1F1B: at
    most 2p stages of half the size are live.

    Needs microbatches >= 2 ranks - 1 (`build` drops the surplus).
    """
    assert chunks == 2
    assert microbatches >= 2 * ranks - 1
    row = Row()
    down, up, after = rank, 2 * ranks - 1 - rank, ranks - rank - 1  # `after`: ranks further down the V
    for _ in range(2 * after + 1):
        row.add("F", down)
    for _ in range(rank):
        row.add("F", up)
        row.add("F", down)
    for _ in range(after + 1):
        row.add("F", up)
        row.add("I", up)
        row.weight()
    for position in range(microbatches - ranks):
        if position < microbatches - ranks - after:
            row.add("F", down)
        row.add("I", down)
        row.weight()
        row.add("F", up)
        row.add("I", up)
        row.weight()
    for _ in range(rank):  # no forwards are left: gradients first, W last
        row.add("I", down)
        row.add("I", up)
    for _ in range(after + 1):
        row.add("I", down)
        row.weight()
    row.weights()
    return row.actions


def dualpipev(rank: int, ranks: int, microbatches: int, chunks: int) -> list[Action]:
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
    row = Row()
    down, up, after = rank, 2 * ranks - 1 - rank, ranks - rank - 1  # `after`: ranks further down the V
    for _ in range(2 * after):
        row.add("F", down)
    for _ in range(rank + 1):
        row.add("F", down)
        row.add("F", up)
    for _ in range(after):
        row.add("I", up)
        row.weight()
        row.add("F", up)
    for _ in range(microbatches - 2 * ranks + rank + 1):  # the main part: pairs of forward and backward
        row.add("F", down)
        row.add("B", up)
        row.add("F", up)
        row.add("B", down)
    for _ in range(after):
        row.add("B", up)
        row.add("F", up)
        row.add("B", down)
    for position in range(2 * (rank + 1)):  # the second half is split: its W fill what follows
        row.add("I" if position > rank else "B", down if position % 2 else up)
    for _ in range(after):
        row.weight()
        row.add("I", down)
    row.weights()
    return row.actions


def v_half(rank: int, ranks: int, microbatches: int, chunks: int) -> list[Action]:
    """V-Half (arXiv 2405.15362): a V as in ZB-V, with half of 1F1B's activation memory.

    Time is counted in slots of one F, I or W of a stage. A microbatch takes six slots on each rank, so one enters every
    six slots. Its F and I go down the V by one rank per slot and up by one rank per two slots. Then the slots of
    different microbatches never collide, and a rank's two free slots are for W. At most 2 floor((p+2)/2) stages of half
    a rank's layers are live. If F, I and W take equal time and m >= p, a rank is idle for floor((7p-8)/2) slots; in
    1F1B it is 6 (p-1).
    """
    assert chunks == 2
    row = Row()
    down, up, after = rank, 2 * ranks - 1 - rank, ranks - rank - 1  # `after`: ranks further down the V
    pause = 0 if ranks % 2 else 3  # at the bottom of the V: keeps the slots of both ways apart
    turned = 3 * (ranks - 1) + 2 + pause + 1  # the first backward of the microbatch, on rank 0
    begins: dict[int, tuple[Kind, int]] = {
        rank: ("F", down),
        ranks - 1 + 2 + pause + 2 * after: ("F", up),
        turned + rank: ("I", up),
        turned + ranks - 1 + 1 + pause + 2 * after: ("I", down),
    }  # slot of the first microbatch: action
    block = {slot % 6: (slot, action) for slot, action in begins.items()}
    assert len(block) == 4, "slots collide"
    for slot in range(max(begins) + 6 * (microbatches - 1) + 1):
        begin, action = block.get(slot % 6, (0, None))
        if action is None:
            row.weight()
        elif begin <= slot < begin + 6 * microbatches:
            row.add(*action)
    row.weights()
    return row.actions
