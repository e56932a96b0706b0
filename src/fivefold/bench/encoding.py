"""Measures how long compressed gradient sums encode and decode, without their messages."""

from __future__ import annotations

import math
import time

import torch
from torch import Tensor

from fivefold.comm.axis import Axis, Started
from fivefold.comm.compress import compressed_sum
from fivefold.schedules.compression import NONE, TEXTS, compressor

SHAPES = ((1536, 512), (512, 1536), (2048, 512), (512,))  # 2.6M elements: no cache of a core holds them
MORE = ("topk:0.1", "randk:0.1", "powersgd:32")  # other numbers than those of TEXTS


def encodings(device: torch.device) -> dict[str, list[list[float]]]:
    """Seconds per element by compressor's name: [number behind the colon (or 0), seconds], the numbers ascending."""
    found: dict[str, list[list[float]]] = {}
    for text in (*TEXTS, *MORE):
        if text != NONE:
            name, _, number = text.partition(":")
            seconds = encoding(text, device) / sum(map(math.prod, SHAPES))
            found.setdefault(name, []).append([float(number or 0), seconds])
    return {name: sorted(points) for name, points in found.items()}


class Answered(Axis):
    """The first of two ranks. The other one sends the same, at once."""

    def __init__(self, device: torch.device) -> None:
        self.index, self.size, self.device = 0, 2, device

    def start_all_reduce(self, x: Tensor, op: str = "sum") -> Started:
        return Started(self, "all_reduce", x)

    def start_all_to_all(self, x: Tensor) -> Started:
        return Started(self, "all_to_all", x.clone())

    def start_all_gather(self, x: Tensor, out: Tensor | None = None) -> Started:
        return Started(self, "all_gather", torch.cat([x, x]))


def encoding(text: str, device: torch.device, times: int = 3) -> float:
    """Seconds that a rank of two encodes and decodes a bucket of SHAPES: the least of several."""
    compress = compressor(text)
    assert compress is not None
    one, laps = compressed_sum(compress, SHAPES, Answered(device), 0), []
    gradient = torch.randn(sum(map(math.prod, SHAPES)), device=device)
    for _ in range(times):
        given = gradient.clone()
        _wait(device)
        began = time.perf_counter()
        messages = one.sum(given)
        started = next(messages)
        try:
            while True:
                started = messages.send(started())
        except StopIteration:
            _wait(device)
            laps.append(time.perf_counter() - began)
    return min(laps)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
