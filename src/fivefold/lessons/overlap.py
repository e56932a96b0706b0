"""From which size on messages hide behind computing: a rule for each technique, with the numbers of a cluster.

The planner prices both the messages and the computing that may run beside them. Their ratio falls as a size grows, so
from a threshold on the messages hide. Papers give it as a formula: the same messages, beside matmuls alone at the rate
of large ones. So it leaves out element-wise work, attention beside matmuls, messages' start-up times at other sizes,
and the first or last piece, which has nothing to run beside. Symbols:

    F  FLOP/s of large matmuls (data sheet times the share that programs reach); for rings of attention
    W  bytes per second of the collective: bytes of its tensor by the planner's price, at the size that it has now
    e, g  bytes of a number that is computed with, and of a gradient that is sent
    N  tokens per device and microbatch, n  ranks of the group, D  width, P  parameters that are sent
    A  parameters that multiply a token: a token costs 2A FLOPs in forward and 4A in backward. A = P in dense blocks
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

from fivefold.models.card import card_of
from fivefold.models.operations import Message, Operation
from fivefold.models.recomputation import of_blocks
from fivefold.plan import partition
from fivefold.plan.memory import model_states, operations
from fivefold.plan.time import cost, pipeline, rates, stage_costs, sync_costs, time
from fivefold.plan.time.cost import Cost, Setting
from fivefold.spread.parts import stages_of
from fivefold.spread.syncs import scattered_once

FACTORS = tuple(2.0**k for k in range(-4, 5))
"""Sizes beside the recipe's own for which the planner is asked, too."""
IDLE = 0.1
"""Share of a step that a pipeline may be idle by its rule."""
PLAYBOOK = "Ultra-Scale Playbook, appendix on overlap"


@dataclass(frozen=True)
class Rule:
    """The rule of one technique for a setting.

    what: what is sent, and what hides it. variable: the size that decides. now, needed: its value, and the formula's
    threshold. planned: seconds of messages over seconds of computing by the planner. limit: the ratio at the threshold.
    overlaps: True if this program runs the messages beside the computing; otherwise it waits for them. points:
    (size, ratio) by the planner.
    """

    technique: str
    axis: str
    what: str
    variable: str
    now: float
    needed: float
    planned: float
    limit: float
    overlaps: bool
    formula: str
    source: str
    points: tuple[tuple[float, float], ...]

    @property
    def hides(self) -> bool:
        """True if the size is large enough by the planner's figures, whether or not this program overlaps."""
        return self.planned <= self.limit

    @property
    def crossing(self) -> float:
        """The size at which the planner's own figures reach the limit, on a line between them; 0 if all of them are
        below it, infinite if the largest is still above."""
        points = sorted(self.points)
        if not points or points[-1][1] > self.limit:
            return math.inf
        for (x, above), (y, below) in pairwise(points):
            if above > self.limit >= below:
                part = math.log(above / self.limit) / math.log(above / below) if below else 1.0
                return x * (y / x) ** part
        return 0.0

    @property
    def verdict(self) -> str:
        if not self.hides:
            return "sticks out"
        return "hides" if self.overlaps else "could hide, but the program waits"

    def as_json(self) -> dict[str, Any]:
        crossing = self.crossing if math.isfinite(self.crossing) else None
        return vars(self) | {"hides": self.hides, "needed_by_planner": crossing}


class Ratios(NamedTuple):
    """Seconds of messages over those of computing: all computing by the planner, and what the formula counts."""

    planned: float
    formula: float


def rules(s: Setting) -> list[Rule]:
    """The rules for the axes that a layout has."""
    return [*_of_data(s), *_of_blocks(s), *_of_pipeline(s)]


def _rule(
    s: Setting,
    ratios: Callable[[Setting], Ratios],
    size: Callable[[Setting], float],
    resized: Callable[[Setting, float], Setting | None],
    limit: float = 1.0,
    **fields: Any,
) -> Rule:
    """size: the value of the variable. resized: the setting with the size times a factor, or None if that is not
    possible. fields: the other ones of the rule."""
    here, now = ratios(s), size(s)
    sized = [other for factor in FACTORS if (other := resized(s, factor))]
    points = tuple((size(other), ratios(other).planned) for other in sized)
    needed = now * here.formula / limit
    return Rule(now=now, needed=needed, planned=here.planned, limit=limit, points=points, **fields)


