"""Qwen2: Llama with biases of queries, keys and values (arXiv 2407.10671)."""

from __future__ import annotations

from fivefold.models.llama.module import Model as Model
