"""Qwen2: Llama with biases of queries, keys and values (arXiv 2407.10671)."""

from __future__ import annotations

from fivefold.models.layers import Attention
from fivefold.models.llama import module as llama


class BiasedAttention(Attention):
    biased, out_biased = True, False


class Block(llama.Block):
    attention_type = BiasedAttention


class Model(llama.Model):
    """Llama with `BiasedAttention`."""

    block_type = Block
