"""Predicts the step time: the model's parts, data parallelism, and the pipeline, whose schedule the simulator runs. And
what a run costs besides its steps: stalls (writing checkpoints, reading data, the slowest device). For replica groups
that train apart, the link speed from which on that is faster than summing gradients in every step."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from fivefold.host.devices import GB
from fivefold.models.card import card_of
from fivefold.models.operations import Matmul
from fivefold.models.section import ModelSection
from fivefold.optim import OPTIMIZERS, kept_in, rounding_traffic, update_traffic
from fivefold.optim.card import planned_ways
from fivefold.precision import PRECISIONS, token_bytes
from fivefold.recipe import Recipe, count_parameters
from fivefold.schedules.compression import NONE
from fivefold.sharding.parts import Shape, held, local_shape, stages_of
from fivefold_plan.cluster.devices import Link
from fivefold_plan.memory import model_states
from fivefold_plan.memory.model_states import Elements
from fivefold_plan.messages import volume
from fivefold_plan.setting import Setting
from fivefold_plan.time import offload, stage_costs
from fivefold_plan.time.cost import Cost, products, slowest, stream
from fivefold_plan.time.stage_costs import Parts


@dataclass
class Step:
    """Seconds of one optimizer step.

    compute: seconds that the busiest rank computes, with the optimizer. exposed: exposed communication by axis. bubble:
    the rest, in which it waits for other stages. terms: (name, seconds) of each part. costs: of each pipeline stage
    for one microbatch.
    """

    seconds: float
    compute: float
    exposed: dict[str, float]
    bubble: float
    terms: list[tuple[str, float]] = field(default_factory=list)
    costs: Sequence[Cost] = ()


def optimizer(s: Setting, own: Elements) -> float:
    """Seconds of the norm, the update, refreshing the weights and checking them, and of what all ranks agree on."""
    return update(s, own) + stage_costs.message_seconds(volume.control(s), s)


def on_device(s: Setting, own: Elements, position: int) -> float:
    """Seconds of the update on the device of a pipeline rank. If the host updates, only what all ranks agree on; on a
    CPU both are the same cores."""
    if offload.of(s).streams and not s.cluster.on_cpu:
        return stage_costs.message_seconds(volume.control(s), s)
    return optimizer(s, own) + whole_matrices(s, position)


def update(s: Setting, own: Elements) -> float:
    """Seconds of the norm, the update, refreshing the weights, checking and rounding them. The first three read and
    write all bytes of the states."""
    b = s.states
    kept = own.keeps - own.frozen[1]
    moved = update_traffic(b.gradient, b.master or b.working, b.moments, b.working)
    size = kept * (moved + rounding_traffic(b.copied))
    size *= s.software.optimizer_passes * OPTIMIZERS[s.software.optimizer].reads
    if s.software.qk_clip and b.master and not (s.layout.zero or s.cluster.on_cpu):
        size += own.keeps * (b.master + b.working)  # refreshed again, whether or not a head was clipped
    size += kept * s.software.check_traffic(s.cluster.on_cpu or not (s.layout.zero or b.copied))
    again = not (PRECISIONS[s.mode].weight or s.software.delayed)  # along the other dim
    more = (bool(each) and again for each in (s.kept_rounded, s.states.rounded))
    elements = zip(model_states.rounded_once(s, own), more, strict=True)
    narrow = s.rounding_traffic * sum(some * (1 + two) for some, two in elements)
    seconds = stream(size, s.cluster.device, "optimizer", s.dtype)
    return s.cluster.oversubscription * (seconds + stream(narrow, s.cluster.device, "copy", s.dtype))


def whole_matrices(s: Setting, position: int) -> float:
    """Seconds of an update's matmuls on whole matrices, and of bringing their pieces together and back."""
    card, rank, seconds = OPTIMIZERS[s.software.optimizer], s.layout.rank({"pp": position}), 0.0
    table = held(s.card, s.layout, rank) if card.needs == "matrices" else {}
    pieces, shapes = planned_ways(card, s.card, s.layout, rank), Counter[Shape]()
    for name, part in table.items():
        ranges = pieces[name].whole if name in pieces else part.keeps
        if ranges is not None and card.of(name, part.shape) is card:
            shapes.update(card.matrices(name, local_shape(ranges), part.sections).values())
    for shape, count in shapes.items():
        if len(shape) > 1 and (flops := card.flops(shape)):
            *_, r, c = shape
            one = Matmul(min(r, c), min(r, c), max(r, c), weight=False)
            takes, *_ = products(one, s.cluster.device, s.rate, s.sizes.e)
            seconds += count * flops / (2 * one.m * one.n * one.k) * takes
    return s.cluster.oversubscription * seconds + stage_costs.message_seconds(volume.matrices(s, rank), s)


