"""Qwen3 with a mixture of experts as feed-forward (arXiv 2505.09388); see models/mixture.py for the experts' papers."""

from fivefold.models.moe import module as moe
from fivefold.models.qwen3 import module as qwen3


class Model(moe.Model):
    """Qwen3's attention, and a `Mixture` as feed-forward."""

    block_type = qwen3.Block
