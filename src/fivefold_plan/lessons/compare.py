"""Compares layouts of a recipe on a cluster by three criteria: redundant computing, peak memory, and what is sent when.

Memory, messages and prices are those of the planner. This file adds which share of the computing is redundant.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from typing import Any

from fivefold.errors import UserError
from fivefold.models.card import card_of
from fivefold.models.operations import Operation
from fivefold.models.recomputation import region
from fivefold.observe.format import memory_text
from fivefold.recipe import Recipe
from fivefold.recipe.resolve import in_layout
from fivefold.recipe.rules import contradictions, synchronous
from fivefold.sharding.layout import Layout, divisors, parse, to_text
from fivefold.sharding.layout_rules import problems
from fivefold.sharding.parts import block_of, cuts_in, sharing_group
from fivefold.sharding.units import syncs
from fivefold_plan.cluster.devices import Cluster
from fivefold_plan.lessons import overlap
from fivefold_plan.lessons.overlap import Rule
from fivefold_plan.memory import memory, model_states
from fivefold_plan.messages import volume
from fivefold_plan.messages.volume import Moment
from fivefold_plan.predict import Plan, predict
from fivefold_plan.setting import Setting
from fivefold_plan.time import stage_costs, time
from fivefold_plan.time.cost import Cost, forward_flops, operation

MICROBATCH = 1
"""Sequences of a microbatch, if the recipe leaves that open: the same for all layouts, so that they compare."""


@dataclass(frozen=True)
class Technique:
    """A form of parallelism. dimension: the one of the five that it divides. layout: it alone on so many ranks; `rest`
    more replicas divide the batch."""

    name: str
    dimension: str
    layout: Callable[[int, int], Layout]


def _data(zero: int) -> Callable[[int, int], Layout]:
    return lambda ranks, rest: Layout(dp_replicate=rest, dp_shard=ranks, zero=zero)


TECHNIQUES = (
    Technique("DDP", "data", lambda ranks, rest: Layout(dp_replicate=ranks * rest)),
    Technique("ZeRO-1", "data", _data(1)),
    Technique("ZeRO-2", "data", _data(2)),
    Technique("ZeRO-3", "data", _data(3)),
    Technique("TP", "tensor", lambda ranks, rest: Layout(tp=ranks, dp_replicate=rest)),
    Technique("TP + SP", "tensor", lambda ranks, rest: Layout(tp=ranks, sp=True, dp_replicate=rest)),
    Technique("CP", "context", lambda ranks, rest: Layout(cp=ranks, dp_replicate=rest)),
    Technique("PP", "pipeline", lambda ranks, rest: Layout(pp=ranks, dp_replicate=rest)),
    Technique("EP", "expert", lambda ranks, rest: Layout(ep=ranks, dp_replicate=ranks * rest)),
)
DIMENSION_OF = {"dp": "data", "tp": "tensor", "cp": "context", "pp": "pipeline", "ep": "expert"}


@dataclass(frozen=True)
class Redundant:
    """Computing of all ranks in a step that one process would not do, in seconds per rank, by its reason.

    useful: what one process would compute, spread over the ranks. operations: of activations that several ranks have
    whole (norms, residual sums and router without sequence parallelism, the order of rows between experts). recompute:
    forward again. sums: gradients of a microbatch that several ranks add up (context parallelism; tp with sp, of
    experts). update: of states that several ranks keep.
    """

    useful: float
    operations: float = 0.0
    recompute: float = 0.0
    sums: float = 0.0
    update: float = 0.0

    @property
    def parts(self) -> dict[str, float]:
        """Each reason as a share of what one process computes."""
        names = [field.name for field in fields(self)][1:]
        return {name: getattr(self, name) / self.useful for name in names}

    @property
    def share(self) -> float:
        """All of it as a share of what one process computes: 0.31 with full recomputation, for instance."""
        return sum(self.parts.values())

    def as_json(self) -> dict[str, Any]:
        return {"share": self.share, **self.parts, "seconds": asdict(self)}


@dataclass(frozen=True)
class Row:
    """One layout. asked: the layout that was asked for. why: why it is not possible; then `plan` is of the nearest one
    with the same technique, or None. measured: its figures on this machine, or why there are none."""

    technique: str
    dimension: str
    asked: Layout
    plan: Plan | None
    why: str = ""
    measured: dict[str, Any] | str | None = None

    @property
    def layout(self) -> str:
        return to_text(self.plan.layout if self.plan else self.asked)

    @property
    def short(self) -> str:
        """The layout without its mode of recomputation."""
        return to_text(replace(self.plan.layout if self.plan else self.asked, recompute="none"))

    def sent(self, as_counted: bool = False) -> dict[str, int]:
        """Bytes per step by axis that leave the rank that sends most. as_counted: groups with the same ranks are
        merged, as a measurement does."""
        return volume.sent(self._plan.setting, as_counted=True) if as_counted else self._plan.sent

    @cached_property
    def redundant(self) -> Redundant:
        return redundant(self._plan.setting)

    @cached_property
    def moments(self) -> list[Moment]:
        return moments(self._plan.setting)

    @cached_property
    def rules(self) -> list[Rule]:
        """When its messages hide: those of its dimension, or of all axes if it has several."""
        rules = overlap.rules(self._plan.setting)
        return [rule for rule in rules if self.dimension in ("", DIMENSION_OF[rule.axis])]

    @cached_property
    def idle(self) -> float:
        """Share of a step in which a rank waits for other stages, on average over the ranks of a pipeline. Stages that
        compute less than the busiest one wait longer."""
        s, step = self._plan.setting, self._plan.step
        if s.layout.pp == 1:
            return 0.0
        _, _, busy = stage_costs.pipeline(s, stage_costs.stage_costs(s))
        return (step.bubble + max(busy) - sum(busy) / len(busy)) / step.seconds

    @property
    def undivided(self) -> tuple[float, list[str]]:
        """(share of the parameters that its tensor parallelism divides only without sp, the modules they belong to)."""
        card, layout = card_of(self._plan.setting.model), self._plan.layout
        if layout.tp == 1 or not layout.sp:
            return 0.0, []
        names = [name for name, cut in card.cuts.items() if cuts_in(cut, True) != cuts_in(cut, False)]
        within = (name.removeprefix(f"{card.stack}.{block_of(card, name)}.") for name in names)
        modules = dict.fromkeys(name.removesuffix(".weight").rpartition(".")[0] for name in within)
        return sum(math.prod(card.parameters[name]) for name in names) / card.count, [*modules]

    @property
    def exposed(self) -> float:
        """Share of the step in which a rank waits for messages."""
        return sum(self._plan.step.exposed.values()) / self._plan.step.seconds

    @property
    def _plan(self) -> Plan:
        assert self.plan is not None
        return self.plan

    def words(self) -> dict[str, str]:
        """The criteria of a row with a plan, in words."""
        return {
            "redundant": f"{self.redundant.share:.1%}",
            "memory": memory_text(self._plan.peak_bytes),
            "fits": "yes" if self._plan.fits else "no",
            "exposed": f"{self.exposed:.1%}",
            "idle": f"{self.idle:.1%}",
            "step": f"{self._plan.step.seconds:.4g}",
            "mfu": f"{self._plan.mfu:.1%}",
        }

    def as_json(self, overlap: bool = False) -> dict[str, Any]:
        figures = {
            "technique": self.technique,
            "dimension": self.dimension,
            "asked": to_text(self.asked),
            "why": self.why,
            "layout": self.layout if self.plan else None,
        }
        if self.plan is None:
            return figures
        s = self.plan.setting
        once, each = data_units(s.layout)
        return figures | {
            "redundant": self.redundant.as_json(),
            "idle": self.idle,
            "exposed": self.exposed,
            "psi": once + each * s.microbatches if s.layout.dp * s.layout.cp > 1 else 0.0,
            "live_microbatches": memory.live_microbatches(s.layout, s.microbatches),
            "messages": [moment._asdict() for moment in self.moments],
            "plan": self.plan.as_json(),
            **({"overlap": [rule.as_json() for rule in self.rules]} if overlap else {}),
            **({"measured": self.measured, "sent_as_counted": self.sent(True)} if self.measured else {}),
        }


def compare(recipe: Recipe, cluster: Cluster, ranks: int, layouts: Sequence[str] = ()) -> list[Row]:
    """A row for each layout, or for one process and each technique on so many ranks. Raises UserError: a layout cannot
    be read, or the recipe cannot be predicted at all."""
    recipe, rows = alike(recipe), []
    for text in layouts:
        values: dict[str, Any] = parse(text)
        layout = Layout(**values)
        rows.append(Row(*named(layout), layout, *_tried(recipe, cluster, layout)))
    if layouts:
        return rows
    alone = Layout(recompute=recipe.layout.recompute)
    plan = predict(in_layout(recipe, alone), replace(cluster, devices=0))
    return [Row("one device", "", alone, plan), *(_row(recipe, cluster, each, ranks) for each in TECHNIQUES)]


def alike(recipe: Recipe) -> Recipe:
    """The recipe with what all layouts have in common: one size of microbatches, and synchronous steps."""
    train = recipe.train.model_copy(update={"microbatch_size": recipe.train.microbatch_size or MICROBATCH})
    layout = recipe.layout.model_copy(update={"microbatches": None})
    return synchronous(recipe.model_copy(update={"train": train, "layout": layout}))


def named(layout: Layout) -> tuple[str, str]:
    """(names of the techniques in a layout, the dimension if it is one)."""
    replicas = layout.dp > 1 and layout.ep == 1  # else they are the ranks of the experts
    names = {
        "dp": f"ZeRO-{layout.zero}" if layout.zero else "DDP" * replicas,
        "tp": ("TP + SP" if layout.sp else "TP") * (layout.tp > 1),
        **{axis: axis.upper() * (getattr(layout, axis) > 1) for axis in ("cp", "pp", "ep")},
    }
    axes = [axis for axis, name in names.items() if name]
    dimension = DIMENSION_OF[axes[0]] if len(axes) == 1 else ""
    return " + ".join(names[axis] for axis in axes) or "one device", dimension


def _row(recipe: Recipe, cluster: Cluster, technique: Technique, ranks: int) -> Row:
    """The technique on so many ranks. If they do not divide the model, on the most that do, with replicas."""
    sizes, plan, why = sorted(divisors(ranks), reverse=True), None, ""
    layouts = [technique.layout(size, ranks // size) for size in sizes]
    layouts = [replace(layout, recompute=recipe.layout.recompute) for layout in layouts]
    for layout in layouts[: max(1, len(layouts) - 1)]:  # on one rank nothing is left of the technique
        plan, refused = _tried(recipe, cluster, layout)
        if plan is not None:
            break
        why = why or refused
    return Row(technique.name, technique.dimension, layouts[0], plan, why)


def _tried(recipe: Recipe, cluster: Cluster, layout: Layout) -> tuple[Plan | None, str]:
    """The prediction of a layout, or None and why it is not possible: in one line, without the proposals."""
    if layout.ep > 1 and not card_of(recipe.model).has_experts:
        return None, "the model has no experts"
    try:
        if broken := [*problems(layout)] or [*contradictions(in_layout(recipe, layout))]:
            raise UserError(broken[0][1])
        return predict(in_layout(recipe, layout), cluster), ""
    except UserError as error:
        return None, str(error).removeprefix("recipe: ").split(". Nearest valid")[0]


def redundant(s: Setting) -> Redundant:
    """What ranks compute more than once, or more than one process would.

    An operation's work is its FLOPs, or without any the bytes that it moves. The tp x cp ranks of a microbatch do
    together tp x cp times the work of one; one process does that of a model that nothing divides. The rest is
    redundant. It is priced at the rank's own rates, so small matmuls count as slow and not as redundant. Waiting is no
    computing: the idle time of a pipeline and exposed messages are not in it. Experts are taken as evenly loaded. Of
    each sum and update, too, the elements are compared with those of one process.
    """
    seconds: dict[str, float] = defaultdict(float)
    even = replace(s, sizes=replace(s.sizes, load=1.0))
    undivided = replace(even.sizes, tp=1, cp=1, ep=1, sp=False, sp_regather=False, chunks=1)
    here, alone, shared = even.work, s.card.work(undivided, s.software), stage_costs.parts(even)
    for (second, mode), count in Counter(zip(s.card.second, s.recompute, strict=True)).items():
        priced = list(zip(*shared.operations[kind := s.kind(second, mode)], strict=True))
        _operations(seconds, even, priced, alone.block[kind], mode, count)
    for ops, whole in ((here.begin, alone.begin), (here.end, alone.end)):
        _operations(seconds, even, [(op, operation(op, even)) for op in ops], whole, "none", 1)
    # a rank adds a microbatch's gradients to their sums, by block and at the model's end
    summed, whole = (
        [*(block.computes for block in blocks), behind.computes + tied.computes]
        for blocks, _, behind, tied in (model_states.elements(s.model, x) for x in (s.layout, Layout()))
    )
    adding = sum(stage_costs.accumulate(elements, s).weight for elements in summed)
    useful = min(1.0, sum(whole) / (s.layout.tp * s.layout.cp * sum(summed)))
    seconds["useful"] += useful * adding
    seconds["sums"] += (1 - useful) * adding
    # so far of the tp x cp ranks of a microbatch; from here on average over all ranks
    microbatches = s.sequences / s.sizes.B if s.sequences else s.microbatches * s.layout.dp
    each = microbatches * s.layout.tp * s.layout.cp / s.layout.ranks
    seconds = {name: each * value for name, value in seconds.items()}
    ranks = model_states.rank_elements(s)
    kept = [part.keeps if s.layout.zero else part.computes for part in ranks]
    copies = max(1.0, sum(kept) * s.layout.ranks / s.layout.pp / s.card.count)  # that update a parameter
    matrices = time.whole_matrices(replace(s, layout=Layout()), 0)  # those of the whole model, once
    update = sum(time.update(s, part) for part in ranks) / s.layout.pp + copies * matrices / s.layout.ranks
    seconds["useful"] += update / copies
    return Redundant(**seconds, update=update - update / copies)


def _operations(
    total: dict[str, float],
    s: Setting,
    priced: Sequence[tuple[Operation, Cost]],
    alone: Sequence[Operation],
    mode: str,
    count: int,
) -> None:
    """Adds the seconds of `count` times these operations on one rank. alone: those of one process."""
    again = region(mode, s.software)
    needed, done = _work_by_name(alone), _work_by_name([op for op, _ in priced])
    ranks, late = s.layout.tp * s.layout.cp, stage_costs.saves_late(s.layout)
    for op, cost in priced:
        forward, backward = cost.alone
        seconds = count * (forward + backward)
        useful = min(1.0, needed[op.name] / (ranks * done[op.name])) if done[op.name] else 0.0
        total["useful"] += useful * seconds
        total["operations"] += (1 - useful) * seconds
        total["recompute"] += count * again.repeated(op, late) * forward


def _work_by_name(ops: Sequence[Operation]) -> dict[str, float]:
    """FLOPs of the operations of each name in forward; without any, the bytes that they move in both directions."""
    work: dict[str, float] = defaultdict(float)
    for op in ops:
        work[op.name] += forward_flops(op) or op.forward + op.backward
    return work


def moments(s: Setting) -> list[Moment]:
    """When the first rank of a pipeline's first stage sends what. Equal messages at equal moments are counted together;
    what it receives, and the few numbers on which all ranks agree, are left out."""
    times = Counter[Moment]()
    for moment in volume.moments(s):
        if moment.what != "receive" and moment.axis != "all":
            times[moment._replace(times=0)] += moment.times
    return [moment._replace(times=count) for moment, count in times.items()]


def words(moment: Moment) -> str:
    """`2 all_reduce over tp`."""
    return f"{moment.calls} {moment.what} over {'dp' if moment.axis in volume.DATA else moment.axis}"


def data_units(layout: Layout) -> tuple[float, float]:
    """What data parallelism sends per parameter, in numbers of 16 bits: (once per step, per microbatch), without the
    factor (n - 1) / n (arXiv 1910.02054, section 7). With ZeRO++ it is what a node sends to others, without the scales
    of quantised blocks."""
    across = layout.zeropp != Layout().zeropp
    once = each = 0.0
    for sync in syncs(layout):
        if across and sync.group != "across":
            continue
        part = 1.0 if across else sync.part  # every rank of a node sends its part
        part /= sharing_group(layout)[1] if sync.rows else 1
        size = part * (2 if sync.what == "sum" else 1) * (sync.blocks.bits / 16 if sync.blocks else 1)
        once, each = once + size * (not sync.each), each + size * sync.each
    return once, each
