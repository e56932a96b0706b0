"""Maps our `moe` to `MixtralForCausalLM` and back: Llama's attention, and experts with three matrices each there."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

from fivefold.models.hf import NEEDED, Entry, Fields, experts, same
from fivefold.models.llama import hf as llama
from fivefold.models.section import ModelSection

MODEL_TYPE = "mixtral"
ARCHITECTURE = "MixtralForCausalLM"
TIED, rename = llama.TIED, llama.rename
SUPPORTED = llama.GATED | {"sliding_window": (None,), "router_jitter_noise": (0.0, None)}
# Settings that Mixtral and Qwen3-MoE have; capacity limits apply in training only.
ROUTED: dict[str, Container[Any]] = {
    "shared_experts": (0,),
    "dense_layers": (0,),
    "router_score": ("softmax",),
    "router_scale": (1.0,),
    "expert_groups": (1,),
    "balance": ("aux", "none"),
}
EXPRESSED = ROUTED | {"router_normalize": (True,), "attention_bias": (False,)}
FIELDS: Fields = llama.FIELDS | {
    "intermediate_size": ("expert_ffn_dim", NEEDED),
    "num_local_experts": ("experts", 8),
    "num_experts_per_tok": ("experts_per_token", 2),
    "max_position_embeddings": ("seq_len", 4096 * 32),
    "rms_norm_eps": ("norm_eps", 1e-5),
}


def entries(model: ModelSection) -> list[Entry]:
    table = [entry for entry in llama.entries(model) if ".mlp." not in entry.ours]
    for i in range(model.layers):
        ours, theirs = f"blocks.{i}.mlp", f"model.layers.{i}.block_sparse_moe"
        table += same(f"{ours}.router", f"{theirs}.gate")
        table += experts(f"{ours}.experts", f"{theirs}.experts", model, ("w1", "w3", "w2"))
    return table


def to_config(model: ModelSection) -> dict[str, Any]:
    return llama.decoder(model) | balance(model) | {"router_jitter_noise": 0.0, "sliding_window": None}


def balance(model: ModelSection) -> dict[str, Any]:
    """The weight of the balance term. Theirs sums over a token's choices, ours averages."""
    weight = model.aux_loss_weight if model.balance == "aux" else 0.0
    return {"router_aux_loss_coef": weight / (model.experts_per_token or 1)}


def aux_loss(config: Mapping[str, Any], per_token: int) -> dict[str, Any]:
    """The inverse of `balance`. per_token: experts of a token, in a file that does not say it."""
    weight = float(config.get("router_aux_loss_coef", 0.001)) * config.get("num_experts_per_tok", per_token)
    return {"balance": "aux", "aux_loss_weight": round(weight, 12)}


def from_config(config: Mapping[str, Any]) -> dict[str, Any]:
    rope = config.get("rope_parameters") or {}
    fields = llama.from_config(config) | aux_loss(config, 2)
    return fields | {
        "ffn_dim": config["intermediate_size"],
        "router_normalize": True,
        "rope_theta": float(rope.get("rope_theta") or config.get("rope_theta") or 1e6),
    }


def problems(config: Mapping[str, Any]) -> list[str]:
    """Llama's problems, and one expert per token: Mixtral would divide its score by itself."""
    found = llama.problems(config)
    if config.get("num_experts_per_tok", 2) == 1:
        found.append("num_experts_per_tok = 1; only 2 or more are supported")
    return found
