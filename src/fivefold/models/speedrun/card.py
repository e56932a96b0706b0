"""Techniques of the runs that train GPT-2 in the fewest minutes, as data: see module.py for their sources. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from fivefold.models import work
from fivefold.models.card import Contradiction
from fivefold.models.operations import Operation, Program, Saved, Sizes, Work
from fivefold.models.qwen3 import card as qwen3
from fivefold.models.section import ModelSection
from fivefold.models.tables import linear, swiglu
from fivefold.sharding.parts import Cut, Shape


class Card(qwen3.Card):
    summary = "qwen3 with squared ReLU, embeddings of values, skips from the first blocks to the last"
    words = qwen3.Card.words | {
        "ffn_dim": "4 D with `squared_relu`, else 8/3 D, rounded up to a multiple of 64",
    }
    extras = windows = patterned = True
    pipelined = False

    def __init__(self, model: ModelSection) -> None:
        super().__init__(model)
        self.gated = model.squared_relu is False

    def defaults(self) -> dict[str, Any]:
        wide = {} if self.gated else {"ffn_dim": 4 * self.model.dim}
        techniques = {"squared_relu": True, "value_embeddings": True, "skips": self.model.layers > 1}
        return super().defaults() | wide | techniques

    def rules(self) -> Iterator[Contradiction]:
        yield from super().rules()
        if self.model.skips and self.model.layers == 1:
            yield (
                {"model.skips", "model.layers"},
                "model.skips = true has no effect: model.layers = 1 has no two blocks. Nearest valid: skips = false",
            )

    @property
    def count(self) -> int:
        """Blocks of the second half have a parameter more, which is of no kind that others ask for."""
        return sum(map(math.prod, self.parameters.values()))

    def table(self) -> dict[str, Shape]:
        shape = self.model.vocab_size or 0, self.model.layers * values_width(self.model)
        values: dict[str, Shape] = {"embed_values.weight": shape} if self.model.value_embeddings else {}
        others = super().table()
        norm = others.pop("norm.weight")
        return others | values | {"norm.weight": norm}

    def block(self, number: int) -> dict[str, Shape]:
        skip = {"skip": (self.model.dim,)} if takes_skip(self.model, number) else {}
        return skip | super().block(number)  # the module's own parameter comes first

    def words_of(self, number: int) -> str:
        return super().words_of(number) + " with a skip" * takes_skip(self.model, number)

    def feed_forward(self, number: int) -> dict[str, Shape]:
        D, F = self.model.dim, self.model.ffn_dim or 0
        return swiglu(D, F) if self.gated else linear("up", D, F, False) | linear("down", F, D, False)

    def cut(self, name: str, shape: Shape) -> Cut | None:
        if name == "embed_values.weight":
            return Cut("column", 1, (values_width(self.model),) * self.model.layers)
        return super().cut(name, shape)

    def work(self, s: Sizes, program: Program) -> Work:
        """Values are looked up before the blocks. In backward all of their gradients are there at once."""
        found, size = super().work(s, program), s.N * (s.qkv - s.q) / 2 * s.e * s.model.layers
        kept = (Saved("values", size, "stream"),)
        values = Operation(
            "values", forward=3 * size, backward=6 * size, kernels=2, saved=kept, rate="embedding"
        )
        return replace(found, begin=[*found.begin, values]) if s.model.value_embeddings else found

    def block_operations(self, s: Sizes, program: Program, number: int = 0) -> list[Operation]:
        """Half of the blocks add a skip."""
        operations = super().block_operations(s, program, number)
        skip = work.add("skip", s, program, 0.0)
        half = replace(skip, forward=skip.forward / 2, backward=skip.backward / 2)
        return [half, *operations] if s.model.skips else operations


def takes_skip(model: ModelSection, number: int) -> bool:
    """True of the blocks of the second half, if there are skips."""
    return bool(model.skips) and number >= model.layers - model.layers // 2


def values_width(model: ModelSection) -> int:
    """Features of a token's values in a block."""
    return (model.kv_heads or model.heads) * model.head_width
