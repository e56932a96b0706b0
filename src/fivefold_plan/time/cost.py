"""Prices single operations: computation on the device by tiles and waves, or by bytes and bandwidth; messages on the
network."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from operator import add
from statistics import NormalDist
from typing import NamedTuple

from fivefold.models.operations import Library, Matmul, Message, Operation
from fivefold.models.recomputation import region
from fivefold.precision import MASTER
from fivefold.precision.fp8 import TENSOR
from fivefold.schedules import timelines
from fivefold.schedules.chunks import row_spans, spans
from fivefold.schedules.ring_attention import slowest as slowest_turns
from fivefold.sharding.sequence import some_queries
from fivefold.sharding.units import ROWS
from fivefold_plan.cluster.devices import Device
from fivefold_plan.messages import communication
from fivefold_plan.messages.communication import exposed, held
from fivefold_plan.setting import Setting

# Tiles of a matmul's result that one processor computes at once, and the share of the best rate that each reaches.
# Smaller tiles read their factors more often.
TILES = (((256, 128), 1.0), ((128, 256), 1.0), ((128, 128), 0.92), ((64, 128), 0.75), ((64, 64), 0.6))
FILL = 128  # of the inner dim: what starting a tile and writing its result take
SHORT = 500  # tokens: attention reaches half its rate on sequences this long (arXiv 2307.08691, figure 5)


def products(p: Matmul, device: Device, dtype: str, e: float) -> tuple[float, float, float]:
    """Seconds of a matmul (m, k) (k, n) in forward, of its input gradient, and of its weight gradient."""
    m = p.m / p.chunks
    if device.measured:
        flops = 2 * p.m * p.n * p.k * p.count
        forward, first, second = (
            flops / device.measured.product(rows, p.n, p.k, dtype, role)
            for rows, role in ((m, "forward"), (m, "input"), (p.m, "weight"))
        )
        return forward, first, second
    return (
        p.chunks * matmul(Matmul(m, p.n, p.k, p.count, p.weight), device, dtype, e),
        p.chunks * matmul(Matmul(m, p.k, p.n, p.count, p.weight), device, dtype, e),
        matmul(Matmul(p.k, p.n, p.m, p.count, p.weight), device, dtype, e),
    )


@lru_cache(maxsize=100_000)
def matmul(product: Matmul, device: Device, dtype: str, e: float) -> float:
    """Seconds of `product.count` matmuls: whole waves of tiles over the processors, or the bytes moved."""
    m, n, k = product.m, product.n, product.k
    rate = device.peak[dtype] * device.multiplies(dtype) / device.units
    waves = math.inf
    for (rows, columns), share in TILES:
        tiles = math.ceil(m / rows) * math.ceil(n / columns) * product.count
        split = 1
        if tiles < device.units / 2:  # the inner dim is divided between processors
            split = min(math.floor(device.units / tiles), max(1, math.floor(k / 512)))
        wave = 2 * rows * columns * (k / split + FILL) / (rate * share)
        waves = min(waves, math.ceil(tiles * split / device.units) * wave)
    moved = product.count * (m * k + k * n + m * n) * e / (device.bandwidth * device.streaming)
    return max(waves, moved)


def attention(
    flops: float,
    tokens: float,
    head: float,
    device: Device,
    dtype: str,
    backward: bool,
    parts: int = 1,
    library: Library = "flash",
) -> float:
    """Seconds of fused attention with `flops` in forward (2.5 times as many in backward) over sequences of `tokens`.

    parts: ranks that attend with a part of the queries each. Heads narrower than 128 are slower, because they do
    as many exponentials for fewer FLOPs."""
    if device.measured:
        rate = device.measured.attended(tokens / parts, head, dtype, backward, parts > 1)
        return flops * (2.5 if backward else 1.0) / rate
    share = device.attends(library)[backward] * tokens / (tokens + SHORT) * min(1.0, 0.55 + 0.45 * head / 128)
    return flops * (2.5 if backward else 1.0) / (device.peak[dtype] * share)


def stream(size: float, device: Device, like: str = "copy", dtype: str = "", backward: bool = False) -> float:
    """Seconds to read and write `size` bytes of memory in an operation like this measured one."""
    if device.measured:
        return size / device.measured.stream(like, dtype, backward) if size else 0.0
    return size / (device.bandwidth * device.streaming)


@lru_cache
def slowest(devices: int, spread: float) -> float:
    """How much longer the slowest of so many equal devices takes than one on average: all wait for it. The expected
    largest of as many normal numbers (Blom's formula) times their standard deviation."""
    if devices == 1:
        return 1.0
    return 1.0 + spread * NormalDist().inv_cdf((devices - 0.375) / (devices + 0.25))


def random(numbers: float, device: Device, dtype: str = "fp32") -> float:
    """Seconds to draw numbers with Philox-4x32-10: about 20 integer operations each, at half the rate of fp32 FLOPs.
    A TPU's data sheet has no such rate: there they cost nothing."""
    if device.measured:
        return numbers / device.measured.stream("random", dtype, False) if numbers else 0.0
    return 20 * numbers / (device.peak.get(MASTER, math.inf) / 2)


class Cost(NamedTuple):  # not a dataclass, because a search makes millions
    """Seconds of a part of the model for one microbatch: forward, input gradient, weight gradient.

    sent_*: the part of each that waits for messages. rows_*: the part of these that waits for experts' rows, which a
    pipeline's pairs hide.
    """

    forward: float = 0.0
    input: float = 0.0
    weight: float = 0.0
    sent_forward: float = 0.0
    sent_backward: float = 0.0
    rows_forward: float = 0.0
    rows_backward: float = 0.0

    def __add__(self, other: Cost) -> Cost:  # pyright: ignore[reportIncompatibleMethodOverride]
        return Cost._make(map(add, self, other))

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
        """What the simulation of a pipeline takes (`stage_costs.pipeline_costs`)."""
        return self.forward, self.input, self.weight, self.rows_forward, self.rows_backward

    @property
    def alone(self) -> tuple[float, float]:
        """Seconds of forward and of backward without messages."""
        return self.forward - self.sent_forward, self.input - self.sent_backward + self.weight

    @property
    def sent(self) -> float:
        return self.sent_forward + self.sent_backward


def message(sent: Message, s: Setting, backward: bool) -> float:
    """Seconds of a message without overlap, in its calls if it is hidden or chunked."""
    if sent.hidden or sent.chunked:
        once = replace(sent, size=sent.size / sent.calls, hidden=False, chunked="")
        return sent.calls * message(once, s, backward)
    among = s.group(sent.axis)
    if sent.what == "ring":
        shares = slowest_turns(s.layout.cp, s.card.causal, backward, sent.reach)
        keys = sent.size / len(shares)
        return sum(communication.send(share * keys, among.nodes > 1, s.cluster) for share in shares)
    return communication.collective(sent.what, sent.size, among, s.cluster, s.dtype)


def forward_flops(op: Operation) -> float:
    """FLOPs of an operation in forward."""
    m = op.matmul
    return op.attention + (2 * m.count * m.m * m.n * m.k if m else 0.0)


def operation(op: Operation, s: Setting) -> Cost:
    device, e, dtype = s.cluster.device, s.sizes.e, s.dtype
    gap = 0.0 if device.measured else op.kernels * s.software.kernel  # or measured, of a whole block
    parts = s.layout.cp if some_queries(s.layout.cp, s.layout.cp_method) else 1
    within = bool(device.measured and op.attention and parts == 1)  # what it moves was measured with it
    forward = gap + (0.0 if within else stream(op.forward, device, op.rate, dtype))
    forward += random(op.random, device, dtype)
    inputs = gap + (0.0 if within else stream(op.backward, device, op.rate, dtype, True))
    weight = 0.0
    if op.matmul:
        both, delayed = s.fp8_scaling == TENSOR, s.software.delayed
        each = op.matmul.rounded(s.rounded_once[op.matmul.grouped], both or delayed)
        each = (*each[:2], 0.0) if delayed else each
        narrow = s.sizes.narrow and any(each)
        wide = not narrow or (op.matmul.grouped and not s.software.narrow_experts)
        rate = dtype if s.sizes.narrow and wide else s.rate
        rate = MASTER if op.matmul.wide and MASTER in device.peak else rate
        ahead, first, second = products(op.matmul, device, rate, e)
        if narrow:
            one, two, three = (stream(s.rounding_traffic * size, device, "copy", dtype) for size in each)
            ahead, first, second = ahead + one, first + two, second + three
        forward, inputs = forward + ahead, inputs + first
        if op.matmul.weight:
            weight += second + gap
        else:
            inputs += second + gap
    if op.attention:
        length, head = op.tokens or s.model.seq_len, s.model.head_width
        forward, inputs = (
            seconds
            + attention(op.attention, length, head, device, dtype, backward, parts, s.software.library)
            for seconds, backward in ((forward, False), (inputs, True))
        )
    inputs += forward * op.again
    ahead, back = forward, inputs  # seconds that hide messages
    first = last = 0.0  # their share that is done before the rest is cut into chunks
    if op.beside or op.behind:
        (ahead, first), (back, last) = (beside(op, s, backward) for backward in (False, True))
    sent_forward = _exposed(op.sent_forward, ahead, s, False, first) if op.sent_forward else 0.0
    sent_backward = _exposed(op.sent_backward, back, s, True, last) if op.sent_backward else 0.0
    rows_forward = rows_backward = 0.0
    if s.layout.ep > 1:
        rows_forward = _exposed([m for m in op.sent_forward if m.axis == ROWS.axis], ahead, s, False, first)
        rows_backward = _exposed([m for m in op.sent_backward if m.axis == ROWS.axis], back, s, True, last)
    forward, inputs = forward + sent_forward, inputs + sent_backward
    return Cost(forward, inputs, weight, sent_forward, sent_backward, rows_forward, rows_backward)


def beside(op: Operation, s: Setting, backward: bool) -> tuple[float, float]:
    """Seconds of the operations that hide an operation's messages, and the share of `op.beside` in them. A split
    backward computes weight gradients of linear layers later, in W, but those of experts at once."""

    def seconds(one: Operation) -> float:
        price, deferred = operation(one, s), s.layout.splits_backward
        late = deferred and not (one.matmul and one.matmul.grouped)
        return price.input + price.weight * (not late) if backward else price.forward

    first, rest = (sum(map(seconds, ops)) for ops in (op.beside, op.behind))
    return first + rest, first / (first + rest)


def parts_beside(
    one: Message, s: Setting, backward: bool, first: float = 0.0
) -> tuple[tuple[float, float], ...]:
    """Of each equal part of a message that overlaps with its operation: the shares of that which are done when it
    starts, and when it is waited for. first: see `beside`."""
    if one.chunked == "product":
        return spans(one.what == "all_gather", one.calls)
    if one.chunked:
        return row_spans(one.chunked == "results", one.calls, first, backward)
    turns = 1
    if one.what == "ring":
        turns = len(slowest_turns(s.layout.cp, s.card.causal, backward, one.reach))
    return tuple((turn / turns, (turn + 1) / turns) for turn in range(turns))


def _exposed(sent: Sequence[Message], work: float, s: Setting, backward: bool, first: float = 0.0) -> float:
    if not sent:
        return 0.0
    if any(one.chunked for one in sent):
        queued = []
        for one in sent:
            places, holds = parts_beside(one, s, backward, first), held(1.0, s.group(one.axis), s.cluster)
            each = message(one, s, backward) / len(places)
            queued += [
                timelines.Message(one.axis, "", each, work * a, work * b, "", holds) for a, b in places
            ]
        return timelines.simulate([timelines.Work("", "", work)], queued).seconds - work
    seconds = hidden = copying = 0.0
    for one in sent:
        takes = message(one, s, backward)
        if one.hidden:
            hidden, copying = hidden + takes, copying + held(takes, s.group(one.axis), s.cluster)
        else:
            seconds += takes
    return seconds + exposed(hidden, copying, work)


def part(ops: Sequence[Operation], s: Setting, recompute: str = "none") -> Cost:
    """Cost of several operations, with what backward recomputes; no weight gradient is deferred."""
    return together(ops, [operation(op, s) for op in ops], s, recompute, s.layout.tp > 1)


def together(
    ops: Sequence[Operation], costs: Sequence[Cost], s: Setting, recompute: str, saves_late: bool
) -> Cost:
    """Cost of several operations, with what backward recomputes (`models/recomputation.py`)."""
    again, total = region(recompute, s.software), Cost._make(map(sum, zip(*costs, strict=True)))
    repeated = resent = rows = 0.0
    for op, cost in zip(ops, costs, strict=True):
        if times := again.repeated(op, saves_late):
            repeated += times * (cost.forward - cost.sent_forward)
        if again.repeats_messages(op):
            resent += cost.sent_forward
            rows += cost.rows_forward
        elif again.collectives == "gathers" and s.layout.tp > 1 and any(m.hidden for m in op.sent_backward):
            # nothing runs beside
            tp = [m for m in op.sent_backward if m.axis == "tp"]
            alone = sum(message(m, s, True) for m in tp if m.hidden)
            alone += _exposed([m for m in tp if not m.hidden], cost.input - cost.sent_backward, s, True)
            resent += max(0.0, alone - cost.sent_backward)
    return total._replace(
        input=total.input + repeated + resent,
        sent_backward=total.sent_backward + resent,
        rows_backward=total.rows_backward + rows,
    )
