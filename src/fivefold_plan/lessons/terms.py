"""The terms behind a plan's totals, by the conventions of papers and courses: parameters by part, states, activations,
FLOPs, messages in units of Psi, bubble. A formula is evaluated as it is printed. No prediction depends on it.

Symbols: n_v vocabulary, d or h width, f feed-forward, L layers, a heads, s tokens of a sequence, b sequences of a
microbatch, m microbatches, p pipeline ranks, v stages per rank, t tensor ranks, c context ranks, e expert ranks, k
experts per token, N parameters that compute a token, Psi parameters whose states are kept, Psi_e those of experts, n
ranks that share them, D tokens of the run, D_1 of a step.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

from fivefold.models.card import card_of
from fivefold.models.operations import Operation, Sizes
from fivefold.models.recomputation import region
from fivefold.optim import OPTIMIZERS
from fivefold.precision import DTYPES, MASTER
from fivefold.recipe import active_parameters, training_flops
from fivefold.schedules.pipeline import simulate
from fivefold.sharding.layout import Layout, groups
from fivefold_plan.advice import budget
from fivefold_plan.lessons.compare import data_units
from fivefold_plan.lessons.formulas import ACTIVATIONS, PARAMETERS, evaluate, matching
from fivefold_plan.memory import memory, model_states
from fivefold_plan.messages import volume
from fivefold_plan.messages.volume import SENT
from fivefold_plan.predict import Plan, price
from fivefold_plan.setting import FIVEFOLD, PAPER, Setting, Software, States
from fivefold_plan.time import stage_costs


@dataclass(frozen=True)
class Convention:
    """states: bytes per parameter. program: whose activations are counted, in 16 bits and with dropout. None: those of
    the recipe and of this program."""

    states: States | None = None
    program: Software | None = None


CONVENTIONS = {
    "paper": Convention(
        PAPER, replace(FIVEFOLD, compiles=False, attention="plain", probability_dropout=True)
    ),
    "fivefold": Convention(),
}
"""paper: 2 + 2 + 12 bytes, weights and gradients in 16 bits, and in fp32 a copy, momentum and variance (arXiv
1910.02054); activations of a block with the scores of attention in memory (arXiv 2205.05198)."""
ADAM = ("momentum", "variance")
SUMMED = DTYPES[MASTER].bytes
"""Bytes that a sum of gradients over microbatches in fp32 adds to those of the papers."""
DROPOUT = 0.1  # its value changes no size
WIDTH = DTYPES["bf16"].bytes


@dataclass(frozen=True)
class Term:
    """A named value. formula: in the symbols of this file, or "". unit: "parameters", "bytes", "FLOPs", "Psi",
    "share", or a word. note: a remark. more: further values."""

    name: str
    value: float
    unit: str
    formula: str = ""
    note: str = ""
    more: Mapping[str, float] | None = None

    def as_json(self) -> dict[str, Any]:
        figures = {"formula": self.formula, "value": self.value, "unit": self.unit, "note": self.note}
        return figures | dict(self.more or {})


Symbols = dict[str, float]


@dataclass(frozen=True)
class Asked:
    """A plan and what its terms are counted with. convention: of `CONVENTIONS`. tokens: of the run. deadline: seconds,
    if there is one. psi: parameters to count with, instead of the recipe's. flops: the rate of a device in FLOP/s,
    instead of the predicted one."""

    plan: Plan
    convention: str
    tokens: float
    deadline: float | None = None
    psi: float | None = None
    flops: float | None = None

    @property
    def how(self) -> Convention:
        return CONVENTIONS[self.convention]

    @property
    def setting(self) -> Setting:
        return self.plan.setting

    @cached_property
    def symbols(self) -> Symbols:
        s, model, card = self.setting, self.setting.model, self.setting.card
        layout, width = s.layout, float(model.dim)
        psi = self.psi or card.count
        routed = sum(math.prod(card.parameters[name]) for name, cut in card.cuts.items() if cut.axis == "ep")
        return {
            "n_v": model.vocab_size or 0, "d": width, "h": width, "f": model.ffn_dim or 0, "L": model.layers,
            "a": model.heads, "s": model.seq_len, "b": s.sizes.B, "m": s.microbatches, "p": layout.pp, "c": layout.cp,
            "v": layout.stages_per_rank, "t": layout.tp, "n": sharing(layout), "D": self.tokens,
            "D_1": self.plan.tokens, "Psi": psi, "Psi_e": psi * routed / card.count, "e": layout.ep,
            "N": self.psi or active_parameters(model), "k": card.per_token,
        }  # fmt: skip

    def term(self, name: str, formula: str, unit: str, note: str = "") -> Term:
        return Term(name, evaluate(formula, self.symbols), unit, formula, note)


def sharing(layout: Layout) -> int:
    """Ranks that share states: those that do, or without ZeRO those that could."""
    return layout.shards if layout.zero else layout.dp * layout.cp


PARTS = {
    "embed_positions": "positions",
    "embed": "embedding",
    "attention": "attention",
    "mlp.router": "router",
    "mlp.experts": "experts",
    "mlp.shared": "shared experts",
    "mlp": "MLP",
}
"""Parts of a model by the beginning of a parameter's name. All norms are one part, wherever they are."""


