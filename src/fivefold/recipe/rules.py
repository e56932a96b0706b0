"""The rules between the fields of a recipe. Each names the fields that it reads."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any, TypeVar

from fivefold.errors import UserError
from fivefold.models.card import Contradiction, card_of, resolve_model, round_up
from fivefold.models.recomputation import budget_of, of_blocks
from fivefold.models.rules import lacks, model_rules
from fivefold.models.section import MOST_IDS, ModelSection
from fivefold.optim import DEFAULT, FIELDS, OPTIMIZERS
from fivefold.optim.outer import OUTER
from fivefold.precision import MASTER, PRECISIONS
from fivefold.recipe.idle import refused
from fivefold.recipe.ramp import ramp, steps_for
from fivefold.recipe.schema import Sections
from fivefold.recipe.words import toml_value
from fivefold.schedules.compression import NONE
from fivefold.spread.layout import Layout, divisors, largest_divisor, problems
from fivefold.spread.servers import SERVER
from fivefold.spread.tiers import OFFLOADS

R = TypeVar("R", bound=Sections)
_BPE = re.compile(r"bpe:(\d{1,7})", re.ASCII)


def contradictions(recipe: Sections) -> Iterator[Contradiction]:
    """Yields every rule that a recipe breaks. Its single fields are valid."""
    yield from model_rules(recipe.model, recipe.layout.tp)
    yield from _texts(recipe)
    yield from _vocabulary(recipe)
    yield from _generates(recipe)
    yield from _experts(recipe)
    yield from _length(recipe)
    yield from _optimizer(recipe)
    yield from _precision(recipe)
    yield from _recomputation(recipe)
    yield from _observed(recipe)
    yield from refused(recipe)
    yield from _batch(recipe)
    yield from _sites(recipe)
    yield from _servers(recipe)
    yield from _offload(recipe)
    yield from _replays(recipe)
    yield from layout_rules(recipe)


def with_layout(recipe: R, layout: Layout, **train: Any) -> R:
    """The recipe with another layout, and other fields of [train]; not checked."""
    section = type(recipe.layout)(**vars(layout))
    return recipe.model_copy(update={"layout": section, "train": recipe.train.model_copy(update=train)})


def synchronous(recipe: R) -> R:
    """The recipe with all ranks as one site."""
    return recipe.model_copy(update={"sync": type(recipe.sync)()})


def allows(recipe: Sections, layout: Layout) -> bool:
    """True if the recipe with this layout breaks no rule."""
    return not any(contradictions(with_layout(recipe, layout)))


def _texts(recipe: Sections) -> Iterator[Contradiction]:
    """Texts become paths, and parts of a TOML file."""
    for section, fields in recipe:
        for name, value in fields:
            if isinstance(value, str) and ("\0" in value or any("\ud800" <= c <= "\udfff" for c in value)):
                yield (
                    {f"{section}.{name}"},
                    f"{section}.{name} must be valid Unicode, without the character 0",
                )


def _vocabulary(recipe: Sections) -> Iterator[Contradiction]:
    spec = recipe.data.tokenizer
    bpe = _BPE.fullmatch(spec)
    if spec.startswith("bpe:") and (bpe is None or int(bpe[1]) > MOST_IDS):
        yield (
            {"data.tokenizer"},
            f"data.tokenizer = {toml_value(spec)}: N must be a whole number, as in bpe:4096, and at most {MOST_IDS}",
        )


def _generates(recipe: Sections) -> Iterator[Contradiction]:
    if not card_of(recipe.model).causal and recipe.train.sample_every:
        yield (
            {"train.sample_every"},
            f"train.sample_every: {recipe.model.arch} is bidirectional and generates no text",
        )


def _experts(recipe: Sections) -> Iterator[Contradiction]:
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
    if (layout.cp > 1 or layout.sp) and model.capacity_factor:
        name = "layout.cp > 1" if layout.cp > 1 else "layout.sp"
        yield (
            {"model.capacity_factor", "layout.cp", "layout.sp"},
            f"model.capacity_factor is not supported with {name}: an expert's queue would span several ranks. "
            "Nearest valid: capacity_factor = 0",
        )


def _recomputation(recipe: Sections) -> Iterator[Contradiction]:
    budget = budget_of(recipe.layout.recompute)
    if budget is not None and recipe.servers.count:
        yield (
            {"layout.recompute", "sync.method"},
            f'layout.recompute = "{recipe.layout.recompute}" is not supported with sync.method = "{SERVER}". Nearest '
            'valid: "full"',
        )
    try:
        if budget is None:
            of_blocks(recipe.layout.recompute, recipe.model.layers)
    except UserError as error:
        yield {"layout.recompute", "model.layers"}, str(error)


def _observed(recipe: Sections) -> Iterator[Contradiction]:
    step = recipe.observe.trace_step
    if step and step in (recipe.observe.memory_step, int(recipe.observe.memory_step > 0)):
        yield (
            {"observe.memory_step", "observe.trace_step"},
            f"observe.trace_step = {step}: the memory of step {step} is tracked, which slows it. Nearest valid: "
            f"trace_step = {max(step, recipe.observe.memory_step) + 1}",
        )


def _length(recipe: Sections) -> Iterator[Contradiction]:
    train, optim = recipe.train, recipe.optim
    if train.steps and train.tokens:
        yield {"train.steps", "train.tokens"}, "train.steps and train.tokens are both set; set only one"
    try:
        ramp(train)
    except UserError as error:
        yield {"train.batch_ramp"}, str(error)
        return
    steps = train.steps or (train.tokens and steps_for(train, -(-train.tokens // recipe.model.seq_len)))
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


def _precision(recipe: Sections) -> Iterator[Contradiction]:
    """Rules between the precision mode and what sums gradients."""
    name = recipe.precision.mode
    mode = PRECISIONS.get(name)
    if mode is None:  # auto
        return
    if recipe.precision.loss_scale != 2.0 ** round(math.log2(recipe.precision.loss_scale)):
        nearest = 2.0 ** round(math.log2(recipe.precision.loss_scale))
        yield (
            {"precision.loss_scale"},
            f"precision.loss_scale = {recipe.precision.loss_scale:g} must be a power of two, so that scaling rounds "
            f"nothing. Nearest valid: {nearest:g}",
        )
    if mode.scaled and recipe.layout.compress != NONE:
        yield (
            {"precision.mode", "layout.compress"},
            f'precision.mode = "{name}" is not supported with layout.compress: what compression keeps back would have '
            f'another loss scale later, and an overflow would stay in it. Nearest valid: compress = "{NONE}", or '
            'mode = "bf16"',
        )
    if mode.master != MASTER and recipe.layout.compress != NONE:
        yield (
            {"precision.mode", "layout.compress"},
            f'precision.mode = "{name}" is not supported with layout.compress, which keeps fp32 residuals. Nearest '
            f'valid: compress = "{NONE}", or mode = "bf16"',
        )
    card = OPTIMIZERS[recipe.optim.name]
    if mode.rounds and not card.elementwise:
        yield (
            {"precision.mode", "optim.name"},
            f'precision.mode = "{name}" is not supported with the optimizer "{card.name}", whose states are not '
            f'rounded. Nearest valid: optim.name = "{DEFAULT}", or mode = "bf16"',
        )
    if mode.rounds and OFFLOADS[recipe.layout.offload].streams:
        yield (
            {"precision.mode", "layout.offload"},
            f'precision.mode = "{name}" is not supported with layout.offload = "{recipe.layout.offload}", which keeps '
            'fp32 states. Nearest valid: layout.offload = "activations", or mode = "bf16"',
        )
    if mode.rounds and recipe.precision.rounding == "kahan" and recipe.sites.count > 1:
        yield (
            {"precision.rounding", "sync.method"},
            'precision.rounding = "kahan" is not supported with several sites, whose outer steps replace the weights '
            'that the compensation belongs to. Nearest valid: rounding = "stochastic"',
        )
    if recipe.servers.count and (mode.scaled or mode.master != MASTER):
        why = (
            "weights of one server change before another knows of an overflow"
            if mode.scaled
            else "a server keeps fp32 masters"
        )
        yield (
            {"precision.mode", "sync.method"},
            f'precision.mode = "{name}" is not supported with parameter servers: {why}. Nearest valid: mode = "bf16"',
        )


def _optimizer(recipe: Sections) -> Iterator[Contradiction]:
    """Refuses fields that only other optimizers have."""
    optim = recipe.optim
    own = OPTIMIZERS[optim.name].fields
    for name in FIELDS:
        value = getattr(optim, name)
        if name in own or value is None:
            continue
        have = f"its own fields: {', '.join(own)}" if own else "it has no field of its own"
        others = [card.name for card in OPTIMIZERS.values() if name in card.fields]
        value = list(value) if isinstance(value, tuple) else value
        yield (
            {f"optim.{name}", "optim.name"},
            f'optim.{name} = {value}: the optimizer "{optim.name}" has no such field ({have}). '
            f'Nearest valid: leave it out (--set optim.{name}=none), or optim.name = "{others[0]}"',
        )


def _batch(recipe: Sections) -> Iterator[Contradiction]:
    """Every rank has microbatches, whole ones. Only some kinds of training need equally many on all."""
    train, count = recipe.train, recipe.layout.microbatches
    size, micro = train.global_batch_size, train.microbatch_size
    dp = recipe.layout.dp_replicate * recipe.layout.dp_shard
    equal = count or recipe.servers.count or recipe.sites.count > 1
    factors = {
        "layout.dp_replicate": (dp if equal else 1, f"{dp} data-parallel ranks"),
        "train.microbatch_size": (micro or 1, f"microbatch_size {micro}"),
        "layout.microbatches": (count or 1, f"{count} microbatches"),
    }
    keys = {"train.global_batch_size", "layout.dp_replicate", "layout.dp_shard"}
    keys |= {key for key, (factor, _) in factors.items() if factor > 1}
    equation = " x ".join(words for factor, words in factors.values() if factor > 1)
    unit = math.prod(factor for factor, _ in factors.values())
    if size % unit:
        near = max(1, round(size / unit)) * unit
        yield (
            keys,
            f"train.global_batch_size = {size} must be divisible by {unit} ({equation}). Nearest valid: "
            f"train.global_batch_size = {near}",
        )
    elif micro and count and size != unit:
        yield keys, f"train.global_batch_size = {size} must be {unit} ({equation})"
    elif size // (micro or 1) < dp:
        near = f"train.global_batch_size = {dp * (micro or 1)}"
        smaller = next((n for n in range(min(size // dp, 4096), 0, -1) if size % n == 0), None)
        yield (
            keys,
            f"train.global_batch_size = {size}{f' in microbatches of {micro}' if micro else ''}: {dp} data-parallel "
            f"ranks need at least one {'microbatch' if micro else 'sequence'} each. Nearest valid: {near}"
            + (f", or train.microbatch_size = {smaller}" if micro and smaller else ""),
        )
    for size in _ramped(recipe):
        if size > recipe.train.global_batch_size:
            yield (
                keys | {"train.batch_ramp"},
                f'train.batch_ramp = "{recipe.train.batch_ramp}": {size} sequences are more than '
                f"train.global_batch_size = {recipe.train.global_batch_size}, with which the ramp ends",
            )
        elif size % (unit // (count or 1)) or size < dp * (micro or 1):
            each, least = unit // (count or 1), dp * (micro or 1)
            multiple = f"a multiple of {each}, and " if each > 1 else ""
            yield (
                keys | {"train.batch_ramp"},
                f'train.batch_ramp = "{recipe.train.batch_ramp}": {size} sequences must be {multiple}at least {least} '
                f"({dp} data-parallel ranks{f' x microbatch_size {micro}' if micro else ''}). Nearest valid: "
                f"{max(least, round(size / each) * each)}",
            )
    if recipe.train.batch_ramp:
        yield from _grows(recipe)


def _grows(recipe: Sections) -> Iterator[Contradiction]:
    """What needs batches of one size."""
    if recipe.optim.name == "sophia":
        yield (
            {"train.batch_ramp", "optim.name"},
            'train.batch_ramp does not combine with optim.name = "sophia", whose estimate goes by the tokens of a '
            'batch of one size. Nearest valid: train.batch_ramp = "", or optim.name = "adamw"',
        )
    if recipe.servers.count:
        yield (
            {"train.batch_ramp", "sync.method"},
            f'train.batch_ramp is not supported with sync.method = "{SERVER}": workers count batches of one size. '
            'Nearest valid: train.batch_ramp = ""',
        )
    if recipe.observe.noise_scale:
        yield (
            {"train.batch_ramp", "observe.noise_scale"},
            "observe.noise_scale averages over steps, whose batches must have one size; train.batch_ramp changes it. "
            "Nearest valid: observe.noise_scale = false",
        )


def _ramped(recipe: Sections) -> list[int]:
    """The sizes of batches before the full one."""
    try:
        return [size for size, _ in ramp(recipe.train)]
    except UserError:  # `_length` says so
        return []


def _sites(recipe: Sections) -> Iterator[Contradiction]:
    """Rules of training on sites that synchronise every few steps."""
    sync, model, replicas = recipe.sync, recipe.model, recipe.layout.dp_replicate
    if sync.method not in OUTER:
        return
    if sync.outer_momentum is not None and "momentum" not in OUTER[sync.method].fields:
        yield (
            {"sync.outer_momentum", "sync.method"},
            f'sync.outer_momentum = {sync.outer_momentum}: sync.method = "{sync.method}" takes the mean weights, '
            'without momentum. Nearest valid: leave it out, or sync.method = "diloco"',
        )
    if sync.sites and replicas % sync.sites:
        nearest = largest_divisor(replicas, sync.sites)
        yield (
            {"sync.sites", "layout.dp_replicate"},
            f"sync.sites = {sync.sites} must divide layout.dp_replicate = {replicas}: a site has whole replicas. "
            f"Nearest valid: sync.sites = {nearest}",
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
    if recipe.sites.count > 1:
        yield from _unsupported_apart(recipe)


def _unsupported_apart(recipe: Sections) -> Iterator[Contradiction]:
    """What several sites do not support."""
    method = f'sync.method = "{recipe.sync.method}"'
    if card_of(recipe.model).has_experts:
        yield (
            {"sync.method", "model.arch"},
            f'{method} is not supported with model.arch = "{recipe.model.arch}": each site would balance its experts '
            'by itself. Nearest valid: sync.method = "all"',
        )
    if recipe.observe.noise_scale:
        yield (
            {"sync.method", "observe.noise_scale"},
            f"observe.noise_scale cannot be measured with {method}: no step has the gradient of the whole batch. "
            "Nearest valid: observe.noise_scale = false",
        )


def _servers(recipe: Sections) -> Iterator[Contradiction]:
    """A worker of parameter servers has the whole model, and its gradients leave it as they are."""
    if not recipe.servers.count:
        return
    method = f'sync.method = "{SERVER}"'
    plain, mine = type(recipe.layout)(), recipe.layout
    free = ("dp_replicate", "microbatches", "recompute")
    others = [name for name in type(mine).model_fields if name not in free]
    if wrong := [name for name in others if getattr(mine, name) != getattr(plain, name)]:
        given = ", ".join(f"layout.{name} = {toml_value(getattr(mine, name))}" for name in wrong)
        yield (
            {"sync.method", *(f"layout.{name}" for name in wrong)},
            f"{method} combines with dp only: each worker has the whole model, and servers keep its states ({given}). "
            f'Nearest valid: layout dp={mine.dp_replicate * mine.dp_shard}, or sync.method = "all"',
        )
    if card_of(recipe.model).has_experts:
        yield (
            {"sync.method", "model.arch"},
            f'{method} is not supported with model.arch = "{recipe.model.arch}": each worker would balance its experts '
            'by itself. Nearest valid: sync.method = "all"',
        )
    faults = recipe.faults
    for key, value, none in (
        ("train.z_loss", recipe.train.z_loss, 0.0),
        ("faults.on_spike", faults.on_spike, "tell"),
        ("faults.on_nonfinite", "skip" if faults.on_nonfinite == "abort" else faults.on_nonfinite, "skip"),
        ("faults.hash_every", faults.hash_every, 0),
        ("faults.replay_every", faults.replay_every, 0),
    ):
        if value != none:
            yield (
                {"sync.method", key},
                f"{key} = {toml_value(value)} is not supported with {method}, whose workers and servers have steps of "
                f"their own. Nearest valid: {key} = {toml_value(none)}",
            )
    if OPTIMIZERS[recipe.optim.name].needs != "elements":
        yield (
            {"sync.method", "optim.name"},
            f'{method} is not supported with optim.name = "{recipe.optim.name}": servers keep rows, and its update '
            'needs whole matrices. Nearest valid: optim.name = "adamw"',
        )
    for name, none in (("noise_scale", "false"), ("memory_step", "0")):
        if getattr(recipe.observe, name):
            yield (
                {"sync.method", f"observe.{name}"},
                f"observe.{name} is not measured with {method}. Nearest valid: observe.{name} = {none}",
            )


def _replays(recipe: Sections) -> Iterator[Contradiction]:
    """A replay is one microbatch that data-parallel ranks compute apart from each other."""
    layout, every = recipe.layout, recipe.faults.replay_every
    if not every:
        return
    for key, value, none in (
        ("layout.pp", layout.pp, 1),
        ("layout.ep", layout.ep, 1),
        ("layout.offload", "none" if layout.offload == "activations" else layout.offload, "none"),
    ):
        if value != none:
            yield (
                {"faults.replay_every", key},
                f"faults.replay_every = {every} is not supported with {key} = {toml_value(value)}: ranks compute a "
                "microbatch together, or keep its gradients elsewhere. Nearest valid: faults.replay_every = 0 "
                "(faults.hash_every compares weights in every layout)",
            )


def _offload(recipe: Sections) -> Iterator[Contradiction]:
    """A streamed update runs chunk by chunk, beside the next step's forward."""
    layout, card = recipe.layout, OPTIMIZERS[recipe.optim.name]
    if not OFFLOADS[layout.offload].streams:
        return
    if not card.elementwise:
        yield (
            {"layout.offload", "optim.name"},
            f'layout.offload = "{layout.offload}" updates chunks of parameters, and the optimizer "{card.name}" is '
            'no fused kernel. Nearest valid: optim.name = "adamw", or layout.offload = "activations"',
        )
    mode = PRECISIONS.get(recipe.precision.mode)
    if mode is not None and {mode.master, mode.gradient, mode.state} != {MASTER}:
        yield (
            {"layout.offload", "precision.mode"},
            f'layout.offload = "{layout.offload}" streams masters, gradients and states in fp32, unlike precision.mode '
            f'= "{mode.name}". Nearest valid: precision.mode = "bf16", or layout.offload = "activations"',
        )
    if recipe.sites.count > 1:
        yield (
            {"layout.offload", "sync.method"},
            f'layout.offload = "{layout.offload}" does not combine with sync.method = "{recipe.sync.method}", whose '
            'outer steps change weights in memory. Nearest valid: layout.offload = "activations"',
        )


