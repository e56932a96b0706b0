"""Training with weights, gradients and moments in fp8 beside bf16 masters, as nanotron does (kernels/nanotron.py).

The row "Nanotron's FP8" of the Ultra-Scale Playbook (Hugging Face, 2025): bf16 masters, sums of gradients in fp32;
weights, gradients and both moments in fp8. Formats as in nanotron's pull request 70 and its runs with fp8 moments: E4M3
with a power of two per tensor, and E5M2 for gradients of outputs. Only layers that round have fp8 weights. No torch.
"""

from __future__ import annotations

from fivefold.precision.card import Mode
from fivefold.precision.formats import FORMATS

OUTPUTS, OTHERS = FORMATS["fp8 e5m2"], FORMATS["fp8 e4m3"]
"""The format of the outputs' gradients, and of everything else in 8 bits."""
CARDS = (
    Mode(
        "nanotron",
        "bf16",
        master="bf16",
        state="fp8",
        weight="fp8",
        products="fp8",
        fields=("rounding",),
        kernel="nanotron",
        formats=(OUTPUTS.name, OTHERS.name),
    ),
)