def part_of(name: str) -> str:
    """The part of the model that a parameter belongs to, in a reader's words."""
    local = name.split(".", 2)[-1] if name.startswith("blocks.") else name
    if "norm" in local:
        return "norms"
    known = (part for prefix, part in PARTS.items() if local.startswith(prefix))
    return next(known, local.partition(".")[0] if local != name else "output layer")


def parameters(asked: Asked) -> Iterator[Term]:
    card, parts = asked.setting.card, Counter[str]()
    for name, shape in card.parameters.items():
        parts[part_of(name)] += math.prod(shape)
    for part, count in parts.items():
        formula = matching(PARAMETERS.get(part, ()), count, asked.symbols)
        yield Term(part, count, "parameters", formula)
    yield Term("model", card.count, "parameters", note="all parts")
    active = active_parameters(asked.setting.model)
    if active < card.count:
        yield Term("active", active, "parameters", note="of a token: its experts only")
    if not (card.gated or card.latent_attention):  # biases of the MLP only, no positions, no norms
        yield asked.term("plain GPT", "n_v d + L (12 d^2 + 5 d)", "parameters", "the courses' formula")
    if asked.psi:
        yield Term("Psi", asked.psi, "parameters", note="as given: the terms below count with it")


def states_of(asked: Asked) -> tuple[States, list[tuple[str, float]]]:
    """Bytes per parameter, and by name those of the optimizer's states."""
    s = asked.setting
    if given := asked.how.states:
        return given, [(name, given.moments / len(ADAM)) for name in ADAM]
    card, b = OPTIMIZERS[s.software.optimizer], s.states
    if card.uniform and sum(state.bytes for state in card.states) == b.moments:
        return b, [(state.name, state.bytes) for state in card.states]
    every = sum(card.state_bytes(n, shape, s.card.sections.get(n)) for n, shape in s.card.parameters.items())
    moments = b.moments if card.uniform else every / s.card.count
    return replace(b, moments=moments), [("optimizer states", moments)]


def states(asked: Asked) -> Iterator[Term]:
    """Bytes of each state, then of all on a rank by ZeRO stage."""
    layout = asked.setting.layout
    b, moments = states_of(asked)
    weights = b.working + b.rounded
    rows = [("parameters", weights), ("gradients", b.gradient), ("fp32 copy", b.master), *moments]
    for name, size in rows:
        if size:
            yield asked.term(name, f"{size:g} Psi", "bytes")
    whole = weights + b.gradient + b.optimizer
    yield asked.term("all states", f"{whole:g} Psi", "bytes")
    if asked.how.states:
        note = "with a sum of the gradients in fp32"
        yield asked.term("at most", f"{whole + SUMMED:g} Psi", "bytes", note)
    for zero in range(4):
        where = f"a rank, n = {sharing(layout)}"
        yield asked.term(f"ZeRO {zero}", held_formula(asked, b, zero), "bytes", where)
    most = max(one.params + one.gradients + one.optimizer for one in asked.plan.memory)
    yield Term("this plan", most, "bytes", note="predicted, the rank with most")


