"""Starts a run: settles layout, data and folder, then one rank or several on this machine.

Local ranks are forked by PyTorch's elastic agent after torch is imported, so that they start in a moment. They meet
in files of a temporary folder and talk over the loopback interface only.
"""

from __future__ import annotations

import ctypes
import logging
import os
import shlex
import signal
import sys
import tempfile
import traceback
import uuid
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import nn

from fivefold.data import DataSet, prepare, progress_bar
from fivefold.errors import UserError
from fivefold.layout import Layout, to_text, validate
from fivefold.observe.machine import cores, ensure_matmul_rate
from fivefold.parallel import ranks as ranks_
from fivefold.parallel.ranks import Ranks
from fivefold.recipe import Recipe, change, resolve
from fivefold.recipe.rules import allows
from fivefold.train.allocator import keep_freed_memory
from fivefold.train.job import BatchSource, Job
from fivefold.train.run import run_rank
from fivefold.train.state import compute_mode

_PR_SET_PDEATHSIG = 1  # sys/prctl.h


def run_command(
    recipe: Recipe,
    nproc: int | None = None,
    out: Path | None = None,
    resume: bool = False,
    *,
    name: str = "run",
    fork: bool = True,
    module: nn.Module | None = None,
    batches: BatchSource | None = None,
    val_batches: BatchSource | None = None,
) -> Path:
    """Trains a recipe and returns its run folder.

    nproc: local ranks to start; None: as many as the layout says. Under torchrun or Slurm their ranks are used.
    out: run folder; None: a new one, runs/NAME-N. resume: go on from its last checkpoint.
    fork: local ranks are forked, which is quick, but only safe in a process that has used neither torch's threads nor
    a GPU, such as the command line's; else they are started afresh, and what they are given is pickled.
    module, batches, val_batches: the user's own model and data instead of the recipe's.

    Raises:
        UserError: the layout, the data, the folder or the checkpoint does not do.
        SystemExit: the run was stopped by a signal (128 + its number), after saving.
    """
    launched = ranks_.found()
    recipe = _fit_layout(recipe, nproc, launched[1] if launched else None)
    data = None
    if batches is None:
        data = prepare_data(recipe, quiet=launched is not None and launched[0] != 0)
        recipe = resolve(recipe, vocab_size=data.vocab_size)
    else:
        if module is None and recipe.model.vocab_size is None:
            raise UserError("with your own data, say how many token ids there are: --set model.vocab_size=N")
        recipe = resolve(recipe, vocab_size=recipe.model.vocab_size or 2)
    out = _run_folder(out, name, resume, launched[0] if launched else None)
    own = module is not None or batches is not None
    command = (
        f"fivefold.resume({str(out)!r}, ...)"
        if own
        else shlex.join(["fivefold", "train", str(out), "--resume"])
    )
    job = Job(recipe, out, data, module, batches, val_batches, resume, command)
    world = Layout.from_recipe(recipe.layout).ranks
    keep_freed_memory()
    if not torch.cuda.is_available() and not launched:  # measured before the run disturbs it
        ensure_matmul_rate(compute_mode(job.recipe, torch.device("cpu")), cores())
    if launched or world == 1:
        with ranks_.join() as ranks:
            stopped = run_rank(job, ranks)
    else:
        stopped = start_ranks(partial(run_rank, job), world, fork, partial(_how_to_resume, job))
    if stopped is not None:
        raise SystemExit(128 + stopped)
    return out