def _of_data(s: Setting) -> Iterator[Rule]:
    layout, formula, gathers = s.layout, "N >= g P F / (4 A W')", ""
    if layout.dp * layout.cp == 1:
        return
    technique = "DDP" if layout.dp > 1 else "gradients of CP"
    if layout.shards > 1:
        technique, gathers = f"ZeRO-{layout.zero}", ", weights behind forward"
        gradients = "(g P / W' + e P / W) F / (4 A)" if layout.zero == 3 else "g P F / (4 A W')"
        formula = f"N >= max(e P F / (2 A W), {gradients})"
    yield _rule(
        s, _data, lambda s: s.sizes.N, _more_tokens,
        technique=technique,
        axis="dp",
        what="gradients behind backward" + gathers,
        variable="tokens per device and microbatch",
        overlaps=s.software.overlap_data and (s.software.overlap_scatter or not layout.zero),
        formula=formula,
        source=f"arXiv 1910.02054, section 7; {PLAYBOOK}",
    )  # fmt: skip


def _of_blocks(s: Setting) -> Iterator[Rule]:
    layout = s.layout
    if layout.tp > 1:
        yield _rule(
            s, _tensor, lambda s: s.model.dim, _wider,
            technique="TP + SP" if layout.sp else "TP",
            axis="tp",
            what="sums of activations behind a block's forward",
            variable="width of the model",
            overlaps=False,
            formula="D >= n e F / (c W), c = parameters of a block / D^2",
            source=f"arXiv 1909.08053; arXiv 2205.05198; {PLAYBOOK}",
        )  # fmt: skip
    if layout.cp > 1:
        # one of Ulysses' all-to-alls comes before attention and one behind it: they hide only behind other heads
        turns = "keys and values behind the attention of a turn"
        yield _rule(
            s, _context, lambda s: s.model.seq_len, _longer,
            technique="CP",
            axis="cp",
            what=turns if _rings(s) else "heads on their way behind the attention of others",
            variable="tokens of a sequence",
            overlaps=_rings(s),
            formula=f"T >= {'(n - 1) k' if _rings(s) else '(1 + k)'} e F / (2 c W), c = 1/2 if causal",
            source="arXiv 2310.01889, section 3; arXiv 2309.14509, section 3.2",
        )  # fmt: skip
    if layout.ep > 1:
        yield _rule(
            s, _experts, lambda s: card_of(s.model).expert_features()[1], _wider_experts,
            technique="EP",
            axis="ep",
            what="rows on their way behind the experts' matmuls",
            variable="width of an expert",
            overlaps=layout.expert_chunks > 1,
            formula="E >= e F / (3 W)",
            source="arXiv 2006.16668; arXiv 2412.19437, section 3.2",
        )  # fmt: skip


def _of_pipeline(s: Setting) -> Iterator[Rule]:
    if s.layout.pp == 1:
        return
    yield _rule(
        s, _bubble, lambda s: s.microbatches, _more_microbatches, IDLE / (1 - IDLE),
        technique="PP",
        axis="pp",
        what=f"idle time of at most {IDLE:.0%} of the step",
        variable="microbatches per step",
        overlaps=True,
        formula="m >= (p - 1) (1 - x) / (v x)",
        source="arXiv 1811.06965; arXiv 2104.04473, section 2.2",
    )  # fmt: skip
    yield _rule(
        s, _transfer, _per_stage, _deeper,
        technique="PP",
        axis="pp",
        what="an activation's transfer behind a stage's forward",
        variable="blocks per stage",
        overlaps=s.software.overlap_pipeline,
        formula="l >= e D F / (2 A W)",
        source=PLAYBOOK,
    )  # fmt: skip


def _matmuls(ops: Iterable[Operation], s: Setting) -> float:
    """Seconds of these operations' matmuls with weights in forward at the rate of large ones: 2 A N / F."""
    device = s.cluster.device
    work = sum(operations.flops(op) for op in ops if op.matmul and op.matmul.weight)
    return work / (device.peak[s.rate] * device.matmul)


