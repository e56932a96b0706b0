"""Starts a run: chooses layout, data and folder, then starts one or more local ranks."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from signal import SIGINT, Signals

import torch
from torch import nn

from fivefold.checkpoint.keep import go_back
from fivefold.comm.membership import Seat
from fivefold.data import DataSet, prepare, progress_bar
from fivefold.errors import CommunicationError, UserError
from fivefold.files import guard, make_folder, owned
from fivefold.host.files import ensure_open_files
from fivefold.host.machine import cores, ensure_matmul_rate
from fivefold.host.memory import keep_few_primitives, keep_freed_memory, return_large_memory
from fivefold.launch import ranks as ranks_
from fivefold.launch import verdict
from fivefold.launch.exits import STOPPED, unsaved
from fivefold.launch.interrupt import Interrupt, run_complete
from fivefold.launch.local import launch
from fivefold.launch.ranks import Ranks
from fivefold.launch.restarted import restarted_by
from fivefold.launch.supervisor import Attempt
from fivefold.models.card import card_of
from fivefold.models.recomputation import budget_of
from fivefold.plan.predict import budget, priced_here
from fivefold.recipe import Recipe, change, resolve
from fivefold.recipe.fit import in_layout, nearest_layout
from fivefold.recipe.rules import allows
from fivefold.spread.layout import Layout, to_text, validate
from fivefold.spread.sites import site_layout
from fivefold.spread.tiers import OFFLOADS
from fivefold.step.state import compute_mode
from fivefold.train.elastic import Elastic
from fivefold.train.job import BatchSource, Job
from fivefold.train.out_of_memory import advice
from fivefold.train.prediction import add_exact
from fivefold.train.restart import Restarts, grace_s, note_restart
from fivefold.train.rollback import goes_back
from fivefold.train.run import run_rank
from fivefold.train.served import run_served

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
    batches: BatchSource | None = None,
    val_batches: BatchSource | None = None,
    seat: Seat | None = None,
) -> Path:
    """Trains a recipe and returns its run folder.

    nproc: local ranks to start; None: as many as the layout says; (fewest, most): as many as there are slots for
    (`train/elastic.py`). Under torchrun or Slurm their ranks are used.
    out: run folder; None: a new one, runs/NAME-N. resume: continue from its last checkpoint.
    resume_from: AUTO: continue if there is a checkpoint, else start; the default for ranks that torchrun or Slurm have
    started again. A path: continue from this checkpoint.
    fork: forks local ranks. This is quick, but only safe in a process that has used neither torch's threads nor a GPU,
    such as the command line's. Otherwise ranks are spawned, and their arguments are pickled.
    module, batches, val_batches: the user's own model and data instead of the recipe's.
    seat: trains one site of the recipe's, which meets the others there.

    Raises:
        UserError: the layout, data, folder or checkpoint is not valid.
        RankFailed: a rank died or hung too often. The message names it.
        SystemExit: a signal stopped the run: with STOPPED after saving, else with 128 + its number (`launch/exits.py`).
    """
    launched, restarted = ranks_.found(), restarted_by()
    if restarted and not resume and resume_from is None:
        resume_from = AUTO
    span = nproc if isinstance(nproc, tuple) and not launched else None
    nproc = nproc if isinstance(nproc, int) else None
    ensure_open_files(
        launched[1] if launched else (span and span[1]) or nproc or Layout.from_recipe(recipe.layout).ranks
    )
    asked = None
    if span:
        nearest_layout(recipe, span[0])  # refuses what cannot be elastic
    elif launched and resume_from is not None and recipe.sites.count == 1 and not recipe.servers.count:
        fit = nearest_layout(recipe, launched[1])  # the launcher may be elastic, too
        if fit.line:
            asked, recipe = recipe, fit.recipe
        if fit.line and not launched[0]:
            print(fit.line, file=sys.stderr)
    elif seat is None:
        recipe = _fit_layout(recipe, nproc, launched[1] if launched else None)
    else:
        own = site_layout(Layout.from_recipe(recipe.layout), recipe.sites.count)
        validate(own, (launched[1] if launched else nproc) or own.ranks)
    data = None
    if batches is None:
        data = prepare_data(recipe, quiet=launched is not None and launched[0] != 0)
        vocab_size = data.vocab_size
    else:
        if module is None and recipe.model.vocab_size is None:
            raise UserError(
                "your own data needs model.vocab_size, the number of token ids: --set model.vocab_size=N"
            )
        vocab_size = recipe.model.vocab_size or 2
    recipe = resolve(recipe, vocab_size=vocab_size)
    asked = asked and resolve(asked, vocab_size=vocab_size)
    recipe = _within_budget(recipe, launched is None, quiet=bool(launched and launched[0]))
    out = _run_folder(out, name, resume, resume_from is not None, launched[0] if launched else None)
    chosen = None if resume_from is None or resume_from == AUTO else Path(resume_from)
    guard(out, look=not (launched and launched[0]))
    if chosen is not None:
        guard(chosen, look=not (launched and launched[0]))
    own = module is not None or batches is not None
    command = (
        f"fivefold.resume({str(out)!r}, ...)"
        if own
        else shlex.join(["fivefold", "train", str(out), "--resume", *(seat.options if seat else ())])
    )
    again = resume or resume_from is not None
    job = Job(recipe, out, data, module, batches, val_batches, again, command, seat, chosen, asked)
    layout = Layout.from_recipe(recipe.layout)
    world = (site_layout(layout, recipe.sites.count) if seat else layout).ranks + recipe.servers.count
    return_large_memory() if OFFLOADS[layout.offload].disk else keep_freed_memory()
    if module is None and card_of(recipe.model).has_experts:
        keep_few_primitives()
    if not torch.cuda.is_available() and not launched:  # measured before the run disturbs it
        ensure_matmul_rate(compute_mode(job.recipe, torch.device("cpu")).measured, cores())
    with owned(out) if not (launched and launched[0]) else nullcontext(), Interrupt() as interrupt:
        if chosen is not None and not (launched and launched[0]) and not restarted:
            for moved in go_back(out, chosen):
                print(f"note: later than {chosen.name}, so it is set aside: {moved}", file=sys.stderr)
        if restarted and not (launched and launched[0]):
            note_restart(job.out, restarted, world)
        if launched or (world == 1 and not span):
            if launched and launched[0] >= world:
                ranks_.wait_as_spare()
                return out  # it knows nothing of what is saved: only the others say so
            else:
                stopped = _run_here(job, interrupt, world)
        else:
            elastic = Elastic(job, *span, _attempt) if span else None
            restarts = (
                Restarts(job, elastic.attempt, elastic.failed, elastic=True)
                if elastic
                else Restarts(job, partial(_attempt, world))
            )
            outcome = launch(restarts.first(), fork, restarts.again)
            stopped = restarts.conclude(outcome, partial(_advice, job, world))
        if stopped is not None:
            raise SystemExit(STOPPED)
        run_complete()
        if not launched or launched[0] == 0:
            add_exact(job)
    return out


def _attempt(world: int, job: Job) -> Attempt:
    """What local ranks do for a job."""
    servers = job.recipe.servers  # asynchronous training goes on without a worker
    expendable = range(servers.count, world) if servers.staleness else range(0)
    return Attempt(partial(_part(job), job), world, expendable, partial(grace_s, job))


def _part(job: Job) -> Callable[[Job, Ranks], int | None]:
    return run_served if job.recipe.servers.count else run_rank


def _run_here(job: Job, interrupt: Interrupt, world: int) -> int | None:
    """Runs this process's rank, one of a foreign launcher or the only one. Returns the signal that stopped it. world:
    the ranks that train."""
    try:
        with ranks_.join(members=world) as ranks:
            return _part(job)(job, ranks)
    except KeyboardInterrupt:
        raise SystemExit(unsaved(SIGINT)) from None
    except Exception as error:
        if interrupt.signal is not None:
            print(f"stopped by {Signals(interrupt.signal).name}, but not saved: {error}", file=sys.stderr)
            raise SystemExit(unsaved(interrupt.signal)) from error
        if verdict.lost(error) and not isinstance(error, UserError | CommunicationError):
            said = str(error).strip().splitlines()[0][:500]
            raise CommunicationError(f"this rank lost another one: {said}") from None
        raise


def _within_budget(recipe: Recipe, measured: bool, quiet: bool) -> Recipe:
    """The recipe with a mode of recomputation for each block, if `layout.recompute` is a budget. measured: by this
    machine's own times. Ranks of several machines take the same table instead, so they agree.

    Raises:
        UserError: the budget is too small.
    """
    if budget_of(recipe.layout.recompute) is None:
        return recipe
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    known = recipe.precision.model_copy(update={"mode": compute_mode(recipe, device).name})
    name = torch.cuda.get_device_name() if device.type == "cuda" else ""
    found = budget(recipe.model_copy(update={"precision": known}), *priced_here(name, measured))
    assert found is not None
    if not quiet:
        print(found.line(recipe.layout.recompute), file=sys.stderr)
    layout = recipe.layout.model_copy(update={"recompute": found.recompute})
    return recipe.model_copy(update={"layout": layout})


def seat_of(recipe: Recipe, site: int | None, address: str | None) -> Seat | None:
    """The seat that `--site` and `--meet` name; None without them.

    Raises:
        UserError: the recipe has no such site, or one of the options is missing.
    """
    if site is None and address is None:
        return None
    if site is None or address is None:
        raise UserError(
            "--site N and --meet HOST:PORT go together: the number of the site, and where site 0 serves"
        )
    count = recipe.sites.count
    if count == 1:
        raise UserError(
            "--site: the recipe has one site. Add --layout dp=2 and --set sync.method=diloco, for example"
        )
    if site >= count:
        raise UserError(
            f"--site {site}: the recipe has {count} sites, 0 to {count - 1}. Nearest valid: {count - 1}"
        )
    if goes_back(recipe.faults):
        raise UserError(
            'faults: "rollback" is not supported with --site: a site cannot go back without the others. Nearest valid: '
            '"skip" or "abort"'
        )
    if recipe.sync.overlap:
        raise UserError(
            f"sync.overlap = {recipe.sync.overlap} is not supported with --site. Nearest valid: sync.overlap = 0"
        )
    return Seat.parse(site, address)


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
                f"{world} rank(s) are too few for sync.servers = {recipe.servers.count} and at least one worker. "
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
    if quiet:
        return prepare(recipe)
    with progress_bar() as progress:
        return prepare(recipe, progress)


def _run_folder(out: Path | None, name: str, resume: bool, either: bool, launched_rank: int | None) -> Path:
    """The run folder. A given one must be new, or hold the run to resume (either: it may be both). Rank 0 of a launcher
    checks that."""
    if out is None:
        if resume or either:
            option = "--resume" if resume else "--resume-from"
            raise UserError(f"{option} needs the run's folder: fivefold train RUN {option}, or --out RUN")
        if launched_rank is not None:
            raise UserError("ranks of torchrun or Slurm need a common run folder; add --out DIR")
        number = 1
        while True:
            try:
                make_folder(folder := Path("runs") / f"{name}-{number}", new=True)
                return folder
            except FileExistsError:
                number += 1
    if launched_rank:
        return out
    if out.exists() and not out.is_dir():
        raise UserError(f"--out {out}: this is a file, not a folder")
    if resume and not (out / "recipe.toml").is_file():
        raise UserError(f"--resume: {out} is not a run folder (it has no recipe.toml)")
    if (
        not resume
        and not either
        and any((out / kept).exists() for kept in ("recipe.toml", "metrics.jsonl", "checkpoints"))
    ):
        raise UserError(f"{out} already holds a run; add --resume to resume it, or choose another --out")
    return out


def _advice(job: Job, world: int, out_of_memory: bool) -> str:
    """What to do when a rank has failed."""
    lines = ["", *advice(job, world)] if out_of_memory else []
    return "\n".join(lines) + _how_to_resume(job)


def _how_to_resume(job: Job) -> str:
    if not (job.out / "checkpoints").exists():
        return ""
    return f". Resume from the last checkpoint with: {job.resume_command}"
