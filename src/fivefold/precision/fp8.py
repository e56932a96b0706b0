"""Training in fp8 (kernels/fp8.py), and its choices: what shares a scale, the format of gradients. No torch.

`nanotron` is the row "Nanotron's FP8" of the Ultra-Scale Playbook (Hugging Face, 2025): masters in bf16, sums of
gradients in fp32; weights that multiply, their gradients and all moments in fp8. Formats are those of nanotron's pull
request 70 and its runs with fp8 moments: E4M3 with a power of two per tensor, and E5M2 for gradients of outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fivefold.precision.card import Mode
from fivefold.precision.formats import FORMATS

SCALINGS = ("block", "row", "tensor")
"""`precision.fp8_scaling`."""
TENSOR = "tensor"
"""The one whose scales are those of whole tensors: a tensor is rounded once for all of its products."""
ALONG = "row"
"""The one whose scales are along each matmul's own sum (`Mode.along`)."""
GRADIENTS = {"e5m2": FORMATS["fp8 e5m2"], "e4m3": FORMATS["fp8 e4m3"]}
"""`precision.fp8_backward`."""
BLOCK = 128
"""Numbers along a side of a block."""


def scaling(mode: Mode, fp8_scaling: str) -> str:
    """What shares a scale in a mode; "": it scales no tiles as these modes do. fp8_scaling: the recipe's."""
    return TENSOR if mode.weight else fp8_scaling if "fp8_scaling" in mode.fields else ""


def tile_of_rows(scaling: str, part: Sequence[int]) -> tuple[int, int] | None:
    """(rows, columns) that share a scale in a rank's part (..., r, D) of a weight, if ranks can gather it in 8 bits.
    None: they gather it as it is, since a scale spans ranks, or forward and backward need others. Of a matrix that has
    one scale the ranks agree on the largest number first."""
    rows, columns = part[-2:]
    if scaling == TENSOR and len(part) == 2:
        return rows, columns
    return (BLOCK, BLOCK) if scaling == "block" and rows % BLOCK == columns % BLOCK == 0 else None


def row_bytes(features: int) -> int:
    """Bytes of a row that travels with a number of 8 bits per feature, and a scale in fp32 per block of them."""
    return features + 4 * -(-features // BLOCK)


SKIPS = ("fp8_skip_first", "fp8_skip_last")
"""The fields of all modes that round factors: blocks that stay in the working dtype."""
FP8 = Mode(
    "fp8",
    "bf16",
    products="fp8",
    fields=("fp8_scaling", "fp8_backward", "fp8_dispatch", *SKIPS),
    kernel="fp8",
    formats=tuple(form.name for form in GRADIENTS.values()),
)
CARDS = (
    FP8,
    replace(FP8, name="nanotron", master="bf16", state="fp8", weight="fp8", fields=("rounding",)),
)
