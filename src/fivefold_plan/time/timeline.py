"""The planned timeline of a step: what a rank computes, and each message beside it, with the prices of `time.py`.

Operations, blocks and their messages are those that `time.step` adds up. `schedules/timelines.simulate` runs them, and
finds the seconds and the exposed messages of `time.step` (tests/test_timeline.py). There devices are equal. With one
that is slower, the simulation hides a little more: it also computes longer beside the messages.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from fivefold.models.operations import Operation
from fivefold.schedules.compression import NONE
from fivefold.schedules.timelines import Message, StepTimeline, Work, simulate
from fivefold.sharding.units import Sync
from fivefold_plan.memory import model_states
from fivefold_plan.messages import communication
from fivefold_plan.setting import Setting
from fivefold_plan.time import cost, offload, stage_costs, time
from fivefold_plan.time.cost import Cost

ONCE = "once"  # the queue of gathers and sums that run once per step: their order is that of `time.step`
EACH = "each"  # the queue of ZeRO's messages of every microbatch
BEGUN = 1e-9  # the share of a phase's work after which it has begun
SCATTER = "reduce_scatter, {} of {}"


def timeline(s: Setting, most: int | None = None) -> StepTimeline | None:
    """The step of a rank. most: microbatches to show, if not all. None with a pipeline, which has a timeline of its own
    (`pictures.timeline`)."""
    return None if s.layout.pp > 1 else _Step(s, most).timeline()


class _Each(NamedTuple):
    """ZeRO's messages of every microbatch, (axis, seconds), and seconds of copies for them."""

    gathers: tuple[tuple[str, float], ...] = ()
    scatters: tuple[tuple[str, float], ...] = ()
    into: float = 0.0
    out: float = 0.0


class _Part(NamedTuple):
    """A block, or what is before or behind the blocks. cost: with ZeRO's messages left out. repeated: seconds of
    messages that recomputation repeats."""

    name: str
    operations: list[tuple[Operation, Cost]]
    cost: Cost
    repeated: float = 0.0
    each: _Each = _Each()


