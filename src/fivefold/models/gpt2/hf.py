"""Maps our `gpt2` to `GPT2LMHeadModel` and back; there the matrices of blocks are stored transposed (`Conv1D`)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from fivefold.models.hf import Entry, same
from fivefold.models.section import ModelSection

MODEL_TYPE = "gpt2"
ARCHITECTURE = "GPT2LMHeadModel"
TIED = {"lm_head.weight": "transformer.wte.weight"}
# Keys of config.json that affect the computation, with the values that our model supports.
SUPPORTED: dict[str, tuple[Any, ...]] = {
    "activation_function": ("gelu_new", "gelu_pytorch_tanh", None),
    "scale_attn_weights": (True, None),
    "scale_attn_by_inverse_layer_idx": (False, None),
    "add_cross_attention": (False, None),
}


def entries(model: ModelSection) -> list[Entry]:
    table = same("embed", "transformer.wte") + same("embed_positions", "transformer.wpe")
    for i in range(model.layers):
        ours, theirs = f"blocks.{i}", f"transformer.h.{i}"
        for a, b in (("norm1", "ln_1"), ("norm2", "ln_2")):
            table += same(f"{ours}.{a}", f"{theirs}.{b}", "weight", "bias")
        for a, b in (
            ("attention.qkv", "attn.c_attn"),
            ("attention.out", "attn.c_proj"),
            ("mlp.up", "mlp.c_fc"),
            ("mlp.down", "mlp.c_proj"),
        ):
            table += [Entry(f"{ours}.{a}.weight", (f"{theirs}.{b}.weight",), transpose=True)]
            table += same(f"{ours}.{a}", f"{theirs}.{b}", "bias")
    table += same("norm", "transformer.ln_f", "weight", "bias")
    return table + ([] if model.tie_embeddings else same("head", "lm_head"))


def to_config(model: ModelSection) -> dict[str, Any]:
    return {
        "model_type": MODEL_TYPE,
        "vocab_size": model.vocab_size,
        "n_embd": model.dim,
        "n_inner": model.ffn_dim,
        "n_layer": model.layers,
        "n_head": model.heads,
        "n_positions": model.seq_len,
        "activation_function": "gelu_new",
        "initializer_range": model.init_std,
        "layer_norm_epsilon": model.norm_eps,
        "tie_word_embeddings": model.tie_embeddings,
        "embd_pdrop": model.dropout,
        "resid_pdrop": model.dropout,
        "attn_pdrop": 0.0,
    }


def from_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of `[model]`. Keys missing in older files have the defaults of `GPT2Config`. Dropout is that of the
    residual stream: attention probabilities have none here."""
    return {
        "arch": "gpt2",
        "layers": config["n_layer"],
        "dim": config["n_embd"],
        "heads": config["n_head"],
        "kv_heads": config["n_head"],
        "ffn_dim": config.get("n_inner") or 4 * config["n_embd"],
        "vocab_size": config["vocab_size"],
        "seq_len": config.get("n_positions", 1024),
        "tie_embeddings": config.get("tie_word_embeddings", True),
        "norm_eps": float(config.get("layer_norm_epsilon", 1e-5)),
        "dropout": float(config.get("resid_pdrop", 0.1)),
        "init_std": float(config.get("initializer_range", 0.02)),
    }


def rename(name: str) -> str | None:
    """Current name of a weight (the oldest files lack the prefix); None for a stored causal mask."""
    if re.search(r"h\.\d+\.attn\.(masked_)?bias$", name):
        return None
    return name if name.startswith(("transformer.", "lm_head.")) else f"transformer.{name}"
