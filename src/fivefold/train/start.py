"""Starts a run: chooses layout, data and folder, then starts one or more local ranks."""

from __future__ import annotations

import os
import shlex
import sys
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from signal import SIGINT, Signals

import torch
from torch import nn

from fivefold.bench.peak import matmul_rate
from fivefold.checkpoint import store
from fivefold.comm.membership import Seat
from fivefold.data import DataSet, prepare, progress_bar
from fivefold.errors import CommunicationError, UserError, several
from fivefold.files import expanded, guard, numbered_folder, owned
from fivefold.host.machine import (
    cores,
    ensure_open_files,
    keep_few_primitives,
    keep_freed_memory,
    let_segments_grow,
    return_large_memory,
)
from fivefold.launch import ranks as ranks_
from fivefold.launch import verdict
from fivefold.launch.launchers import LAUNCH, may_be_again, restarted_by
from fivefold.launch.local import Attempt, launch
from fivefold.launch.verdict import STOPPED, Interrupt, Leaving, run_complete, unsaved
from fivefold.models.card import card_of
from fivefold.models.custom import CustomModel, ModuleCard
from fivefold.models.recomputation import budget_of
from fivefold.observe.console import QUIET
from fivefold.plan.predict import budget, priced_here
from fivefold.recipe import Recipe, change, entries, resolve
from fivefold.recipe.resolve import in_layout, nearest_layout
from fivefold.recipe.rules import allows
from fivefold.recipe.rules.texts import wrong_patterns
from fivefold.sharding.layout import Layout, to_text
from fivefold.sharding.layout_rules import validate
from fivefold.sharding.sync import site_layout
from fivefold.sharding.tiers import OFFLOADS
from fivefold.step.custom import custom_model, try_out
from fivefold.step.state import compute_mode
from fivefold.train.initial import Initial, initial
from fivefold.train.job import BatchSource, Job
from fivefold.train.prediction import add_exact, advice
from fivefold.train.restart import Elastic, Restarts, go_back_once, grace_s, newest, note_restart
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
    seat: Seat | None = None,
    brings: UserHooks = WITHOUT,
) -> Path:
    """Trains a recipe and returns its run folder.

    nproc: local ranks to start; None: as many as the layout says; (fewest, most): as many as there are slots for
    (`train/restart.py`). Under torchrun or Slurm their ranks are used.
    out: run folder; None: a new one, runs/NAME-N. resume: continue from its last checkpoint.
    resume_from: AUTO: continue if there is a checkpoint, else start; the default for ranks that another launcher may
    have started before (`launch/launchers.py`). A path: continue from this checkpoint.
    fork: forks local ranks. This is quick, but only safe in a process that has used neither torch's threads nor a GPU,
    such as the command line's. Otherwise ranks are spawned, and their arguments are pickled.
    module, card, batches, val_batches: the user's own model and data instead of the recipe's.
    seat: trains one site of the recipe's, which meets the others there.
    brings: callbacks, metrics and the like of the user's.

    Raises:
        UserError: the layout, data, folder or checkpoint is not valid.
        RankFailed: a rank died or hung too often. The message names it.
        SystemExit: a signal stopped the run: with STOPPED after saving, else with 128 + its number.
    """
    caller = Caller.of_this_process()
    resuming = Resuming.asked(resume, resume_from, out)
    span = nproc if isinstance(nproc, tuple) and caller.world is None else None
    entries.require(entries.chosen(recipe.observe.tracker))
    recipe, asked = _for_ranks(_located(recipe), nproc, caller, resuming, seat)
    started = caller.world is None and (bool(span) or Layout.from_recipe(recipe.layout).ranks > 1)
    brings.check(recipe, module, travels=started)
    data, vocab_size = _data(recipe, module, batches, caller)
    recipe = resolve(recipe, vocab_size=vocab_size)
    own = _own_model(recipe, module, card)
    if module is not None and not (resuming or recipe.data.stream or torch.cuda.is_available()):
        source = batches_of(recipe, data, module=module) if data is not None else batches
        try_out(module, source, recipe.train)
    recipe = _within_budget(recipe, caller)
    found = _initial(recipe, data, own, out if resuming else None)
    out = _run_folder(out, name, resuming, caller)
    for folder in (out, resuming.chosen):
        if folder is not None:
            guard(folder, look=caller.first)
    job = Job(
        recipe, out, data, module, batches, val_batches, bool(resuming),
        _resume_command(out, seat, own=module is not None or batches is not None or bool(brings.everything)),
        seat, resuming.chosen, asked and resolve(asked, vocab_size=vocab_size), found, card, brings,
    )  # fmt: skip
    _run(job, caller, span, fork)
    return out