def layout_rules(recipe: Sections) -> Iterator[Contradiction]:
    """Yields every rule between layout and model that a recipe breaks."""
    for names, message in problems(Layout.from_recipe(recipe.layout)):
        yield {f"layout.{name}" for name in names}, f"layout: {message}"
    yield from _tensor(recipe)
    yield from _features(recipe)
    yield from _context(recipe)
    yield from _pipeline(recipe)
    yield from _noise(recipe)


def _tensor(recipe: Sections) -> Iterator[Contradiction]:
    """The sizes that tensor and sequence parallelism divide must be divisible."""
    layout, tp = recipe.layout, recipe.layout.tp
    model = resolve_model(recipe.model, vocab_size=1)  # unset fields get their defaults
    heads = "kv_heads" if recipe.model.kv_heads else "heads"
    divided = {heads: (model.kv_heads or 1, "each rank has whole heads")}
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


def _features(recipe: Sections) -> Iterator[Contradiction]:
    """Tensor-parallel ranks have equally many features of every expert, in rows of whole 16 bytes (models/moe/card.py).
    Under sequence parallelism they have whole experts."""
    F, tp = card_of(resolve_model(recipe.model, vocab_size=1)).expert_features()[1], recipe.layout.tp
    if not recipe.layout.sp and F % (8 * tp) and F % 8 == 0:
        name, _ = card_of(recipe.model).expert_features()
        fitting = largest_divisor(F // 8, tp)
        yield (
            {f"model.{name}", "layout.tp", "layout.sp"},
            f"8 x layout.tp = {8 * tp} must divide model.{name} = {F}: each rank has some features of every expert, in "
            f"rows of whole 16 bytes. Nearest valid: layout.tp = {fitting}, layout.sp = true, or model.{name} = "
            f"{-(-F // (8 * tp)) * 8 * tp}",
        )


def _context(recipe: Sections) -> Iterator[Contradiction]:
    """Ranks of the context axis have the same number of tokens, and whole heads with `ulysses`."""
    T, layout, kv_heads = recipe.model.seq_len, recipe.layout, recipe.model.kv_heads or recipe.model.heads
    cp, ulysses = layout.cp, layout.cp_method == "ulysses"
    if cp == 1:
        return
    keys = {"model.seq_len", "layout.cp", "layout.cp_method"}

    def fits(ranks: int) -> bool:
        return T % (ranks if ulysses or ranks == 1 else 2 * ranks) == 0 and not (
            ulysses and kv_heads % (ranks * layout.tp)
        )

    nearest = max((ranks for ranks in divisors(T) if ranks <= cp and fits(ranks)), default=1)
    if not ulysses and T % (2 * cp):
        more = -(-T // (2 * cp)) * 2 * cp
        yield (
            keys,
            f"2 x layout.cp = {2 * cp} must divide model.seq_len = {T}: a ring rank has a chunk from the front "
            f"and one from the back. Nearest valid: layout.cp = {nearest}, or model.seq_len = {more}",
        )
    if ulysses and T % cp:
        yield (
            keys,
            f"layout.cp = {cp} must divide model.seq_len = {T}: each rank has the same number of tokens. "
            f"Nearest valid: layout.cp = {nearest}, or model.seq_len = {-(-T // cp) * cp}",
        )
    if ulysses and kv_heads % (cp * layout.tp):
        name = "kv_heads" if recipe.model.kv_heads else "heads"
        yield (
            {f"model.{name}", "layout.cp", "layout.tp", "layout.cp_method"},
            f"layout.cp x layout.tp = {cp * layout.tp} must divide model.{name} = {kv_heads}: with cp_method = ulysses "
            f"each rank has whole heads. Nearest valid: layout.cp = {nearest}, or layout.cp_method = ring",
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


def _noise(recipe: Sections) -> Iterator[Contradiction]:
    """The noise scale needs ranks that see the whole gradient of a microbatch, or of their own share."""
    layout, model = recipe.layout, recipe.model
    tied = resolve_model(model, vocab_size=1).tie_embeddings
    dp = layout.dp_replicate * layout.dp_shard
    unequal = recipe.train.global_batch_size % (dp * (recipe.train.microbatch_size or 1)) > 0
    parts = (
        ({"train.global_batch_size", "layout.dp_replicate", "layout.dp_shard"}, unequal, "ranks "
            "that have unequal shares of the batch"),
        ({"layout.cp"}, layout.cp > 1, "cp: a rank sees parts of sequences"),
        ({"layout.ep"}, layout.ep > 1, "ep: experts get tokens of several ranks at once"),
        ({"layout.sp"}, layout.sp, "sp: gradients of norms are sums over the tensor axis"),
        ({"layout.tp"}, layout.tp > 1 and bool(card_of(model).regional), "tp with this model: "
            "gradients of the norms of heads are sums over the tensor axis"),
        ({"layout.tp", "layout.zero"}, layout.tp > 1 and layout.zero > 0, "tp under ZeRO: a message "
            "holds both shared and sharded gradients"),
        ({"layout.compress"}, layout.compress != NONE, "compress: the sum is not the whole gradient"),
        ({"layout.zeropp"}, "gradients" in layout.zeropp, "zeropp's gradients: the sum is not the whole gradient"),
        ({"layout.pp", "model.tie_embeddings"}, layout.pp > 1 and tied, "pp with tied embeddings: "
            "two stages each have a part of the gradient"),
    )  # fmt: skip
    for keys, wrong, why in parts:
        if recipe.observe.noise_scale and wrong:
            instead = "layout.zero = 0" if "layout.zero" in keys else "observe.noise_scale = false"
            message = f"observe.noise_scale cannot be measured with {why}. Nearest valid: {instead}"
            yield keys | {"observe.noise_scale"}, message


def _pipeline(recipe: Sections) -> Iterator[Contradiction]:
    model, layout = recipe.model, Layout.from_recipe(recipe.layout)
    if any({"schedule", "virtual_stages"} & names for names, _ in problems(layout)):
        return  # already reported
    per_rank = layout.stages_per_rank
    if layout.pp * per_rank > model.layers:
        name = "layout.virtual_stages" if layout.virtual_stages == per_rank else f"{layout.schedule}'s"
        fitting = max(1, model.layers // per_rank)
        yield (
            {"model.layers", "layout.pp", "layout.virtual_stages", "layout.schedule"},
            f"layout.pp = {layout.pp} x {name} {per_rank} = {layout.pp * per_rank} stages, more than model.layers = "
            f"{model.layers}: each stage has at least one block. Nearest valid: layout.pp = {fitting}",
        )


def expected_vocab_size(recipe: Sections) -> int | None:
    """V before any text is read: `model.vocab_size`, or the size of `bpe:N` and `bytes`. None for `chars` and for
    tokenizer files."""
    if recipe.model.vocab_size:
        return recipe.model.vocab_size
    if recipe.data.source.startswith("tokens:"):
        return None
    if recipe.data.tokenizer == "bytes":
        return round_up(257, 64)  # 256 bytes and the end token
    bpe = _BPE.fullmatch(recipe.data.tokenizer)
    return round_up(int(bpe[1]), 64) if bpe else None
