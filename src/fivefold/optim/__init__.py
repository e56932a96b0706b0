"""Optimizers, learning-rate schedules and clipping."""

from fivefold.optim.adamw import build_adamw, load_state, state_tensors
from fivefold.optim.clip import clip_
from fivefold.optim.schedules import learning_rate

__all__ = ["build_adamw", "clip_", "learning_rate", "load_state", "state_tensors"]
