"""Maps our `qwen3_next` to `Qwen3NextForCausalLM` and back. Rows of fused matrices go head by head there. Published
files also have a module for multi-token prediction, `mtp.*`, which transformers and this map leave out."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import replace
from typing import Any

from fivefold.errors import UserError
from fivefold.models.delta_work import Widths, widths_of
from fivefold.models.hf import Entry, Fields, every_nth_full, mixture, rotary_order, same
from fivefold.models.llama import hf as llama
from fivefold.models.moe import hf as moe
from fivefold.models.phi3 import hf as phi3
from fivefold.models.section import MOST_EXPERTS, ModelSection

MODEL_TYPE = "qwen3_next"
ARCHITECTURE = "Qwen3NextForCausalLM"
TIED, problems, current = llama.TIED, phi3.problems, llama.rename
LINEAR, FULL = "linear_attention", "full_attention"
SUPPORTED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "attention_bias": (False, None),
    "decoder_sparse_step": (1, None),
    "mlp_only_layers": ([], None),
}
EXPRESSED: dict[str, Container[Any]] = moe.ROUTED | {"shared_experts": range(1, MOST_EXPERTS + 1)}
FIELDS: Fields = llama.FIELDS | {
    "intermediate_size": ("ffn_dim", 5632),
    "num_key_value_heads": ("kv_heads", 2),
    "max_position_embeddings": ("seq_len", 32768),
    "num_experts": ("experts", 512),
    "num_experts_per_tok": ("experts_per_token", 10),
    "moe_intermediate_size": ("expert_ffn_dim", 512),
    "norm_topk_prob": ("router_normalize", True),
    "linear_num_value_heads": ("linear_heads", 32),
    "linear_num_key_heads": ("linear_key_heads", 16),
    "linear_key_head_dim": ("linear_key_dim", 128),
    "linear_value_head_dim": ("linear_value_dim", 128),
    "linear_conv_kernel_dim": ("linear_conv", 4),
}
WIDTH = 256
"""Of a head of attention, in a file that does not say it."""


def entries(model: ModelSection) -> list[Entry]:
    table, w, order = list[Entry](), widths_of(model), _gated_order(model)
    for entry in llama.entries(model):
        block = int(entry.ours.split(".")[1]) if entry.ours.startswith("blocks.") else 0
        ours, theirs = f"blocks.{block}", f"model.layers.{block}"
        linear = model.linear(block)
        if entry.ours.endswith("attention.qkv.weight") and linear:
            table += _linear(f"{ours}.attention", f"{theirs}.linear_attn", w)
        elif entry.ours.endswith("attention.qkv.weight"):
            d, K = model.head_width, model.kv_heads or model.heads
            table.append(replace(entry, rows=(2 * d * model.heads, d * K, d * K), order=order))
        elif ".attention.norm_" in entry.ours:
            table.append(replace(entry, order=rotary_order(1, 0, model.head_width, model.rotary_width)))
        elif entry.ours.endswith("attention.out.weight") and linear:
            table += same(f"{ours}.attention.out", f"{theirs}.linear_attn.out_proj")
        elif entry.ours.endswith("mlp.gate_up.weight"):
            table += mixture(f"{ours}.mlp", f"{theirs}.mlp", model, "shared_expert")
            gate = f"{theirs}.mlp.shared_expert_gate.weight"
            table.append(Entry(f"{ours}.mlp.shared_gate_vectors", (gate,)))
        elif ".mlp." not in entry.ours:
            table.append(entry)
    return table


def _gated_order(model: ModelSection) -> tuple[int, ...]:
    """Theirs have the queries of a head, then its gate. The features that rotate are the first ones of a head."""
    d, H, K = model.head_width, model.heads, model.kv_heads or model.heads
    one, keys = rotary_order(1, 0, d, model.rotary_width), 2 * d * H
    queries = [2 * d * head + i for head in range(H) for i in one]
    rotated = [keys + d * head + i for head in range(K) for i in one]
    values = range(keys + d * K, keys + 2 * d * K)
    return (*queries, *rotated, *values, *(2 * d * head + d + i for head in range(H) for i in range(d)))


def _linear(ours: str, theirs: str, w: Widths) -> list[Entry]:
    """Rows of theirs go by key head: its query and key, the values and the gates of its value heads; then logits of
    beta and steps of the decay, by key head."""
    group = w.heads // w.key_heads
    values, scalars = group * w.value, w.key_heads * (2 * w.key + 2 * group * w.value)
    each = 2 * w.key + 2 * values

    def part(start: int, size: int, first: int = 0, step: int = each) -> list[int]:
        return [first + head * step + start + i for head in range(w.key_heads) for i in range(size)]

    order = (
        *part(0, w.key), *part(w.key, w.key), *part(2 * w.key, values), *part(0, group, scalars, 2 * group),
        *part(group, group, scalars, 2 * group), *part(2 * w.key + values, values),
    )  # fmt: skip
    both = f"{theirs}.in_proj_qkvz.weight", f"{theirs}.in_proj_ba.weight"
    return [
        Entry(f"{ours}.conv_vectors", (f"{theirs}.conv1d.weight",), shape=(w.mixed, 1, w.conv)),
        Entry(f"{ours}.a_log", (f"{theirs}.A_log",)),
        Entry(f"{ours}.dt", (f"{theirs}.dt_bias",)),
        Entry(f"{ours}.in_proj.weight", both, (scalars, 2 * w.heads), order=order),
        *same(f"{ours}.norm", f"{theirs}.norm"),
    ]


def to_config(model: ModelSection) -> dict[str, Any]:
    """Their router's term of the loss is off unless it is asked for."""
    kinds = [LINEAR if model.linear(number) else FULL for number in range(model.layers)]
    shared = (model.expert_ffn_dim or 0) * (model.shared_experts or 0)
    return llama.decoder(model) | moe.balance(model) | phi3.partial_rotation(model) | {
        "attention_bias": False, "layer_types": kinds, "shared_expert_intermediate_size": shared,
        "decoder_sparse_step": 1, "mlp_only_layers": [],
    }  # fmt: skip


def from_config(config: Mapping[str, Any]) -> dict[str, Any]:
    config = {"head_dim": WIDTH, **config}
    fields = llama.from_config(config) | moe.aux_loss(config, 10) | phi3.rotary_dim(config, 0.25)
    size, one = config.get("shared_expert_intermediate_size", 512), config.get("moe_intermediate_size", 512)
    if size % one or not size:
        raise UserError(
            f"config.json: shared_expert_intermediate_size = {size} must be a multiple of moe_intermediate_size = {one}"
        )
    every = every_nth_full(config, FULL, LINEAR, config.get("full_attention_interval", 4))
    return fields | {"shared_experts": size // one, "full_every": every}


def rename(name: str) -> str | None:
    """None also for the weights of multi-token prediction."""
    return None if name.startswith("mtp.") else current(name)