def step(s: Setting, shared: Parts | None = None) -> Step:
    """The time of an optimizer step. shared: as in `stage_costs`."""
    costs = stage_costs.stage_costs(s, shared)
    makespan, ends, busy = stage_costs.pipeline(s, costs)
    p, m = s.layout.pp, s.microbatches
    extra, waits = 0.0, [0.0] * p
    slower = slowest(s.layout.ranks, s.cluster.device.spread)
    ranks, same, known = model_states.rank_elements(s), model_states.alike(s), {}
    reduced = gathered = updated = moved = 0.0
    for position in range(p):
        mine = [costs[stage] for stage in stages_of(s.layout, position)]
        key = same[position], tuple(mine)
        if key not in known:
            known[key] = _behind(s, ranks[position], mine, position)
        r, g, u, away = known[key]
        hidden = stage_costs.hidden_by_pairs(s, costs, position) if p > 1 else 0.0
        waits[position] = m * (sum(c.sent for c in mine) / s.layout.copies - hidden)
        late = ends[position] + r + g + u + away - makespan
        if late > extra:
            extra, reduced, gathered, updated, moved = late, r, g, u, away
    sums = (stage_costs.shared_sums(s, position) for position in dict.fromkeys(same))
    tensor_sums, tied_sums = max(sums, key=sum)
    worst = max(range(p), key=lambda position: busy[position])
    encoding = (
        max(stage_costs.compressed_sums(s, own)[2] for own in ranks) if s.layout.compress != NONE else 0.0
    )
    besides, again = fixed(s), s.software.estimates
    curvature = again * (makespan + max(0.0, extra - updated - moved) + tensor_sums + tied_sums)
    inner = makespan + max(0.0, extra) + tensor_sums + tied_sums + besides + curvature
    apart = stage_costs.outer_seconds(s, inner) / s.replica_groups.every
    seconds = inner + apart
    data = max(0.0, min(extra, reduced + gathered)) + tied_sums
    exposed = {"model": (waits[worst] + tensor_sums) * (1 + again), "data": data * (1 + again)}
    exposed |= {"replica_groups": apart} if apart else {}
    if not offload.of(s).stays:
        exposed[offload.EXPOSED] = moved
    compute = (busy[worst] - waits[worst]) * (1 + again) + updated + besides
    bubble = seconds - compute - sum(exposed.values())
    terms = [(f"stage {i} forward", c.forward) for i, c in enumerate(costs)]
    terms += [(f"stage {i} backward", c.input + c.weight) for i, c in enumerate(costs)]
    terms += [
        ("slowest device, part of the next", makespan * (1 - 1 / slower)),
        ("pipeline, first start to last end", makespan),
        ("exposed gradient sums", reduced),
        ("exposed weight gathers", gathered),
        *([("encoding of gradients, part of their sums", encoding)] if s.layout.compress != NONE else []),
        ("optimizer", updated),
        *([("offload: exposed I/O", moved)] if moved else []),
        ("gradient sums over the tensor axis", tensor_sums),
        ("sum of tied embeddings", tied_sums),
        *([("estimates of the curvature, mean", curvature)] if again else []),
        ("fixed per step", besides),
        *([("outer steps of replica groups, mean", apart)] if apart else []),
    ]
    return Step(seconds, compute, exposed, max(0.0, bubble), terms, costs)


