"""From which size on messages hide behind computing: a rule for each technique, with the planner's prices.

The planner prices both the messages and the computing that may run beside them. Their ratio falls as a size grows, so
from a threshold on the messages hide. docs/compare.md has the formulas that papers give for these thresholds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from fivefold.models.operations import Operation
from fivefold.sharding.parts import stages_of
from fivefold.sharding.units import scattered_once
from fivefold_plan.memory import model_states
from fivefold_plan.setting import Setting
from fivefold_plan.time import cost, stage_costs, time
from fivefold_plan.time.cost import Cost

FACTORS = tuple(2.0**k for k in range(-4, 5))
"""Sizes beside the recipe's own for which the planner is asked, too."""
Ratio = Callable[[Setting], float]
Resized = Callable[[Setting, float], Setting | None]
IDLE = 0.1
"""Share of a step that a pipeline may be idle by its rule."""


@dataclass(frozen=True)
class Rule:
    """The rule of one technique for a setting.

    what: what is sent, and what hides it. variable: the size that decides. now: its value. planned: seconds of messages
    over seconds of computing. limit: the ratio at the threshold. overlaps: True if this program runs the messages
    beside the computing; otherwise it waits for them. points: (size, ratio), ascending.
    """

    technique: str
    axis: str
    what: str
    variable: str
    now: float
    planned: float
    limit: float
    overlaps: bool
    points: tuple[tuple[float, float], ...]

    @property
    def hides(self) -> bool:
        """True if the size is large enough, whether or not this program overlaps."""
        return self.planned <= self.limit

    @property
    def needed(self) -> float:
        """The size at which the ratio reaches the limit, on a line between the points; 0 if all of them are below it,
        infinite if the largest is still above."""
        if not self.points or self.points[-1][1] > self.limit:
            return math.inf
        for (x, above), (y, below) in pairwise(self.points):
            if above > self.limit >= below:
                part = math.log(above / self.limit) / math.log(above / below) if below else 1.0
                return x * (y / x) ** part
        return 0.0

    @property
    def threshold(self) -> str:
        """The size that is needed, or the end of the sizes that were tried."""
        sizes = [size for size, _ in self.points]
        if not self.needed:
            return f"< {count_text(sizes[0])}"
        return count_text(self.needed) if math.isfinite(self.needed) else f"> {count_text(sizes[-1])}"

    @property
    def verdict(self) -> str:
        if not self.hides:
            return "sticks out"
        return "hides" if self.overlaps else "could hide, but the program waits"

    def as_json(self) -> dict[str, Any]:
        needed = self.needed if math.isfinite(self.needed) else None
        return vars(self) | {"hides": self.hides, "needed": needed}


