"""Writes plan.json: predicted time, memory and traffic before the run, measured ones after it, and exact ones."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from fivefold.errors import UserError
from fivefold.files import write_atomically
from fivefold.host import cores, memory_bytes
from fivefold.launch.ranks import Ranks
from fivefold.observe import prediction
from fivefold.observe.format import duration, size
from fivefold.observe.metrics import read_metrics
from fivefold.observe.report import write_report
from fivefold.parallel.mesh import Mesh, Microbatch
from fivefold.recipe.rules.texts import ramp
from fivefold.schedules.timelines import StepTimeline
from fivefold.sharding.layout import Layout
from fivefold.sharding.sync import replica_group_layout
from fivefold.step.curvature import due
from fivefold.step.state import State
from fivefold.train.instruments import RunForecast
from fivefold.train.job import Job
from fivefold.train.share import documents_of
from fivefold_plan.cluster.clusters import of_gpu
from fivefold_plan.cluster.devices import Cluster, of_table
from fivefold_plan.cluster.measured import FACTORS, Measured, assumed_table, load
from fivefold_plan.messages.volume import AXES, leaving, sent
from fivefold_plan.predict import Plan, predict
from fivefold_plan.setting import Documents, software_of
from fivefold_plan.time.timeline import timeline
from fivefold_plan.trace.depth import blocks_traced, exact
from fivefold_plan.trace.traffic import Collectives

FITTED = 10
"""Steps after which a machine without a table has a prediction, from the run's own first steps."""
WARM = 2
"""First steps of these that are left out."""
QUICK = 24  # blocks times microbatches: about a second on one core


class Prediction(RunForecast):
    """One rank's part of the prediction; rank 0 writes it. start: the step that the run begins or resumes after."""

    def __init__(self, job: Job, ranks: Ranks, start: int):
        self.job, self.ranks, self.start = job, ranks, start
        self.watching = ExitStack()
        self.counter: Collectives | None = None
        self.plan: Plan | None = None
        self.assumed: Measured | None = None  # the table, if nobody has measured this machine
        self.seconds: list[float] = []  # of the run's first steps
        self.fitted = 0  # the last step to which the prediction was fitted
        self.steps, smaller = job.recipe.train.steps or 0, sum(steps for _, steps in ramp(job.recipe.train))
        self.first = max(start, smaller)  # the step before the run's first full batch
        # The steps before those that are like all others: sums are not compressed yet, or batches are smaller
        self.whole = max(job.recipe.layout.compress_after or 0, smaller)

    def write(self) -> str:
        """Writes the prediction, which takes milliseconds: nothing is measured for it. Returns a line that summarises
        it, or says why there is none."""
        try:
            predicted = self._predicted()
        except UserError as error:
            why = f"no prediction: {error}"
            _save(self.job.out, {"predicted": None, "why": why})
            return why
        peak = size(predicted["memory"]["peak_bytes"])
        if self.assumed is None:
            _save(self.job.out, {"predicted": predicted})
            return f"predicted: {predicted['time']['step_s']:.3g} s per step, {peak} of tensors per rank"
        step, after = self.first + FITTED, "no time per step"
        if step < self.steps:
            after = f"the time per step follows after step {step}"
        why = (
            f"predicted: {peak} of tensors per rank; {after}, because this machine has not been measured "
            "(`fivefold bench hardware` does it, in two minutes)"
        )
        _save(self.job.out, {"predicted": None, "why": why})
        return why

    def learn(self, step: int, seconds: float) -> str:
        """Takes a step's seconds. Once the run has FITTED steps on a machine without a table, it writes a prediction
        that is scaled to them, and returns a line that summarises it."""
        if self.assumed is None or self.plan is None or self.fitted or step <= self.first:
            return ""
        self.seconds.append(seconds)
        if len(self.seconds) < FITTED:
            return ""
        usual, self.fitted = median(self.seconds[WARM:]), step
        scale = usual / self.plan.step.seconds
        self.assumed = replace(self.assumed, factors=dict.fromkeys(FACTORS, scale))
        predicted = self._predicted()
        since = step - FITTED + WARM + 1
        predicted["fitted"] = {"from_step": since, "to_step": step, "step_s": usual}
        _save(self.job.out, prediction.read(self.job.out) | {"predicted": predicted, "why": None})
        whole = duration(predicted["time"]["step_s"] * self.steps)
        each = f"{predicted['time']['step_s']:.3g} s per step, {whole} for {self.steps:,} steps"
        return f"predicted from steps {since} to {step}: {each}"

    def _predicted(self) -> dict[str, Any]:
        if self.job.module is not None:
            raise UserError("the planner does not know a module of your own")
        if self.job.own.unplanned:
            raise UserError(f"the planner does not know {self.job.own.unplanned}")
        recipe = self.job.recipe
        cluster = self._cluster()
        found = self.plan = predict(recipe, cluster, replace(software_of(cluster), documents=self._documents))
        self.peak_bytes = found.peak_bytes
        counted = max(self.start, self.whole) + 1
        # What the counted step synchronises
        first = recipe.replica_groups.due(counted, recipe.train.steps or 0)
        estimated = due(recipe.optim, counted - 1)
        made = found.as_json() | {"sent_as_counted": sent(found.setting, True, first, estimated)}
        # Shares of a peak that nobody measured mean nothing
        return {key: made[key] for key in made if self.assumed is None or key not in ("mfu", "hfu")}

    @cached_property
    def _documents(self) -> Documents | None:
        found = documents_of(self.job)
        return Documents("data", found) if found else None

    def _cluster(self) -> Cluster:
        """The machine of this run, as a cluster of the planner."""
        ranks = self.ranks
        if ranks.device.type == "cuda":
            return replace(of_gpu(torch.cuda.get_device_name(ranks.device)), per_node=ranks.local_world)
        if ranks.world != ranks.local_world:
            raise UserError("the network between machines without GPUs is not measured")
        if self.assumed is not None:
            return of_table(self.assumed)
        table = load()
        if table is None:
            table = self.assumed = assumed_table(cores(), memory_bytes())
        return of_table(table)

    def timeline(self, step: int) -> StepTimeline | None:
        """The planned timeline of a step; None without a prediction."""
        known = self.plan is not None and (self.assumed is None or self.fitted)
        planned = timeline(self.plan.setting) if self.plan is not None and known else None
        return None if planned is None else replace(planned, step=step)

    def begin_step(self, state: State, microbatches: Sequence[Microbatch]) -> None:
        """Counts this rank's messages in the first step (with `layout.compress` the first compressed one) until
        `end_step`.

        It does not watch accelerators (it would change their compiled code), a user's own module (it may send over
        groups that the mesh does not know), or a step whose timeline is drawn.
        """
        if state.mesh.device.type != "cpu" or self.job.module is not None or self.counter is not None:
            return
        traced = state.step + 1 == self.job.recipe.observe.trace_step
        if traced or state.step < self.whole:
            return
        self.counter = Collectives(state.mesh)
        if self.ranks.world > 1:
            self.watching.enter_context(self.counter)

    def end_step(self, state: State) -> str:
        self.watching.close()
        return ""

    def figures(self, line: dict[str, Any]) -> dict[str, Any]:
        """HFU, where a rank executes more FLOPs than the model has, by the plan's count of them."""
        more = self.plan is not None and "mfu" in line and self.plan.executed > 1
        return {"hfu": line["mfu"] * self.plan.executed} if self.plan and more else {}

    def close(self) -> None:
        self.watching.close()

    def conclude(self, mesh: Mesh, memory_bytes: int | None = None) -> None:
        """Adds the measured figures. All ranks call it; the first writes. memory_bytes: most bytes of tensors at once
        in a step, if they were tracked."""
        self.watching.close()
        sent_bytes = None  # by axis, of the rank that sends most
        if self.counter is not None and self.ranks.world > 1:
            counted = {key: (calls, size) for key, (calls, size) in self.counter.found.items()}
            mine = leaving(counted, mesh.layout, mesh.size("replica_groups"))
            sizes = torch.tensor([mine.get(axis, 0) for axis in AXES])
            mesh.axis("run").all_reduce(sizes, "max")
            sent_bytes = {axis: int(most) for axis, most in zip(AXES, sizes, strict=True) if most}
        if not self.ranks.first:
            return
        first = max(self.first, self.fitted)
        lines = [line for line in read_metrics(self.job.out / "metrics.jsonl") if line["step"] > first]
        seconds = prediction.step_seconds(lines)
        measured = {"step_s": seconds, "memory_bytes": memory_bytes, "sent_bytes": sent_bytes}
        _save(self.job.out, prediction.read(self.job.out) | {"measured": measured})


