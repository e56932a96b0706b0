"""Llama with a mixture of experts as feed-forward; see models/mixture.py for the papers."""

from __future__ import annotations

from fivefold.models.ahead import Ahead
from fivefold.models.card import card_of
from fivefold.models.llama import module as llama
from fivefold.models.mixture import Mixture
from fivefold.models.section import ModelSection


class Model(llama.Model):
    """Llama with a `Mixture` as feed-forward in all blocks except the first `dense_layers`."""

    mixture_type: type[Mixture] = Mixture

    def __init__(self, model: ModelSection) -> None:
        super().__init__(model)
        card = card_of(model)
        for number, mixed in enumerate(card.mixed):
            block = self.blocks[str(number)]
            if mixed:
                block.mlp = self.mixture_type(model, card.gated_shared)
            if number >= model.layers:
                block.ahead = Ahead(model)
