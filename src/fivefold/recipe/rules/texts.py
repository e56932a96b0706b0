"""What a recipe names in words: texts, the vocabulary, what is observed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from fivefold.errors import did_you_mean
from fivefold.models.card import Contradiction, card_of, round_up
from fivefold.models.section import Section
from fivefold.precision import MOST_IDS
from fivefold.recipe.observed import NONE, TRACKERS, steps, unknown
from fivefold.recipe.schema import Sections
from fivefold.recipe.words import short, toml_value

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


def conversations(recipe: Sections) -> Iterator[Contradiction]:
    """Conversations are text whose answers are learned from left to right."""
    data = recipe.data
    if not data.chat_template:
        return
    given = f"data.chat_template = {toml_value(data.chat_template)}"
    if tokens := [spec for spec in data.specs.values() if spec.startswith("tokens:")]:
        yield (
            {"data.chat_template", "data.source", "data.sources"},
            f"{given}: data.source = {toml_value(tokens[0])} holds tokens, and no messages. Nearest valid: "
            'chat_template = "", or a source of .jsonl files',
        )
    if not card_of(recipe.model).causal:
        yield (
            {"data.chat_template", "model.arch"},
            f"{given}: {recipe.model.arch} is bidirectional and answers nothing. Nearest valid: "
            'chat_template = "", or arch = "llama"',
        )


def streamed(recipe: Sections) -> Iterator[Contradiction]:
    """A stream is read once, in order, and its end is not known."""
    data = recipe.data
    if not data.stream:
        return
    if data.source.startswith("tokens:"):
        yield (
            {"data.stream", "data.source"},
            f"data.stream: {toml_value(data.source)} holds tokens, which are read in place. Nearest valid: "
            "stream = false",
        )
    if data.tokenizer == "chars":
        yield (
            {"data.stream", "data.tokenizer"},
            'data.tokenizer = "chars" needs all text before the first token, and data.stream has only its beginning. '
            'Nearest valid: tokenizer = "bytes"',
        )
    if data.chat_template:
        yield (
            {"data.stream", "data.chat_template"},
            "data.stream: conversations are tokenized before training. Nearest valid: stream = false",
        )
    if data.packing == "best_fit":
        yield (
            {"data.stream", "data.packing"},
            'data.packing = "best_fit" needs the lengths of all documents, and data.stream has only its beginning. '
            'Nearest valid: packing = "concat"',
        )
    weighed = data.stages and all(stage.weights is not None for stage in data.stages)
    if any(entry.weight is None for entry in data.sources) and not weighed:
        yield (
            {"data.stream", "data.sources"},
            "data.stream: the size of a source is not known, so each of data.sources needs a weight",
        )
    if data.max_epochs or any(entry.max_epochs for entry in data.sources):
        yield (
            {"data.stream", "data.max_epochs"},
            "data.max_epochs: a stream does not know before its end how long it is. Nearest valid: max_epochs = 0",
        )
    if data.weigh_by == "documents":
        yield (
            {"data.stream", "data.weigh_by"},
            'data.weigh_by = "documents": a stream does not know how many it has. Nearest valid: weigh_by = "tokens"',
        )


def packing(recipe: Sections) -> Iterator[Contradiction]:
    """Best-fit packing needs to know where documents end, and leaves places empty that predict nothing."""
    data = recipe.data
    if data.packing != "best_fit":
        return
    tokens = [spec for spec in data.specs.values() if spec.startswith("tokens:")]
    if tokens and data.end_token is None:
        yield (
            {"data.packing", "data.end_token"},
            f'data.packing = "best_fit": needs data.end_token, the id between documents of {toml_value(tokens[0])}. '
            'Nearest valid: packing = "concat"',
        )
    if data.stream:
        yield (
            {"data.packing", "data.stream"},
            'data.packing = "best_fit" is not supported with data.stream: the length of each document must be known. '
            'Nearest valid: packing = "concat"',
        )
    if card_of(recipe.model).objective == "mlm":
        yield (
            {"data.packing", "model.arch"},
            f'data.packing = "best_fit": {recipe.model.arch} predicts equally many tokens of each sequence, and so '
            'needs full ones. Nearest valid: packing = "concat", or arch = "llama"',
        )


def generates(recipe: Sections) -> Iterator[Contradiction]:
    if not card_of(recipe.model).causal and recipe.train.sample_every:
        yield (
            {"train.sample_every"},
            f"train.sample_every: {recipe.model.arch} is bidirectional and generates no text. Nearest valid: "
            "train.sample_every = 0",
        )


def observed(recipe: Sections) -> Iterator[Contradiction]:
    for name in unknown(recipe.observe.tracker)[:1]:
        yield (
            {"observe.tracker"},
            f"observe.tracker = {short(recipe.observe.tracker)}: there is no tracker {short(name)}"
            f"{did_you_mean(name, TRACKERS)}; must be one or several of {', '.join(TRACKERS)}, or {NONE}",
        )
    step = recipe.observe.trace_step
    if step and step in (recipe.observe.memory_step, int(recipe.observe.memory_step > 0)):
        yield (
            {"observe.memory_step", "observe.trace_step"},
            f"observe.trace_step = {step}: the memory of step {step} is tracked, which slows it. Nearest valid: "
            f"trace_step = {max(step, recipe.observe.memory_step) + 1}",
        )
    yield from _profiled(recipe)


def _profiled(recipe: Sections) -> Iterator[Contradiction]:
    observe = recipe.observe
    what = f"observe.profile_steps = {short(observe.profile_steps)}"
    try:
        profiled = steps(observe.profile_steps)
    except ValueError as error:
        yield {"observe.profile_steps"}, f"{what} {error}"
        return
    measured = {
        "memory_step": (observe.memory_step, int(observe.memory_step > 0)),
        "trace_step": (observe.trace_step,),
        "histogram_step": (observe.histogram_step,),
    }
    free = max(max(found) for found in measured.values()) + 1
    for name, found in measured.items():
        for step in found:
            if step in profiled:
                yield (
                    {"observe.profile_steps", f"observe.{name}"},
                    f"{what}: observe.{name} measures step {step}, too, and slows it. Nearest valid: "
                    f'profile_steps = "{free}"',
                )
                return


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
