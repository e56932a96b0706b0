"""A run with parameter servers (`sync.method = "server"`). The first ranks are the servers, and all others workers.

Servers train by the trainer's loop: a step ends when they have applied as many shares of the batch as there are
workers. The first server also leads: it hands out the shares, writes metrics, and has a worker validate or write a
sample. So a lost worker loses nothing but the share that it was computing. Where the loop saves, validates or samples
after a step, no share of a later one is handed out before.
"""

from __future__ import annotations

import json
import time
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from queue import Empty
from statistics import fmean
from typing import Any, cast

import torch

from fivefold.comm import all_or_none, everyone, told
from fivefold.comm.progress import progress
from fivefold.errors import CommunicationError, UserError
from fivefold.files import Lines
from fivefold.host.machine import peak_memory_bytes
from fivefold.launch.ranks import Ranks
from fivefold.launch.verdict import Interrupt
from fivefold.models.base import LanguageModel, init_part
from fivefold.models.card import card_of
from fivefold.observe.metrics import drop_after
from fivefold.observe.timelines import WORKERS
from fivefold.optim.updater import Updater
from fivefold.parallel.data import DataParallel
from fivefold.parallel.link import Kind, Link, Note, links
from fivefold.parallel.mesh import Mesh
from fivefold.parallel.parallelize import Parallel, parallelize, rounding
from fivefold.parallel.replica import gradient_square
from fivefold.parallel.server import Event, Server, Shard
from fivefold.parallel.worker import Exchange
from fivefold.precision import torch_dtype
from fivefold.recipe import Recipe
from fivefold.sharding.layout import Layout
from fivefold.sharding.parts import parts
from fivefold.sharding.sync import Shares, messages, units
from fivefold.step.state import State, assert_whole, compute_mode, updater_arguments
from fivefold.step.step import SAVE, STOP, Done, forward_backward, last_update, rate, set_windows
from fivefold.step.validation import validate
from fivefold.train.faults import ROLLBACKS, Fault, destroyed_after, read_rollbacks, weights_fault
from fivefold.train.hooks import SAMPLE, RunHooks, due, sampled
from fivefold.train.instruments import Speed
from fivefold.train.job import Job, shared
from fivefold.train.loop import names_step, train_loop
from fivefold.train.saver import Saver
from fivefold.train.self_test import settle
from fivefold.train.share import share_of, source_of, validation_sets

STEP, LOST, ALIVE, END = range(4)  # what the first server has the others do
NUMBERS = 7  # of a command
ALIVE_S = 1.0  # between two commands, at most


def connect(job: Job, ranks: Ranks) -> list[Link]:
    """Links servers and workers, before anything else makes groups (see `axis_between`). All ranks call it together.
    Raises UserError: parameter servers cannot do it, or a rank has another recipe or other data than the first
    server."""
    if ranks.device.type != "cpu":
        raise UserError(
            'sync.method = "server" runs on CPUs only in this version: no messages between GPUs and servers have been '
            'tried. Put CUDA_VISIBLE_DEVICES= (with no value) before the command, or set sync.method = "all"'
        )
    if read_rollbacks(job.out)["left_out"]:
        raise UserError(
            f"{job.out / ROLLBACKS}: this run left out data after a fault, and parameter servers cannot do that. "
            'Nearest valid: sync.method = "all"'
        )
    servers = job.recipe.servers.count
    progress.role = f"worker {ranks.rank - servers}" if ranks.rank >= servers else f"server {ranks.rank}"
    if ranks.first:
        progress.role = "first server"
    settings = {key: str(value) for key, value in shared(job).items()}
    first = json.loads(told(json.dumps(settings), 0, axis := everyone(ranks)))
    with all_or_none(axis):
        for key in sorted(first.keys() | settings.keys()):
            if first.get(key) != settings.get(key):
                raise UserError(
                    f"rank {ranks.rank} has another recipe than rank 0: {key} = {settings.get(key)}, and there it is "
                    f"{first.get(key)}. All ranks of a run need the same recipe and data"
                )
    return links(ranks, servers)


