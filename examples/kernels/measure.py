"""The roofline of this folder's kernels at large sizes, and, on a GPU, their time beside PyTorch's own.

python examples/kernels/measure.py         # on a GPU
python examples/kernels/measure.py h100

Without a GPU it prints the first half: FLOPs, bytes that have to move, and the time that the data sheet allows.
"""

import argparse
from collections.abc import Callable
from typing import NamedTuple

import elementwise
import flash
import lab
import matmul
import rope
import rows
import torch
from torch import Tensor

from fivefold.host.devices import SHEETS, Sheet, sheet_of


class Sizes(NamedTuple):
    """n: rows and columns of a matrix. heads, tokens, head: of attention."""

    n: int
    heads: int
    tokens: int
    head: int


LARGE = Sizes(4096, 32, 8192, 128)


class Work(NamedTuple):
    """run, plain: the kernel and PyTorch's own. moved: bytes, if each number moves once. dtype: of its matmuls,
    or None. most: how far the results may be apart, relative to the largest."""

    run: Callable[[], Tensor]
    plain: Callable[[], Tensor]
    flops: float
    moved: float
    dtype: str | None
    most: float


def works(sizes: Sizes, device: str) -> dict[str, Callable[[], Work]]:
    """What is measured. Inputs are made when a work is, so that one at a time is in memory."""
    n, heads, tokens, head = sizes

    def random(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
        return torch.randn(shape, device=device, dtype=dtype)

    def added(stride: int) -> Work:
        x, y = random(n * n, dtype=torch.float32), random(n * n, dtype=torch.float32)
        count = n * n // stride
        return Work(
            lambda: elementwise.run_add(x, y, stride),
            lambda: x[::stride] + y[::stride],
            count,
            12 * count,
            None,
            1e-6,
        )

    def softmax() -> Work:
        x = random(n, n)
        return Work(lambda: rows.run_softmax(x), lambda: x.softmax(-1), 4 * n * n, 2 * x.nbytes, None, 1e-3)

    def rmsnorm() -> Work:
        x, w = random(n, n), random(n)

        def plain() -> Tensor:
            return torch.nn.functional.rms_norm(x, (n,), w, rows.EPS)

        return Work(lambda: rows.run_rmsnorm(x, w), plain, 4 * n * n, 2 * x.nbytes, None, 2e-3)

    def turned() -> Work:
        x, (cos, sin) = random(1, tokens, heads, head), rope.angles(tokens, head)
        cos, sin = cos.to(device), sin.to(device)
        return Work(
            lambda: rope.turned(x, cos, sin, False),
            lambda: rope.plain(x, cos, sin),
            3 * x.numel(),
            2 * x.nbytes,
            None,
            2e-3,
        )

    def product(tile: int, warps: int) -> Work:
        a, b = random(n, n), random(n, n)
        return Work(
            lambda: matmul.run_matmul(a, b, tile, tile, warps),
            lambda: a @ b,
            2 * n**3,
            3 * a.nbytes,
            "fp16",
            2e-3,
        )

    def attention(back: bool) -> Work:
        q, k, v, dout = (random(heads, tokens, head) for _ in range(4))
        inputs = [x.requires_grad_() for x in (q, k, v)] if back else [q, k, v]
        flops = (
            4 * heads * tokens**2 * head / 2 * (3.5 if back else 1)
        )  # half of the scores; 2.5 times as many backward

        def both(of: Callable[..., Tensor]) -> Tensor:
            out = of(*inputs)
            return torch.cat([out, *torch.autograd.grad(out, inputs, dout)]) if back else out

        moved = (12 if back else 4) * q.nbytes
        return Work(
            lambda: both(flash.Attention.apply), lambda: both(flash.plain), flops, moved, "fp16", 1e-2
        )

    return {
        "add": lambda: added(1), "add, stride 8": lambda: added(8), "softmax": softmax, "rmsnorm": rmsnorm,
        "rope": turned, "matmul 64x64": lambda: product(64, 4), "matmul 128x128, 8 warps": lambda: product(128, 8),
        "flash": lambda: attention(False), "flash, with backward": lambda: attention(True),
    }  # fmt: skip


def roofline(work: Work, sheet: Sheet) -> tuple[float, str]:
    """Seconds at the rates of the data sheet, and what takes longer. Without matmuls, FLOPs are those of fp32."""
    computing = work.flops / (sheet.rate(work.dtype or "fp32") or float("inf"))
    moving = work.moved / sheet.bandwidth
    return max(computing, moving), "computing" if computing > moving else "memory"


def measured(work: Work) -> str:
    """Microseconds of the kernel and of PyTorch, and whether their results are the same."""
    from triton.testing import do_bench  # pyright: ignore[reportMissingImports]

    far = lab.farthest(work.run().detach(), work.plain().detach())
    ours, theirs = (1e3 * do_bench(run, return_mode="median") for run in (work.run, work.plain))
    return f"{ours:>10,.0f}{theirs:>10,.0f}  {'yes' if far <= work.most else f'NO: {far:.1e} apart'}"


def main() -> None:
    names = {sheet.name: sheet for sheet in SHEETS}
    parser = argparse.ArgumentParser(description="Rooflines of the kernels, and their times on a GPU.")
    parser.add_argument(
        "device", nargs="?", choices=names, help="whose data sheet; else that of the GPU here"
    )
    given, gpu = parser.parse_args().device, lab.DEVICE == "cuda"
    sheet = names[given] if given else sheet_of(torch.cuda.get_device_name()) if gpu else None
    if sheet is None:
        parser.error("there is no GPU here that has a data sheet in Fivefold: name a device")
    print(
        f"{sheet.name}: {sheet.bandwidth / 1e9:,.0f} GB/s, {(sheet.rate('fp16') or 0) / 1e12:,.0f} TFLOP/s in fp16"
        + (
            f"; measured on {torch.cuda.get_device_name()}"
            if gpu
            else "; no GPU here, so nothing is measured"
        )
    )
    print(
        "kernel                      GFLOP      MB  FLOPs/byte  roofline us  bound by"
        + "     kernel us  torch us  same" * gpu
    )
    for name, made in works(LARGE, lab.DEVICE if gpu else "meta").items():
        work = made()
        seconds, bound = roofline(work, sheet)
        print(
            f"{name:<24}{work.flops / 1e9:>9,.2f}{work.moved / 1e6:>8,.0f}{work.flops / work.moved:>12,.2f}"
            f"{1e6 * seconds:>13,.1f}  {bound:<9}" + (measured(work) if gpu else "")
        )


if __name__ == "__main__":
    main()
