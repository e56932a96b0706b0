"""Starts a run: chooses layout, data and folder, then starts one or more local ranks."""

from __future__ import annotations

import json
import os
import sys
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from signal import SIGINT, Signals
from typing import NamedTuple

import torch
from torch import nn

from fivefold import wings
from fivefold.checkpoint import store
from fivefold.comm.membership import Endpoint
from fivefold.data import DataSet, prepare, progress_bar
from fivefold.errors import CommunicationError, UserError, several
from fivefold.files import expanded, guard, numbered_folder, owned
from fivefold.host.machine import (
    cores,
    ensure_open_files,
    keep_few_primitives,
    keep_freed_memory,
    keep_little_memory,
    let_segments_grow,
)
from fivefold.launch import ranks as ranks_
from fivefold.launch import verdict
from fivefold.launch.launchers import LAUNCH, may_be_again, restarted_by
from fivefold.launch.local import Attempt, launch
from fivefold.launch.verdict import STOPPED, Failure, Interrupt, Leaving, run_complete, unsaved
from fivefold.models.card import card_of
from fivefold.models.custom import CustomModel, ModuleCard
from fivefold.models.recomputation import budget_of
from fivefold.observe.console import QUIET
from fivefold.recipe import Recipe, change, entries, resolve
from fivefold.recipe.resolve import in_layout, nearest_layout
from fivefold.recipe.rules import allows
from fivefold.recipe.rules.texts import wrong_patterns
from fivefold.sharding.layout import Layout, to_text
from fivefold.sharding.layout_rules import validate
from fivefold.sharding.sync import replica_group_layout
from fivefold.sharding.tiers import OFFLOADS
from fivefold.step.custom import custom_model, try_out
from fivefold.step.state import compute_mode
from fivefold.train.forecast import forecast
from fivefold.train.job import BatchSource, Job, initial
from fivefold.train.out_of_memory import advice, what_is_saved
from fivefold.train.peak import matmul_rate
from fivefold.train.restart import Elastic, Restarts, go_back_once, grace_s, newest, record
from fivefold.train.run import run_rank
from fivefold.train.share import batches_of, streaming
from fivefold.train.user_hooks import WITHOUT, UserHooks

AUTO = "auto"  # `--resume-from auto`


def run_command(
    recipe: Recipe,
    nproc: int | tuple[int, int] | None = None,
    out: Path | None = None,
    resume: bool = False,
    resume_from: Path | str | None = None,
    *,
    name: str = "run",
    fork: bool = True,
    module: nn.Module | None = None,
    card: ModuleCard | None = None,
    batches: BatchSource | None = None,
    val_batches: BatchSource | None = None,
    endpoint: Endpoint | None = None,
    brings: UserHooks = WITHOUT,
) -> Path:
    """Trains a recipe and returns its run folder.

    nproc: local ranks to start; None: as many as the layout says; (fewest, most): as many as there are slots for
    (`train/restart.py`). Under torchrun or Slurm their ranks are used. out: run folder; None: a new one, runs/NAME-N.
    resume: from its last checkpoint. resume_from: AUTO: from a checkpoint if there is one, else start; the default for
    ranks that another launcher may have started before (`launch/launchers.py`). A path: from this checkpoint. fork:
    forks local ranks. This is quick, but only safe in a process that has used neither torch's threads nor a GPU, such
    as the command line's. Otherwise ranks are spawned, and their arguments are pickled. module, card, batches,
    val_batches: the user's own model and data instead of the recipe's. endpoint: trains one replica group of the
    recipe's, which meets the others there. brings: callbacks, metrics and the like of the user's.

    Raises:
        UserError: the layout, data, folder or checkpoint is not valid.
        RankFailed: a rank died or hung too often. The message names it.
        SystemExit: a signal stopped the run: with STOPPED after saving, else with 128 + its number.
    """
    rank, world, *_ = ranks_.found() or (0, None)
    caller, resumes = Caller(rank, world, restarted_by()), resume or resume_from is not None
    if out is not None and not resume and resume_from is None and may_be_again():
        resume_from, resumes = AUTO, True
    chosen = None if resume_from is None or resume_from == AUTO else Path(resume_from)
    span = nproc if isinstance(nproc, tuple) and world is None else None
    entries.require(entries.chosen(recipe.observe.tracker))
    if recipe.train.init_from:  # the absolute path: the run may resume elsewhere
        path = str(expanded("train.init_from", recipe.train.init_from).absolute())
        recipe = recipe.model_copy(update={"train": recipe.train.model_copy(update={"init_from": path})})
    recipe, asked = _for_ranks(recipe, nproc, caller, resume_from is not None, endpoint)
    brings.check(recipe, module, world is None and (bool(span) or recipe.layout.ranks > 1))
    tries = not (resumes or recipe.data.stream or torch.cuda.is_available())
    recipe, data, own = _with_data(recipe, module, card, batches, caller, tries)
    asked = asked and resolve(asked, vocab_size=recipe.model.vocab_size or 2)
    recipe, starts_from = _within_budget(recipe, caller), None
    if recipe.train.init_from and not (resumes and out is not None and store.checkpoints(out)):
        starts_from = initial(recipe, data.tokenizer if data is not None else None, own)
    out = _run_folder(out, name, resume, resumes, caller)
    for folder in (out, chosen):
        if folder is not None:
            guard(folder, look=caller.first)
    users = module, batches, val_batches
    job = Job(recipe, out, data, *users, resumes, endpoint, chosen, asked, starts_from, card, brings)
    _run(job, caller, span, fork)
    return out


