"""Runs one rank from the first line on the console to the last: builds the state, resumes, trains, goes back after a
fault, reports."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

import torch

from fivefold import wings
from fivefold.checkpoint import keep, store
from fivefold.comm import all_or_none, told
from fivefold.comm.membership import Membership
from fivefold.comm.progress import progress
from fivefold.comm.watchdog import watching
from fivefold.data.dataset import amounts, facts, stages_in_words, unseparated_parts
from fivefold.data.tokenizer import load_tokenizer
from fivefold.errors import UserError, several
from fivefold.files import guard, make_folder, write_atomically
from fivefold.host import gpus, machine
from fivefold.host.machine import describe, untried_torch
from fivefold.kernels import native
from fivefold.launch.ranks import Ranks, words_first
from fivefold.launch.verdict import Interrupt
from fivefold.models.card import card_of
from fivefold.observe import prediction
from fivefold.observe.console import Console
from fivefold.observe.faults import ROLLBACK, restart_figures
from fivefold.observe.metrics import MetricsWriter, read_metrics
from fivefold.observe.report import write_report
from fivefold.observe.summary import summarize
from fivefold.parallel.server import Server
from fivefold.recipe import count_parameters, leave_out, to_toml, tokens_per_step
from fivefold.recipe.resolve import warnings
from fivefold.recipe.rules.combinations import notes
from fivefold.step.state import State, build_state, compute_mode
from fivefold.train.checked import anywhere, assert_same
from fivefold.train.faults import ROLLBACKS, Fault, goes_back, read_rollbacks
from fivefold.train.forecast import forecast
from fivefold.train.hooks import RunHooks
from fivefold.train.instruments import RunForecast
from fivefold.train.job import Job, shared, tokenizer_to_keep, write_initial
from fivefold.train.loop import train_loop
from fivefold.train.out_of_memory import explains_memory, foreseen
from fivefold.train.resume import load_initial, load_newest, rate_jump, resume
from fivefold.train.self_test import settle
from fivefold.train.server_run import ServerHooks, build_server, work
from fivefold.train.share import reader


def run_rank(job: Job, ranks: Ranks) -> int | None:
    """Trains on one rank. Returns the signal that stopped the run early, or None if it is complete."""
    recipe = job.recipe
    guard(job.out, look=False)  # a spawned rank does not know that the launcher did
    limit = machine.limit()
    base = limit.held if limit else 0  # bytes that count before this rank has tensors
    with ExitStack() as stack, words_first(), explains_memory(job, ranks, base) as running:
        stack.callback(native.hold, None)
        message = "stopping: finishing the steps under way, then saving" if ranks.first else ""
        interrupt = stack.enter_context(Interrupt(message))
        stack.enter_context(watching(ranks, recipe.observe.hang_s, job.out / "traces"))
        if 0 < recipe.servers.count <= ranks.rank:
            return None if work(job, ranks, interrupt) else interrupt.signal or 15
        with progress.phase("starting"):
            state, server, resumed = _first_state(job, ranks, stack)
            membership = join(state, job) if job.endpoint else None
            predicted = _predicted(job, ranks, state.step)
            console, metrics = _opened(job, ranks, state.step, stack)
            for note in _introduction(state, job, ranks, resumed is not None):
                console.note(note)
            if ranks.first:
                console.note(predicted.write())
                if predicted.peak_bytes is not None:
                    for note in foreseen(job, predicted.peak_bytes, ranks.local_world, base):
                        console.note(note)
            for note in settle(state, job, ranks, resumed is not None):
                console.note(note)
            # Before the first step: there is nothing new to save
            leaving = anywhere(interrupt.wanted(), state.mesh.axis("run"))
            given = state, job, ranks, console, metrics, interrupt.wanted, predicted
            hooks = RunHooks(*given) if server is None else ServerHooks(*given, server)
            running.append(hooks)
            stack.callback(hooks.close)
            for text in resumed or ():
                hooks.alarm(state.step, text)
            # It may have joined in the last outer step
            if membership is not None and state.step == recipe.train.steps:
                hooks.save(state.step, ends=True)
        complete = False
        if isinstance(hooks, ServerHooks):
            complete = hooks.run(leaving)
        elif not leaving:
            complete = train(hooks)
        enough = _conclude(hooks, complete)
        if server is not None:
            server.close()
        # The ranks leave together: a launcher stops the others when one is gone
        state.mesh.axis("run").barrier()
        if membership is not None:
            membership.leave(complete)
        return None if complete or enough else interrupt.signal or 15


def _predicted(job: Job, ranks: Ranks, start: int) -> RunForecast:
    """The prediction of a run that begins after step `start`, or one that says why there is none."""
    try:
        return forecast().of_run(job, ranks, start)
    except wings.Missing as error:
        return RunForecast(str(error))


def train(hooks: RunHooks) -> bool:
    """Trains to the recipe's last step, and goes back where the recipe says so. Returns False if it was stopped before.
    Raises UserError: a fault that ends the run."""
    state, job, run = hooks.state, hooks.job, hooks.state.mesh.axis("run")
    past: dict[str, Any] = {}
    with all_or_none(run):
        past = read_rollbacks(job.out) if run.index == 0 else {}
    past = json.loads(told(json.dumps(past), 0, run))
    state.rollbacks = [(int(step), int(to)) for step, to in past["rollbacks"]]
    state.left_out = [(int(step), int(size)) for step, size in past["left_out"]] or state.left_out
    if goes_back(job.recipe.faults) and state.step == 0:
        hooks.save(0, ends=True)  # a save that fails is an error here: there would be nothing to go back to
    while True:
        with reader(job, state.mesh, state.step, state.left_out) as hooks.next_batch:
            try:
                return train_loop(state, job.recipe, hooks)
            except Fault as error:
                hooks.settle()  # a save that is on its way may hold the newest good state
                if error.act != "rollback":
                    raise error.ended(job.out) from None
                fault = error
        with progress.phase("going back"):
            _go_back(hooks, fault)


def _go_back(hooks: RunHooks, fault: Fault) -> None:
    """Goes back after a fault: loads the newest valid checkpoint that the fault leaves in place, sets those after it
    aside, and leaves out the data in between. If the run went back to that one the last time, it takes the one before:
    the cause may lie before it. Raises UserError: there is none, or the run has gone back too often."""
    state, job, run = hooks.state, hooks.job, hooks.state.mesh.axis("run")
    most, rollbacks, left_out = job.recipe.faults.rollbacks, state.rollbacks, state.left_out
    if len(rollbacks) >= most:
        raise UserError(
            f"{fault.said}. The run has gone back {len(rollbacks)} times, and faults.rollbacks = {most} allows no more"
        )
    folders = list[Path]()
    with all_or_none(run):
        folders = [folder for folder in store.checkpoints(job.out) if store.step_in(folder) <= fault.back_to]
    assert_same(folders[::-1], state.mesh)
    if len(folders) > 1 and rollbacks and store.step_in(folders[-1]) == rollbacks[-1][1]:
        folders.pop()
    if state.outer is not None:
        state.outer.forget()
    checkpoint, damages = load_newest(state, job, folders[::-1])
    if checkpoint is None:
        raise UserError(
            f"{fault.said}. There is no valid checkpoint up to step {fault.back_to} to go back to"
            + "".join(f". {line}" for line in damages.values())
        )
    step = hooks.right = state.step
    state.rollbacks, state.left_out = [*rollbacks, (fault.step, step)], left_out
    how = "takes the same data again"
    if fault.leaves_out:
        state.left_out = leave_out(job.recipe.train, left_out, step, fault.step)
        how = f"leaves out the data of steps {step + 1} to {fault.step}"
    with all_or_none(run):
        if run.index == 0:
            # First: whoever is killed here goes back again. The run does not come to these checkpoints any more
            for folder in store.checkpoints(job.out):
                if store.step_in(folder) > step:
                    keep.set_aside(folder, keep.LATER)
            text = {"rollbacks": state.rollbacks, "left_out": list(state.left_out)}
            write_atomically(job.out / ROLLBACKS, json.dumps(text))
            if hooks.metrics is not None:
                hooks.metrics.rewind(step)
                hooks.metrics.write({"step": step, ROLLBACK: {"from": fault.step, "why": fault.said}})
    for line in (*damages.values(), f"{fault.said}. The run goes back to step {step}, and {how}"):
        hooks.console.warn(line)


def _first_state(job: Job, ranks: Ranks, stack: ExitStack) -> tuple[State, Server | None, list[str] | None]:
    """The state to train from: of a checkpoint, if the run resumes, else with initial weights; the parameter server
    that has it, if it is one's; and what `resume` returns."""
    frozen, server = job.recipe.checkpoint.frozen, None
    replica_group = job.endpoint.group if job.endpoint else None
    if job.recipe.servers.count:
        state, server = build_server(job, ranks)
    else:
        state = build_state(job.recipe, ranks, job.module, replica_group, job.card, job.own.functions())
    stack.callback(state.parallel.close)
    resumed = resume(state, job) if job.resume else None
    if frozen:
        state.elsewhere = None
    if job.initial is not None and resumed is None:
        load_initial(state, job.initial, job.card.named if job.card else str, frozen)
    if server is not None:
        server.start()  # workers may test the weights before the first step
    return state, server, resumed