def build_server(job: Job, ranks: Ranks) -> tuple[State, Server]:
    """A server at step 0, with its rows of each unit, which does not serve yet. The servers save and resume as ranks of
    ZeRO 1 do."""
    recipe, worker_links = job.recipe, connect(job, ranks)
    servers, card = recipe.servers, card_of(recipe.model)
    mesh = Mesh(servers.layout, replace(ranks, world=servers.count))
    table = parts(card, servers.layout, ranks.rank)
    arguments = updater_arguments(recipe, {name: part.shape for name, part in table.items()})
    shards = [
        Shard(
            message,
            table,
            lambda name: init_part(recipe.train.seed, name, recipe.model, table[name]),
            ranks.world - servers.count,
            torch_dtype(recipe.precision.reduce),
            torch_dtype(compute_mode(recipe, ranks.device).working),
            servers.synchronous,
            lambda masters: Updater(masters=masters, **arguments),
        )
        for message in messages(card, servers)
        if message.server == ranks.rank
    ]
    state = State(Parallel([], [*shards]), mesh, torch.zeros(2, dtype=torch.float64))
    assert_whole(state, card, arguments["card"])
    norms = mesh.new_axis("norms", list(range(servers.count)))
    learning_rate = partial(rate, recipe.optim, steps=recipe.train.steps or 0)
    return state, Server(shards, worker_links, servers, norms, recipe.optim.grad_clip, learning_rate)