class Caller(NamedTuple):
    """How this process was started. rank, world: those of a foreign launcher's ranks; world None: there is none.
    restarted: the launcher that says that it has started this rank before."""

    rank: int
    world: int | None
    restarted: str | None

    @property
    def first(self) -> bool:
        """True for the process that prints, checks the run folder and owns it."""
        return self.rank == 0


def _run(job: Job, caller: Caller, span: tuple[int, int] | None, fork: bool) -> None:
    """Runs this process's rank, or starts local ones: as many as the layout has, or `span` of them. Raises SystemExit:
    a signal stopped the run."""
    recipe, layout = job.recipe, Layout.from_recipe(job.recipe.layout)
    # The ranks that train here: of all replica groups, or of this one
    layout = replica_group_layout(layout, recipe.replica_groups.count) if job.endpoint else layout
    world = layout.ranks + recipe.servers.count
    keep_little_memory() if OFFLOADS[layout.offload].disk else keep_freed_memory()
    let_segments_grow()
    if job.module is None and card_of(recipe.model).has_experts:
        keep_few_primitives()
    if not torch.cuda.is_available() and caller.world is None:  # measured before the run disturbs it
        matmul_rate(compute_mode(recipe, torch.device("cpu")).measured, cores(), improve=True)
    with owned(job.out) if caller.first else nullcontext(), Interrupt() as interrupt, streaming(job):
        if caller.first:
            if caller.restarted:
                record(job.out, "launcher", f"{caller.restarted} started the ranks again", world)
            elif job.resume_from is not None:
                go_back_once(job.out, job.resume_from)
        if caller.rank >= world:
            ranks_.wait_as_spare(recipe.launch.meet)
            return  # it knows nothing of what is saved: only the others say so
        if caller.world is not None or (world == 1 and not span):
            stopped = _run_here(job, interrupt, world)
        else:
            stopped = _run_local(job, world, span, fork)
        if stopped is not None:
            raise SystemExit(STOPPED)
        run_complete()
        if caller.first:
            with suppress(wings.Missing):
                forecast().add_exact(job)


def _for_ranks(
    recipe: Recipe,
    nproc: int | tuple[int, int] | None,
    caller: Caller,
    may_resume: bool,
    endpoint: Endpoint | None,
) -> tuple[Recipe, Recipe | None]:
    """The recipe with a layout for the ranks that there are, and the one that was asked for if a later start may return
    to it."""
    given = nproc if isinstance(nproc, int) else None
    most = given or (nproc[1] if isinstance(nproc, tuple) else None)
    ensure_open_files(caller.world or most or Layout.from_recipe(recipe.layout).ranks)
    if isinstance(nproc, tuple) and caller.world is None:
        nearest_layout(recipe, nproc[0])  # refuses what cannot be elastic
    elif (
        caller.world is not None
        and may_resume
        and recipe.replica_groups.count == 1
        and not recipe.servers.count
    ):
        fit = nearest_layout(recipe, caller.world)
        if fit.line:
            if caller.first:
                print(fit.line, file=sys.stderr)
            return fit.recipe, recipe
    elif endpoint is None:
        return _fit_layout(recipe, given, caller.world, caller.first), None
    else:
        own = replica_group_layout(Layout.from_recipe(recipe.layout), recipe.replica_groups.count)
        validate(own, caller.world or given or own.ranks)
    return recipe, None


