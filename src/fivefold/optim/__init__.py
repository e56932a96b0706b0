"""Optimizers, learning-rate schedules, clipping. This file and the cards import no torch."""

from fivefold.optim.card import OptimizerCard, kept_in, rounding_traffic, update_traffic
from fivefold.optim.registry import DEFAULT, FIELDS, OPTIMIZERS
from fivefold.optim.schedules import learning_rate
