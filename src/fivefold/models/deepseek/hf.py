"""Maps our `deepseek` to `DeepseekV3ForCausalLM` and back. Modules for multi-token prediction are layers behind the
last one, each with copies of the embedding and the output layer, as in the published files. transformers leaves them
out."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

from fivefold.models.deepseek.card import widths_of
from fivefold.models.hf import Entry, Fields, mixture, same
from fivefold.models.llama import hf as llama
from fivefold.models.section import MOST_EXPERTS, ModelSection

MODEL_TYPE = "deepseek_v3"
ARCHITECTURE = "DeepseekV3ForCausalLM"
TIED, rename = llama.TIED, llama.rename
SUPPORTED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "attention_bias": (False, None),
    "rope_interleave": (True,),
    "scoring_func": ("sigmoid",),
    "topk_method": ("noaux_tc",),
    "moe_layer_freq": (1,),
    "pretraining_tp": (1, None),
}
# Their router's settings; capacity limits apply in training only.
EXPRESSED: dict[str, Container[Any]] = {
    "router_score": ("sigmoid",),
    "balance": ("bias",),
    "shared_experts": range(1, MOST_EXPERTS + 1),
}
FIELDS: Fields = llama.FIELDS | {
    "max_position_embeddings": ("seq_len", 4096),
    "kv_lora_rank": ("kv_rank", 512),
    "qk_nope_head_dim": ("nope_dim", 128),
    "qk_rope_head_dim": ("rope_dim", 64),
    "v_head_dim": ("value_dim", 128),
    "moe_intermediate_size": ("expert_ffn_dim", 2048),
    "n_routed_experts": ("experts", 256),
    "num_experts_per_tok": ("experts_per_token", 8),
    "n_shared_experts": ("shared_experts", 1),
    "first_k_dense_replace": ("dense_layers", 3),
    "n_group": ("expert_groups", 8),
    "topk_group": ("groups_per_token", 4),
    "norm_topk_prob": ("router_normalize", True),
    "routed_scaling_factor": ("router_scale", 2.5),
    "num_nextn_predict_layers": ("mtp_depth", 0),
}


def entries(model: ModelSection) -> list[Entry]:
    table, w = [], widths_of(model)
    for entry in llama.entries(model):
        block = int(entry.ours.split(".")[1]) if entry.ours.startswith("blocks.") else 0
        if ".attention.qkv" in entry.ours:
            table += _attention(f"blocks.{block}.attention", f"model.layers.{block}.self_attn", w.query_rank,
                                w.kv_rank + w.rope)  # fmt: skip
        elif ".mlp.gate_up" in entry.ours and block >= model.dense_layers:
            ours, theirs = f"blocks.{block}.mlp", f"model.layers.{block}.mlp"
            table.append(Entry(f"{ours}.router.bias", (f"{theirs}.gate.e_score_correction_bias",)))
            table += mixture(ours, theirs, model, "shared_experts")
        elif ".mlp." not in entry.ours or block < model.dense_layers:
            table.append(entry)
    for block in range(model.layers, model.blocks):
        ours, theirs = f"blocks.{block}.ahead", f"model.layers.{block}"
        names = {
            "token_norm": "enorm",
            "hidden_norm": "hnorm",
            "project": "eh_proj",
            "norm": "shared_head.norm",
        }
        table += [entry for own, name in names.items() for entry in same(f"{ours}.{own}", f"{theirs}.{name}")]
    return table


def copies(model: ModelSection) -> dict[str, str]:
    """Of multi-token prediction: copies of the embedding and of the output layer, by name."""
    embed = "model.embed_tokens.weight"
    head, found = embed if model.tie_embeddings else "lm_head.weight", dict[str, str]()
    for block in range(model.layers, model.blocks):
        theirs = f"model.layers.{block}"
        found |= {f"{theirs}.embed_tokens.weight": embed, f"{theirs}.shared_head.head.weight": head}
    return found


def _attention(ours: str, theirs: str, query: int, key_value: int) -> list[Entry]:
    down = (f"{theirs}.q_a_proj.weight", f"{theirs}.kv_a_proj_with_mqa.weight")
    if query:
        first = [
            Entry(f"{ours}.latents.weight", down, (query, key_value)),
            *same(f"{ours}.norm_q", f"{theirs}.q_a_layernorm"),
            *same(f"{ours}.up_q", f"{theirs}.q_b_proj"),
        ]
    else:
        first = [Entry(f"{ours}.latents.weight", down[1:]), *same(f"{ours}.up_q", f"{theirs}.q_proj")]
    return [
        *first,
        *same(f"{ours}.norm_kv", f"{theirs}.kv_a_layernorm"),
        *same(f"{ours}.up_kv", f"{theirs}.kv_b_proj"),
    ]


def to_config(model: ModelSection) -> dict[str, Any]:
    config, w = llama.decoder(model), widths_of(model)
    if model.rope_factor > 1 and model.rope_scaling == "yarn":
        # theirs is a factor on all scores, not on the rotated ones
        scores = {"attention_factor": 1.0, "mscale": model.rope_mscale, "mscale_all_dim": model.rope_mscale}
        config |= {key: config[key] | scores for key in ("rope_scaling", "rope_parameters")}
    return config | {
        "attention_bias": False,
        "head_dim": w.rope,  # their rotary table reads it
        "q_lora_rank": w.query_rank or None,
        "rope_interleave": True,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    }


def from_config(config: Mapping[str, Any]) -> dict[str, Any]:
    fields = llama.from_config(config)
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if "rope_mscale" in fields:
        fields["rope_mscale"] = float(rope.get("mscale_all_dim") or 0)
    return fields | {"head_dim": None, "query_rank": config.get("q_lora_rank", 1536) or 0}


def problems(config: Mapping[str, Any]) -> list[str]:
    """Llama's problems, grouped queries, no shared experts, and YaRN with different factors on the scores of the two
    parts of a head."""
    found, heads = llama.problems(config), config["num_attention_heads"]
    for key in ("rope_scaling", "rope_parameters"):
        rope = config.get(key) or {}
        if "rope_mscale" in llama.scaled(rope) and abs(llama.amplitude(rope) - 1) > 1e-6:
            of = {name: rope.get(name) for name in ("mscale", "mscale_all_dim")}
            found.append(f"{key} has mscale {of['mscale']} and mscale_all_dim {of['mscale_all_dim']}; only the same "
                         "number for both is supported")  # fmt: skip
    if (config.get("num_key_value_heads") or heads) != heads:
        found.append(f"num_key_value_heads = {config['num_key_value_heads']}; only {heads} is supported")
    if not config.get("n_shared_experts", 1):
        found.append(f"n_shared_experts = {config['n_shared_experts']}; only 1 or more are supported")
    return found
