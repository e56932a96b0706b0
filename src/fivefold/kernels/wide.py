"""fp16 is multiplied in fp32 on processors that have no matmul of it: operands are converted, and the result is rounded
to fp16. So sums are in fp32, as in the matrix units of GPUs. PyTorch's own fp16 matmuls are slow there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fivefold.host.cpu import has_cpu_fp16


def widened(*tensors: Tensor) -> bool:
    """True if matmuls take these in fp32. What PyTorch's compiler traces stays as it is."""
    for x in tensors:  # asked at every matmul: the dtype alone decides most often
        if x.dtype != torch.float16 or x.device.type != "cpu":
            return False
    return not torch.compiler.is_compiling() and not has_cpu_fp16()


def wide(x: Tensor) -> Tensor:
    """x as matmuls take it. Nobody should keep it: backward converts the saved tensor again."""
    return x.float() if widened(x) else x
