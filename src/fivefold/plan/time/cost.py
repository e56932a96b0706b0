"""Prices operations and parts of a model: computation on the device, messages on the network."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from operator import add
from typing import NamedTuple

from fivefold.models.operations import Message, Operation
from fivefold.models.recomputation import region
from fivefold.plan.messages import communication
from fivefold.plan.messages.communication import exposed, held
from fivefold.plan.setting import Setting
from fivefold.plan.time import rates
from fivefold.schedules.ring_attention import messages
from fivefold.sharding.units import ROWS


class Cost(NamedTuple):  # not a dataclass, because a search makes millions
    """Seconds of a part of the model for one microbatch: forward, input gradient, weight gradient.

    sent_*: the part of each that waits for messages. rows_*: the part of these that waits for experts' rows, which a
    pipeline's pairs hide. host: seconds to issue forward. Backward takes as long again.
    """

    forward: float = 0.0
    input: float = 0.0
    weight: float = 0.0
    sent_forward: float = 0.0
    sent_backward: float = 0.0
    host: float = 0.0
    rows_forward: float = 0.0
    rows_backward: float = 0.0

    def __add__(self, other: Cost) -> Cost:  # pyright: ignore[reportIncompatibleMethodOverride]
        return Cost._make(map(add, self, other))

    @property
    def bound(self) -> Cost:
        """The cost if issuing operations takes longer than computing them."""
        scale = max(1.0, self.host / (self.input + self.weight)) if self.input + self.weight else 1.0
        forward = max(self.forward, self.host)
        return self._replace(forward=forward, input=self.input * scale, weight=self.weight * scale)

    def slowed(self, factor: float) -> Cost:
        """The cost on a slower device. Messages take as long as before."""
        return self._replace(
            forward=(self.forward - self.sent_forward) * factor + self.sent_forward,
            input=(self.input - self.sent_backward) * factor + self.sent_backward,
            weight=self.weight * factor,
        )

    @property
    def seconds(self) -> float:
        return self.forward + self.input + self.weight

    @property
    def timed(self) -> tuple[float, float, float, float, float]:
        """What the simulation of a pipeline takes (`time.pipeline_costs`)."""
        return self.forward, self.input, self.weight, self.rows_forward, self.rows_backward

    @property
    def alone(self) -> tuple[float, float]:
        """Seconds of forward and of backward without messages."""
        return self.forward - self.sent_forward, self.input - self.sent_backward + self.weight

    @property
    def sent(self) -> float:
        return self.sent_forward + self.sent_backward


def message(sent: Message, s: Setting, backward: bool) -> float:
    """Seconds of a message without overlap, in its calls if it is hidden."""
    if sent.hidden:
        once = replace(sent, size=sent.size / sent.calls, hidden=False)
        return sent.calls * message(once, s, backward)
    among = s.group(sent.axis)
    if sent.what == "ring":
        turns = len(messages(s.layout.cp, 0, s.card.causal, backward))
        return turns * communication.send(sent.size / turns, among.nodes > 1, s.cluster)
    return communication.collective(sent.what, sent.size, among, s.cluster, s.dtype)


def operation(op: Operation, s: Setting) -> Cost:
    """Cost of an operation."""
    device, e, dtype = s.cluster.device, s.sizes.e, s.dtype
    gap = 0.0 if device.measured else op.kernels * s.software.kernel  # or measured, of a whole block
    ring = s.layout.cp if s.layout.cp_method == "ring" else 1
    within = bool(device.measured and op.attention and ring == 1)  # what attention moves was measured with it
    forward = gap + (0.0 if within else rates.stream(op.forward, device, op.rate, dtype))
    forward += rates.random(op.random, device, dtype)
    inputs = gap + (0.0 if within else rates.stream(op.backward, device, op.rate, dtype, True))
    weight = 0.0
    if op.matmul:
        narrow = s.sizes.narrow and any(op.matmul.rounded)
        rate = dtype if s.sizes.narrow and (op.matmul.grouped or not narrow) else s.rate
        ahead, first, second = rates.products(op.matmul, device, rate, e)
        if narrow:
            one, two, three = (rates.rounding(size, device, dtype, s.sizes) for size in op.matmul.rounded)
            ahead, first, second = ahead + one, first + two, second + three
        forward, inputs = forward + ahead, inputs + first
        if op.matmul.weight:
            weight += second + gap
        else:
            inputs += second + gap
    if op.attention:
        length, head = s.sizes.seen.tokens or s.model.seq_len, s.model.head_width
        forward += rates.attention(op.attention, length, head, device, dtype, False, ring)
        inputs += rates.attention(op.attention, length, head, device, dtype, True, ring)
    ahead, back = forward, inputs  # seconds that hide messages
    if op.beside:
        beside = [operation(one, s) for one in op.beside]
        ahead, back = sum(one.forward for one in beside), sum(one.input + one.weight for one in beside)
    sent_forward = _exposed(op.sent_forward, ahead, s, False) if op.sent_forward else 0.0
    sent_backward = _exposed(op.sent_backward, back, s, True) if op.sent_backward else 0.0
    rows = [[one for one in sent if one.axis == ROWS.axis] for sent in (op.sent_forward, op.sent_backward)]
    return Cost(
        forward + sent_forward,
        inputs + sent_backward,
        weight,
        sent_forward,
        sent_backward,
        s.software.host_tensor * (len(op.sent_forward) + len(op.sent_backward)) / 2,
        _exposed(rows[0], ahead, s, False) if rows[0] else 0.0,
        _exposed(rows[1], back, s, True) if rows[1] else 0.0,
    )


def _exposed(messages: Iterable[Message], beside: float, s: Setting, backward: bool) -> float:
    """Exposed seconds of messages."""
    seconds = hidden = copying = 0.0
    for one in messages:
        takes = message(one, s, backward)
        if one.hidden:
            hidden, copying = hidden + takes, copying + held(takes, s.group(one.axis), s.cluster)
        else:
            seconds += takes
    return seconds + exposed(hidden, copying, beside)


def part(ops: Sequence[Operation], s: Setting, recompute: str = "none") -> Cost:
    """Cost of several operations, with what backward recomputes; no weight gradient is deferred."""
    return together(ops, [operation(op, s) for op in ops], s, recompute, s.layout.tp > 1)


def together(
    ops: Sequence[Operation], costs: Sequence[Cost], s: Setting, recompute: str, saves_late: bool
) -> Cost:
    """Cost of several operations, with what backward recomputes (`models/recomputation.py`)."""
    again, total = region(recompute, s.software), Cost()
    repeated = resent = host = 0.0
    for op, cost in zip(ops, costs, strict=True):
        total += cost
        if times := again.repeated(op, saves_late):
            repeated += times * (cost.forward - cost.sent_forward)
            host += times * cost.host
        if again.repeats_messages(op):
            resent += cost.sent_forward
            total = total._replace(rows_backward=total.rows_backward + cost.rows_forward)
        elif again.collectives == "gathers":
            resent += _unhidden(op, cost, s)
    return total._replace(
        input=total.input + repeated + resent,
        sent_backward=total.sent_backward + resent,
        host=total.host + host / 2,
    )


def _unhidden(op: Operation, cost: Cost, s: Setting) -> float:
    """Seconds that an operation's hidden messages of backward take if nothing runs beside them."""
    if s.layout.tp == 1:
        return 0.0
    alone = sum(message(one, s, True) for one in op.sent_backward if one.axis == "tp")
    return max(0.0, alone - cost.sent_backward) if any(one.hidden for one in op.sent_backward) else 0.0
