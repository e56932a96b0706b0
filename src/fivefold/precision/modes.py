"""The one table of dtypes: recipes, the trainer, benchmarks and the planner read it. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Dtype:
    """A format of numbers.

    bytes: per element. torch: the name of torch's dtype that holds it. trains: `precision.mode` can name it, so models
    compute in it, and `precision.reduce`, so gradients can be sent in it. priced: the planner knows which states a
    program keeps that computes in it. multiplied: torch.matmul takes it, so its rate can be measured. stored: tensors
    have it; otherwise it is a way to multiply.
    """

    name: str
    bytes: float
    torch: str
    trains: bool = False
    priced: bool = False
    multiplied: bool = True
    stored: bool = True

    @property
    def masters(self) -> bool:
        """True if training in this dtype needs fp32 master weights beside the working weights (arXiv 1710.03740)."""
        return self.bytes < DTYPES[MASTER].bytes


DTYPES = {
    dtype.name: dtype
    for dtype in (
        Dtype("fp32", 4.0, "float32", trains=True, priced=True),
        Dtype("tf32", 4.0, "float32", stored=False),  # how a GPU may multiply fp32, with 10 bits of fraction
        Dtype("bf16", 2.0, "bfloat16", trains=True, priced=True),
        Dtype("fp16", 2.0, "float16", priced=True),
        Dtype("fp8", 1.0, "float8_e4m3fn", multiplied=False),
    )
}
MASTER = "fp32"
"""The dtype of master weights, sums of gradients and optimizer states."""
TRAINED = tuple(dtype.name for dtype in DTYPES.values() if dtype.trains)
"""The dtypes that models train in."""


def chosen(mode: str, fast_bf16: bool) -> str:
    """The dtype that `precision.mode` stands for. "auto" is bf16 on devices that compute it faster than fp32."""
    return ("bf16" if fast_bf16 else MASTER) if mode == "auto" else mode


def token_bytes(vocab_size: int) -> int:
    """Bytes of a token's id on disk: an unsigned integer that holds every id of the vocabulary."""
    return 2 if vocab_size <= 1 << 16 else 4


def torch_dtype(name: str) -> torch.dtype:
    """torch's dtype of a name in `DTYPES`."""
    import torch

    return getattr(torch, DTYPES[name].torch)
