"""Training in MXFP8 (kernels/mxfp8.py; OCP Microscaling 1.0, arXiv 2310.10537). No torch."""

from fivefold.precision.card import Mode
from fivefold.precision.formats import BLOCKS
from fivefold.precision.fp8 import SKIPS

FORMAT = next(block for block in BLOCKS if block.name == "mxfp8 e4m3")
CARDS = (
    Mode(
        "mxfp8",
        "bf16",
        products="mxfp8",
        fields=SKIPS,
        kernel="mxfp8",
        along=True,
        formats=(FORMAT.element.name,),
    ),
)
