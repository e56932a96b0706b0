"""Phi-3: Llama with sliding windows (arXiv 2404.14219), and from Phi-4-mini on heads that rotate in part
(2503.01743)."""

from __future__ import annotations

from fivefold.models.llama.module import Model as Model
