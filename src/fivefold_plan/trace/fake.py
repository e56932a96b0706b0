"""Fake tensors: they claim to be on a device, and have a shape but no memory. The trainer's step runs on them
unchanged (trace/), for models of any size. Claiming to be on a GPU, they take the code's path for GPUs, and two of them
on different devices do not mix. That takes the guard of fivefold_plan/trace/gpu.py where PyTorch has no GPU.

PyTorch's FakeTensorMode is the same idea, made for its compiler, and takes about 0.1 ms per operation. Here an
operation runs on PyTorch's "meta" device, whose kernels compute shapes only: nothing is converted or cached.

    with FakeMode():
        x = torch.empty(4, 8)
        y = x @ x.T  # Fake((4, 4), torch.float32)

What is used of PyTorch that is not documented has a comment, here and in memory.py and step.py, that says what breaks
without it; tests/test_trace.py uses each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
META, CPU = torch.device("meta"), torch.device("cpu")
FROM_DATA = (aten.lift_fresh.default, aten.lift_fresh_copy.default)  # torch.tensor
_READS = (aten._local_scalar_dense.default, aten.item.default)
_PUTS = (aten.index_put_.default, aten._index_put_impl_.default)
_IN_PLACE = (aten._fused_sgd_.default, aten._fused_sgd_.tensor_lr)
"""Operations without a meta kernel that write into their arguments and return nothing."""
COPIES = (aten.copy_.default, aten._to_copy.default, aten._foreach_copy_.default)
"""Operations between devices."""


class Fake(Tensor):
    """meta: a plain tensor on "meta" of the same shape. Views share its storage. on: the device it claims to be on.
    pinned: it is in memory of the host that a GPU reads and writes by itself. sent: the numbers that the host has put
    there to send them to the GPU."""

    meta: Tensor
    on: torch.device
    fake = True  # `native.call` asks this of its first tensor
    pinned: bool
    sent: Tensor | None = None

    @staticmethod
    def __new__(cls, meta: Tensor, on: torch.device = CPU, pinned: bool = False) -> Fake:
        # It claims to be on a device, and has no memory. Else traces would use FakeTensorMode, 10 times slower.
        self: Any = Tensor._make_wrapper_subclass(
            cls, meta.shape, meta.stride(), meta.storage_offset(), dtype=meta.dtype, device=on
        )
        self.meta, self.on, self.pinned = meta, on, pinned
        return self

    # Without PyTorch's own overrides: with them each use of a fake tensor is slower.
    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore[reportAssignmentType]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.meta.untyped_storage()

    @property
    def data(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.detach()

    @data.setter
    def data(self, other: Fake) -> None:
        Tensor.data.__set__(self, other)  # pyright: ignore[reportAttributeAccessIssue]
        self.meta, self.on, self.pinned = other.meta, other.on, other.pinned

    def tolist(self) -> Any:
        """Counts as one read, of all elements."""
        return np.full(self.shape, aten._local_scalar_dense.default(self)).tolist()

    def __repr__(self) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        where = "" if self.on == CPU else f", {self.on}"
        return f"Fake({tuple(self.shape)}, {self.dtype}{where})"


class DispatchMode(TorchDispatchMode):
    """A mode whose method is not wrapped in PyTorch's compiler: that takes two seconds to import."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class FakeMode(DispatchMode):
    """Makes tensors fake that are created inside, on any device but "meta".

    chosen: the number of elements that a mask selects, which shapes depend on. Numbers that are read are 1.
    """

    def __init__(self, chosen: Callable[[Tensor], int] | None = None) -> None:
        super().__init__()
        self.chosen = chosen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # DTensor asks FakeTensorMode about shapes.
        if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
            return func(*args, **(kwargs or {}))
        if any(kind not in (Fake, Tensor, nn.Parameter) for kind in types):
            return NotImplemented  # a DTensor, say, which comes again with what is inside
        if self.chosen is not None and func is aten.index.Tensor and is_mask(args[1]):
            mask = args[1][0]
            return args[0].new_empty(self.chosen(mask), *args[0].shape[mask.dim() :])
        if self.chosen is not None and func is aten.nonzero.default:
            return args[0].new_empty(self.chosen(args[0]), args[0].dim(), dtype=torch.int64)
        return _run(func, args, kwargs or {})


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Runs one operation."""
    if func in _READS and type(args[0]) is Fake:
        return 1.0 if args[0].is_floating_point() else 1
    if func in _PUTS and is_mask(args[1]):
        return args[0]
    if func in _IN_PLACE:
        return None
    if func in FROM_DATA or func is aten._pin_memory.default:  # "meta" pins nothing
        given = args[0]
        meta = torch.empty_strided(given.shape, given.stride(), dtype=given.dtype, device=META)
        found = Fake(meta, CPU, func not in FROM_DATA)
        found.sent = getattr(given, "sent", given)
        return found
    if func is aten._grouped_mm.default and args[0].dtype != torch.bfloat16:
        # Its meta kernel knows bf16 only. Rows (M, K) by columns (K, N); groups of either or of K
        M, N = args[0].shape[-2], args[1].shape[-1]
        both = args[0].dim() == args[1].dim() == 2
        groups = (len(kwargs["offs"] if "offs" in kwargs else args[2]),) if both else ()
        return args[0].new_empty((*groups, M, N))
    if kwargs.pop("pin_memory", None):
        return Fake(func(*args, **kwargs | {"device": META}), CPU, True)
    if func.namespace == "c10d":  # its outputs, which are its first argument, and a finished handle
        work = done_work([])
        return work if len(func._schema.returns) == 1 else (args[0], work)
    owners: dict[int, Fake] = {}
    bare = [_bare(arg, owners) for arg in args]
    named = {name: _bare(arg, owners) for name, arg in kwargs.items()}
    if (on := _to_meta(func, args, named, owners)) is None:
        return func(*args, **kwargs)
    out = func(*bare, **named)
    if (
        func is aten.native_layer_norm.default and on == CPU and bare[2] is not None
        and bare[2].dtype == bare[0].dtype
    ):  # fmt: skip
        out = (out[0], *(statistic.to(bare[0].dtype) for statistic in out[1:]))  # as on CPUs
    result = _dressed(out, owners, on)
    if func is aten._to_copy.default and on == CPU and args[0].device != CPU:
        result.pinned = non_blocking(func, args, kwargs)  # as PyTorch allocates it
    elif func is aten._to_copy.default and on != CPU and type(args[0]) is Fake:
        result.sent = args[0].sent
    return result


def _to_meta(func: Any, args: Any, kwargs: dict[str, Any], owners: dict[int, Fake]) -> torch.device | None:
    """Sends the result to "meta". Returns the device that it claims to be on; None: neither arguments nor result are
    fake. Raises RuntimeError: the arguments are on several devices, or on another than the operation's."""
    device = kwargs.get("device")
    if device is not None:
        if device.type == "meta" and not owners:
            return None
        kwargs["device"] = META
        return device if device.type == "cpu" or device.index is not None else torch.device(device.type, 0)
    if not owners:
        if any(isinstance(item, Tensor) for arg in args for item in (arg if type(arg) is list else (arg,))):
            return None
        if any(argument.name == "device" for argument in func._schema.arguments):
            kwargs["device"] = META
        return CPU
    # A number of the CPU, a tensor without dims, goes anywhere.
    places = [tensor.on for tensor in owners.values()]
    if all(on == CPU for on in places) or func in COPIES:
        return places[0]
    wide = {tensor.on for tensor in owners.values() if tensor.dim()}
    wide |= {CPU for arg in args if type(arg) is Tensor and arg.dim() and arg.device == CPU}
    if len(wide) > 1 or func.namespace == "mkldnn" or "_for_cpu" in func.__name__:
        raise RuntimeError(f"{func} does not take tensors on {', '.join(sorted(map(str, {*places, *wide})))}")
    return next(iter(wide), next(on for on in places if on != CPU))


