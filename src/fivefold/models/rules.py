"""Rules between the fields of `[model]` that hold in every layout. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fivefold.models.card import Card, Contradiction, card_of
from fivefold.models.registry import ARCHITECTURES, file_of
from fivefold.models.section import ModelSection
from fivefold.spread.layout import divisors

EXPERT_FIELDS = (
    "experts", "experts_per_token", "shared_experts", "expert_ffn_dim", "dense_layers", "router_score",
    "router_normalize", "balance", "aux_loss_weight", "balance_rate", "z_loss_weight", "capacity_factor",
)  # fmt: skip
PLAIN = ModelSection()


def model_rules(model: ModelSection, tp: int = 1) -> Iterator[Contradiction]:
    """Yields every rule that a model breaks; its single fields are valid. tp: proposed numbers of heads suit it."""
    card = card_of(model)
    yield from _heads(model, card, tp)
    if not card.grouped_queries and model.kv_heads and model.kv_heads != model.heads:
        yield (
            {"model.kv_heads", "model.heads"},
            f"model.kv_heads = {model.kv_heads}: {model.arch} needs kv_heads = heads "
            f"(only {having('grouped_queries')} allow fewer)",
        )
    if not card.rotary and model.rope_theta != PLAIN.rope_theta:
        yield (
            {"model.rope_theta"},
            f"model.rope_theta: {model.arch} has no rotary positions (only {having('rotary')} have)",
        )
    if not card.has_experts:
        for name in EXPERT_FIELDS:
            if getattr(model, name) != getattr(PLAIN, name):
                yield {f"model.{name}", "model.arch"}, f"model.{name}: {no_experts(model)}"
    yield from card.rules()


def _heads(model: ModelSection, card: Card, tp: int) -> Iterator[Contradiction]:
    fields, width = {"model.dim", "model.heads"}, model.dim // model.heads
    if model.dim % model.heads:
        message = f"model.dim = {model.dim} must be divisible by model.heads = {model.heads}"
        yield fields, message + _fitting_heads(model, card, tp)
    elif card.rotary and width % 2:
        message = f"model.dim / model.heads = {width} must be even: RoPE rotates pairs"
        yield fields, message + _fitting_heads(model, card, tp)
    if model.kv_heads and model.heads % model.kv_heads:
        yield (
            {"model.kv_heads", "model.heads"},
            f"model.kv_heads = {model.kv_heads} must divide model.heads = {model.heads}. "
            f"Nearest valid: model.kv_heads = {_closest(model.kv_heads, divisors(model.heads))}",
        )


def _fitting_heads(model: ModelSection, card: Card, tp: int) -> str:
    """Proposes the closest number of heads with which the model can be built."""
    fits = [
        heads
        for heads in divisors(model.dim)
        if not (card.rotary and model.dim // heads % 2)
        and heads % (model.kv_heads or 1) == 0
        and (model.kv_heads or heads) % tp == 0
    ]
    return f". Nearest valid: model.heads = {_closest(model.heads, fits)}" if fits else ""


def no_experts(model: ModelSection, use: str = "") -> str:
    """The error text for a field that needs experts: `llama has no experts (arch = "moe" has)`."""
    return f'{model.arch} has no experts{use and f" {use}"} (arch = "{having("has_experts")}" has)'


def having(fact: str, word: str = "and") -> str:
    """The architectures whose cards have this property: `llama and moe`."""
    return f" {word} ".join(arch for arch in ARCHITECTURES if getattr(file_of(arch, "card").Card, fact))


def _closest(number: int, choices: Sequence[int]) -> int:
    return min(choices, key=lambda choice: (abs(choice - number), choice))