def _fit_layout(recipe: Recipe, nproc: int | None, launched: int | None) -> Recipe:
    """The recipe with a layout for the ranks there are. Data-parallel ranks are added or left out as needed: they
    change speed, not what is computed. Anything else must fit as it stands."""
    layout = Layout.from_recipe(recipe.layout)
    axis = "dp_shard" if layout.zero and layout.dp_replicate == 1 else "dp_replicate"
    rest = layout.ranks // getattr(layout, axis)
    world = launched or nproc
    if world is None:
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if 1 < gpus < layout.ranks:
            raise UserError(
                f"layout '{to_text(layout)}' wants {layout.ranks} GPUs, and there are {gpus}: --layout dp={gpus}"
            )
        world = layout.ranks if rest > 1 or max(gpus, cores() if not gpus else 1) > 1 else 1
    if world == layout.ranks:
        return recipe
    size = world // rest if world % rest == 0 else getattr(layout, axis)
    validate(replace(layout, **{axis: size}, microbatches=None), world, partial(allows, recipe))
    if world == 1 and not nproc and not launched:
        print(f"note: {to_text(layout)} wants {layout.ranks} devices; running on one", file=sys.stderr)
    changes = [f"layout.{axis}={size}", "layout.microbatches=none"]
    rows = recipe.train.microbatch_size
    if rows and recipe.train.global_batch_size % (layout.dp // getattr(layout, axis) * size * rows):
        changes.append("train.microbatch_size=none")  # it fitted the share of a rank in another layout
    return change(recipe, changes)


def prepare_data(recipe: Recipe, quiet: bool) -> DataSet:
    if quiet:
        return prepare(recipe)
    with progress_bar() as progress:
        return prepare(recipe, progress)


def _run_folder(out: Path | None, name: str, resume: bool, launched_rank: int | None) -> Path:
    """The run's folder: a given one must be new, or hold the run to resume; rank 0 of a launcher checks that."""
    if out is None:
        if resume:
            raise UserError("--resume needs the run's folder: fivefold train RUN --resume, or --out RUN")
        if launched_rank is not None:
            raise UserError("ranks started by torchrun or Slurm need a common run folder: --out DIR")
        number = 1
        while True:
            try:
                (folder := Path("runs") / f"{name}-{number}").mkdir(parents=True)
                return folder
            except FileExistsError:
                number += 1
    if launched_rank:
        return out
    if out.exists() and not out.is_dir():
        raise UserError(f"--out {out}: a file, not a folder")
    if resume and not (out / "recipe.toml").is_file():
        raise UserError(f"--resume: {out} holds no run (no recipe.toml)")
    if not resume and any((out / kept).exists() for kept in ("recipe.toml", "metrics.jsonl", "checkpoints")):
        raise UserError(f"{out} holds a run already: add --resume to go on with it, or choose another --out")
    return out


def start_ranks(
    work: Callable[[Ranks], int | None], world: int, fork: bool, advice: Callable[[], str] = str
) -> int | None:
    """Runs `work` on `world` local ranks to their end, on GPUs where there are any. Returns the signal that stopped
    them, or None.

    work: returns the signal that stopped it, or None. fork: see `run_command`. advice: what to tell the user, besides,
    when a rank has failed.

    Raises:
        UserError: there are fewer GPUs than ranks; a rank raised it, or failed otherwise: the message says which and
            how.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if 0 < gpus < world:
        raise UserError(
            f"{world} ranks on this machine want {world} GPUs, and it has {gpus}. On its CPU instead: put "
            "CUDA_VISIBLE_DEVICES= (nothing behind it) before the command"
        )
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    start_method = "fork" if fork and not torch.cuda.is_available() else "spawn"
    # What the agent logs of a failed rank, _verdict says in one message.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    handled = ["SIGTERM", "SIGINT"]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # ignored under nohup: it stays so
        handled.append("SIGHUP")
    with (
        tempfile.TemporaryDirectory(prefix="fivefold-") as folder,
        _environment(
            {
                ranks_.STORE_FILE: f"{folder}/store",
                "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
                "NCCL_SOCKET_IFNAME": "lo",
                "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # no TCP store: it would listen on every interface
                "TOKENIZERS_PARALLELISM": "false",
                "OMP_NUM_THREADS": str(max(1, cores() // world)),
            }
        ),
    ):
        config = LaunchConfig(
            min_nodes=1, max_nodes=1, nproc_per_node=world, run_id=uuid.uuid4().hex,
            rdzv_backend="c10d", rdzv_endpoint=f"{folder}/rendezvous", rdzv_configs={"store_type": "file"},
            max_restarts=0, monitor_interval=0.1, start_method=start_method, local_addr="127.0.0.1",
            shutdown_timeout=600, logs_specs=DefaultLogsSpecs(log_dir=folder), signals_to_handle=",".join(handled),
        )  # fmt: skip
        try:
            elastic_launch(config, _rank_main)(work, Path(folder))
        except SignalException as error:
            return int(error.sigval)
        except ChildFailedError as error:
            stopped = Path(folder, "stopped")
            if stopped.exists():  # the signal went to a rank, not to us
                return int(stopped.read_text())
            raise _verdict(error, Path(folder), advice) from None
        return None


def _rank_main(work: Callable[[Ranks], int | None], folder: Path) -> None:
    """A forked rank. What a user did wrong travels to the parent in a file, not as a traceback."""
    from torch.distributed.elastic.multiprocessing.api import SignalException

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # until the loop takes over
    if sys.platform == "linux":  # when the launcher is killed, its ranks stop, too, and save
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    try:
        with ranks_.join() as ranks:
            stopped = work(ranks)
            if stopped is not None:
                (folder / "stopped").write_text(str(stopped))
                # A plain return would wait for the agent, which is waiting for us.
                raise SystemExit(128 + stopped)
    except SignalException as error:  # torch's own handler, before the loop's is there
        raise SystemExit(128 + error.sigval) from None
    except UserError as error:
        (folder / f"error-{os.environ['RANK']}").write_text(str(error))
        raise SystemExit(2) from None
    except Exception:
        print(f"rank {os.environ['RANK']} failed:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
        raise SystemExit(1) from None


def _verdict(error: object, folder: Path, advice: Callable[[], str]) -> UserError:
    """What happened to the ranks, in one message."""
    said = sorted(folder.glob("error-*"))
    if said:
        return UserError(said[0].read_text())
    failures = getattr(error, "failures", {})
    rank, failure = min(failures.items(), key=lambda item: item[1].timestamp)
    how = signal.Signals(-failure.exitcode).name if failure.exitcode < 0 else f"exit code {failure.exitcode}"
    text = f"rank {rank} failed first ({how}); the others were stopped. Its own message stands above"
    return UserError(text + advice())


def _how_to_resume(job: Job) -> str:
    if not (job.out / "checkpoints").exists():
        return ""
    return f". Go on from the last checkpoint with: {job.resume_command}"


class _environment:
    """Sets environment variables while it is entered; those the user has set stay."""

    def __init__(self, values: dict[str, str]):
        self.values = {k: v for k, v in values.items() if k not in os.environ}

    def __enter__(self) -> None:
        os.environ.update(self.values)

    def __exit__(self, *_: object) -> None:
        for key in self.values:
            os.environ.pop(key, None)
