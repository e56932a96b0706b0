"""Techniques of the runs that train GPT-2 in the fewest minutes, as data: see module.py for their sources. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from fivefold.models import work
from fivefold.models.card import Contradiction, linear, swiglu
from fivefold.models.operations import Operation, Program, Sizes
from fivefold.models.qwen3 import card as qwen3
from fivefold.models.section import ModelSection
from fivefold.sharding.parts import Cut, Shape


class Card(qwen3.Card):
    summary = "qwen3 with squared ReLU, embeddings of values, skips from the first blocks to the last"
    words = qwen3.Card.words | {
        "ffn_dim": "4 D with `squared_relu`, else 8/3 D, rounded up to a multiple of 64",
        "value_embeddings": "`layers`",
    }
    extras = True
    pipelined = False

    def rules(self) -> Iterator[Contradiction]:
        yield from super().rules()
        if (self.model.value_embeddings or 0) > self.model.layers:
            yield (
                {"model.value_embeddings", "model.layers"},
                f"model.value_embeddings = {self.model.value_embeddings} must be at most model.layers = "
                f"{self.model.layers}",
            )

    def __init__(self, model: ModelSection) -> None:
        super().__init__(model)
        self.gated = not self.resolved("squared_relu")
        """True if the feed-forward layers are SwiGLU."""

    def resolved(self, name: str) -> Any:
        """A field of the model, which may be open."""
        value = getattr(self.model, name)
        return self.defaults()[name] if value is None else value

    def defaults(self) -> dict[str, Any]:
        found, model = super().defaults(), self.model
        wide = {} if model.squared_relu is False else {"ffn_dim": 4 * model.dim}
        return found | wide | {"squared_relu": True, "value_embeddings": model.layers, "skips": True}

    @property
    def count(self) -> int:
        """Blocks of the second half have a parameter more, which is of no kind that others ask for."""
        return sum(map(math.prod, self.parameters.values()))

    def table(self) -> dict[str, Shape]:
        model = self.model
        width = (model.value_embeddings or 0) * (model.kv_heads or model.heads) * model.head_width
        values: dict[str, Shape] = {"embed_values.weight": (model.vocab_size or 0, width)}
        return super().table() | (values if width else {})

    def block(self, number: int) -> dict[str, Shape]:
        skip = {"skip.weight": (self.model.dim,)} if takes_skip(self.model, number) else {}
        return super().block(number) | skip

    def feed_forward(self, number: int) -> dict[str, Shape]:
        D, F = self.model.dim, self.model.ffn_dim or 0
        return swiglu(D, F) if self.gated else linear("up", D, F, False) | linear("down", F, D, False)

    def cut(self, name: str, shape: Shape) -> Cut | None:
        if name == "embed_values.weight":
            tables = self.model.value_embeddings or 1
            return Cut("column", 1, (shape[1] // tables,) * tables)
        return super().cut(name, shape)

    def attention_operations(self, s: Sizes, program: Program) -> list[Operation]:
        """Blocks count alike: each adds its share of the values that have tables."""
        attended = super().attention_operations(s, program)
        size = s.N * (s.qkv - s.q) / 2 * s.e * (s.model.value_embeddings or 0) / s.model.layers
        values = Operation("values", forward=3 * size, backward=size, kernels=1, part="inner", rate="norm")
        return [attended[0], values, *attended[1:]] if size else attended

    def block_operations(self, s: Sizes, program: Program, mixed: bool = False) -> list[Operation]:
        """Half of the blocks add a skip."""
        operations = super().block_operations(s, program, mixed)
        skip = work.add("skip", s, program, 0.0)
        half = replace(skip, forward=skip.forward / 2, backward=skip.backward / 2)
        return [half, *operations] if s.model.skips else operations


def takes_skip(model: ModelSection, number: int) -> bool:
    """True of the blocks of the second half, if there are skips."""
    return bool(model.skips) and number >= model.layers - model.layers // 2