KINDS = ("params", "gradients", "optimizer")
"""What `model_states.state_bytes` returns, in its order: weights, gradients, masters and moments."""


def held_formula(asked: Asked, b: States, zero: int, kinds: Sequence[str] = KINDS) -> str:
    """The formula of the bytes of these kinds of states on a rank, at a ZeRO stage; "0" without any."""
    layout = asked.setting.layout
    held = share = "Psi"
    routed = "t Psi_e" if layout.sp else "Psi_e"  # with sp every rank has whole experts
    if layout.ep > 1 or (layout.sp and asked.setting.card.has_experts):
        held = f"(Psi - Psi_e + {routed} / e)"
        share = "Psi" if layout.folded > 1 or not layout.sp else f"(Psi - Psi_e + {routed})"
    if layout.tp * layout.pp > 1:
        held, share = f"{held} / (t p)", f"{share} / (t p)"

    def each(computes: float, keeps: float) -> float:
        m = asked.setting.microbatches
        found = model_states.state_bytes(b, zero, computes, keeps, m, layout.pp)
        return sum(size for kind, size in zip(KINDS, found, strict=True) if kind in kinds)

    whole, shared = each(computes=1, keeps=0), each(computes=0, keeps=1)
    terms = [f"{whole:g} {held}"] * bool(whole) + [f"{shared:g} {share} / n"] * bool(shared)
    return " + ".join(terms) or "0"


def states_by_stage(asked: Asked) -> dict[str, dict[str, float]]:
    """Bytes of each of `KINDS` on a rank, by ZeRO stage: what `states` adds up."""
    b, _ = states_of(asked)
    return {
        f"ZeRO {zero}": {
            kind: evaluate(held_formula(asked, b, zero, (kind,)), asked.symbols) for kind in KINDS
        }
        for zero in range(4)
    }


GROWS = ("s b h", "a b s^2", "a b s")
"""What the bytes of a block grow with."""
Kept = list[float]
"""Bytes that a part of a block keeps, of each of `GROWS`."""


def kept_by_part(ops: list[Operation], recompute: str, software: Software) -> dict[str, Kept]:
    """What attention, MLP and norms keep of a microbatch. A norm keeps its input; its output is the sublayer's."""
    used = region(recompute, software).keeps
    parts, here = {name: [0.0] * len(GROWS) for name in ("attention", "MLP", "norms")}, "attention"
    for op in ops:
        for saved in op.saved:
            if saved.role in used:
                of_norm = op.rate == "norm" and saved.name in (f"{op.name} input", f"{op.name} in fp32")
                part = "norms" if of_norm else here
                grows = 1 if saved.role == "core" else 2 if saved.name == "log-sum-exp" else 0
                parts[part][grows] += saved.size
        if op.name == "add1":
            here = "MLP"
    return parts


def kept_by_block(ops: list[Operation], recompute: str, software: Software) -> Kept:
    return [sum(sizes) for sizes in zip(*kept_by_part(ops, recompute, software).values(), strict=True)]


def kept_formula(kept: Kept, x: Symbols) -> str:
    """A formula of the papers with this value, or else multiples of `GROWS`."""
    multiples = ((size / evaluate(unit, x), unit) for size, unit in zip(kept, GROWS, strict=True))
    plain = " + ".join(f"{round(number, 9):.9g} {unit}" for number, unit in multiples if number)
    return (matching(ACTIVATIONS, sum(kept), x) if x["t"] > 1 else "") or plain


def counted_in(asked: Asked, **changes: Any) -> tuple[Sizes, Software]:
    """Sizes and program by which activations are counted. changes: of the sizes."""
    s, program = asked.setting, asked.how.program
    if program is None:
        return replace(s.sizes, **changes), s.software
    model = s.model.model_copy(update={"dropout": DROPOUT})
    changes = {"sp_regather": changes.get("sp", s.sizes.sp)} | changes
    return replace(s.sizes, model=model, e=WIDTH, narrow=0.0, **changes), program


