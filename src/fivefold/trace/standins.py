"""Stand-ins for what a step asks of `torch.cuda`, for the length of a trace: streams, events and random states that do
nothing. PyTorch without a GPU refuses all of it. Nothing is queued in a trace, so nothing is out of order.

Attention calls the kernel that PyTorch picks on NVIDIA GPUs from Ampere on. Without a GPU it would pick another one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from fivefold.kernels.fake import FakeMode
from fivefold.parallel.offload import disk
from fivefold.trace import private

DEVICE = torch.device("cuda", 0)
CAPABILITY = (9, 0)
"""Of the GPU that the trace stands for: an H100's. "auto" is bf16 from (8, 0) on."""
waits: list[Callable[[str], None]] = []
"""Called with a name whenever the host would wait for the device."""


class Stream:
    """A queue that is always empty."""

    device = DEVICE
    stream_id, device_index, device_type = 0, 0, 1  # FSDP2 hands them on since torch 2.15

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def wait_stream(self, stream: Stream) -> None:
        pass

    def wait_event(self, event: Event) -> None:
        pass

    def record_event(self, event: Event | None = None) -> Event:
        return event or Event()

    def synchronize(self) -> None:
        _waited("stream")


class Event:
    """An event that has happened."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def record(self, stream: Stream | None = None) -> None:
        pass

    def wait(self, stream: Stream | None = None) -> None:
        pass

    def synchronize(self) -> None:
        _waited("event")


def _waited(name: str) -> None:
    for seen in waits:
        seen(name)


@contextmanager
def a_gpu() -> Iterator[None]:
    """Lets code inside use one GPU of PyTorch's, as far as a step does. Blocks are not compiled."""
    queue = Stream()
    cuda = {
        "Stream": Stream,
        "Event": Event,
        "current_stream": lambda device=None: queue,
        "stream": lambda stream: nullcontext(stream),
        "synchronize": lambda device=None: _waited("device"),
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "is_current_stream_capturing": lambda: False,
        "set_device": lambda device: None,
        "device": lambda device: nullcontext(),
        "get_device_capability": lambda device=None: CAPABILITY,
        "manual_seed_all": lambda seed: None,
        "get_rng_state": lambda device="cuda": torch.empty(16, dtype=torch.uint8),
        "set_rng_state": lambda state, device="cuda": None,
        "_initialized": True,
        "_lazy_init": lambda: None,
    }
    with ExitStack() as stack:
        for name, value in cuda.items():
            _set(stack, torch.cuda, name, value)
        _set(stack, private.fake_tensor, "init_gpu_context", lambda device: None)
        _set(stack, torch.compiler, "disable", lambda function: function)
        _set(stack, nn.Module, "compile", lambda module, *_, **__: None)
        _set(stack, Tensor, "record_stream", lambda tensor, stream: None)
        _set(stack, F, "scaled_dot_product_attention", _gpu_attention)
        yield


def _set(stack: ExitStack, owner: Any, name: str, value: Any) -> None:
    before = getattr(owner, name)
    stack.callback(setattr, owner, name, before)
    setattr(owner, name, value)


def _gpu_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Flash attention in half precision. In fp32 the memory-efficient kernel, or separate operations for groups of
    heads, which that kernel does not know."""
    assert attn_mask is None, "a step's attention has no mask"
    if q.dtype in (torch.bfloat16, torch.float16):
        d = q.shape[-1]
        q, k, v = (F.pad(x, (0, -d % 8)) for x in (q, k, v))
        return torch.ops.aten._scaled_dot_product_flash_attention(
            q, k, v, dropout_p, is_causal, scale=scale or 1 / math.sqrt(d)
        )[0][..., :d]
    if not enable_gqa:
        return torch.ops.aten._scaled_dot_product_efficient_attention(
            q, k, v, None, True, dropout_p, is_causal, scale=scale
        )[0]
    return torch.ops.aten._scaled_dot_product_attention_math(
        q, k, v, None, dropout_p, is_causal, scale=scale, enable_gqa=True
    )[0]


class Creating(TorchFunctionMode):
    """Makes tensors fake that are created on the GPU, or sent there, where `fake` is not entered: modules are built
    outside of it, on "meta". Also where PyTorch itself would copy from the CPU before anybody sees it."""

    def __init__(self, fake: FakeMode) -> None:
        super().__init__()
        self.fake = fake

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        device = kwargs.get("device")
        if device is None or torch.device(device).type != "cuda":
            return func(*args, **kwargs)
        with nullcontext() if self.fake in private.modes() else self.fake:
            if func is torch.tensor:
                return func(*args, **{**kwargs, "device": "cpu"}).to(device)
            return func(*args, **kwargs)


class FakeFile(disk.File):
    """A file whose bytes are a fake tensor. It takes no room on the disk."""

    def __init__(self, owner: disk.Disk, size: int, what: str):
        self.disk, self.size, self.what = owner, size, what
        self.flat = torch.empty(size, dtype=torch.uint8)

    def drop(self) -> None: ...
    def read(self, offset: int, into: Tensor) -> None: ...
    def write(self, offset: int, data: Tensor) -> None: ...
    def close(self) -> None: ...


@contextmanager
def fake_files() -> Iterator[None]:
    """Files that are made inside are fake. Enter `FakeMode` where they are made."""
    real, disk.File = disk.File, FakeFile
    try:
        yield
    finally:
        disk.File = real
