"""The table of dtypes, and the card of a precision mode: all that recipes, trainer, kernels and planner know of one. No
torch."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fivefold.precision.formats import Format

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Dtype:
    """A format of numbers.

    bytes: per element. torch: the name of torch's dtype that holds it. bits: of the significand, with the one that is
    not stored; a number is rounded by at most 2^-bits of its size. trains: `precision.reduce` can name it, so gradients
    can be sent in it. multiplied: torch.matmul takes it, so its rate can be measured. stored: tensors have it;
    otherwise it is a way to multiply.
    """

    name: str
    bytes: float
    torch: str
    bits: int
    trains: bool = False
    multiplied: bool = True
    stored: bool = True


DTYPES = {
    dtype.name: dtype
    for dtype in (
        Dtype("fp32", 4.0, "float32", 24, trains=True),
        Dtype("tf32", 4.0, "float32", 11, stored=False),  # how a GPU may multiply fp32
        Dtype("bf16", 2.0, "bfloat16", 8, trains=True),
        Dtype("fp16", 2.0, "float16", 11),
        Dtype("fp8", 1.0, "float8_e4m3fn", 4, multiplied=False),
        Dtype("mxfp8", 1 + 1 / 32, "float8_e4m3fn", 4, multiplied=False),  # with its share of a scale
    )
}
MASTER = "fp32"
"""The dtype of master weights, sums of gradients and optimizer states, where a mode does not say otherwise."""
TRAINED = tuple(dtype.name for dtype in DTYPES.values() if dtype.trains)
"""The dtypes in which gradients can be sent, and whose rates are measured on a machine."""


@dataclass(frozen=True)
class Mode:
    """A precision mode: which number has which dtype in training.

    working: weights that compute, and activations. master: weights that the optimizer updates; if it is `working`, they
    are the same tensors. gradient: sums over microbatches. state: the optimizer's states that its card has in fp32.
    weight: a copy of the weights that multiply rounded, which a replica keeps beside the masters; "": none.
    products: the way to multiply, a name in `DTYPES`; "": as `working`. auto: `precision.mode = "auto"` may choose it.
    scaled: the loss is scaled (optim/scaling.py). gpu: only GPUs have it. fields: of [precision], which only some
    modes have. along: each matmul's factors share scales along its own sum only, so a weight is rounded in two ways.

    kernel: the module of `fivefold.kernels` that rounds the factors of the blocks' matmuls; its `matmuls(options)`
    makes a `kernels.rounded.RoundedMatmuls` from [precision]. "": none is rounded. A device without `products`
    multiplies the rounded factors in `working`. formats: to which it may round, names in `formats.FORMATS`.

    The tolerance of `fivefold verify` follows from the row. Roundings of `working` and `products` differ between
    layouts, because sums are cut elsewhere, so they are not compared with a constant. One process trains in the mode,
    and one in fp32. Their difference is the rounding error of the mode itself, for each tensor. A layout has an error
    of the same size and another sign, so it may differ from fp32 a small factor as much (`differences.TIMES`). Errors
    of single numbers may cancel by chance; they may always reach `roundoff`. fp32 has constants instead.
    """

    name: str
    working: str
    master: str = MASTER
    gradient: str = MASTER
    state: str = MASTER
    weight: str = ""
    products: str = ""
    auto: bool = False
    scaled: bool = False
    gpu: bool = False
    along: bool = False
    fields: tuple[str, ...] = ()
    kernel: str = ""
    formats: tuple[str, ...] = ()

    @property
    def rate(self) -> str:
        """The dtype whose matmul rate the mode reaches."""
        return self.products or self.working

    @property
    def measured(self) -> str:
        """The dtype whose matmul rate is measured where no data sheet has that of `rate`."""
        return self.rate if DTYPES[self.rate].multiplied else self.working

    def rate_on(self, rates: Container[str]) -> str:
        """The dtype of matmuls on a device with these rates. Without `products` it multiplies rounded factors in
        `working`."""
        return self.working if self.kernel and self.rate not in rates else self.rate

    def multiplies(self, form: Format) -> bool:
        """True if the factors of matmuls may have this format."""
        return form.name in self.formats if self.kernel else form.multiplied == self.rate

    @property
    def roundoff(self) -> float:
        """The largest relative error of a rounded product. Numbers of 8 bits have a larger one, but a loss or a norm is
        made of thousands of them, and the mean of 256 is as exact as bf16."""
        least = DTYPES["bf16"].bits
        return 2.0 ** -(least if self.kernel else max(least, DTYPES[self.rate].bits))

    @property
    def rounds(self) -> bool:
        """True if the update's result is rounded, as `precision.rounding` says (optim/rounding.py)."""
        return self.master != MASTER

    @property
    def copies(self) -> bool:
        """True if working weights are copies of the masters (arXiv 1710.03740)."""
        return self.working != self.master


def sent(mode: Mode, reduce: str) -> str:
    """The dtype of gradient messages under `precision.reduce`: at most that of the sum over microbatches."""
    return reduce if DTYPES[reduce].bytes < DTYPES[mode.gradient].bytes else mode.gradient


MOST_IDS = 1 << 22
"""Ids of a vocabulary: a limit several times beyond what anybody trains."""


def token_bytes(vocab_size: int) -> int:
    """Bytes of a token's id on disk: an unsigned integer that holds every id of the vocabulary."""
    return 2 if vocab_size <= 1 << 16 else 4


def torch_dtype(name: str) -> torch.dtype:
    """torch's dtype of a name in `DTYPES`."""
    import torch

    return getattr(torch, DTYPES[name].torch)
