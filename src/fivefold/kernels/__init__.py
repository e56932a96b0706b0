"""Fused kernels, each with a plain fallback. Functions of tensors; they know nothing of models or ranks."""

from torch.nn.functional import linear

from fivefold.kernels.blockwise_attention import attention, qkv_attention
from fivefold.kernels.elementwise import add_rms_norm, rms_norm, rope, swiglu
from fivefold.kernels.loss import linear_cross_entropy

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
