"""Kernels of kernels/gpu in Triton's interpreter, beside plain PyTorch in fp64. A process of its own
(tests/test_triton.py): Triton reads TRITON_INTERPRET when it is imported. Prints a JSON object: case -> [relative error
of each result]."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from fivefold.kernels import elementwise, native, sizes
from fivefold.kernels.gpu import adamw, language, loss

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


def one_pass_adamw(dtype: torch.dtype) -> list[float]:
    """Five steps of two groups, the third one skipped, with a factor and working weights, beside PyTorch's."""
    sizes_, skip = (1, 100, 20_000), torch.zeros(())
    ours, theirs = ([torch.randn(n, generator=seeded(n)).requires_grad_() for n in sizes_] for _ in range(2))
    working = {p: torch.zeros(p.shape, dtype=torch.float16) for p in ours}
    options = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8}
    one, other = (
        make([{"params": p[:2], "weight_decay": 0.1}, {"params": p[2:], "weight_decay": 0.0}], **options)
        for make, p in ((elementwise.AdamW, ours), (torch.optim.AdamW, theirs))
    )
    one.found_inf, one.working = skip, working
    for number in range(5):
        one.scale, skipped = torch.tensor(0.3), number == 2
        skip.fill_(skipped)
        for a, b in zip(ours, theirs, strict=True):
            a.grad = torch.randn(a.shape, generator=seeded(number)) * 10.0 ** (number - 2)
            b.grad = a.grad * 0.3
        one.step()
        if not skipped:
            other.step()
    assert one.largest == max(p.abs().max() for p in ours)
    assert all(torch.equal(w, p.half()) for p, w in working.items())
    with torch.no_grad():
        ours[2][12_345] = torch.nan
    skip.fill_(1)
    one.step()
    assert one.largest.isnan(), "NaN is the largest, also where a step is skipped"
    pairs = [
        (one.state[a][name], other.state[b][name])
        for a, b in zip(ours[:2], theirs, strict=False)
        for name in other.state[b]
    ]
    return [error(a, b) for a, b in [*zip(ours[:2], theirs, strict=False), *pairs]]


def seeded(number: int) -> torch.Generator:
    return torch.Generator().manual_seed(number)


def cases() -> Iterator[tuple[str, Case]]:
    for biased in (False, True):
        for z_loss in (0.0, 0.01):
            yield (
                f"loss, bias {biased}, z_loss {z_loss}",
                lambda dtype, biased=biased, z=z_loss: fused_loss(dtype, biased, z),
            )
    yield "adamw", one_pass_adamw


def main() -> None:
    assert language.INTERPRETED
    loss.ROWS, loss.COLUMNS, loss.FEATURES, loss.SPANS = 16, 32, 64, 3
    sizes.LOGITS_BYTES["cpu"] = 1  # slabs of 128 columns
    adamw.BLOCK, adamw.TURNS = 1024, 3
    native.usable, native.in_triton = (lambda *tensors: False), (lambda kernel, x: True)
    found = {}
    for name, case in cases():
        for dtype in (torch.float32, torch.float16):
            torch.manual_seed(0)
            found[f"{name}, {dtype}"] = case(dtype)
    try:
        fused_loss(torch.bfloat16, False, 0.0)
    except NotImplementedError as refused:
        found["bf16"] = str(refused)
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
