"""When communication hides behind computing: a closed formula for each technique, with the numbers of a cluster.

Each rule compares the seconds of some messages with those of the computing that may run beside them. Their ratio falls
as 1/x with one size x, so the messages hide from a threshold on, x >= x*. Symbols:

    F  FLOP/s of large matmuls (data sheet times the share that programs reach); for rings of attention
    W  bytes per second of the collective: bytes of its tensor by the planner's price, at the size that it has now
    e, g  bytes of a number that is computed with, and of a gradient that is sent
    N  tokens per device and microbatch, n  ranks of the group, D  width, P  parameters that are sent
    A  parameters that multiply a token: a token costs 2A FLOPs in forward and 4A in backward. A = P in dense blocks

A formula leaves out what the planner prices besides: element-wise work, attention beside matmuls, messages' start-up
times at other sizes, and the first or last piece, which has nothing to run beside.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from fivefold.models.card import card_of
from fivefold.models.operations import Message, Operation
from fivefold.models.recomputation import of_blocks
from fivefold.plan import cost, model_states, partition, pipeline, rates, stage_costs, sync_costs, time
from fivefold.plan.cost import Cost, Setting
from fivefold.plan.overlap_threshold import Kind, Ratio, Rule
from fivefold.spread.units import scattered_once

IDLE = 0.1
"""Share of a step that a pipeline may be idle by its rule."""
PLAYBOOK = "Ultra-Scale Playbook, appendix on overlap"


def rules(s: Setting) -> list[Rule]:
    """The rules for the axes that a layout has."""
    return [kind.rule(s) for kind in KINDS if kind.applies(s)]


def flops(s: Setting) -> float:
    """FLOP/s of large matmuls."""
    return s.cluster.device.peak[s.rate] * s.cluster.device.matmul


def _tokens(s: Setting) -> float:
    return s.sizes.N


def _more_tokens(s: Setting, factor: float) -> Setting | None:
    B = s.sizes.B * factor
    return replace(s, sizes=replace(s.sizes, B=int(B))) if int(B) == B else None


def _weights(ops: Iterable[Operation], s: Setting) -> float:
    """A: parameters of these operations that multiply a token on this rank, on average over its tokens."""
    return sum(m.m * m.n * m.k * m.count for op in ops if (m := op.matmul) and m.weight) / s.sizes.N


def _block(s: Setting) -> tuple[list[Operation], list[Cost]]:
    """The operations of the model's last block, and their costs. A model with experts has them there."""
    mixed = card_of(s.model).is_mixed(s.model.layers - 1)
    ops = card_of(s.model).block_operations(s.sizes, s.software, mixed)
    return ops, [cost.operation(op, s) for op in ops]


def _sent(axis: str, ops: Iterable[Operation]) -> list[Message]:
    """The messages of forward over an axis."""
    return [m for op in ops for m in op.sent_forward if m.axis == axis]


def _seconds(messages: Iterable[Message], s: Setting, backward: bool) -> float:
    return sum(m.calls * cost.message(replace(m, size=m.size / m.calls), s, backward) for m in messages)


# Data parallelism. Backward computes 4 A N / F seconds while gradients of g P bytes are summed or scattered, forward
# 2 A N / F while weights of e P bytes are gathered. P cancels where every parameter multiplies every token.


def _of_block(s: Setting) -> tuple[model_states.Elements, Cost]:
    """(elements of the last block, its cost for a microbatch without messages of data parallelism)."""
    number = s.model.layers - 1
    mode = of_blocks(s.layout.recompute, s.model.layers)[number]
    shared = stage_costs.parts(s, card_of(s.model).work(s.sizes, s.software))
    own = model_states.elements(s.model, s.layout)[0][number]
    return own, stage_costs.computed(s, card_of(s.model).is_mixed(number), shared, mode)


def _alone(c: Cost) -> tuple[float, float]:
    """Seconds that a part computes in forward and in backward."""
    return c.forward - c.sent_forward, c.input + c.weight - c.sent_backward


def _each(s: Setting) -> bool:
    """True if weights are gathered or gradients scattered in every microbatch."""
    return s.layout.shards > 1 and not scattered_once(s.layout.zero, s.layout.pp)


