"""Llama with a mixture of experts as feed-forward; see models/mixture.py for the papers."""

from __future__ import annotations

from fivefold.models.card import card_of
from fivefold.models.llama import module as llama
from fivefold.models.mixture import Mixture
from fivefold.models.section import ModelSection


class Model(llama.Model):
    """Llama with a `Mixture` as feed-forward in all blocks except the first `dense_layers`."""

    def __init__(self, model: ModelSection) -> None:
        super().__init__(model)
        for block, mixed in zip(self.blocks.values(), card_of(model).mixed, strict=True):
            if mixed:
                block.mlp = Mixture(model)
