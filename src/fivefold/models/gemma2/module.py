"""Gemma 2 (arXiv 2408.00118): norms before and behind each sublayer, whose scales are added to 1; GELU gates;
embeddings times sqrt(D); sliding windows in every other block; caps on attention's scores and on logits."""

from __future__ import annotations

from fivefold.models.gemma3 import module as gemma3
from fivefold.models.layers import Attention


class Block(gemma3.Block):
    attention_type = Attention


class Model(gemma3.Model):
    """Gemma 3 without norms of queries and keys."""

    block_type = Block
