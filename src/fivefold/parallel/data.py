"""Data parallelism (DDP): every rank has the whole model and a share of the batch; gradients are summed.

The sum runs in buckets (sharding/shares.py), slices of the flat gradient buffer (parallel/flat.py). In the last
backward of a step each bucket starts once its gradients are there, so communication overlaps with the rest of backward
(Li et al., arXiv 2006.15704). Earlier microbatches communicate nothing. `layout.compress` sums buckets with fewer bytes
(comm/compress).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from fivefold.comm import Started, Summation
from fivefold.comm.compress import CompressedSum, compressed_sum
from fivefold.comm.compress.base import Messages
from fivefold.parallel.flat import Weights
from fivefold.parallel.replica import Replica
from fivefold.schedules.compression import Compressor
from fivefold.sharding.parts import Part
from fivefold.sharding.shares import buckets


class Sum(Protocol):
    """What takes the gradients of `Weights` to other ranks, from `enable_sync` to `wait`."""

    compressed: Sequence[CompressedSum]

    def enable_sync(self) -> None: ...
    def wait(self) -> None: ...
    def kept(self) -> list[Tensor]: ...


class DataParallel(Replica):
    """ZeRO stage 0. Every rank has masters, gradients and optimizer states of `params`. Gradients are summed by `sums`,
    in dtype `reduce`; or a worker's `sum` pushes them to parameter servers."""

    def __init__(
        self,
        params: dict[str, nn.Parameter],
        parts: dict[str, Part],
        compute_dtype: torch.dtype,
        sums: Summation,
        reduce: torch.dtype = torch.float32,
        flat_master: Tensor | None = None,
        compressor: Compressor | None = None,
        bucket_bytes: float = math.inf,
        masters: dict[str, Tensor] | None = None,
        device: torch.device | None = None,
    ):
        """flat_master, masters, device: see `Weights`. compressor: see `GradientSum`. bucket_bytes: see `buckets`."""
        self.parts = {name: parts[name] for name in params}
        self.weights = Weights(params, compute_dtype, flat_master, masters, device)
        self.sum: Sum = GradientSum(self.weights, sums, reduce, bucket_bytes, compressor)
        self.masters, self.gradients = self.weights.master, self.weights.grads
        separate = self.weights.flat_working is not self.weights.flat_master
        self.working = self.weights.working if separate else None
        self.compressed = self.sum.compressed

    def only_working(self) -> None:
        """Forgets the masters: others have them, and this rank only computes."""
        self.weights.forget_masters()
        self.masters = self.weights.master

    def start_step(self) -> None:
        self.weights.start_step()

    def enable_sync(self) -> None:
        self.sum.enable_sync()

    def collect(self) -> None:
        self.weights.collect()

    def finish(self) -> None:
        self.sum.wait()

    def refresh(self) -> None:
        self.weights.refresh()

    def close(self) -> None:
        self.weights.close()

    def update(self, lr: float, scale: Tensor | None, skip: Tensor) -> None:
        if self.weights.flat_working.dtype == torch.bfloat16:
            self.updater.working = self.working
        self.updater.step(self.gradients, lr, scale, skip)
        if not (self.updater.streamed or self.updater.written):
            self.refresh()

    def kept(self) -> dict[str, list[Tensor]]:
        """The working weights, what compression keeps, and the scratch of sums; see `Replica.kept`."""
        return {
            "params": [self.weights.flat_working],
            "gradients": list(self.unsent().values()),
            "buffers": self.sum.kept(),
        }

    def errors(self) -> dict[str, float]:
        found = [error for one in self.compressed for error in one.errors()]
        return dict(zip(self.weights.names, found, strict=True)) if found else {}

    def watch(self, seen: Callable[[Tensor], None], names: set[str]) -> None:
        """Calls `seen` with the gradient of each of these parameters in every microbatch."""
        of = self.weights.names
        self.weights.seen = lambda index, gradient: seen(gradient) if of[index] in names else None


class Bucket:
    """Parameters whose gradients one all-reduce sums: elements start .. end of the flat buffer. waiting: the number of
    gradients still missing."""

    def __init__(self, indices: range, offsets: list[int]):
        self.indices, self.waiting = indices, 0
        self.start, self.end = offsets[indices.start], offsets[indices.stop]


class GradientSum:
    """Sums the gradients of `weights` over the ranks of an axis, by buckets, in dtype `reduce`.

    Use: `enable_sync()` before the last backward of a step, `wait()` after it. With one rank both do nothing.

    compressor: None sums all bits. compressed: the compressed sum of each bucket, if there is a compressor.
    """

    def __init__(
        self,
        weights: Weights,
        sums: Summation,
        reduce: torch.dtype = torch.float32,
        bucket_bytes: float = math.inf,
        compressor: Compressor | None = None,
    ):
        self.weights, self.sums, self.axis, self.reduce = weights, sums, sums.axis, reduce
        shapes = [tuple(p.shape) for p in weights.params]
        some = buckets([p.numel() for p in weights.params], bucket_bytes)
        self.buckets = [Bucket(indices, weights.offsets) for indices in some]
        self.compressed: Sequence[CompressedSum] = ()
        if compressor is not None and self.axis.size > 1:
            self.compressed = [
                compressed_sum(
                    compressor,
                    shapes[indices.start : indices.stop],
                    self.axis.for_purpose(f"bucket {number}"),
                    number,
                )
                for number, indices in enumerate(some)
            ]
        else:
            for bucket in self.buckets:
                sums.reserve(bucket.end - bucket.start, reduce)
        self._bucket_of = [bucket for bucket in self.buckets for _ in bucket.indices]
        self._started: list[tuple[Messages, Started]] = []
        self._syncing = False
        weights.on_gradient = self._gradient_ready

    def enable_sync(self) -> None:
        """Marks the next backward as the last of the step: buckets are sent as they become ready."""
        self._syncing = self.axis.size > 1
        self._started = []
        for bucket in self.buckets:
            bucket.waiting = len(bucket.indices)

    def wait(self) -> None:
        """Waits until every bucket is summed. Buckets with parameters that got no gradient are sent now."""
        self.weights.finish_gradients()
        if not self._syncing:
            return
        while len(self._started) < len(self.buckets):
            self._start()
        under_way, self._started = self._started, []
        while under_way:  # the next message of each bucket, in the same order on all ranks
            under_way = [
                (messages, started)
                for messages, last in under_way
                if (started := _next(messages, last)) is not None
            ]
        self._syncing = False

    def kept(self) -> list[Tensor]:
        """The scratch of sums."""
        return self.sums.scratch.kept()

    def _gradient_ready(self, index: int) -> None:
        if not self._syncing:
            return
        self._bucket_of[index].waiting -= 1
        # In order only: all ranks must issue the same collectives in the same order.
        while len(self._started) < len(self.buckets) and self.buckets[len(self._started)].waiting == 0:
            self._start()

    def _start(self) -> None:
        number = len(self._started)
        bucket = self.buckets[number]
        part = self.weights.flat_grads[bucket.start : bucket.end]
        messages = self.compressed[number].sum(part) if self.compressed else self._sum(part, number)
        self._started.append((messages, next(messages)))

    def _sum(self, part: Tensor, number: int) -> Messages:
        """Sums a bucket, a slice of the flat buffer, in dtype `reduce`."""
        sent = yield self.sums.start(part.to(self.reduce), f"bucket {number}")
        if sent.dtype != part.dtype:
            part.copy_(sent)


def _next(messages: Messages, last: Started) -> Started | None:
    """The message after `last`, started; None if there is no other."""
    try:
        return messages.send(last())
    except StopIteration:
        return None
