"""Maps our `gemma3` to `Gemma3ForCausalLM` (text) and back."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from fivefold.models.hf import Fields
from fivefold.models.llama import hf as llama
from fivefold.models.olmo3 import hf as olmo3
from fivefold.models.section import ModelSection

MODEL_TYPE = "gemma3_text"
ARCHITECTURE = "Gemma3ForCausalLM"
TIED, rename, problems = llama.TIED, llama.rename, olmo3.problems
NORMS = (
    "input_layernorm",
    "pre_feedforward_layernorm",
    "post_attention_layernorm",
    "post_feedforward_layernorm",
)
entries = partial(llama.entries, norms=NORMS)
SUPPORTED: dict[str, tuple[Any, ...]] = {
    "hidden_activation": ("gelu_pytorch_tanh", None),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "use_bidirectional_attention": (False, None),
    "attention_bias": (False, None),
}
FIELDS: Fields = llama.FIELDS | {
    "num_attention_heads": ("heads", 8),
    "num_key_value_heads": ("kv_heads", 4),
    "max_position_embeddings": ("seq_len", 131072),
    "tie_word_embeddings": ("tie_embeddings", True),
}
WIDTH = 256
"""Of a head, and of what scores are divided by the root of, in a file that does not say it."""


def to_config(model: ModelSection) -> dict[str, Any]:
    older = {"rope_local_base_freq": (model.local or model).rope_theta}  # transformers 4
    return common(model) | older | olmo3.windows(model)


def common(model: ModelSection) -> dict[str, Any]:
    """Keys of all Gemmas."""
    config = {key: value for key, value in llama.decoder(model).items() if key != "hidden_act"}
    gate = {"hidden_activation": "gelu_pytorch_tanh", "attention_bias": False}
    return config | gate | {"query_pre_attn_scalar": model.score_width or model.head_width}


def from_config(config: Mapping[str, Any]) -> dict[str, Any]:
    config = {"head_dim": WIDTH, **config}
    return olmo3.from_windows(config, every=6, theta=1e6, local=1e4) | scores(config)


def scores(config: Mapping[str, Any]) -> dict[str, Any]:
    """What scores are divided by the root of."""
    width = config.get("query_pre_attn_scalar", WIDTH)
    return {"score_width": None if width == config["head_dim"] else width}
