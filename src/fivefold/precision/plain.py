"""The modes whose matmuls round no factor. No torch."""

from __future__ import annotations

from fivefold.precision.card import Mode

ROUNDINGS = ("stochastic", "kahan", "nearest")
"""The values of `precision.rounding`; see optim/rounding.py."""
CARDS = (
    Mode("fp32", "fp32", auto=True),
    Mode("tf32", "fp32", products="tf32", gpu=True),
    Mode("bf16", "bf16", auto=True),
    Mode("bf16_pure", "bf16", master="bf16", gradient="bf16", state="bf16", fields=("rounding",)),
    Mode("fp16", "fp16", scaled=True, fields=("loss_scale", "loss_scale_every")),
)