def _behind(
    s: Setting, own: Elements, mine: Sequence[Cost], position: int
) -> tuple[float, float, float, float]:
    """Seconds that gradient sums, weight gathers, the update and I/O add to a rank's step. mine: the costs of its
    stages."""
    backward, forward = sum(c.input + c.weight for c in mine), sum(c.forward for c in mine)
    outside = model_states.outside_blocks(s, position)
    forward -= stage_costs.per_microbatch(outside, Cost(), s).sent_forward
    r, g = stage_costs.per_step(s, own, backward, forward)
    u, away = on_device(s, own, position), 0.0
    if not offload.of(s).stays:
        away = offload.seconds(s, forward, backward, u, own) - (s.microbatches * (forward + backward) + u)
    return r, g, u, away


def fixed(s: Setting) -> float:
    """Fixed seconds per step: Python between its parts."""
    machine, layout = s.cluster.machine, s.layout
    if machine is None:
        return s.software.step
    per_block = machine.overhead("block step")
    if layout.shards > 1:
        per_block += machine.overhead(f"zero{layout.zero} step")
    return s.cluster.oversubscription * (machine.overhead("step") + per_block * s.model.blocks / layout.pp)


@dataclass(frozen=True)
class Stalls:
    """Stalls of a run.

    checkpoint: bytes of one checkpoint, which all nodes write at once. writing: seconds on their disks. copied: seconds
    for a copy in host memory, if it is written beside the steps that follow; else those of writing. step: seconds of a
    step. every: steps between checkpoints, also if they are due by time; 0: one at the end. reading: seconds to read a
    step's tokens, overlapped with the step before. waiting: the exposed part of it. slowest: time of the slowest device
    over the mean.
    """

    checkpoint: int
    writing: float
    copied: float
    step: float
    every: int
    reading: float
    waiting: float
    slowest: float

    @property
    def saving(self) -> float:
        """Seconds that the run waits for a checkpoint."""
        return self.saved(self.every) if self.every else self.writing

    def saved(self, every: float) -> float:
        """`saving` with a checkpoint every so many steps: one is written before the next begins."""
        return max(self.copied, self.writing - every * self.step)

    @property
    def per_step(self) -> float:
        """Average seconds that stalls add per step."""
        return self.waiting + (self.saving / self.every if self.every else 0.0)

    def as_json(self) -> dict[str, Any]:
        return {
            "checkpoint_bytes": self.checkpoint,
            "checkpoint_s": self.saving,
            "checkpoint_writing_s": self.writing,
            "checkpoint_every": self.every,
            "data_wait_s": self.waiting,
            "a_step_s": self.per_step,
        }

    def lines(self) -> list[str]:
        """The lines of `--explain`."""
        often = f"every {self.every:,} steps" if self.every else "at the end"
        return [
            "stalls",
            f"  {'checkpoint, GB':38}{self.checkpoint / GB:10.4f}  {often}",
            f"  {'waiting for a checkpoint, s':38}{self.saving:10.4f}  written in {self.writing:.4g} s",
            f"  {'reading the tokens of a step, s':38}{self.reading:10.4f}  exposed: {self.waiting:.4f}",
            f"  {'average per step, s':38}{self.per_step:10.4f}",
            f"  {'slowest device over the mean':38}{self.slowest:10.4f}",
        ]


