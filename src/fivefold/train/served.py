"""A run with parameter servers (`sync.method = "server"`).

The first ranks are the servers. The first of them also leads: it hands out shares of the global batches, writes metrics
and has the servers save. So a lost worker loses nothing but the share that it was computing. Workers do what they are
told: train on a share, validate, write a sample.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from queue import Empty
from statistics import fmean
from typing import Any

import torch

from fivefold.comm import Axis, all_or_none, everyone, told
from fivefold.comm.progress import progress
from fivefold.comm.watchdog import watching
from fivefold.errors import CommunicationError, UserError
from fivefold.files import Lines, guard
from fivefold.launch.interrupt import Interrupt
from fivefold.launch.ranks import Ranks
from fivefold.models.card import card_of
from fivefold.observe.console import Console
from fivefold.observe.metrics import MetricsWriter, drop_after
from fivefold.observe.worker_picture import WORKERS
from fivefold.parallel.link import Kind, Note, links
from fivefold.parallel.server import Event, Server
from fivefold.spread.servers import Shares
from fivefold.step.served import assert_possible, server_state
from fivefold.step.state import State
from fivefold.step.step import last_update, rate
from fivefold.train import served_worker
from fivefold.train.faults import MAX_SKIPPED, destroyed_after, weights_fault
from fivefold.train.hooks import Speed
from fivefold.train.job import Job
from fivefold.train.loop import due, names_step
from fivefold.train.out_of_memory import told as told_of_memory
from fivefold.train.prediction import Prediction
from fivefold.train.resume import resume
from fivefold.train.rollback import FILE, read
from fivefold.train.run import conclude, introduce, open_metrics, write_run_files
from fivefold.train.saved import identity, shared
from fivefold.train.saver import Saver
from fivefold.train.self_test import settle

STEP, SAVE, LOST, END = range(4)  # what the first server has the others do


def run_served(job: Job, ranks: Ranks) -> int | None:
    """A rank's part of a run. Returns the signal that stopped the run early, or None if it is complete."""
    guard(job.out, look=False)
    assert_possible(ranks, job.module is not None)
    if read(job.out)["left_out"]:
        raise UserError(
            f"{job.out / FILE}: this run has left out data after a fault, which parameter servers cannot. Nearest "
            'valid: sync.method = "all"'
        )
    message = "stopping: finishing the shares under way, then saving" if ranks.first else ""
    with (
        told_of_memory(job, ranks.rank, ranks.local_world),
        Interrupt(message) as interrupt,
        watching(ranks, job.recipe.observe.hang_s, job.out / "traces"),
        ExitStack() as starting,
    ):
        progress.role = _role(ranks.rank, job.recipe.servers.count)
        starting.enter_context(progress.phase("starting"))
        _assert_same_recipe(job, ranks)
        part = _serve if ranks.rank < job.recipe.servers.count else served_worker.work
        complete = part(job, ranks, interrupt, starting.close)
        return None if complete else interrupt.signal or 15


def _role(rank: int, servers: int) -> str:
    if rank >= servers:
        return f"worker {rank - servers}"
    return "first server" if rank == 0 else f"server {rank}"


def _assert_same_recipe(job: Job, ranks: Ranks) -> None:
    """Refuses a rank that has another recipe, or other data, than the first server."""
    axis, mine = everyone(ranks), {key: str(value) for key, value in shared(job).items()}
    first = json.loads(told(json.dumps(mine), 0, axis))
    with all_or_none(axis):
        for key in sorted(first.keys() | mine.keys()):
            if first.get(key) != mine.get(key):
                raise UserError(
                    f"rank {ranks.rank} has another recipe than rank 0: {key} = {mine.get(key)}, and there it is "
                    f"{first.get(key)}. All ranks of a run need the same recipe and data"
                )


