"""Maps our `gpt_oss` to `GptOssForCausalLM` and back. Experts are stacks of transposed matrices there, in which rows of
gate and up take turns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fivefold.models.hf import Entry, Fields
from fivefold.models.llama import hf as llama
from fivefold.models.moe import hf as moe
from fivefold.models.olmo3 import hf as olmo3
from fivefold.models.section import ModelSection

MODEL_TYPE = "gpt_oss"
ARCHITECTURE = "GptOssForCausalLM"
TIED, problems, rename = llama.TIED, llama.problems, llama.rename
SUPPORTED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (True,),
    "swiglu_alpha": (1.702,),
    "swiglu_limit": (7.0,),
}
EXPRESSED = moe.ROUTED | {"router_normalize": (True,)}
FIELDS: Fields = moe.FIELDS | {
    "intermediate_size": ("expert_ffn_dim", 2880),
    "num_attention_heads": ("heads", 64),
    "num_key_value_heads": ("kv_heads", 8),
    "num_local_experts": ("experts", 128),
    "num_experts_per_tok": ("experts_per_token", 4),
}
ROPE = {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096}
"""What a file means that says nothing of positions."""


def entries(model: ModelSection) -> list[Entry]:
    table = [entry for entry in llama.entries(model) if ".mlp." not in entry.ours]
    F = model.expert_ffn_dim or 0
    turns = (*range(0, 2 * F, 2), *range(1, 2 * F, 2))
    for i in range(model.layers):
        ours, theirs = f"blocks.{i}", f"model.layers.{i}"
        experts = f"{theirs}.mlp.experts"
        table += [
            Entry(f"{ours}.attention.sink_bias", (f"{theirs}.self_attn.sinks",)),
            Entry(f"{ours}.mlp.router.weight", (f"{theirs}.mlp.router.weight",)),
            Entry(f"{ours}.mlp.router.logit_bias", (f"{theirs}.mlp.router.bias",)),
            Entry(f"{ours}.mlp.experts.gate_up", (f"{experts}.gate_up_proj",), (), True, turns, stacked=True),
            Entry(
                f"{ours}.mlp.experts.gate_up_bias", (f"{experts}.gate_up_proj_bias",), (), False, turns, True
            ),
            Entry(f"{ours}.mlp.experts.down", (f"{experts}.down_proj",), (), True, stacked=True),
            Entry(f"{ours}.mlp.down_bias", (f"{experts}.down_proj_bias",)),
        ]
    return table


def to_config(model: ModelSection) -> dict[str, Any]:
    fixed = {"attention_bias": True, "swiglu_alpha": 1.702, "swiglu_limit": 7.0}
    return llama.decoder(model) | moe.balance(model) | olmo3.kinds(model) | fixed


def from_config(config: Mapping[str, Any]) -> dict[str, Any]:
    config = {"head_dim": 64, "rope_theta": 150000.0, **config}
    if not (config.get("rope_parameters") or config.get("rope_scaling")):
        config["rope_parameters"] = ROPE
    fields = (
        llama.from_config(config) | olmo3.from_kinds(config, every=2, width=128) | moe.aux_loss(config, 4)
    )
    always = {"attention_bias": False, "router_normalize": True}  # its own biases are no choice
    return fields | always | {"ffn_dim": config.get("intermediate_size", 2880)}
