"""Runs jobs on all cores and gives their results in order, whatever the number of workers.

Worker processes are plain children that talk over pipes: unlike multiprocessing's, they neither fork a
process that may hold threads nor import the user's main script again. Job j goes to worker j mod N and
results are read in the order of jobs, so the shards do not depend on timing; a worker that is ahead
waits once its own buffer is full, so memory stays bounded.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from fivefold.data.encode import (
    Part,
    Setup,
    Summary,
    Work,
    open_tokenizer,
    run_job,
    setup_to,
    summary_from,
    to_line,
)
from fivefold.data.spans import Span
from fivefold.errors import UserError

WORKTHY = 4 << 20  # bytes of text below which starting processes costs more than it saves
COMMAND = [sys.executable, "-c", "from fivefold.data.encode import worker; worker()"]


def run(work: Iterable[Work], setup: Setup, workers: int) -> Iterator[Part | Summary]:
    """The results of all jobs in order: each job's parts, then its summary. workers=1: in this process."""
    if workers <= 1:
        tokenizer = open_tokenizer(setup)
        for job in work:
            yield from run_job(job, setup, tokenizer)
        return
    processes = [_start(setup) for _ in range(workers)]
    feeder = _Feeder(work, processes)
    feeder.start()
    finished = 0
    try:
        while (yield from _results(processes[finished % workers], setup.dtype)):
            finished += 1
        _check_end(processes, feeder, finished)
    finally:
        _stop(processes, feeder)


def _start(setup: Setup) -> subprocess.Popen[bytes]:
    root = str(Path(__file__).parents[2])  # the worker must find the same package, installed or not
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")])),
        "TOKENIZERS_PARALLELISM": "false",  # one thread a worker
        "OMP_NUM_THREADS": "1",
    }
    process = subprocess.Popen(COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
    assert process.stdin is not None
    process.stdin.write(to_line(setup_to(setup)))
    return process


def _stop(processes: list[subprocess.Popen[bytes]], feeder: _Feeder) -> None:
    for process in processes:
        process.kill()
    feeder.join(timeout=10)  # it meets a broken pipe, unless it waits for the network
    for process in processes:
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):
                pipe.close()


class _Feeder(threading.Thread):
    """Hands out the jobs. A thread of its own, because a pipe to a busy worker blocks. It never blocks for
    good: the worker it waits for has unread results only of jobs already handed out, and these get read."""

    def __init__(self, work: Iterable[Work], processes: list[subprocess.Popen[bytes]]):
        super().__init__(name="fivefold-feeder", daemon=True)
        self.work, self.processes = work, processes
        self.fed = 0
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            for job in self.work:
                kind = "spans" if isinstance(job[0], Span) else "rows"
                stdin = self.processes[self.fed % len(self.processes)].stdin
                assert stdin is not None
                stdin.write(to_line([kind, job]))
                stdin.flush()
                self.fed += 1
        except BrokenPipeError:
            return  # the worker died or was ended: the main thread sees that
        except BaseException as error:  # reading a streamed set may fail: raised in the main thread
            self.error = error
        for process in self.processes:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()


def _results(process: subprocess.Popen[bytes], dtype: str) -> Iterator[Part | Summary]:
    """The results of one job. Its value (of `yield from`): False if the worker has no more."""
    assert process.stdout is not None
    while line := process.stdout.readline():
        head: Any = json.loads(line)
        if isinstance(head, dict):
            yield summary_from(head)
            return True
        split, length = head
        raw = process.stdout.read(length * np.dtype(dtype).itemsize)
        yield Part(split, np.frombuffer(raw, dtype))
    return False


def _check_end(processes: list[subprocess.Popen[bytes]], feeder: _Feeder, finished: int) -> None:
    """Raises if the results ended before the jobs did."""
    feeder.join(timeout=10)
    if feeder.error is not None:
        raise feeder.error
    if feeder.is_alive() or finished != feeder.fed or any(p.wait(10) for p in processes):
        codes = [p.poll() for p in processes]
        raise UserError(
            f"a tokenizing process died at job {finished + 1} (exit codes {codes}; -9 often means that "
            "memory ran out)"
        )
