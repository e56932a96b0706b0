"""Activations in host memory: what forward saves for backward leaves the device, and comes back in backward's order.

Hooks of autograd see every saved tensor. Copies run beside computing (on a GPU in a stream of their own, from and to
pinned memory). When backward asks for a tensor, those saved just before it are read ahead (ZeRO-R, arXiv 1910.02054).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from fivefold.comm import Axis
from fivefold.kernels import private
from fivefold.parallel.offload.disk import Disk
from fivefold.sharding.tiers import READ_AHEAD, SMALLEST


class Saved:
    """A saved tensor. before: the one that was saved before it. host: its copy, a buffer of the pool. here: the copy
    that is read back. copies: to the host, and back; the last one may be under way."""

    def __init__(self, owner: Activations, tensor: Tensor, before: Saved | None):
        self.owner, self.shape, self.before = owner, tensor.shape, before and weakref.ref(before)
        self.storage, self.version = StorageWeakRef(tensor.untyped_storage()), tensor._version
        self.dtype, self.stride = tensor.dtype, tensor.stride()
        self.host = owner.buffer(tensor.nbytes)
        self.here: Tensor | None = None
        self.copies: list[Future[None]] = []
        weakref.finalize(self, owner.give_back, self.host, self.copies)

    def view(self) -> Tensor:
        """The host's copy, in the tensor's shape and strides."""
        return self.host.view(self.dtype).as_strided(self.shape, self.stride)

    def is_of(self, tensor: Tensor) -> bool:
        """True if it is a copy of this very tensor, as it is now."""
        same = not self.storage.expired() and self.version == tensor._version
        return same and (self.shape, self.dtype, self.stride) == (tensor.shape, tensor.dtype, tensor.stride())


@dataclass(frozen=True)
class Part:
    """This rank's part of a tensor that all ranks of an axis have."""

    saved: Tensor | Saved
    shape: torch.Size


class Parts:
    """Inputs of recomputed blocks. Every rank of `axis` keeps a part of each (ZeRO-R's Pa), here on the device."""

    def __init__(self, axis: Axis | None):
        self.axis = axis

    def saving(self) -> AbstractContextManager[object]:
        """The context of forward and backward."""
        return nullcontext()

    def partitioned(self) -> AbstractContextManager[object]:
        """The context in which inputs of recomputed blocks are saved."""
        return nullcontext() if self.axis is None else saved_tensors_hooks(self._divide, self._join)

    def _divide(self, tensor: Tensor) -> Tensor | Saved | Part:
        assert self.axis is not None
        # Inputs of blocks, which tensor-parallel ranks have alike, have the shape of activations
        if tensor.dim() != 3 or not tensor.is_floating_point():
            return self._pack(tensor)
        mine = tensor.detach().reshape(self.axis.size, -1)[self.axis.index]
        packed = self._pack(mine)
        return Part(packed.clone() if isinstance(packed, Tensor) else packed, tensor.shape)

    def _join(self, packed: Tensor | Saved | Part) -> Tensor:
        assert self.axis is not None
        if not isinstance(packed, Part):
            return self._unpack(packed)
        return self.axis.all_gather(self._unpack(packed.saved)).view(packed.shape)

    def _pack(self, tensor: Tensor) -> Tensor | Saved:
        return tensor

    def _unpack(self, packed: Tensor | Saved) -> Tensor:
        assert isinstance(packed, Tensor)
        return packed


class Activations(Parts):
    """Host memory for the activations of one rank.

    weights: tensors that stay. axis: as in `Parts`. held: bytes in host memory now. moved: bytes that have left the
    device so far.
    """

    def __init__(self, disk: Disk, device: torch.device, weights: Iterable[Tensor], axis: Axis | None = None):
        super().__init__(axis)
        self.disk, self.device = disk, device
        self._weights = {private.storage_of(weight) for weight in weights}
        self._pool: dict[int, list[Tensor]] = {}
        self._last: weakref.ref[Saved] | None = None
        self._saved: weakref.WeakValueDictionary[tuple[int, int], Saved] = weakref.WeakValueDictionary()
        # One lane for both ways: a buffer is used again in this order
        self._start = partial(disk.start, what="activations", lane=True)
        self.held = self.moved = 0

    def saving(self) -> saved_tensors_hooks:
        return saved_tensors_hooks(self._pack, self._unpack)

    def buffer(self, size: int) -> Tensor:
        free = self._pool.setdefault(size, [])
        self.held += size
        pinned = self.device.type == "cuda"
        return free.pop() if free else torch.empty(size, dtype=torch.uint8, pin_memory=pinned)

    def pool(self) -> list[Tensor]:
        """The buffers that hold nothing now."""
        return [buffer for free in self._pool.values() for buffer in free]

    def give_back(self, buffer: Tensor, copies: list[Future[None]]) -> None:
        free = self._pool[buffer.numel()]
        self.held -= buffer.numel()
        if copies:  # each begins after the one before
            copies[-1].add_done_callback(lambda _: free.append(buffer))
        else:
            free.append(buffer)

    def _pack(self, tensor: Tensor) -> Tensor | Saved:
        storage = private.storage_of(tensor)
        dense = tensor.numel() == 0 or tensor.untyped_storage().nbytes() >= tensor.nbytes
        root = tensor._base if tensor._base is not None else tensor
        # FSDP2's gathered weights are leaves
        weight = storage in self._weights or (root.is_leaf and root.requires_grad)
        small = tensor.nbytes < SMALLEST or not dense or not _compact(tensor)
        if small or weight or tensor.device.type != self.device.type:
            return tensor
        key = storage, int(tensor.storage_offset())
        found = self._saved.get(key)
        if found is not None and found.is_of(tensor):
            return found
        saved = self._saved[key] = Saved(self, tensor, self._last and self._last())
        self._last = weakref.ref(saved)
        saved.copies.append(self._start(tensor.detach(), saved.view(), out=True))
        self.moved += tensor.nbytes
        return saved

    def _unpack(self, packed: Tensor | Saved) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        self._fetch(packed)
        assert packed.here is not None
        self.disk.arrive(packed.copies[-1:], "activations")
        found, packed.here = packed.here, None
        one = packed
        for _ in range(READ_AHEAD):
            one = one.before and one.before()
            if one is None:
                break
            self._fetch(one)
        return found

    def _fetch(self, saved: Saved) -> None:
        """Starts to read a tensor back."""
        if saved.here is None:
            if self.device.type == "cpu":
                saved.copies[-1].result()  # it has left; a stream keeps the order
            view = saved.view()
            saved.here = torch.empty_strided(view.shape, view.stride(), dtype=view.dtype, device=self.device)
            saved.copies.append(self._start(saved.here, view, out=False))


def _compact(tensor: Tensor) -> bool:
    """True if the elements fill a stretch of memory, in any order: a copy with the same strides is as large."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True
