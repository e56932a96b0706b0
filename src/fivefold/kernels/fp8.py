"""The three matmuls of a linear layer on numbers of 8 bits (arXiv 2209.05433), summed in higher precision.

Both factors are rounded first: x and the weight to E4M3, the gradient of the output to E5M2 or E4M3. A scale makes the
largest number of a *tile* fill the format's range. Tiles are whole tensors ("tensor"), vectors along the sum ("row"),
or, as in DeepSeek-V3 (arXiv 2412.19437, section 3.3), 128 numbers along the sum for activations and gradients, and 128
x 128 for weights ("block").

Scales are powers of two. So a scale changes no number but those that become subnormal: 2^-14 of the tile's largest and
smaller in E4M3, 2^-29 in E5M2. Layouts that cut a tile differently therefore round to the same numbers, up to 2^-17 and
2^-31 of the tile's largest.

GPUs with fp8 multiply by `torch.nn.functional.scaled_mm`, blocks on Hopper only. Otherwise the rounded numbers are
multiplied in bf16, which holds them exactly, and summed in fp32: the same results, at the speed of bf16.

Legend: N rows (tokens), D input features, F output features, E experts, M rows of all experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from fivefold.kernels import native
from fivefold.precision.formats import FORMATS, Format
from fivefold.precision.fp8 import BLOCK

E4M3 = FORMATS["fp8 e4m3"]


@dataclass(frozen=True)
class Fp8:
    """How a layer multiplies. scaling: what shares a scale. backward: the format of gradients."""

    scaling: str
    backward: Format

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        """x @ weight.T. x (..., D), weight (F, D) -> (..., F)."""
        flat = x.reshape(-1, x.shape[-1])
        y = self._product(flat, weight, E4M3, weight=True)
        return y.view(*x.shape[:-1], weight.shape[0])

    def input_gradient(self, dy: Tensor, weight: Tensor) -> Tensor:
        """dy @ weight. dy (..., F), weight (F, D) -> (..., D)."""
        flat = dy.reshape(-1, dy.shape[-1])
        dx = self._product(flat, weight.t(), self.backward, weight=True)
        return dx.view(*dy.shape[:-1], weight.shape[1])

    def weight_gradient(self, dy: Tensor, x: Tensor) -> Tensor:
        """dy.T @ x, summed over all leading dims. dy (..., F), x (..., D) -> (F, D)."""
        return self._product(dy.flatten(0, -2).t(), x.flatten(0, -2).t(), self.backward)

    def tile(self, shape: torch.Size, weight: bool = False) -> tuple[int, int]:
        """(rows, columns) that share a scale, of a factor whose last dim is summed."""
        if self.scaling == "tensor":
            return max(1, shape[-2]), max(1, shape[-1])
        if self.scaling == "row":
            return 1, max(1, shape[-1])
        return (BLOCK if weight else 1), BLOCK

    def rounded(self, x: Tensor, form: Format = E4M3, weight: bool = False) -> Tensor:
        """A factor (rows, summed dim), rounded, in its own dtype."""
        rows, columns = self.tile(x.shape, weight)
        if x.is_contiguous() or not x.t().is_contiguous():
            return round_tiles(x.contiguous(), rows, columns, form)
        return round_tiles(x.t(), columns, rows, form).t()  # in the order of its memory

    def _product(self, a: Tensor, b: Tensor, form: Format, weight: bool = False) -> Tensor:
        """a @ b.T. a (m, k) in `form`, b (n, k) in E4M3."""
        if _multiplies(a, b, self.scaling):
            return self.multiply(a, b, form, weight)
        return F.linear(self.rounded(a, form), self.rounded(b, E4M3, weight))

    def multiply(self, a: Tensor, b: Tensor, form: Format, weight: bool = False) -> Tensor:
        """`_product` by the device's matmul of fp8, summed in fp32 rather than with the fewer bits of fast sums."""
        (a8, a_scale), (b8, b_scale) = (
            encode(a, *self.tile(a.shape), form),
            encode(b, *self.tile(b.shape, weight), E4M3),
        )
        kind = _KINDS[self.scaling]
        if self.scaling == "tensor":
            a_scale, b_scale = a_scale.view(()), b_scale.view(())
        elif self.scaling == "row":
            b_scale = b_scale.t()
        else:  # one for each row and 128 columns, column by column
            b_scale = b_scale.repeat_interleave(len(b) // len(b_scale), 0)
            a_scale, b_scale = (scale.t().contiguous().t() for scale in (a_scale, b_scale))
        return F.scaled_mm(
            a8, b8.t(), a_scale, kind, b_scale, kind, output_dtype=a.dtype, use_fast_accum=False
        )


_KINDS = {
    "tensor": F.ScalingType.TensorWise,
    "row": F.ScalingType.RowWise,
    "block": F.ScalingType.BlockWise1x128,
}


def grouped_forward(how: Fp8, rows_MD: Tensor, weight_EFD: Tensor, ends_E: Tensor) -> Tensor:
    """Each expert's rows, times its weight: (M, F). Experts' matmuls are always those of bf16 on rounded numbers."""
    return F.grouped_mm(how.rounded(rows_MD), _experts(how, weight_EFD).transpose(1, 2), offs=ends_E)


def grouped_input_gradient(how: Fp8, dy_MF: Tensor, weight_EFD: Tensor, ends_E: Tensor) -> Tensor:
    """(M, D)."""
    weight = _experts(how, weight_EFD.transpose(1, 2)).transpose(1, 2)
    return F.grouped_mm(how.rounded(dy_MF, how.backward), weight, offs=ends_E)


def grouped_weight_gradient(how: Fp8, dy_MF: Tensor, rows_MD: Tensor, ends_E: Tensor) -> Tensor:
    """(E, F, D). A tile may have rows of two experts."""
    return F.grouped_mm(how.rounded(dy_MF.t(), how.backward), how.rounded(rows_MD.t()).t(), offs=ends_E)


def _experts(how: Fp8, weight: Tensor) -> Tensor:
    """A stack of weights, each rounded by itself."""
    return torch.stack([how.rounded(one, weight=True) for one in weight])


def round_tiles(x: Tensor, rows: int, columns: int, form: Format) -> Tensor:
    """x (r, c), contiguous, rounded to a format. Each tile of `rows` x `columns` has a scale."""
    if x.device.type == "cpu" and native.usable(x) and x.numel():
        out = torch.empty_like(x)
        native.call(
            "round_tiles", x.dtype, x, out, *x.shape, rows, columns, form.fraction, form.highest, form.lowest,
            float(form.largest),
        )  # fmt: skip
        return out
    r, c = x.shape
    padded = F.pad(x.float(), (0, -c % columns, 0, -r % rows))
    tiles = padded.unflatten(1, (-1, columns)).unflatten(
        0, (-1, rows)
    )  # (r / rows, rows, c / columns, columns)
    scale = power_of_two(tiles.abs().amax((1, 3), keepdim=True), form)
    back = (tiles * scale).to(_dtype(form)).float() / scale
    return back.flatten(2, 3).flatten(0, 1)[:r, :c].to(x.dtype)


def encode(x: Tensor, rows: int, columns: int, form: Format) -> tuple[Tensor, Tensor]:
    """x (r, c) as numbers of 8 bits, contiguous, and the factors (fp32) that undo the scales of its tiles: (r / rows, c
    / columns). The tiles are whole."""
    tiles = x.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))  # (r / rows, rows, c / columns, columns)
    largest = torch.maximum(tiles.amax((1, 3), keepdim=True), -tiles.amin((1, 3), keepdim=True))
    scale = power_of_two(largest.float(), form)
    numbers = (tiles * scale.to(x.dtype)).to(_dtype(form)).reshape(x.shape)  # a power of two rounds nothing
    return numbers.contiguous(), 1 / scale[:, 0, :, 0]


def power_of_two(largest: Tensor, form: Format) -> Tensor:
    """The largest powers of two, times which numbers as large as `largest` (fp32) are in a format's range."""
    fraction, exponent = torch.frexp(largest)
    power = form.highest - (exponent - 1) - (2 * fraction > form.largest / 2.0**form.highest).int()
    one = torch.ones_like(largest)
    return torch.where(largest > 0, torch.ldexp(one, power.clamp(max=110)), one)


def _dtype(form: Format) -> torch.dtype:
    return getattr(torch, form.torch)


def _multiplies(a: Tensor, b: Tensor, scaling: str) -> bool:
    """True if the device has matmuls of fp8 for factors of these shapes."""
    if a.device.type != "cuda" or a.shape[1] % 16 or b.shape[0] % 16:
        return False
    if scaling == "block":  # cuBLAS has these on Hopper only
        return a.shape[1] % BLOCK == 0 and b.shape[0] % BLOCK == 0 and _capability(a.device)[0] == 9
    return _capability(a.device) >= (8, 9)


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    if torch.version.hip is not None:
        return 0, 0
    return torch.cuda.get_device_capability(device)
