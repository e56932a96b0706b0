"""Which layers round the factors of their matmuls (kernels/rounded.py): the linear layers and experts of the blocks.
Embedding, output layer, norms, routers and attention's own matmuls stay in the working dtype, and so do the blocks that
the recipe excepts."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from fivefold.kernels.rounded import RoundedMatmuls, rounded_matmuls
from fivefold.models.layers import Linear
from fivefold.models.mixture import Experts
from fivefold.parallel.tensor import CutLinear
from fivefold.precision import PRECISIONS
from fivefold.recipe import Recipe

Layer = Linear | CutLinear | Experts


def wanted(recipe: Recipe) -> RoundedMatmuls | None:
    """How the layers multiply, if the recipe's mode rounds factors. `auto` never does."""
    mode = PRECISIONS.get(recipe.precision.mode)
    return None if mode is None else rounded_matmuls(mode, recipe.precision)


def apply(stage: nn.Module, recipe: Recipe) -> None:
    """Lets the layers of a stage multiply as the recipe's mode says."""
    how, precision = wanted(recipe), recipe.precision
    if how is None:
        return
    blocks = range(precision.fp8_skip_first, recipe.model.layers - precision.fp8_skip_last)
    for name, module in stage.named_modules():
        if name.startswith("blocks.") and int(name.split(".")[1]) in blocks and isinstance(module, Layer):
            module.rounded = how


def layers(stage: nn.Module) -> Iterator[tuple[str, Layer]]:
    """The layers of a stage that round factors, with their names."""
    for name, module in stage.named_modules():
        if isinstance(module, Layer) and module.rounded is not None:
            yield name, module
