"""Choices of training in fp8: what shares a scale, the format of gradients. No torch."""

from __future__ import annotations

from fivefold.precision.formats import FORMATS

FP8 = "fp8"
"""The products of the mode, and of layers that multiply in it."""
SCALINGS = ("block", "row", "tensor")
"""`precision.fp8_scaling`."""
GRADIENTS = {"e5m2": FORMATS["fp8 e5m2"], "e4m3": FORMATS["fp8 e4m3"]}
"""`precision.fp8_backward`."""
BLOCK = 128
"""Numbers along a side of a block."""
