"""What a run trains on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fivefold.data.stream import Stream
from fivefold.data.tokenizer import Tokenizer
from fivefold.data.tokens import Tokens
from fivefold.recipe.entries import HELD_OUT


class Part(NamedTuple):
    """A source of a mixture with its two splits, or a validation set (all of it is `train`). info: as in `DataSet`."""

    name: str
    train: Tokens | Stream
    val: Tokens | None
    info: dict[str, Any]


@dataclass(frozen=True)
class DataSet:
    """The prepared data of a run.

    train, val: the two splits (val is None if nothing is held out; train is a `Stream` with `data.stream`). parts: the
    sources of a mixture; `train` and `val` are then the first one's. validation: further sets. tokenizer: None for
    `tokens:` sources. vocab_size: all ids are below it. mask_id: the id of a hidden token, where the objective is
    `mlm`. info: source, fingerprint, folder, cached, documents / tokens / bytes per split, skipped documents.
    """

    train: Tokens | Stream
    val: Tokens | None
    tokenizer: Tokenizer | None
    vocab_size: int
    mask_id: int | None = None
    info: dict[str, Any] = field(default_factory=dict)
    parts: tuple[Part, ...] = ()
    validation: tuple[Part, ...] = ()

    @property
    def sources(self) -> dict[str, Tokens | Stream]:
        """The training split of each source by its name; the only one has none."""
        return {part.name: part.train for part in self.parts} or {"": self.train}

    @property
    def held_out(self) -> dict[str, Tokens]:
        """What is held out of each source, by the name of its validation set."""
        found = {part.name: part.val for part in self.parts} or {HELD_OUT: self.val}
        return {name: tokens for name, tokens in found.items() if tokens is not None}

    @property
    def validation_sets(self) -> dict[str, Tokens]:
        """All validation sets by name."""
        found = self.held_out
        for part in self.validation:
            assert isinstance(part.train, Tokens), "only training data are streamed"
            found[part.name] = part.train
        return found
