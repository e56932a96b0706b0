"""Initial weights: each element depends only on (seed, parameter name, element index).

So a recipe starts from the same weights on every layout, device and shard, and a rank can make its own part of a
tensor without the rest. Element i of parameter `name` is a standard normal number. It comes from a 64-bit hash of i
under keys derived from (seed, name): the mixing function of SplitMix64 (Steele, Lea, Flood 2014, "Fast splittable
pseudorandom number generators"; constants of Stafford's mix 13), then Box-Muller (1958).

Only integer operations and the floating-point operations that IEEE 754 rounds exactly (+ - * / sqrt) are used;
logarithm and sine are polynomials of them. A library's logarithm differs in the last bit between CPU and GPU and
between versions; these do not.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fivefold.kernels.hollow import Hollow
from fivefold.models.section import ModelSection
from fivefold.spread.parts import Part, boxes, local_shape

CHUNK = 1 << 17  # elements made at once on a CPU: their scratch memory (4 MB) stays in its cache


def init_weights(module: nn.Module, seed: int, model: ModelSection) -> None:
    """Fills every parameter of a module in place; buffers get zeros.

    Matrices: normal with standard deviation `init_std`, divided by sqrt(2 L) for the projections back into the residual
    stream (GPT-2). Scales of norms: ones. Biases: zeros.
    """
    with torch.no_grad():
        for buffer in module.buffers():
            buffer.zero_()
        for name, parameter in module.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
            elif parameter.ndim == 1:
                parameter.fill_(1.0)
            else:
                fill_normal_(parameter, seed, name, std_of(name, model))


def init_part(
    seed: int, name: str, model: ModelSection, part: Part, device: torch.device | str = "cpu"
) -> Tensor:
    """Initial values of a rank's part of parameter `name`: fp32, in the shape of `part.keeps`."""
    out = torch.empty(local_shape(part.keeps), dtype=torch.float32, device=device)
    if isinstance(out, Hollow):  # it has a shape but no values
        return out
    for where, box in boxes(part.keeps):
        if name.endswith("bias"):
            out[where] = 0.0
        elif len(part.shape) == 1:
            out[where] = 1.0
        else:
            out[where] = init_box(seed, name, part.shape, std_of(name, model), box, device)
    return out


def std_of(name: str, model: ModelSection) -> float:
    """Standard deviation of the initial values of a matrix."""
    into_residual = name.endswith(("attention.out.weight", "down.weight", "mlp.experts.down"))
    return model.init_std / math.sqrt(2 * model.layers) if into_residual else model.init_std


def fill_normal_(tensor: Tensor, seed: int, name: str, std: float) -> None:
    """Fills a contiguous tensor with the elements of parameter `name`, in chunks."""
    flat = tensor.view(-1)
    chunk = CHUNK if flat.device.type == "cpu" else 64 * CHUNK
    for offset in range(0, flat.numel(), chunk):
        part = flat[offset : offset + chunk]
        index = torch.arange(offset, offset + part.numel(), device=flat.device)
        part.copy_(_standard_normal(index, *_keys(seed, name)).mul_(std))


