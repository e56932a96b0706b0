"""Runs a pipeline schedule: each rank executes its list of computations and transfers, which `schedules/pipeline` has
made and checked, and also simulates.

F computes a stage and keeps its input and the graph of its output. B runs autograd from there and leaves the gradient
of the input. I does the same, but queues the weight gradients of linear layers (`autograd.py`), which W computes.
Transfers are asynchronous. With gloo a receive is posted one computation ahead of its place in the list, since gloo
moves data only once it is posted. NCCL runs messages in the order of their calls, so the order of the list stays
(`executed`). A send is waited for only when many are in flight.

Legend: B rows of a microbatch, T tokens of a sequence that this rank has between stages, D model.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from fivefold.comm import Started
from fivefold.comm.progress import span
from fivefold.kernels.private import watched
from fivefold.models.base import LanguageModel
from fivefold.parallel.autograd import Deferred, WeightGradient, attach
from fivefold.parallel.expert import AllToAll, Turns
from fivefold.parallel.mesh import Mesh, Microbatch
from fivefold.parallel.replica import Replica
from fivefold.schedules.pipeline import (
    SENDS_PER_RANK,
    Action,
    Event,
    Schedule,
    Timeline,
    check,
    executed,
)

Seed = Callable[[int, int], None]  # (microbatch, index among this rank's stages): sets the random state
Key = tuple[int, int]  # stage, microbatch
Arrival = Tensor | Started  # a result of this rank, or a message from another
COMPUTATIONS = {"F": "forward,", "B": "backward,", "I": "input gradients,", "W": "weight gradients,"}
"""Names of the kinds of computations in a profile."""


class Pipeline:
    """This rank's stages by number, and the schedule that they run.

    dim: D. dtype: of the activations. in_turns: False: forward draws random numbers, and backward draws them again, so
    they cannot run in turns. replicas: of the parameters of each stage. recording: while it is True, each step
    is measured, and `recorded` holds its schedule and timeline; all ranks of a pipeline must set it together.
    """

    def __init__(
        self,
        stages: Mapping[int, LanguageModel],
        mesh: Mesh,
        dim: int,
        dtype: torch.dtype,
        in_turns: bool = True,
    ):
        self.stages, self.mesh, self.dim, self.dtype = dict(stages), mesh, dim, dtype
        self.replicas: Mapping[int, Sequence[Replica]] = {}
        self.in_order = mesh.device.type == "cuda"  # NCCL runs messages in the order of their calls
        self.recording = False
        self.recorded: tuple[Schedule, Timeline] | None = None
        self.rank_of = self.schedule(1).rank_of  # for each stage, the pp index of its ranks
        self.deferred = Deferred()
        if mesh.layout.splits_backward:
            for stage in self.stages.values():
                attach(stage, self.deferred)
        self.turns: Turns | None = None  # of a pair's computations, where messages of experts are waited for
        if in_turns and self.schedule(1).paired and mesh.size("ep") > 1:
            device = mesh.device
            self.turns = Turns(
                partial(torch.cuda.set_device, device) if device.type == "cuda" else lambda: None
            )
            for module in (module for stage in self.stages.values() for module in stage.modules()):
                if isinstance(module, AllToAll):
                    module.turns = self.turns

    def schedule(self, microbatches: int) -> Schedule:
        """The schedule of a step with this number of microbatches."""
        return self.mesh.layout.pipeline(microbatches)

    def forward_backward(
        self,
        microbatches: Sequence[Microbatch],
        scale: float,
        seed: Seed,
        factor: Tensor | None = None,
    ) -> Tensor:
        """Adds the gradients of `scale` x `factor` x the sum of the microbatches' weighted losses. Returns that sum of
        losses (scalar) on the rank with the last stage, 0 on others. Replicas sync their gradients as the last ones are
        computed. seed: called before each forward of a microbatch. factor: of loss scaling."""
        run = _Run(self, microbatches, scale, seed, factor)
        schedule = self.schedule(len(microbatches))
        if self.recording:
            self.mesh.axis("pp").barrier()
        began = time.perf_counter()
        run(self._actions(len(microbatches)), schedule.pairs if self.turns and not watched() else {})
        if self.recording:
            self.recorded = schedule, _gather(run.events, began, schedule, self.mesh)
        losses = [loss * microbatches[index].weight for index, loss in run.losses.items()]
        return torch.stack([torch.zeros((), device=self.mesh.device), *losses]).sum()

    @torch.no_grad()
    def losses(self, microbatches: Sequence[Microbatch]) -> list[tuple[int, Tensor]]:
        """(number, loss) of each microbatch whose last stage is on this rank, from the forwards of the schedule
        alone."""
        run = _Run(self, microbatches, 0.0, lambda microbatch, stage: None)
        if microbatches:
            run(self._actions(len(microbatches), backward=False))
        return sorted(run.losses.items(), key=lambda pair: pair[0])

    @cache  # noqa: B019  a pipeline lives as long as its run
    def _actions(self, microbatches: int, backward: bool = True) -> list[Action]:
        """This rank's computations and transfers; of validation only the forwards."""
        schedule = self.schedule(microbatches)
        if backward:
            check(schedule)
        else:
            rows = tuple(tuple(action for action in row if action.kind == "F") for row in schedule.rows)
            schedule = replace(schedule, rows=rows, paired=False)
        return executed(schedule, self.in_order)[self.mesh.index("pp")]


