"""Maps our `glm4` to `Glm4ForCausalLM` and back. Pairs of features that rotate together stand side by side there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fivefold.models.hf import Entry, Fields, rotary_order
from fivefold.models.llama import hf as llama
from fivefold.models.phi3 import hf as phi3
from fivefold.models.section import ModelSection

MODEL_TYPE = "glm4"
ARCHITECTURE = "Glm4ForCausalLM"
TIED, rename, problems = llama.TIED, llama.rename, phi3.problems
NORMS = (*llama.NORMS, "post_self_attn_layernorm", "post_mlp_layernorm")
SUPPORTED = phi3.SUPPORTED
FIELDS: Fields = llama.FIELDS | {
    "num_key_value_heads": ("kv_heads", 2),
    "max_position_embeddings": ("seq_len", 131072),
    "rms_norm_eps": ("norm_eps", 1.5625e-07),
}


def entries(model: ModelSection) -> list[Entry]:
    d, heads, others = model.head_width, model.heads, model.kv_heads or model.heads
    order = rotary_order(heads + others, others, d, model.rotary_width, interleaved=True)
    table = list[Entry]()
    for entry in llama.entries(model, NORMS):
        if ".qkv." in entry.ours:
            entry = replace(entry, order=order)
        elif entry.ours.endswith("gate_up.weight"):
            entry = phi3.fused(entry, "mlp.gate_up_proj")
        table.append(entry)
    return table


def to_config(model: ModelSection) -> dict[str, Any]:
    config = llama.decoder(model) | {"attention_bias": model.attention_bias}
    return config | phi3.partial_rotation(model)


def from_config(config: Mapping[str, Any]) -> dict[str, Any]:
    config = {"head_dim": 128, "attention_bias": True, **config}
    return llama.from_config(config) | phi3.rotary_dim(config, 0.5)
