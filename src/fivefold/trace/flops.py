"""Counts the FLOPs of the matmuls that a piece of code computes, recomputation included; a multiply-add counts as two.
Attention on CPUs skips the blocks that a causal mask hides.

    with Flops() as flops:
        ...
    flops.total
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

aten = torch.ops.aten


def _grouped(a: Any, b: Any, *_: Any, **__: Any) -> int:
    """Each row of a (M, K) times one matrix of b (E, K, N); or (K, M) times (M, N) in groups of M."""
    return 2 * math.prod(a.shape[-2:]) * b.shape[-1]


def _attention(q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
    """q k^T and p v, (B, H, T, d), without counting hidden keys as saved."""
    return _products(q, k, 2)


def _attention_backward(dout: Any, q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
    """Recomputed scores, and the gradients of v, of the probabilities, of q and of k."""
    return _products(q, k, 5)


def _products(q: Any, k: Any, count: int) -> int:
    return 2 * count * math.prod(q.shape) * k.shape[2]


def _linear(x: Any, weight: Any, *_: Any, **__: Any) -> int:
    """x (..., D) times weight^T (D, F)."""
    return 2 * math.prod(x.shape) * weight.shape[0]


FORMULAS: dict[Any, Any] = {
    **flop_registry,
    aten._grouped_mm: _grouped,
    aten._scaled_dot_product_flash_attention: _attention,  # PyTorch's refuses groups of heads before torch 2.13
    aten._scaled_dot_product_flash_attention_backward: _attention_backward,
    aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}
if torch.backends.mkldnn.is_available():
    FORMULAS[torch.ops.mkldnn._linear_pointwise] = _linear


class Flops(TorchDispatchMode):
    """total: FLOPs since it was entered. PyTorch's counter lacks grouped matmuls and attention on CPUs; its formulas
    serve for the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # see trace.memory.Tracker

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        self.see(func, args, kwargs, out)
        return out

    def see(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Counts an operation if it is a matmul."""
        formula = FORMULAS.get(func.overloadpacket)
        if formula is not None:
            self.total += formula(*args, **kwargs, out_val=out)