def activations(asked: Asked) -> Iterator[Term]:
    """Bytes kept for backward: of a block's parts and a microbatch on a rank, of all blocks, of a whole batch."""
    s, x = asked.setting, asked.symbols
    sizes, program = counted_in(asked)
    card = card_of(sizes.model)
    kinds = Counter(card.second)
    total = 0.0
    for second, blocks in kinds.items():
        number = card.second.index(second)
        words = ("dense", "experts") if any(card.mixed) else ("rotary", "unrotated")
        words = ("window", "whole") if card.narrow else words
        named = f"{words[second]}, " if len(kinds) > 1 else ""
        ops = card.block_operations(sizes, program.of(s.kind(second, "none")[1]), number)
        block = kept_by_block(ops, "none", program)
        total += blocks * sum(block)
        shown = [(name, kept, "") for name, kept in kept_by_part(ops, "none", program).items()]
        shown.append(("block", block, "a microbatch on a rank"))
        for mode in ("selective", "full"):
            shown.append((mode, kept_by_block(ops, mode, program), f"recompute={mode} keeps"))
        for name, kept, note in shown:
            yield Term(named + name, sum(kept), "bytes", kept_formula(kept, x), note)
    yield Term("all blocks", total, "bytes", note="a microbatch on a rank")
    token = total * s.layout.tp / sizes.N
    yield Term("token", token, "bytes", note="all blocks, all ranks")
    yield Term("batch", token * asked.plan.tokens, "bytes", note=f"{asked.plan.tokens:,} tokens at once")
    most = max(held.activations for held in asked.plan.memory)
    yield Term("this plan", most, "bytes", note="predicted at the peak, the rank with most")
    yield asked.term("one activation", "D_1 h", "elements", "of a whole batch")
    yield asked.term("one activation, fp32", "4 D_1 h", "bytes")


def activations_by_way(asked: Asked) -> dict[str, float]:
    """Bytes that the last block keeps of a microbatch: on one rank and on the layout's tensor-parallel ranks, without
    recomputation and with it. By name and formula."""
    found, ranks = {}, asked.setting.layout.tp
    ways = {"a block": (1, False), "tp": (ranks, False), "tp, sp": (ranks, True)}
    for name, (tp, sp) in ways.items():
        if name != "a block" and tp == 1:
            continue
        sizes, program = counted_in(asked, tp=tp, sp=sp)
        card = card_of(sizes.model)
        _, eager = asked.setting.kind(card.second[-1], "none")
        ops = card.block_operations(sizes, program.of(eager), sizes.model.layers - 1)
        for mode in ("none", "selective", "full") if name == "a block" else ("none", "selective"):
            kept, words = kept_by_block(ops, mode, program), name + f", {mode}" * (mode != "none")
            found[f"{words}: {kept_formula(kept, asked.symbols | {'t': tp})}"] = sum(kept)
    return found


def flops(asked: Asked) -> Iterator[Term]:
    """FLOPs of a step and of the run, utilisation, and time at a given rate."""
    plan, model = asked.plan, asked.setting.model
    x, card = asked.symbols, asked.setting.card
    yield asked.term("forward", "2 N D_1", "FLOPs", "a step")
    yield asked.term("backward", "4 N D_1", "FLOPs", "a step")
    attention = plan.tokens * sum(card.attention_flops(number) for number in range(model.blocks))
    # scores and values, forward and backward; half of them if a token sees earlier ones only
    formula = matching(("6 L h s D_1", "12 L h s D_1"), attention, x)
    yield Term("attention", attention, "FLOPs", formula, "a step, besides N")
    yield asked.term("run", "6 N D", "FLOPs", f"{asked.tokens:.4g} tokens")
    yield asked.term("run, full recomputation", "8 N D", "FLOPs", "+33.3%: forward runs twice")
    if not plan.service:
        s = asked.setting
        layouts = (replace(s.layout, recompute=mode) for mode in ("none", "full"))
        none, full = (price(replace(s, layout=layout)).step.seconds for layout in layouts)
        yield Term("time, full recomputation", full / none - 1, "share", note="more for a step, predicted")
    yield Term("MFU", plan.mfu, "share", note="of the data sheet's peak, predicted")
    yield Term("HFU", plan.hfu, "share", note="with what backward recomputes")
    rate, given = asked.flops or plan.model_flops_per_gpu, "given" if asked.flops else "predicted"
    yield Term("rate", rate, "FLOP/s", note=f"a device, {given}")
    work = training_flops(x["N"], asked.tokens)
    note = f"on {plan.ranks:,} device{'s' * (plan.ranks > 1)}"
    yield Term("days", work / (plan.ranks * rate * budget.DAY), "days", note=note)
    if asked.deadline:
        count = budget.devices_for(work, asked.deadline, rate)
        yield Term("devices", count, "devices", note=f"within {asked.deadline / budget.DAY:g} days")


