"""The launchers whose ranks are used, by the variables that they set; and where this machine listens: on one named
interface, at one address, never on all by accident. No torch.

`LAUNCHERS` is what `found` reads, what the docs list, and what `deploy/` is tested against.

PyTorch's TCP store listens on every interface, unless it is given a socket that listens already. gloo and NCCL listen
on the interface that GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME names, or on one that they choose.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from fivefold.errors import BusyError, UserError, system_error

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
_PER_NODE = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE")
SLURM = Launcher("Slurm", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", _PER_NODE, "SLURM_STEP_ID")
_OMPI = "OMPI_COMM_WORLD"
MPI = (
    Launcher(
        "mpirun of Open MPI",
        f"{_OMPI}_RANK",
        f"{_OMPI}_SIZE",
        f"{_OMPI}_LOCAL_RANK",
        (f"{_OMPI}_LOCAL_SIZE",),
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
    for one in LAUNCHERS:
        if one.started() and not (one is SLURM and _number(one.world) == 1):  # an interactive shell
            return one
    return None


def found() -> tuple[int, int, int, int] | None:
    """(rank, world, local rank, local world) from the launcher, or None without one. Raises UserError: a variable of
    the launcher is missing or not a number."""
    by = launcher()
    if by is None:
        return None
    rank, world = _number(by.rank), _number(by.world, least=1)
    if rank >= world:
        raise UserError(
            f"the environment has {by.rank} = {rank} and {by.world} = {world}: ranks are 0 to {world - 1}. {UNSET}"
        )
    local_world = next((name for name in by.local_world if name in os.environ), by.local_world[-1])
    alone = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": str(world)}  # by hand: RANK and WORLD_SIZE are enough
    return rank, world, _number(by.local_rank, alone), _number(local_world, alone, least=1)


UNSET = "Unset them if no launcher has started this process"


def _number(
    name: str, defaults: dict[str, str] | None = None, least: int = 0, most: float = float("inf")
) -> int:
    """A launcher's number in the environment. Of Slurm's lists, such as "4(x2),3", it is the first."""
    said = os.environ.get(name, (defaults or {}).get(name, ""))
    first = said.split("(")[0].split(",")[0]
    if not first.isdigit() or not least <= int(first) <= most:
        bounds = f" from {least} to {most}" if most < float("inf") else f" from {least} on" if least else ""
        raise UserError(
            f"the environment variable {name} = {said!r} must be a number{bounds}, as launchers set it. {UNSET}"
        )
    return int(first)


def master() -> tuple[str, int]:
    """(address, port) where rank 0 listens. In a job of Slurm: its first host. mpirun on one host: the loopback
    interface. Raises UserError: the launcher does not say it."""
    by, env = launcher(), os.environ
    if ADDRESS in env:
        return env[ADDRESS], _number(PORT, {PORT: "29500"}, most=65535)
    _, world, _, local_world = found() or (0, 1, 0, 1)
    if by in MPI and world == local_world:
        return "127.0.0.1", _number(PORT, {PORT: str(_own_port(_launcher_pid(by)))}, most=65535)
    if "SLURM_JOB_NODELIST" in env:
        show = ["scontrol", "show", "hostnames", env["SLURM_JOB_NODELIST"]]  # such as "node[3-5],other"
        try:
            hosts = subprocess.run(show, capture_output=True, text=True, check=True).stdout.split()
            return hosts[0], _own_port(_number("SLURM_JOB_ID"))
        except (OSError, subprocess.CalledProcessError, IndexError) as error:
            said = str(getattr(error, "stderr", "") or error).strip()
            raise UserError(
                f"`{' '.join(show)}` does not name the job's first host ({said}): set MASTER_ADDR to it"
            ) from None
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


COUNTS = {"TORCHELASTIC_RESTART_COUNT": "torchrun", "SLURM_RESTART_COUNT": "Slurm"}
MOST = "TORCHELASTIC_MAX_RESTARTS"  # torchrun's --max-restarts
LAUNCH = "TORCHELASTIC_RUN_ID"  # its --rdzv-id, the same in all starts of a launch; "none": not given


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


LOOPBACK = "lo" if sys.platform == "linux" else "lo0"
_SIOCGIFADDR = 0x8915  # linux/sockios.h: the IPv4 address of an interface


def own_address(host: str) -> str:
    """The address of this machine on the way to a host. It sends nothing. Raises BusyError: there is no such host yet,
    or no way to it."""
    try:
        kind, *_, where = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(kind, socket.SOCK_DGRAM) as way:
            way.connect(where)
            return way.getsockname()[0]
    except OSError as error:
        raise BusyError(f"no way to the host {host}: {error.strerror or error}") from None


def addresses() -> dict[str, str]:
    """The IPv4 address of each interface that has one, by its name, without loopback (Linux)."""
    if sys.platform != "linux":
        return {}
    import fcntl

    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # an interface without an address
                said = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                found[name] = socket.inet_ntoa(said[20:24])
    return {name: address for name, address in found.items() if not is_loopback(address)}


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def interface_of(address: str) -> str:
    """The interface with this address; "" if it is the loopback interface, or cannot be found."""
    if sys.platform != "linux" or is_loopback(address):
        return ""
    wanted = ipaddress.ip_address(address.partition("%")[0])
    if wanted.version == 6:
        with suppress(OSError):
            for line in Path("/proc/net/if_inet6").read_text().splitlines():
                raw, *_, name = line.split()
                if ipaddress.ip_address(bytes.fromhex(raw)) == wanted:
                    return name
        return ""
    return next((name for name, its in addresses().items() if its == str(wanted)), "")


def only_here(host: str, backend: str) -> bool:
    """True if all ranks must be on this machine: rank 0's host is "localhost" or a loopback address, or the user has
    named the loopback interface. A host's own name may stand for one, too, and other hosts still reach it."""
    own = host.partition(".")[0] == socket.gethostname().partition(".")[0] != "localhost"
    named = os.environ.get(variable(backend), "").lstrip("=").split(",")
    return LOOPBACK in named or (not own and is_loopback(_address(host)))


