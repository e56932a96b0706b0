"""Fields that do not combine, as one table, and fields that change nothing, as another. What depends on sizes is in the
other files of this folder.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from operator import attrgetter
from typing import Any, NamedTuple

from fivefold.models.card import Contradiction, card_of, resolve_model
from fivefold.models.recomputation import budget_of
from fivefold.optim import DEFAULT, OPTIMIZERS, OUTER
from fivefold.optim.signs import LABELS
from fivefold.precision import FIELDS, MASTER, PRECISIONS, Mode
from fivefold.recipe.messages import short, toml_value
from fivefold.recipe.schema import Sections
from fivefold.schedules.compression import NONE
from fivefold.sharding.layout import Layout, largest, summing_groups
from fivefold.sharding.sync import SERVER
from fivefold.sharding.tiers import NOT_OFFLOADED, OFFLOADS


class Refused(NamedTuple):
    """A field that does not combine with others, which are separated by blanks. when: true for these recipes. why: the
    reason, or "". nearest: valid values."""

    key: str
    others: str
    when: Callable[[Sections], bool]
    why: str
    nearest: str


def _servers(recipe: Sections) -> bool:
    return recipe.servers.count > 0


def _replica_groups(recipe: Sections) -> bool:
    return recipe.replica_groups.count > 1


def _queues(recipe: Sections) -> bool:
    return bool(recipe.model.capacity_factor) and card_of(recipe.model).has_experts


def _mode(recipe: Sections) -> Mode:
    """The precision mode; of `auto` the usual one, which nothing excludes."""
    return PRECISIONS[recipe.precision.mode if recipe.precision.mode != "auto" else "bf16"]


def _streams(recipe: Sections) -> bool:
    return OFFLOADS[recipe.layout.offload].streams


def _elementwise(recipe: Sections) -> bool:
    return OPTIMIZERS[recipe.optim.name].elementwise


def _value(recipe: Sections, key: str) -> Any:
    return attrgetter(key)(recipe)


PLAIN = Sections()
NO_SERVERS, NOISELESS = 'sync.method = "all"', "observe.noise_scale = false"
OWN_STEPS = "workers and servers have steps of their own"
REFUSED = (
    # Data
    Refused("data.stream", "data.source", lambda r: r.data.source.startswith("tokens:"),
            "tokens are read in place", "stream = false"),
    Refused("data.stream", "data.tokenizer", lambda r: r.data.tokenizer == "chars",
            "it needs all text before the first token", 'tokenizer = "bytes"'),
    Refused("data.stream", "data.chat_template", lambda r: bool(r.data.chat_template),
            "conversations are tokenized before training", "stream = false"),
    Refused("data.packing", "data.stream", lambda r: r.data.packing == "best_fit",
            "the length of each document must be known", 'packing = "concat"'),
    Refused("data.stream", "data.sources",
            lambda r: any(entry.weight is None for entry in r.data.sources)
            and not (r.data.stages and all(stage.weights is not None for stage in r.data.stages)),
            "the size of a source is not known", "a weight for each of data.sources"),
    Refused("data.max_epochs", "data.stream",
            lambda r: bool(r.data.max_epochs or any(entry.max_epochs for entry in r.data.sources)),
            "a stream does not know before its end how long it is", "max_epochs = 0"),
    Refused("data.weigh_by", "data.stream", lambda r: r.data.weigh_by == "documents",
            "a stream does not know how many documents it has", 'weigh_by = "tokens"'),
    Refused("data.chat_template", "data.source data.sources",
            lambda r: bool(r.data.chat_template and r.data.token_files),
            "tokens hold no messages", 'chat_template = "", or a source of .jsonl files'),
    Refused("data.chat_template", "model.arch", lambda r: bool(r.data.chat_template) and not card_of(r.model).causal,
            "it is bidirectional and answers nothing", 'chat_template = "", or arch = "llama"'),
    Refused("data.packing", "model.arch",
            lambda r: r.data.packing == "best_fit" and card_of(r.model).objective == "mlm",
            "it predicts equally many tokens of each sequence, so it needs full ones",
            'packing = "concat", or arch = "llama"'),
    Refused("model.depth", "train.init_from", lambda r: r.model.depth is not None and bool(r.train.init_from),
            "the model is that of the folder", "leave depth out"),
    Refused("train.sample_every", "model.arch", lambda r: r.train.sample_every > 0 and not card_of(r.model).causal,
            "it is bidirectional and generates no text", "train.sample_every = 0"),
    Refused("train.batch_ramp", "optim.name", lambda r: bool(r.train.batch_ramp) and r.optim.name == "sophia",
            "its estimate goes by the tokens of a batch of one size",
            'train.batch_ramp = "", or optim.name = "adamw"'),
    *(
        Refused("optim.estimator", other, lambda r, wrong=wrong: r.optim.estimator == LABELS and wrong(r), why, nearest)
        for other, wrong, why, nearest in (
            ("sync.method", _servers, OWN_STEPS, NO_SERVERS),
            ("layout.offload", _streams, "its update runs beside the next step", f'offload = "{NOT_OFFLOADED}"'),
            ("layout.compress", lambda r: r.layout.compress != NONE,
             "what compression keeps back is of another gradient", f'compress = "{NONE}"'),
            ("layout.zeropp", lambda r: r.layout.zeropp != NONE,
             "its messages round the two gradients differently", f'zeropp = "{NONE}"'),
            ("precision.mode", lambda r: _mode(r).rounds, "an estimate needs fp32 masters", 'mode = "bf16"'),
            ("model.arch", lambda r: card_of(r.model).has_experts,
             "experts that get other tokens change the loss by steps", 'arch = "llama"'),
            ("observe.noise_scale", lambda r: r.observe.noise_scale, "it counts every gradient of a step", NOISELESS),
            ("observe.histogram_step", lambda r: r.observe.histogram_step > 0, "it counts every gradient of a step",
             "observe.histogram_step = 0"),
        )
    ),
    *(
        Refused("optim.qk_clip", other, lambda r, wrong=wrong: r.optim.qk_clip > 0 and wrong(r), why, nearest)
        for other, wrong, why, nearest in (
            ("model.arch", lambda r: card_of(r.model).normed_scores,
             "its norms of queries and keys limit the scores", "qk_clip = 0"),
            ("sync.method", _servers, OWN_STEPS, NO_SERVERS),
            ("layout.offload", _streams, "weights leave the device in their update", f'offload = "{NOT_OFFLOADED}"'),
            ("precision.mode", lambda r: _mode(r).rounds, "it scales fp32 masters", 'mode = "bf16"'),
        )
    ),
    Refused("train.batch_ramp", "observe.noise_scale", lambda r: bool(r.train.batch_ramp and r.observe.noise_scale),
            "it averages over steps, whose batches must have one size", NOISELESS),
    # Precision and offload
    Refused("precision.mode", "layout.compress", lambda r: _mode(r).scaled and r.layout.compress != NONE,
            "what compression keeps back would have another loss scale later, and an overflow would stay in it",
            f'compress = "{NONE}", or mode = "bf16"'),
    Refused("precision.mode", "layout.compress", lambda r: _mode(r).master != MASTER and r.layout.compress != NONE,
            "compression keeps fp32 residuals", f'compress = "{NONE}", or mode = "bf16"'),
    Refused("precision.mode", "optim.name", lambda r: _mode(r).rounds and not _elementwise(r),
            "only what is updated element by element is rounded",
            f'optim.name = "{DEFAULT}", or mode = "bf16"'),
    Refused("precision.mode", "layout.offload", lambda r: bool(_mode(r).weight) and _streams(r),
            "it streams nothing in fp8", f'offload = "{NOT_OFFLOADED}", or mode = "fp8"'),
    Refused("precision.mode", "model.arch", lambda r: bool(_mode(r).weight) and card_of(r.model).has_experts,
            "experts keep no weights in fp8", 'arch = "llama", or mode = "fp8"'),
    Refused("layout.offload", "optim.name", lambda r: _streams(r) and not _elementwise(r),
            "only what is updated element by element can be updated in chunks",
            'optim.name = "adamw", or layout.offload = "activations"'),
    *(Refused("layout.offload_update", field, lambda r, skips=skips: r.layout.early and skips(r),
              "blocks are updated before the gradient's norm is known, so no step may be clipped, scaled or skipped",
              f'offload_update = "beside", or {instead}')
      for field, skips, instead in (
          ("optim.grad_clip", lambda r: r.optim.grad_clip > 0, "grad_clip = 0"),
          ("precision.mode", lambda r: _mode(r).scaled, 'mode = "bf16"'),
          ("faults.on_nonfinite", lambda r: r.faults.on_nonfinite == "skip", 'on_nonfinite = "abort"'),
          ("faults.on_spike", lambda r: r.faults.spike_limit > 0 and r.faults.on_spike != "tell", 'on_spike = "tell"'),
      )),
    Refused("layout.offload_window", "layout.recompute",
            lambda r: r.layout.offload != NOT_OFFLOADED and r.layout.offload_window == 0
            and budget_of(r.layout.recompute) is not None,
            "the window would take what the budget leaves", "offload_window = 2"),
    Refused("model.capacity_factor", "layout.cp", lambda r: _queues(r) and r.layout.cp > 1,
            "an expert's queue would span several ranks", "capacity_factor = 0"),
    Refused("model.capacity_factor", "layout.sp", lambda r: _queues(r) and r.layout.sp,
            "an expert's queue would span several ranks", "capacity_factor = 0"),
    *(Refused("layout.expert_buffer", field, wrong, why, instead)
      for field, wrong, why, instead in (
          ("model.capacity_factor", lambda r: r.layout.expert_buffer > 0 and _queues(r),
           "rows without room are an error there, and dropped here", "capacity_factor = 0"),
          ("layout.expert_chunks", lambda r: r.layout.expert_buffer > 0 and r.layout.expert_chunks > 1,
           "each chunk would need room of its own", "expert_chunks = 1"),
      )),
    # Several replica groups
    Refused("sync.method", "model.arch", lambda r: _replica_groups(r) and card_of(r.model).has_experts,
            "each replica group would balance its experts by itself", NO_SERVERS),
    Refused("observe.noise_scale", "sync.method", lambda r: _replica_groups(r) and r.observe.noise_scale,
            "no step has the gradient of the whole batch", NOISELESS),
    Refused("precision.rounding", "sync.method",
            lambda r: _replica_groups(r) and _mode(r).rounds and r.precision.rounding == "kahan",
            "outer steps replace the weights that the compensation belongs to", 'rounding = "stochastic"'),
    Refused("layout.offload", "sync.method", lambda r: _replica_groups(r) and _streams(r),
            "outer steps change weights in memory", 'layout.offload = "activations"'),
    Refused("sync.outer_momentum", "sync.method",
            lambda r: r.sync.outer_momentum is not None and r.sync.method in OUTER
            and "momentum" not in OUTER[r.sync.method].fields,
            "it takes the mean weights, without momentum", 'leave it out, or sync.method = "diloco"'),
    # Parameter servers
    Refused("sync.method", "model.arch", lambda r: _servers(r) and card_of(r.model).has_experts,
            "each worker would balance its experts by itself", NO_SERVERS),
    Refused("optim.name", "sync.method", lambda r: _servers(r) and OPTIMIZERS[r.optim.name].needs != "elements",
            "servers keep rows, and its update needs whole matrices", 'optim.name = "adamw"'),
    Refused("precision.mode", "sync.method", lambda r: _servers(r) and _mode(r).scaled,
            "weights of one server change before another knows of an overflow", 'mode = "bf16"'),
    Refused("precision.mode", "sync.method", lambda r: _servers(r) and _mode(r).master != MASTER,
            "a server keeps fp32 masters", 'mode = "bf16"'),
    Refused("train.init_from", "sync.method", lambda r: _servers(r) and bool(r.train.init_from),
            "", NO_SERVERS),
    Refused("layout.recompute", "sync.method",
            lambda r: _servers(r) and budget_of(r.layout.recompute) is not None,
            "", 'layout.recompute = "full"'),
    Refused("faults.on_nonfinite", "sync.method", lambda r: _servers(r) and r.faults.on_nonfinite == "rollback",
            OWN_STEPS, 'faults.on_nonfinite = "skip"'),
    *(
        Refused(key, "sync.method", lambda r, key=key: _servers(r) and _value(r, key) != _value(PLAIN, key), why,
                f"{key} = {toml_value(_value(PLAIN, key))}")
        for key, why in (
            ("train.batch_ramp", "workers count batches of one size"),
            ("train.z_loss", OWN_STEPS),
            ("faults.on_spike", OWN_STEPS),
            ("faults.hash_every", OWN_STEPS),
            ("observe.noise_scale", OWN_STEPS),
            ("observe.memory_step", "steps of workers are not tracked"),
        )
    ),
    # Frozen weights
    *(
        Refused("model.freeze", other, lambda r, wrong=wrong: bool(r.model.freeze.strip()) and wrong(r), "", nearest)
        for other, wrong, nearest in (
            ("layout.offload", lambda r: r.layout.offload != NOT_OFFLOADED, f'layout.offload = "{NOT_OFFLOADED}"'),
            ("layout.zeropp", lambda r: r.layout.zeropp != NONE, f'layout.zeropp = "{NONE}"'),
            ("sync.method", lambda r: r.sync.method != "all", NO_SERVERS),
            ("observe.noise_scale", lambda r: r.observe.noise_scale, NOISELESS),
        )
    ),
    # The noise scale needs ranks that see the whole gradient of a microbatch, or of their own share
    *(
        Refused("observe.noise_scale", others, lambda r, wrong=wrong: r.observe.noise_scale and wrong(r), why,
                "layout.zero = 0" if "layout.zero" in others else NOISELESS)
        for others, wrong, why in (
            ("train.global_batch_size layout.dp_replicate layout.dp_shard",
             lambda r: r.train.global_batch_size % (r.layout.dp * (r.train.microbatch_size or 1)) > 0,
             "ranks have unequal shares of the batch"),
            ("layout.cp", lambda r: r.layout.cp > 1, "a rank sees parts of sequences"),
            ("layout.ep", lambda r: r.layout.ep > 1, "experts get tokens of several ranks at once"),
            ("layout.sp", lambda r: r.layout.sp, "gradients of norms are sums over the tensor axis"),
            ("layout.tp model.arch", lambda r: r.layout.tp > 1 and bool(card_of(r.model).regional),
             "gradients of the norms of heads are sums over the tensor axis"),
            ("layout.tp layout.zero", lambda r: r.layout.tp > 1 and r.layout.zero > 0,
             "a message holds both shared and sharded gradients"),
            ("layout.compress", lambda r: r.layout.compress != NONE, "the sum is not the whole gradient"),
            ("layout.zeropp", lambda r: "gradients" in r.layout.zeropp, "the sum is not the whole gradient"),
            ("layout.pp model.tie_embeddings model.mtp_depth",
             lambda r: r.layout.pp > 1 and card_of(resolve_model(r.model, vocab_size=1)).tied,
             "two stages each have a part of the gradient of the embedding"),
        )
    ),
)  # fmt: skip


def combinations(recipe: Sections) -> Iterator[Contradiction]:
    """Yields the fields of a recipe that do not combine."""
    for key, others, when, why, nearest in REFUSED:
        if "data.stream" in (key, others) and not recipe.data.stream:
            continue
        if when(recipe):
            beside = " and ".join(_shown(recipe, other) for other in others.split())
            reason = f": {why}" if why else ""
            message = (
                f"{_shown(recipe, key)} is not supported with {beside}{reason}. Nearest valid: {nearest}"
            )
            yield {key, *others.split()}, message


def _shown(recipe: Sections, key: str) -> str:
    """`key = value`; the key alone of a list of tables, or of what is not set."""
    value = _value(recipe, key)
    return key if value is None or isinstance(value, tuple) else f"{key} = {short(value)}"


class Unused(NamedTuple):
    """Fields of a section without effect, separated by blanks. when: true for these recipes. why: the reason, in words.
    by: the other field that would have to change; "": the layout."""

    section: str
    names: str
    when: Callable[[Sections], bool]
    why: str
    by: str = ""


def _summing(recipe: Sections) -> bool:
    """True if several ranks sum gradients in every step."""
    return recipe.layout.dp * recipe.layout.cp > recipe.replica_groups.count


def _all_reduces(recipe: Sections) -> bool:
    """True if ranks of a replica group sum gradients by all-reduce."""
    layout = Layout.from_recipe(recipe.layout)
    replicas = max(1, layout.dp_replicate // recipe.replica_groups.count)
    return bool(summing_groups(replace(layout, dp_replicate=replicas)))


NO_SUM = "gradients are summed with dp > 1 or cp > 1 only (within a replica group)"
ALONE = "one rank shares its states with nobody"
UNUSED = (
    Unused("data", "stream_window stream_gib", lambda r: not r.data.stream,
           "it needs data.stream = true", "data.stream"),
    Unused("data", "weigh_by", lambda r: all(entry.weight is None for entry in r.data.sources)
           and all(stage.weights is None for stage in r.data.stages), "no source has a weight", "data.sources"),
    Unused("data", "end_token", lambda r: not r.data.token_files,
           "the tokenizer says it where text is tokenized", "data.source"),
    # Replicas, replica groups (weights of the last outer step), and the norms on a tensor axis are kept twice
    Unused("faults", "hash_every", lambda r: r.layout.dp_replicate == r.layout.tp == 1
           and (r.layout.zero > 0 or r.layout.dp_shard * r.layout.cp == 1), "no two ranks keep the same weights"),
    Unused("faults", "on_spike", lambda r: not r.faults.spike_limit,
           "faults.spike_limit = 0 finds none", "faults.spike_limit"),
    Unused("layout", "schedule", lambda r: r.layout.pp == 1, "a schedule needs pp > 1"),
    Unused("layout", "virtual_stages round_microbatches zb_costs zb_live bare_ends",
           lambda r: r.layout.pp == 1, "stages need pp > 1"),
    Unused("layout", "cp_method", lambda r: r.layout.cp == 1, "it needs cp > 1"),
    Unused("layout", "expert_chunks expert_buffer", lambda r: r.layout.ep == 1,
           "experts exchange rows with ep > 1 only"),
    Unused("layout", "ep_fold", lambda r: r.layout.ep == 1 or r.layout.tp == 1,
           "it folds the tensor axis into the expert axis: ep > 1 and tp > 1"),
    Unused("layout", "zero zeropp", lambda r: r.layout.ranks == 1, ALONE),
    Unused("layout", "all_gather reduce_scatter", lambda r: Layout.from_recipe(r.layout).shards == 1,
           "only ZeRO gathers weights and scatters gradients (zero > 0)"),
    Unused("layout", "recompute",
           lambda r: r.layout.recompute == "ops:norm" and r.layout.sp and not r.layout.sp_regather,
           "with sp a rank keeps what it gathered, not what norms give (sp_regather = true changes that)"),
    Unused("layout", "offload_dir", lambda r: not OFFLOADS[r.layout.offload].disk,
           "layout.offload leaves nothing on disk"),
    Unused("layout", "offload_window", lambda r: OFFLOADS[r.layout.offload].working == "device",
           "layout.offload leaves the weights on the device"),
    Unused("layout", "offload_update", lambda r: not _streams(r), "layout.offload leaves the states on the device"),
    Unused("layout", "compress", lambda r: not _summing(r), NO_SUM),
    Unused("layout", "compress_after", lambda r: r.layout.compress == NONE, "no gradients are compressed"),
    Unused("layout", "ranks_per_node", lambda r: r.layout.zeropp == NONE,
           "only zeropp asks which ranks are a node's"),
    Unused("layout", "all_reduce", lambda r: not _all_reduces(r),
           "only replicas sum gradients by all-reduce (zero = 0 with dp > 1 or cp > 1, or dp_replicate > 1)"),
    Unused("layout", "all_reduce", lambda r: _all_reduces(r) and r.layout.compress != NONE,
           "layout.compress says what is sent"),
    Unused("layout", "bucket_mib", lambda r: not _summing(r) or r.layout.zero > 0 or r.servers.count > 0,
           "only replicas sum gradients in buckets (zero = 0 with dp > 1 or cp > 1)"),
    Unused("sync", "method", lambda r: r.sync.method in OUTER and r.replica_groups.count == 1,
           "one replica group has nobody to synchronise with"),
    Unused("sync", "every replica_groups fragments overlap patience outer_dtype outer_lr outer_momentum",
           lambda r: r.sync.method not in OUTER, "every step sums gradients", "sync.method"),
    Unused("sync", "servers staleness order", lambda r: not r.servers.count,
           f'it needs sync.method = "{SERVER}"', "sync.method"),
    *(Unused("precision", key, lambda r, modes=modes: r.precision.mode not in modes,
             f"it needs precision.mode = {' or '.join(map(toml_value, modes))}", "precision.mode")
      for key, modes in FIELDS.items()),
    Unused("precision", "fp8_dispatch", lambda r: not card_of(r.model).has_experts, "the model has no experts"),
    Unused("precision", "reduce", lambda r: not _summing(r), NO_SUM),
    Unused("precision", "reduce", lambda r: _summing(r) and r.layout.compress != NONE,
           "layout.compress says what is sent"),
    Unused("precision", "reduce", lambda r: _summing(r) and "gradients" in r.layout.zeropp,
           "layout.zeropp says what is sent"),
    Unused("observe", "trace_step", lambda r: r.servers.count > 0,
           "RUN/workers.jsonl has what the workers do, and when; `fivefold draw RUN` draws it"),
    Unused("observe", "profile_steps", lambda r: r.servers.count > 0, "workers and servers are not profiled"),
    Unused("observe", "histogram_step", lambda r: r.servers.count > 0,
           "workers and servers do not count the numbers of a step"),
    Unused("optim", "decay_fraction", lambda r: r.optim.schedule != "wsd",
           'only schedule = "wsd" decays in a share of the run', "optim.schedule"),
    Unused("optim", "restart_steps restart_growth", lambda r: r.optim.schedule != "restarts",
           'only schedule = "restarts" has cycles', "optim.schedule"),
    Unused("optim", "min_lr", lambda r: r.optim.schedule == "constant" and r.optim.min_lr != r.optim.lr,
           'schedule = "constant" stays at lr', "optim.schedule"),
)  # fmt: skip


def notes(recipe: Sections) -> list[str]:
    """One sentence per value that has no effect in the recipe's layout, and one on ranks that wait for others."""
    lines = [
        f"{text} has no effect in this layout: {why}" for _, text, why, other in unused(recipe) if not other
    ]
    size, B, ranks = recipe.train.global_batch_size, recipe.train.microbatch_size or 1, recipe.layout.dp
    most, least = largest(size // B, ranks) * B, size // B // ranks * B
    if most * ranks != size:
        lines.append(
            f"{ranks} data-parallel ranks share {size} sequences: each has {least} or {most}, and "
            f"{1 - size / most / ranks:.0%} of their time is spent waiting"
        )
    return lines


def refused(recipe: Sections) -> Iterator[Contradiction]:
    """Yields the values that have no effect in any layout."""
    for key, text, why, other in unused(recipe):
        if other:
            name = key.partition(".")[2]
            yield (
                {key, other},
                f"{text} has no effect: {why}. Nearest valid: leave {name} out, or change {other}",
            )


_READ = [
    (key, attrgetter(key), _value(PLAIN, key), row)
    for row in UNUSED
    for key in (f"{row.section}.{name}" for name in row.names.split())
]
"""(key, how to read it, what it is by default, its row): a search asks this of each layout."""


def unused(recipe: Sections) -> Iterator[tuple[str, str, str, str]]:
    """(key, `key = value`, why, the other field or "") of the values without effect."""
    for key, read, plain, row in _READ:
        if (value := read(recipe)) != plain and row.when(recipe):
            yield key, f"{key} = {toml_value(value)}", row.why, row.by
