"""What a recipe names in words: texts, the vocabulary, what is observed, patterns of parameters."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from typing import Any

from fivefold.errors import UserError, did_you_mean, shortened
from fivefold.models.card import Contradiction, round_up
from fivefold.models.section import Section
from fivefold.optim.card import groups
from fivefold.precision import MOST_IDS
from fivefold.recipe.entries import NONE, TRACKERS, steps, unknown
from fivefold.recipe.messages import short, toml_value
from fivefold.recipe.schema import Sections
from fivefold.sharding.parts import matching, patterns

_INVALID = re.compile("[\0\ud800-\udfff]")
_BPE = re.compile(r"bpe:(\d{1,7})", re.ASCII)


def texts(recipe: Sections) -> Iterator[Contradiction]:
    """Texts become paths, and parts of a TOML file."""
    for section, fields in recipe:
        for name, value in fields:
            if any(_INVALID.search(text) for text in _texts_in(value)):
                yield (
                    {f"{section}.{name}"},
                    f"{section}.{name} must be valid Unicode, without the character 0",
                )


def _texts_in(value: Any) -> Iterator[str]:
    """A text, or those of the entries of a list and of the keys of a table."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, tuple | dict):
        for item in value:
            yield from _texts_in(item)
    elif isinstance(value, Section):
        for _, field in value:
            yield from _texts_in(field)


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
    tokens = [spec for spec in data.specs.values() if spec.startswith("tokens:")]
    if data.packing == "best_fit" and tokens and data.end_token is None:
        yield (
            {"data.packing", "data.end_token"},
            f'data.packing = "best_fit": needs data.end_token, the id between documents of {toml_value(tokens[0])}. '
            'Nearest valid: packing = "concat"',
        )


def observed(recipe: Sections) -> Iterator[Contradiction]:
    for name in unknown(recipe.observe.tracker)[:1]:
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
    if any(spec.startswith("tokens:") for spec in recipe.data.specs.values()):
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