@dataclass
class _Run:
    """One pass through this rank's list of actions. Dictionaries are keyed by (stage, microbatch).

    losses: by microbatch. kept: input, and where backward begins (the loss, or the output's place in the graph). owed:
    weight gradients, from I until W. gradients: of outputs.
    """

    pipeline: Pipeline
    microbatches: Sequence[Microbatch]
    scale: float
    seed: Seed
    factor: Tensor | None = None
    losses: dict[int, Tensor] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    kept: dict[Key, tuple[Tensor, Tensor | GradientEdge]] = field(default_factory=dict)
    owed: dict[Key, deque[WeightGradient]] = field(default_factory=dict)
    inputs: dict[Key, Arrival] = field(default_factory=dict)
    gradients: dict[Key, Arrival] = field(default_factory=dict)
    to_send: dict[Action, Tensor] = field(default_factory=dict)
    sends: deque[Started] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.mesh, self.axis = self.pipeline.mesh, self.pipeline.mesh.axis("pp")
        self.synchronize = self.pipeline.recording and self.mesh.device.type == "cuda"

    def __call__(self, actions: Sequence[Action], pairs: Mapping[Action, Action] | None = None) -> None:
        pairs = pairs or {}
        do: dict[str, Callable[[Action], None]] = {
            "F": self._forward, "B": self._backward, "I": self._backward, "W": self._weights,
            "SEND_F": self._send, "SEND_B": self._send, "RECV_F": self._receive, "RECV_B": self._receive,
        }  # fmt: skip
        self._tell_idle({action.stage for action in actions})
        last = dict[Action, list[Replica]]()  # the replicas that get their last gradients from a computation
        seen = set[int]()
        for action in reversed(actions):
            if action.kind in ("B", "W"):
                replicas = self.pipeline.replicas.get(action.stage, ())
                last[action] = [replica for replica in replicas if id(replica) not in seen]
                seen.update(map(id, replicas))
        for replica in (
            one for some in self.pipeline.replicas.values() for one in some if id(one) not in seen
        ):
            if torch.is_grad_enabled():  # a copy without microbatches: other ranks wait for its sums
                replica.enable_sync()
        ahead: Action | None = None
        for action in actions:
            for replica in last.get(action, ()):
                replica.enable_sync()
            if action in pairs:
                ahead = action  # only receives come before the backward that it runs with
            elif ahead is not None and action == pairs[ahead]:
                self._pair(ahead, action)
                ahead = None
            else:
                do[action.kind](action)
        self._wait_for_sends(0)
        left_over = self.kept, self.owed, self.inputs, self.gradients, self.to_send
        assert not any(left_over), "nothing is left over"

    def _tell_idle(self, run: set[int]) -> None:
        """Tells replicas which parameters are of stages without microbatches only: of a copy of the model."""
        stages, idle = self.pipeline.stages, frozenset[str]()
        if run < stages.keys():
            names = {number: {n for n, _ in stage.named_parameters()} for number, stage in stages.items()}
            idle = idle.union(*names.values()).difference(*(names[number] for number in run))
        for replica in (one for some in self.pipeline.replicas.values() for one in some):
            replica.idle = idle

    def _forward(self, action: Action) -> None:
        key = stage, index = action.stage, action.microbatch
        module, microbatch = self.pipeline.stages[stage], self.microbatches[index]
        tokens, targets = microbatch.inputs, microbatch.targets
        train = torch.is_grad_enabled()
        x = tokens if module.first else self._arrived(self.inputs, key).requires_grad_(train)
        given = {"positions_T": torch.arange(tokens.shape[1], device=tokens.device)} | microbatch.options()
        self.seed(index, list(self.pipeline.stages).index(stage))
        with self._timed(action):
            y = module(x, targets if module.last else None, **given)
        if train:
            # the activation itself is the next stage's: kept here, too, it would cost one per live microbatch
            free = y.requires_grad and not module.last
            self.kept[key] = x, get_gradient_edge(y) if free else y
        if module.last:
            self.losses[index] = y.detach()
        else:
            assert y.dtype == self.pipeline.dtype, f"stage {stage} gives {y.dtype}"
            self._hand_over(y.detach(), self.inputs, stage + 1, Action(stage, "SEND_F", index))

    def _pair(self, ahead: Action, behind: Action) -> None:
        """Runs a forward and a backward together. Each counts with the time that it had its turn."""
        turns = self.pipeline.turns
        assert turns is not None, "only pipelines with turns run pairs"
        start = self._clock()
        own, others = turns.both(partial(self._forward, ahead), partial(self._backward, behind))
        end = self._clock()
        middle = start + (end - start) * own / (own + others)
        self.events[-2:] = [Event(ahead, start, middle), Event(behind, middle, end)]

    def _backward(self, action: Action) -> None:
        """Runs B or I."""
        key = stage, index = action.stage, action.microbatch
        x, y = self.kept.pop(key)
        if isinstance(y, Tensor) and self.pipeline.stages[stage].last:
            gradient = torch.full_like(y, self.scale * self.microbatches[index].weight)
            gradient = gradient if self.factor is None else gradient * self.factor
        else:
            gradient = self._arrived(self.gradients, key)
        # a frozen first stage needs none
        needed = not isinstance(y, Tensor) or y.requires_grad
        backward = partial(torch.autograd.backward, y, gradient) if needed else lambda: None
        with self._timed(action):
            if action.kind == "I":
                self.owed[key] = self.pipeline.deferred.collect(backward)
            else:
                backward()
        if not self.pipeline.stages[stage].first:
            assert x.grad is not None
            self._hand_over(x.grad, self.gradients, stage - 1, Action(stage, "SEND_B", index))

    def _weights(self, action: Action) -> None:
        queue = self.owed.pop((action.stage, action.microbatch))
        with self._timed(action):
            while queue:
                queue.popleft()()
            for replica in self.pipeline.replicas.get(action.stage, ()):
                replica.collect()

    def _hand_over(self, result: Tensor, to: dict[Key, Arrival], stage: int, send: Action) -> None:
        """Passes a result to a neighbouring stage: directly on this rank, else through a later send in the list."""
        if stage in self.pipeline.stages:
            to[stage, send.microbatch] = result
        else:
            self.to_send[send] = result

    def _send(self, action: Action) -> None:
        tensor = self.to_send.pop(action).contiguous()
        peer = self.pipeline.rank_of[action.stage + (1 if action.kind == "SEND_F" else -1)]
        self.sends.append(self.axis.start_send(tensor, peer, self._tag(action)))
        self._wait_for_sends(SENDS_PER_RANK * self.mesh.size("pp"))

    def _wait_for_sends(self, left: int) -> None:
        """Waits until at most `left` sends are in flight: their tensors take memory."""
        while len(self.sends) > left:
            self.sends.popleft()()

    def _arrived(self, arrivals: dict[Key, Arrival], key: Key) -> Tensor:
        """Waits for the input of a computation, and returns it."""
        arrival = arrivals.pop(key)
        return arrival() if isinstance(arrival, Started) else arrival

    def _receive(self, action: Action) -> None:
        forward, tokens = action.kind == "RECV_F", self.microbatches[action.microbatch].inputs
        layout = self.mesh.layout
        rows, length = tokens.shape[0], tokens.shape[1] // (layout.tp if layout.sp else 1)
        tensor = torch.empty(
            rows, length, self.pipeline.dim, dtype=self.pipeline.dtype, device=self.mesh.device
        )
        peer = self.pipeline.rank_of[action.stage + (-1 if forward else 1)]
        arrivals = self.inputs if forward else self.gradients
        started = self.axis.start_receive(tensor, peer, self._tag(action))
        arrivals[action.stage, action.microbatch] = started

    def _tag(self, action: Action) -> int:
        """A number that identifies a transfer within a step. gloo matches transfers by it, in any order of calls."""
        into = action.stage + {"SEND_F": 1, "SEND_B": -1}.get(action.kind, 0)  # the receiving stage
        backward = action.kind.endswith("_B")
        return (action.microbatch * len(self.pipeline.rank_of) + into) * 2 + backward

    @contextmanager
    def _timed(self, action: Action) -> Iterator[None]:
        start = self._clock()
        with span(COMPUTATIONS[action.kind], "stage", f"{action.stage}, microbatch", action.microbatch):
            yield
        self.events.append(Event(action, start, self._clock()))

    def _clock(self) -> float:
        if self.synchronize:
            torch.cuda.synchronize(self.mesh.device)
        return time.perf_counter()


def _gather(events: Sequence[Event], began: float, schedule: Schedule, mesh: Mesh) -> Timeline:
    """The events of all ranks of the pipeline, in seconds since `began` on each."""
    longest = max(map(len, schedule.rows))
    times = torch.zeros(longest, 2, dtype=torch.float64)
    times[: len(events)] = torch.tensor(
        [(start - began, end - began) for _, start, end in events], dtype=times.dtype
    )
    every = mesh.axis("pp").all_gather(times.to(mesh.device)[None])  # (ranks, longest, 2)
    rows = zip(schedule.rows, every.tolist(), strict=True)
    return Timeline(tuple(tuple(Event(a, *t) for a, t in zip(row, part, strict=False)) for row, part in rows))
