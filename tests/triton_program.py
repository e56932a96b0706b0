"""Kernels of kernels/gpu in Triton's interpreter, beside plain PyTorch in fp64. A process of its own
(tests/test_triton.py): Triton reads TRITON_INTERPRET when it is imported. Prints a JSON object: case -> [relative error
of each result]."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from fivefold.errors import UserError
from fivefold.kernels import elementwise, native, sizes
from fivefold.kernels.gpu import combine, language, loss, rounding
from fivefold.kernels.rounded import encode_tiles
from fivefold.models.mixture import filled
from fivefold.precision.formats import FORMATS

Case = Callable[[torch.dtype], list[float]]


def error(got: Tensor, wanted: Tensor) -> float:
    assert got.shape == wanted.shape
    return ((got.double() - wanted.double()).abs().max() / wanted.double().abs().max()).item()


def fused_loss(dtype: torch.dtype, biased: bool, z_loss: float) -> list[float]:
    """Loss and gradients: several tiles and spans, no multiple of a tile, rows that do not count, two slabs."""
    N, D, V = 37, 40, 300
    x, weight, bias = (torch.randn(size).to(dtype) for size in ((N, D), (V, D), (V,)))
    targets = torch.randint(V, (N,))
    targets[::5] = -100
    low = [t.clone().requires_grad_() for t in (x, weight, bias)]
    high = [t.double().requires_grad_() for t in (x, weight, bias)]
    found = loss.linear_cross_entropy(low[0], low[1], targets, low[2] if biased else None, z_loss)
    logits = F.linear(high[0], high[1], high[2] if biased else None)
    wanted = F.cross_entropy(logits, targets) + z_loss * logits.logsumexp(1)[targets >= 0].square().mean()
    (3 * found).backward()
    (3 * wanted).backward()
    gradients = zip(low[: 2 + biased], high, strict=False)
    return [error(found, wanted), *(error(a.grad, b.grad) for a, b in gradients if a.grad is not None)]


def rounding_to_fp8(dtype: torch.dtype, form: str, kind: str) -> list[float]:
    """Numbers and scales of x and of x.T, in one pass and each alone: 0 if all bits are the twin's. Numbers of many
    sizes, zeros, and numbers that are not finite: in one tensor with one scale they leave nothing else ("NaN")."""
    sizes = torch.exp2(torch.randint(-9, 3, (256, 384)).float())
    x = (torch.randn(256, 384) * sizes).to(dtype)
    x[3], x[128:, 128:256] = 0, 0
    if kind != "tensor":
        x[7, 130], x[8, 5] = float("nan"), float("inf")
    tiles = {"row": (1, 128), "block": (128, 128)}
    high = x.float()  # in fp16 the twin's scales would overflow
    wanted, plain = [], torch.maximum
    # a device may set the sign bit of a NaN
    with patch.object(torch, "maximum", lambda a, b: -y if (y := plain(a, b)).isnan() else y):
        found = [*rounding.encode(x, *tiles.get(kind, x.shape), FORMATS[form], both=True)]
        for y in (x, x.t()):
            found += rounding.encode(y, *tiles.get(kind, y.shape), FORMATS[form])
    for y in (high, high.t()):
        wanted += encode_tiles(y, *tiles.get(kind, y.shape), FORMATS[form])
    return [
        float(not a.float().allclose(b.float(), 0, 0, equal_nan=True))
        for a, b in zip(found, wanted * 2, strict=True)
    ]


def combined(dtype: torch.dtype, weighted: bool) -> list[float]:
    """The sum of each token's rows, some dropped and some nobody's, and its gradients; and whether the sum's bits are
    those of the slots' order."""
    N, K, D = 23, 3, 40
    chosen = torch.rand(N, 5).topk(K).indices
    way = filled(
        chosen, chosen.t().reshape(-1).argsort(stable=True), chosen.flatten().bincount(minlength=5), 12
    )
    assert way.place_NK.max() == len(way.order_M)
    assert way.order_M.max() == N * K
    rows, weights, dout = (torch.randn(size).to(dtype) for size in ((len(way.order_M), D), (N, K), (N, D)))
    found = combine.sum_rows(rows, way.place_NK, weights if weighted else None, True)
    factors = weights if weighted else torch.ones_like(weights)
    padded, total = torch.cat([rows, rows.new_zeros(1, D)]).float(), torch.zeros(N, D)
    for k in range(K):
        total += padded[way.place_NK[:, k]] * factors[:, k : k + 1].float()
    wanted = elementwise.sum_rows(rows.double(), way.place_NK, factors.double(), True)
    errors = [float(not torch.equal(found, total.to(dtype))), error(found, wanted)]
    high = elementwise.spread(dout.double(), rows.double(), weights.double(), way.order_M)
    gradients = combine.spread(dout, rows, weights, way.order_M)
    return [*errors, *(error(a, b) for a, b in zip(gradients, high, strict=True))]


def cases() -> Iterator[tuple[str, Case]]:
    for biased in (False, True):
        for z_loss in (0.0, 0.01):
            yield (
                f"loss, bias {biased}, z_loss {z_loss}",
                lambda dtype, biased=biased, z=z_loss: fused_loss(dtype, biased, z),
            )

    for weighted in (False, True):
        yield f"combine, weights {weighted}", lambda dtype, weighted=weighted: combined(dtype, weighted)
    for form in ("fp8 e4m3", "fp8 e5m2"):
        for kind in ("row", "block", "tensor", "NaN"):
            yield (
                f"rounding to {form} by {kind}",
                lambda dtype, form=form, kind=kind: rounding_to_fp8(dtype, form, kind),
            )


def main() -> None:
    assert language.INTERPRETED
    combine.COLUMNS = 16
    loss.ROWS, loss.COLUMNS, loss.FEATURES, loss.SPANS = 16, 32, 64, 3
    sizes.LOGITS_BYTES["cpu"] = 1  # slabs of 128 columns
    native.usable, native.in_triton = (lambda *tensors: False), (lambda kernel, x: True)
    found = {}
    for name, case in cases():
        for dtype in (torch.float32, torch.float16):
            torch.manual_seed(0)
            found[f"{name}, {dtype}"] = case(dtype)
    try:
        fused_loss(torch.bfloat16, False, 0.0)
    except UserError as refused:
        found["bf16"] = str(refused)
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
