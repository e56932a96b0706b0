"""Attention where ranks divide the sequence, in bytes (parallel/context.py, kernels/partial_attention.py).

T tokens of a sequence on this rank, S keys at hand, H and K heads, d head, c ranks, e bytes an element.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fivefold.plan.eager import Gradients, Work, blocks, qkv_attention
from fivefold.plan.tape import Memory, Value


@dataclass
class Shape:
    """Of one rank's queries, keys and values. B: sequences."""

    B: float
    H: float
    K: float
    T: float
    d: float

    def queries(self, size: float, e: float) -> float:
        return self.B * self.H * size * self.d * e

    def keys(self, size: float, e: float) -> float:
        """Of keys or of values."""
        return self.B * self.K * size * self.d * e

    def scores(self, size: float, seen: float, e: float) -> float:
        return self.B * self.H * size * seen * e

    def rows(self, size: float) -> float:
        """fp32 statistics of queries."""
        return self.B * self.H * size * 4


def ring_attention(w: Work, qkv: Value, heads: float, kv_heads: float) -> Value:
    s, e, d = w.s, w.s.e, w.s.model.dim / w.s.model.heads
    T, causal, index = s.model.seq_len / s.cp, s.model.arch != "bert", w.cp_index
    shape = Shape(qkv.size / e / ((heads + 2 * kv_heads) * d) / T, heads, kv_heads, T, d)
    q, kv = _split_heads(w, shape)
    late = w.new(shape.queries(T / 2, e)) if causal and index + 1 < s.cp else q
    out = lse = q
    for owner, here, keys in _turns(w, shape, kv, causal):
        if owner == index:
            out, lse = _attend(w, shape, T, keys, causal)
            out = w.new(shape.queries(T, 4)) if e != 4 else out
        else:
            size = T / 2 if causal and owner > index else T
            _merge(w, shape, size, *_attend(w, shape, size, keys, False))
        del here
    out = w.new(shape.queries(T, e)) if e != 4 else out
    out = w.new(shape.queries(T, e))
    del late
    width = qkv.size

    def back(saved: list[Memory], outs: list[Memory | None]) -> Gradients:
        out, dout = w.new(shape.queries(T, e)), w.new(shape.queries(T, e))
        delta = _delta(w, shape)
        dq, dkv = _ring_gradients(w, shape, saved[1], causal)
        del out, dout, delta
        if e != 4:
            _narrow = w.new(shape.queries(T, e)), w.new(2 * shape.keys(T, e))
        dqkv = w.new(width)
        del dq, dkv
        return [dqkv], []

    result = Value(out, heads * d)
    w.tape.node([qkv], [result], [q, kv, out, lse], back)
    return result


def _split_heads(w: Work, shape: Shape) -> tuple[Memory, Memory]:
    e = w.s.e
    q, k = w.new(shape.queries(shape.T, e)), w.new(shape.keys(shape.T, e))
    v = w.new(k.size)
    kv = w.new(2 * k.size)
    del k, v
    return q, kv


def _turns(w: Work, shape: Shape, kv: Memory, causal: bool) -> Iterator[tuple[int, Memory, float]]:
    """(owner, keys and values, how many keys): the next ones arrive meanwhile."""
    e, c, here = w.s.e, w.s.cp, shape.T
    for turn in range(c):
        arriving, size = kv, here
        if turn + 1 < c:
            going, size = (_length(shape.T, i, turn + 1, c, causal) for i in (w.cp_index - 1, w.cp_index))
            _leaving = w.new(2 * shape.keys(going, e)) if going < here else kv
            arriving = w.new(2 * shape.keys(size, e))
        yield (w.cp_index + turn) % c, kv, here
        kv, here = arriving, size
        del arriving


def _length(T: float, index: int, turn: int, c: int, causal: bool) -> float:
    return T if not causal or index % c + turn < c else T / 2


def _attend(w: Work, shape: Shape, size: float, seen: float, causal: bool) -> tuple[Memory, Memory]:
    e, out, lse = w.s.e, w.new(shape.queries(size, w.s.e)), w.new(shape.rows(size))
    ranges = blocks(size, causal, w.s.e)
    for count, visible in ranges:
        rows = w.new(shape.queries(count, e)) if len(ranges) > 1 else None
        _p = w.new(shape.scores(count, visible if causal else seen, e))
        del rows
        product = w.new(shape.queries(count, e))
        del product
    return out, lse


def _merge(w: Work, shape: Shape, size: float, part: Memory, lse: Memory) -> None:
    _share = w.new(shape.rows(size))
    _wide = w.new(shape.queries(size, 4)) if w.s.e != 4 else part


