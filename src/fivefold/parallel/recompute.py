"""Recomputes activations in backward instead of keeping them from forward: less memory for more work. It wraps the
methods that `models/recomputation.py` names.

- "full": a block keeps its input only; backward runs the whole block again (Chen et al., arXiv 1604.06174). About a
  third more work.
- "selective": a sublayer keeps the result of its first matmul and recomputes from there the parts that are cheap for
  the memory they take: attention, the gate or GELU (Korthikanti et al., arXiv 2205.05198, section 5). The second matmul
  is not repeated: its result is not needed, and recomputation stops at the last tensor that is. (Layers that
  communicate or defer their weight gradient save their input only after the matmul, so there it is repeated.)

"Selective" keeps, per token and block of llama, in units of D: inputs and results of the norms (4), queries, keys and
values ((H + 2K) / H), gate and up (2 F / D). It drops attention's probabilities (which are kept up to T 1024), its
output, and the gate's.

The random state of forward is restored, so dropout drops the same elements, and gradients equal those of "none" bit for
bit. Collectives inside a block (tensor, sequence, context, expert parallelism) run again; all ranks reach them in the
same order, that of their backward. Collectives of the data axes around a block (gathering its weights) stay outside.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fivefold.models.base import LanguageModel
from fivefold.models.layers import Sublayer
from fivefold.models.recomputation import region


def apply(stage: LanguageModel, mode: str) -> None:
    """Makes the blocks of a stage recompute activations: mode is "none", "selective" or "full"."""
    if (runs := region(mode).runs) is None:
        return
    kind, method = runs
    for block in stage.blocks.values():
        for module in (block,) if kind == "block" else block.modules():
            if kind == "block" or isinstance(module, Sublayer):
                _set(module, method)


def _set(module: nn.Module, method: str) -> None:
    """Replaces a method of one module, not of its class. Names of parameters and hooks do not change."""
    setattr(module, method, _computed_again(getattr(module, method)))


def _computed_again(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a function so that it keeps its inputs only. Without gradients (validation, sampling) it is called
    unchanged."""

    @wraps(function)
    def run(*inputs: Any, **options: Any) -> Any:
        if not torch.is_grad_enabled():
            return function(*inputs, **options)
        return checkpoint(function, *inputs, use_reentrant=False, **options)

    return run