def join(state: State, job: Job) -> Membership:
    """Joins the other replica groups (`--replica-group`, `--meet`), and sets the state to theirs if they are further.

    Raises:
        BusyError: the others cannot be reached.
        UserError: they train something else.
    """
    endpoint, recipe, inside = job.endpoint, job.recipe, state.mesh.axis("all")
    assert endpoint is not None
    assert state.outer is not None
    count = recipe.replica_groups.count
    if inside.index == 0:
        print(
            f"replica group {endpoint.group} of {count}: meets the others at {endpoint}",
            file=sys.stderr,
            flush=True,
        )
    membership = Membership(endpoint, count, inside, recipe.sync.patience, shared(job))
    state.step = state.outer.join(membership, state.step, recipe.train.steps or 0)
    return membership


def _opened(job: Job, ranks: Ranks, step: int, stack: ExitStack) -> tuple[Console, MetricsWriter | None]:
    """The console, and the metrics in a run folder with its first files; these on rank 0 only."""
    recipe, out = job.recipe, job.out
    steps, every = recipe.train.steps or 0, recipe.observe.log_every
    console = stack.enter_context(closing(Console(steps, rank=ranks.rank, start_step=step, log_every=every)))
    if not ranks.first:
        return console, None
    make_folder(out)
    write_atomically(out / "recipe.toml", to_toml(job.asked or recipe))
    write_atomically(out / "machine.json", json.dumps(describe(), indent=2) + "\n")
    if job.data is not None:
        write_atomically(out / "data.json", json.dumps(facts(recipe, job.data), indent=2) + "\n")
    if job.initial is not None:
        write_initial(out, job.initial)
    if (tokenizer := tokenizer_to_keep(job)) is not None:
        there = ""
        with suppress(UserError):  # a file that is missing, or was cut
            there = load_tokenizer(out / "tokenizer.json").fingerprint
        if there != tokenizer.fingerprint:
            tokenizer.save(out / "tokenizer.json")
    metrics = MetricsWriter(out, recipe.observe.tracker, step=step, about=recipe.model_dump())
    stack.enter_context(closing(metrics))
    if metrics.damaged:
        console.note(f"metrics.jsonl: {several(metrics.damaged, 'damaged line')} left out")
    return console, metrics


