"""plan.json: the planner's word before a run, and what came of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from fivefold.errors import UserError
from fivefold.observe import prediction
from fivefold.observe.collectives import Collectives
from fivefold.observe.format import size
from fivefold.observe.machine import peak_memory_bytes
from fivefold.observe.metrics import read_metrics
from fivefold.observe.tracking import Tracker, states_of
from fivefold.parallel.mesh import Mesh
from fivefold.parallel.ranks import Ranks
from fivefold.plan.clusters import PRESETS, Cluster
from fivefold.plan.local import of
from fivefold.plan.measured import load
from fivefold.plan.predict import predict
from fivefold.plan.volume import AXES, leaving, sent
from fivefold.train.job import Job
from fivefold.train.share import Microbatch
from fivefold.train.state import State

NextBatch = Callable[[], tuple[list[Microbatch], float]]


class Prediction:
    """What one rank knows of it. Rank 0 writes; it says in a line what it predicts, or why it cannot."""

    def __init__(self, job: Job, ranks: Ranks):
        self.job, self.ranks = job, ranks
        self.watching = ExitStack()
        self.counter: Collectives | None = None
        self.tracker: Tracker | None = None
        self.start = 0

    def write(self) -> str:
        """Predicts, in milliseconds: nothing is measured for it."""
        try:
            found = self._predicted()
            peak = size(found["memory"]["peak_bytes"])
            said = f"predicted: {found['time']['step_s']:.3g} s a step, {peak} of tensors a rank"
            self._save({"predicted": found})
        except UserError as error:
            said = f"no prediction: {error}"
            self._save({"predicted": None, "why": said})
        return said

    def _predicted(self) -> dict[str, Any]:
        if self.job.module is not None:
            raise UserError("the planner does not know a module of your own")
        found = predict(self.job.recipe, _cluster(self.ranks))
        return found.as_json() | {"sent_as_counted": sent(found.setting, as_counted=True)}

    def watched(self, next_batch: NextBatch, state: State) -> NextBatch:
        """The same, watching two steps from their batch on until `watching` is closed. In the first it counts what this
        rank sends; in the second, when the optimizer has its states, it follows all tensors. Not on accelerators, whose
        compiled code is not to be watched; nor with a module of the user's own, which the planner does not know, and
        which may talk over groups that the mesh does not know; nor in a step whose timeline is drawn."""
        self.start = state.step
        if state.mesh.device.type != "cpu" or self.job.module is not None:
            return next_batch
        steps = iter((self._count, self._track))

        def fetch() -> tuple[list[Microbatch], float]:
            found = next_batch()
            traced = state.step + 1 == self.job.recipe.observe.trace_step
            watch = None if traced else next(steps, None)
            if watch is not None:
                watch(state)
            return found

        return fetch

    def _count(self, state: State) -> None:
        if self.ranks.world > 1:
            self.counter = self.watching.enter_context(Collectives(state.mesh))

    def _track(self, state: State) -> None:
        self.tracker = self.watching.enter_context(Tracker(states_of(state)))

    def conclude(self, mesh: Mesh) -> None:
        """Adds what was measured. All ranks call it; the first writes."""
        self.watching.close()
        sent_bytes = self._most_sent(mesh)
        if not self.ranks.first:
            return
        lines = [line for line in read_metrics(self.job.out / "metrics.jsonl") if line["step"] > self.start]
        measured = {
            "step_s": prediction.step_seconds(lines),
            "memory_bytes": self._peak(mesh),
            "sent_bytes": sent_bytes,
        }
        self._save(prediction.read(self.job.out) | {"measured": measured})

    def _peak(self, mesh: Mesh) -> int | None:
        """Most bytes of tensors at once, in a step; None where they were not followed."""
        if mesh.device.type != "cpu":
            return peak_memory_bytes(str(mesh.device))
        return None if self.tracker is None else self.tracker.peak().total

    def _most_sent(self, mesh: Mesh) -> dict[str, int] | None:
        """Bytes by axis, of the rank that sends most; None where they were not counted."""
        if self.counter is None:
            return None
        found = {key: (calls, size) for key, (calls, size) in self.counter.found.items()}
        mine = leaving(found, mesh.layout)
        sizes = torch.tensor([mine.get(axis, 0) for axis in AXES])
        dist.all_reduce(sizes, dist.ReduceOp.MAX)
        return {axis: int(most) for axis, most in zip(AXES, sizes, strict=True) if most}

    def _save(self, plan: dict[str, Any]) -> None:
        (self.job.out / "plan.json").write_text(json.dumps(plan, indent=1) + "\n", encoding="utf-8")


def _cluster(ranks: Ranks) -> Cluster:
    """The machine that runs, as the planner knows it."""
    if ranks.device.type == "cuda":
        name = torch.cuda.get_device_name(ranks.device).lower()
        found = next(
            (preset for known, preset in PRESETS.items() if known in name and "mig" not in name.split()), None
        )
        if found is None:
            raise UserError(f"the planner has no figures of {name}")
        return replace(found, per_node=ranks.local_world)
    if ranks.world != ranks.local_world:
        raise UserError("the network between machines without GPUs is not measured")
    table = load()
    if table is None:
        raise UserError("this machine is not measured yet; `fivefold bench hardware` does it, in two minutes")
    return of(table)