def _serve(job: Job, ranks: Ranks, interrupt: Interrupt, begun: Callable[[], None]) -> bool:
    """A server's part: serves, and follows the first server, or leads. begun: called when it has started."""
    recipe, optim = job.recipe, job.recipe.optim
    steps, servers = recipe.train.steps or 0, recipe.servers
    worker_links = links(ranks, servers.count)  # first: see `axis_between`
    state, shards = server_state(recipe, ranks)
    resumed = resume(state, job) if job.resume else None
    norms = state.mesh.new_axis("norms", list(range(servers.count)), apart=True)
    server = Server(
        shards,
        worker_links,
        servers,
        norms,
        optim.grad_clip,
        lambda at: rate(optim, at, steps),
    )
    server.start(state.step)
    progress.step = state.step
    saver = partial(Saver, state, job, beside=False, stopped=partial(server.keep_alive, interrupt.wanted))
    if not ranks.first:
        settle(state, job, ranks, resumed is not None)
        begun()
        with names_step(state):
            return _follow(job, state, server, saver(lambda step, text: None))
    with ExitStack() as stack:
        console = stack.enter_context(
            Console(steps, start_step=state.step, log_every=recipe.observe.log_every)
        )
        write_run_files(job)
        metrics = stack.enter_context(open_metrics(job, state.step))
        introduce(console, state, job, ranks)
        predicted = Prediction(job, ranks, state.step)
        console.note(predicted.write())
        if job.resume:
            console.note(
                f"resuming after step {state.step}" if resumed else "no checkpoint yet: starting from step 0"
            )
        for note in settle(state, job, ranks, resumed is not None):
            console.note(note)
        leader = Leader(job, ranks, state, server, console, metrics, interrupt, saver)
        for text in resumed.alarms if resumed else ():
            leader.alarm(state.step, text)
        begun()
        with names_step(state):
            complete = leader.run()
        with progress.phase("writing the report"):
            predicted.conclude(state.mesh)
            conclude(console, job, complete)
        server.close()
        return complete


def _tell(axis: Axis, *numbers: float) -> list[float]:
    """The first server's command to all."""
    filled = torch.tensor([*numbers, *[0.0] * (4 - len(numbers))], dtype=torch.float64)
    return axis.broadcast(filled, 0).tolist()


def _figures(state: State, server: Server) -> tuple[float, float, float]:
    """At the end of a step, over all servers: (sum of squares of the gradient, skipped messages, both of a synchronous
    step; > 0 if updates up to now have destroyed weights)."""
    axis, found = state.mesh.axis("run"), (0.0, 0.0)
    if server.servers.synchronous:
        found = server.finished(state.step, axis.timeout_s)
    ruined, state.limit = last_update(state)
    sums = torch.tensor([*found, float(ruined)], dtype=torch.float64)
    square, skipped, wrong = axis.all_reduce(sums).tolist()
    return square, skipped, wrong


def _follow(job: Job, state: State, server: Server, saver: Saver) -> bool:
    """Does what the first server says. Returns True if the run is complete."""
    axis = state.mesh.axis("run")
    while True:
        command, *numbers = _tell(axis)
        if command == STEP:
            *_, ruined = _figures(state, server)
            state.step += 1
            progress.step = state.step
            if ruined:
                raise destroyed_after(state.step, job.recipe.faults).ended(job.out)
        elif command == SAVE:
            _save(job, state, saver, *map(int, numbers[:3]))
        elif command == LOST:
            server.settle(int(numbers[0]))
        else:
            server.close()
            return bool(numbers[0])


def _save(job: Job, state: State, saver: Saver, updates: int, skipped: int, ends: int) -> None:
    with progress.phase("saving"):
        if fault := weights_fault(state, job.recipe.faults):
            raise fault.ended(job.out)
        state.set_counts(updates, skipped)
        tokens = state.step * job.recipe.train.global_batch_size * job.recipe.model.seq_len
        saver.save(identity(job) | {"tokens": tokens}, bool(ends))