def _with_data(
    recipe: Recipe,
    module: nn.Module | None,
    card: ModuleCard | None,
    batches: BatchSource | None,
    caller: Caller,
    tries: bool,
) -> tuple[Recipe, DataSet | None, CustomModel | None]:
    """The recipe, resolved, its data (None: the user's own batches), and the user's own module, if there is one. tries:
    the module computes two microbatches. Raises UserError: the module does not train, or a pattern of the recipe names
    no parameter."""
    data, vocab_size = None, recipe.model.vocab_size
    if batches is None:
        data = prepare_data(recipe, quiet=not caller.first or bool(os.environ.get(QUIET)))
        vocab_size = data.vocab_size
    elif module is None and vocab_size is None:
        raise UserError(
            "your own data needs model.vocab_size, the number of token ids: --set model.vocab_size=N"
        )
    recipe = resolve(recipe, vocab_size=vocab_size or 2)
    own = None if module is None else custom_model(recipe, module, card)
    if wrong := wrong_patterns(recipe, (own or card_of(recipe.model)).parameters):
        raise UserError(wrong)
    if module is not None and tries:
        source = batches_of(recipe, data, module=module) if data is not None else batches
        try_out(module, source, recipe.train)
    return recipe, data, own


def _run_local(job: Job, world: int, span: tuple[int, int] | None, fork: bool) -> int | None:
    """Starts local ranks, and again after failures. Returns the signal that stopped them."""
    if span:
        elastic = Elastic(job, *span, _attempt)
        restarts = Restarts(job, elastic.attempt, elastic.failed, elastic=True)
    else:
        restarts = Restarts(job, partial(_attempt, world))
    outcome = launch(restarts.attempt(job), fork, restarts.again)

    def what_to_do(failure: Failure) -> str:
        if failure.kind == "exhausted":
            base, held = json.loads(failure.more)
            return "\n".join(["", *advice(job, world, base, held), what_is_saved(job)])
        lines = "\n".join(["", *advice(job, world)]) if failure.kind == "memory" else ""
        resume = f". Resume from the last checkpoint with: {job.resume_command}"
        return lines + resume if newest(job.out) else lines

    return restarts.conclude(outcome, what_to_do)


def _attempt(world: int, job: Job) -> Attempt:
    """What local ranks do for a job."""
    servers = job.recipe.servers  # asynchronous training goes on without a worker
    expendable = range(servers.count, world) if servers.staleness else range(0)
    grace, timeout_s = partial(grace_s, job), job.recipe.launch.timeout
    return Attempt(partial(run_rank, job), world, expendable, grace, timeout_s=timeout_s)


def _run_here(job: Job, interrupt: Interrupt, world: int) -> int | None:
    """Runs this process's rank, one of a foreign launcher or the only one. Returns the signal that stopped it. world:
    the ranks that train."""
    try:
        launch = job.recipe.launch
        with ExitStack() as stack:
            with Leaving():  # the others may never come
                ranks = stack.enter_context(ranks_.join(launch.timeout, launch.meet, members=world))
            return run_rank(job, ranks)
    except KeyboardInterrupt:
        raise SystemExit(unsaved(SIGINT)) from None
    except Exception as error:
        if interrupt.signal is not None:
            print(f"stopped by {Signals(interrupt.signal).name}, but not saved: {error}", file=sys.stderr)
            raise SystemExit(unsaved(interrupt.signal)) from error
        if verdict.lost(error) and not isinstance(error, UserError | CommunicationError):
            raise CommunicationError(f"this rank lost another one: {verdict.backend_words(error)}") from None
        raise


