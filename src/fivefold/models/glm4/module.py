"""GLM-4 (arXiv 2406.12793), as of 2025: Llama with norms before and behind each sublayer, and heads of which a half
rotates."""

from __future__ import annotations

from fivefold.models.llama import module as llama


class Model(llama.Model):
    """Llama with GLM-4's blocks."""

    block_type = llama.SandwichBlock
