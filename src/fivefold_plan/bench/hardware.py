"""Measures how fast one rank of this machine computes: matmuls by shape, attention, element-wise operations, compressed
gradient sums without their messages; and its disk, by direct I/O of the threads that offload (`Disk`).

All ranks of a process group measure at the same time, as they compute at the same time in training. The operations are
the trainer's: `kernels`, fused AdamW.

Legend: m tokens, n output features, k input features; e bytes per element.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from itertools import product as combinations
from pathlib import Path
from statistics import median

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from fivefold.comm.axis import Axis, Started
from fivefold.comm.compress import compressed_sum
from fivefold.kernels import elementwise, matmul
from fivefold.kernels.blockwise_attention import qkv_attention
from fivefold.kernels.matmul import loss_and_gradient, mean_scale
from fivefold.kernels.partial_attention import attend, attend_backward, merge, queries
from fivefold.optim import OPTIMIZERS, update_traffic
from fivefold.optim.scaling import sum_of_squares
from fivefold.optim.updater import Updater
from fivefold.parallel.offload.disk import SPAN, Disk, aligned, wait_for
from fivefold.precision import DTYPES, MASTER, torch_dtype
from fivefold.schedules.compression import NONE, TEXTS, compressor
from fivefold.train.peak import laps

COPIES = 3  # sets of operands that take turns, so that they do not stay in the first cache
MANY = 12  # sets for operands that a step passes over once: no cache holds them
TOKENS, HEADS = (128, 512, 2048), (32, 128)  # attention's sequence lengths and head sizes
ROWS, DIM = 2048, 512  # shape of element-wise operations
VOCABULARY = 4096
UNDISTURBED, TRIES = 0.9, 4  # share of its cores' time that suffices; tries for a disturbed measurement
Call = Callable[[], object]


def timed(work: Sequence[Call], device: torch.device, seconds: float = 0.006, least: int = 3) -> float:
    """Median seconds of pieces of work that take turns, started by all ranks together.

    It is the better of two medians. More are tried if other processes took this one's cores.
    """
    for piece in work:
        piece()
    _wait(device)
    if dist.is_initialized():
        dist.barrier()
    best = float("inf")
    for number in range(TRIES):
        times, had = laps(work, lambda: _wait(device), seconds, least)
        best = min(best, median(times))
        if number and (device.type != "cpu" or had > UNDISTURBED * torch.get_num_threads()):
            break
    return best


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def products(
    dtype: str, device: torch.device, sizes: Sequence[int], largest: int
) -> dict[str, dict[str, float]]:
    """FLOP/s of a linear layer's three matmuls, by role and "m x n x k"."""
    found: dict[str, dict[str, float]] = {"forward": {}, "input": {}, "weight": {}}
    for m, n, k in combinations(sizes, repeat=3):
        if m * n * k > largest:
            continue
        sets = [[_random(size, dtype, device) for size in ((m, k), (n, k), (m, n))] for _ in range(COPIES)]
        roles: dict[str, list[Call]] = {
            "forward": [lambda x=x, w=w: matmul.linear(x, w) for x, w, _ in sets],
            "input": [lambda w=w, dy=dy: matmul.linear(dy, w.t()) for _, w, dy in sets],
            "weight": [lambda x=x, dy=dy: dy.t() @ x for x, _, dy in sets],
        }
        for role, work in roles.items():
            found[role][f"{m}x{n}x{k}"] = 2 * m * n * k / timed(work, device)
    return found


