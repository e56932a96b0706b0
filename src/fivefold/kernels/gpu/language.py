"""Triton if it is installed, and where its kernels run. It is optional: PyTorch's builds for GPUs bring it along, those
for CPUs do not. Without it `jit` leaves a kernel as a function that nobody can launch, and the twins compute."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fivefold.errors import UserError

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # fused multiply-add; Triton 3.10 changes its default
try:
    import triton  # pyright: ignore[reportMissingImports]
    import triton.language as tl  # pyright: ignore[reportMissingImports]
except ImportError:
    triton, tl = None, None
VERSION: str = "" if triton is None else triton.__version__
tl: Any
Kernel = Any
"""What `jit` makes: it is launched as `kernel[grid](...)`."""
if TYPE_CHECKING:  # an argument that a kernel is compiled for; a type checker sees no variable as a type
    constexpr = Any
else:
    constexpr = None if tl is None else tl.constexpr
INTERPRETED = triton is not None and os.environ.get("TRITON_INTERPRET") == "1"
"""Triton's interpreter runs kernels on the CPU, as Triton decided when it was imported."""


def jit(kernel: Callable[..., Any]) -> Kernel:
    return kernel if triton is None else triton.jit(kernel)


def runs(*tensors: Tensor | None) -> bool:
    """True if kernels take these tensors: on a GPU, or in the interpreter. Raises UserError: 16-bit floats of the kind
    that the interpreter multiplies wrongly."""
    given = [t for t in tensors if t is not None]
    if triton is None or any(getattr(t, "fake", False) for t in given):
        return False
    if INTERPRETED and any(t.dtype == torch.bfloat16 for t in given):
        raise UserError(
            "TRITON_INTERPRET=1: Triton's interpreter multiplies bf16 wrongly. Nearest valid: fp32, fp16"
        )
    return INTERPRETED or all(t.is_cuda for t in given)


def blocks(size: int, block: int) -> int:
    """The number of blocks that cover `size`."""
    return -(-size // block)
