"""Recipes: strict TOML, clear errors, and the numbers derived from them. No torch."""

from fivefold.models.card import active_parameters, count_parameters, flops_per_token, resolve_model
from fivefold.models.section import ModelSection
from fivefold.recipe.load import Recipe, change, families, load, shipped, source
from fivefold.recipe.messages import explain, to_toml
from fivefold.recipe.resolve import (
    FLOPS,
    microbatches_per_step,
    parameters,
    resolve,
    tokens_before,
    tokens_per_step,
    total_steps,
    training_flops,
)
from fivefold.recipe.rules.texts import (
    LeftOut,
    batch_size,
    expected_vocab_size,
    leave_out,
    place,
    run_steps,
    sequences_before,
)
from fivefold.recipe.schema import DataSection, FaultsSection, LayoutSection, OptimSection, TrainSection