def _data_messages(s: Setting) -> tuple[model_states.Elements, dict[str, float]]:
    """(elements whose messages are compared, seconds of their gathers in one forward, and of the messages of one
    backward). They are those of a block, if it sends in every microbatch, or of the whole first stage."""
    own = (
        _of_block(s)[0]
        if _each(s)
        else model_states.rank_elements(s.model, s.layout, s.software.partition)[0]
    )
    found = {"gather": 0.0, "gradients": 0.0, "again": 0.0}
    for sync, seconds, _ in sync_costs.synced(own, s):
        found["gather" if sync.what == "gather" else "gradients"] += seconds
        if sync.what == "gather" and sync.each > 1:
            found["again"] += seconds
    return own, found


def _data_formula(s: Setting) -> Ratio:
    """Forward: N >= (e P / W) F / (2 A). Backward: N >= (g P / W' + e P / W if gathered again) F / (4 A). The larger
    one counts."""
    own, seconds = _data_messages(s)
    card, F, N = card_of(s.model), flops(s), s.sizes.N
    if _each(s):
        A = _weights(_block(s)[0], s)
    else:
        blocks = partition.stages(s.model, s.layout, s.software.partition)[0]
        each = (card.block_operations(s.sizes, s.software, card.is_mixed(number)) for number in blocks)
        A = sum(_weights(ops, s) for ops in each)
        if s.layout.pp == 1:
            A += _weights(card.end_operations(s.sizes, s.software), s)
    forward = seconds["gather"] * F / (2 * A * N)
    backward = (seconds["gradients"] + seconds["again"]) * F / (4 * A * N)
    e, g, P = s.sizes.e, s.states.reduce, own.computes
    inputs = {"F": F, "e": e, "g": g, "P": P, "A": A}
    if seconds["gather"]:
        inputs["W"] = e * P / seconds["gather"]
    if seconds["gradients"]:
        inputs["W'"] = g * P / seconds["gradients"]
    return Ratio(max(forward, backward), inputs)


def _data_planned(s: Setting) -> float:
    _, seconds = _data_messages(s)
    if _each(s):
        forward, backward = _alone(_of_block(s)[1])
    else:
        costs = [_alone(c) for c in stage_costs.stage_costs(s)[:: s.layout.pp]]
        forward, backward = (sum(way) for way in zip(*costs, strict=True))
    return max(seconds["gather"] / forward, (seconds["gradients"] + seconds["again"]) / backward)


def _data_text(s: Setting) -> str:
    if s.layout.shards == 1:
        return "N >= g P F / (4 A W')"
    again = "(g P / W' + e P / W) F / (4 A)" if s.layout.zero == 3 else "g P F / (4 A W')"
    return f"N >= max(e P F / (2 A W), {again})"


def _data_name(s: Setting) -> str:
    if s.layout.shards > 1:
        return f"ZeRO-{s.layout.zero}"
    return "DDP" if s.layout.dp > 1 else "gradients of CP"


# Tensor parallelism. A block computes 2 A N / F seconds with A = c D^2 / n, and sums activations of N D e bytes twice
# in forward (with sequence parallelism it gathers and scatters as many bytes). N cancels: D >= n e F / (c W).


def _tensor_formula(s: Setting) -> Ratio:
    ops, _ = _block(s)
    sent = _sent("tp", ops)
    F, A, seconds = flops(s), _weights(ops, s), _seconds(sent, s, False)
    c = A * s.layout.tp / s.model.dim**2
    whole = 2 * s.sizes.N * s.model.dim * s.sizes.e
    inputs = {"F": F, "e": s.sizes.e, "n": s.layout.tp, "c": c, "W": whole / seconds}
    return Ratio(seconds * F / (2 * A * s.sizes.N), inputs)


def _tensor_planned(s: Setting) -> float:
    ops, costs = _block(s)
    return _seconds(_sent("tp", ops), s, False) / sum(_alone(c)[0] for c in costs)


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


# Context parallelism. A rank computes 4 c N T H / F seconds of attention (H features of the query heads, c = 1/2 with a
# causal mask).
# Ring: it sends keys and values of 2 k H N e bytes n - 1 times (k key-value heads per query head). N and H cancel:
# T >= (n - 1) k e F / (2 c W). Without a mask and with e = 2, blocks of T / n tokens are then as long as F / W, as in
# the paper. Backward has 2.5 times the FLOPs and twice the bytes, at its own rate; the larger ratio counts.
# Ulysses: it exchanges queries, keys and values, and then results: (2 + 2 k) H N e bytes, in backward as many again.
# T >= (1 + k) e F / (2 c W), for any n. One all-to-all comes before attention and one behind it, so they hide only
# behind the attention of other heads.