def stalls(recipe: Recipe, s: Setting, step: float) -> Stalls:
    """The stalls of a resolved recipe whose steps take `step` seconds."""
    nodes, section, steps = max(1, s.cluster.nodes), recipe.checkpoint, recipe.train.steps
    by_time = math.ceil(60 * section.minutes / step) if section.minutes and step else 0
    states = _state_bytes(recipe.optim.name, s.mode, recipe.precision.rounding, recipe.model)
    size = round((s.states.master or s.states.working) * count_parameters(recipe.model) + states)
    tokens = recipe.train.global_batch_size * recipe.model.seq_len
    reading = tokens * token_bytes(recipe.model.vocab_size or 0) / nodes / s.cluster.storage.read
    every = min((n for n in (section.every, by_time) if 0 < n < (steps or n + 1)), default=0)
    writing = copied = size / nodes / s.cluster.storage.write
    if section.asynchronous and s.cluster.host_memory > size / nodes and not s.cluster.machine:
        copied = size / s.layout.ranks / s.cluster.host_link.write
    return Stalls(
        checkpoint=size,
        writing=writing,
        copied=copied,
        step=step,
        every=every,
        reading=reading,
        waiting=max(0.0, reading - step),
        slowest=slowest(s.layout.ranks, s.cluster.device.spread),
    )


@lru_cache(maxsize=1024)
def _state_bytes(optimizer: str, mode: str, rounding: str, model: ModelSection) -> float:
    kept = kept_in(OPTIMIZERS[optimizer], PRECISIONS[mode], rounding)
    card = card_of(model)
    return sum(kept.state_bytes(n, shape, card.sections.get(n)) for n, shape in card.parameters.items())


EVEN = 1.05
"""A step of this ratio counts as equally fast."""
SLOWEST, FASTEST = 1e5, 1e13  # bytes/s of the links that are tried


@dataclass(frozen=True)
class SlowLinks:
    """Training apart beside summing gradients in every step.

    outer: seconds of an outer step of every fragment. apart, together: seconds per inner step. even: bytes/s of the
    link between replica groups at which both are equally fast (`EVEN`); above, training apart saves no time. None: it
    is not faster at any speed, or always. link: bytes/s of the cluster's.
    """

    outer: float
    apart: float
    together: float
    even: float | None
    link: float | None

    def as_json(self) -> dict[str, Any]:
        return {
            "outer_step_s": self.outer,
            "step_s": self.apart,
            "step_s_if_all": self.together,
            "even_link_bytes_per_s": self.even,
            "link_bytes_per_s": self.link,
        }

    def line(self, replica_groups: int, every: int) -> str:
        ratio = self.together / self.apart
        text = f"{replica_groups}, an outer step of {self.outer:.3g} s every {every}; "
        text += f"summing in every step takes {ratio:.3g}x"
        if self.even is not None:
            speed = 8e-9 * self.even
            text += f". They win (over {EVEN:g}x) where links between them are slower than {speed:.3g} Gbit/s"
        return text


def slow_links(apart: Setting, together: Setting) -> SlowLinks:
    """together: the same run without replica groups."""
    across = apart.group("replica_groups").nodes > 1
    which = "inter" if across else "intra"
    link: Link = getattr(apart.cluster, which)

    def seconds(s: Setting, speed: float) -> float:
        wire = replace(getattr(s.cluster, which), bandwidth=speed, reduce=None)
        return step(replace(s, cluster=replace(s.cluster, **{which: wire}))).seconds

    outer, both = stage_costs.outer_seconds(apart), (step(apart).seconds, step(together).seconds)
    if apart.cluster.machine and not across:  # its table prices messages, whatever the link
        return SlowLinks(outer, *both, None, None)
    even = crossing(lambda speed: seconds(together, speed) / seconds(apart, speed))
    return SlowLinks(outer, *both, even, link.bandwidth)


def crossing(ratio: Callable[[float], float], tries: int = 24) -> float | None:
    """The speed at which a falling ratio reaches EVEN, by bisection; None if it does not."""
    low, high = math.log(SLOWEST), math.log(FASTEST)
    if not ratio(FASTEST) < EVEN < ratio(SLOWEST):
        return None
    for _ in range(tries):
        middle = (low + high) / 2
        low, high = (middle, high) if ratio(math.exp(middle)) > EVEN else (low, middle)
    return math.exp(high)