def _block(s: Setting) -> tuple[list[Operation], list[Cost]]:
    """The operations of the model's last block, and their costs. A model with experts has them there."""
    mixed = card_of(s.model).is_mixed(s.model.layers - 1)
    ops = card_of(s.model).block_operations(s.sizes, s.software, mixed)
    return ops, [cost.operation(op, s) for op in ops]


def _block_cost(s: Setting) -> Cost:
    """The cost of the last block for a microbatch, without messages of data parallelism."""
    number, card = s.model.layers - 1, card_of(s.model)
    mode = of_blocks(s.layout.recompute, s.model.layers)[number]
    return stage_costs.computed(
        s, card.is_mixed(number), stage_costs.parts(s, card.work(s.sizes, s.software)), mode
    )


def _alone(c: Cost) -> tuple[float, float]:
    """Seconds that a part computes in forward and in backward."""
    return c.forward - c.sent_forward, c.input + c.weight - c.sent_backward


def _seconds(messages: Iterable[Message], s: Setting, backward: bool = False) -> float:
    return sum(m.calls * cost.message(replace(m, size=m.size / m.calls), s, backward) for m in messages)


def _sent(axis: str, ops: Iterable[Operation], s: Setting) -> float:
    """Seconds of forward's messages over an axis."""
    return _seconds((m for op in ops for m in op.sent_forward if m.axis == axis), s)


def _data(s: Setting) -> Ratios:
    """Gradients of g P bytes are summed or scattered while backward computes 4 A N / F seconds; weights of e P bytes
    are gathered while forward computes 2 A N / F. Messages in every microbatch are compared by block, others of the
    whole first rank. The larger ratio counts."""
    if s.layout.shards > 1 and not scattered_once(s.layout.zero, s.layout.pp):
        sent, costs, ops = model_states.elements(s.model, s.layout)[0][-1], [_block_cost(s)], _block(s)[0]
    else:
        sent = model_states.rank_elements(s.model, s.layout, s.software.partition)[0]
        every, mine = stage_costs.stage_costs(s), stages_of(s.layout, 0)
        costs, ops = [every[stage] for stage in mine], _stage_operations(s, mine)
    gathers = summed = again = 0.0
    for sync, seconds, _ in sync_costs.synced(sent, s):
        gathers += seconds * (sync.what == "gather")
        summed += seconds * (sync.what != "gather")
        again += seconds * (sync.what == "gather" and sync.each > 1)
    forward, backward = (sum(way) for way in zip(*map(_alone, costs), strict=True))
    matmuls = _matmuls(ops, s)
    return Ratios(
        max(gathers / forward, (summed + again) / backward),
        max(gathers / matmuls, (summed + again) / (2 * matmuls)),
    )


def _stage_operations(s: Setting, mine: Iterable[int]) -> list[Operation]:
    """The operations of some stages, but for the embedding, which has no matmul."""
    card, by_stage = card_of(s.model), partition.stages(s.model, s.layout, s.software.partition)
    ops = [
        op
        for stage in mine
        for number in by_stage[stage]
        for op in card.block_operations(s.sizes, s.software, card.is_mixed(number))
    ]
    return ops + (card.end_operations(s.sizes, s.software) if len(by_stage) - 1 in mine else [])


def _more_tokens(s: Setting, factor: float) -> Setting | None:
    B = s.sizes.B * factor
    return replace(s, sizes=replace(s.sizes, B=int(B))) if int(B) == B else None


def _tensor(s: Setting) -> Ratios:
    """A block computes 2 A N / F seconds with A = c D^2 / n, and sums activations of N D e bytes twice in forward (with
    sequence parallelism it gathers and scatters as many bytes). N cancels."""
    ops, costs = _block(s)
    seconds = _sent("tp", ops, s)
    return Ratios(seconds / sum(_alone(c)[0] for c in costs), seconds / _matmuls(ops, s))


def _resized(s: Setting, **fields: int) -> Setting:
    model = s.model.model_copy(update=fields)
    return replace(s, model=model, sizes=replace(s.sizes, model=model))


