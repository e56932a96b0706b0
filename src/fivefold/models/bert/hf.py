"""Maps our `bert` to `BertForMaskedLM` and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fivefold.models.bert.card import TOKEN_TYPES
from fivefold.models.hf import Entry, same
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
    table = same("embed", f"{theirs}.word_embeddings") + same(
        "embed_positions", f"{theirs}.position_embeddings"
    )
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


def to_config(model: ModelSection) -> dict[str, Any]:
    return {
        "model_type": MODEL_TYPE,
        "vocab_size": model.vocab_size,
        "hidden_size": model.dim,
        "intermediate_size": model.ffn_dim,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "max_position_embeddings": model.seq_len,
        "type_vocab_size": TOKEN_TYPES,
        "hidden_act": "gelu",
        "position_embedding_type": "absolute",
        "initializer_range": model.init_std,
        "layer_norm_eps": model.norm_eps,
        "tie_word_embeddings": model.tie_embeddings,
        "hidden_dropout_prob": model.dropout,
        "attention_probs_dropout_prob": 0.0,
        "pad_token_id": None,
    }


def from_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of `[model]`. Keys missing in older files have the defaults of `BertConfig`. Dropout is that of the
    residual stream: attention probabilities have none here."""
    return {
        "arch": "bert",
        "layers": config["num_hidden_layers"],
        "dim": config["hidden_size"],
        "heads": config["num_attention_heads"],
        "kv_heads": config["num_attention_heads"],
        "ffn_dim": config["intermediate_size"],
        "vocab_size": config["vocab_size"],
        "seq_len": config.get("max_position_embeddings", 512),
        "tie_embeddings": config.get("tie_word_embeddings", True),
        "norm_eps": float(config.get("layer_norm_eps", 1e-12)),
        "dropout": float(config.get("hidden_dropout_prob", 0.1)),
        "init_std": float(config.get("initializer_range", 0.02)),
    }


def rename(name: str) -> str | None:
    """Current name of a weight (the oldest files say gamma, beta); None if a masked LM does not use it."""
    if name.endswith("embeddings.position_ids") or name.startswith(("bert.pooler.", "cls.seq_relationship.")):
        return None
    return name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")
