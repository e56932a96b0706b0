"""Training in fp8 (kernels/fp8.py), and its choices: what shares a scale, the format of gradients. No torch."""

from __future__ import annotations

from fivefold.precision.card import Mode
from fivefold.precision.formats import FORMATS

SCALINGS = ("block", "row", "tensor")
"""`precision.fp8_scaling`."""
GRADIENTS = {"e5m2": FORMATS["fp8 e5m2"], "e4m3": FORMATS["fp8 e4m3"]}
"""`precision.fp8_backward`."""
BLOCK = 128
"""Numbers along a side of a block."""
SKIPS = ("fp8_skip_first", "fp8_skip_last")
"""The fields of all modes that round factors: blocks that stay in the working dtype."""
CARDS = (
    Mode(
        "fp8",
        "bf16",
        products="fp8",
        fields=("fp8_scaling", "fp8_backward", *SKIPS),
        kernel="fp8",
        formats=tuple(form.name for form in GRADIENTS.values()),
    ),
)
