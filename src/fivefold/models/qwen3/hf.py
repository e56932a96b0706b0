"""Maps our `qwen3` to `Qwen3ForCausalLM` and back: Llama's weights, and a norm of each query and key head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fivefold.models.hf import Entry, same
from fivefold.models.llama import hf as llama
from fivefold.models.section import ModelSection

MODEL_TYPE = "qwen3"
ARCHITECTURE = "Qwen3ForCausalLM"
TIED, problems, rename = llama.TIED, llama.problems, llama.rename
SUPPORTED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "use_sliding_window": (False, None),
    "partial_rotary_factor": (1.0, None),
}


def entries(model: ModelSection) -> list[Entry]:
    table = llama.entries(model)
    for i in range(model.layers):
        for kind in "qk":
            table += same(f"blocks.{i}.attention.norm_{kind}", f"model.layers.{i}.self_attn.{kind}_norm")
    return table


def to_config(model: ModelSection) -> dict[str, Any]:
    config = llama.to_config(model)
    del config["mlp_bias"]
    return config | {"model_type": MODEL_TYPE, "use_sliding_window": False, "sliding_window": None}


def from_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of `[model]`. Keys missing in older files have the defaults of `Qwen3Config`."""
    known = {"max_position_embeddings": 32768, "head_dim": 128} | dict(config)
    return llama.from_config(known) | {"arch": "qwen3"}
