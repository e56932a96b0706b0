"""Maps our `qwen3_moe` to `Qwen3MoeForCausalLM` and back: Qwen3's attention, and experts with three matrices each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fivefold.models.hf import Entry, Fields, mixture
from fivefold.models.llama import hf as llama
from fivefold.models.moe import hf as moe
from fivefold.models.qwen3 import hf as qwen3
from fivefold.models.section import ModelSection

MODEL_TYPE = "qwen3_moe"
ARCHITECTURE = "Qwen3MoeForCausalLM"
TIED, problems, rename = llama.TIED, llama.problems, llama.rename
SUPPORTED: dict[str, tuple[Any, ...]] = qwen3.SUPPORTED | {
    "decoder_sparse_step": (1, None),
    "mlp_only_layers": ([], None),
}
EXPRESSED = moe.ROUTED
FIELDS: Fields = qwen3.FIELDS | {
    "intermediate_size": ("ffn_dim", 6144),
    "num_key_value_heads": ("kv_heads", 4),
    "num_experts": ("experts", 128),
    "num_experts_per_tok": ("experts_per_token", 8),
    "moe_intermediate_size": ("expert_ffn_dim", 768),
    "norm_topk_prob": ("router_normalize", False),
}


def entries(model: ModelSection) -> list[Entry]:
    table = [entry for entry in qwen3.entries(model) if ".mlp." not in entry.ours]
    for i in range(model.layers):
        ours, theirs = f"blocks.{i}.mlp", f"model.layers.{i}.mlp"
        table += mixture(ours, theirs, model)
    return table


def to_config(model: ModelSection) -> dict[str, Any]:
    blocks = {"decoder_sparse_step": 1, "mlp_only_layers": []}
    return qwen3.to_config(model) | moe.balance(model) | blocks


def from_config(config: Mapping[str, Any]) -> dict[str, Any]:
    fields = llama.from_config(config) | moe.aux_loss(config, 8)
    if "num_experts" not in config and "num_local_experts" in config:
        fields["experts"] = config["num_local_experts"]
    return fields
