"""The operations of `eager.py` where the ranks of a tensor axis divide them (parallel/tensor.py, sequence.py,
vocabulary.py)."""

from __future__ import annotations

from fivefold.plan.eager import (
    Gradients,
    Work,
    add_chunk,
    chunks,
    loss_backward,
    weight_gradients,
)
from fivefold.plan.tape import Memory, Value


def gather(w: Work, size: float, ordered: bool = True) -> Memory:
    """The whole sequence from pieces: `size` bytes, copied once more where it has to be in order."""
    out = w.new(size)
    return w.new(size) if ordered else out


def scatter(w: Work, x: Memory, ordered: bool = True) -> Memory:
    """This rank's piece of a sum."""
    pieces = w.new(x.size) if ordered else x
    out = w.new(pieces.size / w.s.tp)
    return out


def column_linear(w: Work, x: Value, name: str, features: float, ordered: bool, bias: bool = False) -> Value:
    """To this rank's features, of the whole sequence."""
    s, D = w.s, w.s.model.dim
    whole, unit = s.N * D * s.e, w.unit
    gathered = gather(w, whole, ordered) if s.sp else None
    out = Value(w.new(s.N * features * s.e), features)
    del gathered

    def back(saved: list[Memory], outs: list[Memory | None]) -> Gradients:
        (x,) = saved
        arriving = w.new(whole) if s.sp else None
        dx = w.new(whole)
        if s.sp:
            x = w.new(whole) if ordered else arriving
            _pieces = w.new(whole) if ordered else dx  # the collective holds them until it is done
            dx = w.new(whole / s.tp)
        assert x is not None
        weights = weight_gradients(w, unit + name, D * features * s.e, outs[0], x, features if bias else 0)
        return [dx], weights

    w.tape.node([x], [out], [x.there], back)
    return out


def row_linear(w: Work, x: Value, name: str, ordered: bool, bias: bool = False) -> Value:
    """From this rank's features to the sum over ranks: whole, or a piece of the sequence."""
    s, D, into = w.s, w.s.model.dim, x.features
    whole, unit = s.N * D * s.e, w.unit
    y = w.new(whole)
    out = Value(scatter(w, y, ordered) if s.sp else y)
    del y

    def back(saved: list[Memory], outs: list[Memory | None]) -> Gradients:
        dy = gather(w, whole, ordered) if s.sp else outs[0]
        dx = w.new(saved[0].size)
        return [dx], weight_gradients(w, unit + name, into * D * s.e, dy, saved[0], D if bias else 0)

    w.tape.node([x], [out], [x.there], back)
    return out


def vocabulary_embedding(w: Work, rows: float, name: str) -> Value:
    """Other ranks' tokens are zeros here; the sum over ranks puts them together."""
    s, unit = w.s, w.unit
    whole, table = s.N * s.model.dim * s.e, rows * s.model.dim * s.e
    local, elsewhere, x = w.new(8 * s.N), w.new(s.N), Value()
    w.tape.node([], [x], [local], lambda saved, outs: ([], [(unit + name, w.new(table))]))
    x.memory = w.new(whole)
    masked = Value()
    w.tape.node([x], [masked], [elsewhere], lambda saved, outs: ([w.new(whole)], []))
    masked.memory = w.new(whole)
    out = Value(scatter(w, masked.there) if s.sp else masked.there)
    w.tape.node([masked], [out], [], lambda saved, outs: ([gather(w, whole) if s.sp else outs[0]], []))
    return out


def vocabulary_output(w: Work, x: Value, rows: float, columns: float, name: str, sp: bool) -> Value:
    """The loss of this rank's part of the vocabulary: gradients are made in forward, and the input's summed there."""
    s, D = w.s, w.s.model.dim
    whole = gather(w, rows * D * s.e, ordered=False) if sp else x.there
    losses, dx = w.new(4 * rows), w.new(rows * D * s.e)
    dweight = logits = summed = None
    done = 0.0
    for size in chunks(rows, columns, s.e):
        done += size
        new = w.new(size * columns * s.e)
        mine, everyone = w.new(12 * size), w.new(12 * size * s.tp)
        del mine, everyone
        logits = new
        del new
        if sp and done >= rows:  # the sum runs while the last weight gradient is computed
            summed = scatter(w, dx, ordered=False)
        dweight = add_chunk(w, dweight, columns * D, size >= rows)
    del logits, losses, whole
    assert dweight is not None
    out = Value(w.new(4))
    pieces = [summed, dx] if summed else [dx]  # the collective holds the whole until backward
    del dx, summed
    finish = loss_backward(w, w.unit + name, columns * D * s.e, scaled=True)

    def back(saved: list[Memory], outs: list[Memory | None]) -> Gradients:
        return finish([saved[0], saved[-1]], outs)

    w.tape.node([x], [out], [*pieces, dweight], back)
    return out


def whole_first(w: Work, x: Value) -> Value:
    """The sequence gathered before BERT's head; backward takes a piece of what every rank has."""
    whole = w.s.N * w.s.model.dim * w.s.e
    out = Value(gather(w, whole))
    w.tape.node([x], [out], [], lambda saved, outs: ([outs[0]], []))
    return out
