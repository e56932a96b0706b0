"""The models: plain modules that know nothing of ranks, built from a recipe's `[model]` section."""

from __future__ import annotations

import torch
from torch import nn

from fivefold.models.bert import BERT
from fivefold.models.cache import Cache
from fivefold.models.gpt2 import GPT2
from fivefold.models.init import init_weights
from fivefold.models.llama import Llama
from fivefold.models.model import LanguageModel
from fivefold.models.moe import MoE
from fivefold.recipe import flops_per_token
from fivefold.recipe.schema import ModelSection

__all__ = ["ARCHITECTURES", "Cache", "LanguageModel", "build", "flops_per_token", "init_weights"]

ARCHITECTURES: dict[str, type[nn.Module]] = {"llama": Llama, "gpt2": GPT2, "bert": BERT, "moe": MoE}


def build(model: ModelSection, *, device: torch.device | str = "meta", seed: int | None = 0) -> nn.Module:
    """Builds the model of a resolved `[model]` section, in fp32.

    On device "meta" (the default) it has shapes and no memory. Elsewhere it is made on "meta" first, so
    that no weight is set twice, and then gets its initial weights (see `init_weights`); `seed=None` leaves
    memory as it is, for a caller that loads weights at once.
    """
    with torch.device("meta"):
        module = ARCHITECTURES[model.arch](model)
    if torch.device(device).type == "meta":
        return module
    module.to_empty(device=device)
    if seed is not None:
        init_weights(module, seed, model)
    return module
