"""Runs one rank from the first line on the console to the last: builds the state, resumes, trains, reports."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import torch

from fivefold.checkpoint import store
from fivefold.comm.membership import Membership
from fivefold.comm.progress import progress
from fivefold.comm.watchdog import watching
from fivefold.data.dataset import amounts, facts, stages_in_words
from fivefold.data.tokenizer import load_tokenizer
from fivefold.errors import UserError, several
from fivefold.files import guard, make_folder, write_atomically
from fivefold.host.machine import describe, untried_torch
from fivefold.kernels import native
from fivefold.launch.ranks import Ranks
from fivefold.launch.verdict import Interrupt
from fivefold.models.card import card_of
from fivefold.observe import prediction
from fivefold.observe.console import Console
from fivefold.observe.faults import restart_figures
from fivefold.observe.metrics import MetricsWriter, read_metrics
from fivefold.observe.report import write_report
from fivefold.observe.summary import summarize
from fivefold.parallel.server import Server
from fivefold.recipe import count_parameters, to_toml, tokens_per_step
from fivefold.recipe.resolve import warnings
from fivefold.recipe.rules.combinations import notes
from fivefold.step.state import State, build_state, compute_mode
from fivefold.train.checked import anywhere
from fivefold.train.hooks import RunHooks
from fivefold.train.initial import load_initial
from fivefold.train.initial import write as write_initial
from fivefold.train.job import Job, shared, tokenizer_to_keep
from fivefold.train.out_of_memory import Told, foreseen, told
from fivefold.train.prediction import Prediction
from fivefold.train.resume import Resumed, resume
from fivefold.train.rollback import train
from fivefold.train.self_test import settle
from fivefold.train.server_run import ServerHooks, build_server
from fivefold.train.server_worker import work


def run_rank(job: Job, ranks: Ranks) -> int | None:
    """Trains on one rank. Returns the signal that stopped the run early, or None if it is complete."""
    recipe = job.recipe
    guard(job.out, look=False)  # a spawned rank does not know that the launcher did
    with told(job, ranks.rank, ranks.local_world) as rank, ExitStack() as stack:
        stack.callback(native.hold, None)
        message = "stopping: finishing the steps under way, then saving" if ranks.first else ""
        interrupt = stack.enter_context(Interrupt(message))
        stack.enter_context(watching(ranks, recipe.observe.hang_s, job.out / "traces"))
        if 0 < recipe.servers.count <= ranks.rank:
            return None if work(job, ranks, interrupt) else interrupt.signal or 15
        with progress.phase("starting"):
            state, server, resumed = _first_state(job, ranks, stack)
            membership = join(state, job) if job.seat else None
            predicted = Prediction(job, ranks, state.step)
            stack.enter_context(predicted.watching)
            console, metrics = _opened(job, ranks, state.step, stack)
            introduce(console, state, job, ranks)
            for note in (*_foretold(predicted, rank), *_beginning(state, job, resumed)):
                console.note(note)
            for note in settle(state, job, ranks, resumed is not None):
                console.note(note)
            # Before the first step: there is nothing new to save
            leaving = anywhere(interrupt.wanted(), state.mesh.axis("run"))
            given = state, job, ranks, console, metrics, interrupt.wanted, predicted
            hooks = rank.hooks = RunHooks(*given) if server is None else ServerHooks(*given, server)
            stack.callback(hooks.saver.close)
            for text in resumed.alarms if resumed else ():
                hooks.alarm(state.step, text)
            stack.enter_context(hooks.memory.tracking)
            stack.callback(hooks.profile.close)
            # It may have joined in the last outer step
            if membership is not None and state.step == recipe.train.steps:
                hooks.save(state.step, ends=True)
        complete = state.step == recipe.train.steps
        if isinstance(hooks, ServerHooks):
            complete = hooks.run(leaving)
        elif not leaving:
            complete = train(state, job, hooks)
        enough = _end(hooks, complete)
        if server is not None:
            server.close()
        # The ranks leave together: a launcher stops the others when one is gone
        state.mesh.axis("run").barrier()
        if membership is not None:
            membership.leave(complete)
        return None if complete or enough else interrupt.signal or 15


def _first_state(job: Job, ranks: Ranks, stack: ExitStack) -> tuple[State, Server | None, Resumed | None]:
    """The state to train from: of a checkpoint, if the run resumes, else with initial weights; and the parameter
    server that has it, if it is one's."""
    site, frozen, server = job.seat.site if job.seat else None, job.recipe.checkpoint.frozen, None
    if job.recipe.servers.count:
        state, server = build_server(job, ranks)
    else:
        state = build_state(job.recipe, ranks, job.module, site, job.card, job.own.functions())
    stack.callback(state.parallel.close)
    resumed = resume(state, job) if job.resume else None
    if frozen:
        state.elsewhere = None
    if job.initial is not None and not resumed:
        load_initial(state, job.initial, job.card.named if job.card else str, frozen)
    if server is not None:
        server.start()  # workers may test the weights before the first step
    return state, server, resumed


def join(state: State, job: Job) -> Membership:
    """Joins the other sites (`--site`, `--meet`), and sets the state to theirs if they are further.

    Raises:
        BusyError: the others cannot be reached.
        UserError: they train something else.
    """
    seat, recipe, mesh = job.seat, job.recipe, state.mesh
    assert seat is not None
    assert state.outer is not None
    inside, count = mesh.axis("all"), recipe.sites.count
    if inside.index == 0:
        print(f"site {seat.site} of {count}: meets the others at {seat}", file=sys.stderr, flush=True)
    membership = Membership(seat, count, inside, recipe.sync.patience, shared(job))
    state.step = state.outer.join(membership, state.step, recipe.train.steps or 0)
    return membership


