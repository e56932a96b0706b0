"""Which layers multiply in fp8 (kernels/fp8.py): the linear layers and experts of the blocks. Embedding, output layer,
norms, routers and attention's own matmuls stay in the working dtype, and so do the blocks that the recipe excepts."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from fivefold.kernels.fp8 import Fp8
from fivefold.models.layers import Linear
from fivefold.models.mixture import Experts
from fivefold.parallel.tensor import CutLinear
from fivefold.precision import PRECISIONS
from fivefold.precision.fp8 import FP8, GRADIENTS
from fivefold.recipe import Recipe

Layer = Linear | CutLinear | Experts


def wanted(recipe: Recipe) -> Fp8 | None:
    """How the layers multiply, if the recipe's mode is fp8. `auto` never is."""
    precision = recipe.precision
    if precision.mode == "auto" or PRECISIONS[precision.mode].products != FP8:
        return None
    return Fp8(precision.fp8_scaling, GRADIENTS[precision.fp8_backward])


def apply(stage: nn.Module, recipe: Recipe) -> None:
    """Lets the layers of a stage multiply as the recipe's mode says."""
    how, precision = wanted(recipe), recipe.precision
    if how is None:
        return
    blocks = range(precision.fp8_skip_first, recipe.model.layers - precision.fp8_skip_last)
    for name, module in stage.named_modules():
        if name.startswith("blocks.") and int(name.split(".")[1]) in blocks and isinstance(module, Layer):
            module.fp8 = how


def layers(stage: nn.Module) -> Iterator[tuple[str, Layer]]:
    """The layers of a stage that multiply in fp8, with their names."""
    for name, module in stage.named_modules():
        if isinstance(module, Layer) and module.fp8 is not None:
            yield name, module
