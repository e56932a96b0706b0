"""GLM-4 as data: see module.py for the paper. No torch."""

from __future__ import annotations

from fivefold.models import work
from fivefold.models.card import sandwich
from fivefold.models.llama import card as llama
from fivefold.models.operations import Operation, Program, Sizes
from fivefold.sharding.parts import Shape


class Card(llama.Card):
    summary = "llama with norms around sublayers and heads that rotate in part"
    out_biased = False
    partly_rotated = True

    def block(self, number: int) -> dict[str, Shape]:
        return sandwich(self.norm(self.model.dim), self.attention(), self.feed_forward(number))

    def block_operations(self, s: Sizes, program: Program, number: int = 0) -> list[Operation]:
        attended = self.attention_operations(s, program, number)
        return work.sandwich_block(s, program, attended, self.feed_forward_operations(s, program, number))