@dataclass
class ServerHooks(RunHooks):
    """The hooks of `train_loop` on a server.

    shares: who computes what; the first server's, as all that follows. idle: workers that have nothing to do. computed:
    by worker and step, what it said of its share. applied: shares that all servers have applied, of steps that have not
    ended. answer: to what a worker was asked beside its shares. asks: what `Done` tells the loop once all shares that
    were handed out are applied. limit: the next step after which no share is under way, as all servers know it.
    """

    server: Server

    def __post_init__(self) -> None:
        super().__post_init__()
        recipe, stopped = self.job.recipe, partial(self.server.keep_alive, self.stop_wanted)
        self.next_batch = lambda: ([], 0.0)  # workers read the batches
        self.saver = Saver(self.state, self.job, self.alarm, self.flush, stopped, beside=False)
        self.instruments = [self.saver, Speed(self.job, self.ranks, self.state)]
        self.workers = self.ranks.world - recipe.servers.count
        self.shares = Shares(self.workers, self.state.step, self.state.step, recipe.servers.staleness)
        self.idle = set(range(self.workers))
        self.computed: dict[tuple[int, int], Note] = {}
        self.applied: list[Note] = []
        self.answer: tuple[Note, str] | None = None
        self.asks, self.stopping, self.limit = 0.0, False, self.state.step
        self.known: dict[str, Any] = {}  # of the step that has ended

    def run(self, leaving: bool) -> bool:
        """Trains to the recipe's last step. Returns False if it was stopped before. leaving: before it began. Raises
        UserError: a fault that ends the run."""
        path = self.job.out / WORKERS
        if self.ranks.first and path.exists():  # as in metrics.jsonl: these steps run again
            drop_after(path, self.state.step)
        complete = False
        try:
            with closing(Lines(path)) if self.ranks.first else nullcontext() as self.lines:
                self._oversee()
                if not leaving:
                    recipe = self.job.recipe
                    complete = train_loop(self.state, recipe, self, take=self.take)
        except Fault as fault:
            raise fault.ended(self.job.out) from None
        progress.overseen = frozenset()  # they end now, one after the other
        self._command(END)
        for worker in self.shares.alive if self.ranks.first else ():
            self.server.order(worker, Kind.END, int(complete))
        return complete

    def _oversee(self) -> None:
        """The first server watches all workers: asynchronous ones may go on for long without one that hangs."""
        if self.ranks.first:
            progress.overseen = frozenset(self.server.links[worker].rank for worker in self.shares.alive)

    def _command(self, *numbers: float) -> list[float]:
        """The first server's next command to all. Those that do not concern the step are dealt with here."""
        axis = self.state.mesh.axis("run")
        while True:
            command = torch.tensor([*numbers, *[0.0] * (NUMBERS - len(numbers))], dtype=torch.float64)
            command = axis.broadcast(command, 0).tolist()
            if command[0] == ALIVE:
                self.server.keep_alive(self.stop_wanted)
            if self.ranks.first or command[0] in (STEP, END):
                return command
            if command[0] == LOST:
                self.server.settle(int(command[1]))

    def take(self, *arguments: object) -> Done:
        """The next step: takes the place of `step.take_step`."""
        state, recipe = self.state, self.job.recipe
        summary = self._lead() if self.ranks.first else ()
        _, loss, norm, bad, asked, updates, limit = self._command(STEP, *summary)
        if recipe.servers.synchronous:  # the servers, and not the workers, know the whole gradient
            axis = state.mesh.axis("run")
            figures = self.server.finished(state.step, axis.timeout_s)
            square, bad = axis.all_reduce(torch.tensor(figures, dtype=torch.float64)).tolist()
            bad += loss - loss != 0  # servers that do not judge together do not look at it
            norm, updates = square**0.5, float(not bad)
        state.set_counts(int(state.updates + updates), state.skipped + 1 if bad else 0)
        lr = rate(recipe.optim, state.step, recipe.train.steps or 0)
        state.step, self.limit = state.step + 1, int(limit)
        figures = {"loss": loss, "norm": norm, "asked": asked, "skipped": state.skipped, "nonfinite": bad > 0}
        return Done(lr, {name: torch.tensor(float(value)) for name, value in figures.items()})

    def _lead(self) -> tuple[float, ...]:
        """Has workers compute a step. Returns what `take` tells all servers of it."""
        step, steps = self.state.step, self.job.recipe.train.steps or 0
        if step == self.shares.limit:  # the next one after which all wait
            self.shares.limit, self.asks, train = step + 1, 0.0, self.job.recipe.train
            while self.shares.limit < steps and not (
                self.save_due(self.shares.limit)
                or due(train.val_every, self.shares.limit)
                or due(train.sample_every, self.shares.limit)
            ):
                self.shares.limit += 1
        while True:
            self.stopping = self.stopping or self.stop_wanted()
            if self.stopping or self.save_wanted():
                self.asks = STOP if self.stopping else SAVE
                self.shares.limit = min(self.shares.limit, max(step, self.shares.highest) + 1)
            if len(self.applied) >= self.workers:
                break
            for worker in sorted(self.idle):
                if share := self.shares.take(worker):
                    self.server.order(worker, Kind.TRAIN, *share)
                    self.idle.discard(worker)
            self._wait()
        notes, self.applied = self.applied[: self.workers], self.applied[self.workers :]
        losses, squares, *_, waited, memory = zip(*(note.figures for note in notes), strict=True)
        self.known = {"peak_memory_bytes": int(max(memory)), "data_wait_s": max(waited)}
        if not self.job.recipe.servers.synchronous:
            self.known["staleness"] = max(note.step for note in notes)
        bad = sum(not abs(square) < float("inf") for square in squares)
        asks = self.asks if step + 1 == self.shares.limit else 0.0
        norm = fmean(square**0.5 for square in squares)
        return fmean(losses), norm, bad, asks, len(notes) - bad, self.shares.limit

    def _wait(self) -> None:
        """Takes the next event, if there is one soon."""
        alive, under_way = sorted(self.shares.alive), self.shares.under_way
        busy = [worker for worker in alive if worker not in self.idle or under_way[worker]]
        began = self.server.await_workers("answers", busy)
        try:
            event = self.server.events.get(timeout=0.1)
        except Empty:
            return  # and waits on
        progress.leave(began)
        if event.worker < 0:
            assert event.lost
            raise event.lost
        worker, note = event.worker, event.note
        if worker not in self.shares.alive:
            return
        if event.lost is not None:
            self._lose(event)
        elif note is not None and note.kind == Kind.TEXT:
            self.answer = note, event.text
        elif note is not None:
            if note.kind == Kind.COMPUTED:
                self._computed(worker, note)
            else:
                self.shares.finish(worker, note.first, note.second)
                self.applied.append(self.computed.pop((worker, note.first)))
            if (note.kind == Kind.COMPUTED) == self.job.recipe.servers.synchronous:
                self.idle.add(worker)

    def _computed(self, worker: int, note: Note) -> None:
        """Notes a share. The note's last number becomes its lag."""
        lag = self.shares.lags.pop((worker, note.first), 0)
        self.computed[worker, note.first] = note._replace(step=lag)
        _, _, stop, begin, end, waited, *_ = note.figures
        line = {"worker": worker, "step": note.first + 1, "share": note.second, "begin": begin, "end": end}
        assert self.lines
        self.lines.write(json.dumps(line | {"waited_s": waited, "lag": lag}))
        self.stopping = self.stopping or bool(stop)

    def _lose(self, event: Event) -> None:
        worker = event.worker
        self._command(LOST, worker)
        note = self.server.settle(worker)
        for step, _ in self.shares.lose(worker, (note.first, note.second) if note else None):
            if note and (worker, step) not in self.computed:  # only another server has heard of it
                self._computed(worker, note)
            self.applied.append(self.computed.pop((worker, step)))
        self._oversee()
        self.idle.discard(worker)
        rank, left = self.server.links[worker].rank, len(self.shares.alive)
        self.console.note(f"worker {worker} (rank {rank}) is lost; {left} go on. {event.lost}")
        if not left:
            raise CommunicationError(f"all workers are lost. The last was rank {rank}: {event.lost}")

    def _ask(self, kind: Kind, step: int) -> tuple[Note, str]:
        """Has a worker do something beside its shares, while all of them wait. Returns its answer."""
        self.answer, asked, commanded = None, -1, time.monotonic()
        while self.answer is None:
            if time.monotonic() - commanded > ALIVE_S:
                self._command(ALIVE)
                commanded = time.monotonic()
            if asked not in self.shares.alive:
                asked = min(self.idle)
                self.idle.discard(asked)
                self.server.order(asked, kind, step)
            self._wait()
        self.idle.add(asked)
        return self.answer

    def end_step(self) -> dict[str, Any]:
        return self.known

    def compare(self, step: int) -> Fault | None:
        ruined, self.state.limit = last_update(self.state)
        asked = torch.stack([ruined, ruined.new_tensor(self.stop_wanted())])
        destroyed, stopping = self.state.mesh.axis("run").all_reduce(asked).tolist()
        self.stopping = self.stopping or bool(stopping)
        return destroyed_after(step, self.job.recipe.faults) if destroyed else None

    def validate(self, step: int) -> None:
        job = self.job
        held_out = job.val_batches is not None or bool(job.data is not None and job.data.validation_sets)
        if self.ranks.first and held_out:
            _, text = self._ask(Kind.VALIDATE, step)
            line = {"step": step, **json.loads(text)}
            self._write(line)
            self.console.validation(line)

    def sample(self, step: int) -> None:
        job = self.job
        writes = card_of(job.recipe.model).causal and job.data is not None and job.data.tokenizer is not None
        if not self.ranks.first or not writes:
            return
        note, text = self._ask(Kind.SAMPLE, step)
        if note.figures[0]:
            self.console.note(f"step {step}: no sample: {text}")
        else:
            self._write({"step": step, SAMPLE: text})
            self.console.sample(text, step)

    def save(self, step: int, ends: bool, waits: bool = True) -> None:
        while step < self.limit:  # a fault ends the run, and workers compute later steps already
            self.stopping = True
            self.take()
            step = self.state.step
        if not waits and (fault := weights_fault(self.state, self.job.recipe.faults)):
            raise UserError(str(fault))
        super().save(step, ends, waits)