def _run(job: Job, caller: Caller, span: tuple[int, int] | None, fork: bool) -> None:
    """Runs this process's rank, or starts local ones: as many as the layout has, or `span` of them.

    Raises:
        SystemExit: a signal stopped the run.
    """
    world = _ranks_of(job)
    _set_up_process(job, caller)
    with owned(job.out) if caller.first else nullcontext(), Interrupt() as interrupt, streaming(job):
        if caller.first:
            if caller.restarted:
                note_restart(job.out, caller.restarted, world)
            elif job.resume_from is not None:
                go_back_once(job.out, job.resume_from)
        if caller.rank >= world:
            ranks_.wait_as_spare(job.recipe.launch.meet)
            return  # it knows nothing of what is saved: only the others say so
        if caller.world is not None or (world == 1 and not span):
            stopped = _run_here(job, interrupt, world)
        else:
            stopped = _run_local(job, world, span, fork)
        if stopped is not None:
            raise SystemExit(STOPPED)
        run_complete()
        if caller.first:
            add_exact(job)


@dataclass(frozen=True)
class Caller:
    """How this process was started. rank, world: those of a foreign launcher's ranks; world None: there is none.
    restarted: the launcher that says that it has started this rank before."""

    rank: int
    world: int | None
    restarted: str | None

    @classmethod
    def of_this_process(cls) -> Caller:
        rank, world, *_ = ranks_.found() or (0, None)
        return cls(rank, world, restarted_by())

    @property
    def first(self) -> bool:
        """True for the process that prints, checks the run folder and owns it."""
        return self.rank == 0


@dataclass(frozen=True)
class Resuming:
    """Whether a run resumes. must: `--resume`; the folder has to hold a run. may: `--resume-from`; it may be new, too.
    chosen: the checkpoint; None: the newest."""

    must: bool
    may: bool
    chosen: Path | None

    @classmethod
    def asked(cls, resume: bool, resume_from: Path | str | None, out: Path | None) -> Resuming:
        """The same on all ranks: resuming is a collective."""
        if out is not None and not resume and resume_from is None and may_be_again():
            resume_from = AUTO
        chosen = None if resume_from is None or resume_from == AUTO else Path(resume_from)
        return cls(resume, resume_from is not None, chosen)

    def __bool__(self) -> bool:
        return self.must or self.may


def _for_ranks(
    recipe: Recipe, nproc: int | tuple[int, int] | None, caller: Caller, resuming: Resuming, seat: Seat | None
) -> tuple[Recipe, Recipe | None]:
    """The recipe with a layout for the ranks that there are, and the one that was asked for if a later start may return
    to it."""
    given = nproc if isinstance(nproc, int) else None
    most = given or (nproc[1] if isinstance(nproc, tuple) else None)
    ensure_open_files(caller.world or most or Layout.from_recipe(recipe.layout).ranks)
    if isinstance(nproc, tuple) and caller.world is None:
        nearest_layout(recipe, nproc[0])  # refuses what cannot be elastic
    elif caller.world is not None and resuming.may and recipe.sites.count == 1 and not recipe.servers.count:
        fit = nearest_layout(recipe, caller.world)
        if fit.line:
            if caller.first:
                print(fit.line, file=sys.stderr)
            return fit.recipe, recipe
    elif seat is None:
        return _fit_layout(recipe, given, caller.world), None
    else:
        own = site_layout(Layout.from_recipe(recipe.layout), recipe.sites.count)
        validate(own, caller.world or given or own.ranks)
    return recipe, None


def _data(
    recipe: Recipe, module: nn.Module | None, batches: BatchSource | None, caller: Caller
) -> tuple[DataSet | None, int]:
    """The recipe's data (None: the user's own batches), and the size of the vocabulary."""
    if batches is None:
        data = prepare_data(recipe, quiet=not caller.first or bool(os.environ.get(QUIET)))
        return data, data.vocab_size
    if module is None and recipe.model.vocab_size is None:
        raise UserError(
            "your own data needs model.vocab_size, the number of token ids: --set model.vocab_size=N"
        )
    return None, recipe.model.vocab_size or 2


def _own_model(recipe: Recipe, module: nn.Module | None, card: ModuleCard | None) -> CustomModel | None:
    """The user's own module, if there is one.

    Raises:
        UserError: a pattern of the recipe names no parameter of it, or of the recipe's model.
    """
    own = None if module is None else custom_model(recipe, module, card)
    if wrong := wrong_patterns(recipe, (own or card_of(recipe.model)).parameters):
        raise UserError(wrong)
    return own


def _located(recipe: Recipe) -> Recipe:
    """The recipe with the absolute path of its first weights: the run may resume elsewhere."""
    where = recipe.train.init_from
    if not where:
        return recipe
    train = recipe.train.model_copy(update={"init_from": str(expanded("train.init_from", where).absolute())})
    return recipe.model_copy(update={"train": train})


def _initial(
    recipe: Recipe, data: DataSet | None, own: CustomModel | None, out: Path | None
) -> Initial | None:
    """The weights to start from; None: random ones, or those of a checkpoint of `out`, from which the run resumes."""
    if not recipe.train.init_from or (out is not None and store.checkpoints(out)):
        return None
    return initial(recipe, data.tokenizer if data is not None else None, own)


def _resume_command(out: Path, seat: Seat | None, own: bool) -> str:
    """own: with the user's own model or data, which only Python has."""
    if own:
        return f"fivefold.resume({str(out)!r}, ...)"
    return shlex.join(["fivefold", "train", str(out), "--resume", *(seat.options if seat else ())])


