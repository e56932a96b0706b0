"""Maps our `gemma2` to `Gemma2ForCausalLM` and back: Gemma 3's weights, but for the norms of queries and keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fivefold.models.gemma3 import hf as gemma3
from fivefold.models.hf import Fields
from fivefold.models.llama import hf as llama
from fivefold.models.olmo3 import hf as olmo3
from fivefold.models.section import ModelSection

MODEL_TYPE = "gemma2"
ARCHITECTURE = "Gemma2ForCausalLM"
TIED, entries, problems, rename = llama.TIED, gemma3.entries, llama.problems, llama.rename
CAPS = {"attn_logit_softcapping": ("score_cap", 50.0), "final_logit_softcapping": ("logit_cap", 30.0)}
"""Keys of caps: our field, and what a file without the key means. null: none."""
SUPPORTED = {key: values for key, values in gemma3.SUPPORTED.items() if key not in CAPS}
FIELDS: Fields = gemma3.FIELDS | {"max_position_embeddings": ("seq_len", 8192)}


def to_config(model: ModelSection) -> dict[str, Any]:
    caps = {key: getattr(model, field) or None for key, (field, _) in CAPS.items()}
    return gemma3.common(model) | olmo3.kinds(model) | caps


def from_config(config: Mapping[str, Any]) -> dict[str, Any]:
    caps = {field: float(config.get(key, meant) or 0) for key, (field, meant) in CAPS.items()}
    config = {"head_dim": gemma3.WIDTH, **config}
    return llama.from_config(config) | olmo3.from_kinds(config, every=2) | gemma3.scores(config) | caps
