"""What a recipe names in words: texts, the vocabulary, sources and stages of a mixture, what is observed, patterns of
parameters. The batch of each step by `train.batch_ramp`, and where it begins in the data."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from fivefold.errors import UserError, did_you_mean, shortened
from fivefold.models.card import Contradiction, round_up
from fivefold.models.section import Section, phases
from fivefold.optim.card import groups
from fivefold.precision import MOST_IDS
from fivefold.recipe.entries import HELD_OUT, NONE, TRACKERS, chosen, steps
from fivefold.recipe.messages import short, toml_value
from fivefold.recipe.schema import Sections, TrainSection
from fivefold.sharding.parts import matching, patterns

_INVALID = re.compile("[\0\ud800-\udfff]")
_BPE = re.compile(r"bpe:(\d{1,7})", re.ASCII)


def texts(recipe: Sections) -> Iterator[Contradiction]:
    """Texts become paths, and parts of a TOML file."""
    for section, fields in recipe:
        for name, value in vars(fields).items():
            if _invalid(value):
                yield (
                    {f"{section}.{name}"},
                    f"{section}.{name} must be valid Unicode, without the character 0",
                )


def _invalid(value: Any) -> bool:
    """True of such a text; of a list with such an entry, or a table with such a key."""
    if isinstance(value, str):
        return _INVALID.search(value) is not None
    if isinstance(value, Section):
        return any(map(_invalid, vars(value).values()))
    return isinstance(value, (tuple, dict)) and any(map(_invalid, value))


def vocabulary(recipe: Sections) -> Iterator[Contradiction]:
    spec = recipe.data.tokenizer
    bpe = _BPE.fullmatch(spec)
    if spec.startswith("bpe:") and (bpe is None or int(bpe[1]) > MOST_IDS):
        yield (
            {"data.tokenizer"},
            f"data.tokenizer = {toml_value(spec)}: N must be a whole number, as in bpe:4096, and at most {MOST_IDS}",
        )


def documents(recipe: Sections) -> Iterator[Contradiction]:
    """Best-fit packing needs to know where documents end."""
    data = recipe.data
    tokens = data.token_files
    if data.packing == "best_fit" and tokens and data.end_token is None:
        yield (
            {"data.packing", "data.end_token"},
            f'data.packing = "best_fit": needs data.end_token, the id between documents of {toml_value(tokens[0])}. '
            'Nearest valid: packing = "concat"',
        )


def observed(recipe: Sections) -> Iterator[Contradiction]:
    for name in [name for name in chosen(recipe.observe.tracker) if name not in TRACKERS][:1]:
        yield (
            {"observe.tracker"},
            f"observe.tracker = {short(recipe.observe.tracker)}: there is no tracker {short(name)}"
            f"{did_you_mean(name, TRACKERS)}; must be one or several of {', '.join(TRACKERS)}, or {NONE}",
        )
    observe = recipe.observe
    try:
        profiled = steps(observe.profile_steps)
    except ValueError as error:
        yield {"observe.profile_steps"}, f"observe.profile_steps = {short(observe.profile_steps)} {error}"
        return
    memory = {1, observe.memory_step} if observe.memory_step else set[int]()
    traced, counted = {observe.trace_step} - {0}, {observe.histogram_step} - {0}
    free = max(memory | traced | counted, default=0) + 1
    others = {"memory_step": memory, "trace_step": traced, "histogram_step": counted}
    for key, measured, beside in (
        ("trace_step", traced, ("memory_step",)),
        ("profile_steps", set(profiled), ("memory_step", "trace_step", "histogram_step")),
    ):
        for name in beside:
            for step in sorted(measured & others[name])[:1]:
                yield (
                    {f"observe.{key}", f"observe.{name}"},
                    f"observe.{key} = {short(getattr(observe, key))}: observe.{name} measures step {step}, too, and "
                    f"slows it. Nearest valid: {key} = {free}",
                )


def expected_vocab_size(recipe: Sections) -> int | None:
    """V before any text is read: `model.vocab_size`, or the size of `bpe:N` and `bytes`. None for `chars` and for
    tokenizer files."""
    if recipe.model.vocab_size:
        return recipe.model.vocab_size
    if recipe.data.token_files:
        return None
    if recipe.data.tokenizer == "bytes":
        return round_up(257, 64)  # 256 bytes and the end token
    bpe = _BPE.fullmatch(recipe.data.tokenizer)
    return round_up(int(bpe[1]), 64) if bpe else None


def weights(recipe: Sections) -> Iterator[Contradiction]:
    """Patterns of parameters' names, and where frozen weights come from."""
    try:
        groups(recipe.optim.groups)
    except UserError as error:
        yield {"optim.groups"}, f"optim.groups: {error}"
    if not recipe.checkpoint.frozen and not recipe.train.init_from:
        yield (
            {"checkpoint.frozen", "train.init_from"},
            "checkpoint.frozen = false: frozen weights are then read from train.init_from, which is not set. Nearest "
            "valid: checkpoint.frozen = true",
        )


