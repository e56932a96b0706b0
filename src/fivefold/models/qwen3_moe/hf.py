"""Maps our `qwen3_moe` to `Qwen3MoeForCausalLM` and back: Qwen3's attention, and experts with three matrices each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fivefold.models.hf import Entry, experts, refuse, same
from fivefold.models.llama import hf as llama
from fivefold.models.qwen3 import hf as qwen3
from fivefold.models.section import ModelSection

MODEL_TYPE = "qwen3_moe"
ARCHITECTURE = "Qwen3MoeForCausalLM"
TIED, problems, rename = llama.TIED, llama.problems, llama.rename
SUPPORTED: dict[str, tuple[Any, ...]] = qwen3.SUPPORTED | {
    "decoder_sparse_step": (1, None),
    "mlp_only_layers": ([], None),
}
# Their router's settings; capacity limits apply in training only.
OURS: dict[str, Any] = {
    "shared_experts": 0,
    "dense_layers": 0,
    "router_score": "softmax",
    "router_scale": 1.0,
    "expert_groups": 1,
}


def entries(model: ModelSection) -> list[Entry]:
    """The weight map.

    Raises:
        UserError: their format cannot express the model.
    """
    _check(model)
    table = [entry for entry in qwen3.entries(model) if ".mlp." not in entry.ours]
    for i in range(model.layers):
        ours, theirs = f"blocks.{i}.mlp", f"model.layers.{i}.mlp"
        table += same(f"{ours}.router", f"{theirs}.gate")
        table += experts(f"{ours}.experts", f"{theirs}.experts", model)
    return table


def _check(model: ModelSection) -> None:
    refuse("Qwen3-MoE", model, OURS, *['model.balance = "bias"'] * (model.balance == "bias"))


def to_config(model: ModelSection) -> dict[str, Any]:
    _check(model)
    per_token = model.experts_per_token or 1
    return qwen3.to_config(model) | {
        "model_type": MODEL_TYPE,
        "moe_intermediate_size": model.expert_ffn_dim,
        "num_experts": model.experts,
        "num_experts_per_tok": per_token,
        "norm_topk_prob": model.router_normalize,
        # Theirs sums over a token's choices, ours averages.
        "router_aux_loss_coef": (model.aux_loss_weight if model.balance == "aux" else 0.0) / per_token,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def from_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of `[model]`. Keys missing in older files have the defaults of `Qwen3MoeConfig`."""
    known = {"max_position_embeddings": 32768, "intermediate_size": 6144, "num_key_value_heads": 4} | dict(
        config
    )
    per_token = config.get("num_experts_per_tok", 8)
    return llama.from_config(known) | {
        "arch": "qwen3_moe",
        "experts": config.get("num_experts", config.get("num_local_experts", 128)),
        "experts_per_token": per_token,
        "expert_ffn_dim": config.get("moe_intermediate_size", 768),
        "router_normalize": config.get("norm_topk_prob", False),
        "shared_experts": 0,
        "router_score": "softmax",
        "balance": "aux",
        "aux_loss_weight": round(float(config.get("router_aux_loss_coef", 0.001)) * per_token, 12),
    }
