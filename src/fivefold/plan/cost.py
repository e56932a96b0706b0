"""Seconds of single operations and of parts of a model: computing priced on the device, messages on the network."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fivefold.layout import Layout
from fivefold.plan import communication, rates
from fivefold.plan.clusters import Cluster
from fivefold.plan.communication import exposed, group
from fivefold.plan.operations import Message, Operation, Sizes
from fivefold.plan.software import Software
from fivefold.recipe.schema import ModelSection


@dataclass(frozen=True)
class Cost:
    """Seconds of a part of the model for one microbatch: forward, gradient of the input, gradient of the weights; each
    with what of it is waiting for messages. host: seconds to issue forward, and as long again for backward."""

    forward: float = 0.0
    input: float = 0.0
    weight: float = 0.0
    sent_forward: float = 0.0
    sent_backward: float = 0.0
    host: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(  # field by field: a search adds millions
            self.forward + other.forward,
            self.input + other.input,
            self.weight + other.weight,
            self.sent_forward + other.sent_forward,
            self.sent_backward + other.sent_backward,
            self.host + other.host,
        )

    def times(self, count: float) -> Cost:
        return Cost(
            count * self.forward,
            count * self.input,
            count * self.weight,
            count * self.sent_forward,
            count * self.sent_backward,
            count * self.host,
        )

    @property
    def bound(self) -> Cost:
        """The same where the processor issues work more slowly than the device does it."""
        scale = max(1.0, self.host / (self.input + self.weight)) if self.input + self.weight else 1.0
        forward = max(self.forward, self.host)
        return Cost(
            forward, self.input * scale, self.weight * scale, self.sent_forward, self.sent_backward, self.host
        )

    def slowed(self, factor: float) -> Cost:
        """The same on a slower device; messages take as long as before."""
        return Cost(
            (self.forward - self.sent_forward) * factor + self.sent_forward,
            (self.input - self.sent_backward) * factor + self.sent_backward,
            self.weight * factor,
            self.sent_forward,
            self.sent_backward,
            self.host,
        )

    @property
    def seconds(self) -> float:
        return self.forward + self.input + self.weight

    @property
    def sent(self) -> float:
        return self.sent_forward + self.sent_backward


@dataclass(frozen=True)
class Setting:
    """All that a price depends on."""

    model: ModelSection
    layout: Layout
    cluster: Cluster
    software: Software
    sizes: Sizes
    dtype: str
    microbatches: int


def message(sent: Message, s: Setting) -> float:
    """Seconds of a collective, were nothing beside it."""
    if sent.what == "ring":  # from neighbour to neighbour, cp - 1 times
        hops = s.layout.cp - 1
        crosses = group(s.layout, s.cluster, "cp").nodes > 1
        return hops * communication.send(sent.size / hops, crosses, s.cluster)
    price = getattr(communication, sent.what)
    return price(sent.size, group(s.layout, s.cluster, sent.axis), s.cluster, s.dtype)


def operation(op: Operation, s: Setting) -> Cost:
    """Seconds of an operation."""
    device, e, dtype = s.cluster.device, s.sizes.e, s.dtype
    gap = (
        0.0 if device.measured else op.kernels * s.software.kernel
    )  # a measured block's are counted as a whole
    ring = s.layout.cp if s.layout.cp_method == "ring" else 1
    within = bool(device.measured and op.attention and ring == 1)  # what attention moves was measured with it
    forward = gap + (0.0 if within else rates.stream(op.forward, device, op.name, dtype))
    forward += rates.random(op.random, device, dtype)
    inputs = gap + (0.0 if within else rates.stream(op.backward, device, op.name, dtype, True))
    weight = 0.0
    if op.matmul:
        ahead, first, second = rates.products(op.matmul, device, dtype, e)
        forward, inputs = forward + ahead, inputs + first
        if op.matmul.weight:
            weight += second + gap
        else:
            inputs += second + gap
    if op.attention:
        model = s.model
        length, head = model.seq_len, model.dim / model.heads
        forward += rates.attention(op.attention, length, head, device, dtype, False, ring)
        inputs += rates.attention(op.attention, length, head, device, dtype, True, ring)
    sent_forward = _exposed(op.sent_forward, forward, s)
    sent_backward = _exposed(op.sent_backward, inputs, s)
    return Cost(
        forward + sent_forward,
        inputs + sent_backward,
        weight,
        sent_forward,
        sent_backward,
        s.software.host_tensor * (len(op.sent_forward) + len(op.sent_backward)) / 2,
    )


def _exposed(messages: Iterable[Message], beside: float, s: Setting) -> float:
    """Seconds of messages that nothing hides."""
    hidden = sum(message(m, s) for m in messages if m.hidden)
    return sum(message(m, s) for m in messages if not m.hidden) + exposed(hidden, beside, s.cluster)


def part(ops: Sequence[Operation], s: Setting, recompute: str = "none") -> Cost:
    """Seconds of several operations, with what backward computes again."""
    return together(ops, [operation(op, s) for op in ops], s, recompute)


def together(ops: Sequence[Operation], costs: Sequence[Cost], s: Setting, recompute: str) -> Cost:
    total = sum(costs, Cost())
    again = Cost()
    for op, cost in zip(ops, costs, strict=True):
        if times := repeated(op, recompute, s):
            again += cost.times(times)
    return total + Cost(0, again.forward, 0, 0, again.sent_forward, again.host / 2)


def repeated(op: Operation, recompute: str, s: Setting) -> float:
    """How often forward is repeated in backward, on average."""
    software = s.software
    if recompute != "selective":
        return 1.0 if recompute == "full" else 0.0
    if software.selective == "sublayer" and s.layout.tp > 1 and op.name in ("attention out", "down"):
        return 1.0  # a layer that communicates saves its input after its product only (parallel/recompute.py)
    if software.selective == "operations":
        return 0.0 if op.attention else 0.5 if op.matmul else 1.0
    return 1.0 if op.part == "core" or (op.part == "inner" and software.selective == "sublayer") else 0.0