def _bare(arg: Any, owners: dict[int, Fake]) -> Any:
    """Replaces fake tensors in an argument by their meta tensors. Real tensors without dims act as numbers in type
    promotion, so they stay; of other real tensors only the shape is kept."""
    kind = type(arg)
    if kind is Fake:
        meta = arg.meta
        owners[id(meta)] = arg
        return meta
    if kind is list or kind is tuple:
        return [_bare(item, owners) for item in arg]
    if isinstance(arg, Tensor) and arg.dim() and arg.device.type != "meta":
        return torch.empty_strided(arg.shape, arg.stride(), dtype=arg.dtype, device=META)
    return arg


def _dressed(out: Any, owners: dict[int, Fake], on: torch.device) -> Any:
    """Wraps a result: an argument that is returned stays the same object, others become new fake tensors."""
    kind = type(out)
    if kind is Tensor:
        if id(out) in owners:
            return owners[id(out)]
        address = out.untyped_storage()._cdata  # it may be a view
        return Fake(out, on, any(o.pinned and o.untyped_storage()._cdata == address for o in owners.values()))
    if kind is list or kind is tuple:
        return kind([_dressed(item, owners, on) for item in out])
    return out


def done_work(kept: object) -> Any:
    """The handle of a finished collective, which keeps something until it is dropped. Without it collectives cannot be
    traced."""
    from torch._C._distributed_c10d import _create_work_from_future  # pyright: ignore[reportAttributeAccessIssue]

    done: torch.futures.Future[object] = torch.futures.Future()
    done.set_result(kept)
    return _create_work_from_future(done).boxed()


def non_blocking(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """True if the host does not wait for one of `COPIES`."""
    return kwargs.get("non_blocking", func is not aten._to_copy.default and len(args) > 2 and args[2])


def is_mask(indices: Any) -> bool:
    """True if an index is one mask, whose values determine the result's shape."""
    return len(indices) == 1 and indices[0] is not None and indices[0].dtype == torch.bool
