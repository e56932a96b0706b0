"""Maps our `qwen2` to `Qwen2ForCausalLM` and back: Llama's weights, and biases."""

from __future__ import annotations

from typing import Any

from fivefold.models.hf import Fields
from fivefold.models.llama import hf as llama
from fivefold.models.section import ModelSection

MODEL_TYPE = "qwen2"
ARCHITECTURE = "Qwen2ForCausalLM"
TIED, entries, problems, rename = llama.TIED, llama.entries, llama.problems, llama.rename
from_config = llama.from_config
SUPPORTED = llama.GATED | {"use_sliding_window": (False, None)}
FIELDS: Fields = llama.FIELDS | {
    "num_key_value_heads": ("kv_heads", 32),
    "max_position_embeddings": ("seq_len", 32768),
}


def to_config(model: ModelSection) -> dict[str, Any]:
    return llama.decoder(model) | {"use_sliding_window": False, "sliding_window": None}
