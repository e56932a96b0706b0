"""The trainer's operations on CPUs, in bytes: what each makes, keeps and frees, in the order in which it does. The
functions stand for those of the same names in `models/` and `kernels/`, and their local variables for theirs.

Sizes: N tokens of a microbatch on this rank, n those outside tensor-parallel regions (N / tp under sequence
parallelism), D model, H and K heads, d head, e bytes an element, T tokens that attention sees.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from fivefold.plan.operations import MIN_ROWS, Sizes
from fivefold.plan.tape import Memory, Tape, Value

BLOCK, MAX_BLOCKS, KEEP = {4: 64, 2: 128}, 16, 1024  # of kernels/blockwise_attention.py
CHUNK_BYTES = 16 << 20  # of kernels/loss.py
Gradients = tuple[list[Memory | None], list[tuple[str, Memory]]]


Around = Callable[["Work", str, Value, Callable[[Value], Value]], Value]
"""Runs a unit of weights (its name, its input, its forward) with what the data axes do before and after."""


@dataclass
class Work:
    """One microbatch's forward on a rank. unit: whose weights are in use, with a colon behind. splits: linear layers
    may leave their weight gradients for later. cp_index: this rank's on the context axis. context: what every block
    gets besides its input."""

    tape: Tape
    s: Sizes
    around: Around
    unit: str = ""
    splits: bool = False
    cp_index: int = 0
    context: list[Memory] = field(default_factory=list)

    def new(self, size: float) -> Memory:
        return self.tape.new(size)


def rms_norm(w: Work, x: Value, name: str) -> Value:
    return add_rms_norm(w, x, None, name)[1]


def add_rms_norm(w: Work, x: Value, residual: Value | None, name: str) -> tuple[Value, Value]:
    """The sum, which is x itself where nothing is added, and its norm."""
    D, e, unit = w.s.model.dim, w.s.e, w.unit
    total = Value(x.there if residual is None else w.new(x.size))
    out, rstd = Value(w.new(x.size)), w.new(4 * x.size / e / D)
    inputs = 1 if residual is None else 2

    def back(saved: list[Memory], outs: list[Memory | None]) -> Gradients:
        dx, dweight, scratch = w.new(saved[0].size), w.new(4 * D), w.new(4 * D)
        del scratch
        if e != 4:
            dweight = w.new(e * D)
        return [dx] * inputs, [(unit + name, dweight)]

    ins, outs = ([x], [out]) if residual is None else ([x, residual], [total, out])
    w.tape.node(ins, outs, [total.there, rstd], back)
    return total, out


def layer_norm(w: Work, x: Value, name: str) -> Value:
    D, e, unit = w.s.model.dim, w.s.e, w.unit
    out, statistics = Value(w.new(x.size)), w.new(2 * x.size / D)

    def back(saved: list[Memory], outs: list[Memory | None]) -> Gradients:
        return [w.new(saved[0].size)], [(unit + name, w.new(D * e)), (f"{unit}{name} bias", w.new(D * e))]

    w.tape.node([x], [out], [x.there, statistics], back)
    return out


def add(w: Work, x: Value, y: Value) -> Value:
    out = Value()
    w.tape.node([x, y], [out], [], lambda saved, outs: ([outs[0], outs[0]], []))
    out.memory = w.new(x.size)
    return out


def dropout(w: Work, x: Value) -> Value:
    """The mask is of the activations' dtype, and multiplied with them."""
    if not w.s.model.dropout:
        return x
    noise, out = w.new(x.size), Value()
    w.tape.node([x], [out], [noise], _like_saved(w))
    out.memory = w.new(x.size)
    return out


def swiglu(w: Work, gate_up: Value) -> Value:
    out = Value(w.new(gate_up.size / 2), gate_up.features / 2)
    w.tape.node([gate_up], [out], [gate_up.there], _like_saved(w))
    return out


def gelu(w: Work, x: Value) -> Value:
    out = Value(features=x.features)
    w.tape.node([x], [out], [x.there], _like_saved(w))
    out.memory = w.new(x.size)
    return out


def _like_saved(w: Work) -> Callable[[list[Memory], list[Memory | None]], Gradients]:
    return lambda saved, outs: ([w.new(saved[0].size)], [])


def linear(w: Work, x: Value, name: str, features: float, bias: bool = False) -> Value:
    """To so many features."""
    into, e, unit = x.features or w.s.model.dim, w.s.e, w.unit
    out, size = Value(features=features), into * features * e

    def back(saved: list[Memory], outs: list[Memory | None]) -> Gradients:
        dx = w.new(saved[0].size)
        return [dx], weight_gradients(w, unit + name, size, outs[0], saved[0], features if bias else 0)

    if w.splits or e == 4:  # own functions (later.py, product.py), which save after their product
        out.memory = w.new(x.size / into * features)
        w.tape.node([x], [out], [x.there], back)
    else:
        w.tape.node([x], [out], [x.there], back)
        out.memory = w.new(x.size / into * features)
    return out


def weight_gradients(
    w: Work, name: str, size: float, dy: Memory | None, x: Memory, bias: float = 0
) -> list[tuple[str, Memory]]:
    """Of a matrix and its bias; the matrix's perhaps later."""
    found = [(f"{name} bias", w.new(bias * w.s.e))] if bias else []
    if w.splits and w.tape.later is not None and dy is not None:
        w.tape.later.append((name, size, dy, x))
        return found
    return [(name, w.new(size)), *found]


