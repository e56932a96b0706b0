"""The self-test of modes that round factors: each layer's three matmuls on random rows and its own weights,
against the working dtype.

Each factor of a matmul is rounded by at most u = 2^-(fraction bits + 1) of its size. The roundings are independent, so
the error of a product's feature is at most sqrt(u_a^2 + u_b^2) of its norm, on average half of that. It is more if many
numbers are too small for their tile's scale, and if a device's matmul is wrong. Such layers multiply in the working
dtype.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass

import torch
from torch import Tensor

from fivefold.comm import Axis
from fivefold.kernels import input_gradient, linear, weight_gradient
from fivefold.kernels.rounded import RoundedMatmuls
from fivefold.models.card import card_of
from fivefold.parallel.parallelize import rounded_layers, rounding
from fivefold.precision import PRECISIONS, torch_dtype
from fivefold.recipe import Recipe
from fivefold.step.state import State

ROWS = 128  # random rows; a tile of them shares a scale
PRODUCTS = ("output", "gradient of its input", "gradient of its weight")


@dataclass(frozen=True)
class Tested:
    """errors: of the three products of each weight: that of the worst feature, relative to its norm; infinite if one is
    not finite. allowed: the bound of each."""

    errors: dict[str, tuple[float, ...]]
    allowed: tuple[float, ...]

    @property
    def failed(self) -> dict[str, str]:
        """The layers that are too far from the working dtype, and why."""
        found: dict[str, str] = {}
        for name, errors in self.errors.items():
            for product, error, bound in zip(PRODUCTS, errors, self.allowed, strict=True):
                if error > bound:
                    why = f"the {product} is {error:.1%} off, allowed {bound:.1%}"
                    found.setdefault(
                        name.rpartition(".")[0],
                        why if math.isfinite(error) else f"its {product} is not finite",
                    )
        return found


def allowed(how: RoundedMatmuls) -> tuple[float, ...]:
    """The largest relative error of each product."""
    forward, backward = (2.0 ** -(form.fraction + 1) for form in (how.inputs, how.gradients))
    return math.hypot(forward, forward), math.hypot(backward, forward), math.hypot(backward, forward)


def self_test(state: State, recipe: Recipe, axis: Axis) -> Tested | None:
    """Tests the weights that each rank keeps. All ranks of the axis get the largest errors. None: the recipe's mode
    rounds none."""
    how = rounding(recipe)
    if how is None:
        return None
    working = torch_dtype(PRECISIONS[recipe.precision.mode].working)
    masters, names = state.masters(), list(card_of(recipe.model).parameters)
    table = torch.full((len(names), len(PRODUCTS)), -1.0, dtype=torch.float64)
    for stage in state.parallel.stages:
        for layer, module in rounded_layers(stage):
            for leaf, _ in module.named_parameters(recurse=False):
                master = masters.get(name := f"{layer}.{leaf}")
                if leaf != "bias" and master is not None and master.numel():
                    weights = master.to(state.mesh.device, working).reshape(-1, *master.shape[-2:])
                    each = [_errors(weight, how, f"{name} {i}") for i, weight in enumerate(weights)]
                    table[names.index(name)] = torch.tensor(each, dtype=torch.float64).amax(0)
    found = axis.all_reduce(table.to(axis.device), "max").tolist()
    errors = {name: tuple(row) for name, row in zip(names, found, strict=True) if row[0] >= 0}
    return Tested(errors, allowed(how))


def fall_back(state: State, failed: set[str]) -> None:
    """Lets these layers multiply in the working dtype."""
    for stage in state.parallel.stages:
        for name, module in list(rounded_layers(stage)):
            if name in failed:
                module.rounded = None


@torch.no_grad()
def _errors(weight: Tensor, how: RoundedMatmuls, name: str) -> list[float]:
    """Of one weight (F, D)."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    x, dy = (
        torch.randn(ROWS, size, generator=generator).to(weight) for size in (weight.shape[1], weight.shape[0])
    )
    try:
        found = how.forward(x, weight), how.input_gradient(dy, weight), how.weight_gradient(dy, x)
    except RuntimeError:  # the device's library does not take these shapes
        return [math.inf] * len(PRODUCTS)
    wanted = linear(x, weight), input_gradient(dy, weight), weight_gradient(dy, x)
    return [_relative(a, b, dim) for a, b, dim in zip(found, wanted, (0, 0, 1), strict=True)]


def _relative(found: Tensor, wanted: Tensor, dim: int) -> float:
    """The largest relative error of a feature: the norms are over the other dim."""
    difference, size = (found.float() - wanted.float()).norm(dim=dim), wanted.float().norm(dim=dim)
    error = torch.where(difference == 0, 0.0, difference / size).max().item()
    return error if math.isfinite(error) else math.inf
