"""Gemma 3 (arXiv 2503.19786): norms before and behind each sublayer, whose scales are added to 1, and of each query and
key head; GELU gates; embeddings times sqrt(D); sliding windows in most blocks, which rotate by a base of their own.

Shapes: B batch, T tokens, D model width.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fivefold.models.layers import SwiGLU
from fivefold.models.llama import module as llama
from fivefold.models.qwen3 import module as qwen3


class GeGLU(SwiGLU):
    geglu = True


class Block(llama.SandwichBlock):
    attention_type, mlp_type = qwen3.NormedAttention, GeGLU


class Model(llama.Model):
    """Llama with Gemma 3's blocks and embeddings."""

    block_type = Block

    def begin(self, tokens_BT: Tensor, positions_T: Tensor) -> Tensor:
        """The factor is rounded to the embeddings' dtype, as theirs is."""
        x_BTD = super().begin(tokens_BT, positions_T)
        return x_BTD * float(torch.tensor(math.sqrt(x_BTD.shape[-1])).to(x_BTD.dtype))
