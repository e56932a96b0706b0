"""How many ranks are asked for, and the launchers whose ranks are used, by the variables that they set. No torch.

`LAUNCHERS` is what `found` reads, what the docs list, and what `deploy/` is tested against.
"""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from fivefold.errors import UserError

ADDRESS, PORT = "MASTER_ADDR", "MASTER_PORT"
"""Where rank 0 listens. Every launcher's may be set by hand."""


@dataclass(frozen=True)
class Launcher:
    """The variables of a launcher. rank, world: on all hosts. local_rank, local_world: on this host; several names: the
    first that is set. step: another variable that is set in a job step only."""

    name: str
    rank: str
    world: str
    local_rank: str
    local_world: tuple[str, ...]
    step: str = ""

    def started(self) -> bool:
        """True if this process is one of its ranks."""
        return all(name in os.environ for name in (self.rank, self.world, self.step) if name)


TORCHRUN = Launcher("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", ("LOCAL_WORLD_SIZE",))
SLURM = Launcher(
    "Slurm",
    "SLURM_PROCID",
    "SLURM_NTASKS",
    "SLURM_LOCALID",
    ("SLURM_STEP_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE"),
    "SLURM_STEP_ID",
)
MPI = (
    Launcher(
        "mpirun of Open MPI",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        ("OMPI_COMM_WORLD_LOCAL_SIZE",),
    ),
    Launcher(
        "mpirun of MPICH or Intel MPI",
        "PMI_RANK",
        "PMI_SIZE",
        "MPI_LOCALRANKID",
        ("MPI_LOCALNRANKS",),
        "MPI_LOCALNRANKS",
    ),
    Launcher("PMI", "PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", ("PMI_LOCAL_SIZE",), "PMI_LOCAL_SIZE"),
)
LAUNCHERS = (TORCHRUN, *MPI, SLURM)
"""The first one whose variables are set has started this process. An mpirun inside a Slurm job starts its own daemons
as tasks, so its ranks have both kinds of variables, and Slurm's are wrong."""


def launcher() -> Launcher | None:
    """The launcher of this process, or None without one."""
    for one in LAUNCHERS:
        if one.started() and not (one is SLURM and _number(one.world) == 1):  # an interactive shell
            return one
    return None


def found() -> tuple[int, int, int, int] | None:
    """(rank, world, local rank, local world) from the launcher, or None without one.

    Raises:
        UserError: a variable of the launcher is missing or not a number.
    """
    by = launcher()
    if by is None:
        return None
    rank, world = _number(by.rank), _number(by.world)
    local_world = next((name for name in by.local_world if name in os.environ), by.local_world[-1])
    alone = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": str(world)}  # by hand: RANK and WORLD_SIZE are enough
    return rank, world, _number(by.local_rank, alone), _number(local_world, alone)


def _number(name: str, defaults: dict[str, str] | None = None) -> int:
    """A launcher's number in the environment. Of Slurm's lists, such as "4(x2),3", it is the first."""
    said = os.environ.get(name, (defaults or {}).get(name, ""))
    first = said.split("(")[0].split(",")[0]
    if not first.isdigit():
        raise UserError(f"the environment variable {name} = {said!r} must be a number, as launchers set it")
    return int(first)


def master() -> tuple[str, int]:
    """(address, port) where rank 0 listens. In a job of Slurm: its first host. mpirun on one host: the loopback
    interface.

    Raises:
        UserError: the launcher does not say it.
    """
    by, env = launcher(), os.environ
    if ADDRESS in env:
        return env[ADDRESS], _number(PORT, {PORT: "29500"})
    _, world, _, local_world = found() or (0, 1, 0, 1)
    if by in MPI and world == local_world:
        return "127.0.0.1", _number(PORT, {PORT: str(_own_port(_launcher_pid(by)))})
    if "SLURM_JOB_NODELIST" in env:
        return _first_host(env["SLURM_JOB_NODELIST"]), _own_port(_number("SLURM_JOB_ID"))
    if by in MPI:
        raise UserError(
            f"ranks of {by.name} on several hosts need {ADDRESS}, the first host: mpirun -x {ADDRESS}=HOST "
            f"-x {PORT}=29500 (Open MPI), or mpirun -genv {ADDRESS} HOST -genv {PORT} 29500 (MPICH, Intel MPI)"
        )
    raise UserError(
        f"RANK is set but {ADDRESS} is not: start the ranks with torchrun, or set {ADDRESS} and {PORT}"
    )


def _own_port(number: int) -> int:
    """A port for the job with this number, so that two jobs on a host do not meet."""
    return 20000 + number % 20000


def _launcher_pid(by: Launcher) -> int:
    """The nearest process above this one that is no rank, by its environment: mpirun or its daemon. All ranks of a host
    find the same one, also under a shell script each. 0 where the system does not tell."""
    pid = os.getpid()
    with suppress(OSError, ValueError, IndexError):
        while sys.platform == "linux" and pid > 1:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
            if f"{by.rank}=".encode() not in Path(f"/proc/{pid}/environ").read_bytes():
                return pid
    return 0


def _first_host(nodes: str) -> str:
    """The first host of a Slurm list such as "node[3-5],other"."""
    try:
        found = subprocess.run(
            ["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, check=True
        )
        return found.stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError) as error:
        said = str(getattr(error, "stderr", "") or error).strip()
        raise UserError(
            f"`scontrol show hostnames {nodes}` does not name the job's first host ({said}): set MASTER_ADDR to it"
        ) from None


COUNTS = {"TORCHELASTIC_RESTART_COUNT": "torchrun", "SLURM_RESTART_COUNT": "Slurm"}
MOST = "TORCHELASTIC_MAX_RESTARTS"  # torchrun's --max-restarts
LAUNCH = "TORCHELASTIC_RUN_ID"  # its --rdzv-id


def restarted_by() -> str | None:
    """The launcher that says that it has started this rank before; None if none does. torchrun counts on each host by
    itself, and not what another host caused, so its ranks may differ in this."""
    for name, launcher in COUNTS.items():
        count = os.environ.get(name, "")
        if count.isdigit() and int(count):
            return launcher
    return None


def may_be_again() -> bool:
    """True if the ranks may have been started before, also if no count says so: under torchrun that may restart them,
    in a job that Slurm has started again, in a pod of Kubernetes where nobody types. The same on all ranks."""
    return os.environ.get(MOST, "0") != "0" or restarted_by() is not None or in_pod()


def in_pod() -> bool:
    """True in a pod of Kubernetes where nobody types: it may be a retry, and does not know."""
    typed = hasattr(sys, "ps1") or (sys.stdin and sys.stdin.isatty())  # ps1: also in a notebook
    return "KUBERNETES_SERVICE_HOST" in os.environ and not typed


def launch_id() -> str:
    """torchrun's name of all starts of one launch; "" if it was given none."""
    name = os.environ.get(LAUNCH, "")
    return "" if name == "none" else name


def between(text: str) -> int | tuple[int, int]:
    """Reads `N` or `MIN:MAX`, numbers of ranks.

    Raises:
        UserError: it is neither.
    """
    least, colon, most = text.partition(":")
    numbers = [least, most] if colon else [least, least]
    if not all(n.isascii() and n.isdigit() and len(n) < 8 for n in numbers):
        raise UserError(
            f"--nproc {text[:40]}: must be a number of ranks, N, or the fewest and the most, MIN:MAX"
        )
    first, last = map(int, numbers)
    if not 1 <= first <= last:
        raise UserError(
            f"--nproc {text}: must be at least 1, and MIN at most MAX. Nearest valid: {max(1, last)}"
        )
    return (first, last) if colon else first