def count_text(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def rules(s: Setting) -> list[Rule]:
    """The rules for the axes that a layout has."""
    x, program, ring = s.layout, s.software, s.layout.cp_method == "ring"
    data = f"ZeRO-{x.zero}" if x.shards > 1 else "DDP" if x.dp > 1 else "gradients of CP"
    gradients = "gradients behind backward" + ", weights behind forward" * (x.shards > 1)
    in_backward = program.overlap_data and (program.overlap_scatter or not x.zero)
    # keys that are gathered, and one of Ulysses' all-to-alls, come before attention: only other heads could hide them
    sent = {
        "ring": "keys and values behind the attention of a turn",
        "ulysses": "heads on their way behind the attention of others",
        "all_gather": "keys and values on their way behind the attention of other heads",
    }
    beside, rows = _beside(s), "rows on their way behind the experts' matmuls"
    # technique, axis, what is sent, what decides, whether it overlaps; seconds of messages over those of computing, the
    # value of what decides, the setting with it times a factor (None if that is not possible), the ratio's limit
    table: list[tuple[str, str, str, str, bool, Ratio, Ratio, Resized, float]] = [
        (data, "dp", gradients, "tokens per device and microbatch", in_backward,
         _data, lambda s: s.sizes.N, _more_tokens, 1.0),
        ("TP + SP" if x.sp else "TP", "tp", "sums of activations behind a block's forward", "width of the model",
         x.tp_chunks > 1,
         _tensor, lambda s: s.model.dim, _wider, 1.0),
        ("CP", "cp", sent[x.cp_method], "tokens of a sequence", ring,
         _context, lambda s: s.model.seq_len, _longer, 1.0),
        ("EP", "ep", "rows on their way to experts behind the shared one" if beside else rows,
         "width of an expert", x.expert_chunks > 1 or beside,
         _experts, lambda s: s.card.expert_features()[1], _wider_experts, 1.0),
        ("PP", "pp", f"idle time of at most {IDLE:.0%} of the step", "microbatches per step", True,
         _bubble, lambda s: s.microbatches, _more_microbatches, IDLE / (1 - IDLE)),
        ("PP", "pp", "an activation's transfer behind a stage's forward", "blocks per stage", program.overlap_pipeline,
         _transfer, _per_stage, _deeper, 1.0),
    ]  # fmt: skip
    ranks, rules = {"dp": x.dp * x.cp, "tp": x.tp, "cp": x.cp, "ep": x.ep, "pp": x.pp}, []
    for technique, axis, what, variable, overlaps, ratio, size, resized, limit in table:
        if ranks[axis] > 1:
            sized = [other for factor in FACTORS if (other := resized(s, factor))]
            points = tuple(sorted((size(other), ratio(other)) for other in sized))
            rules.append(Rule(technique, axis, what, variable, size(s), ratio(s), limit, overlaps, points))
    return rules


def _block(s: Setting) -> list[tuple[Operation, Cost]]:
    """The operations of the model's last block with their costs."""
    return [(op, cost.operation(op, s)) for op in s.last_block]


def _block_cost(s: Setting) -> Cost:
    """The cost of the last block for a microbatch, without messages of data parallelism."""
    return stage_costs.computed(s, s.card.second[-1], stage_costs.parts(s), s.recompute[-1])


def _sent(ops: Iterable[Operation], axis: str, s: Setting) -> float:
    """Seconds of the messages of an axis in forward, beside which nothing runs."""
    return sum(cost.message(sent, s, False) for op in ops for sent in op.sent_forward if sent.axis == axis)


def _resized(s: Setting, **fields: float) -> Setting | None:
    """The setting with other sizes of the model; None if they are no whole numbers."""
    if any(size != int(size) for size in fields.values()):
        return None
    model = s.model.model_copy(update={name: int(size) for name, size in fields.items()})
    return replace(s, model=model, sizes=replace(s.sizes, model=model))


def _data(s: Setting) -> float:
    """Gradients are summed or scattered beside backward, weights gathered beside forward; the larger ratio counts.
    Messages in every microbatch are compared by block, others of the whole first rank."""
    if s.layout.shards > 1 and not scattered_once(s.layout.zero, s.layout.pp):
        elements, costs = model_states.elements(s.model, s.layout).blocks[-1], [_block_cost(s)]
    else:
        elements, stages = model_states.rank_elements(s)[0], stage_costs.stage_costs(s)
        costs = [stages[stage] for stage in stages_of(s.layout, 0)]
    beside_forward = beside_backward = 0.0
    for sync, seconds, _ in stage_costs.synced(elements, s):
        gathers = sync.what == "gather"
        beside_forward += seconds * gathers
        beside_backward += seconds * (not gathers or sync.each > 1)
    forward, backward = (sum(way) for way in zip(*(price.alone for price in costs), strict=True))
    return max(beside_forward / forward, beside_backward / backward)


def _more_tokens(s: Setting, factor: float) -> Setting | None:
    """With more or fewer sequences of a microbatch; less than one is a shorter one."""
    B = s.sizes.B * factor
    if B < 1:
        return _longer(replace(s, sizes=replace(s.sizes, B=1)), B)
    return replace(s, sizes=replace(s.sizes, B=int(B))) if int(B) == B else None


def _tensor(s: Setting) -> float:
    ops, costs = zip(*_block(s), strict=True)
    return _sent(ops, "tp", s) / sum(price.alone[0] for price in costs)


def _wider(s: Setting, factor: float) -> Setting | None:
    names = ("dim", *s.card.widths)
    sizes = {name: value * factor for name in names if (value := getattr(s.model, name))}
    heads = sizes.get("kv_heads") or sizes["heads"]
    return None if heads % s.layout.tp or sizes["heads"] % s.layout.tp else _resized(s, **sizes)


def _context(s: Setting) -> float:
    """A ring sends keys and values beside the attention of a turn. Ulysses exchanges queries, keys and values, and then
    results. Backward has its own messages and rate; the larger ratio counts."""
    (op,) = (op for op, _ in _block(s) if op.attention)
    forward = sum(cost.message(sent, s, False) for sent in op.sent_forward)
    backward = sum(cost.message(sent, s, True) for sent in op.sent_backward)
    alone = cost.operation(replace(op, sent_forward=(), sent_backward=()), s).alone
    return max(forward / alone[0], backward / alone[1])


def _longer(s: Setting, factor: float) -> Setting | None:
    length = s.model.seq_len * factor
    return _resized(s, seq_len=length) if length % (2 * s.layout.cp) == 0 else None


def _beside(s: Setting) -> bool:
    """True if no rows hide but those that go to experts, behind the shared one."""
    return s.layout.expert_chunks == 1 and any(op.name == "arrival" and op.beside for op in s.last_block)


def _experts(s: Setting) -> float:
    """Each of a token's rows goes to its expert and comes back; or only those that go, if the others hide nowhere."""
    ops, beside = _block(s), _beside(s)
    which = "shared " if beside else "experts "
    matmuls = sum(price.forward for op, price in ops if op.name.startswith(which))
    return _sent((op for op, _ in ops if not beside or op.name == "arrival"), "ep", s) / matmuls


def _wider_experts(s: Setting, factor: float) -> Setting | None:
    name, width = s.card.expert_features()
    return _resized(s, **{name: width * factor})


def _bubble(s: Setting) -> float:
    step = time.step(s)
    return step.bubble / (step.seconds - step.bubble)


def _more_microbatches(s: Setting, factor: float) -> Setting | None:
    m = s.microbatches * factor
    return replace(s, microbatches=int(m), sequences=None) if m == int(m) else None


def _transfer(s: Setting) -> float:
    """A stage sends an activation while it computes its next forward."""
    sent = max(seconds for (a, b), seconds in stage_costs.transfers(s).items() if b == a + 1)
    return sent / _per_stage(s) / _block_cost(s).alone[0]


def _per_stage(s: Setting) -> float:
    return s.model.layers / (s.layout.pp * s.layout.stages_per_rank)


def _deeper(s: Setting, factor: float) -> Setting | None:
    """No fewer blocks than stages; not where modes of recomputation are listed by block."""
    layers = s.model.layers * factor
    possible = layers >= s.layout.pp * s.layout.stages_per_rank and "*" not in s.layout.recompute
    return _resized(s, layers=layers) if possible else None