def _delta(w: Work, shape: Shape) -> Memory:
    """Sum of dout * out, in fp32."""
    wide = w.new(shape.queries(shape.T, 4)) if w.s.e != 4 else None
    product = w.new(shape.queries(shape.T, 4))
    delta = w.new(shape.rows(shape.T))
    del wide, product
    return delta


def _ring_gradients(w: Work, shape: Shape, kv: Memory, causal: bool) -> tuple[Memory, Memory]:
    e, T, index, c = w.s.e, shape.T, w.cp_index, w.s.cp
    if causal and index + 1 < c:
        _late = [w.new(shape.queries(T / 2, e)) for _ in range(3)] + [
            w.new(shape.rows(T / 2)) for _ in range(2)
        ]
    dq = dkv = kv
    coming: list[Memory] = []
    for turn, (owner, here, keys) in enumerate(_turns(w, shape, kv, causal)):
        if owner == index:
            dq, dk, dv = _attend_backward(w, shape, T, keys, causal)
            dq = w.new(shape.queries(T, 4)) if e != 4 else dq
            stacked = w.new(dk.size + dv.size)
            dkv = w.new(2 * shape.keys(T, 4)) if stacked.size != int(2 * shape.keys(T, 4)) else stacked
            del stacked, here
            continue
        size = T / 2 if causal and owner > index else T
        _part, dk, dv = _attend_backward(w, shape, size, keys, False)
        stacked = w.new(dk.size + dv.size)
        leaving = stacked if stacked.size == int(2 * shape.keys(keys, e)) else w.new(2 * shape.keys(keys, e))
        del stacked, here
        arriving = w.new(2 * shape.keys(_length(T, index - turn, turn, c, causal), e))
        coming = [arriving, leaving]
        del arriving, leaving
    del coming
    return dq, dkv


def _attend_backward(
    w: Work, shape: Shape, size: float, seen: float, causal: bool
) -> tuple[Memory, Memory, Memory]:
    e, ranges = w.s.e, blocks(size, causal, w.s.e)
    dq, wide = w.new(shape.queries(size, e)), e != 4 and len(ranges) > 2
    dk = dv = None
    for count, visible in reversed(ranges):
        keys = visible if causal else seen
        if len(ranges) > 1:
            _rows = w.new(shape.queries(count, e)), w.new(shape.queries(count, e))
        _p = w.new(shape.scores(count, keys, e))
        _ds = w.new(shape.scores(count, keys, e))
        product = w.new(shape.queries(count, e))
        del product
        dk_block, dv_block = w.new(shape.keys(keys, e)), w.new(shape.keys(keys, e))
        if dk is None and wide:
            dk, dv = w.new(shape.keys(keys, 4)), w.new(shape.keys(keys, 4))
        elif dk is None:
            dk, dv = dk_block, dv_block
    assert dk is not None
    assert dv is not None
    return dq, dk, dv


def ulysses(w: Work, qkv: Value, heads: float, kv_heads: float) -> Value:
    """All heads of some tokens are exchanged for some heads of all tokens, and back."""
    whole = _whole_sequence(w, qkv, heads, kv_heads)
    out = qkv_attention(w, whole, heads / w.s.cp, kv_heads / w.s.cp, w.s.model.seq_len)
    return _whole_heads(w, out, heads * w.s.model.dim / w.s.model.heads)


def _whole_sequence(w: Work, qkv: Value, heads: float, kv_heads: float) -> Value:
    e, d, T = w.s.e, w.s.model.dim / w.s.model.heads, w.s.model.seq_len / w.s.cp
    size = qkv.size
    shape = Shape(size / e / ((heads + 2 * kv_heads) * d) / T, heads, kv_heads, T, d)
    parts = _split_heads(w, shape)
    leaving = w.new(size)
    arrived = w.new(size)
    del leaving
    whole = Value(w.new(size))
    del parts, arrived

    def back(saved: list[Memory], outs: list[Memory | None]) -> Gradients:
        leaving = w.new(size)
        _arrived = w.new(size)
        del leaving
        keys = w.new(2 * shape.keys(T, e))
        queries = w.new(shape.queries(T, e))  # put in order on the way
        dqkv = w.new(size)
        del keys, queries
        return [dqkv], []

    w.tape.node([qkv], [whole], [], back)
    return whole


def _whole_heads(w: Work, x: Value, features: float) -> Value:
    size = x.size
    leaving = w.new(size)
    _arrived = w.new(size)
    del leaving
    result = Value(w.new(size), features)

    def back(saved: list[Memory], outs: list[Memory | None]) -> Gradients:
        leaving = w.new(size)
        _arrived = w.new(size)
        del leaving
        return [w.new(size)], []

    w.tape.node([x], [result], [], back)
    return result
