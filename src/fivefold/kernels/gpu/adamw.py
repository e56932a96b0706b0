"""AdamW in one pass over memory, with what else happens to a parameter: its gradient times a factor, the working weight
in bf16, the largest |master|.

Bytes of a parameter: this reads the gradient, the master and two moments (16) and writes master, moments and working
weight (14). PyTorch's `_fused_adamw_` reads and writes 28, and passes of their own scale the gradient (8), round the
working weight (6) and look for the largest (4): 46 together.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.library import custom_op

from fivefold.kernels.gpu.language import blocks, constexpr, jit, runs, tl

BLOCK, TURNS, WARPS = 2048, 8, 8
"""Elements at once, and how often a program takes as many: each asks once for the place of the largest."""


@jit
def _adamw_kernel(
    master, gradient, first, second, working, factors, skip, largest, size, own_a, beta_b, own_b, keep, eps,
    WORKING: constexpr, BLOCK: constexpr, TURNS: constexpr,
):  # fmt: skip
    scale, rate, correct = tl.load(factors), tl.load(factors + 1), tl.load(factors + 2)
    takes, most = tl.load(skip) == 0, 0
    for turn in range(TURNS):
        i = (tl.program_id(0).to(tl.int64) * TURNS + turn) * BLOCK + tl.arange(0, BLOCK)
        there = i < size
        p = tl.load(master + i, there, 0.0)
        if takes:
            g = tl.load(gradient + i, there, 0.0) * scale
            m, v = tl.load(first + i, there, 0.0), tl.load(second + i, there, 0.0)
            m += own_a * (g - m)
            v = v * beta_b + own_b * g * g
            p = p * keep - rate * m / (tl.sqrt(v) * correct + eps)
            tl.store(first + i, m, there)
            tl.store(second + i, v, there)
            tl.store(master + i, p, there)
            if WORKING:
                tl.store(working + i, p.to(working.dtype.element_ty), there)
        bits = tl.abs(p).to(tl.int32, bitcast=True)  # as whole numbers NaN is larger than all others
        most = tl.maximum(most, tl.max(tl.where(there, bits, 0), 0))
    tl.atomic_max(largest, most)


@custom_op(
    "fivefold::adamw",
    mutates_args=("master", "first", "second", "working", "largest"),
    schema="(Tensor(a!) master, Tensor gradient, Tensor(b!) first, Tensor(c!) second, Tensor(d!)? working,"
    " Tensor factors, Tensor skip, Tensor(e!) largest, float[] constants) -> ()",
)
def adamw(
    master: Tensor,
    gradient: Tensor,
    first: Tensor,
    second: Tensor,
    working: Tensor | None,
    factors: Tensor,
    skip: Tensor,
    largest: Tensor,
    constants: list[float],
) -> None:
    """A step of a master and its moments, contiguous in fp32. factors (3): of the gradient; the rate over the first
    moment's correction; 1 over the root of the second's. skip: a scalar; where it is 1, nothing changes. largest: a
    scalar, raised to the largest |master|, NaN if any is. constants: 1 - beta 1, beta 2, 1 - beta 2, 1 - lr * decay,
    eps."""
    if not runs(master):
        scale, rate, correct = factors.unbind()
        own_a, beta_b, own_b, keep, eps = constants
        g, takes = gradient * scale, skip == 0
        m, v = torch.lerp(first, g, own_a), second * beta_b + own_b * g * g
        p = master * keep - rate * m / (v.sqrt() * correct + eps)
        for old, new in ((first, m), (second, v), (master, p)):
            old.copy_(torch.where(takes, new, old))
        if working is not None:
            working.copy_(torch.where(takes, master, working))
        largest.copy_(torch.maximum(largest, master.abs().amax()))
        return
    _adamw_kernel[(blocks(master.numel(), BLOCK * TURNS),)](
        master, gradient, first, second, master if working is None else working, factors, skip,
        largest.view(torch.int32), master.numel(), *constants, WORKING=working is not None, BLOCK=BLOCK, TURNS=TURNS,
        num_warps=WARPS,
    )  # fmt: skip


@adamw.register_fake
def _(*_: object) -> None: ...