def worker_state(recipe: Recipe, ranks: Ranks, links: list[Link]) -> tuple[State, Exchange]:
    """A worker's state, whose weights come from the servers, and what takes its gradients there."""
    servers, worker = recipe.servers, ranks.rank - recipe.servers.count
    alone = recipe.model_copy(update={"layout": recipe.layout.model_copy(update={"dp_replicate": 1})})
    mesh = Mesh(Layout.from_recipe(alone.layout), replace(ranks, rank=worker, world=1))
    working = torch_dtype(compute_mode(recipe, ranks.device).working)
    parallel = parallelize(alone, mesh, working, torch.float32)
    replica, card = parallel.replicas[0], card_of(recipe.model)
    module = cast("LanguageModel", parallel.stages[0])
    assert isinstance(replica, DataParallel)
    replica.only_working()
    pushed = torch_dtype(recipe.precision.reduce)
    exchange = Exchange(messages(card, servers), units(card), module, replica, links, servers, pushed)
    replica.sum = exchange
    module.train()
    return State(parallel, mesh, torch.zeros(2, dtype=torch.float64)), exchange


def work(job: Job, ranks: Ranks, interrupt: Interrupt) -> bool:
    """A worker's part: does what the first server orders. Returns True if the run is complete."""
    with progress.phase("starting"):
        state, exchange = worker_state(job.recipe, ranks, connect(job, ranks))
        trained = validated = False
        if rounding(job.recipe) is not None:
            exchange.need_all(pull=True)
        settle(state, job, ranks, False)  # the first server knows whether the run is resumed
    while (note := exchange.order()).kind != Kind.END:
        if note.kind == Kind.TRAIN:
            slower = nullcontext() if trained else progress.phase("a slower step")  # it may compile
            with slower, names_step(state):
                _train(job, ranks, state, exchange, note, interrupt)
            trained = True
        elif note.kind == Kind.VALIDATE:
            with nullcontext() if validated else progress.phase("the first validation"):
                figures = validate(state, validation_sets(job, state.mesh))
            validated = True
            exchange.report(note.first, json.dumps(figures))
        else:
            exchange.need_all()
            assert job.data
            assert job.data.tokenizer
            try:
                with progress.phase("sampling"):
                    text = sampled(state, job, note.first, job.data.tokenizer)
                exchange.report(note.first, text)
            except UserError as error:  # a diverged model cannot write; the run continues
                exchange.report(note.first, str(error), (1.0,))
    exchange.close()
    state.parallel.close()
    return bool(note.first)


