"""Maps our `smollm3` to `SmolLM3ForCausalLM` and back: Llama's weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fivefold.models.hf import Fields, every_nth
from fivefold.models.llama import hf as llama
from fivefold.models.section import ModelSection

MODEL_TYPE = "smollm3"
ARCHITECTURE = "SmolLM3ForCausalLM"
TIED, entries, problems, rename = llama.TIED, llama.entries, llama.problems, llama.rename
SUPPORTED = llama.GATED | {"use_sliding_window": (False, None), "mlp_bias": (False, None)}
FIELDS: Fields = llama.FIELDS | {
    "num_key_value_heads": ("kv_heads", 4),
    "max_position_embeddings": ("seq_len", 32768),
    "tie_word_embeddings": ("tie_embeddings", True),
}


def to_config(model: ModelSection) -> dict[str, Any]:
    rotates = [int(model.rotates(number)) for number in range(model.layers)]
    interval = model.no_rope_every or model.layers + 1
    positions = {"no_rope_layers": rotates, "no_rope_layer_interval": interval}
    return llama.decoder(model) | {"attention_bias": model.attention_bias, "mlp_bias": False} | positions


def from_config(config: Mapping[str, Any]) -> dict[str, Any]:
    every = config.get("no_rope_layer_interval", 4)
    if config.get("no_rope_layers") is not None:
        every = every_nth([not rotates for rotates in config["no_rope_layers"]], "no_rope_layers")
    rope = {"rope_theta": 2e6} | dict(config)
    return llama.from_config(rope) | {"no_rope_every": every}