def init_box(
    seed: int,
    name: str,
    shape: Sequence[int],
    std: float,
    box: Sequence[tuple[int, int]],
    device: torch.device | str = "cpu",
) -> Tensor:
    """The box [box[0][0]:box[0][1], box[1][0]:box[1][1], ...] of parameter `name` with this shape, in fp32."""
    assert all(0 <= a <= b <= n for n, (a, b) in zip(shape, box, strict=True)), (shape, box)
    out = torch.empty([b - a for a, b in box], dtype=torch.float32, device=device)
    keys = _keys(seed, name)
    (first, last), inner_strides = box[0], [math.prod(shape[i + 1 :]) for i in range(1, len(shape))]
    inner = torch.zeros(1, dtype=torch.int64, device=device)  # offsets of one row's elements
    for (a, b), stride in zip(box[1:], inner_strides, strict=True):
        inner = (inner[:, None] + torch.arange(a, b, device=device) * stride).view(-1)
    row_stride = math.prod(shape[1:])
    rows = max(1, CHUNK // max(1, inner.numel()))
    for row in range(first, last, rows):
        ids = torch.arange(row, min(row + rows, last), device=device)
        values = _standard_normal((ids[:, None] * row_stride + inner).view(-1), *keys).mul_(std)
        out[row - first : row - first + len(ids)] = values.view(len(ids), *out.shape[1:])
    return out


def _keys(seed: int, name: str) -> tuple[int, int]:
    """Two 64-bit keys, as signed numbers (torch has no unsigned arithmetic)."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=16).digest()
    return int.from_bytes(digest[:8], "little", signed=True), int.from_bytes(
        digest[8:], "little", signed=True
    )


def _standard_normal(index: Tensor, key_a: int, key_b: int) -> Tensor:
    """Hashes int64 indices (which are overwritten) and turns each into one standard normal number, fp32."""
    bits = _hash(index, key_a, key_b)
    # Two uniform numbers from the two halves. Conversion to fp32 rounds exactly, on every device.
    radius_uniform = (bits >> 32).bitwise_and_(0xFFFFFFFF).float().add_(0.5).mul_(2.0**-32)  # (0, 1]
    angle_uniform = bits.bitwise_and_(0xFFFFFFFF).sub_(1 << 31).float().mul_(2.0**-32)  # [-1/2, 1/2]
    radius = _minus_log(radius_uniform).mul_(2.0).sqrt_()
    # sin of a uniform angle in [-pi/2, pi/2] has the same distribution as on the whole circle.
    return _sine(angle_uniform.mul_(math.pi)).mul_(radius)


def _hash(x: Tensor, key_a: int, key_b: int) -> Tensor:
    """SplitMix64 in place. The second key is added between the rounds, so that no two parameters' sequences are shifts
    of each other. Products wrap around; `& mask` makes the arithmetic shift a logical one."""
    shifted = torch.empty_like(x)
    x.mul_(_signed(0x9E3779B97F4A7C15)).add_(key_a)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, None)):
        torch.bitwise_right_shift(x, shift, out=shifted)
        x.bitwise_xor_(shifted.bitwise_and_((1 << (64 - shift)) - 1))
        if factor is not None:
            x.mul_(_signed(factor))
        if shift == 30:
            x.bitwise_xor_(key_b)
    return x


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


def _minus_log(x: Tensor) -> Tensor:
    """-log(x) for fp32 x in (0, 1], error < 1.1e-6 and never below 0: exponent * log 2 + log of the mantissa m in [1,
    2), as 2 (z + z^3/3 + z^5/5 + ...) with z = (m - 1) / (m + 1) <= 1/3."""
    bits = x.view(torch.int32)
    exponent = (bits >> 23).sub_(127).float()
    mantissa = bits.bitwise_and(0x7FFFFF).bitwise_or_(0x3F800000).view(torch.float32)
    z = (mantissa - 1.0).div_(mantissa.add_(1.0))
    series = _horner(z * z, [1 / n for n in (11, 9, 7, 5, 3, 1)]).mul_(z).mul_(2.0)
    return exponent.mul_(math.log(2)).add_(series).neg_().clamp_(min=0.0)


def _sine(x: Tensor) -> Tensor:
    """sin(x) for fp32 x in [-pi/2, pi/2], error < 3e-7: its Taylor series up to x^11."""
    return _horner(x * x, [(-1) ** (n // 2) / math.factorial(n) for n in (11, 9, 7, 5, 3, 1)]).mul_(x)


def _horner(x: Tensor, coefficients: Sequence[float]) -> Tensor:
    """coefficients[0] x^n + ... + coefficients[n]."""
    total = x * coefficients[0]
    for coefficient in coefficients[1:-1]:
        total.add_(coefficient).mul_(x)
    return total.add_(coefficients[-1])
