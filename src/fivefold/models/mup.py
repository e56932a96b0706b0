"""The maximal update parametrization (mu-P, arXiv 2203.03466), with CompleteP's of depth (arXiv 2505.01618), as data:
by which powers of a model's width and depth each kind of parameter starts smaller and learns slower. No torch.

The papers also have factors in the forward pass: on logits, on the branches that are added to the residual stream. An
optimizer whose update does not depend on the gradient's size trains the same if such a factor is part of the weight
behind it, and the weight's initial values and learning rate are multiplied by it (the symmetry of section J.2.1 in the
first paper). So nothing here changes what a model computes: every layout trains it, and an exported folder has the same
logits. With tied embeddings, the factor on logits is part of the last norm's weight. Attention's scale needs none if
heads keep their width.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from fivefold.models.card import Contradiction, card_of
from fivefold.models.section import ModelSection
from fivefold.sharding.parts import TIED, is_matrix


class Scales(NamedTuple):
    """Powers of D / `base_dim` by which the initial standard deviation (of a norm its value) and the learning rate are
    divided."""

    init: float
    rate: float


KINDS = {
    # Norms and biases; also tied embeddings, as the last norm is the output's factor
    "vector": Scales(0.0, 0.0),
    "embedding": Scales(0.0, 0.5),  # a token reads one row. Its rate is u-muP's (arXiv 2407.17465)
    "hidden": Scales(0.5, 1.0),  # matrices between features, whose numbers grow with D
    "output": Scales(1.0, 1.0),  # from features to a fixed number: logits, an expert for each token
}
"""Table 3 of the first paper, for Adam, but for embeddings: with its constant rate for them, the best rate of a whole
model still falls with the width (benchmarks/dial.py). That of hidden matrices is the optimizer's
(`OptimizerCard.width_power`)."""
INTO_RESIDUAL = ("attention.out", "mlp.down", "mlp.shared.down", "mlp.experts.down")
"""What is added to the residual stream ends in these. Both numbers are also divided by L / `base_layers`, as often as
branches are added (CompleteP, alpha = 1)."""


def kind(model: ModelSection, name: str, shape: tuple[int, ...]) -> str:
    """The kind of a parameter of this whole shape."""
    card = card_of(model)
    router = ".router." in name and is_matrix(name, shape)
    if name.startswith("head") or router or (model.tie_embeddings and name.startswith("norm.")):
        return "output"
    if not is_matrix(name, shape) or (model.tie_embeddings and name == TIED):
        return "vector"
    return "hidden" if name.startswith(f"{card.stack}.") else "embedding"


def scales(
    model: ModelSection, name: str, shape: tuple[int, ...], width_power: float | None = None
) -> tuple[float, float]:
    """Factors on a parameter's initial values, beside `init_std`, and on its learning rate. shape: the whole one.
    width_power: of the optimizer; None: Adam's."""
    if model.base_dim is None:
        return 1.0, 1.0
    found, width = KINDS[what := kind(model, name, shape)], model.dim / model.base_dim
    power = found.rate if width_power is None or what != "hidden" else width_power
    deep = into_residual(name) and model.base_layers
    depth = model.layers / model.base_layers if deep and model.base_layers else 1.0
    return width**-found.init / depth, width**-power / depth


def into_residual(name: str) -> bool:
    """True if what a parameter computes is added to the residual stream."""
    return name.removesuffix(".weight").removesuffix(".bias").removesuffix("_bias").endswith(INTO_RESIDUAL)


def rules(model: ModelSection) -> Iterator[Contradiction]:
    """Refuses models of whose parameters the papers do not say how they scale: masked ones with a layer behind the
    blocks, norms that undo the scale of what is added, latent vectors that need not grow with D, and linear
    attention."""
    card, keys = card_of(model), {"model.base_dim", "model.arch"}
    if model.base_dim is None and model.base_layers is not None:
        yield (
            {"model.base_layers", "model.base_dim"},
            f"model.base_layers = {model.base_layers} needs model.base_dim, the width of the same model. Nearest "
            f"valid: base_dim = {model.dim}",
        )
    if model.base_dim and (
        card.objective != "causal"
        or card.post_norm
        or card.sandwich_norm
        or card.latent_attention
        or card.linear_attention
    ):
        yield (
            keys,
            f"model.base_dim = {model.base_dim}: mu-P is not known for {model.arch}, only for decoders with norms "
            'before sublayers and without latent or linear attention. Nearest valid: arch = "llama"',
        )
