"""Maps our `olmo2` to `Olmo2ForCausalLM` and back: Llama's weights with norms at other places."""

from __future__ import annotations

from typing import Any

from fivefold.models.hf import Entry, Fields
from fivefold.models.llama import hf as llama
from fivefold.models.olmo2.card import normed
from fivefold.models.section import ModelSection

MODEL_TYPE = "olmo2"
ARCHITECTURE = "Olmo2ForCausalLM"
TIED, from_config, problems, rename = llama.TIED, llama.from_config, llama.problems, llama.rename
SUPPORTED = llama.GATED
FIELDS: Fields = llama.FIELDS | {"rms_norm_eps": ("norm_eps", 1e-5)}


def entries(model: ModelSection) -> list[Entry]:
    table = llama.entries(model, ("post_attention_layernorm", "post_feedforward_layernorm"))
    for i in range(model.layers):
        theirs = tuple(f"model.layers.{i}.self_attn.{kind}_norm.weight" for kind in "qk")
        table += [Entry(f"blocks.{i}.attention.norm_qk.weight", theirs, normed(model))]
    return table


def to_config(model: ModelSection) -> dict[str, Any]:
    return llama.decoder(model) | {"attention_bias": model.attention_bias}
