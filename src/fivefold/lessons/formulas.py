"""Activation memory of a transformer block: the formulas of Korthikanti et al. (arXiv 2205.05198, equations 1 to 6)
beside the bytes that autograd saves for the block of the paper, written out in PyTorch on "meta".

The block is GPT-2's in 16 bits: attention with its scores written out, dropout on probabilities and on both sublayers'
results, GELU, F = 4 h. s: tokens of a sequence, b: sequences, h: width, a: heads, t: tensor-parallel ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from fivefold.lessons.conventions import evaluate

P = 0.1  # dropout; its value changes no size
STATISTICS = 16  # bytes per token: mean and 1 / deviation of two norms, in fp32


@dataclass(frozen=True)
class Shape:
    """The sizes of the formulas."""

    s: int
    b: int
    h: int
    a: int
    t: int = 1


@dataclass(frozen=True)
class Row:
    """A formula and the bytes that were measured. why: the cause of the difference."""

    name: str
    formula: str
    bytes: float
    measured: int
    why: str


class Block(nn.Module):
    """The block on one of t tensor-parallel ranks. Sums over ranks keep nothing, so they are left out. sp: norms,
    dropout and the residual stream have a piece of the sequence; a matmul saves its piece and gathers it again.
    selective: the core of attention is recomputed."""

    def __init__(self, shape: Shape, sp: bool = False, selective: bool = False):
        super().__init__()
        self.shape, self.sp, self.selective, self.part = shape, sp, selective, "norms"
        h, t = shape.h, shape.t
        make = partial(nn.Linear, device="meta", dtype=torch.bfloat16)
        self.norm1, self.norm2 = (nn.LayerNorm(h, device="meta", dtype=torch.bfloat16) for _ in range(2))
        self.qkv, self.out = make(h, 3 * h // t), make(h // t, h)
        self.up, self.down = make(h, 4 * h // t), make(4 * h // t, h)

    def forward(self, x_SBH: Tensor) -> Tensor:
        y = self.norm1(x_SBH)
        self.part = "attention"
        q, k, v = self._enter(y, self.qkv).chunk(3, -1)  # (s, b, h / t) each
        core = partial(checkpoint, self._core, use_reentrant=True, preserve_rng_state=False)
        mixed = core(q, k, v) if self.selective else self._core(q, k, v)
        x_SBH = x_SBH + _dropped(self._leave(self.out(mixed)))
        self.part = "norms"
        y = self.norm2(x_SBH)
        self.part = "mlp"
        inner = nn.functional.gelu(self._enter(y, self.up))
        return x_SBH + _dropped(self._leave(self.down(inner)))

    def _core(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Scores, softmax, dropout and the mixture of values: (s, b, h / t)."""
        n = self.shape
        heads = n.b * n.a // n.t
        q, k, v = (x.reshape(n.s, heads, n.h // n.a).transpose(0, 1) for x in (q, k, v))  # (b a / t, s, d)
        probabilities = torch.bmm(q, k.transpose(1, 2)).softmax(-1)
        mixed = torch.bmm(_dropped(probabilities), v)
        return mixed.transpose(0, 1).reshape(n.s, n.b, n.h // n.t)

    def _enter(self, y: Tensor, linear: nn.Linear) -> Tensor:
        if not self.sp:
            return linear(y)
        return _Gathered.apply(y, linear.weight, self.shape.t)  # pyright: ignore[reportReturnType]

    def _leave(self, y: Tensor) -> Tensor:
        return y[: self.shape.s // self.shape.t] if self.sp else y


class _Gathered(torch.autograd.Function):
    """A matmul of the gathered sequence that saves its own piece of it."""

    @staticmethod
    def forward(ctx: Any, piece: Tensor, weight: Tensor, t: int) -> Tensor:
        ctx.save_for_backward(piece, weight)
        ctx.t = t
        return nn.functional.linear(piece.repeat(t, 1, 1), weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        piece, weight = ctx.saved_tensors
        own = gradient[: piece.shape[0]] @ weight
        return own, gradient.flatten(0, 1).t() @ piece.repeat(ctx.t, 1, 1).flatten(0, 1), None


def _dropped(x: Tensor) -> Tensor:
    """Dropout with a mask of one byte per element."""
    return torch.native_dropout(x, P, True)[0]


def saved(block: Block, full: bool = False) -> Counter[str]:
    """Bytes that autograd saves in forward, by part of the block. full: the whole block is recomputed."""
    n = block.shape
    tokens = n.s // n.t if block.sp else n.s
    x = torch.empty(tokens, n.b, n.h, device="meta", dtype=torch.bfloat16, requires_grad=True)
    function: Callable[[Tensor], Tensor] = block
    if full:
        function = partial(checkpoint, block, use_reentrant=True, preserve_rng_state=False)
    with _counting(block) as found:
        function(x * 1)  # as the result of the block before
    return found


@contextmanager
def _counting(block: Block) -> Iterator[Counter[str]]:
    found, seen = Counter[str](), [weight.untyped_storage() for weight in block.parameters()]

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if all(storage._cdata != other._cdata for other in seen):
            seen.append(storage)  # kept, so that no other gets its address
            found[block.part] += storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        yield found


def rows(n: Shape) -> list[Row]:
    """All formulas for one block and one microbatch. What grows with s^2 is softmax, dropout's mask and its result."""
    one = replace(n, t=1)
    parts = saved(Block(one))
    measured = {
        ("attention", "11 s b h + 5 a b s^2"): parts["attention"],
        ("MLP", "19 s b h"): parts["mlp"],
        ("layer norms", "4 s b h"): parts["norms"],
        ("a block (1)", "34 s b h + 5 a b s^2"): parts.total(),
        ("full", "2 s b h"): saved(Block(one), full=True).total(),
        ("selective", "34 s b h"): saved(Block(one, selective=True)).total(),
    }
    if n.t > 1:
        measured |= {
            ("tp (2)", "10 s b h + (24 s b h + 5 a b s^2) / t"): saved(Block(n)).total(),
            ("tp, sp (4)", "(34 s b h + 5 a b s^2) / t"): saved(Block(n, True)).total(),
            ("tp, sp, selective (6)", "34 s b h / t"): saved(Block(n, True, True)).total(),
        }
    return [_row(name, formula, n, size) for (name, formula), size in measured.items()]


def _row(name: str, formula: str, n: Shape, measured: int) -> Row:
    size = evaluate(formula, vars(n))
    why = f"{STATISTICS} s b: mean and 1 / deviation of both norms, in fp32"
    if "sp" in name:
        why = f"{STATISTICS} s b / t: the same of a rank's piece"
    return Row(name, formula, size, measured, why if measured != size else "")
