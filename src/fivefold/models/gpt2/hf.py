"""Maps our `gpt2` to `GPT2LMHeadModel` and back; there the matrices of blocks are stored transposed (`Conv1D`)."""

from __future__ import annotations

import re
from typing import Any

from fivefold.models.hf import NEEDED, Entry, Fields, same
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


FIELDS: Fields = {
    "vocab_size": ("vocab_size", NEEDED),
    "n_embd": ("dim", NEEDED),
    "n_inner": ("ffn_dim", None),
    "n_layer": ("layers", NEEDED),
    "n_head": ("heads", NEEDED),
    "n_positions": ("seq_len", 1024),
    "initializer_range": ("init_std", 0.02),
    "layer_norm_epsilon": ("norm_eps", 1e-5),
    "tie_word_embeddings": ("tie_embeddings", True),
    "resid_pdrop": ("dropout", 0.1),  # of the residual stream: attention probabilities have none here
}


def to_config(model: ModelSection) -> dict[str, Any]:
    return {"activation_function": "gelu_new", "embd_pdrop": model.dropout, "attn_pdrop": 0.0}


def rename(name: str) -> str | None:
    """Current name of a weight (the oldest files lack the prefix); None for a stored causal mask."""
    if re.search(r"h\.\d+\.attn\.(masked_)?bias$", name):
        return None
    return name if name.startswith(("transformer.", "lm_head.")) else f"transformer.{name}"
