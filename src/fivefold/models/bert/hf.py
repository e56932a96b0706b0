"""Maps our `bert` to `BertForMaskedLM` and back."""

from __future__ import annotations

from typing import Any

from fivefold.models.bert.card import TOKEN_TYPES
from fivefold.models.hf import NEEDED, Entry, Fields, same
from fivefold.models.section import ModelSection

MODEL_TYPE = "bert"
ARCHITECTURE = "BertForMaskedLM"
TIED = {
    "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
    "cls.predictions.decoder.bias": "cls.predictions.bias",
}
# Keys of config.json that affect the computation, with the values that our model supports.
SUPPORTED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("gelu", None),
    "position_embedding_type": ("absolute", None),
    "is_decoder": (False, None),
    "add_cross_attention": (False, None),
    "type_vocab_size": (TOKEN_TYPES, None),
}


def entries(model: ModelSection) -> list[Entry]:
    theirs = "bert.embeddings"
    table = same("embed", f"{theirs}.word_embeddings")
    table += same("embed_positions", f"{theirs}.position_embeddings")
    table += same("embed_types", f"{theirs}.token_type_embeddings")
    table += same("embed_norm", f"{theirs}.LayerNorm", "weight", "bias")
    for i in range(model.layers):
        ours, theirs = f"blocks.{i}", f"bert.encoder.layer.{i}"
        for kind in ("weight", "bias"):
            qkv = tuple(f"{theirs}.attention.self.{x}.{kind}" for x in ("query", "key", "value"))
            table += [Entry(f"{ours}.attention.qkv.{kind}", qkv, (model.dim,) * 3)]
        for a, b in (
            ("attention.out", "attention.output.dense"),
            ("norm1", "attention.output.LayerNorm"),
            ("mlp.up", "intermediate.dense"),
            ("mlp.down", "output.dense"),
            ("norm2", "output.LayerNorm"),
        ):
            table += same(f"{ours}.{a}", f"{theirs}.{b}", "weight", "bias")
    table += same("transform", "cls.predictions.transform.dense", "weight", "bias")
    table += same("norm", "cls.predictions.transform.LayerNorm", "weight", "bias")
    if model.tie_embeddings:
        return [*table, Entry("head_bias", ("cls.predictions.bias",))]
    # Untied, transformers adds decoder.bias, and cls.predictions.bias has no effect.
    return [
        *table,
        *same("head", "cls.predictions.decoder"),
        Entry("head_bias", ("cls.predictions.decoder.bias",)),
    ]


FIELDS: Fields = {
    "vocab_size": ("vocab_size", NEEDED),
    "hidden_size": ("dim", NEEDED),
    "intermediate_size": ("ffn_dim", NEEDED),
    "num_hidden_layers": ("layers", NEEDED),
    "num_attention_heads": ("heads", NEEDED),
    "max_position_embeddings": ("seq_len", 512),
    "initializer_range": ("init_std", 0.02),
    "layer_norm_eps": ("norm_eps", 1e-12),
    "tie_word_embeddings": ("tie_embeddings", True),
    "hidden_dropout_prob": ("dropout", 0.1),  # of the residual stream: attention probabilities have none here
}


def to_config(model: ModelSection) -> dict[str, Any]:
    return {
        "type_vocab_size": TOKEN_TYPES,
        "hidden_act": "gelu",
        "position_embedding_type": "absolute",
        "attention_probs_dropout_prob": 0.0,
        "pad_token_id": None,
    }


def rename(name: str) -> str | None:
    """Current name of a weight (the oldest files say gamma, beta); None if a masked LM does not use it."""
    if name.endswith("embeddings.position_ids") or name.startswith(("bert.pooler.", "cls.seq_relationship.")):
        return None
    return name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")