def attention(dtype: str, device: torch.device) -> dict[str, list[float]]:
    """FLOP/s of causal attention, forward and backward (2.5 times the FLOPs), by "tokens x head"."""

    def work(B: int, H: int, T: int, d: int) -> tuple[Call, Call]:
        qkv = _random((B, T, 3 * H * d), dtype, device).requires_grad_()
        angles = torch.rand(T, d // 2, device=device)
        cos, sin = angles.cos(), angles.sin()
        out = qkv_attention(qkv, H, H, cos, sin, True)
        dout = torch.ones_like(out)
        return (
            lambda: qkv_attention(qkv, H, H, cos, sin, True),
            lambda: torch.autograd.grad(out, qkv, dout, retain_graph=True),
        )

    return _rates(work, 2.0, device)


def ring(dtype: str, device: torch.device) -> dict[str, list[float]]:
    """Rates of attention to another rank's keys, merged with earlier results."""

    def work(B: int, H: int, T: int, d: int) -> tuple[Call, Call]:
        q, k, v, dout = (_random((B, H, T, d), dtype, device) for _ in range(4))
        out, lse = attend(q, k, v, causal=False)
        total, rows = out.float(), queries(q, dout, out, lse)

        def backward() -> None:
            dq, dk, dv = attend_backward(rows, k, v, causal=False)
            torch.stack((dk, dv)).float().add_(dq.float()[None])

        return lambda: merge(total, lse.clone(), *attend(q, k, v, causal=False)), backward

    return _rates(work, 4.0, device)


def _rates(
    work: Callable[[int, int, int, int], tuple[Call, Call]], factor: float, device: torch.device
) -> dict[str, list[float]]:
    """FLOP/s of forward and backward. work: both for (B, heads, T, size of a head); factor: FLOPs of forward by their
    product, with T twice."""
    found = {}
    for T, d in combinations(TOKENS, HEADS):
        H, B = 4, max(1, 1024 // T)
        forward, backward = work(B, H, T, d)
        flops = factor * B * H * T * T * d
        found[f"{T}x{d}"] = [flops / timed([forward], device), 2.5 * flops / timed([backward], device)]
    return found


def streams(dtype: str, device: torch.device) -> dict[str, list[float]]:
    """bytes/s of element-wise operations in forward and backward, by kind. The bytes are those that the planner counts
    (`models/work.py`)."""
    e, size = DTYPES[dtype].bytes, ROWS * DIM

    def rate(forward: Sequence[Call], moved: float, backward: Sequence[Call], back: float) -> list[float]:
        return [moved / timed(forward, device), back / timed(backward, device)]

    stream = ROWS, DIM
    norms = _passes(
        lambda x, residual, w: elementwise.add_norm(x, residual, w, None, 1e-5),
        (stream, stream, (DIM,)),
        dtype,
        device,
    )
    gates = _passes(elementwise.swiglu, [(ROWS, 2 * DIM)], dtype, device)
    gelus = _passes(lambda x: elementwise.gelu(x, "tanh"), [stream], dtype, device)
    flat = [_random((ROWS, DIM), dtype, device) for _ in range(2 * MANY)]
    logits = [_random((ROWS // 2, VOCABULARY), dtype, device) for _ in range(COPIES)]
    totals = [torch.zeros(size, device=device) for _ in range(MANY)]
    table = _random((VOCABULARY, DIM), dtype, device).requires_grad_()
    tokens = torch.randint(VOCABULARY, (ROWS,), device=device)
    rows = F.embedding(tokens, table)
    copy: list[Call] = [lambda x=x, y=y: x.copy_(y) for x, y in zip(flat, flat[MANY:], strict=False)]
    drop: list[Call] = [lambda x=x: F.dropout(x, 0.1) for x in flat]
    loss: list[Call] = [lambda x=x: _loss(x, tokens[: ROWS // 2]) for x in logits]
    add: list[Call] = [
        lambda t=t, g=g: elementwise.add_gradient(t, g.view(-1), False)
        for t, g in zip(totals, flat, strict=False)
    ]
    moved = size * e
    return {
        # the sum with the residual stream (3) and the norm (forward 2, backward 3) are one pass
        "norm": rate(norms[0], 5 * moved, norms[1], 6 * moved),
        "gate": rate(gates[0], 3 * moved, gates[1], 5 * moved),
        "gelu": rate(gelus[0], 2 * moved, gelus[1], 3 * moved),
        "loss": [4 * (ROWS // 2) * VOCABULARY / timed(loss, device)] * 2,
        "embedding": rate(
            [lambda: F.embedding(tokens, table)],
            3 * moved,
            [lambda: torch.autograd.grad(rows, table, torch.ones_like(rows), retain_graph=True)],
            6 * moved,
        ),
        "copy": [2 * moved / timed(copy, device)] * 2,
        "accumulate": [size * (e + 8) / timed(add, device)] * 2,
        "random": [size / timed(drop, device)] * 2,  # numbers/s
    }


def optimizer(dtype: str, device: torch.device) -> list[float]:
    """bytes/s of AdamW: norm, update, check and refresh of the weights. Other optimizers move less, at about the same
    rate."""
    weights = {str(i): torch.randn(256, 1024, device=device) for i in range(16)}
    working = {name: w.to(torch_dtype(dtype)) for name, w in weights.items()}
    card = OPTIMIZERS["adamw"]
    adamw = Updater(card, weights, 1e-3, 0.1, card.fields)
    grads = {name: torch.randn_like(w) for name, w in weights.items()}
    scale, skip = torch.ones((), device=device), torch.zeros((), device=device)

    def update() -> None:
        sum_of_squares(list(grads.values()), device)
        adamw.step(grads, 1e-3, scale, skip)
        if dtype != MASTER:
            for name, w in weights.items():
                working[name].copy_(w)

    elements = sum(w.numel() for w in weights.values())
    fp32 = DTYPES[MASTER].bytes
    each = update_traffic(fp32, fp32, card.bytes, DTYPES[dtype].bytes)
    moved = elements * (each + card.check_traffic(device.type == "cpu"))
    return [moved / timed([update], device, seconds=0.05)] * 2


def _passes(
    compute: Callable[..., Tensor | tuple[Tensor, ...]],
    shapes: Sequence[tuple[int, ...]],
    dtype: str,
    device: torch.device,
) -> tuple[list[Call], list[Call]]:
    """Forward and backward of an operation, on several sets of inputs of these shapes."""

    def both() -> tuple[Call, Call]:
        inputs = [_random(shape, dtype, device).requires_grad_() for shape in shapes]
        result = compute(*inputs)
        outputs = result if isinstance(result, tuple) else (result,)
        grads = [torch.ones_like(out) for out in outputs]
        return (
            lambda: compute(*inputs),
            lambda: torch.autograd.grad(outputs, inputs, grads, retain_graph=True),
        )

    pairs = [both() for _ in range(COPIES)]
    return [forward for forward, _ in pairs], [backward for _, backward in pairs]


def _loss(logits: Tensor, targets: Tensor) -> None:
    """Overwrites logits with their gradient, as in kernels/matmul.py."""
    losses = torch.empty(len(logits), device=logits.device)
    loss_and_gradient(logits, targets, losses, mean_scale(targets))


def _random(shape: tuple[int, ...], dtype: str, device: torch.device) -> Tensor:
    return torch.randn(shape, device=device).to(torch_dtype(dtype))


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
        with suppress(StopIteration):
            while True:
                started = messages.send(started())
        _wait(device)
        laps.append(time.perf_counter() - began)
    return min(laps)


SIZE = 1 << 30
"""Of the file: a quarter of it was written 1.3 times as fast here, in a burst."""


def bandwidth(folder: Path, size: int = SIZE) -> dict[str, float]:
    """Bytes per second of an unnamed file in `folder`: "write" (flushed), "read", and "both" at once, together.

    size: bytes of the file, of which whole pairs of spans are used. Raises UserError: the folder cannot be written, has
    not enough space, or is on a file system without unnamed files."""
    spans = range(0, size // (2 * SPAN) * 2 * SPAN, SPAN)
    with closing(Disk(folder)) as disk:
        file, data = disk.file(len(spans) * SPAN, "a test file"), aligned(SPAN)
        # A disk may compress zeros. Not by torch: its threads would be lost in ranks that are forked later, which wait
        data.numpy()[:] = np.frombuffer(os.urandom(SPAN), np.uint8)

        def read(at: int) -> None:
            file.move(at, disk.staging(), False)

        def write(at: int) -> None:
            file.move(at, data, True)

        def rate(*work: tuple[Callable[[int], None], int]) -> float:
            began = time.perf_counter()
            wait_for([disk.submit(call, at) for call, at in work])
            file.sync()
            return len(work) * SPAN / (time.perf_counter() - began)

        found = {"write": rate(*((write, at) for at in spans)), "read": rate(*((read, at) for at in spans))}
        halves = zip(spans[: len(spans) // 2], spans[len(spans) // 2 :], strict=True)
        return found | {"both": rate(*(pair for a, b in halves for pair in ((read, a), (write, b))))}