def _opened(job: Job, ranks: Ranks, step: int, stack: ExitStack) -> tuple[Console, MetricsWriter | None]:
    """The console, and the metrics in a run folder with its first files; these on rank 0 only."""
    steps, every = job.recipe.train.steps or 0, job.recipe.observe.log_every
    console = stack.enter_context(Console(steps, rank=ranks.rank, start_step=step, log_every=every))
    if not ranks.first:
        return console, None
    write_run_files(job)
    writer = MetricsWriter(job.out, job.recipe.observe.tracker, step=step, about=job.recipe.model_dump())
    metrics = stack.enter_context(writer)
    if metrics.damaged:
        console.note(f"metrics.jsonl: {several(metrics.damaged, 'damaged line')} left out")
    return console, metrics


def _foretold(predicted: Prediction, rank: Told) -> Iterator[str]:
    """What is predicted of the run, written and said on rank 0."""
    if rank.rank == 0:
        yield predicted.write()
        if predicted.plan is not None:
            yield from foreseen(rank.job, predicted.plan.peak_bytes, rank.local_ranks, rank.base)


def _beginning(state: State, job: Job, resumed: Resumed | None) -> Iterator[str]:
    """From which step and with which weights the run begins."""
    if resumed is not None:
        yield f"resuming after step {state.step}"
    elif job.resume:
        yield "no checkpoint yet: starting from step 0"
    if job.initial is not None:
        yield job.initial.line()
    if state.forgotten:
        yield state.forgotten


def _end(hooks: RunHooks, complete: bool) -> bool:
    """Writes figures and the report. Returns True if a callback wanted the run to end here."""
    with progress.phase("writing the report"):
        hooks.predicted.conclude(hooks.state.mesh, hooks.memory.peak)
        if hooks.ranks.first:
            conclude(hooks.console, hooks.job, complete)
        enough = hooks.end(complete)
        if hooks.metrics is not None:
            hooks.metrics.close()  # trackers send what is left
    return enough


def write_run_files(job: Job) -> None:
    make_folder(job.out)
    write_atomically(job.out / "recipe.toml", to_toml(job.asked or job.recipe))
    write_atomically(job.out / "machine.json", json.dumps(describe(), indent=2) + "\n")
    if job.data is not None:
        write_atomically(job.out / "data.json", json.dumps(facts(job.recipe, job.data), indent=2) + "\n")
    if job.initial is not None:
        write_initial(job.out, job.initial)
    tokenizer, path = tokenizer_to_keep(job), job.out / "tokenizer.json"
    if tokenizer is not None:
        kept = ""
        with suppress(UserError):  # a file that is missing, or was cut
            kept = load_tokenizer(path).fingerprint
        if kept != tokenizer.fingerprint:
            tokenizer.save(path)


def introduce(console: Console, state: State, job: Job, ranks: Ranks) -> None:
    recipe = job.recipe
    own = sum(w.numel() for w in state.masters().values())
    parameters = count_parameters(recipe.model) if job.module is None else own
    where = torch.cuda.get_device_name(ranks.device) if ranks.device.type == "cuda" else "CPU"
    name = recipe.model.arch if job.module is None else type(job.module).__name__
    mode = compute_mode(recipe, ranks.device, job.module is not None)
    console.note(
        f"{name}, {parameters:,} parameters, {mode.name}; {several(ranks.world, 'rank')} on {where}; "
        f"{tokens_per_step(recipe):,} tokens per step; run folder {job.out}"
    )
    if job.data is not None and job.data.mixed:
        for line in stages_in_words(recipe, amounts(recipe, job.data)):
            console.note(f"data, {line}")
    found = [f"WARNING: {warning}" for warning in warnings(recipe)]
    for note in (*notes(recipe), *state.mesh.notes(), *state.parallel.notes(), *found):
        console.note(note)
    if untried := untried_torch(torch.__version__):
        console.note(f"WARNING: {untried}")
    if ranks.device.type == "cpu" and native.why_not():
        console.note(f"fused CPU kernels are off, so training is slower: {native.why_not()}")


def conclude(console: Console, job: Job, complete: bool) -> None:
    out = job.out
    figures = summarize(read_metrics(out / "metrics.jsonl")) | restart_figures(out)
    report = write_report(out)
    paths = {"checkpoint": store.latest(out)} if store.checkpoints(out) else {}
    paths["report"] = report
    if not complete:
        console.note("stopped before the end; everything up to this step is saved")
    predicted = [(row.name, str(row)) for row in prediction.rows(prediction.read(out))]
    commands = _next_commands(job) if complete else [job.resume_command]
    console.summary(figures, paths, commands, predicted)


def _next_commands(job: Job) -> list[str]:
    """Commands to try with a complete run."""
    if job.module is not None:
        return []
    commands = [f"fivefold export {job.out} exported/"]
    tokenizer = job.data.tokenizer if job.data is not None else None
    if tokenizer is not None and job.recipe.data.chat_template:
        commands.insert(0, f"fivefold chat {job.out}")
    elif card_of(job.recipe.model).causal and tokenizer is not None:
        prompt = shlex.quote(job.recipe.train.sample_prompt or "The ")
        commands.insert(0, f"fivefold generate {job.out} --prompt {prompt}")
    return commands
