"""Optimizers and learning-rate schedules."""

from fivefold.optim.adamw import MOMENTS, build_adamw, load_state, state_tensors
from fivefold.optim.schedules import learning_rate

__all__ = ["MOMENTS", "build_adamw", "learning_rate", "load_state", "state_tensors"]
