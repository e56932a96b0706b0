"""Memory of a rank on CPUs, by going through a step with tensors that have sizes only (tape.py): the trainer's own
path, tensor by tensor, without torch. What is there at the peak is what `observe/tracking.py` finds in a real step.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from fivefold.layout import Layout, index_in
from fivefold.plan import partition, units
from fivefold.plan.eager import Work
from fivefold.plan.eager_models import Model
from fivefold.plan.eager_states import Forward, Shared, Unit, Whole
from fivefold.plan.operations import Sizes
from fivefold.plan.software import Software
from fivefold.plan.tape import Memory, Meter, Tape, Value
from fivefold.recipe.schema import ModelSection
from fivefold.schedules.pipeline import Action, Schedule, receives_ahead, with_transfers
from fivefold.sharding import stages_of

SENDS_A_RANK = 2  # of parallel/pipeline.py
MICROBATCHES = 3  # without a pipeline the first, one in between and the last are all different ones


@dataclass(frozen=True)
class Job:
    """What is gone through: a step of so many microbatches."""

    model: ModelSection
    layout: Layout
    sizes: Sizes
    software: Software
    dtype: str
    microbatches: int


def rehearse(job: Job, rank: int = 0) -> Meter:
    """Goes through one step of a rank."""
    run = _Rank(job, rank)
    if job.layout.pp > 1:
        _Pipeline(run).step()
    else:
        run.accumulate()
    return run.meter


@dataclass
class _Stage:
    """One of a rank's stages: its blocks, and what shares its weights."""

    blocks: range
    first: bool
    last: bool
    shared: Shared | None = None


class _Rank:
    """What a rank has, and how it goes forward and back."""

    def __init__(self, s: Job, rank: int):
        self.s, self.meter = s, Meter()
        self.position, self.cp_index = (index_in(s.layout, axis, rank) for axis in ("pp", "cp"))
        by_stage = partition.stages(s.model, s.layout, s.software.partition)
        self.stages = {
            stage: _Stage(by_stage[stage], stage == 0, stage == len(by_stage) - 1)
            for stage in stages_of(s.layout, self.position)
        }
        tokens = 2 * 8 * s.sizes.B * s.model.seq_len / s.layout.cp  # inputs and targets, int64
        self.batch = Memory(self.meter, s.microbatches * tokens, "buffers")
        self.whole: list[Whole] = []
        self._states(rank)
        batch = s.layout.dp * s.layout.cp
        self.model = Model(s.layout, scaled=batch * s.microbatches > 1 or s.layout.cp > 1)
        self.current: _Stage | None = None

    def _states(self, rank: int) -> None:
        s = self.s
        b, e, how = s.software.states[s.dtype], s.sizes.e, s.software.partition
        for replica in units.of_rank(s.model, s.layout, list(self.stages), how).replicated:
            copies = b.reduce if b.reduce != 4 and s.layout.ranks > 1 else 0
            self.whole.append(Whole(self.meter, replica.size, len(replica.sizes), e, copies))
        seen: set[str] = set()  # a tied embedding, where a rank has both of its stages, is one
        for stage, found in self.stages.items():
            shared = units.of_rank(s.model, s.layout, [stage], how).shared
            if shared:
                made = {"rest": Unit(0, 1, 0, 0)} | {self._name(u): self._unit(u, rank, seen) for u in shared}
                order = [n for i in found.blocks for n in (f"block {i}", f"block {i} experts") if n in made]
                ordered = {name: made[name] for name in ("rest", *order)}
                defer = s.layout.zero == 1 or s.layout.pp > 1
                found.shared = Shared(
                    self.meter, ordered, e, s.layout.zero, s.layout.dp_replicate, b.reduce, defer
                )

    def _name(self, unit: units.Unit) -> str:
        name = "rest" if unit.block is None else f"block {unit.block}"
        return f"{name} experts" if unit.group == "eshard" else name

    def _unit(self, unit: units.Unit, rank: int, seen: set[str]) -> Unit:
        s = self.s
        ranks = s.layout.dp_shard * s.layout.cp // (s.layout.ep if unit.group == "eshard" else 1)
        new = [name for name in unit.names if name not in seen]
        seen.update(new)
        kept = units.kept(s.model, s.layout, rank, new)
        local = units.table(s.model, s.layout)
        across = {name.partition(".mlp.")[2]: local[name].size for name in unit.across}
        return Unit(unit.padded, ranks, kept, len(new), across)

    def _around(self, w: Work, name: str, x: Value, forward: Forward) -> Value:
        stage, outer = self.current, w.unit
        w.unit = name + ":"
        if stage is None or stage.shared is None:
            y = forward(x)
        else:
            point = w.tape.inside
            again = point is not None and point.again is not None
            y = stage.shared.around(w, name, x, forward, again)
        w.unit = outer
        return y

    def sink(self, stage: _Stage):
        """Where gradients of weights go: into their unit, or into the flat sum, which is there in any case."""

        def sink(name: str, gradient: Memory) -> None:
            unit, _, leaf = name.partition(":")
            if stage.shared is None:
                return
            if unit not in stage.shared.units:  # experts that are shared as the rest of their block is
                unit = unit.removesuffix(" experts")
            if unit in stage.shared.units:
                stage.shared.sink(unit, leaf, gradient)

        return sink

    def forward(self, stage: _Stage, x: Value | None) -> tuple[Tape, Value]:
        tied = self.s.model.tie_embeddings and stage.first and stage.last
        tape = Tape(self.meter, self.sink(stage), "rest:vocabulary" if tied else "")
        w = Work(tape, self.s.sizes, self._around, "rest:", self.splits, self.cp_index)
        self.current = stage

        def run(x: Value) -> Value:
            return self.model.stage(w, None if stage.first else x, stage.blocks, stage.first, stage.last)

        given = x or Value()
        if stage.shared is None:
            return tape, run(given)
        return tape, stage.shared.around(w, "rest", given, run, again=False, gradient=not stage.first)

    def backward(self, stage: _Stage, tape: Tape, result: Value, gradient: Memory) -> dict[int, Memory]:
        self.current = stage
        found = tape.backward(result, gradient)
        if stage.shared is not None:
            stage.shared.finish_backward()
        return found

    def accumulate(self) -> None:
        """One microbatch after the other."""
        stage, count = self.stages[0], min(self.s.microbatches, MICROBATCHES)
        for index in range(count):
            if stage.shared is not None:
                stage.shared.last = index == count - 1
            tape, loss = self.forward(stage, None)
            self.backward(stage, tape, loss, Memory(self.meter, 4, "buffers"))

    @property
    def splits(self) -> bool:
        """Whether weight gradients are computed apart."""
        return self.s.layout.pp > 1 and schedule_of(self.s, 2 * self.s.layout.pp).splits_backward


