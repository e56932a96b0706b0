"""Fields that change nothing in a recipe, as one table. Values that differ from the default are noted where the layout
is to blame, so that one recipe serves one rank and many. They are refused where no layout could change that."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from operator import attrgetter

from fivefold.models.card import Contradiction
from fivefold.optim.outer import OUTER
from fivefold.precision import PRECISIONS
from fivefold.precision.fp8 import FP8
from fivefold.recipe.schema import Sections
from fivefold.recipe.words import toml_value
from fivefold.schedules.collectives.choose import LIBRARY
from fivefold.schedules.compression import NONE
from fivefold.spread.layout import Layout, summing_groups
from fivefold.spread.servers import SERVER
from fivefold.spread.shares import largest
from fivefold.spread.tiers import OFFLOADS


@dataclass(frozen=True)
class Idle:
    """A field without effect. when: true for these recipes. why: the reason, in words. by: the other field that would
    have to change; "": the layout."""

    key: str
    when: Callable[[Sections], bool]
    why: str
    by: str = ""


def _summing(recipe: Sections) -> int:
    """Number of ranks that sum gradients in every step."""
    return recipe.layout.dp * recipe.layout.cp // recipe.sites.count


def _sums(recipe: Sections) -> list[str]:
    """The groups of a site that sum gradients by all-reduce."""
    layout = Layout.from_recipe(recipe.layout)
    return summing_groups(replace(layout, dp_replicate=max(1, layout.dp_replicate // recipe.sites.count)))


def _kept_twice(recipe: Sections) -> bool:
    """True if several ranks keep the same weights: replicas, sites (those of the last outer step), or the norms on a
    tensor axis."""
    layout = recipe.layout
    return layout.dp_replicate > 1 or layout.tp > 1 or (not layout.zero and layout.dp_shard * layout.cp > 1)


def _outer(key: str) -> Idle:
    """A field of the outer steps."""
    return Idle(
        f"sync.{key}", lambda r: r.sync.method not in OUTER, "every step sums gradients", "sync.method"
    )


def _served(key: str) -> Idle:
    """A field of parameter servers."""
    return Idle(
        f"sync.{key}", lambda r: not r.servers.count, f'it needs sync.method = "{SERVER}"', "sync.method"
    )


def _fp8(key: str) -> Idle:
    """A field of training in fp8."""
    return Idle(
        f"precision.{key}",
        lambda r: r.precision.mode != FP8,
        f'it needs precision.mode = "{FP8}"',
        "precision.mode",
    )


def _scaled(key: str) -> Idle:
    """A field of loss scaling."""
    return Idle(
        f"precision.{key}",
        lambda r: r.precision.mode == "auto" or not PRECISIONS[r.precision.mode].scaled,
        "only fp16 scales the loss",
        "precision.mode",
    )


IDLE = (
    *(
        Idle(f"data.{key}", lambda r: not r.data.stream, "it needs data.stream = true", "data.stream")
        for key in ("stream_window", "stream_gib")
    ),
    Idle(
        "data.weigh_by",
        lambda r: (
            all(entry.weight is None for entry in r.data.sources)
            and all(stage.weights is None for stage in r.data.stages)
        ),
        "no source has a weight",
        "data.sources",
    ),
    Idle(
        "data.end_token",
        lambda r: not any(spec.startswith("tokens:") for spec in r.data.specs.values()),
        "the tokenizer says it where text is tokenized",
        "data.source",
    ),
    *map(_fp8, ("fp8_scaling", "fp8_backward", "fp8_skip_first", "fp8_skip_last")),
    Idle("faults.hash_every", lambda r: not _kept_twice(r), "no two ranks keep the same weights"),
    Idle(
        "faults.on_spike",
        lambda r: not r.faults.spike_limit,
        "faults.spike_limit = 0 finds none",
        "faults.spike_limit",
    ),
    Idle("layout.schedule", lambda r: r.layout.pp == 1, "a schedule needs pp > 1"),
    Idle("layout.virtual_stages", lambda r: r.layout.pp == 1, "stages need pp > 1"),
    Idle("layout.cp_method", lambda r: r.layout.cp == 1, "it needs cp > 1"),
    Idle("layout.expert_chunks", lambda r: r.layout.ep == 1, "experts exchange rows with ep > 1 only"),
    Idle("layout.zero", lambda r: r.layout.ranks == 1, "one rank shares its states with nobody"),
    Idle(
        "precision.reduce",
        lambda r: _summing(r) == 1,
        "gradients are summed with dp > 1 or cp > 1 only (within a site)",
    ),
    Idle(
        "layout.recompute",
        lambda r: r.layout.recompute == "ops:norm" and r.layout.sp and not r.layout.sp_regather,
        "with sp a rank keeps what it gathered, not what norms give (sp_regather = true changes that)",
    ),
    Idle(
        "layout.offload_dir",
        lambda r: not OFFLOADS[r.layout.offload].disk,
        "layout.offload leaves nothing on disk",
    ),
    Idle(
        "precision.reduce",
        lambda r: _summing(r) > 1 and r.layout.compress != NONE,
        "layout.compress says what is sent",
    ),
    Idle(
        "precision.rounding",
        lambda r: r.precision.mode == "auto" or not PRECISIONS[r.precision.mode].rounds,
        "only modes without fp32 masters round the update",
        "precision.mode",
    ),
    *map(_scaled, ("loss_scale", "loss_scale_every")),
    Idle(
        "layout.compress",
        lambda r: _summing(r) == 1,
        "gradients are summed with dp > 1 or cp > 1 only",
    ),
    Idle("layout.zeropp", lambda r: r.layout.ranks == 1, "one rank shares its states with nobody"),
    Idle(
        "layout.ranks_per_node",
        lambda r: r.layout.zeropp == NONE,
        "only zeropp asks which ranks are a node's",
    ),
    Idle(
        "precision.reduce",
        lambda r: _summing(r) > 1 and "gradients" in r.layout.zeropp,
        "layout.zeropp says what is sent",
    ),
    Idle(
        "layout.compress_after",
        lambda r: r.layout.compress == NONE,
        "no gradients are compressed",
    ),
    Idle(
        "sync.method",
        lambda r: r.sync.method in OUTER and r.sites.count == 1,
        "one site has nobody to synchronise with",
    ),
    *map(
        _outer,
        ("every", "sites", "fragments", "overlap", "patience", "outer_dtype", "outer_lr", "outer_momentum"),
    ),
    *map(_served, ("servers", "staleness", "order")),
    Idle(
        "layout.all_reduce",
        lambda r: not _sums(r) and r.layout.all_reduce != LIBRARY,  # the default of earlier versions
        "only replicas sum gradients by all-reduce (zero = 0 with dp > 1 or cp > 1, or dp_replicate > 1)",
    ),
    Idle(
        "layout.all_reduce",
        lambda r: bool(_sums(r)) and r.layout.compress != NONE and r.layout.all_reduce != LIBRARY,
        "layout.compress says what is sent",
    ),
    Idle(
        "observe.trace_step",
        lambda r: r.servers.count > 0,
        "RUN/workers.jsonl has what the workers do, and when; `fivefold draw RUN` draws it",
    ),
    Idle(
        "observe.profile_steps",
        lambda r: r.servers.count > 0,
        "workers and servers are not profiled",
    ),
    Idle("observe.memory_step", lambda r: r.servers.count > 0, "steps of workers are not tracked"),
    Idle(
        "observe.histogram_step",
        lambda r: r.servers.count > 0,
        "workers and servers do not count the numbers of a step",
    ),
    Idle(
        "layout.bucket_mib",
        lambda r: _summing(r) == 1 or r.layout.zero > 0 or r.servers.count > 0,
        "only replicas sum gradients in buckets (zero = 0 with dp > 1 or cp > 1)",
    ),
    Idle(
        "optim.decay_fraction",
        lambda r: r.optim.schedule != "wsd",
        'only schedule = "wsd" decays in a share of the run',
        "optim.schedule",
    ),
    *(
        Idle(
            f"optim.{name}",
            lambda r: r.optim.schedule != "restarts",
            'only schedule = "restarts" has cycles',
            "optim.schedule",
        )
        for name in ("restart_steps", "restart_growth")
    ),
    Idle(
        "optim.min_lr",
        lambda r: r.optim.schedule == "constant" and r.optim.min_lr != r.optim.lr,
        'schedule = "constant" stays at lr',
        "optim.schedule",
    ),
)
PLAIN = Sections()


def notes(recipe: Sections) -> list[str]:
    """One sentence per value that has no effect in the recipe's layout, and one on ranks that wait for others."""
    found = [
        f"{text} has no effect in this layout: {idle.why}" for idle, text in _idle(recipe) if not idle.by
    ]
    return found + _waiting(recipe)


