"""plan.json: the planner's word before a run, and what came of it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from fivefold.errors import UserError
from fivefold.observe import prediction
from fivefold.observe.collectives import Collectives
from fivefold.observe.cpu import resident_bytes
from fivefold.observe.metrics import read_metrics
from fivefold.parallel.mesh import Mesh
from fivefold.parallel.ranks import Ranks
from fivefold.plan.clusters import PRESETS, Cluster
from fivefold.plan.local import of
from fivefold.plan.measured import load
from fivefold.plan.predict import predict
from fivefold.train.job import Job
from fivefold.train.share import Microbatch

AXES = {"shard": "dp", "replicate": "dp", "dp": "dp", "batch": "dp", "edp": "dp", "eshard": "dp"}
"""The planner's name of an axis, of groups that have another. "all" is none: a few numbers travel on it."""
NAMES = ("tp", "cp", "pp", "ep", "dp")
NextBatch = Callable[[], tuple[list[Microbatch], float]]


class Prediction:
    """What one rank knows of it. Rank 0 writes; it says in a line what it predicts, or why it cannot."""

    def __init__(self, job: Job, ranks: Ranks):
        self.job, self.ranks = job, ranks
        self.before = resident_bytes()[0] if ranks.device.type == "cpu" else 0
        self.counting = ExitStack()
        self.counter: Collectives | None = None

    def write(self) -> str:
        """Predicts, in milliseconds: nothing is measured for it."""
        try:
            found = self._predicted()
            said = f"predicted: {found['time']['step_s']:.3g} s a step, {found['memory']['peak_bytes'] / 2**30:.2g} GiB"
            self._save({"predicted": found})
        except UserError as error:
            said = f"no prediction: {error}"
            self._save({"predicted": None, "why": said})
        return said

    def _predicted(self) -> dict[str, Any]:
        if self.job.module is not None:
            raise UserError("the planner does not know a module of your own")
        return predict(self.job.recipe, _cluster(self.ranks)).as_json()

    def counted(self, next_batch: NextBatch, mesh: Mesh) -> NextBatch:
        """The same, counting from the first batch on what this rank sends, until `counting` is closed. Not on
        accelerators, whose compiled code is not to be watched; nor with a module of the user's own, which may talk over
        groups that the mesh does not know."""

        def fetch() -> tuple[list[Microbatch], float]:
            found = next_batch()
            if self.counter is None:
                self.counter = self.counting.enter_context(Collectives(mesh))
            return found

        watched = self.ranks.world > 1 and mesh.device.type == "cpu" and self.job.module is None
        return fetch if watched else next_batch

    def conclude(self, mesh: Mesh) -> None:
        """Adds what was measured. All ranks call it; the first writes."""
        self.counting.close()
        sent = self._most_sent(mesh)
        if not self.ranks.first:
            return
        lines = read_metrics(self.job.out / "metrics.jsonl")
        peak = max((line["peak_memory_bytes"] for line in lines if "peak_memory_bytes" in line), default=0)
        measured = {
            "step_s": prediction.step_seconds(lines),
            "memory_bytes": peak - self.before,
            "sent_bytes": sent,
        }
        self._save(prediction.read(self.job.out) | {"measured": measured})

    def _most_sent(self, mesh: Mesh) -> dict[str, int] | None:
        """Bytes by axis, of the rank that sends most; None where they were not counted."""
        if self.counter is None:
            return None
        mine = Counter[str]()
        for (what, axis), (_, size) in self.counter.found.items():
            if axis != "all":
                mine[AXES.get(axis, axis)] += _sent(what, size, mesh.size(axis))
        sizes = torch.tensor([mine[axis] for axis in NAMES])
        dist.all_reduce(sizes, dist.ReduceOp.MAX)
        return {axis: int(size) for axis, size in zip(NAMES, sizes, strict=True) if size}

    def _save(self, plan: dict[str, Any]) -> None:
        (self.job.out / "plan.json").write_text(json.dumps(plan, indent=1) + "\n", encoding="utf-8")


def _sent(what: str, size: int, ranks: int) -> int:
    """Bytes that a rank sends of a collective, as rings do it (plan/communication.py)."""
    if what in ("send", "receive"):
        return size * (what == "send")
    return size * (ranks - 1) // ranks * (2 if what == "all_reduce" else 1)


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
        raise UserError("this machine is not measured yet; `fivefold bench hardware` does it, in a minute")
    return of(table)
