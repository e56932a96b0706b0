"""Run by test_lesson_kernels.py in a process of its own, where kernels are interpreted: prints how far each result is
from PyTorch's, as JSON, {case: [apart, allowed]}. Shapes are small, and most are no multiples of tiles."""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd import grad

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "kernels"))
import elementwise  # pyright: ignore[reportMissingImports]
import flash  # pyright: ignore[reportMissingImports]
import lab  # pyright: ignore[reportMissingImports]
import matmul  # pyright: ignore[reportMissingImports]
import measure  # pyright: ignore[reportMissingImports]
import rope  # pyright: ignore[reportMissingImports]
import rows  # pyright: ignore[reportMissingImports]

FP32, FP16 = (torch.float32, 1e-5), (torch.float16, 2e-3)
found: dict[str, tuple[float, float]] = {}


def compare(name: str, got: Tensor, wanted: Tensor, most: float) -> None:
    assert got.shape == wanted.shape, name
    assert got.dtype == wanted.dtype, name
    found[name] = lab.farthest(got.detach(), wanted.detach()), most


def elements() -> None:
    for n in (1, 1000, 1024, 2500):
        x, y = torch.randn(2, n)
        compare(f"elu {n}", elementwise.run_elu(x), torch.nn.functional.elu(x), 1e-6)
        for stride in (1, 3, 8):
            compare(f"add {n} {stride}", elementwise.run_add(x, y, stride), x[::stride] + y[::stride], 0)


def of_rows() -> None:
    for columns in (1, 33, 64, 1000):
        for dtype, most in (FP32, FP16):
            x, weight = torch.randn(5, columns).to(dtype), torch.randn(columns).to(dtype)
            wanted = torch.nn.functional.rms_norm(x, (columns,), weight, rows.EPS)
            compare(f"softmax {columns} {dtype}", rows.run_softmax(x), x.softmax(-1), most)
            compare(f"rmsnorm {columns} {dtype}", rows.run_rmsnorm(x, weight), wanted, most)


def products() -> None:
    for m, k, n in ((1, 1, 1), (65, 40, 70), (64, 64, 128)):
        for dtype, most in (FP32, FP16):
            a, b = torch.randn(m, k).to(dtype), torch.randn(k, n).to(dtype)
            compare(
                f"matmul {m} {k} {n} {dtype}",
                matmul.run_matmul(a, b),
                (a.double() @ b.double()).to(dtype),
                most,
            )


def positions() -> None:
    for T, heads, head in ((1, 1, 2), (17, 4, 16)):
        x, dout = torch.randn(2, 3, T, heads, head)
        x.requires_grad_()
        tables = rope.angles(T, head)
        ours, plain = rope.Rope.apply(x, *tables), rope.plain(x, *tables)
        compare(f"rope {T}", ours, plain, 1e-6)
        compare(f"rope {T}, gradient", grad(ours, x, dout)[0], grad(plain, x, dout)[0], 1e-6)


def attention() -> None:
    for T in (
        2,
        64,
        100,
        200,
    ):  # of one token alone the gradients of q and k are 0, and nothing relates to them
        for dtype, most in (FP32, FP16):
            q, k, v, dout = torch.randn(4, 2, T, 16).to(dtype)
            exact = [x.double().requires_grad_() for x in (q, k, v)]
            wanted = flash.plain(*exact)
            wanted = wanted, *grad(wanted, exact, dout.double())
            inputs = [x.clone().requires_grad_() for x in (q, k, v)]
            out = flash.Attention.apply(*inputs)
            for name, a, b in zip(
                ("out", "dq", "dk", "dv"), (out, *grad(out, inputs, dout)), wanted, strict=True
            ):
                compare(f"flash {T} {dtype} {name}", a, b.to(dtype), most)
            compare(f"flash {T} {dtype} first", flash.run_first(q, k, v), wanted[0].to(dtype), most)


def as_measured() -> None:
    for name, made in measure.works(measure.Sizes(128, 2, 64, 16), "cpu").items():
        work = made()
        compare(f"measure {name}", work.run(), work.plain(), work.most)


def refused(call: Any, *arguments: Tensor) -> bool:
    try:
        call(*arguments)
    except ValueError as error:
        return "bfloat16" in str(error)
    return False


if __name__ == "__main__":
    torch.manual_seed(0)
    for part in (elements, of_rows, products, positions, attention, as_measured):
        part()
    two, three = torch.ones(2, 16, 16, dtype=torch.bfloat16), torch.ones(3, 1, 16, 16, dtype=torch.bfloat16)
    for name, call, given in (
        ("matmul", matmul.run_matmul, two), ("second", flash.run_second, three), ("first", flash.run_first, three),
    ):  # fmt: skip
        found[f"{name} in bf16 is refused"] = float(not refused(call, *given)), 0
    print(json.dumps(found))