def _ranks_of(job: Job) -> int:
    """The ranks that train here: of all sites, or of this one."""
    recipe = job.recipe
    layout = Layout.from_recipe(recipe.layout)
    return (site_layout(layout, recipe.sites.count) if job.seat else layout).ranks + recipe.servers.count


def _set_up_process(job: Job, caller: Caller) -> None:
    """Sets the allocator, and measures the matmul rate before the run disturbs it."""
    offload = Layout.from_recipe(job.recipe.layout).offload
    return_large_memory() if OFFLOADS[offload].disk else keep_freed_memory()
    let_segments_grow()
    if job.module is None and card_of(job.recipe.model).has_experts:
        keep_few_primitives()
    if not torch.cuda.is_available() and caller.world is None:
        matmul_rate(compute_mode(job.recipe, torch.device("cpu")).measured, cores(), improve=True)


def _run_local(job: Job, world: int, span: tuple[int, int] | None, fork: bool) -> int | None:
    """Starts local ranks, and again after failures. Returns the signal that stopped them."""
    if span:
        elastic = Elastic(job, *span, _attempt)
        restarts = Restarts(job, elastic.attempt, elastic.failed, elastic=True)
    else:
        restarts = Restarts(job, partial(_attempt, world))
    outcome = launch(restarts.attempt(job), fork, restarts.again)
    return restarts.conclude(outcome, partial(_advice, job, world))


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
            said = verdict.backend_words(error)
            raise CommunicationError(f"this rank lost another one: {said}") from None
        raise


def _within_budget(recipe: Recipe, caller: Caller) -> Recipe:
    """The recipe with a mode of recomputation for each block, if `layout.recompute` is a budget: by this machine's own
    times. Ranks of a launcher, perhaps on several machines, take the same table instead, so they agree.

    Raises:
        UserError: the budget is too small.
    """
    if budget_of(recipe.layout.recompute) is None:
        return recipe
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    known = recipe.precision.model_copy(update={"mode": compute_mode(recipe, device).name})
    name = torch.cuda.get_device_name() if device.type == "cuda" else ""
    found = budget(recipe.model_copy(update={"precision": known}), *priced_here(name, caller.world is None))
    assert found is not None
    if caller.first:
        print(found.line(recipe.layout.recompute), file=sys.stderr)
    layout = recipe.layout.model_copy(update={"recompute": found.recompute})
    return recipe.model_copy(update={"layout": layout})


def _fit_layout(recipe: Recipe, nproc: int | None, launched: int | None) -> Recipe:
    """The recipe with a layout for the available ranks.

    Data-parallel ranks are added or removed as needed, because they change speed but not results. Every other axis must
    fit as it is.
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
    if recipe.sites.count > 1 or recipe.servers.staleness:  # their number changes what is trained
        validate(layout, world, partial(allows, recipe))
    size = world // rest if world % rest == 0 else getattr(layout, axis)
    wanted = replace(layout, **{axis: size}, microbatches=None)
    validate(wanted, world, partial(allows, recipe))
    if world == 1 and not nproc and not launched:
        print(f"note: {to_text(layout)} needs {layout.ranks} devices; running on one", file=sys.stderr)
    return change(in_layout(recipe, wanted))


def prepare_data(recipe: Recipe, quiet: bool) -> DataSet:
    with nullcontext() if quiet else progress_bar() as progress:
        return prepare(recipe, progress)


def _run_folder(out: Path | None, name: str, resuming: Resuming, caller: Caller) -> Path:
    """The run folder. A given one must be new, or hold the run to resume. Rank 0 of a launcher checks that."""
    if out is None:
        if resuming:
            option = "--resume" if resuming.must else "--resume-from"
            raise UserError(f"{option} needs the run's folder: fivefold train RUN {option}, or --out RUN")
        if caller.world is not None:
            raise UserError("ranks of torchrun, Slurm or mpirun need a common run folder; add --out DIR")
        return numbered_folder(Path("runs"), name)
    if not caller.first:
        return out
    if out.exists() and not out.is_dir():
        raise UserError(f"--out {out}: this is a file, not a folder")
    if resuming.must and not (out / "recipe.toml").is_file():
        raise UserError(f"--resume: {out} is not a run folder (it has no recipe.toml)")
    kept = ("recipe.toml", "metrics.jsonl", "checkpoints")
    if not resuming and any((out / name).exists() for name in kept):
        torchrun = "; torchrun with --max-restarts 1, or more, resumes by itself"
        raise UserError(
            f"{out} already holds a run; add --resume to resume it (fivefold.resume in Python), or choose another "
            f"--out{torchrun if LAUNCH in os.environ else ''}"
        )
    return out


def _advice(job: Job, world: int, out_of_memory: bool) -> str:
    """What to do when a rank has failed."""
    lines = "\n".join(["", *advice(job, world)]) if out_of_memory else ""
    resume = f". Resume from the last checkpoint with: {job.resume_command}"
    return lines + resume if newest(job.out) else lines
