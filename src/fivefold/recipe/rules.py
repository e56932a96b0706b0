"""What fields of a recipe must agree on. Each rule names the fields it looked at."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from fivefold.layout import Layout, problems, stages_of_a_rank

if TYPE_CHECKING:
    from fivefold.recipe.schema import ModelSection, Recipe

Contradiction = tuple[set[str], str]
"""The keys that disagree, and what must hold between them."""


def contradictions(recipe: Recipe) -> Iterator[Contradiction]:
    """Every rule that a recipe breaks, its single fields being valid."""
    yield from _model(recipe)
    yield from _experts(recipe)
    yield from _length(recipe)
    yield from _batch(recipe)
    yield from _layout(recipe)


def _model(recipe: Recipe) -> Iterator[Contradiction]:
    model = recipe.model
    if model.dim % model.heads:
        yield (
            {"model.dim", "model.heads"},
            f"model.dim = {model.dim} must be divisible by model.heads = {model.heads}",
        )
    elif model.arch in ("llama", "moe") and model.dim // model.heads % 2:
        yield (
            {"model.dim", "model.heads"},
            f"model.dim / model.heads = {model.dim // model.heads} must be even: RoPE turns pairs",
        )
    if model.kv_heads and model.heads % model.kv_heads:
        yield (
            {"model.kv_heads", "model.heads"},
            f"model.kv_heads = {model.kv_heads} must divide model.heads = {model.heads}",
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
        yield keys, f"train.global_batch_size = {size} must be divisible by {unit} ({equation})"
    elif micro and count and size != unit:
        yield keys, f"train.global_batch_size = {size} must be {unit} ({equation})"


def _tensor(recipe: Recipe) -> Iterator[Contradiction]:
    """What tensor and sequence parallelism divide must be divisible."""
    from fivefold.recipe.resolve import expected_vocab_size, resolve_model

    layout, tp = recipe.layout, recipe.layout.tp
    model = resolve_model(recipe.model, vocab_size=1)  # what is left open gets its default
    heads = "kv_heads" if recipe.model.kv_heads else "heads"
    divided = {heads: (model.kv_heads or 1, "a rank has whole heads")}
    divided["ffn_dim"] = (model.ffn_dim or 1, "a rank has equally many columns")
    model = model.model_copy(update={"vocab_size": expected_vocab_size(recipe) or tp})
    divided["vocab_size"] = (model.vocab_size or tp, "a rank has equally many rows")
    if layout.sp:
        divided["seq_len"] = (model.seq_len // layout.cp, "with sp a rank has equally many tokens")
    fitting = max(n for n in range(1, tp + 1) if not any(size % n for size, _ in divided.values()))
    for name, (size, why) in divided.items():
        if size % tp:
            over = f" / layout.cp = {size}" if name == "seq_len" and layout.cp > 1 else ""
            given = model.seq_len if over else size
            other = _nearest(name, model, tp)
            nearest = f"layout.tp = {fitting}" + (f", or model.{name} = {other}" if other else "")
            yield (
                {f"model.{name}", "layout.tp"} | ({"layout.sp", "layout.cp"} if name == "seq_len" else set()),
                f"layout.tp = {tp} must divide model.{name} = {given}{over}: {why}. Nearest valid: {nearest}",
            )


def _context(recipe: Recipe) -> Iterator[Contradiction]:
    """Ranks of the context axis have equally many tokens, and with `ulysses` whole heads."""
    T, layout, kv_heads = recipe.model.seq_len, recipe.layout, recipe.model.kv_heads or recipe.model.heads
    cp, ulysses = layout.cp, layout.cp_method == "ulysses"
    keys = {"model.seq_len", "layout.cp", "layout.cp_method"}

    def fits(ranks: int) -> bool:
        return T % (ranks if ulysses or ranks == 1 else 2 * ranks) == 0 and not (
            ulysses and kv_heads % (ranks * layout.tp)
        )

    nearest = max((ranks for ranks in range(1, cp + 1) if fits(ranks)), default=1)
    if cp > 1 and not ulysses and T % (2 * cp):
        more = -(-T // (2 * cp)) * 2 * cp
        yield (
            keys,
            f"2 x layout.cp = {2 * cp} must divide model.seq_len = {T}: in the ring a rank has a chunk from the front "
            f"and one from the back. Nearest valid: layout.cp = {nearest}, or model.seq_len = {more}",
        )
    if cp > 1 and ulysses and T % cp:
        yield (
            keys,
            f"layout.cp = {cp} must divide model.seq_len = {T}: a rank has equally many tokens. "
            f"Nearest valid: layout.cp = {nearest}, or model.seq_len = {-(-T // cp) * cp}",
        )
    if cp > 1 and ulysses and kv_heads % (cp * layout.tp):
        name = "kv_heads" if recipe.model.kv_heads else "heads"
        yield (
            {f"model.{name}", "layout.cp", "layout.tp", "layout.cp_method"},
            f"layout.cp x layout.tp = {cp * layout.tp} must divide model.{name} = {kv_heads}: with cp_method = ulysses "
            f"a rank has whole heads. Nearest valid: layout.cp = {nearest}, or layout.cp_method = ring",
        )


def _nearest(name: str, model: ModelSection, ranks: int) -> int | None:
    """The value of a field of the model, closest to its own, that `ranks` divides; of those that the model can have."""
    size = getattr(model, name) or 0
    multiples = range(ranks, max(size, model.heads) + ranks, ranks)
    if name == "heads":  # heads of even width, as many as divide the model's
        multiples = [n for n in multiples if model.dim % (2 * n) == 0]
    elif name == "kv_heads":
        multiples = [n for n in multiples if model.heads % n == 0]
    elif name == "vocab_size":
        multiples = [n for n in multiples if n >= size]  # the tokens there are
    elif name == "seq_len":
        return None  # shorter or longer sequences are another task
    return min(multiples, key=lambda n: abs(n - size), default=None)


def _layout(recipe: Recipe) -> Iterator[Contradiction]:
    for names, message in problems(Layout.from_recipe(recipe.layout)):
        yield {f"layout.{name}" for name in names}, f"layout: {message}"
    yield from _tensor(recipe)
    yield from _context(recipe)
    yield from _pipeline(recipe)


def _pipeline(recipe: Recipe) -> Iterator[Contradiction]:
    model, layout = recipe.model, Layout.from_recipe(recipe.layout)
    if any({"schedule", "virtual_stages"} & names for names, _ in problems(layout)):
        return  # said already
    a_rank = stages_of_a_rank(layout)
    if layout.pp * a_rank > model.layers:
        name = "layout.virtual_stages" if layout.virtual_stages == a_rank else f"{layout.schedule}'s"
        fitting = max(1, model.layers // a_rank)
        yield (
            {"model.layers", "layout.pp", "layout.virtual_stages", "layout.schedule"},
            f"layout.pp = {layout.pp} x {name} {a_rank} = {layout.pp * a_rank} stages, more than model.layers = "
            f"{model.layers}: each has at least one. Nearest valid: layout.pp = {fitting}",
        )