def _introduction(state: State, job: Job, ranks: Ranks, resumed: bool) -> Iterator[str]:
    """What is trained, where, from which step and with which weights; and what to know of it."""
    recipe, module = job.recipe, job.module
    owned = sum(w.numel() for w in state.masters().values())
    parameters = count_parameters(recipe.model) if module is None else owned
    where = torch.cuda.get_device_name(ranks.device) if ranks.device.type == "cuda" else "CPU"
    name = recipe.model.arch if module is None else type(module).__name__
    mode = compute_mode(recipe, ranks.device, module is not None)
    yield (
        f"{name}, {parameters:,} parameters, {mode.name}; {several(ranks.world, 'rank')} on {where}; "
        f"{tokens_per_step(recipe):,} tokens per step; run folder {job.out}"
    )
    if job.data is not None and job.data.mixed:
        yield from (f"data, {line}" for line in stages_in_words(recipe, amounts(recipe, job.data)))
    if job.data is not None and ranks.first:
        yield from (f"WARNING: {warning}" for warning in unseparated_parts(recipe, job.data))
    yield from (*notes(recipe), *state.mesh.notes(), *state.parallel.notes())
    yield from (f"WARNING: {warning}" for warning in warnings(recipe))
    if untried := untried_torch(torch.__version__):
        yield f"WARNING: {untried}"
    yield from (*filter(None, [ranks.near]), *gpus.notes())
    if ranks.device.type == "cuda":
        yield from (f"WARNING: {one['warning']}" for one in gpus.variables(os.environ) if one["warning"])
    if ranks.device.type == "cpu" and native.why_not():
        yield f"fused CPU kernels are off, so training is slower: {native.why_not()}"
    if resumed:
        yield f"resuming after step {state.step}"
        yield from filter(None, [rate_jump(state, job)])
    elif job.resume:
        yield "no checkpoint yet: starting from step 0"
    if job.initial is not None:
        yield job.initial.line()
    if state.forgotten:
        yield state.forgotten


def _conclude(hooks: RunHooks, complete: bool) -> bool:
    """Writes figures and the report. Returns True if a callback wanted the run to end here."""
    job, out, console = hooks.job, hooks.job.out, hooks.console
    hooks.require_folder()
    with progress.phase("writing the report"):
        hooks.predicted.conclude(hooks.state.mesh, hooks.memory.peak)
        if hooks.ranks.first:
            figures = summarize(read_metrics(out / "metrics.jsonl")) | restart_figures(out)
            report = write_report(out)
            paths = {"checkpoint": store.latest(out)} if store.checkpoints(out) else {}
            if not complete:
                console.note("stopped before the end; everything up to this step is saved")
            predicted = [(row.name, str(row)) for row in prediction.rows(prediction.read(out))]
            # The machine was busy, so its step time says nothing of the prediction
            if "peak_share" in figures:
                predicted = [row for row in predicted if row[0] != prediction.STEP_TIME]
            commands = _next_commands(job) if complete else [job.resume_command]
            console.summary(figures, paths | {"report": report}, commands, predicted)
        enough = hooks.end(complete)
        if hooks.metrics is not None:
            hooks.metrics.close()  # trackers send what is left
    return enough


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
