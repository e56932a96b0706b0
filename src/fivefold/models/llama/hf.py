"""Maps our `llama` to `LlamaForCausalLM` and back."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from fivefold.models.card import card_of
from fivefold.models.hf import NEEDED, Entry, Fields, same
from fivefold.models.llama import torchtitan
from fivefold.models.section import ModelSection

MODEL_TYPE = "llama"
ARCHITECTURE = "LlamaForCausalLM"
TIED = {"lm_head.weight": "model.embed_tokens.weight"}
TITAN = torchtitan.names
LINEAR = "linear"
LIMITS = {"llama3": ("low_freq_factor", "high_freq_factor"), "yarn": ("beta_slow", "beta_fast")}
"""Ways of scaling rotary frequencies (`models.layers.rope_frequencies`), with their names of the two limits."""
OURS = ("norm1", "norm2", "norm1_after", "norm2_after")
NORMS = ("input_layernorm", "post_attention_layernorm")
# Keys of config.json that affect the computation, with the values that our model supports.
GATED: dict[str, tuple[Any, ...]] = {"hidden_act": ("silu", "swish"), "partial_rotary_factor": (1.0, None)}
SUPPORTED = GATED | {"mlp_bias": (False, None), "sliding_window": (None,), "pretraining_tp": (1, None)}


def entries(model: ModelSection, norms: tuple[str, ...] = NORMS) -> list[Entry]:
    """The weight map. norms: their names of a block's two norms, and of those behind sublayers. Biases and norms of
    heads are those of the card."""
    card = card_of(model)

    def norm(ours: str, theirs: str) -> list[Entry]:
        """Scales that are added to 1 are so there, too."""
        return [Entry(f"{ours}.delta" if card.unit_norms else f"{ours}.weight", (f"{theirs}.weight",))]

    biased = card.qkv_biased or model.attention_bias
    assert model.ffn_dim is not None
    d, kv_heads, F = model.head_width, model.kv_heads or model.heads, model.ffn_dim
    rows = (d * model.heads, d * kv_heads, d * kv_heads)
    table = same("embed", "model.embed_tokens")
    for i in range(model.blocks):
        ours, theirs = f"blocks.{i}", f"model.layers.{i}"
        qkv = tuple(f"{theirs}.self_attn.{x}_proj.weight" for x in "qkv")
        gate_up = tuple(f"{theirs}.mlp.{x}_proj.weight" for x in ("gate", "up"))
        for own, name in zip(OURS, norms, strict=False):
            table += norm(f"{ours}.{own}", f"{theirs}.{name}")
        table += [Entry(f"{ours}.attention.qkv.weight", qkv, rows)]
        if biased:
            biases = tuple(name.replace(".weight", ".bias") for name in qkv)
            table += [Entry(f"{ours}.attention.qkv.bias", biases, rows)]
        kinds = ("weight", "bias") if biased and card.out_biased else ("weight",)
        table += same(f"{ours}.attention.out", f"{theirs}.self_attn.o_proj", *kinds)
        for kind in "qk" if card.normed_heads and not model.linear(i) else ():
            table += norm(f"{ours}.attention.norm_{kind}", f"{theirs}.self_attn.{kind}_norm")
        table += [Entry(f"{ours}.mlp.gate_up.weight", gate_up, (F, F))]
        table += same(f"{ours}.mlp.down", f"{theirs}.mlp.down_proj")
    table += norm("norm", "model.norm")
    return table + ([] if model.tie_embeddings else same("head", "lm_head"))


FIELDS: Fields = {
    "vocab_size": ("vocab_size", NEEDED),
    "hidden_size": ("dim", NEEDED),
    "intermediate_size": ("ffn_dim", NEEDED),
    "num_hidden_layers": ("layers", NEEDED),
    "num_attention_heads": ("heads", NEEDED),
    "num_key_value_heads": ("kv_heads", None),
    "max_position_embeddings": ("seq_len", 2048),
    "initializer_range": ("init_std", 0.02),
    "rms_norm_eps": ("norm_eps", 1e-6),
    "tie_word_embeddings": ("tie_embeddings", False),
}


def to_config(model: ModelSection) -> dict[str, Any]:
    return decoder(model) | {"attention_bias": model.attention_bias, "mlp_bias": False}


def decoder(model: ModelSection) -> dict[str, Any]:
    """The keys that all decoders with rotary positions have, besides FIELDS."""
    return {
        "head_dim": model.head_width,
        "hidden_act": "silu",
        # transformers 4 reads the first two, 5 the third.
        "rope_theta": model.rope_theta,
        "rope_scaling": _scaling(model),
        "rope_parameters": (_scaling(model) or {"rope_type": "default"}) | {"rope_theta": model.rope_theta},
        "attention_dropout": 0.0,
        "pad_token_id": None,  # or its row of the embedding has no gradient, in kinds that have one by default
    }


def _scaling(model: ModelSection) -> dict[str, Any] | None:
    if model.rope_factor == 1:
        return None
    if model.rope_scaling == LINEAR:
        return {"rope_type": LINEAR, "factor": model.rope_factor}
    low, high = LIMITS[model.rope_scaling]
    own = {"attention_factor": model.rope_amplitude, "truncate": model.rope_truncate}
    return (own if model.rope_scaling == "yarn" else {}) | {
        "rope_type": model.rope_scaling,
        "factor": model.rope_factor,
        low: model.rope_low,
        high: model.rope_high,
        "original_max_position_embeddings": model.rope_context,
    }


def from_config(config: Mapping[str, Any]) -> dict[str, Any]:
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    width, heads, head_dim = config["hidden_size"], config["num_attention_heads"], config.get("head_dim")
    return scaled(rope) | {
        "head_dim": None if head_dim is None or head_dim * heads == width else head_dim,
        "attention_bias": bool(config.get("attention_bias")),
        "rope_theta": float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0),
    }


def scaled(rope: Mapping[str, Any]) -> dict[str, Any]:
    """The fields for a scaling of rotary frequencies."""
    kind = _kind(rope)
    if kind not in (LINEAR, *LIMITS) or rope["factor"] == 1:
        return {}
    if kind == LINEAR:
        return {"rope_scaling": kind, "rope_factor": float(rope["factor"])}
    low, high = LIMITS[kind]
    if kind == "yarn":
        rope = {low: 1, high: 32} | dict(rope)
    found = {
        "rope_scaling": kind,
        "rope_factor": float(rope["factor"]),
        "rope_low": float(rope[low]),
        "rope_high": float(rope[high]),
        "rope_context": rope["original_max_position_embeddings"],
    }
    if kind == "yarn":
        found["rope_truncate"] = rope.get("truncate", True)
        found["rope_mscale"] = round((amplitude(rope) - 1) / (0.1 * math.log(rope["factor"])), 9)
    return found


def amplitude(rope: Mapping[str, Any]) -> float:
    """The factor on queries and keys that YaRN's parameters mean."""

    def grown(mscale: float) -> float:
        return 1 + 0.1 * mscale * math.log(max(1.0, rope["factor"]))

    given, mscale, of_all = (rope.get(key) for key in ("attention_factor", "mscale", "mscale_all_dim"))
    if given is not None:
        return given
    return grown(mscale) / grown(of_all) if mscale and of_all else grown(1)


