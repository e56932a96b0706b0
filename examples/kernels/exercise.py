"""A kernel to write: LayerNorm of rows. The program runs it in Triton's interpreter, beside PyTorch's own.

Time: half an hour. Data: none.

python examples/kernels/exercise.py
python examples/kernels/exercise.py examples/kernels/solutions/layernorm.py
"""

import runpy
import sys
from typing import Any

import lab  # first: it chooses between interpreter and GPU
import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

EPS = 1e-5


@triton.jit
def layernorm(x, weight, bias, out, columns, eps, BLOCK: tl.constexpr):
    """A row of x (rows, columns) per program: (x - mean) / sqrt(variance + eps) * weight + bias, computed in fp32. The
    variance is the mean of squares of x - mean. BLOCK: a power of two, at least `columns`; beware of what the mask
    leaves out."""
    pass  # to be written; rows.py has an example


def graded(kernel: Any) -> list[str]:
    """What is wrong with a kernel, in sentences; none: it is right."""
    torch.manual_seed(0)
    wrong = []
    for columns, dtype, most in (
        (64, torch.float32, 1e-5),
        (100, torch.float32, 1e-5),
        (100, torch.float16, 2e-3),
    ):
        x = (3 * torch.randn(6, columns, device=lab.DEVICE) + 5).to(dtype)
        weight, bias = torch.randn(2, columns, device=lab.DEVICE).to(dtype)
        found = torch.full((7, columns), 77.0, dtype=dtype, device=lab.DEVICE)
        what = f"{columns} columns in {str(dtype)[6:]}"
        try:
            kernel[(6,)](x, weight, bias, found, columns, EPS, triton.next_power_of_2(columns))
        except Exception as error:
            wrong.append(f"{what}: it ends with {error}")
            continue
        wanted = torch.nn.functional.layer_norm(x, (columns,), weight, bias, EPS)
        if (found == 77).all():
            wrong.append(f"{what}: nothing is stored")
        elif (found[6] != 77).any():
            wrong.append(f"{what}: it stores beyond the last row")
        elif not (far := lab.farthest(found[:6], wanted)) <= most:
            wrong.append(
                f"{what}: {far:.1e} of the largest number apart from PyTorch's, where {most:g} is rounding"
            )
    return wrong


def main(arguments: list[str]) -> int:
    kernel = runpy.run_path(arguments[0])["layernorm"] if arguments else layernorm
    wrong = graded(kernel)
    print("\n".join([f"no   layernorm: {reason}" for reason in wrong] or ["yes  layernorm"]))
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
