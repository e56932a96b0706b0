"""Maps our `mistral` to `MistralForCausalLM` and back: Llama's weights, and a window."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fivefold.models.hf import Fields
from fivefold.models.llama import hf as llama
from fivefold.models.section import ModelSection

MODEL_TYPE = "mistral"
ARCHITECTURE = "MistralForCausalLM"
TIED, entries, problems, rename = llama.TIED, llama.entries, llama.problems, llama.rename
SUPPORTED = llama.GATED
EXPRESSED = {"full_every": (0,)}
FIELDS: Fields = llama.FIELDS | {
    "num_key_value_heads": ("kv_heads", 8),
    "max_position_embeddings": ("seq_len", 4096 * 32),
}


def to_config(model: ModelSection) -> dict[str, Any]:
    return llama.decoder(model) | {"sliding_window": model.sliding_window or None}


def from_config(config: Mapping[str, Any]) -> dict[str, Any]:
    return llama.from_config(config) | {"sliding_window": config.get("sliding_window", 4096) or 0}
