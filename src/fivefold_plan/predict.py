"""Predicts memory, time and communication of a recipe's layout on a cluster."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

from fivefold.errors import UserError
from fivefold.models.card import card_of, resolve_model
from fivefold.models.recomputation import budget_of
from fivefold.models.section import ModelSection
from fivefold.optim import OPTIMIZERS, kept_in
from fivefold.optim.signs import LABELS
from fivefold.precision import DTYPES, MASTER, PRECISIONS, sent
from fivefold.precision.fp8 import ALONG, scaling
from fivefold.recipe import Recipe, expected_vocab_size, flops_per_token, microbatches_per_step, resolve
from fivefold.recipe.rules import allows
from fivefold.sharding.layout import Layout, to_text
from fivefold.sharding.layout_rules import validate
from fivefold.sharding.sync import ReplicaGroups, replica_group_layout
from fivefold.sharding.tiers import WINDOW
from fivefold_plan.cluster.clusters import of_gpu, parse
from fivefold_plan.cluster.devices import Cluster, of_table
from fivefold_plan.cluster.measured import load as load_table
from fivefold_plan.memory import memory
from fivefold_plan.memory.memory import Memory
from fivefold_plan.messages import volume
from fivefold_plan.search.recompute_budget import Budget, recomputing
from fivefold_plan.search.recompute_budget import resolve as resolve_budget
from fivefold_plan.setting import (
    FIVEFOLD,
    FIVEFOLD_CPU,
    Setting,
    Software,
    States,
    mode_of,
    setting,
    software_of,
)
from fivefold_plan.software import evidence
from fivefold_plan.time import offload, servers
from fivefold_plan.time.stage_costs import Parts, parts, recomputed
from fivefold_plan.time.time import SlowLinks, Stalls, Step, slow_links, stalls, step

STAND_IN = "h100"
FRAGMENTS = 0.04
"""Share of allocated memory that the allocator reserves on top (2.8 to 7.9% in published runs with memory to spare)."""


@dataclass(frozen=True)
class Plan:
    """A prediction. memory: per rank, at each pipeline position. stalls: only for a whole recipe. together: for
    several replica groups, the same run as one. service: of parameter servers; then memory is a worker's and a
    server's."""

    setting: Setting
    memory: list[Memory]
    step: Step
    stalls: Stalls | None = None
    together: Setting | None = None
    service: servers.Service | None = None

    @cached_property
    def slow_links(self) -> SlowLinks | None:
        """Training apart beside training together, on links of any speed."""
        return slow_links(self.setting, self.together) if self.together else None

    @cached_property
    def sent(self) -> dict[str, int]:
        """Bytes per step by axis that leave the rank that sends most."""
        return self.service.sent() if self.service else volume.sent(self.setting)

    @property
    def layout(self) -> Layout:
        """The layout of the whole run."""
        s = self.setting
        return replace(s.layout, dp_replicate=s.layout.dp_replicate * s.replica_groups.count)

    @property
    def ranks(self) -> int:
        """Number of ranks, servers included."""
        return self.service.ranks if self.service else self.layout.ranks

    def place(self, number: int) -> str:
        """The ranks that `memory[number]` is of."""
        return ("a worker", "a server")[number] if self.service else f"the ranks of stage {number}"

    @cached_property
    def peak_bytes(self) -> int:
        return round(max(m.total for m in self.memory))

    @property
    def limit(self) -> int:
        """Bytes that may be allocated on a device."""
        return limit(self.setting.cluster)

    @property
    def memory_error(self) -> float | None:
        """Mean error of the memory formula on such devices, as measured; None: nobody has measured such a run."""
        if self.setting.cluster.on_cpu:
            return memory.ERROR
        found = evidence(self.setting, "memory")
        return found and found.mean

    @property
    def fits(self) -> bool:
        return self.peak_bytes <= self.limit and offload.fits(self.setting, self.memory)

    @property
    def tokens(self) -> int:
        """Tokens per step, over all ranks."""
        s = self.setting
        return (s.sequences or s.microbatches * s.sizes.B * self.layout.dp) * s.model.seq_len

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.step.seconds

    @property
    def model_flops_per_gpu(self) -> float:
        """Model FLOP/s per device."""
        model, own = self.setting.model, self.setting.software.documents
        return (
            flops_per_token(model, partial(own.pairs, model) if own else None)
            * self.tokens_per_s
            / self.ranks
        )

    @property
    def mfu(self) -> float:
        s = self.setting
        return self.model_flops_per_gpu / s.cluster.device.peak[s.rate]

    @cached_property
    def executed(self) -> float:
        """FLOPs that are executed per FLOP of the model: with those that backward repeats, and those of estimates."""
        return (1 + recomputed(self.setting)) * (1 + self.setting.software.estimates)

    @property
    def hfu(self) -> float:
        """MFU of the FLOPs that are executed (hardware FLOPs utilisation: PaLM, arXiv 2204.02311, appendix B)."""
        return self.mfu * self.executed

    @property
    def attention(self) -> str:
        """What attention is priced by, in a sentence; nothing if each sequence is one document."""
        s, own = self.setting, self.setting.software.documents
        return own.line(s.model, s.layout, s.sizes.seen) if own else ""

    def as_json(self) -> dict[str, Any]:
        """The object that `fivefold plan --json` prints."""
        s, step, own = self.setting, self.step, self.setting.software.documents
        replica_groups = {"replica_groups": self.slow_links.as_json()} if self.slow_links else {}
        return {
            "layout": to_text(self.layout),
            "cluster": f"{s.cluster.name}:{self.ranks}",
            "microbatch_size": s.sizes.B,
            "microbatches": s.microbatches,
            "precision": s.mode,
            **({"attention": own.as_json(s.model, s.sizes.seen)} if own else {}),
            **({"expert_load": s.software.expert_load} if s.card.has_experts else {}),
            "fits": self.fits,
            "recompute": s.recompute,
            "ranks": self.ranks,
            "memory": {
                "source": "formula",
                "error": self.memory_error,
                "peak_bytes": self.peak_bytes,
                "limit_bytes": self.limit,
                "margin": s.cluster.device.margin,
                "per_stage": [m.as_json() for m in self.memory],
            },
            "time": {
                "step_s": step.seconds,
                "compute_s": step.compute,
                "exposed_comm_s": sum(step.exposed.values()),
                "bubble_s": step.bubble,
            }
            | ({"stalls": self.stalls.as_json()} if self.stalls else {}),
            "mfu": self.mfu,
            "hfu": self.hfu,
            "tokens_per_s": self.tokens_per_s,
            "tokens_per_s_per_gpu": self.tokens_per_s / self.ranks,
            "model_tflops_per_gpu": self.model_flops_per_gpu / 1e12,
            "communication": {"bytes_per_rank": self.sent},
        } | replica_groups


