"""Weights that are read when they are needed, and those of files that keep them in blocks of few bits, with a scale
per block. torch only to read them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from fivefold.precision import DTYPES
from fivefold.precision.formats import BLOCKS
from fivefold.precision.fp8 import BLOCK
from fivefold.sharding.parts import Shape

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True)
class Weight:
    """A weight that is read when it is needed: all of it by `read()`, rows of one of ours by `read((start, stop))`."""

    shape: Shape
    dtype: torch.dtype
    read: Callable[..., Tensor]


def held(state: Mapping[str, Tensor]) -> dict[str, Weight]:
    """Tensors in memory as weights."""

    def rows_of(tensor: Tensor, rows: tuple[int, int] | None = None) -> Tensor:
        return tensor[slice(*rows)] if rows else tensor

    return {n: Weight(tuple(t.shape), t.dtype, partial(rows_of, t)) for n, t in state.items()}


SCALE = "_scale_inv"
"""What the name of a weight's scales has behind that of the weight."""
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK]}
"""A quantisation that is read: DeepSeek-V3's."""
MXFP4 = next(block for block in BLOCKS if block.name == "mxfp4 e2m1")
"""Another one: that of gpt-oss's experts."""
PACKED = ("_blocks", "_scales")
"""What the names of its parts have behind that of the weight."""
QUANTISED: dict[str, dict[str, Any]] = {"fp8": FP8, "mxfp4": {"quant_method": "mxfp4"}}
NAMES = tuple(d.torch for d in DTYPES.values() if d.stored and d.multiplied)
"""torch's names of the dtypes that weights may have."""


class Blocks(NamedTuple):
    """A weight of few bits: its numbers, and a scale for each block. packed: in MXFP4, else in fp8."""

    values: Weight
    scales: Weight
    packed: bool


def blocks_of(given: dict[str, Weight], wanted: Set[str]) -> dict[str, Blocks]:
    """The wanted weights that are in blocks, which `given` has no more."""
    found = dict[str, Blocks]()
    for name in sorted(wanted):
        parts = [name + end for end in PACKED]
        if name + SCALE in given and name in given:
            found[name] = Blocks(given.pop(name), given.pop(name + SCALE), False)
        elif given.keys() >= {*parts}:
            values, scales = map(given.pop, parts)
            found[name] = Blocks(values, scales, True)
    return found


def unlike(name: str, blocks: Blocks) -> list[str]:
    """How a weight's blocks and scales differ from those that can be read."""
    (values, scales, packed), kinds = blocks, [name_of(weight.dtype) for weight in blocks[:2]]
    if packed:
        whole = (
            len(values.shape) == 4 and 2 * values.shape[3] == MXFP4.size and values.shape[:3] == scales.shape
        )
        allowed = f"uint8, with a scale for each {MXFP4.size} values, two to a byte"
        fits, name = whole and kinds == ["uint8"] * 2, name + PACKED[0]
    else:
        R, C = values.shape if len(values.shape) == 2 else (0, 0)
        fits = kinds[0] == "float8_e4m3fn" and scales.shape == (-(-R // BLOCK), -(-C // BLOCK))
        allowed = f"float8_e4m3fn with a scale for each {BLOCK} x {BLOCK} block"
    said = (
        f"weight {name} has dtype {kinds[0]} and shape {values.shape}, and scales {kinds[1]} {scales.shape}"
    )
    return [] if fits else [f"{said}; allowed: {allowed}"]


def plain(blocks: Blocks, dtype: torch.dtype) -> Weight:
    """The weight in `dtype`."""
    values, scales, packed = blocks
    if not packed:
        return replace(values, dtype=dtype, read=partial(_widened, values, scales, dtype))
    E, R, groups, each = values.shape
    return Weight((E, 2 * groups * each, R), dtype, partial(_unpacked, values, scales, dtype))


def _widened(weight: Weight, scale: Weight, dtype: torch.dtype) -> Tensor:
    """A weight in 8 bits, times the scale of each block, in fp32, rounded to `dtype` (DeepSeek-V3, arXiv 2412.19437,
    section 3.3)."""
    R, C = weight.shape
    factors = scale.read().float().repeat_interleave(BLOCK, 0)[:R].repeat_interleave(BLOCK, 1)[:, :C]
    return weight.read().float().mul_(factors).to(dtype)


def _unpacked(
    values: Weight, scales: Weight, dtype: torch.dtype, rows: tuple[int, int] | None = None
) -> Tensor:
    """Experts in MXFP4 (OCP Microscaling 1.0): values (E, R, C / 32, 16), two in each byte, the lower half first, and
    scales (E, R, C / 32) -> (E, C, R), transposed as those of 16 bits are there."""
    import torch

    numbers = torch.tensor([MXFP4.element.value(code) for code in range(2**MXFP4.element.bits)])
    powers = torch.tensor([MXFP4.scale.value(code) for code in range(2**MXFP4.scale.bits - 1)] + [math.nan])
    packed, found = values.read(rows), []
    for each, scale in zip(packed, scales.read(rows), strict=True):  # one expert at a time, in fp32
        pairs = torch.stack((each & 15, each >> 4), dim=-1).flatten(-2)
        found.append((numbers[pairs.int()] * powers[scale.int()][..., None]).to(dtype).flatten(-2).t())
    return torch.stack(found)


def name_of(dtype: torch.dtype | str) -> str:
    """torch's name of a dtype."""
    return str(dtype).removeprefix("torch.")
