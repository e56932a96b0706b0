"""Dtypes of the computation, and the fp32 state behind it."""

from fivefold.precision.weights import Weights

__all__ = ["Weights"]
