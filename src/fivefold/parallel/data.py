"""Data parallelism (DDP): every rank has the whole model and a share of the batch; gradients are summed.

Master weights, working weights and gradient sums each lie in one flat buffer. The module computes with working weights:
the masters themselves, or a copy of them in another dtype (refreshed once per step, so forward casts nothing). A hook
adds each parameter's gradient to the flat buffer as soon as backward has it, and frees it.

The order of the buffers is roughly the order in which backward finishes. A bucket (sharding/layout.py) is a slice of
the gradient buffer. In the last backward of a step each bucket is summed over the ranks once its gradients are there,
so communication overlaps with the rest of backward (Li et al., arXiv 2006.15704). Earlier microbatches communicate
nothing. `layout.compress` sums buckets with fewer bytes (comm/compress.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fivefold.comm import Scheduled, Started
from fivefold.comm.compress import CompressedSum, Messages, compressed_sum
from fivefold.kernels import rounded
from fivefold.kernels.elementwise import add_gradient
from fivefold.parallel.replica import Hooked
from fivefold.schedules.compression import Compressor
from fivefold.sharding.layout import buckets
from fivefold.sharding.parts import Part
from fivefold.sharding.units import buffer_order


def allocate(params: Mapping[str, Tensor], device: torch.device) -> tuple[Tensor, dict[str, Tensor]]:
    """The flat buffer of masters for parameters in the module's order, in their dtype, and its views by name. It is
    made before the module has memory, and initial values are written into the views: start-up never holds the weights
    twice."""
    (dtype,) = {p.dtype for p in params.values()}
    flat = torch.empty(sum(p.numel() for p in params.values()), dtype=dtype, device=device)
    return flat, views(flat, {name: p.shape for name, p in buffer_order(list(params.items()))})


def views(flat: Tensor, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """The parts of a flat buffer in these shapes, one after the other."""
    parts = flat.split([math.prod(shape) for shape in shapes.values()])
    return {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}


class Sum(Protocol):
    """What takes the gradients of a replica to other ranks, from `enable_sync` to `wait`."""

    compressed: Sequence[CompressedSum]

    def enable_sync(self) -> None: ...
    def wait(self) -> None: ...
    def kept(self) -> list[Tensor]: ...


class DataParallel(Hooked):
    """ZeRO stage 0. Every rank has masters, gradients and optimizer states of `params` (by name, in the module's order,
    on their device in the masters' dtype). Gradients are summed by `sums`, in dtype `reduce`; or a worker's `sum`
    pushes them to parameter servers.

    names, params, offsets: in the order of the flat buffers. on_gradient: called with a parameter's index after its
    gradient of this backward has been added. layers: those whose weights are rounded once per
    step, for all matmuls, by their names.
    """

    def __init__(
        self,
        params: dict[str, nn.Parameter],
        parts: dict[str, Part],
        compute_dtype: torch.dtype,
        sums: Scheduled,
        reduce: torch.dtype = torch.float32,
        flat_master: Tensor | None = None,
        compressor: Compressor | None = None,
        bucket_bytes: float = math.inf,
        masters: dict[str, Tensor] | None = None,
        device: torch.device | None = None,
        summed: torch.dtype | None = None,
        layers: Mapping[str, Any] | None = None,
    ):
        """flat_master: the buffer that `allocate` made for the parameters and that they are views of. None: they have
        memory of their own, as in a user's module, and are copied. masters: they lie elsewhere, in host memory or on
        disk, and do not compute (parallel/offload); device: of the weights that do. compressor: see `GradientSum`.
        bucket_bytes: see `buckets`. summed: the dtype of gradients; None: the masters'."""
        self.parts = {name: parts[name] for name in params}
        self.names, self.params = buffer_order(list(params)), buffer_order(list(params.values()))
        (dtype,) = {p.dtype for p in self.params}
        self.offsets = [0]
        for p in self.params:
            self.offsets.append(self.offsets[-1] + p.numel())
        device = device or self.params[0].device
        by_name = dict(zip(self.names, self.params, strict=True))
        shapes = {name: p.shape for name, p in by_name.items()}
        self.flat_grads = torch.zeros(self.offsets[-1], dtype=summed or dtype, device=device)
        if masters is None:
            if flat_master is None:
                flat_master = torch.cat([p.detach().reshape(-1) for p in self.params])
            assert flat_master.shape == (self.offsets[-1],), "another set of parameters"
            masters = views(flat_master, shapes)
        self.flat_master, self.masters, self.gradients = flat_master, masters, views(self.flat_grads, shapes)
        if flat_master is None or compute_dtype != dtype:
            self.flat_working = torch.empty(self.offsets[-1], dtype=compute_dtype, device=device)
            self.working = views(self.flat_working, shapes)
        else:
            self.flat_working = flat_master
        for name, p in by_name.items():
            p.data = (self.working or masters)[name]
        self.on_gradient: Callable[[int], None] = lambda index: None
        self.layers = dict(layers or {})
        self._fresh = [True] * len(self.params)  # no gradient yet in this step
        self.hook()
        self.refresh()
        self.sum: Sum = GradientSum(self, sums, reduce, bucket_bytes, compressor)
        self.compressed = self.sum.compressed

    def add(self, index: int, gradient: Tensor) -> None:
        start, end = self.offsets[index], self.offsets[index + 1]
        add_gradient(self.flat_grads[start:end], gradient, self._fresh[index])
        self._fresh[index] = False

    def added(self, index: int) -> None:
        self.on_gradient(index)

    def only_working(self) -> None:
        """Forgets the masters: others have them, and this rank only computes."""
        self.flat_master, self.masters, self.working = self.flat_working, self.working or self.masters, None
        for layer in self.layers.values():  # they arrive at any time
            rounded.forget(layer)
        self.layers.clear()

    def start_step(self) -> None:
        """Forgets the gradients of the last step: the next ones overwrite them."""
        self._fresh = [True] * len(self.params)

    def enable_sync(self) -> None:
        self.sum.enable_sync()

    def finish(self) -> None:
        """Zeroes the gradients that no backward of this step has set, which still hold the last step's values, and
        waits for the sum."""
        lacking = [index for index, fresh in enumerate(self._fresh) if fresh]
        self.allow_zeros(self.names[index] for index in lacking)
        for index in lacking:
            self.flat_grads[self.offsets[index] : self.offsets[index + 1]].zero_()
        self.sum.wait()

    def refresh(self) -> None:
        if self.flat_master is None:
            for name, working in (self.working or {}).items():
                working.copy_(self.masters[name])
        elif self.working is not None:
            self.flat_working.copy_(self.flat_master)
        self.round()

    def round(self) -> None:
        """Rounds the working weights for all matmuls until they change."""
        inside, weights = self.working is not None, self.working or self.masters
        for name, layer in self.layers.items():
            mine = [weights[f"{name}.{matrix}"] for matrix in rounded.matrices(layer)]
            rounded.refresh(layer, mine, inside)

    def update(self, lr: float, scale: Tensor | None, skip: Tensor) -> None:
        if self.flat_working.dtype == torch.bfloat16:
            self.updater.working = self.working
        self.updater.step(self.gradients, lr, scale, skip)
        if self.updater.written:
            self.round()
        elif not self.updater.streamed:
            self.refresh()

    def kept(self) -> dict[str, list[Tensor]]:
        """The working weights, what compression keeps, and the scratch of sums; see `Replica.kept`."""
        hows = (layer.rounded for layer in self.layers.values() if layer.rounded)
        copies = (tensor for how in hows for kept in how.kept for tensor in kept.tensors())
        return {
            "params": [self.flat_working, *(x for x in copies if x.dim())],  # not the scale of a whole tensor
            "gradients": list(self.unsent().values()),
            "buffers": self.sum.kept(),
        }

    def errors(self) -> dict[str, float]:
        errors = [error for one in self.compressed for error in one.errors()]
        return dict(zip(self.names, errors, strict=True)) if errors else {}


class GradientSum:
    """Sums the gradients of a replica over the ranks of an axis, by buckets, in dtype `reduce`.

    Use: `enable_sync()` before the last backward of a step, `wait()` after it. With one rank both do nothing.

    buckets: the indices of parameters whose gradients one message sums. spans: their elements in the flat buffer.
    compressor: None sums all bits. compressed: the compressed sum of each bucket, if there is a compressor.
    """

    def __init__(
        self,
        replica: DataParallel,
        sums: Scheduled,
        reduce: torch.dtype = torch.float32,
        bucket_bytes: float = math.inf,
        compressor: Compressor | None = None,
    ):
        self.flat, self.sums, self.axis, self.reduce = replica.flat_grads, sums, sums.axis, reduce
        shapes = [tuple(p.shape) for p in replica.params]
        self.buckets = buckets([p.numel() for p in replica.params], bucket_bytes)
        self.spans = [
            (replica.offsets[bucket.start], replica.offsets[bucket.stop]) for bucket in self.buckets
        ]
        self.compressed: Sequence[CompressedSum] = ()
        if compressor is not None and self.axis.size > 1:
            self.compressed = [
                compressed_sum(
                    compressor,
                    shapes[bucket.start : bucket.stop],
                    self.axis.for_purpose(f"bucket {number}"),
                    number,
                )
                for number, bucket in enumerate(self.buckets)
            ]
        else:
            for start, stop in self.spans:
                sums.reserve(stop - start, reduce)
        self._bucket_of = [number for number, bucket in enumerate(self.buckets) for _ in bucket]
        self._missing: list[int] = []  # gradients of each bucket
        self._started: list[tuple[Messages, Started]] = []
        self._syncing = False
        replica.on_gradient = self._gradient_ready

    def enable_sync(self) -> None:
        """Marks the next backward as the last of the step: buckets are sent as they become ready."""
        self._syncing = self.axis.size > 1
        self._started, self._missing = [], [len(bucket) for bucket in self.buckets]

    def wait(self) -> None:
        """Waits until every bucket is summed. Buckets with parameters that got no gradient are sent now."""
        if not self._syncing:
            return
        while len(self._started) < len(self.buckets):
            self._start()
        under_way, self._started = self._started, []
        while under_way:  # the next message of each bucket, in the same order on all ranks
            bucket_messages, under_way = under_way, []
            for messages, started in bucket_messages:
                with suppress(StopIteration):
                    under_way.append((messages, messages.send(started())))
        self._syncing = False

    def kept(self) -> list[Tensor]:
        """The scratch of sums."""
        return self.sums.scratch.kept()

    def _gradient_ready(self, index: int) -> None:
        if not self._syncing:
            return
        self._missing[self._bucket_of[index]] -= 1
        # In order only: all ranks must issue the same collectives in the same order.
        while len(self._started) < len(self.buckets) and self._missing[len(self._started)] == 0:
            self._start()

    def _start(self) -> None:
        number = len(self._started)
        part = self.flat[slice(*self.spans[number])]
        messages = self.compressed[number].sum(part) if self.compressed else self._sum(part, number)
        self._started.append((messages, next(messages)))

    def _sum(self, part: Tensor, number: int) -> Messages:
        """Sums a bucket, a slice of the flat buffer, in dtype `reduce`."""
        sent = yield self.sums.start(part.to(self.reduce), f"bucket {number}")
        if sent.dtype != part.dtype:
            part.copy_(sent)
