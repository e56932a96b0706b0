"""The sum of experts' rows for each token, and its gradients, each in one pass: places that were dropped need no row of
zeros, and the gradient of a row is read once for both. Legend: kernels/elementwise.py."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.library import custom_op

from fivefold.kernels import elementwise
from fivefold.kernels.gpu.language import blocks, constexpr, jit, runs, tl

COLUMNS = 1024
"""Features of a program."""


@jit
def _sum_kernel(rows, places, weights, out, M, D, WEIGHTED: constexpr, K: constexpr, COLUMNS: constexpr):
    """out (N, D): some features of a token."""
    token, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((COLUMNS,), tl.float32)
    for k in range(K):
        place = tl.load(places + token * K + k)
        there = tl.where(place < M, D, 0)  # features
        row = tl.load(rows + place * D + columns, columns < there, 0.0).to(tl.float32)
        if WEIGHTED:
            row *= tl.load(weights + token * K + k).to(tl.float32)
        total += row
    tl.store(out + token * D + columns, total.to(out.dtype.element_ty), columns < D)


@jit
def _spread_kernel(dout, rows, weights, order, drows, dweights, N, D, K: constexpr, COLUMNS: constexpr):
    """drows (M, D) and dweights (N, K): of one row."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(order + row)
    token, mine = slot % N, slot < N * K
    place = token * K + slot // N
    weight = tl.load(weights + place, mine, 0.0).to(tl.float32)
    total = tl.zeros((COLUMNS,), tl.float32)
    for start in range(0, D, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        gradient = tl.load(dout + token * D + columns, columns < D, 0.0).to(tl.float32)
        total += gradient * tl.load(rows + row * D + columns, columns < D, 0.0).to(tl.float32)
        tl.store(drows + row * D + columns, (gradient * weight).to(drows.dtype.element_ty), columns < D)
    tl.store(dweights + place, tl.sum(total, 0), mine)


@custom_op("fivefold::sum_rows", mutates_args=())
def sum_rows(rows: Tensor, places: Tensor, weights: Tensor | None, drops: bool) -> Tensor:
    """As `elementwise.sum_rows`."""
    if not runs(rows):
        return elementwise.sum_rows(rows, places, weights, drops)
    rows, places, (M, D), (N, K) = rows.contiguous(), places.contiguous(), rows.shape, places.shape
    given = rows if weights is None else weights.contiguous()
    out = rows.new_empty(N, D)
    _sum_kernel[(N, blocks(D, COLUMNS))](
        rows, places, given, out, M, D, WEIGHTED=weights is not None, K=K, COLUMNS=COLUMNS
    )  # fmt: skip
    return out


@sum_rows.register_fake
def _(rows: Tensor, places: Tensor, weights: Tensor | None, drops: bool) -> Tensor:
    return rows.new_empty(len(places), rows.shape[1])


@custom_op("fivefold::spread_rows", mutates_args=())
def spread(dout: Tensor, rows: Tensor, weights: Tensor, order: Tensor) -> tuple[Tensor, Tensor]:
    """As `elementwise.spread`."""
    if not runs(rows):
        return elementwise.spread(dout, rows, weights, order)
    dout, rows, weights, (N, K) = dout.contiguous(), rows.contiguous(), weights.contiguous(), weights.shape
    drows, dweights = torch.empty_like(rows), torch.zeros_like(weights, dtype=torch.float32)
    if len(rows):
        _spread_kernel[(len(rows),)](
            dout, rows, weights, order, drows, dweights, N, rows.shape[1], K=K, COLUMNS=COLUMNS
        )  # fmt: skip
    return drows, dweights.to(weights.dtype)


@spread.register_fake
def _(dout: Tensor, rows: Tensor, weights: Tensor, order: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(rows), torch.empty_like(weights)