def wrong_patterns(recipe: Sections, names: Collection[str]) -> str:
    """What is wrong with the patterns of a recipe, given the names of all parameters; "" if nothing is."""
    freeze, by_group, known = recipe.model.freeze, recipe.optim.groups, list(names)
    wanted = {"model.freeze": patterns(freeze), "optim.groups": [group.pattern for group in groups(by_group)]}
    for key, text in (("model.freeze", freeze), ("optim.groups", by_group)):
        for pattern in wanted[key]:
            if not matching(pattern, known):
                near = did_you_mean(pattern.strip("*"), known) or f"; the first are {', '.join(known[:3])}"
                return (
                    f'{key} = "{shortened(text, 200)}": no parameter of the model is called {pattern!r}{near}'
                )
    if freeze and len(matching(freeze, known)) == len(known):
        return f'model.freeze = "{freeze}": every parameter is frozen, so there is nothing to train'
    return ""


_NAME = re.compile(r"[A-Za-z0-9_-]{1,60}", re.ASCII)
_CLOSE = 1e-6


def mixture(recipe: Sections) -> Iterator[Contradiction]:
    data, default = recipe.data, type(recipe.data).model_fields["source"].default
    # Names are keys of metrics. Validation sets and held-out parts of sources have one list of names
    taken = {HELD_OUT} if data.validation and data.val_fraction and not data.sources else set[str]()
    for key, entries in (("data.sources", data.sources), ("data.validation", data.validation)):
        for entry in entries:
            if not _NAME.fullmatch(entry.name):
                name = toml_value(entry.name[:80])
                yield {key}, f"{key}: name = {name}: must be 1 to 60 letters, digits, _ and -"
            elif entry.name in taken:
                yield {key}, f"{key}: the name {entry.name} comes twice; each needs its own"
            taken.add(entry.name)
    if data.sources and data.source != default:
        yield (
            {"data.source", "data.sources"},
            f"data.source = {toml_value(data.source)} and data.sources are both set; set only one",
        )
    weights = [entry.weight for entry in data.sources]
    if None in weights and any(weight is not None for weight in weights):
        lacking = ", ".join(entry.name for entry in data.sources if entry.weight is None)
        yield (
            {"data.sources"},
            f"data.sources: {lacking} has no weight, and others have one. Set all weights, or none (then each source's "
            "share is its size)",
        )
    if weights and not any(weight != 0 for weight in weights) and not data.stages:
        yield {"data.sources"}, "data.sources: every weight is 0; at least one must be > 0"
    if data.stages:
        yield from _stages(recipe)


def _stages(recipe: Sections) -> Iterator[Contradiction]:
    data, keys = recipe.data, {"data.stages", "data.sources"}
    if not data.sources:
        yield keys, "data.stages: they weigh the sources of a mixture, and there is no [[data.sources]]"
        return
    names = [entry.name for entry in data.sources]
    total = math.fsum(stage.share for stage in data.stages)
    if abs(total - 1) > _CLOSE:
        shares = " + ".join(f"{stage.share:g}" for stage in data.stages)
        yield {"data.stages"}, f"data.stages: the shares {shares} sum to {total:g}; they must sum to 1"
    for number, stage in enumerate(data.stages, 1):
        own = {entry.name: entry.weight for entry in data.sources} if stage.weights is None else stage.weights
        for name in own:
            if name not in names:
                known = did_you_mean(name, names) or f"; there are {', '.join(names)}"
                yield (
                    keys,
                    f"data.stages: stage {number} has a weight of {name[:80]}, which is no source{known}",
                )
        if not any(weight != 0 for weight in own.values()):
            yield keys, f"data.stages: every weight of stage {number} is 0; at least one must be > 0"
    if (steps := run_steps(recipe)) and abs(total - 1) <= _CLOSE:
        begins = [*data.first_steps(steps), steps]
        for number, stage in enumerate(data.stages, 1):
            if begins[number] <= begins[number - 1]:
                yield (
                    {"data.stages", "train.steps", "train.tokens"},
                    f"data.stages: stage {number} with share = {stage.share:g} has no step in a run of {steps}. "
                    f"Nearest valid: share = {1 / steps:.3g}",
                )


def ramp(train: TrainSection) -> list[tuple[int, int]]:
    """[(sequences per step, number of steps)] before the full batch."""
    return phases(train.batch_ramp)


def _phases(train: TrainSection) -> Iterator[tuple[int, int, int]]:
    """(first step, its place in the data in sequences, sequences per step) of each phase."""
    step = place = 0
    for size, count in ramp(train):
        yield step, place, size
        step, place = step + count, place + count * size
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
    """Optimizer steps of the run: `train.steps`, or `train.tokens` rounded up to whole steps. None: it has neither,
    and its data can only be prepared."""
    train = recipe.train
    if train.steps or not train.tokens:
        return train.steps
    return steps_for(train, -(-train.tokens // recipe.model.seq_len))