def _wider(s: Setting, factor: float) -> Setting | None:
    names = ("dim", *card_of(s.model).widths)
    sizes = {name: value * factor for name in names if (value := getattr(s.model, name))}
    whole = all(size == int(size) for size in sizes.values())
    heads = sizes.get("kv_heads") or sizes["heads"]
    if not whole or heads % s.layout.tp or sizes["heads"] % s.layout.tp:
        return None
    return _resized(s, **{name: int(size) for name, size in sizes.items()})


def _context(s: Setting) -> Ratios:
    """A rank computes 4 c N T H / F seconds of attention (H features of the query heads, c = 1/2 with a causal mask).

    A ring sends keys and values of 2 k H N e bytes n - 1 times (k key-value heads per query head). Without a mask and
    with e = 2, blocks of T / n tokens are then as long as F / W, as in the paper. Ulysses exchanges queries, keys and
    values, and then results: (2 + 2 k) H N e bytes. N and H cancel. Backward has 2.5 times the FLOPs and twice the
    bytes of a ring, at its own rate. The larger ratio counts.
    """
    (op,) = (op for op in _block(s)[0] if op.attention)
    device, model, ring = s.cluster.device, s.model, s.layout.cp if _rings(s) else 1
    seconds = _seconds(op.sent_forward, s), _seconds(op.sent_backward, s, True)
    planned = _alone(cost.operation(replace(op, sent_forward=(), sent_backward=()), s))
    kernels = (
        rates.attention(op.attention, model.seq_len, model.head_width, device, s.dtype, backward, ring)
        for backward in (False, True)
    )
    return Ratios(*(max(a / b for a, b in zip(seconds, way, strict=True)) for way in (planned, kernels)))


def _rings(s: Setting) -> bool:
    return s.layout.cp_method == "ring"


def _longer(s: Setting, factor: float) -> Setting | None:
    length = s.model.seq_len * factor
    return _resized(s, seq_len=int(length)) if length % (2 * s.layout.cp) == 0 else None


def _bubble(s: Setting) -> Ratios:
    """A rank is idle for (p - 1) / v of the m microbatches that it computes, if stages are equal and transfers take no
    time. The share of the step is at most x if idle time over computing is at most x / (1 - x)."""
    step = time.step(s)
    idle = (s.layout.pp - 1) / (s.layout.stages_per_rank * s.microbatches)
    return Ratios(step.bubble / (step.seconds - step.bubble), idle)


def _more_microbatches(s: Setting, factor: float) -> Setting | None:
    m = s.microbatches * factor
    return replace(s, microbatches=int(m), sequences=None) if m == int(m) else None


def _per_stage(s: Setting) -> float:
    return s.model.layers / (s.layout.pp * s.layout.stages_per_rank)


def _transfer(s: Setting) -> Ratios:
    """A stage sends N D e bytes while it computes its next forward, 2 A N l / F seconds with l blocks."""
    seconds = max(seconds for (a, b), seconds in pipeline.transfers(s).items() if b == a + 1) / _per_stage(s)
    return Ratios(seconds / _alone(_block_cost(s))[0], seconds / _matmuls(_block(s)[0], s))


def _deeper(s: Setting, factor: float) -> Setting | None:
    layers = s.model.layers * factor
    pieces = s.layout.pp * s.layout.stages_per_rank
    if layers != int(layers) or layers < pieces or s.layout.recompute.find("*") >= 0:
        return None
    return _resized(s, layers=int(layers))


def _experts(s: Setting) -> Ratios:
    """Each of a token's k rows goes to its expert and comes back, 2 k N D e bytes, and meets three matrices D x E
    there, 6 k N D E / F seconds (SwiGLU). k, N and D cancel."""
    ops, costs = _block(s)
    seconds = _sent("ep", ops, s)
    beside = sum(c.forward for op, c in zip(ops, costs, strict=True) if op.name.startswith("experts "))
    return Ratios(
        seconds / beside, seconds / _matmuls((op for op in ops if op.matmul and op.matmul.grouped), s)
    )


def _wider_experts(s: Setting, factor: float) -> Setting | None:
    name, width = card_of(s.model).expert_features()
    return _resized(s, **{name: int(width * factor)}) if width * factor == int(width * factor) else None