class _Step:
    """Builds the lists of `simulate`. done: seconds of the work so far."""

    def __init__(self, s: Setting, most: int | None):
        self.s, self.work, self.sent, self.done = s, list[Work](), list[Message](), 0.0
        self.own = model_states.rank_elements(s)[0]
        self.shown = min(s.microbatches, most or s.microbatches)
        self.shared = stage_costs.parts(s)
        self.slower = 1.0  # than an average device
        self.outside = self._each(model_states.outside_blocks(s, 0))
        begin, end = ([(op, cost.operation(op, s)) for op in ops] for ops in (s.work.begin, s.work.end))
        blocks = [self._block(number) for number in range(s.model.blocks)]
        ends = _Part("embedding", begin, self.shared.begin), _Part("head", end, self.shared.end)
        self.parts = [ends[0], *blocks, ends[1]]
        # of messages within the model
        self.axis = "tp" if s.layout.tp > 1 else "cp" if s.layout.cp > 1 else "ep"
        self.whole = stage_costs.stage_costs(s, self.shared)[0]
        self.loads = offload.loads(s, self.own)

    def timeline(self) -> StepTimeline:
        once = [one for one in stage_costs.synced(self.own, self.s) if not one[0].each]
        gathers = [one for one in once if one[0].what == "gather"]
        self.compute("other", "copies", sum(copied for _, _, copied in gathers))
        # Python between the parts, and sums of gradients outside of blocks: what a stage costs besides its parts
        whole, placed = self.whole, sum((part.cost for part in self.parts), Cost())
        slow = cost.slowest(self.s.layout.ranks, self.s.cluster.device.spread)
        each = [self.outside, *(part.each for part in self.parts)]
        into, out = sum(one.into for one in each), sum(one.out for one in each)
        forward = (whole.forward - whole.sent_forward) / slow - placed.forward + placed.sent_forward - into
        backward = (whole.input - whole.sent_backward + whole.weight) / slow
        backward -= placed.input + placed.weight - placed.sent_backward + into + out
        self.slower = slow * self.s.cluster.oversubscription
        self._load("update", self.loads.alone, self.done)
        first = self.done
        for number in range(self.shown):
            first = self.done
            self._update("forward" if number == 0 else "")
            self.compute("forward", "host", max(0.0, forward))
            queue = EACH if number else ONCE
            self._zero("all_gather, outside of blocks", self.outside.gathers, queue=queue)
            self.compute("forward", "copies", self.outside.into)
            for index in range(len(self.parts)):
                self._phase(index, backward=False)
            self._load("forward", self.loads.forward[number > 0], first)
            if number == 0:
                pieces = [("all_gather, {} of {}", sync.group, seconds) for sync, seconds, _ in gathers]
                self._spread(pieces, first, before=True)
            first = self.done
            self._zero("all_gather, outside of blocks", self.outside.gathers)
            self.compute("backward", "copies", self.outside.into + self.outside.out)
            for index in reversed(range(len(self.parts))):
                self._phase(index, backward=True)
            self._zero("reduce_scatter, outside of blocks", self.outside.scatters)
            self.compute("backward", "host", max(0.0, backward))
            self._update("backward" if number == self.shown - 1 else "")
            self._load("backward", self.loads.backward[number < self.shown - 1], first)
        self.slower = 1.0
        self._ending([one for one in once if one[0].what != "gather"], first)
        return simulate(self.work, self.sent)

    def compute(self, kind: str, name: str, seconds: float) -> None:
        if seconds > 0:
            self.work.append(Work(kind, name, seconds * self.slower))
            self.done += seconds * self.slower

    def _update(self, phase: str) -> None:
        if phase == self.loads.update:
            self.compute("update", "update", time.on_device(self.s, self.own, 0))

    def _load(self, phase: str, load: Mapping[str, float], first: float) -> None:
        """Adds what runs on the lanes of offload beside the work since `first`. It begins with that work, not while the
        rank still waits for the phase before."""
        begins = first + BEGUN * (self.done - first)
        for lane, seconds in load.items():
            self.sent.append(Message(lane, f"{lane} of {phase}", seconds, begins, self.done))

    def _add(
        self, lane: str, name: str, seconds: float, at: tuple[float, float] | None = None, queue: str = ""
    ) -> None:
        """Adds a message. at: when it is ready, and needed; None: nothing overlaps with it."""
        ready, needed = at or (self.done, self.done)
        held = communication.held(1.0, self.s.group(lane), self.s.cluster)
        self.sent.append(Message(lane, name, seconds, ready, needed, queue, held))

    def _block(self, number: int) -> _Part:
        s, second, mode = self.s, self.s.card.second[number], self.s.recompute[number]
        whole = stage_costs.computed(s, second, self.shared, mode)
        own = model_states.elements(s.model, s.layout).blocks[number]
        operations = list(zip(*self.shared.operations[s.kind(second, mode)], strict=True))
        again = self.shared.block(second, s, mode).sent_backward - sum(c.sent_backward for _, c in operations)
        whole += stage_costs.accumulate(own.computes, s)
        return _Part(f"blocks.{number}", operations, whole, again, self._each(own))

    def _each(self, own: model_states.Elements) -> _Each:
        synced = [message for message in stage_costs.synced(own, self.s) if message[0].each]
        ways = [[sent for sent in synced if (sent[0].what == "gather") is way] for way in (True, False)]
        gathers, scatters = (tuple((sync.group, seconds) for sync, seconds, _ in way) for way in ways)
        return _Each(gathers, scatters, *(sum(copied for *_, copied in way) for way in ways))

    def _phase(self, index: int, backward: bool) -> None:
        """A part's forward or backward: its operations with their messages, and ZeRO's messages beside it. Backward
        begins with recomputation, the host's time and sums."""
        part = self.parts[index]
        whole, each, kind = part.cost, part.each, "backward" if backward else "forward"
        during, ways = f"{part.name} {kind}", [_way(price, backward) for _, price in part.operations]
        self.compute(kind, part.name, each.into + each.out * backward)
        sent, left, _ = _way(whole, backward)
        first, before = self.done, sum(waits for waits, *_ in ways) + part.repeated * backward
        scale = sent / before if before else 1.0
        if backward:
            again = max(0.0, left - sum(seconds for _, seconds, _ in ways))
            self.compute(kind, part.name, again)
            left -= again
            self._add(self.axis, f"messages of forward again, {during}", part.repeated * scale)
        pairs = list(zip(part.operations, ways, strict=True))
        for (op, _), (_, seconds, weight) in reversed(pairs) if backward else pairs:
            began, now = self.done, min(left, seconds - weight)
            self.compute(kind, part.name, now)
            self._model(op, began, scale, during, backward)
            later = min(left - now, weight)
            self.compute(kind, part.name, later)
            left -= now + later
        if not backward:
            self.compute(kind, part.name, left)
        if not before:
            self._add(self.axis, f"waits, {during}", sent)
        self._zero(f"all_gather, {self._near(index + (-1 if backward else 1))}", each.gathers, first)
        if backward and self.s.software.overlap_scatter:
            self._zero(f"reduce_scatter, {self._near(index + 1)}", each.scatters, first)
        elif backward:
            self._zero(f"reduce_scatter, {part.name}", each.scatters)

    def _near(self, index: int) -> str:
        """The block at this index among the parts, or the one nearest to it."""
        return self.parts[min(max(index, 1), len(self.parts) - 2)].name

    def _model(self, op: Operation, began: float, scale: float, during: str, backward: bool) -> None:
        """Adds the messages of an operation that is just computed: hidden ones beside it, others behind it. Those that
        other operations hide (`op.beside`) run beside these: in forward they come before it, in backward behind it."""
        sent = op.sent_backward if backward else op.sent_forward
        first, last, share = began, self.done, 0.0
        if op.beside or op.behind:
            wide, share = cost.beside(op, self.s, backward)
            wide *= self.slower
            first, last = (self.done, self.done + wide) if backward else (began - wide, began)
        for one in sorted(sent, key=lambda one: one.hidden == (bool(op.beside) and backward)):
            seconds, name = scale * cost.message(one, self.s, backward), str(one.what)
            places = cost.parts_beside(one, self.s, backward, share)
            for turn, (ready, needed) in enumerate(places, 1):
                at = first + (last - first) * ready, first + (last - first) * needed
                if len(places) > 1:
                    name = f"turn {turn}" if one.what == "ring" else f"{one.what}, {turn} of {len(places)}"
                overlaps = one.hidden or bool(one.chunked)
                self._add(one.axis, f"{name}, {during}", seconds / len(places), at if overlaps else None)

    def _zero(
        self, name: str, sent: tuple[tuple[str, float], ...], first: float | None = None, queue: str = EACH
    ) -> None:
        """Adds messages of ZeRO beside the part that began at `first`. None: nothing overlaps with them."""
        for axis, seconds in sent:
            ready = first if self.s.software.overlap_data and first is not None else self.done
            self._add(axis, name, seconds, (ready, self.done), queue)

    def _spread(
        self, sent: list[tuple[str, str, float]], first: float, before: bool, pieces: int = 0
    ) -> None:
        """Adds messages, given as (name, axis, seconds), in pieces over the work since `first`. Each is needed before
        its part of it; or else made ready by it, and needed at the end."""
        pieces = pieces or max(1, self.s.model.layers)
        pieces = pieces if self.s.software.overlap_data else 1
        whole = self.done - first
        for number in range(pieces):
            ready, needed = first, first + whole * number / pieces
            if not before:
                ready, needed = first + whole * (number + 1) / pieces, self.done
            for name, axis, seconds in sent:
                alone = name == SCATTER and not self.s.software.overlap_scatter
                until, queue = (ready, "") if alone else (needed, ONCE)
                self._add(axis, name.format(number + 1, pieces), seconds / pieces, (ready, until), queue)

    def _ending(self, once: list[tuple[Sync, float, float]], first: float) -> None:
        """Adds the sums of gradients that the last backward, since `first`, makes ready, and what follows them."""
        s, pieces = self.s, stage_costs.summed_pieces(self.s, self.own)
        if s.layout.compress != NONE:
            summed, later, encoding = stage_costs.compressed_sums(s, self.own)
            self._spread([("bucket {} of {}", "batch", summed)], first, False, pieces)
            self._add("batch", "later messages", later, queue=ONCE)
            self.compute("other", "encoding", encoding)
        else:
            names = {"sum": "bucket {} of {}" if not s.layout.zero else "all_reduce, {} of {}"}
            sent = [(names.get(sync.what, SCATTER), sync.group, seconds) for sync, seconds, _ in once]
            self._spread(sent, first, False, pieces)
            self.compute("other", "copies", sum(copied for *_, copied in once))
        tensor, tied = stage_costs.shared_sums(s, 0)
        self._add("tp", "sums of shared gradients", tensor)
        self._add("pp", "sum of the tied embedding", tied)
        self._update("alone")
        self.compute("other", "fixed", time.fixed(s))
        self._add(
            "replica_groups", "outer step, on average", stage_costs.outer_seconds(s) / s.replica_groups.every
        )


def _way(price: Cost, backward: bool) -> tuple[float, float, float]:
    """(seconds of messages, seconds of computing, the weight gradients' part of these) of forward or backward."""
    if backward:
        return price.sent_backward, price.alone[1], price.weight
    return price.sent_forward, price.alone[0], 0.0
