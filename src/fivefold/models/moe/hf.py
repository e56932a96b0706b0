"""Maps our `moe` to `MixtralForCausalLM` and back: Llama's attention, and experts with three matrices each there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fivefold.models.hf import Entry, experts, refuse, same
from fivefold.models.llama import hf as llama
from fivefold.models.section import ModelSection

MODEL_TYPE = "mixtral"
ARCHITECTURE = "MixtralForCausalLM"
TIED, rename = llama.TIED, llama.rename
SUPPORTED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "sliding_window": (None,),
    "router_jitter_noise": (0.0, None),
    "partial_rotary_factor": (1.0, None),
}
# Mixtral's settings; capacity limits apply in training only.
OURS: dict[str, Any] = {
    "shared_experts": 0,
    "dense_layers": 0,
    "router_score": "softmax",
    "router_normalize": True,
    "router_scale": 1.0,
    "expert_groups": 1,
}


def entries(model: ModelSection) -> list[Entry]:
    """The weight map.

    Raises:
        UserError: Mixtral cannot express the model.
    """
    _check(model)
    table = [entry for entry in llama.entries(model) if ".mlp." not in entry.ours]
    for i in range(model.layers):
        ours, theirs = f"blocks.{i}.mlp", f"model.layers.{i}.block_sparse_moe"
        table += same(f"{ours}.router", f"{theirs}.gate")
        table += experts(f"{ours}.experts", f"{theirs}.experts", model, ("w1", "w3", "w2"))
    return table


def _check(model: ModelSection) -> None:
    more = {"attention_bias": model.attention_bias, 'balance = "bias"': model.balance == "bias"}
    refuse("Mixtral", model, OURS, *[f"model.{name}" for name, there in more.items() if there])


def to_config(model: ModelSection) -> dict[str, Any]:
    _check(model)
    config = llama.to_config(model)
    for key in ("attention_bias", "mlp_bias"):
        del config[key]
    per_token = model.experts_per_token or 1
    return config | {
        "model_type": MODEL_TYPE,
        "intermediate_size": model.expert_ffn_dim,
        "num_local_experts": model.experts,
        "num_experts_per_tok": per_token,
        # Theirs sums over a token's choices, ours averages.
        "router_aux_loss_coef": (model.aux_loss_weight if model.balance == "aux" else 0.0) / per_token,
        "router_jitter_noise": 0.0,
        "sliding_window": None,
    }


def from_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of `[model]`. Keys missing in older files have the defaults of `MixtralConfig`."""
    rope = config.get("rope_parameters") or {}
    per_token = config.get("num_experts_per_tok", 2)
    return llama.from_config(config) | {
        "arch": "moe",
        "experts": config.get("num_local_experts", 8),
        "experts_per_token": per_token,
        "expert_ffn_dim": config["intermediate_size"],
        "router_normalize": True,
        "shared_experts": 0,
        "router_score": "softmax",
        "balance": "aux",
        "seq_len": config.get("max_position_embeddings", 4096 * 32),
        "norm_eps": float(config.get("rms_norm_eps", 1e-5)),
        "rope_theta": float(rope.get("rope_theta") or config.get("rope_theta") or 1e6),
        "aux_loss_weight": round(float(config.get("router_aux_loss_coef", 0.001)) * per_token, 12),
    }


def problems(config: Mapping[str, Any]) -> list[str]:
    """Llama's problems, and one expert per token: Mixtral would divide its score by itself."""
    found = llama.problems(config)
    if config.get("num_experts_per_tok", 2) == 1:
        found.append("num_experts_per_tok = 1; only 2 or more are supported")
    return found
