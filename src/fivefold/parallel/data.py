"""Data parallelism (DDP): every rank has the whole model and a share of the batch; gradients are summed.

The sum runs in buckets (spread/units.py), slices of the flat gradient buffer (parallel/flat.py). In the last backward
of a step each bucket starts once its gradients are there, so communication overlaps with the rest of backward (Li et
al., arXiv 2006.15704). Earlier microbatches communicate nothing.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from fivefold.comm import Axis, Started
from fivefold.optim.updater import Updater
from fivefold.parallel.flat import Weights
from fivefold.spread.parts import Part
from fivefold.spread.units import BUCKET_BYTES, buckets


class DataParallel:
    """ZeRO stage 0 (see `replica.Replica`). Every rank of `axis` has masters, gradients and optimizer states of
    `params`. Gradients are summed over the axis in dtype `reduce`."""

    updater: Updater

    def __init__(
        self,
        params: dict[str, nn.Parameter],
        parts: dict[str, Part],
        compute_dtype: torch.dtype,
        axis: Axis,
        reduce: torch.dtype = torch.float32,
        flat_master: Tensor | None = None,
    ):
        """flat_master: see `Weights`."""
        self.parts = {name: parts[name] for name in params}
        self.weights = Weights(params, compute_dtype, flat_master)
        self.sum = GradientSum(self.weights, axis, reduce)
        self.masters, self.gradients = self.weights.master, self.weights.grads
        self.start_step, self.refresh, self.close = (
            self.weights.start_step,
            self.weights.refresh,
            self.weights.close,
        )
        self.enable_sync, self.finish, self.collect = (
            self.sum.enable_sync,
            self.sum.wait,
            self.weights.collect,
        )

    def update(self, lr: float, scale: Tensor | None, skip: Tensor) -> None:
        self.updater.step(self.gradients, lr, scale, skip)
        self.refresh()

    def kept(self) -> dict[str, list[Tensor]]:
        """The working weights; see `Replica.kept`."""
        return {"params": [self.weights.flat_working]}

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
    """Sums the gradients of `weights` over the ranks of `axis`, by buckets, in dtype `reduce`.

    Use: `enable_sync()` before the last backward of a step, `wait()` after it. With one rank both do nothing.
    """

    def __init__(
        self,
        weights: Weights,
        axis: Axis,
        reduce: torch.dtype = torch.float32,
        bucket_bytes: int = BUCKET_BYTES,
    ):
        self.weights, self.axis, self.reduce = weights, axis, reduce
        sizes = [p.numel() for p in weights.params]
        self.buckets = [Bucket(indices, weights.offsets) for indices in buckets(sizes, bucket_bytes)]
        self._bucket_of = [bucket for bucket in self.buckets for _ in bucket.indices]
        self._started: list[Started] = []
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
        for bucket, started in zip(self.buckets, self._started, strict=True):
            sent = started()
            if sent.dtype != torch.float32:
                self.weights.flat_grads[bucket.start : bucket.end].copy_(sent)
        self._syncing = False

    def _gradient_ready(self, index: int) -> None:
        if not self._syncing:
            return
        self._bucket_of[index].waiting -= 1
        # In order only: all ranks must issue the same collectives in the same order.
        while len(self._started) < len(self.buckets) and self.buckets[len(self._started)].waiting == 0:
            self._start()

    def _start(self) -> None:
        bucket = self.buckets[len(self._started)]
        part = self.weights.flat_grads[bucket.start : bucket.end].to(self.reduce)
        self._started.append(self.axis.start_all_reduce(part))