def _waiting(recipe: Sections) -> list[str]:
    """Says how long ranks wait for the one with the largest share, if shares are unequal."""
    size, B, layout = recipe.train.global_batch_size, recipe.train.microbatch_size or 1, recipe.layout
    ranks = layout.dp
    most = largest(size // B, ranks) * B
    if most * ranks == size:
        return []
    least = size // B // ranks * B
    waiting = 1 - size / most / ranks
    return [
        f"{ranks} data-parallel ranks share {size} sequences: each has {least} or {most}, and {waiting:.0%} of their "
        "time is spent waiting"
    ]


def refused(recipe: Sections) -> Iterator[Contradiction]:
    """Yields the values that have no effect in any layout."""
    for idle, text in _idle(recipe):
        if idle.by:
            name = idle.key.partition(".")[2]
            yield (
                {idle.key, idle.by},
                f"{text} has no effect: {idle.why}. Nearest valid: leave {name} out, or change {idle.by}",
            )


def _idle(recipe: Sections) -> Iterator[tuple[Idle, str]]:
    """Entries of the table that hold for a recipe, with `key = value`."""
    for idle in IDLE:
        read = attrgetter(idle.key)
        if (value := read(recipe)) != read(PLAIN) and idle.when(recipe):
            yield idle, f"{idle.key} = {toml_value(value)}"
