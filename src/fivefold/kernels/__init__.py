"""Fused kernels, each with a plain fallback. They are functions of tensors, and know nothing of models or ranks.

Names are imported at first use: `kernels.sizes` is read where torch is not loaded.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fivefold.kernels.blockwise_attention import attention, qkv_attention
    from fivefold.kernels.elementwise import (
        add_gradient,
        add_layer_norm,
        add_rms_norm,
        gelu,
        layer_norm,
        rms_norm,
        rope,
        swiglu,
    )
    from fivefold.kernels.latent import latent_heads
    from fivefold.kernels.loss import linear_cross_entropy
    from fivefold.kernels.matmul import input_gradient, linear, weight_gradient

_NAMES = {
    "blockwise_attention": "attention qkv_attention",
    "elementwise": "add_gradient add_layer_norm add_rms_norm gelu layer_norm rms_norm rope swiglu",
    "latent": "latent_heads",
    "loss": "linear_cross_entropy",
    "matmul": "input_gradient linear weight_gradient",
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'fivefold.kernels' has no attribute '{name}'")
    value = getattr(import_module(f"fivefold.kernels.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
