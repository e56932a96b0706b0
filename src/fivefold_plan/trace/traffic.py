"""Counts the messages of a piece of code (every collective and transfer, by mesh axis, in bytes) and the FLOPs of its
matmuls, recomputation included; a multiply-add counts as two. Attention on CPUs skips the blocks that a causal mask
hides.

    with Collectives(mesh) as sent:
        ...
    sent.found["all_gather", "shard"]  # [calls, bytes], such as [3, 1200]
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.flop_counter import flop_registry

from fivefold.comm import axis
from fivefold.parallel.mesh import Mesh
from fivefold.sharding.layout import first_names
from fivefold_plan.trace.fake import DispatchMode
from fivefold_plan.trace.memory import tensors_in

OPS = {
    "allreduce_": "all_reduce",
    "_allgather_base_": "all_gather",
    "allgather_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_": "reduce_scatter",
    "alltoall_base_": "all_to_all",
    "alltoall_": "all_to_all",
    "broadcast_": "broadcast",
    "send": "send",
    "recv_": "receive",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
}


class Collectives(DispatchMode):
    """found: {(operation, axis): [calls, bytes]}. The bytes are the larger of input and output: the tensor that is
    summed, gathered, scattered or sent. other: the messages in `found` that this mode saw, but that no `Axis` sent.

    Groups with the same ranks are one, named as in `layout.first_names`.
    """

    def __init__(self, mesh: Mesh):
        super().__init__()
        self.found: dict[tuple[str, str], list[int]] = {}
        self.other: dict[tuple[str, str], list[int]] = {}
        self.first_name = first_names(mesh.layout)
        groups = {name: mesh.axis(name).group for name in self.first_name.values()}
        self.axis_of: dict[str, str] = {g.group_name: name for name, g in groups.items() if g is not None}

    def __enter__(self) -> Collectives:
        self.listen()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.leave()

    def listen(self) -> None:
        """Makes every axis report its messages, until `leave`."""
        axis.counters.append(self._sent)

    def leave(self) -> None:
        axis.counters.remove(self._sent)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.see(func, args)
        return func(*args, **(kwargs or {}))

    def see(self, func: Any, args: Any) -> None:
        """Counts an operation that sends, unless an axis has reported it."""
        if func.namespace not in ("c10d", "_c10d_functional") or axis.handing_over.now:
            return
        op: str = func.__name__.split(".")[0]
        name = next((name for arg in args if (name := self._axis(arg))), None)
        if name is not None:  # as it is of a wait, say
            for table in (self.found, self.other):
                _add(table, OPS.get(op, op), name, max(map(size_of, args)))

    def _sent(self, over: axis.Axis, operation: str, size: int) -> None:
        assert over.group is not None
        name = self.axis_of.get(over.group.group_name) or self.first_name.get(over.name, over.name)
        _add(self.found, operation, name, size)

    def _axis(self, arg: Any) -> str | None:
        if isinstance(arg, str):
            return self.axis_of.get(arg)
        name = group_name(arg)
        return name and self.axis_of[name]


def group_name(arg: Any) -> str | None:
    """The name of a process group among an operator's arguments; None: the argument is another."""
    if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in arg._type().qualified_name():
        return dist.ProcessGroup.unbox(arg).group_name
    return None


def _add(table: dict[tuple[str, str], list[int]], operation: str, name: str, size: int) -> None:
    entry = table.setdefault((operation, name), [0, 0])
    entry[0] += 1
    entry[1] += size


def size_of(arg: Any) -> int:
    """Bytes of a tensor, or of the tensors in nested lists."""
    return sum(tensor.nbytes for tensor in tensors_in(arg))


def _attention(q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
    """q k^T and p v, (B, H, T, d), without counting hidden keys as saved."""
    return 4 * math.prod(q.shape) * k.shape[2]


def _attention_backward(dout: Any, q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
    """Recomputed scores, and the gradients of v, of the probabilities, of q and of k."""
    return 10 * math.prod(q.shape) * k.shape[2]


def _by_document(q: Any, cumulative: Any) -> int:
    """Pairs of tokens, with hidden ones, times the width of q (tokens, H, d). `cumulative` says how many documents
    there are, but not their lengths: a trace's are equally long, up to a token."""
    shorter, longer = divmod(q.shape[0], cumulative.shape[0] - 1)
    pairs = (cumulative.shape[0] - 1 - longer) * shorter**2 + longer * (shorter + 1) ** 2
    return pairs * math.prod(q.shape[1:])


def _flash(q: Any, k: Any, cumulative_q: Any, cumulative_k: Any, *_: Any) -> int:
    """Pairs of a query and a key of one sequence, with hidden ones, times the width of q (B, T, H, d), or (tokens, H,
    d) with cumulative lengths: a fake tensor has those that the host has sent."""
    if cumulative_q is None:
        return math.prod(q.shape) * k.shape[1]
    queries, keys = (getattr(x, "sent", x).diff().long() for x in (cumulative_q, cumulative_k))
    return int((queries * keys).sum()) * math.prod(q.shape[1:])


BY_NAME: dict[str, Any] = {  # these are there once somebody has imported them
    "torch_attn::_varlen_attn": lambda q, k, v, cumulative, *_, **__: 4 * _by_document(q, cumulative),
    "torch_attn::_varlen_attn_backward": lambda dout, q, k, v, out, lse, cumulative, *_, **__: (
        10 * _by_document(q, cumulative)
    ),
    "fivefold::add_product": lambda total, dlogits, x, **_: 2 * math.prod(dlogits.shape) * x.shape[1],
}
FORMULAS: dict[Any, Any] = {
    **flop_registry,
    # Each row of a (M, K) times one matrix of b (E, K, N); or (K, M) times (M, N) in groups of M.
    torch.ops.aten._grouped_mm: lambda a, b, *_, **__: 2 * math.prod(a.shape[-2:]) * b.shape[-1],
    torch.ops.aten._flash_attention_forward: lambda q, k, v, *sequences, **_: 4 * _flash(q, k, *sequences),
    torch.ops.aten._flash_attention_backward: lambda dout, q, k, *more, **_: 10 * _flash(q, k, *more[3:]),
    # PyTorch's refuses groups of heads before torch 2.13.
    torch.ops.aten._scaled_dot_product_flash_attention: _attention,
    torch.ops.aten._scaled_dot_product_flash_attention_backward: _attention_backward,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}
if torch.backends.mkldnn.is_available():
    # x (..., D) times weight^T (D, F)
    FORMULAS[torch.ops.mkldnn._linear_pointwise] = lambda x, w, *_, **__: 2 * math.prod(x.shape) * w.shape[0]


def formula_of(func: Any) -> Callable[..., int] | None:
    """The formula for an operation's FLOPs; None: it is no matmul or attention."""
    return FORMULAS.get(func.overloadpacket) or BY_NAME.get(func._schema.name)


def flops_of(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    """FLOPs of an operation, if it is a matmul. PyTorch's counter lacks grouped matmuls and attention on CPUs; its
    formulas serve for the rest."""
    formula = formula_of(func)
    return 0 if formula is None else formula(*args, **kwargs, out_val=out)
