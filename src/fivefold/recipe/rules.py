"""What fields of a recipe must agree on. Each rule names the fields it looked at."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from fivefold.layout import Layout, divisors
from fivefold.recipe.layout_rules import Contradiction, layout_rules

if TYPE_CHECKING:
    from fivefold.recipe.schema import ModelSection, Recipe


def contradictions(recipe: Recipe) -> Iterator[Contradiction]:
    """Every rule that a recipe breaks, its single fields being valid."""
    yield from _model(recipe)
    yield from _experts(recipe)
    yield from _length(recipe)
    yield from _batch(recipe)
    yield from layout_rules(recipe)


def with_layout(recipe: Recipe, layout: Layout, **train: Any) -> Recipe:
    """The recipe with another layout, and other fields of [train]; not checked."""
    section = type(recipe.layout)(**vars(layout))
    return recipe.model_copy(update={"layout": section, "train": recipe.train.model_copy(update=train)})


def allows(recipe: Recipe, layout: Layout) -> bool:
    """Whether the recipe with this layout breaks no rule."""
    return not any(contradictions(with_layout(recipe, layout)))


def _model(recipe: Recipe) -> Iterator[Contradiction]:
    model = recipe.model
    if model.dim % model.heads:
        yield (
            {"model.dim", "model.heads"},
            f"model.dim = {model.dim} must be divisible by model.heads = {model.heads}{_fitting_heads(recipe)}",
        )
    elif model.arch in ("llama", "moe") and model.dim // model.heads % 2:
        yield (
            {"model.dim", "model.heads"},
            f"model.dim / model.heads = {model.dim // model.heads} must be even: RoPE turns pairs"
            f"{_fitting_heads(recipe)}",
        )
    if model.kv_heads and model.heads % model.kv_heads:
        yield (
            {"model.kv_heads", "model.heads"},
            f"model.kv_heads = {model.kv_heads} must divide model.heads = {model.heads}. "
            f"Nearest valid: model.kv_heads = {_closest(model.kv_heads, divisors(model.heads))}",
        )
    if model.arch not in ("llama", "moe"):
        if model.kv_heads and model.kv_heads != model.heads:
            yield (
                {"model.kv_heads", "model.heads"},
                f"{model.arch} has as many kv_heads as heads (only llama and moe have fewer)",
            )
        if model.rope_theta != 10000.0:
            yield (
                {"model.rope_theta"},
                f"model.rope_theta: {model.arch} has no rotary positions (only llama and moe have)",
            )
    if model.arch == "bert" and recipe.train.sample_every:
        yield (
            {"train.sample_every"},
            "train.sample_every: bert sees both sides of a token and generates no text",
        )


def _fitting_heads(recipe: Recipe) -> str:
    """The closest number of heads with which the model can be built on this layout."""
    model, rope = recipe.model, recipe.model.arch in ("llama", "moe")
    fits = [
        heads
        for heads in divisors(model.dim)
        if not (rope and model.dim // heads % 2)
        and heads % (model.kv_heads or 1) == 0
        and (model.kv_heads or heads) % recipe.layout.tp == 0
    ]
    return f". Nearest valid: model.heads = {_closest(model.heads, fits)}" if fits else ""


def _closest(number: int, choices: Sequence[int]) -> int:
    return min(choices, key=lambda choice: (abs(choice - number), choice))


MOE_FIELDS = (
    "experts", "experts_per_token", "shared_experts", "expert_ffn_dim", "dense_layers", "router_score",
    "router_normalize", "balance", "aux_loss_weight", "balance_rate", "z_loss_weight", "capacity_factor",
)  # fmt: skip


def _experts(recipe: Recipe) -> Iterator[Contradiction]:
    """What a mixture of experts must agree on, and that other models have none."""
    model, layout = recipe.model, recipe.layout
    if model.arch != "moe":
        plain = type(model)()
        given = [name for name in MOE_FIELDS if getattr(model, name) != getattr(plain, name)]
        for name in given:
            yield (
                {f"model.{name}", "model.arch"},
                f'model.{name}: {model.arch} has no experts (arch = "moe" has)',
            )
        if layout.ep > 1:
            yield (
                {"layout.ep", "model.arch"},
                f'layout.ep = {layout.ep}: {model.arch} has no experts to divide (arch = "moe" has). '
                "Nearest valid: ep = 1",
            )
        return
    yield from _expert_sizes(model)
    experts = model.experts or 8
    if experts % layout.ep:
        nearest = max(n for n in range(1, layout.ep + 1) if experts % n == 0)
        yield (
            {"model.experts", "layout.ep"},
            f"layout.ep = {layout.ep} must divide model.experts = {experts}: a rank has whole experts. "
            f"Nearest valid: layout.ep = {nearest}, or model.experts = {-(-experts // layout.ep) * layout.ep}",
        )
    if (layout.cp > 1 or layout.sp) and model.capacity_factor:
        name = "layout.cp > 1" if layout.cp > 1 else "layout.sp"
        yield (
            {"model.capacity_factor", "layout.cp", "layout.sp"},
            f"model.capacity_factor: with {name} no rank knows who comes first in an expert's queue. "
            "Nearest valid: capacity_factor = 0",
        )


def _expert_sizes(model: ModelSection) -> Iterator[Contradiction]:
    experts, per_token = model.experts or 8, model.experts_per_token or min(2, model.experts or 8)
    if per_token > experts:
        yield (
            {"model.experts_per_token", "model.experts"},
            f"model.experts_per_token = {per_token} must be at most model.experts = {experts}",
        )
    if per_token == 1 and model.router_normalize:
        yield (
            {"model.router_normalize", "model.experts_per_token"},
            "model.router_normalize with model.experts_per_token = 1 divides a score by itself: the router would not "
            "learn. Nearest valid: router_normalize = false",
        )
    if model.dense_layers >= model.layers:
        yield (
            {"model.dense_layers", "model.layers"},
            f"model.dense_layers = {model.dense_layers} must be less than model.layers = {model.layers}",
        )
    for name in ("dim", "expert_ffn_dim" if model.expert_ffn_dim else "ffn_dim"):
        size = getattr(model, name)
        if size and size % 8:
            yield (
                {f"model.{name}"},
                f"model.{name} = {size} must be a multiple of 8: the grouped product of experts wants rows of whole "
                f"16 bytes. Nearest valid: {max(8, round(size / 8) * 8)}",
            )
    for name, balance in (("aux_loss_weight", "aux"), ("balance_rate", "bias")):
        if model.balance != balance and getattr(model, name) != getattr(type(model)(), name):
            yield (
                {f"model.{name}", "model.balance"},
                f'model.{name} needs model.balance = "{balance}", not "{model.balance}"',
            )


def _length(recipe: Recipe) -> Iterator[Contradiction]:
    train, optim = recipe.train, recipe.optim
    if train.steps and train.tokens:
        yield {"train.steps", "train.tokens"}, "train.steps and train.tokens are both given: give one of them"
    steps = train.steps or (
        train.tokens and -(-train.tokens // (train.global_batch_size * recipe.model.seq_len))
    )
    if steps and optim.warmup_steps and optim.warmup_steps > steps:
        yield (
            {"optim.warmup_steps", "train.steps", "train.tokens", "train.global_batch_size", "model.seq_len"},
            f"optim.warmup_steps = {optim.warmup_steps} must be at most the run's {steps} steps",
        )
    if optim.min_lr is not None and optim.min_lr > optim.lr:
        yield (
            {"optim.min_lr", "optim.lr"},
            f"optim.min_lr = {optim.min_lr} must be at most optim.lr = {optim.lr}",
        )


def _batch(recipe: Recipe) -> Iterator[Contradiction]:
    size, micro, count = (
        recipe.train.global_batch_size,
        recipe.train.microbatch_size,
        recipe.layout.microbatches,
    )
    dp = recipe.layout.dp_replicate * recipe.layout.dp_shard
    keys = {"train.global_batch_size", "layout.dp_replicate", "layout.dp_shard"}
    equation = f"{dp} data-parallel ranks"
    unit = dp
    if micro:
        keys, equation, unit = (
            keys | {"train.microbatch_size"},
            f"{equation} x microbatch_size {micro}",
            unit * micro,
        )
    if count:
        keys, equation, unit = (
            keys | {"layout.microbatches"},
            f"{equation} x {count} microbatches",
            unit * count,
        )
    if size % unit:
        near = max(1, round(size / unit)) * unit
        yield (
            keys,
            f"train.global_batch_size = {size} must be divisible by {unit} ({equation}). Nearest valid: {near}",
        )
    elif micro and count and size != unit:
        yield keys, f"train.global_batch_size = {size} must be {unit} ({equation})"
