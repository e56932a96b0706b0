"""Fields that change nothing in a recipe, as one table. Values that differ from the default are noted where the layout
is to blame, so that one recipe serves one rank and many. They are refused where no layout could change that."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import starmap
from operator import attrgetter
from typing import NamedTuple

from fivefold.models.card import Contradiction
from fivefold.optim import OUTER
from fivefold.precision import FIELDS
from fivefold.recipe.messages import toml_value
from fivefold.recipe.schema import Sections
from fivefold.schedules.compression import NONE
from fivefold.sharding.layout import Layout, largest, summing_groups
from fivefold.sharding.sync import SERVER
from fivefold.sharding.tiers import OFFLOADS


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
    return recipe.layout.dp * recipe.layout.cp > recipe.sites.count


def _all_reduces(recipe: Sections) -> bool:
    """True if ranks of a site sum gradients by all-reduce."""
    layout = Layout.from_recipe(recipe.layout)
    return bool(
        summing_groups(replace(layout, dp_replicate=max(1, layout.dp_replicate // recipe.sites.count)))
    )


def _kept_twice(recipe: Sections) -> bool:
    """True if several ranks keep the same weights: replicas, sites (those of the last outer step), or the norms on a
    tensor axis."""
    layout = recipe.layout
    return layout.dp_replicate > 1 or layout.tp > 1 or (not layout.zero and layout.dp_shard * layout.cp > 1)


def _unweighed(recipe: Sections) -> bool:
    """True if neither a source nor a stage has weights."""
    data = recipe.data
    return all(entry.weight is None for entry in data.sources) and all(s.weights is None for s in data.stages)


def _of_modes(key: str, modes: list[str]) -> Unused:
    """A field of some precision modes."""
    needed = f"it needs precision.mode = {' or '.join(map(toml_value, modes))}"
    return Unused("precision", key, lambda r: r.precision.mode not in modes, needed, "precision.mode")


NO_SUM = "gradients are summed with dp > 1 or cp > 1 only (within a site)"
ALONE = "one rank shares its states with nobody"
UNUSED = (
    Unused("data", "stream_window stream_gib", lambda r: not r.data.stream,
           "it needs data.stream = true", "data.stream"),
    Unused("data", "weigh_by", _unweighed, "no source has a weight", "data.sources"),
    Unused("data", "end_token", lambda r: not any(spec.startswith("tokens:") for spec in r.data.specs.values()),
           "the tokenizer says it where text is tokenized", "data.source"),
    Unused("faults", "hash_every", lambda r: not _kept_twice(r), "no two ranks keep the same weights"),
    Unused("faults", "on_spike", lambda r: not r.faults.spike_limit,
           "faults.spike_limit = 0 finds none", "faults.spike_limit"),
    Unused("layout", "schedule", lambda r: r.layout.pp == 1, "a schedule needs pp > 1"),
    Unused("layout", "virtual_stages", lambda r: r.layout.pp == 1, "stages need pp > 1"),
    Unused("layout", "cp_method", lambda r: r.layout.cp == 1, "it needs cp > 1"),
    Unused("layout", "expert_chunks", lambda r: r.layout.ep == 1, "experts exchange rows with ep > 1 only"),
    Unused("layout", "zero zeropp", lambda r: r.layout.ranks == 1, ALONE),
    Unused("layout", "recompute",
           lambda r: r.layout.recompute == "ops:norm" and r.layout.sp and not r.layout.sp_regather,
           "with sp a rank keeps what it gathered, not what norms give (sp_regather = true changes that)"),
    Unused("layout", "offload_dir", lambda r: not OFFLOADS[r.layout.offload].disk,
           "layout.offload leaves nothing on disk"),
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
    Unused("sync", "method", lambda r: r.sync.method in OUTER and r.sites.count == 1,
           "one site has nobody to synchronise with"),
    Unused("sync", "every sites fragments overlap patience outer_dtype outer_lr outer_momentum",
           lambda r: r.sync.method not in OUTER, "every step sums gradients", "sync.method"),
    Unused("sync", "servers staleness order", lambda r: not r.servers.count,
           f'it needs sync.method = "{SERVER}"', "sync.method"),
    *starmap(_of_modes, FIELDS.items()),
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
PLAIN = Sections()


def notes(recipe: Sections) -> list[str]:
    """One sentence per value that has no effect in the recipe's layout, and one on ranks that wait for others."""
    lines = [
        f"{text} has no effect in this layout: {why}" for _, text, why, other in _unused(recipe) if not other
    ]
    return lines + _waiting(recipe)


def _waiting(recipe: Sections) -> list[str]:
    """Says how long ranks wait for the one with the largest share, if shares are unequal."""
    size, B, ranks = recipe.train.global_batch_size, recipe.train.microbatch_size or 1, recipe.layout.dp
    most, least = largest(size // B, ranks) * B, size // B // ranks * B
    if most * ranks == size:
        return []
    return [
        f"{ranks} data-parallel ranks share {size} sequences: each has {least} or {most}, and "
        f"{1 - size / most / ranks:.0%} of their time is spent waiting"
    ]


def refused(recipe: Sections) -> Iterator[Contradiction]:
    """Yields the values that have no effect in any layout."""
    for key, text, why, other in _unused(recipe):
        if other:
            name = key.partition(".")[2]
            yield (
                {key, other},
                f"{text} has no effect: {why}. Nearest valid: leave {name} out, or change {other}",
            )


def _unused(recipe: Sections) -> Iterator[tuple[str, str, str, str]]:
    """(key, `key = value`, why, the other field or "") of the values without effect."""
    for section, names, when, why, other in UNUSED:
        for key in (f"{section}.{name}" for name in names.split()):
            value = attrgetter(key)(recipe)
            if value != attrgetter(key)(PLAIN) and when(recipe):
                yield key, f"{key} = {toml_value(value)}", why, other
