"""Ranks that hang, for tests and benchmarks: each a process of its own, as a launcher starts them, but nothing stops
them."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pool_runs import train_rank
from ranks import _servers

from fivefold.launch import verdict
from fivefold.launch.ranks import STORE_FILE, Ranks, _run, end
from fivefold.launch.verdict import Interrupt
from fivefold.recipe import Recipe, resolve


def hang(how: str) -> None:
    """Never returns."""
    if how == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    while True:
        if how == "asleep":
            time.sleep(3600)


def start(
    world: int, folder: Path, function: Callable[..., Any], *arguments: Any, store: bool = False
) -> list[Any]:
    """Starts processes that call function(ranks, *arguments). store: they meet in a store, as torchrun's do, not in the
    folder."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1] if store else 0
    found = [
        _servers.Process(
            target=_rank, args=(rank, world, str(folder), port, function, arguments), daemon=True
        )
        for rank in range(world)
    ]
    for process in found:
        process.start()
    return found


def codes(processes: list[Any], timeout_s: float = 60) -> list[int | None]:
    """Waits for all but those that never end, and kills these; the exit codes of the others."""
    deadline = time.monotonic() + timeout_s
    while sum(process.is_alive() for process in processes) > 1 and time.monotonic() < deadline:
        time.sleep(0.02)
    processes[0].join(0.2)
    found = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
        process.join()
    return found


def _rank(
    rank: int, world: int, folder: str, port: int, function: Callable[..., Any], arguments: Any
) -> None:
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": str(rank),
        "OMP_NUM_THREADS": "1",
    }
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo"}
    launched = {STORE_FILE: f"{folder}/store", verdict.FOLDER: folder}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)} if port else launched
    error = os.open(f"{folder}/error-{rank}.txt", os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(error, stream)
    with Interrupt() as interrupt:
        code = _run(lambda ranks: function(ranks, *arguments), interrupt, threading.Event(), 60.0)
    end(code)


def train(ranks: Ranks, recipe: Recipe, out: Path, who: int, step: int, how: str) -> None:
    """A run in which one rank hangs in a step."""
    from fivefold.train import loop

    take_step = loop.take_step

    def hangs(state: Any, *arguments: Any) -> Any:
        if ranks.rank == who and state.step == step:
            time.sleep(1)  # its watchdog looks meanwhile: what it posted last is of this step
            hang(how)
        return take_step(state, *arguments)

    loop.take_step = hangs
    train_rank(ranks.rank, ranks.world, recipe, out)


def serve(ranks: Ranks, recipe: Recipe, out: Path, who: int, step: int, how: str) -> None:
    """A run with parameter servers, in which a worker hangs in its share of a step, or a server while it updates."""
    from fivefold.comm.progress import progress
    from fivefold.data import prepare
    from fivefold.parallel.server import Shard
    from fivefold.train import server_run
    from fivefold.train.job import Job
    from fivefold.train.run import run_rank

    def hooked(function: Callable[..., Any]) -> Callable[..., Any]:
        def inner(*arguments: Any) -> Any:
            if ranks.rank == who and progress.step >= step:
                progress.mark()
                (out.parent / "began").write_text(str(time.time()))
                time.sleep(0.5)  # as in `train`
                hang(how)
            return function(*arguments)

        return inner

    server_run.forward_backward = hooked(server_run.forward_backward)
    Shard.update = hooked(Shard.update)
    data = prepare(recipe)
    recipe = resolve(recipe, vocab_size=data.vocab_size)
    run_rank(Job(recipe, out, data), ranks)
