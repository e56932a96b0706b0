"""Training objectives: what a model learns to predict. No torch."""

from __future__ import annotations

from typing import Literal

Objective = Literal["causal", "mlm"]
"""`causal`: the next token at every position. `mlm`: the masked tokens (arXiv 1810.04805)."""
MASKED_SHARE = 0.15
"""Share of the tokens that `mlm` predicts."""


def predicted(objective: Objective, T: int) -> int:
    """Number of predicted tokens in a sequence of T tokens."""
    return T if objective == "causal" else max(1, round(MASKED_SHARE * T))
