"""Weights, gradients and optimizer states of a rank as what they do with memory in a step: whole on every rank
(precision/weights.py, parallel/data.py), or shared by FSDP2 (parallel/zero.py)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from fivefold.plan.eager import Work
from fivefold.plan.tape import Memory, Meter, Value

Forward = Callable[[Value], Value]


class Whole:
    """Everything on every rank, in flat buffers; a gradient is added to its sum, and freed, as soon as it is there."""

    def __init__(self, meter: Meter, elements: float, parameters: int, e: float, copies: float):
        """copies: bytes an element of gradients that are sent in another dtype: they are kept until the next step."""
        self.there = [
            Memory(meter, elements * (4 if e == 4 else 4 + e), "params"),
            Memory(meter, elements * 4, "gradients"),
            Memory(meter, elements * 8 + 4 * parameters, "optimizer"),
            Memory(meter, elements * copies, "buffers"),
        ]


@dataclass
class Unit:
    """Weights that are gathered and scattered together, of `padded` elements over `ranks`; kept: those of this rank's
    own rows. across: elements of those that are not divided along their first dim, by name: what is gathered or
    scattered of them is laid out anew."""

    padded: float
    ranks: int
    kept: float
    parameters: int
    across: dict[str, int] = field(default_factory=dict)
    arriving: Memory | None = None
    gathered: Memory | None = None
    gradients: dict[str, Memory] = field(default_factory=dict)
    sums: dict[str, Memory] = field(default_factory=dict)  # over microbatches, of whole gradients, in fp32
    shard: Memory | None = None  # of the gradient
    partial: Memory | None = None  # of a shard that replicas have not summed yet
    own: list[Memory] = field(default_factory=list)


class Shared:
    """The units of one stage in the order of forward, the first of which is what the stage has besides blocks."""

    def __init__(
        self,
        meter: Meter,
        units: dict[str, Unit],
        e: float,
        zero: int,
        replicas: int,
        reduce: float,
        defer: bool,
    ):
        self.meter, self.units, self.order = meter, units, list(units)
        self.e, self.zero, self.replicas, self.reduce, self.defer = e, zero, replicas, reduce, defer
        self.last = False  # whether this backward is the last of the step
        self.scattering: Memory | None = None  # input of the latest reduce-scatter
        for unit in units.values():
            unit.own = [
                Memory(meter, 4 * unit.kept, "params"),
                Memory(meter, 8 * unit.kept + 4 * unit.parameters, "optimizer"),
            ]

    def around(
        self, w: Work, name: str, x: Value, forward: Forward, again: bool, gradient: bool = True
    ) -> Value:
        """again: forward is computed again, in backward. gradient: x has one, and so tells when backward is done."""
        if name not in self.units:
            return forward(x)
        self._unshard(name)
        self._wait(name)
        self._prefetch(name, 1)
        inside = x
        if gradient:
            inside = Value(x.memory, x.features)
            w.tape.node([x], [inside], [], lambda saved, outs: (self._after_backward(name, outs), []))
        del x
        y = forward(inside)
        if self.zero == 3 and not again:
            self.units[name].gathered = None
        out = Value(y.memory, y.features)
        w.tape.node([y], [out], [], lambda saved, outs: (self._before_backward(name, outs), []))
        return out

    def finish_backward(self) -> None:
        """What comes when the whole backward is done."""
        for name in self.order:
            self.after_backward(name)
        self.scattering = None

    def sink(self, unit: str, name: str, gradient: Memory) -> None:
        found = self.units[unit].gradients
        if name not in found:
            found[name] = gradient.becomes("gradients" if self.defer else "buffers")

    def _unshard(self, name: str) -> None:
        unit = self.units[name]
        if unit.arriving or unit.gathered or not unit.padded:
            return
        cast = Memory(self.meter, self.e * unit.padded / unit.ranks, "buffers") if self.e != 4 else None
        unit.arriving = Memory(self.meter, self.e * unit.padded, "buffers")
        del cast

    def _wait(self, name: str) -> None:
        unit = self.units[name]
        if unit.arriving:
            kind = "buffers" if self.zero == 3 else "params"
            unit.gathered = Memory(self.meter, self.e * unit.padded, kind)
            apart = Memory(self.meter, self.e * sum(unit.across.values()), "buffers")
            del apart
            unit.arriving = None

    def _prefetch(self, name: str, step: int) -> None:
        """The next block's (its experts' with it), while this one computes."""
        here = self.order.index(name)
        if name.endswith("experts"):
            return
        blocks = [n for n in self.order if not n.endswith("experts")]
        at = blocks.index(name) + step
        if not 0 <= at < len(blocks) or (step < 0 and at == 0 and here > 0):
            return
        for other in self.order:
            if other in (blocks[at], f"{blocks[at]} experts"):
                self._unshard(other)

    def _before_backward(self, name: str, outs: list[Memory | None]) -> list[Memory | None]:
        self._unshard(name)
        self._wait(name)
        if name == self.order[0]:
            blocks = [n for n in self.order[1:] if not n.endswith("experts")]
            for other in self.order if blocks else ():
                if other in (blocks[-1], f"{blocks[-1]} experts"):
                    self._unshard(other)
        else:
            self._prefetch(name, -1)
        return [*outs]

    def _after_backward(self, name: str, outs: list[Memory | None]) -> list[Memory | None]:
        self.after_backward(name)
        return [*outs]

    def after_backward(self, name: str) -> None:
        unit = self.units[name]
        for key in list(unit.gradients):
            if key in unit.sums:
                del unit.gradients[key]
        if self.defer and not self.last:
            if self.zero == 3:
                unit.gathered = None
            for key in list(unit.gradients) if self.e != 4 else ():
                gradient = unit.gradients.pop(key)
                unit.sums[key] = Memory(self.meter, gradient.size / self.e * 4, "gradients")
                del gradient
            return
        if self.zero == 3:
            unit.gathered = None
        self.scattering = None
        if unit.gradients or unit.sums:
            self._reduce(unit)

    def _reduce(self, unit: Unit) -> None:
        last = None
        for name in unit.across:
            for found in (unit.gradients, unit.sums):
                if name in found:
                    last, found[name] = found[name], Memory(self.meter, found[name].size, "buffers")
        given = Memory(self.meter, 4 * unit.padded, "buffers")
        unit.gradients.clear()
        unit.sums.clear()
        part = Memory(self.meter, 4 * unit.padded / unit.ranks, "gradients")
        sent = Memory(self.meter, self.reduce * unit.padded, "buffers") if self.reduce != 4 else None
        received = Memory(self.meter, self.reduce * unit.padded, "buffers")
        del sent, received, last  # FSDP2 holds on to the last that it has laid out anew
        self.scattering = given
        if self.replicas > 1 and not self.last:
            unit.partial = unit.partial or part
            return
        unit.partial = None
        unit.shard = unit.shard or part
