"""Maps our `phi3` to `Phi3ForCausalLM` and back: Llama's weights, as they are fused in ours."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fivefold.models.hf import Entry, Fields, rotary_order
from fivefold.models.llama import hf as llama
from fivefold.models.section import ModelSection

MODEL_TYPE = "phi3"
ARCHITECTURE = "Phi3ForCausalLM"
TIED, rename = llama.TIED, llama.rename
SUPPORTED = {"hidden_act": ("silu", "swish")}
EXPRESSED = {"full_every": (0,), "rope_factor": (1.0,)}
FIELDS: Fields = llama.FIELDS | {
    "max_position_embeddings": ("seq_len", 4096),
    "rms_norm_eps": ("norm_eps", 1e-5),
}


def entries(model: ModelSection) -> list[Entry]:
    d, heads, others = model.head_width, model.heads, model.kv_heads or model.heads
    order = rotary_order(heads + others, others, d, model.rotary_dim) if model.rotary_dim else ()
    table = []
    for entry in llama.entries(model):
        if entry.ours.endswith("qkv.weight"):
            entry = fused(entry, "self_attn.qkv_proj", order)
        elif entry.ours.endswith("gate_up.weight"):
            entry = fused(entry, "mlp.gate_up_proj")
        table.append(entry)
    return table


def fused(entry: Entry, name: str, order: tuple[int, ...] = ()) -> Entry:
    """The entry of matrices that stand under one another there, too."""
    block = ".".join(entry.theirs[0].split(".")[:3])
    return replace(entry, theirs=(f"{block}.{name}.weight",), rows=(), order=order)


def to_config(model: ModelSection) -> dict[str, Any]:
    config = llama.decoder(model) | {"sliding_window": model.sliding_window or None}
    return config | partial_rotation(model)


def partial_rotation(model: ModelSection) -> dict[str, Any]:
    share = model.rotary_width / model.head_width
    while int(model.head_width * share) < model.rotary_width:  # as transformers and `rotary_dim` round it
        share = math.nextafter(share, 2)
    rope = llama.decoder(model)["rope_parameters"] | {"partial_rotary_factor": share}
    return {"rope_parameters": rope, "partial_rotary_factor": share}


def rotary_dim(config: Mapping[str, Any], share: float) -> dict[str, Any]:
    """share: what a file means that does not say it."""
    rope = config.get("rope_parameters") or {}
    share = rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or share
    width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return {"rotary_dim": None if share == 1 else int(width * share)}


def from_config(config: Mapping[str, Any]) -> dict[str, Any]:
    fields = llama.from_config(config) | {
        "head_dim": None,
        "sliding_window": config.get("sliding_window") or 0,
    }
    return fields | rotary_dim(config, 1.0)


def problems(config: Mapping[str, Any]) -> list[str]:
    return llama.problems(config, partly=True)
