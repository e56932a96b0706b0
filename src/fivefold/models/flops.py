"""Arithmetic that training needs: counted from the recipe's numbers alone, in `fivefold.recipe.count`."""

from fivefold.recipe.count import flops_per_token

__all__ = ["flops_per_token"]
