"""Recomputes activations in backward instead of keeping them from forward: less memory for more work. What a mode keeps
and repeats is a table (`models/recomputation.py`).

- "full": a block keeps its input only; backward runs the whole block again (Chen et al., arXiv 1604.06174). About a
  third more work.
- "selective": attention's scores, softmax and dropout, whose memory grows with T^2 (Korthikanti et al., arXiv
  2205.05198, section 5). Nothing else is repeated, so nothing is sent twice. Attention keeps its queries, keys and
  values. Fused attention of GPUs and a ring of ranks keep nothing with T^2; there this changes nothing.
- "ops:attention+gate+norm": some operations. "attention" and "gate" keep the result of a sublayer's first matmul and
  run all from there. The second matmul is not repeated: its result is not needed, and recomputation stops at the last
  tensor that is. (Layers that communicate or defer their weight gradient save their input only after the matmul, so
  there it is repeated.) "norm": the norm before a sublayer runs again from its own input, which it keeps anyway.

The random state of forward is restored, so gradients equal those of "none" bit for bit. Collectives inside a block run
again with "full", "attention" and "gate"; those of the data axes around it (gathering its weights) stay outside.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from fivefold.kernels import private
from fivefold.models.layers import AddNorm, AttentionCore, Core, Sublayer
from fivefold.models.recomputation import chosen


def apply(
    stage: nn.Module,
    modes: Sequence[str],
    saving: Callable[[], AbstractContextManager[object]] = nullcontext,
    stack: str = "blocks",
) -> None:
    """Makes the blocks of a stage recompute activations. modes: of all blocks of the model. saving: the context in
    which whole blocks save their inputs. stack: the name of the blocks."""
    for number, block in stage.get_submodule(stack).named_children() if stack else ():
        mode = modes[int(number)]
        names = chosen(mode)
        if mode == "full":
            _set(block, "forward", saving)
        for module in block.modules():
            if mode == "selective" and isinstance(module, AttentionCore):
                module.recompute = True
            if isinstance(module, Sublayer):  # what it computes behind its first matmul
                attends = any(isinstance(child, Core) for child in module.children())
                if ("attention" if attends else "gate") in names:
                    _set(module, "finish")
        if "norm" in names:
            for norm, sublayer in getattr(block, "norms", ()):
                _norm(block.get_submodule(norm), block.get_submodule(sublayer))


def _set(
    module: nn.Module, method: str, saving: Callable[[], AbstractContextManager[object]] = nullcontext
) -> None:
    """Wraps a method of one module, not of its class, so that it keeps its inputs only. Parameters and hooks keep their
    names. Without gradients (validation, sampling) it runs unchanged."""
    function: Callable[..., Any] = getattr(module, method)

    @wraps(function)
    def run(*inputs: Any, **options: Any) -> Any:
        if not torch.is_grad_enabled():
            return function(*inputs, **options)
        with saving():
            return checkpoint(function, *inputs, use_reentrant=False, **options)

    setattr(module, method, run)


def _norm(norm: nn.Module, sublayer: nn.Module) -> None:
    """Lets the first matmul of a sublayer keep nothing of its input, the result of `norm`. Backward computes it again.
    Under sequence parallelism the matmul keeps what it gathered, unless it gathers again. In a compiled block a
    checkpoint does this: the graph has both the norm and the matmul."""
    if not isinstance(sublayer, Sublayer) or not sublayer.entry:
        return  # a mixture of experts, whose input has several readers
    entry = sublayer.get_submodule(sublayer.entry)
    compute, multiply = norm.forward, entry.forward
    latest: list[tuple[Tensor, Callable[[], Tensor]]] = []  # (the norm's last result, makes it again)

    def normed(*inputs: Tensor) -> Any:
        if torch.compiler.is_compiling() and torch.is_grad_enabled():
            if not isinstance(norm, AddNorm):
                return checkpoint(compute, *inputs, use_reentrant=False)
            total = inputs[0] + inputs[1]  # kept, as the input of the norm
            return total, checkpoint(norm.alone, total, use_reentrant=False)
        found = compute(*inputs)
        if torch.is_grad_enabled():
            result, again = found, partial(compute, inputs[0].detach())
            if isinstance(norm, AddNorm):
                total, result = found
                again = partial(norm.alone, total.detach())
            latest[:] = [(result, again)]
        return found

    def multiplied(x: Tensor) -> Tensor:
        if torch.compiler.is_compiling() or not latest or latest[0][0] is not x:
            return multiply(x)
        _, again = latest.pop()
        given = private.storage_of(x)  # not x itself: autograd keeps these functions

        def pack(saved: Tensor) -> Tensor | torch.Size:
            return saved.shape if private.storage_of(saved) == given else saved

        def unpack(packed: Tensor | torch.Size) -> Tensor:
            if isinstance(packed, Tensor):
                return packed
            with torch.no_grad():
                return again().view(packed)

        with saved_tensors_hooks(pack, unpack):
            return multiply(x)

    norm.forward, entry.forward = normed, multiplied