def _train(
    job: Job, ranks: Ranks, state: State, exchange: Exchange, order: Note, interrupt: Interrupt
) -> None:
    """Computes the gradient of a share."""
    recipe, train = job.recipe, job.recipe.train
    begin, clock = time.time(), time.perf_counter()  # the hosts' clock may jump, the other one does not
    step, share, before = order.first, order.second, exchange.waited
    size, rows = train.global_batch_size, train.microbatch_size or 1
    workers = ranks.world - recipe.servers.count
    microbatches = share_of(source_of(job), step, size, rows, state.mesh, share=(share, workers))
    read = time.perf_counter() - clock
    state.step = exchange.step = step
    if state.grows:
        set_windows(state, recipe.model, recipe.model.ramped(step))
    loss = forward_backward(state, microbatches, train.seed).item()
    square = 0.0
    if not recipe.servers.synchronous:
        square = gradient_square(state.parallel.replicas, state.mesh).item()
        if loss - loss != 0:  # not finite: then no server takes the gradient
            square = float("nan")
    waited, memory = exchange.waited - before, float(peak_memory_bytes("cpu"))
    end = begin + time.perf_counter() - clock
    figures = loss, square, float(interrupt.wanted()), begin, end, waited, read, memory
    exchange.computed(step, share, figures)
    progress.end_step(step + 1, time.perf_counter() - clock, read)
