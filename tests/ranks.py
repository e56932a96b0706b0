"""A pool of real gloo ranks for tests: started once, reused by every test of the same world size.

Ranks are forked from a clean server process that has imported torch (Python's forkserver), so a pool of four is
ready in well under a second and inherits no threads of the test runner. A test gives the pool a module-level
function; every rank calls it as function(rank, world, *arguments) and its results come back in rank order.

A rank that raises ends the call with its traceback; ranks that do not answer in time are named, with the line each
is stuck at. In both cases the pool is killed and the next call starts a new one.

On a machine that is slow, or busy with other things, FIVEFOLD_TEST_PATIENCE=10 makes all of them wait 10 times as long.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import math
import multiprocessing
import os
import re
import shutil
import signal
import tempfile
import time
import traceback
import zlib
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any
from unittest import mock

from patience import PATIENCE

START_S = 300  # for the ranks of a pool to start
GRACE_S = 2  # how long the others may go on after one rank has raised
ROOM = (
    8 << 30
)  # bytes of memory, or a third of it: a rank grows to 1 GB over many tests, and others take several
_servers = multiprocessing.get_context("forkserver")
_servers.set_forkserver_preload(["torch", "torch.distributed", "torch._dynamo", "fivefold.train.run"])


class RankFailed(AssertionError):
    """A rank raised, died, or did not answer in time."""


class Pool:
    """`world` gloo ranks on this machine, one thread each."""

    def __init__(self, world: int):
        self.world = world
        self.folder = Path(tempfile.mkdtemp(prefix="fivefold-ranks-"))
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(world):
            ours, theirs = _servers.Pipe()
            process = _servers.Process(
                target=_serve, args=(rank, world, str(self.folder), theirs), daemon=True
            )
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)
        self.starting = list(self.pipes)

    def run(self, function: Callable[..., Any], *arguments: Any, timeout_s: float = 30) -> list[Any]:
        """Calls function(rank, world, *arguments) on every rank; returns the results in rank order.

        Raises:
            RankFailed: naming the ranks and what they said, or where they are stuck.
        """
        self._wait_until_started()
        for pipe in self.pipes:
            pipe.send((function, arguments))
        results: dict[int, Any] = {}
        errors: dict[int, str] = {}
        timeout_s *= PATIENCE
        deadline = time.monotonic() + timeout_s
        while len(results) + len(errors) < self.world:
            open_pipes = {self.pipes[r]: r for r in range(self.world) if r not in results and r not in errors}
            ready = wait(list(open_pipes), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                rank = open_pipes[pipe]  # type: ignore[index]
                try:
                    fine, value = pipe.recv()  # type: ignore[union-attr]
                except (EOFError, ConnectionError):
                    self.processes[rank].join(1)
                    fine, value = False, f"died, exit code {self.processes[rank].exitcode}"
                (results if fine else errors)[rank] = value
            if errors:
                deadline = min(deadline, time.monotonic() + GRACE_S)
        if len(results) == self.world:
            return [results[rank] for rank in range(self.world)]
        missing = [r for r in range(self.world) if r not in results and r not in errors]
        message = self._describe(errors, missing, timeout_s)
        self.close()
        raise RankFailed(message)

    def _wait_until_started(self) -> None:
        """On a busy machine imports take minutes, which are no part of a call's time."""
        while self.starting:
            ready = wait(self.starting, START_S * PATIENCE)
            assert ready, (
                f"{len(self.starting)} of {self.world} ranks have not started in {START_S * PATIENCE} s"
            )
            for pipe in ready:
                with contextlib.suppress(EOFError, ConnectionError):  # it died: the call will say so
                    pipe.recv()  # type: ignore[union-attr]
                self.starting.remove(pipe)  # type: ignore[arg-type]

    def _describe(self, errors: dict[int, str], stuck: list[int], timeout_s: float) -> str:
        parts = [f"rank {rank} of {self.world}: {text}" for rank, text in errors.items()]
        for rank in stuck:
            with contextlib.suppress(ProcessLookupError, TypeError):
                os.kill(self.processes[rank].pid, signal.SIGUSR1)  # type: ignore[arg-type]
        time.sleep(0.3 if stuck else 0)
        for rank in stuck:
            where = (self.folder / f"stack-{rank}").read_text() or "(no stack)"
            waited = "after another rank failed" if errors else f"after {timeout_s} s"
            parts.append(f"rank {rank} of {self.world} is stuck {waited}, at:\n{where}")
        return "\n".join(parts)

    def close(self) -> None:
        """Kills the ranks; the pool cannot be used any more."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        for pipe in self.pipes:
            pipe.close()
        shutil.rmtree(self.folder, ignore_errors=True)
        if _pools.get(self.world) is self:
            del _pools[self.world]


_pools: dict[int, Pool] = {}  # the last used is the last


def run_ranks(world: int, function: Callable[..., Any], *arguments: Any, timeout_s: float = 30) -> list[Any]:
    """Runs a function on every rank of a pool of `world` ranks, which is started if there is none yet. Where memory is
    scarce, those that were not used for longest end."""
    pool = _pools.pop(world, None)
    while _pools and memory("MemAvailable") < min(ROOM, memory("MemTotal") / 3):
        next(iter(_pools.values())).close()
    _pools[world] = pool or Pool(world)
    return _pools[world].run(function, *arguments, timeout_s=timeout_s)


def memory(key: str) -> float:
    """Bytes of this machine's memory, by a key of /proc/meminfo; infinite where there is none."""
    with contextlib.suppress(OSError):
        if found := re.search(rf"{key}: *(\d+) kB", Path("/proc/meminfo").read_text()):
            return int(found[1]) * 1024
    return math.inf


@atexit.register
def close_pools() -> None:
    for pool in list(_pools.values()):
        pool.close()


def _reuse_groups() -> None:
    """Tests of one pool share process groups: each has threads and sockets, and its name cannot be used again."""
    from torch.distributed import distributed_c10d

    from fivefold.parallel import mesh

    make, made, torchs = mesh._new_group, {}, distributed_c10d._world

    def shared(members, ranks, apart=False, everywhere=False):
        key = tuple(members), apart, everywhere
        if key in made:
            return made[key]
        # torch names a group by how many there are: earlier tests have made other numbers on each rank
        torchs.group_count = zlib.crc32(repr(key).encode())
        name = f"tests {torchs.group_count}"
        with mock.patch.object(distributed_c10d, "_hash_ranks_to_str", return_value=name):
            made[key] = make(members, ranks, apart, everywhere)
        return made[key]

    mesh._new_group = shared


def _serve(rank: int, world: int, folder: str, pipe: Connection) -> None:
    import torch
    import torch.distributed as dist

    from fivefold.launch.ranks import schedule_as_batch

    schedule_as_batch()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if os.path.isdir("/sys/class/net/lo") else "lo0"
    torch.set_num_threads(1)
    with Path(folder, f"stack-{rank}").open("w") as stack:
        faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
        store = dist.FileStore(f"{folder}/store", world)
        timeout = timedelta(seconds=25 * PATIENCE)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timeout)
        _reuse_groups()
        pipe.send((True, None))
        while True:
            try:
                function, arguments = pipe.recv()
            except (EOFError, OSError):
                break
            try:
                answer = (True, function(rank, world, *arguments))
            except BaseException:
                answer = (False, traceback.format_exc())
            pipe.send(answer)
        dist.destroy_process_group()