def reachable(host: str, backend: str) -> str:
    """`host`, as this machine has to call it. On Debian a host's own name is 127.0.1.1 on itself, where no other host
    could reach it: then this is the address of its only interface, or of the one that is named. Raises UserError: it
    has several, and none or several of them are named."""
    own = host.partition(".")[0] == socket.gethostname().partition(".")[0] != "localhost"
    if not own or only_here(host, backend) or not is_loopback(own_address(host)):
        return host
    found = addresses()
    if os.environ.get(variable(backend)):
        named = set[str]().union(*_named(backend, found).values())
        found = {n: address for n, address in found.items() if n in named}
    if len(found) != 1:
        count = "several other interfaces have addresses" if found else "no other interface has an address"
        raise UserError(
            f"{host} stands for the loopback interface on its own host, and {count} there.{interfaces(backend)}"
        )
    return next(iter(found.values()))


def variable(backend: str) -> str:
    """Where the user or the launcher names the interface."""
    return f"{backend.upper()}_SOCKET_IFNAME"


def _named(backend: str, names: Iterable[str]) -> dict[str, set[str]]:
    """By each word of the user's variable, those of the interfaces that it means."""
    setting, names = os.environ.get(variable(backend), ""), set(names)
    # NCCL: names are beginnings unless `=` is before; `^` is "not"
    exact, out = backend == "gloo" or "=" in setting[:2], backend != "gloo" and setting.startswith("^")
    words = setting.split(",") if backend == "gloo" else setting.lstrip("^=").split(",")
    found = {
        word: {n for n in names if n == word or (not exact and n.startswith(word))} for word in words if word
    }
    return {setting: names - set[str]().union(*found.values())} if out else found


def require_interface(backend: str) -> None:
    """Raises UserError: the user's variable names no interface of this machine that has an address."""
    setting, known = os.environ.get(variable(backend), ""), {LOOPBACK, *addresses()}
    if sys.platform != "linux":
        known = {name for _, name in socket.if_nameindex()}
    with suppress(OSError):  # those with an address of IPv6
        known |= {line.split()[-1] for line in Path("/proc/net/if_inet6").read_text().splitlines()}
    found = _named(backend, known)
    missing = [word for word, names in found.items() if not names]
    if missing and (backend == "gloo" or len(missing) == len(found)):
        raise UserError(
            f"{variable(backend)} = {setting!r}: this machine has no network interface {', '.join(missing)} with an "
            f"address.{interfaces(backend)}"
        )


def name_interface(backend: str, host: str, one_machine: bool = False) -> None:
    """Lets the ranks of several launches listen on the interface that leads to rank 0's host, and on no other.
    one_machine: all ranks are on this one, so it may be the loopback interface. Raises UserError: none leads there. The
    message lists the interfaces."""
    address = own_address(host)
    name = interface_of(address)
    if not name and (one_machine or only_here(host, backend)):
        name = LOOPBACK
    if not name:
        raise UserError(
            f"ranks on several hosts need a network interface to listen on. This host would reach {host} from "
            f"{address}, which no other host can reach.{interfaces(backend)}"
        )
    # NCCL takes names as beginnings of names
    os.environ[variable(backend)] = f"={name}" if backend == "nccl" else name


def interfaces(backend: str) -> str:
    """What to do about the network: the sentence that ends an error."""
    names = ", ".join(addresses())
    return f" Set {variable(backend)} to the network interface between the hosts (here: {names or 'none'})"


def wait_for(host: str, port: int, wait_s: float) -> None:
    """Returns once somebody listens there. PyTorch's store waits, too, but lets no handler of a signal run meanwhile.
    Raises RuntimeError: nobody does so in time."""
    until = time.monotonic() + wait_s
    while time.monotonic() < until:
        with suppress(OSError), socket.create_connection((host, port), max(1.0, wait_s / 10)):
            return
        time.sleep(0.05)
    raise RuntimeError(f"nobody listens at {host}, port {port}, after {wait_s:g} s")


def listening(host: str, port: int, alone: bool = False) -> int:
    """A socket that listens at one address of this machine: that of `host`, or, if that is a gateway's, the one on the
    way to it. Returns its descriptor, which the caller owns. alone: other hosts need not reach it.

    Raises:
        BusyError: the address is taken.
        UserError: it is the loopback interface's though other hosts must reach it.
    """
    address = _address(host)
    if is_loopback(address) and not alone:
        raise UserError(
            f"{host} stands for the loopback interface ({address}) on its own host, where no other host can reach "
            "it. Give the address of that host instead of its name"
        )
    try:
        return _listen(address, port)
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL and (own := own_address(host)) != address:
            with suppress(OSError):
                return _listen(own, port)
        raise system_error(f"cannot listen at {address}, port {port}: {error.strerror}", error) from None


def _address(host: str) -> str:
    try:
        return str(socket.getaddrinfo(host, 9, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise BusyError(f"there is no host {host}: {error.strerror or error}") from None


def _listen(address: str, port: int) -> int:
    kind = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(kind, socket.SOCK_STREAM) as found:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind((address, port))
        found.listen(2048)
        return found.detach()
