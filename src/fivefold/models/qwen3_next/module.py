"""Qwen3-Next (Qwen Team, 2025): Qwen3's mixture of experts, with linear attention in most blocks (Gated DeltaNet, arXiv
2412.06464; models/delta.py) and attention with gates and heads that rotate in part in the others; a shared expert with
a gate; norms whose scales are added to 1."""

from __future__ import annotations

from fivefold.models.delta import DeltaAttention
from fivefold.models.llama import module as llama
from fivefold.models.moe import module as moe
from fivefold.models.qwen3 import module as qwen3
from fivefold.models.section import ModelSection


class Block(llama.Block):
    def __init__(self, model: ModelSection, number: int = 0) -> None:
        self.attention_type = DeltaAttention if model.linear(number) else qwen3.NormedAttention
        super().__init__(model, number)


class Model(moe.Model):
    block_type = Block