TECHNIQUES = {
    "DP": Layout(dp_replicate=2),
    "ZeRO 1": Layout(dp_shard=2, zero=1),
    "ZeRO 2": Layout(dp_shard=2, zero=2),
    "ZeRO 3": Layout(dp_shard=2, zero=3),
    "ZeRO++, between nodes": Layout(
        dp_shard=4, zero=3, zeropp="weights,hier,gradients", ranks_per_node=2
    ),
}  # fmt: skip
"""The smallest layouts that have each technique's messages."""


def messages(asked: Asked) -> Iterator[Term]:
    """What each parallelism sends. Data parallelism in units of Psi, without the factor (n - 1) / n."""
    s, x = asked.setting, asked.symbols
    b, _ = states_of(asked)
    yield asked.term("gradients", f"{b.reduce:g} Psi", "bytes", "every step")
    if x["n"] > 1:
        ring = f"2 (n - 1) / n {b.reduce:g} Psi"
        yield asked.term("ring all-reduce of them", ring, "bytes", f"a rank sends, n = {x['n']:g}")
    for name, layout in TECHNIQUES.items():
        once, each = data_units(replace(layout, pp=s.layout.pp))
        factor = " + ".join([f"{once:g}"] * bool(once) + [f"{each:g} m".removeprefix("1 ")] * bool(each))
        formula = f"({factor}) Psi" if once and each else f"{factor} Psi"
        units = evaluate(formula, x) / x["Psi"]
        note = f"{once + each:g} Psi with m = 1" if each else ""
        yield Term(name, units, "Psi", formula, note, {"one_microbatch": once + each})
    yield from block_messages(asked)
    if s.layout.pp > 1:
        crossed = sum(stage != following for stage, following in pairwise(s.schedule(1).rank_of))
        size = 2 * crossed * s.passes * s.sizes.n * s.model.dim
        formula = matching(["2 s b h m (p v - 1)", "2 s b h m (p v - 1) / t"], size, x)
        note = f"of a step, there and back over {crossed} boundaries between ranks"
        yield Term("PP", size, "elements", formula, note, {"bytes": size * s.sizes.e})
    for axis, size in asked.plan.sent.items():
        units = size / (WIDTH * x["Psi"])
        note = f"{units:.3g} Psi in 16 bits; the rank that sends most, a step"
        yield Term(f"this plan, {axis}", size, "bytes", note=note, more={"psi": units})


_SUMS, _TOKENS = ("all_reduce", "all_gather", "reduce_scatter"), ("s b h (t - 1) / t",)
IN_BLOCKS: tuple[tuple[str, str, Sequence[str], Mapping[str, Any], Sequence[str]], ...] = (
    ("TP", "tp", _SUMS, {"sp": False, "sp_regather": False}, _TOKENS),
    ("TP + SP", "tp", _SUMS, {"sp": True, "sp_regather": False}, _TOKENS),
    ("TP + SP, sp_regather", "tp", _SUMS, {"sp": True, "sp_regather": True}, _TOKENS),
    # under a causal mask, some keys are sent by half (schedules/ring_attention.py)
    ("CP, ring", "cp", ("send",), {"cp_method": "ring"}, ("s b h (c - 1) / c", "s b h (6 c - 7) / c")),
    ("CP, ulysses", "cp", ("all_to_all",), {"cp_method": "ulysses"}, ("s b h (c - 1) / c^2",)),
    (
        "CP, all_gather",
        "cp",
        ("all_gather", "reduce_scatter"),
        {"cp_method": "all_gather"},
        ("s b h (c - 1) / c",),
    ),
    ("EP", "ep", ("all_to_all",), {}, ("k s b h (e - 1) / e",)),
)
"""Ways of sending activations within blocks: name, axis, its messages (other ones of the axis are a few numbers),
changes of the sizes, formulas of its elements but for a factor: without a mask, and (the last) with a causal one."""


