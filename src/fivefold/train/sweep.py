"""Runs a sweep: a process per run, one at a time or several. Each run resumes by itself; the table says how far they
are.

The runs are forked from a server process that has imported torch and done nothing else (Python's forkserver), so they
start at once, and what one of them does to its process ends with it.
"""

from __future__ import annotations

import io
import math
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch

from fivefold.data import DataSet
from fivefold.data.dataset import amounts, require_enough, seen
from fivefold.errors import BusyError, CheckFailed, CommunicationError, RankFailed, UserError, printable
from fivefold.files import guard, make_folder, open_file, owned, require_owned, stream
from fivefold.host import cores
from fivefold.launch.local import Signals
from fivefold.launch.ranks import found
from fivefold.launch.verdict import BUSY, DONE, FAILED, STOPPED, USER, Leaving, in_words, stopping_signals
from fivefold.observe.format import duration, short_number
from fivefold.observe.metrics import read_metrics
from fivefold.observe.summary import summarize
from fivefold.recipe import active_parameters, resolve, tokens_before, total_steps, training_flops
from fivefold.recipe import sweep as table
from fivefold.recipe.sweep import Row, Sweep
from fivefold.sharding.layout import Layout
from fivefold.train.start import AUTO, prepare_data, run_command

LOG = "log.txt"
GRACE_S = 60.0
FIGURES = (
    "steps", "loss", "val_loss", "best_val_loss", "val_bits_per_byte", "train_s", "tokens_per_s", "mfu",
    "peak_memory_bytes",
)  # fmt: skip
"""Of `observe.summary`, for a finished run."""


def plan(sweep: Sweep, base: str | Path) -> None:
    """Checks all runs and fills in their sizes: parameters N, tokens D, FLOPs 6 N D, passes over the data. Raises
    UserError: a value is wrong, or the data does not do."""
    known: dict[str, DataSet] = {}
    for row in sweep.rows:
        if row.status == table.FINISHED:
            continue
        recipe = sweep.load(base, row)
        key = f"{recipe.data!r} {recipe.model.arch}"
        data = known[key] if key in known else known.setdefault(key, prepare_data(recipe, quiet=False))
        parameters = active_parameters(resolve(recipe, vocab_size=data.vocab_size).model)
        if table.FLOPS in row.settings:
            flops = float(row.settings[table.FLOPS])
            row.figures["tokens"] = math.ceil(flops / training_flops(parameters, 1))
            recipe = sweep.load(base, row)
        sources, steps = amounts(recipe, data), total_steps(recipe)
        require_enough(recipe, sources)
        tokens = tokens_before(recipe, steps)
        row.figures |= {
            "parameters": parameters,
            "tokens": tokens,
            "flops": training_flops(parameters, tokens),
            "epochs": round(max(row.epochs for row in seen(recipe, sources, steps).values()), 4),
            "lr": recipe.optim.lr,
        }


def run(folder: Path, sweep: Sweep, jobs: int, say: Callable[[str], None]) -> int:
    """Runs what is not finished, `jobs` runs at a time. Returns the exit code: DONE, FAILED if a run failed, STOPPED if
    a signal came. say: told a line when a run ends. Raises UserError: another process works on this sweep, there are
    too few GPUs for so many jobs, or a launcher has started this."""
    if found() is not None:
        raise UserError("a sweep starts its runs itself: start it once, without torchrun or Slurm's tasks")
    guard(folder)
    layouts = [Layout.from_recipe(sweep.load(folder / table.BASE, row).layout) for row in sweep.rows]
    ranks = max(layout.ranks for layout in layouts)
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")  # numbers or names
    gpus = (visible.split(",") if visible else [str(number) for number in range(count)])[:count]
    places = [environment(slot, jobs, ranks, cores(), gpus) for slot in range(jobs)]
    with owned(folder), Signals() as signals:
        return _Runs(folder, sweep, places, say, signals).all()


