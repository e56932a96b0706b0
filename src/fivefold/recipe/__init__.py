"""What to train: a strict recipe in TOML, its errors, and the numbers that follow from it. No torch."""

from fivefold.recipe.count import active_parameters, count_parameters, flops_per_token
from fivefold.recipe.explain import Explained, explain
from fivefold.recipe.load import change, load, shipped, source
from fivefold.recipe.resolve import expected_vocab_size, resolve, resolve_model, tokens_per_step, total_steps
from fivefold.recipe.schema import (
    CheckpointSection,
    DataSection,
    LayoutSection,
    ModelSection,
    ObserveSection,
    OptimSection,
    PrecisionSection,
    Recipe,
    TrainSection,
)
from fivefold.recipe.write import to_toml

__all__ = [
    "CheckpointSection",
    "DataSection",
    "Explained",
    "LayoutSection",
    "ModelSection",
    "ObserveSection",
    "OptimSection",
    "PrecisionSection",
    "Recipe",
    "TrainSection",
    "active_parameters",
    "change",
    "count_parameters",
    "expected_vocab_size",
    "explain",
    "flops_per_token",
    "load",
    "resolve",
    "resolve_model",
    "shipped",
    "source",
    "to_toml",
    "tokens_per_step",
    "total_steps",
]
