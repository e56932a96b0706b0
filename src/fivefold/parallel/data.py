"""Data parallelism (DDP): every rank has the whole model and a share of the batch; gradients are summed.

The sum runs in buckets, slices of the flat gradient buffer (precision/weights.py), each started as soon as
the last backward of a step has finished its parameters, so that communication overlaps with the rest of backward
(Li et al., arXiv 2006.15704). Earlier microbatches communicate nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fivefold.precision.weights import Weights
from fivefold.sharding import Part

BUCKET_BYTES = 25 << 20


class DataParallel:
    """ZeRO stage 0 (see `replica.Replica`): masters, gradients and optimizer states of `params` on every rank of
    `group`, over which gradients are summed in dtype `reduce`."""

    def __init__(
        self,
        params: dict[str, nn.Parameter],
        parts: dict[str, Part],
        compute_dtype: torch.dtype,
        group: dist.ProcessGroup | None,
        reduce: torch.dtype = torch.float32,
    ):
        self.parts = {name: parts[name] for name in params}
        self.weights = Weights(params, compute_dtype)
        self.sum = GradientSum(self.weights, group, reduce)
        self.masters, self.gradients = self.weights.master, self.weights.grads
        self.start_step, self.refresh, self.close = (
            self.weights.start_step,
            self.weights.refresh,
            self.weights.close,
        )
        self.arm, self.finish, self.collect = self.sum.arm, self.sum.wait, self.weights.collect

    def kept(self) -> dict[str, list[Tensor]]:
        """The weights that compute."""
        return {"params": [self.weights.flat_working]}

    def watch(self, seen: Callable[[Tensor], None], names: set[str]) -> None:
        """Shows the gradient of every parameter in every microbatch."""
        of = self.weights.names
        self.weights.seen = lambda index, gradient: seen(gradient) if of[index] in names else None


@dataclass
class Bucket:
    start: int  # of the flat buffer, in elements
    end: int
    waiting: int = 0  # parameters whose gradient is not there yet
    parameters: int = 0


class GradientSum:
    """Sums the gradients of `weights` over the ranks of `group`, by buckets, in dtype `reduce`.

    Use: `arm()` before the last backward of a step, `wait()` after it. With one rank both do nothing.
    """

    def __init__(
        self,
        weights: Weights,
        group: dist.ProcessGroup | None,
        reduce: torch.dtype = torch.float32,
        bucket_bytes: int = BUCKET_BYTES,
    ):
        self.weights, self.group, self.reduce = weights, group, reduce
        self.alone = group is None or group.size() == 1
        self.buckets, self._bucket_of = _cut(weights.offsets, bucket_bytes // 4)
        self._started: list[tuple[dist.Work, Tensor]] = []
        self._armed = False
        weights.on_gradient = self._gradient_ready

    def arm(self) -> None:
        """The next backward is the last of the step: buckets are sent as they become ready."""
        self._armed = not self.alone
        self._started = []
        for bucket in self.buckets:
            bucket.waiting = bucket.parameters

    def wait(self) -> None:
        """Until every bucket is summed. Buckets with parameters that got no gradient are sent now."""
        self.weights.finish_gradients()
        if not self._armed:
            return
        while len(self._started) < len(self.buckets):
            self._start()
        for bucket, (work, sent) in zip(self.buckets, self._started, strict=True):
            work.wait()
            if sent.dtype != torch.float32:
                self.weights.flat_grads[bucket.start : bucket.end].copy_(sent)
        self._armed = False

    def _gradient_ready(self, index: int) -> None:
        if not self._armed:
            return
        self.buckets[self._bucket_of[index]].waiting -= 1
        # In order only: all ranks must issue the same collectives in the same order.
        while len(self._started) < len(self.buckets) and self.buckets[len(self._started)].waiting == 0:
            self._start()

    def _start(self) -> None:
        bucket = self.buckets[len(self._started)]
        part = self.weights.flat_grads[bucket.start : bucket.end].to(self.reduce)
        work = dist.all_reduce(part, group=self.group, async_op=True)
        assert work is not None
        self._started.append((work, part))


def _cut(offsets: list[int], bucket_elements: int) -> tuple[list[Bucket], list[int]]:
    """Buckets of whole parameters of at least `bucket_elements` (the last may be smaller), and each parameter's."""
    buckets, bucket_of = [Bucket(0, 0)], []
    for start, end in pairwise(offsets):
        if buckets[-1].end - buckets[-1].start >= bucket_elements:
            buckets.append(Bucket(start, start))
        buckets[-1].end = end
        buckets[-1].parameters += 1
        bucket_of.append(len(buckets) - 1)
    return buckets, bucket_of
