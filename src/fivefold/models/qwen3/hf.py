"""Maps our `qwen3` to `Qwen3ForCausalLM` and back: Llama's weights, and a norm of each query and key head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fivefold.models.hf import Fields
from fivefold.models.llama import hf as llama
from fivefold.models.section import ModelSection

MODEL_TYPE = "qwen3"
ARCHITECTURE = "Qwen3ForCausalLM"
TIED, entries, problems, rename = llama.TIED, llama.entries, llama.problems, llama.rename
SUPPORTED = llama.GATED | {"use_sliding_window": (False, None)}
FIELDS: Fields = llama.FIELDS | {"max_position_embeddings": ("seq_len", 32768)}


def to_config(model: ModelSection) -> dict[str, Any]:
    window = {"use_sliding_window": False, "sliding_window": None}
    return llama.decoder(model) | {"attention_bias": model.attention_bias} | window


def from_config(config: Mapping[str, Any]) -> dict[str, Any]:
    return llama.from_config({"head_dim": 128} | dict(config))
