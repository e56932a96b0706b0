"""The undocumented parts of PyTorch that a trace uses. Each comment says what breaks without it; tests/test_trace.py
calls every one."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch._C._autograd import _top_saved_tensors_default_hooks

# A class of fake tensors. Without it shapes that DTensor asks about would count as memory. `init_gpu_context` of its
# module makes a tensor on the GPU: without a stand-in for it sharded weights cannot be made where there is no GPU.
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

__all__ = [
    "FakeStore", "FakeTensor", "fake_tensor", "in_backward", "modes", "saving_hook", "start_memory_history",
    "write_memory_snapshot",
]  # fmt: skip
HISTORY = 200_000
"""Allocations that a memory snapshot holds at most."""


def start_memory_history() -> None:
    """Records allocations of the GPU from now on."""
    torch.cuda.memory._record_memory_history(max_entries=HISTORY)


def write_memory_snapshot(path: str) -> None:
    """Writes what was recorded, for https://pytorch.org/memory_viz, and ends recording. The file is a pickle; this
    program never reads one."""
    torch.cuda.memory._dump_snapshot(path)
    torch.cuda.memory._record_memory_history(enabled=None)


def FakeStore() -> torch.distributed.Store:
    """A store for a process group of any size with this rank only. Without it only one rank can be traced."""
    from torch.testing._internal.distributed.fake_pg import FakeStore as Store

    return Store()


def in_backward() -> bool:
    """True if autograd runs backward in this thread. Without it activations cannot be told from other memory."""
    return torch._C._current_graph_task_id() != -1


def saving_hook() -> Callable[..., object] | None:
    """The innermost hook that sees what forward saves. Checkpointing sets one while it repeats forward. Belongs to
    `in_backward`."""
    hooks = _top_saved_tensors_default_hooks(True)
    return hooks and hooks[0]


def modes() -> list[TorchDispatchMode]:
    """The dispatch modes that are on. Without it a tracker cannot know whether tensors are fake."""
    return _get_current_dispatch_mode_stack()