def qkv_attention(w: Work, qkv: Value, heads: float, kv_heads: float, T: float) -> Value:
    """By blocks of queries; up to KEEP tokens their probabilities are kept."""
    s, e = w.s, w.s.e
    d = s.model.dim / s.model.heads
    B = qkv.size / e / ((heads + 2 * kv_heads) * d) / T
    ranges, keys = blocks(T, s.model.arch != "bert", e), B * kv_heads * T * d * e
    k, v = w.new(keys), w.new(keys)
    out = Value(w.new(B * T * heads * d * e), heads * d)
    queries, probabilities = [], []
    for size, seen in ranges:
        queries.append(w.new(B * heads * size * d * e))
        probabilities.append(w.new(B * heads * size * seen * e))
        _o = w.new(B * heads * size * d * e)  # until the next one is there
    kept = probabilities if T <= KEEP else []
    width = qkv.size

    def back(saved: list[Memory], outs: list[Memory | None]) -> Gradients:
        dqkv, dk = w.new(width), None
        for size, seen in reversed(ranges):
            _do = w.new(B * heads * size * d * e)
            _p = None if kept_any else w.new(B * heads * size * seen * e)
            _ds = w.new(B * heads * size * seen * e)
            dq = w.new(B * heads * size * d * e)
            del dq
            dv_block = w.new(B * kv_heads * seen * d * e)
            dk_block = w.new(B * kv_heads * seen * d * e)
            if dk is None and len(ranges) > 2 and e != 4:
                dk, _dv = w.new(keys / e * 4), w.new(keys / e * 4)
            elif dk is None:
                dk, _dv = dk_block, dv_block
        return [dqkv], []

    kept_any = bool(kept)
    w.tape.node([qkv], [out], [k, v, *queries, *kept], back)
    return out


def blocks(T: float, causal: bool, e: float) -> list[tuple[float, float]]:
    """(queries, keys that they see) of each block."""
    size = max(BLOCK[int(e)], -(-T // MAX_BLOCKS))
    starts = range(0, int(T), int(size))
    return [(min(size, T - start), min(start + size, T) if causal else T) for start in starts]


def embedding(w: Work, rows: float, name: str) -> Value:
    """Of all tokens; the gradient is as large as the table."""
    s, unit, out = w.s, w.unit, Value()
    table = rows * s.model.dim * s.e
    w.tape.node([], [out], [], lambda saved, outs: ([], [(unit + name, w.new(table))]))
    out.memory = w.new(s.N * s.model.dim * s.e)
    return out


def linear_cross_entropy(w: Work, x: Value, rows: float, columns: float, name: str, scaled: bool) -> Value:
    """Gradients are made in forward, by chunks of logits, of which two are there while the second is computed.
    scaled: backward multiplies them by something other than 1."""
    D, e = w.s.model.dim, w.s.e
    losses, dx = w.new(4 * rows), w.new(rows * D * e)
    dweight = logits = None
    for size in chunks(rows, columns, e):
        new = w.new(size * columns * e)
        logits = new
        del new
        dweight = add_chunk(w, dweight, columns * D, size >= rows)
    del logits, losses
    assert dweight is not None
    out = Value(w.new(4))
    w.tape.node([x], [out], [dx, dweight], loss_backward(w, w.unit + name, columns * D * e, scaled))
    return out


def chunks(rows: float, columns: float, e: float) -> list[float]:
    """Rows of each (`rows_at_once`)."""
    most = max(MIN_ROWS, CHUNK_BYTES // (columns * e))
    size = -(-rows // max(1, -(-rows // most)))
    return [min(size, rows - start) for start in range(0, int(rows), int(size))]


def add_chunk(w: Work, total: Memory | None, elements: float, only: bool) -> Memory:
    """The gradient of the output's weight: a sum over chunks is kept in fp32."""
    part = w.new(elements * w.s.e)
    if only or (total is None and w.s.e == 4):
        return part
    return w.new(elements * 4) if total is None else total


def loss_backward(
    w: Work, name: str, size: float, scaled: bool
) -> Callable[[list[Memory], list[Memory | None]], Gradients]:
    """size: bytes of the weight's gradient as the weight's owner gets it."""

    def back(saved: list[Memory], outs: list[Memory | None]) -> Gradients:
        dx, dweight = saved
        if scaled:
            dx, dweight = w.new(dx.size), w.new(dweight.size)
        if dweight.size != int(size):
            dweight = w.new(size)
        return [dx], [(name, dweight)]

    return back


def add_positions(w: Work, x: Value) -> Value:
    """Learned positions, of this rank's part of a sequence; BERT adds the type, too."""
    s, unit = w.s, w.unit
    here = x.size / s.B / s.model.dim / s.e  # tokens of a sequence
    table, out = s.model.seq_len * s.model.dim * s.e, Value()
    positions = w.new(here * s.model.dim * s.e)
    if s.model.arch == "bert":
        typed = w.new(positions.size)
        positions = typed

    def back(saved: list[Memory], outs: list[Memory | None]) -> Gradients:
        summed = w.new(here * s.model.dim * s.e)
        return [outs[0]], [(f"{unit}positions", w.new(table)), *([(f"{unit}types", summed)] if typed else [])]

    typed = s.model.arch == "bert"
    w.tape.node([x], [out], [], back)
    out.memory = w.new(x.size)
    return out


def select(w: Work, x: Value, rows: float) -> Value:
    """The masked tokens only."""
    out, size = Value(), x.size
    w.tape.node([x], [out], [w.new(w.s.N)], lambda saved, outs: ([w.new(size)], []))
    out.memory = w.new(rows * w.s.model.dim * w.s.e)
    return out
