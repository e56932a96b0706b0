"""Mistral: Llama with a sliding window in every block, or in all but some (arXiv 2310.06825)."""

from __future__ import annotations

from fivefold.models.llama.module import Model as Model