def _attention(s: Setting) -> Operation:
    (op,) = (op for op in _block(s)[0] if op.attention)
    return op


def _attended(op: Operation, s: Setting, backward: bool) -> float:
    device, model = s.cluster.device, s.model
    ring = s.layout.cp if _rings(s) else 1
    return rates.attention(op.attention, model.seq_len, model.head_width, device, s.dtype, backward, ring)


def _rings(s: Setting) -> bool:
    return s.layout.cp_method == "ring"


def _context_formula(s: Setting) -> Ratio:
    op = _attention(s)
    sent = [_seconds(op.sent_forward, s, False), _seconds(op.sent_backward, s, True)]
    computed = [_attended(op, s, backward) for backward in (False, True)]
    card, e = card_of(s.model), s.sizes.e
    inputs = {
        "F": op.attention / computed[0],
        "W": sum(m.size for m in op.sent_forward) / sent[0],
        "e": e,
        "n": s.layout.cp,
        "k": (s.model.kv_heads or s.model.heads) / s.model.heads,
        "c": 0.5 if card.causal else 1.0,
    }
    return Ratio(max(a / b for a, b in zip(sent, computed, strict=True)), inputs)


def _context_planned(s: Setting) -> float:
    op = _attention(s)
    forward, backward = _alone(cost.operation(replace(op, sent_forward=(), sent_backward=()), s))
    return max(_seconds(op.sent_forward, s, False) / forward, _seconds(op.sent_backward, s, True) / backward)


def _longer(s: Setting, factor: float) -> Setting | None:
    length = s.model.seq_len * factor
    return _resized(s, seq_len=int(length)) if length % (2 * s.layout.cp) == 0 else None


# Pipeline. A rank is idle for (p - 1) / v of the m microbatches that it computes: (p - 1) / (v m) of its computing, if
# stages are equal and transfers take no time. The share of the step is at most x if m >= (p - 1) (1 - x) / (v x).


def _pipeline_formula(s: Setting) -> Ratio:
    p, v = s.layout.pp, s.layout.stages_per_rank
    return Ratio((p - 1) / (v * s.microbatches), {"p": p, "v": v, "x": IDLE})


def _pipeline_planned(s: Setting) -> float:
    step = time.step(s)
    return step.bubble / (step.seconds - step.bubble)


def _more_microbatches(s: Setting, factor: float) -> Setting | None:
    m = s.microbatches * factor
    return replace(s, microbatches=int(m), sequences=None) if m == int(m) else None


# The transfer between stages: N D e bytes behind the next forward of a stage, 2 A N l / F seconds with l blocks:
# l >= e D F / (2 A W).


def _per_stage(s: Setting) -> float:
    return s.model.layers / (s.layout.pp * s.layout.stages_per_rank)


def _transfer(s: Setting) -> float:
    return max(seconds for (a, b), seconds in pipeline.transfers(s).items() if b == a + 1)


def _transfer_formula(s: Setting) -> Ratio:
    A, F, seconds = _weights(_block(s)[0], s), flops(s), _transfer(s)
    size = s.sizes.n * s.model.dim * s.sizes.e
    inputs = {"F": F, "e": s.sizes.e, "D": s.model.dim, "A": A, "W": size / seconds}
    return Ratio(seconds * F / (2 * A * s.sizes.N * _per_stage(s)), inputs)


def _transfer_planned(s: Setting) -> float:
    return _transfer(s) / (_per_stage(s) * _alone(_of_block(s)[1])[0])


def _deeper(s: Setting, factor: float) -> Setting | None:
    layers = s.model.layers * factor
    pieces = s.layout.pp * s.layout.stages_per_rank
    if layers != int(layers) or layers < pieces or s.layout.recompute.find("*") >= 0:
        return None
    return _resized(s, layers=int(layers))


# Expert parallelism. Each of a token's k rows goes to its expert and comes back, 2 k N D e bytes, and meets three
# matrices D x E there, 6 k N D E / F seconds (SwiGLU). k, N and D cancel: E >= e F / (3 W).


