"""Which differences between two models their weights allow. No torch."""

from __future__ import annotations

from fivefold.models.card import card_of
from fivefold.models.section import ModelSection

FREE = {
    "freeze",
    "dropout",
    "init_std",
    "capacity_factor",
    "aux_loss_weight",
    "balance_rate",
    "z_loss_weight",
}
"""Fields that only say how a run trains."""
EXTENDED = {
    "rope_theta",
    "rope_factor",
    "rope_scaling",
    "rope_mscale",
    "rope_low",
    "rope_high",
    "rope_context",
}
"""Fields that may change on purpose, for longer contexts."""


def differences(mine: ModelSection, theirs: ModelSection) -> tuple[list[str], str]:
    """Fields that differ on purpose, and the first that must not differ ("": none does). Both models are resolved."""
    changed = []
    for name in ModelSection.model_fields:
        same = getattr(mine, name) == getattr(theirs, name)
        if same or name in FREE or (name == "seq_len" and card_of(mine).rotary):
            continue
        if name not in EXTENDED:
            return changed, name
        changed.append(name)
    return changed, ""