def limit(cluster: Cluster, margin: bool = True) -> int:
    """Bytes of a device that tensors may use. margin: False: also those that are left free for the formula's error."""
    device = cluster.device
    return int((device.memory - device.reserve) / (1 + FRAGMENTS) * (1 - device.margin * margin))


def predict(
    recipe: Recipe,
    cluster: Cluster,
    software: Software | None = None,
    known: dict[object, Parts] | None = None,
) -> Plan:
    """Predicts a recipe with its layout. software: this program on the cluster's devices if None. known: costs of
    operations by what they depend on, to share between recipes that differ in sizes and layout only. Raises UserError:
    the layout does not fill the cluster; the vocabulary is unknown; the device lacks the dtype."""
    layout = Layout.from_recipe(recipe.layout)
    if recipe.servers.count:
        both = layout.ranks + recipe.servers.count
        if cluster.devices and both != cluster.devices:
            raise UserError(
                f"{layout.ranks} workers and sync.servers = {recipe.servers.count} are {both} ranks, but there are "
                f"{cluster.devices}. Nearest valid: dp={max(1, cluster.devices - recipe.servers.count)}"
            )
    elif cluster.devices:
        validate(layout, cluster.devices, partial(allows, recipe))
    full, together = _together(recipe, cluster, software)
    if full.servers.count:
        served = servers.service(together, full.servers, full.precision.reduce)
        return Plan(together, servers.held(served), servers.step(served), service=served)
    s = apart(together, full.replica_groups)
    if (bytes := budget_of(s.layout.recompute)) is not None:
        s = recomputing(s, resolve_budget(s, bytes))
    together = replace(together, layout=replace(together.layout, recompute=s.layout.recompute))
    shared = None
    if known is not None:
        key = s.sizes, s.layout.ranks
        shared = known.get(key) or parts(s)
        known[key] = shared
    plan = price(s, shared)
    wait = stalls(full, plan.setting, plan.step.seconds)
    return replace(plan, stalls=wait, together=together if full.replica_groups.count > 1 else None)