def _expert_formula(s: Setting) -> Ratio:
    ops, _ = _block(s)
    seconds, F = _seconds(_sent("ep", ops), s, False), flops(s)
    grouped = [op for op in ops if op.matmul and op.matmul.grouped]
    rows = max(op.matmul.m * op.matmul.count for op in grouped if op.matmul)  # k N
    there_and_back = 2 * rows * s.model.dim * s.sizes.e
    inputs = {"F": F, "e": s.sizes.e, "W": there_and_back / seconds}
    return Ratio(seconds * F / (2 * _weights(grouped, s) * s.sizes.N), inputs)


def _expert_planned(s: Setting) -> float:
    ops, costs = _block(s)
    beside = sum(c.forward for op, c in zip(ops, costs, strict=True) if op.name.startswith("experts "))
    return _seconds(_sent("ep", ops), s, False) / beside


def _wider_experts(s: Setting, factor: float) -> Setting | None:
    name, width = card_of(s.model).expert_features()
    return _resized(s, **{name: int(width * factor)}) if width * factor == int(width * factor) else None


def _expert_width(s: Setting) -> float:
    return card_of(s.model).expert_features()[1]


KINDS = (
    Kind(
        _data_name,
        "dp",
        lambda s: "gradients behind backward" + ", weights behind forward" * (s.layout.shards > 1),
        "tokens per device and microbatch",
        _data_text,
        f"arXiv 1910.02054, section 7; {PLAYBOOK}",
        lambda s: s.layout.dp * s.layout.cp > 1,
        lambda s: s.software.overlap_data and (s.software.overlap_scatter or not s.layout.zero),
        _tokens,
        _data_formula,
        _data_planned,
        _more_tokens,
    ),
    Kind(
        lambda s: "TP + SP" if s.layout.sp else "TP",
        "tp",
        lambda s: "sums of activations behind a block's forward",
        "width of the model",
        lambda s: "D >= n e F / (c W), c = parameters of a block / D^2",
        f"arXiv 1909.08053; arXiv 2205.05198; {PLAYBOOK}",
        lambda s: s.layout.tp > 1,
        lambda s: False,
        lambda s: s.model.dim,
        _tensor_formula,
        _tensor_planned,
        _wider,
    ),
    Kind(
        lambda s: "CP",
        "cp",
        lambda s: (
            "keys and values behind the attention of a turn"
            if _rings(s)
            else "heads on their way behind the attention of others"
        ),
        "tokens of a sequence",
        lambda s: f"T >= {'(n - 1) k' if _rings(s) else '(1 + k)'} e F / (2 c W), c = 1/2 if causal",
        "arXiv 2310.01889, section 3; arXiv 2309.14509, section 3.2",
        lambda s: s.layout.cp > 1,
        _rings,
        lambda s: s.model.seq_len,
        _context_formula,
        _context_planned,
        _longer,
    ),
    Kind(
        lambda s: "PP",
        "pp",
        lambda s: f"idle time of at most {IDLE:.0%} of the step",
        "microbatches per step",
        lambda s: "m >= (p - 1) (1 - x) / (v x)",
        "arXiv 1811.06965; arXiv 2104.04473, section 2.2",
        lambda s: s.layout.pp > 1,
        lambda s: True,
        lambda s: s.microbatches,
        _pipeline_formula,
        _pipeline_planned,
        _more_microbatches,
        IDLE / (1 - IDLE),
    ),
    Kind(
        lambda s: "PP",
        "pp",
        lambda s: "an activation's transfer behind a stage's forward",
        "blocks per stage",
        lambda s: "l >= e D F / (2 A W)",
        PLAYBOOK,
        lambda s: s.layout.pp > 1,
        lambda s: s.software.overlap_pipeline,
        _per_stage,
        _transfer_formula,
        _transfer_planned,
        _deeper,
    ),
    Kind(
        lambda s: "EP",
        "ep",
        lambda s: "rows on their way behind the experts' matmuls",
        "width of an expert",
        lambda s: "E >= e F / (3 W)",
        "arXiv 2006.16668; arXiv 2412.19437, section 3.2",
        lambda s: s.layout.ep > 1,
        lambda s: s.layout.expert_chunks > 1,
        _expert_width,
        _expert_formula,
        _expert_planned,
        _wider_experts,
    ),
)
