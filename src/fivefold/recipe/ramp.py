"""The global batch of each step. It may grow: `train.batch_ramp` lists the sizes before `train.global_batch_size`.

Where a step begins in the data is a function of the recipe and the step, as its batch is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fivefold.recipe.schema import Sections, TrainSection


def ramp(train: TrainSection) -> list[tuple[int, int]]:
    """[(sequences per step, number of steps)] before the full batch."""
    phases = (phase.split(":") for phase in train.batch_ramp.split("+") if phase)
    return [(int(size), int(steps)) for size, steps in phases]


def _phases(train: TrainSection) -> Iterator[tuple[int, int, int]]:
    """(first step, its place in the data in sequences, sequences per step) of each phase."""
    step = place = 0
    for size, steps in ramp(train):
        yield step, place, size
        step, place = step + steps, place + steps * size
    yield step, place, train.global_batch_size


LeftOut = Sequence[tuple[int, int]]
"""Data that a run leaves out: (step, sequences) says how many come between the batches of this step and the next."""


def place(train: TrainSection, step: int, left_out: LeftOut = ()) -> int:
    """Where the batch of a step (0, 1, ...) begins in the data, in sequences."""
    return sequences_before(train, step) + sum(size for after, size in left_out if after <= step)


def leave_out(train: TrainSection, left_out: LeftOut, back_to: int, last: int) -> LeftOut:
    """What a run leaves out that goes from step `last` back to step `back_to`, and does not see their data again."""
    end = place(train, last - 1, left_out) + batch_size(train, last - 1)
    kept = [(after, size) for after, size in left_out if after < back_to]
    return [*kept, (back_to, end - place(train, back_to, kept))]


def batch_size(train: TrainSection, step: int) -> int:
    """Sequences of a step (0, 1, ...), over all ranks."""
    return [size for first, _, size in _phases(train) if first <= step][-1]


def sequences_before(train: TrainSection, step: int) -> int:
    """Sequences of all steps before this one: its place in the data."""
    return [place + (step - first) * size for first, place, size in _phases(train) if first <= step][-1]


def steps_for(train: TrainSection, sequences: int) -> int:
    """The number of steps that see so many sequences, or a few more."""
    first, place, size = [phase for phase in _phases(train) if phase[1] < max(1, sequences)][-1]
    return first - (place - sequences) // size


def run_steps(recipe: Sections) -> int | None:
    """Optimizer steps of the run: `train.steps`, or `train.tokens` rounded up to whole steps. None: it has neither."""
    train = recipe.train
    if train.steps or not train.tokens:
        return train.steps
    return steps_for(train, -(-train.tokens // recipe.model.seq_len))