def _together(recipe: Recipe, cluster: Cluster, software: Software | None) -> tuple[Recipe, Setting]:
    """(the resolved recipe, its setting, as if all replica groups trained together)."""
    full, layout = resolved(recipe), Layout.from_recipe(recipe.layout)
    B, batch = full.train.microbatch_size, full.train.global_batch_size
    assert B is not None
    count, mode = microbatches_per_step(full), mode_of(recipe.precision.mode, cluster)
    software = for_recipe(software or software_of(cluster), recipe)
    if mode not in software.states:
        raise UserError(
            f"precision.mode = {mode}: {software.name} is described in {', '.join(software.states)} only"
        )
    sequences = batch if batch < count * B * layout.dp else None
    return full, setting(full.model, layout, cluster, B, count, mode, software, sequences)


def apart(whole: Setting, replica_groups: ReplicaGroups) -> Setting:
    """The setting of one replica group, where several train apart."""
    if replica_groups.count == 1:
        return whole
    layout = replica_group_layout(whole.layout, replica_groups.count)
    return replace(whole, layout=layout, replica_groups=replica_groups)


def price(s: Setting, shared: Parts | None = None) -> Plan:
    """Predicts memory, time and bytes sent. shared: as in `time.stage_costs`."""
    s = sized(s)
    return Plan(s, held(s), step(s, shared=shared))


def sized(s: Setting) -> Setting:
    """The setting with a window of as many blocks as the planner chooses, where `layout.offload_window` is 0."""
    if s.layout.offload_window:
        return s
    least = replace(s, layout=replace(s.layout, offload_window=WINDOW))
    if offload.of(s).working == "device":
        return least
    room = limit(s.cluster) - max(one.total for one in held(least))
    return replace(s, layout=replace(s.layout, offload_window=offload.window(least, room)))


def planned_window(recipe: Recipe, cluster: Cluster, software: Software | None = None) -> int:
    """What `layout.offload_window = 0` comes to."""
    full, together = _together(recipe, cluster, software)
    return sized(apart(together, full.replica_groups)).layout.offload_window


def held(s: Setting, sums: memory.Sums | None = None) -> list[Memory]:
    """Memory per rank at each pipeline position. sums: of the layout's operations, if already known."""
    return offload.held(s, memory.predict(s, sums))


def budget(recipe: Recipe, cluster: Cluster, software: Software | None = None) -> Budget | None:
    """The resolved budget of `layout.recompute`, as `predict` takes it; None if the recipe has none. The cluster may
    have any number of devices. Raises UserError: it is too small."""
    bytes = budget_of(recipe.layout.recompute)
    if bytes is None:
        return None
    full, together = _together(recipe, cluster, software)
    return resolve_budget(apart(together, full.replica_groups), bytes)


