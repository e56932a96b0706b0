"""Rounding to numbers of 8 bits with a power of two for each tile, in one pass over memory, with the transpose if both
are needed. A tile is 1 x 128, 128 x 128 (DeepSeek-V3, arXiv 2412.19437, section 3.3), or the whole tensor,
whose largest number PyTorch finds first.

Numbers are rounded by integer operations. So every device gives the same bits, also those without fp8, and Triton's
interpreter, whose own conversion is wrong.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

from fivefold.kernels.gpu.language import blocks, constexpr, jit, runs, tl
from fivefold.kernels.rounded import encode_tiles
from fivefold.precision.formats import FORMATS, Format
from fivefold.precision.fp8 import BLOCK

FEW, KINDS = 32, {(1, BLOCK): "row", (BLOCK, BLOCK): "block", (0, 0): "tensor"}
"""Rows of a program that transposes nothing; what shares a scale, by `tile`."""


@jit
def _power(bits, HIGHEST: constexpr, MOST: constexpr):
    """`rounded.power_of_two` of positive fp32 numbers, and its inverse. They come as bits: as whole numbers NaN is the
    largest."""
    power = tl.minimum(HIGHEST + 127 - (bits >> 23) - ((bits & 0x7FFFFF) > MOST).to(tl.int32), 110)
    power = tl.where(bits == 0, 0, power)
    power = tl.where(bits < 0x7F800000, power, 128)  # to infinity: times zero, it is NaN
    scale = ((power + 127) << 23).to(tl.float32, bitcast=True)
    undo = ((127 - tl.minimum(power, 110)) << 23).to(tl.float32, bitcast=True)
    wrong = scale - scale  # 0, or NaN
    return scale + wrong, undo + wrong


@jit
def _codes(y, FRACTION: constexpr, LOWEST: constexpr):
    """fp32 in the format's range -> bytes, to the nearest, ties to even."""
    bits = y.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    half = (1 << (22 - FRACTION)) - 1 + ((size >> (23 - FRACTION)) & 1)
    normal = ((size + half) >> (23 - FRACTION)) - ((126 + LOWEST) << FRACTION)
    # its last bit is that of subnormals
    magic = tl.full(size.shape, (150 + LOWEST - FRACTION) << 23, tl.int32)
    small = (tl.abs(y) + magic.to(tl.float32, bitcast=True)).to(tl.int32, bitcast=True) - magic
    code = tl.where(size < ((127 + LOWEST) << 23), small, normal)
    code = tl.where(size > 0x7F800000, 0x7F, code)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@jit
def _round_kernel(
    x, largest, out, factors, turned, turned_factors, R, C,
    KIND: constexpr, STRAIGHT: constexpr, TURNED: constexpr, ROWS: constexpr, COLUMNS: constexpr,
    HIGHEST: constexpr, MOST: constexpr, FRACTION: constexpr, LOWEST: constexpr,
):  # fmt: skip
    """out (R, C), factors of its tiles; turned (C, R), factors of the tiles of x.T."""
    row, column = tl.program_id(0), tl.program_id(1)
    rows, columns = row * ROWS + tl.arange(0, ROWS), column * COLUMNS + tl.arange(0, COLUMNS)
    here = (rows < R)[:, None] & (columns < C)[None, :]
    places = rows.to(tl.int64)[:, None] * C + columns[None, :]
    y = tl.load(x + places, here, 0.0).to(tl.float32)
    bits = y.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    across, down = tl.cdiv(C, COLUMNS), tl.cdiv(R, ROWS)
    if KIND == "tensor":
        scale, undo = _power(tl.load(largest).to(tl.int32, bitcast=True) & 0x7FFFFFFF, HIGHEST, MOST)
    else:
        scale, undo = _power(tl.max(tl.max(bits, 1), 0), HIGHEST, MOST)
    if STRAIGHT:
        if KIND == "row":
            scale, undo = _power(tl.max(bits, 1)[:, None], HIGHEST, MOST)
            tl.store(factors + rows[:, None] * across + column, undo, (rows < R)[:, None])
        if KIND == "block":
            tl.store(factors + row * across + column, undo)
        tl.store(out + places, _codes(y * scale, FRACTION, LOWEST), here)
    if TURNED:
        if KIND == "row":
            scale, undo = _power(tl.max(bits, 0)[None, :], HIGHEST, MOST)
            tl.store(turned_factors + columns[None, :] * down + row, undo, (columns < C)[None, :])
        if KIND == "block":
            tl.store(turned_factors + column * down + row, undo)
        places = columns.to(tl.int64)[:, None] * R + rows[None, :]
        tl.store(turned + places, tl.trans(_codes(y * scale, FRACTION, LOWEST)), tl.trans(here))
    if KIND == "tensor":
        tl.store(factors, undo)
        tl.store(turned_factors, undo)


