"""LayerNorm of rows, the solution of exercise.py.

Time: half an hour. Data: none.
"""

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]


@triton.jit
def layernorm(x, weight, bias, out, columns, eps, BLOCK: tl.constexpr):
    """A row of x (rows, columns) per program: (x - mean) / sqrt(variance + eps) * weight + bias, computed in fp32. The
    variance is the mean of squares of x - mean. BLOCK: a power of two, at least `columns`; beware of what the mask
    leaves out."""
    at = tl.arange(0, BLOCK)
    row = tl.program_id(0) * columns
    inside = at < columns
    value = tl.load(x + row + at, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(value, 0) / columns
    apart = tl.where(inside, value - mean, 0.0)  # else the numbers beyond the row would count as 0 - mean
    scale = 1 / tl.sqrt(tl.sum(apart * apart, 0) / columns + eps)
    gain = tl.load(weight + at, mask=inside).to(tl.float32)
    shift = tl.load(bias + at, mask=inside).to(tl.float32)
    tl.store(out + row + at, apart * scale * gain + shift, mask=inside)
