"""The fifth architecture beside a model of transformers that does not exist."""

from __future__ import annotations

from typing import Any

from fivefold.models.hf import NEEDED, Entry, Fields, same
from fivefold.models.section import ModelSection

MODEL_TYPE = "tiny"
ARCHITECTURE = "TinyForCausalLM"
TIED = {"head.weight": "wte.weight"}
SUPPORTED: dict[str, tuple[Any, ...]] = {}


def entries(model: ModelSection) -> list[Entry]:
    table = same("embed", "wte") + same("embed_positions", "wpe")
    for i in range(model.layers):
        for name in (
            "norm1",
            "attention.qkv",
            "attention.norm_q",
            "attention.out",
            "mlp.gate_up",
            "mlp.down",
        ):
            table += same(f"blocks.{i}.{name}", f"h.{i}.{name}")
    return table + same("norm", "ln") + ([] if model.tie_embeddings else same("head", "head"))


NAMES = [
    "layers",
    "dim",
    "heads",
    "kv_heads",
    "ffn_dim",
    "vocab_size",
    "seq_len",
    "tie_embeddings",
    "norm_eps",
]
FIELDS: Fields = {name: (name, NEEDED) for name in NAMES}