def compiled(form: Format, kind: str, straight: bool, turned: bool) -> dict[str, Any]:
    """What the kernel is compiled for."""
    fraction = round((form.largest / 2.0**form.highest - 1) * 2**23)
    rows = FEW if kind == "row" and not turned else BLOCK
    found = {"KIND": kind, "STRAIGHT": straight, "TURNED": turned, "ROWS": rows, "COLUMNS": BLOCK}
    found |= {"HIGHEST": form.highest, "MOST": fraction, "FRACTION": form.fraction, "LOWEST": form.lowest}
    return found | {"num_warps": rows // 8}


def tile(rows: int, columns: int, shape: torch.Size) -> tuple[int, int]:
    """A tile as the kernel names it: (0, 0) is the whole tensor, also its transpose. It has those of KINDS."""
    return (0, 0) if (rows, columns) == tuple(shape) else (rows, columns)


def encode(x: Tensor, rows: int, columns: int, form: Format, both: bool = False) -> tuple[Tensor, ...]:
    """As `fp8.encode`. x may be a transposed view. both: that of x.T, too, in one pass; x is contiguous."""
    turned = not x.is_contiguous() and x.t().is_contiguous()
    shape = tile(rows, columns, x.shape)
    return tuple(rounded(x.t() if turned else x, *shape, form.name, not turned, turned or both))


@custom_op("fivefold::round_fp8", mutates_args=())
def rounded(x: Tensor, rows: int, columns: int, form: str, straight: bool, turned: bool) -> list[Tensor]:
    """Numbers and factors as `fp8.encode` gives them of x (R, C) if `straight`, and then of x.T if `turned`. rows,
    columns: of `tile`."""
    if not runs(x):
        each = [(y, rows or len(y), columns or y.shape[1]) for y in [x] * straight + [x.t()] * turned]
        return [t for y, r, c in each for t in encode_tiles(y, r, c, FORMATS[form])]
    kind = KINDS[rows, columns]
    x, (R, C), cut = x.contiguous(), x.shape, compiled(FORMATS[form], kind, straight, turned)
    found = _empty(x, rows, columns, form, straight, turned)
    largest = torch.maximum(x.amax(), -x.amin()).float() if kind == "tensor" else x
    pointers = [t if t.dtype == torch.float32 else t.view(torch.uint8) for t in (*found[:2], *found[-2:])]
    _round_kernel[(blocks(R, cut["ROWS"]), blocks(C, BLOCK))](x, largest, *pointers, R, C, **cut)
    return found


@rounded.register_fake
def _empty(x: Tensor, rows: int, columns: int, form: str, straight: bool, turned: bool) -> list[Tensor]:
    found, dtype = list[Tensor](), getattr(torch, FORMATS[form].torch)
    for r, c in [tuple(x.shape)] * straight + [tuple(x.t().shape)] * turned:
        found.append(x.new_empty(r, c, dtype=dtype))
        found.append(x.new_empty(r // (rows or r), c // (columns or c), dtype=torch.float32))
    return found
