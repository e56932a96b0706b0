"""OLMo 3: OLMo 2 with sliding windows in most blocks, whose rotary positions scaling leaves alone (Ai2, 2025)."""

from __future__ import annotations

from fivefold.models.olmo2.module import Model as Model