def environment(slot: int, jobs: int, ranks: int, cores: int, gpus: Sequence[str]) -> dict[str, str]:
    """What a run's process has in its environment: its share of the cores, and its own GPUs. Raises UserError: the GPUs
    are too few for so many jobs."""
    if jobs == 1:
        return {}
    if gpus and jobs * ranks > len(gpus):
        raise UserError(
            f"--jobs {jobs}: of {len(gpus)} GPUs here a run needs {ranks}. Nearest valid: --jobs "
            f"{max(1, len(gpus) // ranks)}"
        )
    own, given = gpus[slot * ranks : (slot + 1) * ranks], dict[str, str]()
    if "OMP_NUM_THREADS" not in os.environ:
        given["OMP_NUM_THREADS"] = str(max(1, cores // (jobs * ranks)))
    return given | ({"CUDA_VISIBLE_DEVICES": ",".join(own)} if own else {})


class _Runs:
    """The runs of a sweep that are under way. places: the environment of each job."""

    def __init__(
        self,
        folder: Path,
        sweep: Sweep,
        places: Sequence[Mapping[str, str]],
        say: Callable[[str], None],
        signals: Signals,
    ):
        self.folder, self.sweep, self.say, self.signals = folder, sweep, say, signals
        self.waiting = [row for row in sweep.rows if row.status != table.FINISHED]
        self.free = list(enumerate(places))[::-1]
        self.running: dict[Any, tuple[Row, tuple[int, Mapping[str, str]], float]] = {}
        self.done = len(sweep.rows) - len(self.waiting)
        self.context: Any = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(["fivefold.train.sweep"])

    def all(self) -> int:
        try:
            while (self.waiting and self.signals.signal is None) or self.running:
                while self.waiting and self.free and self.signals.signal is None:
                    row, place = self.waiting.pop(0), self.free.pop()
                    given = self.folder.absolute(), row.name, Path.cwd(), {**os.environ, **place[1]}
                    process = self.context.Process(target=train_row, args=given, name=row.name, daemon=False)
                    process.start()
                    self.running[process] = row, place, time.monotonic()
                wait([self.signals.reader, *(process.sentinel for process in self.running)])
                with suppress(BlockingIOError):
                    os.read(self.signals.reader, 4096)
                if self.signals.news:  # the runs save and stop; a second Ctrl-C ends them at once
                    self.signals.news = 0
                    for process in self.running:
                        process.kill() if self.signals.impatient else process.terminate()
                for process in [process for process in self.running if process.exitcode is not None]:
                    row, place, began = self.running.pop(process)
                    process.join()
                    self.free.append(place)
                    self._ended(row, process.exitcode, time.monotonic() - began)
                    require_owned(self.folder)
                    table.write(self.folder, self.sweep)
        finally:
            for process in self.running:  # an error here: the runs save
                process.terminate()
            for process in self.running:
                process.join(GRACE_S)
                process.kill()
        ends = {row.status for row in self.sweep.rows}
        stopped = self.signals.signal is not None or table.STOPPED in ends
        return DONE if ends <= {table.FINISHED} else STOPPED if stopped else FAILED

    def _ended(self, row: Row, code: int, seconds: float) -> None:
        """Notes the end of a run in the table, and says it."""
        run = self.folder / row.name
        row.why = ""
        figures: dict[str, Any] = {}
        try:
            figures = summarize(read_metrics(run)) if code == DONE else {}
        except UserError as error:
            code, row.why = FAILED, str(error)
        if code == DONE:
            row.figures |= {key: figures[key] for key in FIGURES if key in figures}
            row.status = table.FINISHED
            self.done += 1
            loss = figures.get("val_loss", figures.get("loss", math.nan))
            kind = "validation loss" if "val_loss" in figures else "loss"
            parameters, tokens = (short_number(row.figures[name]) for name in ("parameters", "tokens"))
            speed = short_number(figures.get("tokens_per_s", math.nan))
            end = f"N {parameters}, D {tokens}, {kind} {loss:.4f}, {speed} tokens/s, {duration(seconds)}"
        elif code == STOPPED or self.signals.signal is not None:
            row.status = table.STOPPED
            end = "stopped; it resumes when the sweep does"
        else:
            row.status, row.why = table.FAILED, row.why or f"{in_words(code)}: {last_words(run)}"
            end = f"failed, {row.why} (all of it: {run / LOG})"
        self.say(f"[{self.done}/{len(self.sweep.rows)}] {row.name}: {end}")


def last_words(run: Path, tail: int = 4096) -> str:
    """The last line that a run has printed."""
    lines: list[str] = []
    with suppress(OSError), open_file(run / LOG) as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - tail))
        lines = file.read().decode("utf-8", "replace").split("\n")
    words = (line.strip() for line in reversed(lines))
    return printable(next(filter(None, words), "it has printed nothing"))


def train_row(folder: Path, name: str, here: Path, environment: Mapping[str, str]) -> None:
    """Trains a row in this process, or resumes it, and ends the process with `fivefold train`'s code. here: the folder
    in which paths of the recipe start."""
    for number in stopping_signals():
        signal.signal(number, signal.SIG_DFL)
    sweeping = multiprocessing.parent_process()

    def follow() -> None:
        """Has this run stop, and save, when the sweep's process is killed. (The server that forked it goes on.)"""
        if sweeping is not None:
            wait([sweeping.sentinel])
            os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=follow, name="sweep", daemon=True).start()
    os.chdir(here)
    os.environ.clear()
    os.environ.update(environment)
    guard(folder)
    run = folder / name
    make_folder(run)
    with stream(run / LOG) as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    for output in (sys.stdout, sys.stderr):
        if isinstance(output, io.TextIOWrapper):
            output.reconfigure(line_buffering=True, errors="backslashreplace")
    try:
        with Leaving():
            sweep = table.read(folder)
            (row,) = (row for row in sweep.rows if row.name == name)
            run_command(sweep.load(folder / table.BASE, row), out=run, resume_from=AUTO)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(BUSY if isinstance(error, BusyError) else USER)
    except (CheckFailed, CommunicationError, RankFailed) as error:
        print(f"failed: {error}", file=sys.stderr)
        sys.exit(FAILED)
