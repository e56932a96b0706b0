"""Rules between the layout and the model, of the length of a run, the sizes of its batches, and how often replica
groups synchronise; numbers of the optimizer."""

from __future__ import annotations

import math
from collections.abc import Iterator

from fivefold.errors import UserError
from fivefold.models.card import Contradiction, card_of, resolve_model
from fivefold.models.recomputation import budget_of, of_blocks
from fivefold.models.rules import lacks
from fivefold.models.section import ModelSection
from fivefold.optim import FIELDS, OPTIMIZERS, OUTER
from fivefold.precision import PRECISIONS
from fivefold.recipe.messages import toml_value
from fivefold.recipe.rules.texts import expected_vocab_size, ramp, run_steps
from fivefold.recipe.schema import Sections
from fivefold.sharding.layout import Layout, divisors, largest_divisor
from fivefold.sharding.layout_rules import problems
from fivefold.sharding.sync import SERVER


def experts(recipe: Sections) -> Iterator[Contradiction]:
    """Rules between a mixture of experts and the layout."""
    model, layout = recipe.model, recipe.layout
    if not card_of(model).has_experts:
        if layout.ep > 1:
            yield (
                {"layout.ep", "model.arch"},
                f"layout.ep = {layout.ep}: {lacks(model, 'has_experts', 'to divide')}. Nearest valid: ep = 1",
            )
        return
    experts = card_of(model).defaults()["experts"] if model.experts is None else model.experts
    if experts % layout.ep:
        nearest = largest_divisor(experts, layout.ep)
        yield (
            {"model.experts", "layout.ep"},
            f"layout.ep = {layout.ep} must divide model.experts = {experts}: each rank has whole experts. "
            f"Nearest valid: layout.ep = {nearest}, or model.experts = {-(-experts // layout.ep) * layout.ep}",
        )


def recomputation(recipe: Sections) -> Iterator[Contradiction]:
    try:
        if budget_of(recipe.layout.recompute) is None:
            of_blocks(recipe.layout.recompute, recipe.model.blocks)
    except UserError as error:
        yield {"layout.recompute", "model.layers"}, str(error)


def servers(recipe: Sections) -> Iterator[Contradiction]:
    """A worker of parameter servers has the whole model, and its gradients leave it as they are."""
    plain, layout = type(recipe.layout)(), recipe.layout
    free = ("dp_replicate", "microbatches", "recompute")
    wrong = [name for name, value in layout if name not in free and value != getattr(plain, name)]
    if recipe.servers.count and wrong:
        given = ", ".join(f"layout.{name} = {toml_value(getattr(layout, name))}" for name in wrong)
        yield (
            {"sync.method", *(f"layout.{name}" for name in wrong)},
            f'sync.method = "{SERVER}" combines with dp only: each worker has the whole model, and servers keep its '
            f'states ({given}). Nearest valid: layout dp={layout.dp}, or sync.method = "all"',
        )