@dataclass
class Leader:
    """The first server's part in the whole run."""

    job: Job
    ranks: Ranks
    state: State
    server: Server
    console: Console
    metrics: MetricsWriter
    interrupt: Interrupt
    make_saver: Callable[..., Saver]
    chores: list[tuple[Kind, int]] = field(default_factory=list)
    doing: dict[int, tuple[Kind, int]] = field(default_factory=dict)
    stopping: bool = False

    def __post_init__(self) -> None:
        recipe, self.speed = self.job.recipe, Speed(self.job, self.ranks)
        self.steps, self.servers = recipe.train.steps or 0, recipe.servers
        self.count = self.ranks.world - self.servers.count
        self.shares = Shares(self.count, self.state.step, 0, self.servers.staleness)
        self.idle = set(range(self.count))
        self.computed: dict[
            tuple[int, int, int], tuple[Note, int]
        ] = {}  # by worker, step, share: with the lag
        self.applied: list[tuple[Note, int]] = []  # those of the step that is not complete
        self.reports: list[dict[str, Any]] = []
        self.updates, self.skipped = self.state.updates, self.state.skipped
        self.saver = self.make_saver(self.alarm, self.metrics.flush)
        self.began = time.perf_counter()

    def run(self) -> bool:
        """Trains to the last step. Returns False if it was stopped before."""
        self._set_limit()
        self._oversee()
        path = self.job.out / WORKERS
        if path.exists():  # as in metrics.jsonl: these steps run again
            drop_after(path, self.state.step)
        with Lines(path) as self.lines:
            while not self._over():
                self._hand_out()
                self._wait()
                if self.interrupt.wanted():
                    self._stop()
                self._save_by_time()
                while len(self.applied) >= self.count:
                    self._end_step()
        complete = self.state.step == self.steps
        progress.overseen = frozenset()  # they end now, one after the other
        _tell(self.state.mesh.axis("run"), END, complete)
        for worker in self.shares.alive:
            self.server.order(worker, Kind.END, int(complete))
        return complete

    def _over(self) -> bool:
        last = self.state.step if self.stopping else self.steps
        return (
            self.state.step == self.shares.limit == last
            and self.idle >= self.shares.alive
            and not self.chores
        )

    def _oversee(self) -> None:
        """Watches all workers: asynchronous ones may go on for long without one that hangs."""
        progress.overseen = frozenset(self.server.links[worker].rank for worker in self.shares.alive)

    def _set_limit(self) -> None:
        """No share beyond the next checkpoint is handed out before it is saved."""
        every, step = self.job.recipe.checkpoint.every, self.state.step
        again = self.saver.retry_at or self.steps
        self.shares.limit = min(
            self.steps, (step // every + 1) * every if every else self.steps, max(again, step + 1)
        )

    def _save_by_time(self) -> None:
        """If a checkpoint is due by time, hands out no further step before it is saved."""
        if self.stopping or not self.saver.is_time() or self.shares.highest + 1 >= self.shares.limit:
            return
        self.shares.limit = max(self.state.step, self.shares.highest + 1)
        if self.shares.limit == self.state.step:
            self._save(ends=False)
            self._set_limit()

    def _stop(self) -> None:
        if not self.stopping:
            self.stopping, self.chores = True, []
            self.shares.limit = max(self.state.step, self.shares.highest + 1)
            if self.shares.limit == self.state.step:
                self._save(ends=True)

    def _hand_out(self) -> None:
        for worker in sorted(self.idle):
            if self.chores and (worker == 0 or not self.servers.synchronous):
                kind, step = self.doing[worker] = self.chores.pop(0)
                self.server.order(worker, kind, step)
            elif found := self.shares.take(worker):
                self.server.order(worker, Kind.TRAIN, *found)
            else:
                continue
            self.idle.discard(worker)

    def _wait(self) -> None:
        """Takes the next event, if there is one soon."""
        busy = [worker for worker in self.shares.alive if self._owes(worker)]
        began = self.server.await_workers("answers", sorted(busy))
        try:
            event = self.server.events.get(timeout=0.1)
        except Empty:
            if self.interrupt.wanted() and not self.stopping:
                progress.leave(began)
            return  # and waits on
        progress.leave(began)
        if event.worker < 0:
            assert event.lost
            raise event.lost
        if event.worker not in self.shares.alive:
            return
        if event.lost is not None:
            self._lose(event)
        elif event.note is not None:
            self._take(event, event.note)

    def _owes(self, worker: int) -> bool:
        """True if a worker computes something, or servers have not yet applied all that it computed."""
        return worker not in self.idle or bool(self.shares.under_way[worker])

    def _lose(self, event: Event) -> None:
        _tell(self.state.mesh.axis("run"), LOST, event.worker)
        settled = self.server.settle(event.worker)
        note, lag = settled or (Note(Kind.COMPUTED), 0)
        for step, share in self.shares.lose(event.worker, (note.first, note.second) if settled else None):
            if (event.worker, step, share) not in self.computed:  # only another server has heard of it
                self._computed(event.worker, note, lag)
            self.applied.append(self.computed.pop((event.worker, step, share)))
        self._oversee()
        self.idle.discard(event.worker)
        if chore := self.doing.pop(event.worker, None):
            self.chores.insert(0, chore)
        rank, left = event.worker + self.servers.count, len(self.shares.alive)
        self.console.note(f"worker {event.worker} (rank {rank}) is lost; {left} go on. {event.lost}")
        if not left:
            raise CommunicationError(f"all workers are lost. The last was rank {rank}: {event.lost}")

    def _take(self, event: Event, note: Note) -> None:
        worker = event.worker
        if note.kind == Kind.APPLIED:
            self.shares.finish(worker, note.first, note.second)
            self.applied.append(self.computed.pop((worker, note.first, note.second)))
            return
        self.idle.add(worker)
        if note.kind == Kind.COMPUTED:
            self._computed(worker, note, event.lag)
            return
        if self.doing.pop(worker)[0] == Kind.VALIDATE:
            self.reports.append({"step": note.step, **json.loads(event.text)})
        elif note.figures[0]:
            self.console.note(f"step {note.step}: no sample: {event.text}")
        else:
            self.reports.append({"step": note.step, "sample": event.text})
        self._write_reports()

    def _computed(self, worker: int, note: Note, lag: int) -> None:
        step, share = note.first, note.second
        self.computed[worker, step, share] = note, lag
        _, _, stop, begin, end, waited, *_ = note.figures
        line = {"worker": worker, "step": step + 1, "share": share, "begin": begin, "end": end}
        self.lines.write(json.dumps(line | {"waited_s": waited, "lag": lag}))
        if stop:
            self._stop()
        if self.servers.synchronous and worker == 0:
            self._add_chores(step + 1)

    def _add_chores(self, step: int) -> None:
        """What a worker does after this step."""
        job, train = self.job, self.job.recipe.train
        last = step == self.steps
        if self.stopping and not last:
            return
        held_out = job.val_batches is not None or bool(job.data is not None and job.data.validation_sets)
        if held_out and (last or due(train.val_every, step)):
            self.chores.append((Kind.VALIDATE, step))
        writes = card_of(job.recipe.model).causal and job.data is not None and job.data.tokenizer is not None
        if writes and (last or due(train.sample_every, step)):
            self.chores.append((Kind.SAMPLE, step))

    def _end_step(self) -> None:
        """All servers have applied as many shares as a step has; if workers run ahead, those of several steps."""
        step, faults = self.state.step, self.job.recipe.faults
        notes, self.applied = self.applied[: self.count], self.applied[self.count :]
        _tell(self.state.mesh.axis("run"), STEP)
        square, bad, ruined = _figures(self.state, self.server)
        losses = [note.figures[0] for note, _ in notes]
        line: dict[str, Any] = {"step": step + 1, "loss": fmean(losses)}
        if self.servers.synchronous:
            self.updates += not bad
            line["grad_norm"] = square**0.5
        else:
            squares = [note.figures[1] for note, _ in notes]
            bad = sum(not abs(square) < float("inf") for square in squares)
            self.updates += len(squares) - bad
            line |= {"grad_norm": fmean(s**0.5 for s in squares), "staleness": max(lag for _, lag in notes)}
        self.skipped = self.skipped + 1 if bad else 0
        self.state.step += 1
        self._record(line, [note.figures for note, _ in notes])
        if ruined:
            raise destroyed_after(self.state.step, faults).ended(self.job.out)
        most = 1 if faults.on_nonfinite == "abort" else MAX_SKIPPED
        if self.skipped >= most:
            self.stopping, self.chores = True, []
        if self.shares.oldest == self.shares.limit and not self.applied:
            self._save(ends=self.stopping or self.state.step == self.steps)
            if not self.stopping:
                self._set_limit()
        if self.skipped >= most:
            raise UserError(
                f"loss or gradient were not finite in {most} steps in a row, up to step {self.state.step}: the "
                "run has diverged. Resume with a smaller optim.lr or optim.grad_clip, or from an older checkpoint"
            )
        if not self.servers.synchronous:
            self._add_chores(self.state.step)
        self._write_reports()

    def _record(self, line: dict[str, Any], figures: list[tuple[float, ...]]) -> None:
        now = time.perf_counter()
        line |= {
            "lr": rate(self.job.recipe.optim, line["step"] - 1, self.steps),
            "step_s": now - self.began,
            "data_wait_s": max(found[6] for found in figures),
            "peak_memory_bytes": int(max(found[7] for found in figures)),
        }
        self.began = now
        progress.end_step(line["step"], line["step_s"], line["data_wait_s"])
        line |= self.speed.figures(line["step"], line["step_s"])
        self.metrics.write(line)
        self.console.step(line)
        if self.skipped:
            self.console.note(f"step {line['step']}: loss or gradient is not finite; the update is skipped")

    def _write_reports(self) -> None:
        """Writes what workers found out about steps that are recorded."""
        ready = [found for found in self.reports if found["step"] <= self.state.step]
        self.reports = [found for found in self.reports if found["step"] > self.state.step]
        for found in ready:
            self.metrics.write(found)
            if "sample" in found:
                self.console.sample(found["sample"], found["step"])
            else:
                self.console.validation(found)

    def _save(self, ends: bool) -> None:
        _tell(self.state.mesh.axis("run"), SAVE, self.updates, self.skipped, ends)
        _save(self.job, self.state, self.saver, self.updates, self.skipped, ends)

    def alarm(self, step: int, text: str) -> None:
        """Says on the console and in the report what must not be missed."""
        self.console.alarm(f"step {step}: {text}")
        self.metrics.write({"step": step, "alarm": text})
