"""A mixture of experts as what it does with memory (models/moe.py, kernels/mixture.py, parallel/expert.py), at even
load: of each rank's N tokens k rows go to experts, and as many come."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fivefold.plan import eager as one
from fivefold.plan.eager import Gradients, Work
from fivefold.plan.tape import Memory, Value

if TYPE_CHECKING:
    from fivefold.plan.eager_models import Model


def mixture(w: Work, model: Model, x: Value) -> Value:
    s = w.s
    rows = s.n * (s.model.experts_per_token or 1)
    choice = router(w, x)
    plan = [w.new(8 * rows) for _ in range(3)]  # order, place, and the order of what is exchanged
    y = combine(w, experts(w, model, dispatch(w, x, rows, plan)), choice, rows, plan)
    if s.model.shared_experts:
        wide = s.model.shared_experts * (s.model.expert_ffn_dim or 0)
        y = one.add(w, y, model.feed_forward(w, x, wide))
    return y


def router(w: Work, x: Value) -> Value:
    """Scores in fp32; returns the weights of the chosen."""
    s, unit = w.s, w.unit
    N, E, k, D = s.n, s.model.experts or 1, s.model.experts_per_token or 1, s.model.dim
    wide = Value(w.new(4 * N * D)) if s.e != 4 else x
    table = w.new(4 * E * D) if s.e != 4 else None
    logits, scores = w.new(4 * N * E), w.new(4 * N * E)
    chosen, weights = w.new(8 * N * k), Value(w.new(4 * N * k))
    normal = w.new(4 * N * k)
    saved = [wide.there, scores, chosen, normal, *([table] if table else [])]

    def back(saved: list[Memory], outs: list[Memory | None]) -> Gradients:
        dscores, dshares = w.new(4 * N * E), w.new(4 * N * E)
        dlogits = w.new(4 * N * E)
        del dscores, dshares
        dwide = w.new(4 * N * D)
        dweight = w.new(4 * E * D)
        del dlogits
        return [dwide if s.e == 4 else w.new(s.e * N * D)], [(unit + "router", dweight)]

    del logits, wide
    w.tape.node([x], [weights], saved, back)
    return weights


def dispatch(w: Work, x: Value, rows: float, plan: list[Memory]) -> Value:
    D, e = w.s.model.dim, w.s.e
    size = x.size
    out = Value(w.new(rows * D * e))
    w.tape.node([x], [out], plan[:2], lambda saved, outs: ([w.new(size)], []))
    return out


def experts(w: Work, model: Model, x: Value) -> Value:
    """Rows go to the ranks that hold their experts, are put in order, and come back."""
    e, unit = w.s.e, w.unit

    def run(x: Value) -> Value:
        if w.s.ep == 1:
            return compute(x)
        received = moved(x, w.s.load)
        results = compute(moved(received))
        return moved(moved(results), 1 / w.s.load)

    def moved(x: Value, factor: float = 1.0) -> Value:
        """Sent, where so many times as many may come, or put in another order."""
        size, out = x.size, Value(w.new(x.size * factor), x.features)
        w.tape.node([x], [out], [], lambda saved, outs: ([w.new(size)], []))
        return out

    def compute(x: Value) -> Value:
        return model.second_half(w, finish, grouped(x, "experts.gate_up", 2 * F))

    def finish(product: Value) -> Value:
        return grouped(one.swiglu(w, product), "experts.down", w.s.model.dim)

    def grouped(x: Value, name: str, features: float) -> Value:
        into, inside, out = x.features or w.s.model.dim, w.unit, Value(features=features)
        weight = (w.s.model.experts or 1) / w.s.ep * into * features * e

        def back(saved: list[Memory], outs: list[Memory | None]) -> Gradients:
            dx = w.new(saved[0].size)
            return [dx], [(inside + name, w.new(weight))]

        w.tape.node([x], [out], [x.there], back)
        out.memory = w.new(x.size / into * features)
        return out

    F = w.s.model.expert_ffn_dim or 0
    return w.around(w, unit.rstrip(":") + " experts", x, run)


def combine(w: Work, rows: Value, weights: Value, count: float, plan: list[Memory]) -> Value:
    D, e = w.s.model.dim, w.s.e
    cast = weights.there if e == 4 else w.new(weights.size / 2)
    indices = w.new(8 * count)
    out = Value(w.new(w.s.n * D * e))
    del indices

    def back(saved: list[Memory], outs: list[Memory | None]) -> Gradients:
        drows = w.new(count * D * e)
        _dslots, product = w.new(4 * count), w.new(count * D * e)
        del product
        return [drows, w.new(4 * count)], []

    w.tape.node([rows, weights], [out], [rows.there, cast, *plan], back)
    return out
