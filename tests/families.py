"""Small models of families that differ from others by few options, for tests that go over architectures."""

from typing import Any

from fivefold.recipe import ModelSection

FAMILIES: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 5},
    "qwen2": {},
    "smollm3": {"no_rope_every": 2},
    "olmo3": {
        "sliding_window": 5,
        "full_every": 2,
        "rope_local_theta": 10000.0,
        "rope_factor": 4.0,
        "rope_scaling": "yarn",
        "rope_high": 32.0,
        "rope_context": 16,
    },
    "phi3": {"sliding_window": 7, "rotary_dim": 4},
    "gemma3": {"sliding_window": 6, "full_every": 2, "rope_local_theta": 100.0, "head_dim": 10},
    "glm4": {"rotary_dim": 4},
    "qwen3_next": {
        "full_every": 2,
        "rotary_dim": 4,
        "experts": 4,
        "expert_ffn_dim": 16,
        "linear_key_heads": 4,
        "linear_value_dim": 5,
        "norm_eps": 0.1,
    },
    "gemma2": {"sliding_window": 6, "full_every": 2, "score_cap": 2.0, "logit_cap": 3.0, "score_width": 5},
    "gpt_oss": {
        "sliding_window": 6,
        "full_every": 2,
        "experts": 4,
        "experts_per_token": 2,
        "expert_ffn_dim": 16,
        "aux_loss_weight": 0.0,
        "rope_factor": 4.0,
        "rope_scaling": "yarn",
        "rope_truncate": False,
        "rope_high": 32.0,
        "rope_context": 16,
    },
}
"""Fields of `[model]` besides sizes. Heads are at least 8 wide. norm_eps: the norm of a head of linear attention
amplifies rounding where the state answers with little."""


def overrides(arch: str) -> list[str]:
    """A family as a recipe's settings."""
    return [
        f"model.arch={arch}",
        *(f"model.{name}={str(value).lower()}" for name, value in FAMILIES[arch].items()),
    ]


def small(arch: str, **fields: Any) -> ModelSection:
    return ModelSection(**{"arch": arch, "kv_heads": 2} | FAMILIES.get(arch, {}) | fields)