def problems(config: Mapping[str, Any], partly: bool = False) -> list[str]:
    """Problems that `SUPPORTED` cannot express: rotary embeddings that are scaled in another way. partly: a head may
    rotate in part."""
    found = []
    for key in ("rope_scaling", "rope_parameters"):
        rope = config.get(key) or {}
        if (kind := _kind(rope)) not in ("default", LINEAR, *LIMITS):
            kinds = " and ".join(f'"{kind}"' for kind in (LINEAR, *LIMITS))
            found.append(f'{key} has rope_type "{kind}"; only "default" (unscaled), {kinds} are supported')
        elif kind == "yarn" and amplitude(rope) < 1:
            found.append(
                f"{key} has an attention_factor of {amplitude(rope):g}; only 1 and more are supported"
            )
        elif rope.get("partial_rotary_factor", 1.0) != 1.0 and not partly:
            found.append(
                f"{key} has partial_rotary_factor {rope['partial_rotary_factor']}; only 1.0 is supported"
            )
    return found


def _kind(rope: Mapping[str, Any]) -> str:
    return rope.get("rope_type", rope.get("type", "default"))


def rename(name: str) -> str | None:
    """Current name of a weight; None for a buffer that older files store."""
    return None if name.endswith("rotary_emb.inv_freq") else name