def add_exact(job: Job) -> None:
    """Adds the exact figures of rank 0, and of the rank with the largest predicted memory, or `exact_why`: why there
    are none. It runs after training, on CPUs, in a process without a group, and traces only what takes about a
    second. Neither an error here nor an interrupt fails the run."""
    with suppress(Exception, KeyboardInterrupt):
        plan = {name: part for name, part in prediction.read(job.out).items() if not name.startswith("exact")}
        untraced = job.module is not None or job.recipe.servers.count or not plan.get("predicted")
        if untraced or torch.cuda.is_available() or dist.is_initialized():
            return
        layout = replica_group_layout(Layout.from_recipe(job.recipe.layout), job.recipe.replica_groups.count)
        totals = [stage["total"] for stage in plan["predicted"]["memory"]["per_stage"]]
        ranks = sorted({0, layout.rank({"pp": totals.index(max(totals))})})
        if sum(blocks_traced(job.recipe, rank) for rank in ranks) > QUICK:
            command = (
                f"fivefold plan trace {job.out / 'recipe.toml'} --cluster {plan['predicted']['cluster']}"
            )
            plan["exact_why"] = (
                f"Tracing this run takes longer than a second. This command does it: {command}"
            )
        else:
            try:
                plan["exact"] = [exact(job.recipe, rank).as_json() for rank in ranks]
            except Exception as error:
                plan["exact_why"] = f"The trace failed: {error}"
        _save(job.out, plan)
        write_report(job.out)


def _save(run: Path, plan: dict[str, Any]) -> None:
    write_atomically(run / "plan.json", json.dumps(plan, indent=1) + "\n")