def priced_here(gpu: str = "", measured: bool = True) -> tuple[Cluster, Software]:
    """This machine, to choose by: its GPUs, or its CPUs by their own table. If they are not known or not measured, the
    prices are those of another device, whose operations compare alike, and the cluster has no name."""
    table = load_table() if measured and not gpu else None
    with suppress(UserError):
        if table is not None or gpu:
            cluster = of_table(table) if table is not None else of_gpu(gpu)
            return cluster, software_of(cluster)
    return replace(parse(STAND_IN), name=""), FIVEFOLD if gpu else FIVEFOLD_CPU


def within(plan: Plan, most: int) -> Plan:
    """The plan with blocks that recompute no more than it takes to stay within so many bytes."""
    s = plan.setting
    if s.layout.recompute == "none":
        return plan
    return price(recomputing(s, resolve_budget(s, most, margin=0.0)))


def with_stalls(plan: Plan, recipe: Recipe) -> Plan:
    """A plan of a search with the stalls of its recipe's run."""
    return replace(plan, stalls=stalls(resolved(recipe), plan.setting, plan.step.seconds))


def resolved(recipe: Recipe) -> Recipe:
    """The recipe with every field filled in. Raises UserError: the vocabulary is not known yet."""
    size = expected_vocab_size(recipe)
    if size is None:
        raise UserError(
            "plan: the model's size depends on the vocabulary, which is not known yet; set model.vocab_size, such as "
            "--set model.vocab_size=32000"
        )
    return resolve(recipe, vocab_size=size)


def for_recipe(software: Software, recipe: Recipe) -> Software:
    """The software with a recipe's optimizer states and its dtype for sending gradients."""
    card, states = OPTIMIZERS[recipe.optim.name], dict[str, States]()
    every = recipe.optim.estimate_every or card.fields.get("estimate_every", 1)
    passes = (recipe.optim.estimator == LABELS) / every
    estimate = DTYPES[MASTER].bytes if passes else 0.0
    rounded = [state for state in card.states if state.dtype == MASTER]
    for name, plain in software.states.items():
        mode = PRECISIONS[name]
        kept = kept_in(card, mode, recipe.precision.rounding)
        if kept.uniform:
            moments = kept.bytes
        else:  # of the parameter that has fewest
            spec = card_of(recipe.model)
            sizes = [(n, shape, size) for n, shape in spec.parameters.items() if (size := math.prod(shape))]
            moments = min(kept.state_bytes(n, shape, spec.sections.get(n)) / size for n, shape, size in sizes)
        copies = 1 + (mode.gradient != MASTER) + len(rounded)  # of master, gradient below fp32, states
        copied = DTYPES[MASTER].bytes * copies if mode.rounds else 0.0
        reduce = DTYPES[sent(mode, recipe.precision.reduce)].bytes
        states[name] = replace(plain, reduce=reduce, moments=moments, copied=copied, estimate=estimate)
        if scaling(mode, recipe.precision.fp8_scaling) == ALONG:
            states[name] = replace(states[name], rounded=plain.working)
    narrow, by = recipe.precision.fp8_dispatch, recipe.precision.fp8_scaling
    skips = recipe.precision.fp8_skip_first, recipe.precision.fp8_skip_last
    software = replace(software, fp8_dispatch=narrow, fp8_scaling=by, fp8_skips=skips)
    clips = recipe.optim.qk_clip > 0
    return replace(software, states=states, optimizer=card.name, estimates=passes, qk_clip=clips)


def with_load(software: Software, model: ModelSection, load: float | None) -> Software:
    """The software with this load of the busiest expert rank relative to an even split (None: 1). Raises UserError: the
    load is out of range, or the model has no experts."""
    if load is None:
        return software
    if not card_of(model).has_experts:
        raise UserError(f"--expert-load: {model.arch} has no experts; leave the option out")
    most = resolve_model(model, vocab_size=1).experts or 1
    if not 1 <= load <= most:
        raise UserError(
            f"--expert-load {load:g}: must be from 1, the even share, to {most}, where one of {most} experts gets all "
            f"rows. Nearest valid: {most if load > most else 1}"
        )
    return replace(software, expert_load=load)