def schedule_of(s: Job, microbatches: int) -> Schedule:
    return partition.schedule(s.layout.schedule, s.layout.pp, microbatches, s.layout.virtual_stages)


Key = tuple[int, int]  # stage, microbatch


class _Pipeline:
    """Goes through a rank's list of actions as parallel/pipeline.py does; what is kept there is kept here."""

    def __init__(self, run: _Rank):
        self.run, self.pp = run, run.s.layout.pp
        self.x = run.s.sizes.n * run.s.model.dim * run.s.sizes.e
        self.kept: dict[Key, tuple[Tape, Value | None, Value]] = {}
        self.owed: dict[Key, list[tuple[str, float, Memory, Memory]]] = {}
        self.inputs: dict[Key, Memory] = {}
        self.gradients: dict[Key, Memory] = {}
        self.to_send: dict[Action, Memory] = {}
        self.sends: deque[Memory] = deque()

    def step(self) -> None:
        actions = receives_ahead(
            with_transfers(schedule_of(self.run.s, self.run.s.microbatches))[self.run.position]
        )
        last = {a.stage: a for a in actions if a.kind in ("B", "W")}
        do = {"F": self._forward, "B": self._backward, "I": self._backward, "W": self._weights}
        for action in actions:
            shared = self.run.stages[action.stage].shared if action.computes else None
            if shared is not None:
                shared.last = last[action.stage] is action
            if action.computes:
                do[action.kind](action)
            elif action.kind.startswith("SEND"):
                self.sends.append(self.to_send.pop(action))
                while len(self.sends) > SENDS_A_RANK * self.pp:
                    self.sends.popleft()
            else:
                arrivals = self.inputs if action.kind == "RECV_F" else self.gradients
                arrivals[action.stage, action.microbatch] = Memory(self.run.meter, self.x, "buffers")

    def _forward(self, action: Action) -> None:
        key = action.stage, action.microbatch
        stage = self.run.stages[action.stage]
        x = None if stage.first else Value(self.inputs.pop(key))
        tape, y = self.run.forward(stage, x)
        self.kept[key] = tape, x, y
        if not stage.last:
            send = Action(action.stage, "SEND_F", action.microbatch)
            self._hand_over(y.there, self.inputs, action.stage + 1, send)

    def _backward(self, action: Action) -> None:
        key = action.stage, action.microbatch
        tape, x, y = self.kept.pop(key)
        stage = self.run.stages[action.stage]
        gradient = Memory(self.run.meter, 4, "buffers") if stage.last else self.gradients.pop(key)
        if action.kind == "I":
            tape.later = self.owed[key] = []
        found = self.run.backward(stage, tape, y, gradient)
        if x is not None:
            send = Action(action.stage, "SEND_B", action.microbatch)
            self._hand_over(found.pop(x.key), self.gradients, action.stage - 1, send)

    def _weights(self, action: Action) -> None:
        stage, queue = self.run.stages[action.stage], deque(self.owed.pop((action.stage, action.microbatch)))
        while queue:
            self._weight(stage, *queue.popleft())
        if stage.shared is not None:
            for name in stage.shared.order:
                stage.shared.after_backward(name)

    def _weight(self, stage: _Stage, name: str, size: float, dy: Memory, x: Memory) -> None:
        gradient = Memory(self.run.meter, size, "buffers")
        self.run.sink(stage)(name, Memory(self.run.meter, size, "buffers"))  # autograd takes a copy
        del gradient

    def _hand_over(self, result: Memory, to: dict[Key, Memory], stage: int, send: Action) -> None:
        if stage in self.run.stages:
            to[stage, send.microbatch] = result
        else:
            self.to_send[send] = result
