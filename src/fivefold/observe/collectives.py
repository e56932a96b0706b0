"""Counts what a piece of code sends: every collective and transfer, by the axis of the mesh it runs over, in bytes.

with Collectives(mesh) as sent:
    ...
sent.found["all_gather", "shard"]  # [calls, bytes], such as [3, 1200]
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fivefold.parallel.mesh import Mesh

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
NAMES = ("pp", "tp", "cp", "shard", "replicate", "dp", "batch", "all", "ep", "edp", "eshard")


class Collectives(TorchDispatchMode):
    """found: {(operation, axis): [calls, bytes]}; the bytes are those of the larger of input and output: what is summed
    in an all-reduce, the whole that is gathered or scattered, what is sent.

    Groups that have the same ranks are one: it goes by the first of NAMES. `axes` puts others first.
    """

    def __init__(self, mesh: Mesh, *axes: str):
        super().__init__()
        self.found: dict[tuple[str, str], list[int]] = {}
        self.axis_of: dict[str, str] = {}
        for name in (*axes, *NAMES):
            group = mesh.group(name)
            if group is not None:
                self.axis_of.setdefault(group.group_name, name)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            self._count(func.__name__.split(".")[0], args)
        return func(*args, **(kwargs or {}))

    def _count(self, op: str, args: Any) -> None:
        axis = next((axis for arg in args if (axis := self._axis(arg))), None)
        if axis is None:  # waiting, say
            return
        entry = self.found.setdefault((OPS.get(op, op), axis), [0, 0])
        entry[0] += 1
        entry[1] += max(map(size_of, args))

    def _axis(self, arg: Any) -> str | None:
        if isinstance(arg, str):
            return self.axis_of.get(arg)
        if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in arg._type().qualified_name():
            return self.axis_of[dist.ProcessGroup.unbox(arg).group_name]
        return None


def size_of(arg: Any) -> int:
    """Bytes of a tensor, or of the tensors in nested lists."""
    if isinstance(arg, Tensor):
        return arg.nbytes
    return sum(map(size_of, arg)) if isinstance(arg, list | tuple) else 0