def layout_rules(recipe: Sections) -> Iterator[Contradiction]:
    """Yields every rule between layout and model that a recipe breaks."""
    model, layout = recipe.model, Layout.from_recipe(recipe.layout)
    wrong = list(problems(layout))
    for names, message in wrong:
        yield {f"layout.{name}" for name in names}, f"layout: {message}"
    yield from _tensor(recipe)
    yield from _context(recipe)
    if layout.pp > 1 and not card_of(model).pipelined:
        yield (
            {"layout.pp", "model.arch"},
            f"layout.pp = {layout.pp}: blocks of {model.arch} need what other stages have. Nearest valid: pp = 1",
        )
    if any({"schedule", "virtual_stages"} & names for names, _ in wrong):
        return  # already reported
    per_rank = layout.stages_per_rank
    if layout.fewest_blocks > model.layers:
        name = "layout.virtual_stages" if layout.virtual_stages == per_rank else f"{layout.schedule}'s"
        most, but = model.layers, "each stage has"
        if layout.bare_ends:
            most, but = model.layers + 2, "each stage but the first and the last has"
        fitting = max(1, most // per_rank)
        yield (
            {"model.layers", "layout.pp", "layout.virtual_stages", "layout.schedule"},
            f"layout.pp = {layout.pp} x {name} {per_rank} = {layout.pp * per_rank} stages, more than model.layers"
            f"{' + 2' * layout.bare_ends} = {most}: {but} at least one block. Nearest valid: layout.pp = {fitting}",
        )


def _tensor(recipe: Sections) -> Iterator[Contradiction]:
    """The sizes that tensor and sequence parallelism divide must be divisible. Without sequence parallelism, ranks have
    equally many features of every expert, in rows of whole 16 bytes (models/moe/card.py); with it, whole experts."""
    layout, tp = recipe.layout, recipe.layout.tp
    model = resolve_model(recipe.model, vocab_size=1)  # unset fields get their defaults
    heads = "kv_heads" if recipe.model.kv_heads else "heads"
    divided = {heads: (model.kv_heads or 1, "each rank has whole heads")}
    divided |= {
        name: (size, "each rank has whole heads") for name, size in card_of(model).whole_heads.items()
    }
    divided["ffn_dim"] = (model.ffn_dim or 1, "each rank has the same number of columns")
    model = model.model_copy(update={"vocab_size": expected_vocab_size(recipe) or tp})
    divided["vocab_size"] = (model.vocab_size or tp, "each rank has the same number of rows")
    if layout.sp:
        divided["seq_len"] = (model.seq_len // layout.cp, "with sp, each rank has the same number of tokens")
    fitting = largest_divisor(math.gcd(*(size for size, _ in divided.values())), tp)
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
    tokens, chunks = divided.get("seq_len", (tp, ""))[0] // tp, layout.tp_chunks
    if tokens % chunks:
        yield (
            {"layout.tp_chunks", "model.seq_len", "layout.tp", "layout.cp"},
            f"layout.tp_chunks = {chunks} must divide the {tokens} tokens of a sequence that a rank has (model.seq_len "
            f"/ layout.cp / layout.tp). Nearest valid: layout.tp_chunks = {largest_divisor(tokens, chunks)}",
        )
    name, F = card_of(recipe.model).expert_features()[0], card_of(model).expert_features()[1]
    if not layout.sp and F % (8 * tp) and F % 8 == 0:
        yield (
            {f"model.{name}", "layout.tp", "layout.sp"},
            f"8 x layout.tp = {8 * tp} must divide model.{name} = {F}: each rank has some features of every expert, in "
            f"rows of whole 16 bytes. Nearest valid: layout.tp = {largest_divisor(F // 8, tp)}, layout.sp = true, or "
            f"model.{name} = {-(-F // (8 * tp)) * 8 * tp}",
        )


def _context(recipe: Sections) -> Iterator[Contradiction]:
    """Ranks of the context axis have the same number of tokens, and whole heads with `ulysses`."""
    T, layout, kv_heads = recipe.model.seq_len, recipe.layout, recipe.model.kv_heads or recipe.model.heads
    cp, ulysses = layout.cp, layout.cp_method == "ulysses"
    if cp == 1:
        return
    keys = {"model.seq_len", "layout.cp", "layout.cp_method"}
    whole = card_of(resolve_model(recipe.model, vocab_size=1)).whole_heads

    def fits(ranks: int) -> bool:
        return T % (ranks if ulysses or ranks == 1 else 2 * ranks) == 0 and not (
            (ulysses and kv_heads % (ranks * layout.tp))
            or any(n % (ranks * layout.tp) for n in whole.values())
        )

    nearest = max((ranks for ranks in divisors(T) if ranks <= cp and fits(ranks)), default=1)
    unit = cp if ulysses else 2 * cp
    if T % unit:
        name = "layout.cp" if ulysses else "2 x layout.cp"
        why = "each rank has the same number of tokens"
        if not ulysses:
            why = "a rank has a chunk from the front and one from the back"
        yield (
            keys,
            f"{name} = {unit} must divide model.seq_len = {T}: {why}. Nearest valid: layout.cp = {nearest}, or "
            f"model.seq_len = {-(-T // unit) * unit}",
        )
    if ulysses and kv_heads % (cp * layout.tp):
        name = "kv_heads" if recipe.model.kv_heads else "heads"
        yield (
            {f"model.{name}", "layout.cp", "layout.tp", "layout.cp_method"},
            f"layout.cp x layout.tp = {cp * layout.tp} must divide model.{name} = {kv_heads}: with cp_method = ulysses "
            f"each rank has whole heads. Nearest valid: layout.cp = {nearest}, or layout.cp_method = ring",
        )

    for name, size in whole.items():
        if size % (cp * layout.tp):
            yield (
                {f"model.{name}", "layout.cp", "layout.tp"},
                f"layout.cp x layout.tp = {cp * layout.tp} must divide model.{name} = {size}: context ranks exchange "
                f"tokens for whole heads of linear attention. Nearest valid: layout.cp = {nearest}",
            )


def _nearest(name: str, model: ModelSection, ranks: int) -> int | None:
    """The nearest value of a model field that `ranks` divides and the model allows."""
    size = getattr(model, name) or 0
    above = -(-size // ranks) * ranks
    if name == "heads":  # heads of even width, as many as divide the model's
        found = [n for n in divisors(model.dim) if model.dim % (2 * n) == 0]
    elif name == "kv_heads":
        found = divisors(model.heads)
    elif name == "vocab_size":
        found = [above]  # the existing tokens
    elif name == "seq_len":
        return None  # another length would change what is trained
    else:
        found = [n for n in (above - ranks, above) if n]
    return min((n for n in found if n % ranks == 0), key=lambda n: abs(n - size), default=None)


def length(recipe: Sections) -> Iterator[Contradiction]:
    train, optim = recipe.train, recipe.optim
    if train.steps and train.tokens:
        yield {"train.steps", "train.tokens"}, "train.steps and train.tokens are both set; set only one"
    steps = run_steps(recipe)
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


def batch(recipe: Sections) -> Iterator[Contradiction]:
    """Every rank has microbatches, whole ones. Only some kinds of training need equally many on all."""
    train, count = recipe.train, recipe.layout.microbatches
    size, micro = train.global_batch_size, train.microbatch_size
    dp = recipe.layout.dp
    sizes = {name: getattr(recipe.layout, name) for name in ("dp_replicate", "dp_shard")}
    ranks = " x ".join(f"layout.{name} {n}" for name, n in sizes.items() if n > 1)
    equal = count or recipe.servers.count or recipe.replica_groups.count > 1
    factors = {
        "layout.dp_replicate": (dp if equal else 1, ranks),
        "train.microbatch_size": (micro or 1, f"train.microbatch_size {micro}"),
        "layout.microbatches": (count or 1, f"layout.microbatches {count}"),
    }
    keys = {"train.global_batch_size", "layout.dp_replicate", "layout.dp_shard"}
    keys |= {key for key, (factor, _) in factors.items() if factor > 1}
    equation = " x ".join(words for factor, words in factors.values() if factor > 1)
    unit = math.prod(factor for factor, _ in factors.values())
    if size % unit:
        near = f"train.global_batch_size = {max(1, round(size / unit)) * unit}"
        share = size * (micro or 1) // unit  # sequences of a rank's microbatch, at most
        if micro and micro > share > 0 and size % (unit // micro) == 0:
            near = f"train.microbatch_size = {share}"
        yield (
            keys,
            f"train.global_batch_size = {size} must be divisible by {unit} ({equation}). Nearest valid: {near}",
        )
    elif micro and count and size != unit:
        yield keys, f"train.global_batch_size = {size} must be {unit} ({equation})"
    elif size // (micro or 1) < dp:
        near = f"train.global_batch_size = {dp * (micro or 1)}"
        smaller = next((n for n in range(min(size // dp, 4096), 0, -1) if size % n == 0), None)
        yield (
            keys,
            f"train.global_batch_size = {size}{f' with train.microbatch_size = {micro}' if micro else ''}: {dp} "
            f"data-parallel ranks need at least one {'microbatch' if micro else 'sequence'} each ({ranks}). Nearest "
            f"valid: {near}" + (f", or train.microbatch_size = {smaller}" if micro and smaller else ""),
        )
    for size, _ in ramp(train):
        if size > recipe.train.global_batch_size:
            yield (
                keys | {"train.batch_ramp"},
                f'train.batch_ramp = "{recipe.train.batch_ramp}": {size} sequences are more than '
                f"train.global_batch_size = {recipe.train.global_batch_size}, with which the ramp ends",
            )
        elif size % (unit // (count or 1)) or size < dp * (micro or 1):
            each, least = unit // (count or 1), dp * (micro or 1)
            multiple = f"a multiple of {each}, and " if each > 1 else ""
            product = " x ".join(filter(None, [ranks, factors["train.microbatch_size"][1] if micro else ""]))
            yield (
                keys | {"train.batch_ramp"},
                f'train.batch_ramp = "{recipe.train.batch_ramp}": {size} sequences must be {multiple}at least {least} '
                f"({product}). Nearest valid: {max(least, round(size / each) * each)}",
            )


def replica_groups(recipe: Sections) -> Iterator[Contradiction]:
    """Replica groups are whole replicas. Each fragment synchronises once between two outer steps."""
    sync, model, replicas = recipe.sync, recipe.model, recipe.layout.dp_replicate
    if sync.method not in OUTER:
        return
    if sync.replica_groups and replicas % sync.replica_groups:
        yield (
            {"sync.replica_groups", "layout.dp_replicate"},
            f"sync.replica_groups = {sync.replica_groups} must divide layout.dp_replicate = {replicas}: a replica "
            "group has whole replicas. Nearest valid: "
            f"sync.replica_groups = {largest_divisor(replicas, sync.replica_groups)}",
        )
        return
    most = min(sync.every, model.layers)
    if sync.fragments > most:
        yield (
            {"sync.fragments", "sync.every", "model.layers"},
            f"sync.fragments = {sync.fragments} must be at most sync.every = {sync.every} and model.layers = "
            f"{model.layers}: a fragment has at least one block, and a step synchronises one. Nearest valid: "
            f"sync.fragments = {most}",
        )
    if sync.overlap >= sync.every:
        yield (
            {"sync.overlap", "sync.every"},
            f"sync.overlap = {sync.overlap} must be less than sync.every = {sync.every}: a sum arrives before the next "
            f"one of its fragment starts. Nearest valid: sync.overlap = {sync.every - 1}",
        )


def optimizer(recipe: Sections) -> Iterator[Contradiction]:
    """Refuses fields that only other optimizers have, mu-P where it is not known, and a loss scale that rounds."""
    optim, scale, mode = recipe.optim, recipe.precision.loss_scale, PRECISIONS.get(recipe.precision.mode)
    if recipe.model.base_dim and OPTIMIZERS[optim.name].width_power is None:
        known = ", ".join(f'"{card.name}"' for card in OPTIMIZERS.values() if card.width_power)
        yield (
            {"model.base_dim", "optim.name"},
            f"model.base_dim = {recipe.model.base_dim}: mu-P is not known for the optimizer "
            f'"{optim.name}". Nearest valid: optim.name = one of {known}, or leave base_dim out',
        )
    own_fields = OPTIMIZERS[optim.name].fields
    for name in FIELDS:
        value = getattr(optim, name)
        if name in own_fields or value is None:
            continue
        has = f"its own fields: {', '.join(own_fields)}" if own_fields else "it has no field of its own"
        owner = next(card.name for card in OPTIMIZERS.values() if name in card.fields)
        yield (
            {f"optim.{name}", "optim.name"},
            f'optim.{name} = {toml_value(value)}: the optimizer "{optim.name}" has no such field ({has}). '
            f'Nearest valid: leave it out (--set optim.{name}=none), or optim.name = "{owner}"',
        )
    nearest = 2.0 ** round(math.log2(scale))
    if mode is not None and mode.scaled and scale != nearest:
        yield (
            {"precision.loss_scale"},
            f"precision.loss_scale = {scale:g} must be a power of two, so that scaling rounds nothing. Nearest valid: "
            f"{nearest:g}",
        )
