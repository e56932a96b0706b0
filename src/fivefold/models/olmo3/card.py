"""OLMo 3 as data: OLMo 2 with sliding windows in most blocks, whose rotary positions scaling leaves alone (Ai2,
2025). No torch."""

from __future__ import annotations

from fivefold.models.olmo2 import card as olmo2


class Card(olmo2.Card):
    summary = "olmo2 with sliding windows in most blocks"
    windows = patterned = local_rotation = True
