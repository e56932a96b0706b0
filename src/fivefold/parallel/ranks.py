"""The ranks of a run: who I am, which device I compute on, and the process group between us.

Ranks come from one of four places, and the same command works in each: one process; ranks that Fivefold started
itself on this machine (they meet in a file, so nothing listens beyond loopback); torchrun; Slurm.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from fivefold.errors import UserError
from fivefold.host import cores

STORE_FILE = "FIVEFOLD_STORE_FILE"  # set by train/launch.py for the ranks it starts


@dataclass(frozen=True)
class Ranks:
    rank: int
    world: int
    local_rank: int
    local_world: int
    device: torch.device

    @property
    def first(self) -> bool:
        return self.rank == 0


def found() -> tuple[int, int, int, int] | None:
    """(rank, world, local rank, local world) of the launcher we run under; None when there is none."""
    env = os.environ
    if "RANK" in env and "WORLD_SIZE" in env:
        world = int(env["WORLD_SIZE"])
        return int(env["RANK"]), world, int(env.get("LOCAL_RANK", 0)), int(env.get("LOCAL_WORLD_SIZE", world))
    if "SLURM_PROCID" in env and "SLURM_STEP_ID" in env and int(env.get("SLURM_NTASKS", 1)) > 1:
        local = env.get("SLURM_STEP_TASKS_PER_NODE", env.get("SLURM_NTASKS_PER_NODE", "1"))
        local_world = int(local.split("(")[0].split(",")[0])
        return int(env["SLURM_PROCID"]), int(env["SLURM_NTASKS"]), int(env["SLURM_LOCALID"]), local_world
    return None


def device_for(local_rank: int) -> torch.device:
    """The GPU of that number where there are GPUs, else the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    if local_rank >= torch.cuda.device_count():
        # Slurm's --gpus-per-task=1 shows each rank its own GPU only
        if torch.cuda.device_count() == 1 and "SLURM_PROCID" in os.environ:
            return torch.device("cuda", 0)
        raise UserError(
            f"rank {local_rank} of this machine has no GPU: there are {torch.cuda.device_count()}"
        )
    return torch.device("cuda", local_rank)


def threads_of(local_world: int) -> int:
    """Threads of each of so many ranks on this machine: the user's or the launcher's word counts."""
    said = os.environ.get("OMP_NUM_THREADS", "")
    return int(said) if said.isdigit() else max(1, cores() // local_world)


@contextlib.contextmanager
def join(timeout_s: float = 600) -> Iterator[Ranks]:
    """Joins the process group of the launcher (if any) and leaves it at the end.

    timeout_s: seconds a collective may take before it fails.
    """
    rank, world, local_rank, local_world = found() or (0, 1, 0, 1)
    device = device_for(local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(threads_of(local_world))
    if world > 1:
        # Gloo's threads need the interpreter to let go of the tensors of their last operation, and die with the
        # process if it is already ending. Freeing the groups waits for the threads; gc, as cycles may hold groups.
        atexit.register(gc.collect)
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(
            backend,
            store=_store(rank, world, timeout_s),
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=timeout_s),
        )
    try:
        yield Ranks(rank, world, local_rank, local_world, device)
    finally:
        if world > 1:
            dist.destroy_process_group()


def _store(rank: int, world: int, timeout_s: float) -> dist.Store:
    """Where the ranks meet. The name carries the restart count: a store that outlives a restart still holds the
    addresses of the dead ranks."""
    attempt = f"attempt{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    path = os.environ.get(STORE_FILE)
    if path:
        return dist.PrefixStore(attempt, dist.FileStore(f"{path}.{attempt}", world))
    host, port = _master()
    shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    master, timeout = rank == 0 and not shared, timedelta(seconds=timeout_s)
    store = dist.TCPStore(host, port, world, is_master=master, timeout=timeout, wait_for_workers=False)
    return dist.PrefixStore(attempt, store)


def _master() -> tuple[str, int]:
    """Address of rank 0: torchrun says it; under Slurm the first host of the job."""
    env = os.environ
    if "MASTER_ADDR" in env:
        return env["MASTER_ADDR"], int(env.get("MASTER_PORT", "29500"))
    if "SLURM_JOB_NODELIST" in env:
        command = ["scontrol", "show", "hostnames", env["SLURM_JOB_NODELIST"]]
        hosts = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
        return hosts[0], 20000 + int(env["SLURM_JOB_ID"]) % 20000
    raise UserError(
        "RANK is set but MASTER_ADDR is not: start the ranks with torchrun, or set MASTER_ADDR and MASTER_PORT"
    )