def block_messages(asked: Asked) -> Iterator[Term]:
    """What a block sends for a microbatch over the axes of tensor, context and expert parallelism, by each of their
    ways; the rank that sends most."""
    s, x, card = asked.setting, asked.symbols, asked.setting.card
    divided = {"tp": ["c"], "cp": ["t"], "ep": ["c", "t"] if s.sizes.sp else ["c"]}
    for name, axis, kinds, changes, formulas in IN_BLOCKS:
        if getattr(s.layout, axis) == 1:
            continue
        ops = card.block_operations(replace(s.sizes, **changes), s.software, s.model.layers - 1)
        leaving = []
        for index in range(min(2, s.layout.cp)):  # of a ring, the second sends most
            moments = volume.of_operations(s, s.layout.rank({"cp": index}), ops, "none", "a block", 1)
            sent = [moment for moment in moments if moment.axis == axis and moment.what in kinds]
            size = sum(SENT[moment.what](groups(s.layout)[axis][0]) * moment.size for moment in sent)
            messages = (
                f"{way} " + ", ".join(f"{m.calls} {m.what}" for m in sent if m.when.startswith(way))
                for way in ("forward", "backward")
            )
            leaving.append((size, "; ".join(messages)))
        size, words = max(leaving)
        unit = " / ".join([formulas[-1 if card.causal else 0], *(n for n in divided[axis] if x[n] > 1)])
        formula = f"{round(size / s.sizes.e / evaluate(unit, x), 4):g} {unit}"
        note = f"of a block and microbatch; {words}"
        yield Term(name, size / s.sizes.e, "elements", formula, note, {"bytes": size})


def bubble(asked: Asked) -> Iterator[Term]:
    """Idle time of the pipeline: by formula, of this schedule with equal stages, and predicted."""
    plan, s = asked.plan, asked.setting
    layout, m = s.layout, s.microbatches
    if layout.pp == 1:
        yield Term("bubble", 0.0, "share", note="no pipeline")
        return
    microbatch = sum(cost.seconds for cost in stage_costs.stage_costs(s)) / layout.pp
    yield Term("microbatch", microbatch, "seconds", note="t_f + t_b of a rank with average stages, predicted")
    idle = (layout.pp - 1) * microbatch / layout.stages_per_rank
    yield Term("idle", idle, "seconds", note="(p - 1) (t_f + t_b) / v")
    schedule = s.schedule(layout.few(m))
    timeline = simulate(schedule)  # F and B of equal stages take 1 and 2
    busy = timeline.busy(0)
    simulated = timeline.makespan - busy, busy / schedule.microbatches * m
    predicted = plan.step.bubble, plan.step.seconds - plan.step.bubble
    for way, to, formula in (
        ("ideal", "of the time without it", "(p - 1) / (v m)"),
        ("step", "of the step", "(p - 1) / (v m + p - 1)"),
    ):
        yield asked.term(f"formula, {way}", formula, "share", to)
        for name, note, (waits, works) in (
            (layout.schedule, f"{to}, simulated with equal stages", simulated),
            ("this plan", f"{to}, predicted", predicted),
        ):
            whole = works if way == "ideal" else works + waits
            yield Term(f"{name}, {way}", waits / whole, "share", note=note)
    live = memory.live_microbatches(layout, m)
    yield Term("live microbatches", live, "microbatches", note="of the rank with most, equal stages")


SECTIONS: dict[str, Callable[[Asked], Iterator[Term]]] = {
    "parameters": parameters,
    "states": states,
    "activations": activations,
    "flops": flops,
    "messages": messages,
    "bubble": bubble,
}
"""What can be printed, in this order."""


def terms(asked: Asked, sections: Sequence[str] = tuple(SECTIONS)) -> dict[str, list[Term]]:
    return {name: list(SECTIONS[name](asked)) for name in SECTIONS if name in sections}
