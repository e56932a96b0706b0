"""Prices operations and parts of a model: computation on the device, messages on the network."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from fivefold.models.card import card_of
from fivefold.models.operations import Message, Operation, Sizes
from fivefold.models.recomputation import region
from fivefold.models.section import ModelSection
from fivefold.plan.cluster.devices import Cluster
from fivefold.plan.messages import communication
from fivefold.plan.messages.communication import Group, exposed, group, held
from fivefold.plan.software import Software, States
from fivefold.plan.time import rates
from fivefold.precision import PRECISIONS
from fivefold.schedules.ring_attention import messages
from fivefold.sharding.layout import Layout
from fivefold.sharding.regions import ROWS
from fivefold.sharding.sites import ONE_SITE, Sites


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
        return Cost(
            self.forward + other.forward,
            self.input + other.input,
            self.weight + other.weight,
            self.sent_forward + other.sent_forward,
            self.sent_backward + other.sent_backward,
            self.host + other.host,
            self.rows_forward + other.rows_forward,
            self.rows_backward + other.rows_backward,
        )

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


@dataclass(frozen=True)
class Setting:
    """Everything that a price depends on. layout: of one site, where several train apart. cluster: of all of them.
    microbatches: of the rank that has most. sequences: of the global batch, if ranks have unequally many."""

    model: ModelSection
    layout: Layout
    cluster: Cluster
    software: Software
    sizes: Sizes
    mode: str
    microbatches: int
    sites: Sites = ONE_SITE
    sequences: int | None = None

    @property
    def dtype(self) -> str:
        """The dtype of activations."""
        return PRECISIONS[self.mode].working

    @property
    def rate(self) -> str:
        """The dtype of products, by which the device's peak is listed."""
        return PRECISIONS[self.mode].rate_on(self.cluster.device.peak)

    @property
    def states(self) -> States:
        """Bytes per parameter."""
        return self.software.states[self.mode]

    def group(self, axis: str) -> Group:
        """The ranks of an axis, "sites" included."""
        if axis == "sites":
            return Group(
                self.sites.count, max(1, min(self.sites.count, self.cluster.per_node // self.layout.ranks))
            )
        return group(self.layout, self.cluster, axis)


def message(sent: Message, s: Setting, backward: bool) -> float:
    """Seconds of a collective without overlap."""
    if sent.what == "ring":
        crosses = group(s.layout, s.cluster, "cp").nodes > 1
        turns = len(messages(s.layout.cp, 0, card_of(s.model).causal, backward))
        return turns * communication.send(sent.size / turns, crosses, s.cluster)
    price = getattr(communication, sent.what)
    return price(sent.size, group(s.layout, s.cluster, sent.axis), s.cluster, s.dtype)


def operation(op: Operation, s: Setting) -> Cost:
    """Cost of an operation."""
    device, e, dtype = s.cluster.device, s.sizes.e, s.dtype
    gap = (
        0.0 if device.measured else op.kernels * s.software.kernel
    )  # a measured block's are counted as a whole
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
        model = s.model
        length, head = s.sizes.seen.tokens or model.seq_len, model.head_width
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
        if one.hidden:
            takes = one.calls * message(replace(one, size=one.size / one.calls), s, backward)
            hidden, copying = hidden + takes, copying + held(takes, s.group(one.axis), s.cluster)
        else:
            seconds += message(one, s, backward)
    return seconds + exposed(hidden, copying, beside)


def part(ops: Sequence[Operation], s: Setting, recompute: str = "none") -> Cost:
    """Cost of several operations, with what backward recomputes; no weight gradient is deferred."""
    return together(ops, [operation(op, s) for op in ops], s, recompute, s.layout.tp > 1)


def together(
    ops: Sequence[Operation], costs: Sequence[Cost], s: Setting, recompute: str, saves_late: bool
) -> Cost:
    """Cost of several operations, with what backward recomputes (`models/recomputation.py`)."""
    again = region(recompute, s.software)
    forward = inputs = weight = sent_forward = sent_backward = host = 0.0
    repeated = resent = host_again = rows_forward = rows_backward = 0.0
    for op, cost in zip(ops, costs, strict=True):
        forward, inputs, weight = forward + cost.forward, inputs + cost.input, weight + cost.weight
        sent_forward, sent_backward = sent_forward + cost.sent_forward, sent_backward + cost.sent_backward
        host += cost.host
        rows_forward, rows_backward = rows_forward + cost.rows_forward, rows_backward + cost.rows_backward
        if times := again.repeated(op, saves_late):
            repeated += times * (cost.forward - cost.sent_forward)
            host_again += times * cost.host
        if again.repeats_messages(op):
            resent, rows_backward = resent + cost.sent_forward, rows_backward + cost.rows_forward
        elif again.collectives == "gathers":
            resent += _unhidden(op, cost, s)
    return Cost(
        forward,
        inputs + repeated + resent,
        weight,
        sent_forward,
        sent_backward + resent,
        host + host_again / 2,
        rows_forward,
        rows_backward,
    )


def _unhidden(op: Operation, cost: Cost, s: Setting) -> float:
    """Seconds that an operation's hidden messages of backward take if nothing runs beside them."""
    if s.layout.tp == 1:
        return 0.0
    alone = sum(message(one, s, True) for one in op.sent_backward if one.axis == "tp")
    return max(0.0, alone - cost.sent_backward) if any(one.hidden for one in op.sent_backward) else 0.0