def _within_budget(given: Recipe, caller: Caller) -> Recipe:
    """The recipe with a mode of recomputation for each block, if `layout.recompute` is a budget, and with a number for
    `layout.offload_window = 0`: by this machine's own times. Ranks of a launcher, perhaps on several machines, take the
    same table instead, so they agree. Raises UserError: the budget is too small."""
    recipe, layout = given, given.layout
    if budget_of(layout.recompute) is None and layout.offload_window:
        return recipe
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    known = recipe.precision.model_copy(update={"mode": compute_mode(recipe, device).name})
    name = torch.cuda.get_device_name() if device.type == "cuda" else ""
    recipe = recipe.model_copy(update={"precision": known})
    chosen = forecast().choose(recipe, name, caller.world is None)
    if not layout.offload_window and caller.first:
        print(f"offload_window = 0 becomes {chosen.window} blocks", file=sys.stderr)
    if chosen.line and caller.first:
        print(chosen.line, file=sys.stderr)
    update = {"offload_window": chosen.window, "recompute": chosen.recompute}
    return given.model_copy(update={"layout": layout.model_copy(update=update)})


def _fit_layout(recipe: Recipe, nproc: int | None, launched: int | None, tell: bool = True) -> Recipe:
    """The recipe with a layout for the available ranks.

    Data-parallel ranks are added or removed as needed, because they change speed but not results. Every other axis must
    fit as it is. tell: says what a launcher's ranks have changed.
    """
    layout = Layout.from_recipe(recipe.layout)
    axis = "dp_shard" if layout.zero and layout.dp_replicate == 1 else "dp_replicate"
    rest = layout.ranks // getattr(layout, axis)
    world = launched or nproc
    if world is not None and recipe.servers.count:
        if world <= recipe.servers.count:
            raise UserError(
                f"{several(world, 'rank')}: too few for sync.servers = {recipe.servers.count} and at least one worker. "
                f"Nearest valid: {recipe.servers.count + layout.ranks} ranks"
            )
        world -= recipe.servers.count
    if world is None:
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if 1 < gpus < layout.ranks:
            raise UserError(
                f"layout '{to_text(layout)}' needs {layout.ranks} GPUs, but this machine has {gpus}. "
                f"Use --layout dp={gpus}"
            )
        world = layout.ranks if rest > 1 or max(gpus, cores() if not gpus else 1) > 1 else 1
    if world == layout.ranks:
        return recipe
    if recipe.replica_groups.count > 1 or recipe.servers.staleness:  # their number changes what is trained
        validate(layout, world, partial(allows, recipe))
    size = world // rest if world % rest == 0 else getattr(layout, axis)
    wanted = replace(layout, **{axis: size}, microbatches=None)
    validate(wanted, world, partial(allows, recipe))
    if world == 1 and not nproc and not launched:
        print(f"note: {to_text(layout)} needs {layout.ranks} devices; running on one", file=sys.stderr)
    if launched and tell:
        ranks = several(launched, "rank")
        print(f"layout {to_text(layout)} on the launcher's {ranks}: {to_text(wanted)}", file=sys.stderr)
    return change(in_layout(recipe, wanted))


def prepare_data(recipe: Recipe, quiet: bool) -> DataSet:
    with nullcontext() if quiet else progress_bar() as progress:
        return prepare(recipe, progress)


def _run_folder(out: Path | None, name: str, must_resume: bool, resumes: bool, caller: Caller) -> Path:
    """The run folder. A given one must be new, or hold the run to resume. Rank 0 of a launcher checks that."""
    if out is None:
        if resumes:
            option = "--resume" if must_resume else "--resume-from"
            raise UserError(f"{option} needs the run's folder: fivefold train RUN {option}, or --out RUN")
        if caller.world is not None:
            raise UserError("ranks of torchrun, Slurm or mpirun need a common run folder; add --out DIR")
        return numbered_folder(Path("runs"), name)
    if not caller.first:
        return out
    if out.exists() and not out.is_dir():
        raise UserError(f"--out {out}: this is a file, not a folder")
    if must_resume and not (out / "recipe.toml").is_file():
        raise UserError(f"--resume: {out} is not a run folder (it has no recipe.toml)")
    files = ("recipe.toml", "metrics.jsonl", "checkpoints")
    if not resumes and any((out / name).exists() for name in files):
        torchrun = "; torchrun with --max-restarts 1, or more, resumes by itself"
        raise UserError(
            f"{out} already holds a run; add --resume to resume it (fivefold.resume in Python), or choose another "
            f"--out{torchrun if LAUNCH in os.environ else ''}"
        )
    return out
