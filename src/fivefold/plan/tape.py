"""Tensors without numbers: what autograd makes, keeps and frees, in bytes.

The planner goes through a step with these as the trainer goes through it with tensors. A `Memory` is there as long as
something refers to it, as a tensor's is: so functions here have the local variables of those that they stand for. What
backward does is a list of nodes, gone through from the last to the first, as the engine does.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from itertools import count

CATEGORIES: tuple[str, ...] = ("params", "gradients", "optimizer", "activations", "buffers")


class Meter:
    """Bytes that are there now, by category, and at the moment when most were."""

    def __init__(self) -> None:
        self.now = dict.fromkeys(CATEGORIES, 0)
        self.total = self.peak = 0
        self.at_peak = dict(self.now)

    def change(self, kind: str, size: int) -> None:
        self.now[kind] += size
        self.total += size
        if self.total > self.peak:
            self.peak, self.at_peak = self.total, dict(self.now)


class Memory:
    """Some bytes, until nothing refers to them."""

    __slots__ = ("kind", "meter", "size")

    def __init__(self, meter: Meter, size: float, kind: str):
        self.meter, self.size, self.kind = meter, int(size), kind
        meter.change(kind, self.size)

    def __del__(self) -> None:
        self.meter.change(self.kind, -self.size)

    def becomes(self, kind: str) -> Memory:
        """The same bytes, counted in another category."""
        self.meter.now[self.kind] -= self.size
        self.meter.now[kind] += self.size
        self.kind = kind
        return self


class Value:
    """A tensor that autograd follows: its memory, and its place in the graph. features: the size of its last dim; 0: D,
    as on the residual stream."""

    __slots__ = ("features", "key", "memory")
    _keys = count()

    def __init__(self, memory: Memory | None = None, features: float = 0):
        self.memory, self.features, self.key = memory, features, next(self._keys)

    @property
    def size(self) -> int:
        return self.there.size

    @property
    def there(self) -> Memory:
        assert self.memory is not None
        return self.memory


Weight = tuple[str, Memory]
"""A parameter's name, and its gradient."""
Back = Callable[[list[Memory], list[Memory | None]], tuple[Sequence[Memory | None], Sequence[Weight]]]
"""What was saved, and the gradients of a node's results -> the gradients of its inputs, and of weights."""


class Stop(Exception):
    """All that backward needs has been computed again."""


class Checkpoint:
    """A part of forward of which only the input is kept. run: computes it again."""

    def __init__(self, run: Callable[[], object]):
        self.run, self.saved = run, 0
        self.again: list[list[Memory]] | None = None


class Node:
    """A step of backward. ins, outs: keys of values."""

    __slots__ = ("back", "checkpoint", "ins", "number", "outs", "saved")

    def __init__(self, ins: list[int], outs: list[int], back: Back, saved: list[Memory]):
        self.ins, self.outs, self.back, self.saved = ins, outs, back, saved
        self.checkpoint: Checkpoint | None = None
        self.number = 0  # of those that save something in a checkpoint


class Tape:
    """The graph of one forward. sink: gets the gradients of weights. twice: the weight that is used twice, whose
    gradients are added before it gets them."""

    def __init__(self, meter: Meter, sink: Callable[[str, Memory], None], twice: str = ""):
        self.meter, self.sink, self.twice = meter, sink, twice
        self.first: Memory | None = None  # of the two
        self.nodes: list[Node] = []
        self.inside: Checkpoint | None = None
        self.later: list[tuple[str, float, Memory, Memory]] | None = None
        """Where weight gradients are left for later: (name, bytes, gradient of the result, input)."""

    def new(self, size: float) -> Memory:
        """Workspace, until it is saved."""
        return Memory(self.meter, size, "buffers")

    def node(
        self, ins: Sequence[Value], outs: Sequence[Value], saved: Sequence[Memory | None], back: Back
    ) -> None:
        """Puts a step of backward on the tape. Call it when the real operation saves: those of PyTorch before they
        compute, own functions after it."""
        kept = [memory for memory in saved if memory is not None]
        for memory in kept:
            memory.becomes("activations")
        point = self.inside
        if point is not None and point.again is not None:  # computing again
            if kept:
                point.again.append(kept)
                if len(point.again) == point.saved:
                    raise Stop
            return
        found = Node([v.key for v in ins], [v.key for v in outs], back, kept)
        if point is not None and kept:
            found.checkpoint, found.number, found.saved = point, point.saved, []
            point.saved += 1
        self.nodes.append(found)

    def checkpoint(self, function: Callable[..., Value], *inputs: Value) -> Value:
        """function(*inputs), of which only the inputs are kept."""
        point = Checkpoint(lambda: function(*inputs))
        self.inside = point
        out = function(*inputs)
        self.inside = None
        return out

    def backward(self, result: Value, gradient: Memory) -> dict[int, Memory]:
        """Goes back from a result. Returns the gradients of values that nothing here has made, by key."""
        gradients = {result.key: gradient}
        del gradient
        while self.nodes:
            self._step(self.nodes.pop(), gradients)
        return gradients

    def _step(self, node: Node, gradients: dict[int, Memory]) -> None:
        outs = [gradients.pop(key, None) for key in node.outs]
        if not any(outs):
            return
        saved = self._saved(node)
        ins, weights = node.back(saved, outs)
        del saved[:], outs[:]
        node.checkpoint = None
        for name, gradient in weights:
            if name == self.twice and self.first is None:
                self.first = gradient
            else:
                self.sink(name, gradient)
                self.first = None if name == self.twice else self.first
        weights = ()
        for key, memory in zip(node.ins, ins, strict=True):
            if memory is not None:
                self._add(gradients, key, memory)

    def _saved(self, node: Node) -> list[Memory]:
        point = node.checkpoint
        if point is None:
            saved, node.saved = node.saved, []
            return saved
        if point.again is None:
            point.again, before = [], self.inside
            self.inside = point
            with contextlib.suppress(Stop):
                point.run()
            self.inside = before
        saved, point.again[node.number] = point.again[node.number], []
        return saved

    def _add(self, gradients: dict[int, Memory], key: int, memory: Memory) -> None:
        """Where a value is used twice its gradients are added: in place where nothing else refers to the first."""
        first = gradients.get(key)
        if first is None:
            gradients[key] = memory
        elif sys.getrefcount(first) > 3:
            gradients[key] = self.new(first.size)
