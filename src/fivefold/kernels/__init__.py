"""Fused kernels, each with a plain fallback. Functions of tensors; they know nothing of models or ranks."""

from fivefold.kernels.blockwise_attention import attention, qkv_attention
from fivefold.kernels.elementwise import add_rms_norm, rms_norm, rope, swiglu
from fivefold.kernels.loss import linear_cross_entropy
from fivefold.kernels.product import linear

__all__ = [
    "add_rms_norm",
    "attention",
    "linear",
    "linear_cross_entropy",
    "qkv_attention",
    "rms_norm",
    "rope",
    "swiglu",
]
