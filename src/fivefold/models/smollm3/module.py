"""SmolLM3: Llama with blocks that have no positions, `no_rope_every` (Hugging Face, 2025; NoPE: arXiv 2305.19466)."""

from __future__ import annotations

from fivefold.models.llama.module import Model as Model
