"""torchtitan's names of the weights of our `llama`, its `llama3` (August 2026, and the releases of 2024 and 2025)."""

from __future__ import annotations

from fivefold.models.section import ModelSection

ENDS = {
    "model.embed_tokens": ("tok_embeddings",),
    "model.norm": ("norm",),
    "lm_head": ("lm_head", "output"),
}
"""By Hugging Face's name, those of torchtitan, the newest first."""
LAYER = {
    "self_attn.q_proj": ("attention.qkv_linear.wq", "attention.wq"),
    "self_attn.k_proj": ("attention.qkv_linear.wk", "attention.wk"),
    "self_attn.v_proj": ("attention.qkv_linear.wv", "attention.wv"),
    "self_attn.o_proj": ("attention.wo",),
    "mlp.gate_proj": ("feed_forward.w1",),
    "mlp.down_proj": ("feed_forward.w2",),
    "mlp.up_proj": ("feed_forward.w3",),
    "input_layernorm": ("attention_norm",),
    "post_attention_layernorm": ("ffn_norm",),
}


def names(model: ModelSection) -> dict[str, tuple[tuple[str, ...], int]]:
    """{Hugging Face's name: (torchtitan's names, heads)}. heads: of a weight with another order of rows there, else 0.
    torchtitan rotates rows 2i and 2i + 1 of a head together (arXiv 2104.09864), Hugging Face rows i and i + d/2."""
    paired = {"self_attn.q_proj": model.heads, "self_attn.k_proj": model.kv_heads or model.heads}
    table = {theirs: (ours, 0) for theirs, ours in ENDS.items()}
    for i in range(model.layers):
        for theirs, ours in LAYER.items():
            there = tuple(f"layers.{i}.{name}" for name in ours)
            table[f"model.layers.{i}.{theirs}"] = there, paired.get(theirs, 0)
    return {
        f"{t}.weight": (tuple(f"{name}.weight" for name in ours), heads) for t, (ours, heads) in table.items()
    }
