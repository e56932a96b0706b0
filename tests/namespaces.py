"""Hosts on one machine: Linux namespaces on a switch, with links of a given rate. No torch.

    with Hosts(2, "200mbit") as hosts:
        hosts.run(["fivefold", "train", "quickstart", "--out", "runs/two"], ranks=2)

Each host has its own network, name, process numbers and /etc/hosts. It shares processors, memory and files with the
others, as hosts share a file system. Its network card, `eth0`, has an address in 10.77.0.0/24 and a token bucket of tc
in each direction. The hosts' names resolve to these addresses. Only latency is not as between real hosts: kernels
without netem cannot delay packets.

Nothing is left behind, whatever happens. No namespace has a name, so the kernel removes it with its last process. The
first process of each host reads from a pipe that only the maker can write to. When the maker ends, even if it is
killed, the pipe closes, the first process ends, and the kernel kills all other processes of that host.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

BURST_S = (
    5e-4  # a link that was idle sends this much at once; with longer bursts small messages would be free
)
QUEUE_S = 0.05  # of the switch, for each host; it drops what goes beyond
LEAST = 4096  # bytes of either: two packets
GOODPUT = 1448 / 1514  # of TCP over Ethernet: the payload of a packet
PORT = 29400  # torchrun's rendezvous
KINDS = ("net", "mount", "uts", "pid")
NEW = ("--net", "--mount", "--uts", "--pid", "--fork", "--kill-child=KILL", "--mount-proc")
GRACE_S = 30  # for the other hosts, after a launcher has failed on one


class Unavailable(Exception):
    """This machine cannot make hosts. The message says why."""


@dataclass(frozen=True)
class Done:
    """The end of a command on every host. out, err: what it printed, by host; empty if that was not captured."""

    code: int
    out: tuple[str, ...] = ()
    err: tuple[str, ...] = ()

    def __str__(self) -> str:
        both = enumerate(zip(self.out, self.err, strict=True))
        texts = [f"host{i}:\n{out}{err}" for i, (out, err) in both]
        return "\n".join([f"exit code {self.code}", *texts])


class Hosts:
    """`count` hosts, host0 (10.77.0.1), host1, ..., whose links to the switch carry `rate` in each direction.

    rate: such as "200mbit"; None: as fast as the machine.

    Raises:
        ValueError: `count` or `rate` is impossible.
        Unavailable (on entering): namespaces are not permitted, or a program or a part of the kernel is missing.
    """

    def __init__(self, count: int = 2, rate: str | None = "200mbit"):
        if not 1 <= count <= 200:
            raise ValueError(f"{count} hosts: must be 1 to 200")
        self.count, self.rate = count, rate
        self.bytes_s = None if rate is None else bytes_per_second(rate)
        self._user: list[str] = []  # options of nsenter
        self._first: list[subprocess.Popen[bytes]] = []  # their input keeps the switch and each host alive
        self._pids: list[int] = []  # the first process of the switch and of each host

    def __enter__(self) -> Hosts:
        if sys.platform != "linux":
            raise Unavailable("hosts are made of Linux namespaces, which this system does not have")
        try:
            self._start_switch()
            for host in range(self.count):
                self._start_host(host)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def address(self, host: int) -> str:
        return f"10.77.0.{host + 1}"

    def start(self, host: int, argv: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
        """Starts a command on a host, in the current folder. options: of Popen."""
        command = [*self._enter(1 + host, *KINDS), "env", "-C", os.getcwd(), *argv]
        return subprocess.Popen[bytes](command, **options)

    def signal(self, process: subprocess.Popen[bytes], number: int) -> None:
        """Sends a signal to a command that `start` started."""
        for pid in _children(process.pid):  # of nsenter, which does not pass signals on
            os.kill(pid, number)

    def kill(self, host: int) -> None:
        """Kills all processes of a host. It has no network any more, like a machine without power."""
        _end(self._first[1 + host])

    def connect(self, host: int, up: bool = True, rate: str | None = None) -> None:
        """Cuts a host's cable, or puts it back. rate: another one in each direction, such as "1kbit"."""
        self._do(0, f"ip link set port{host} {'up' if up else 'down'}", "net")
        if rate is not None:
            for which, device in ((0, f"port{host}"), (1 + host, "eth0")):
                self._do(which, f"tc qdisc del dev {device} root; {self._limit(device, rate)}", "net")

    def run(
        self,
        argv: Sequence[str],
        ranks: int = 2,
        *,
        capture: bool = False,
        timeout_s: float = 600,
        env: Mapping[str, str] | None = None,
        options: Sequence[str] = (),
        meanwhile: Callable[[list[subprocess.Popen[bytes]]], None] = lambda processes: None,
    ) -> Done:
        """Runs a command under torchrun, with `ranks` ranks on every host. They meet on host0.

        capture: returns what the command prints, instead of printing it. env: additional variables. options: more
        options of torchrun. meanwhile: gets the launchers, one a host, once they run. After one has failed, the others
        have GRACE_S more seconds; one of a host that was killed does not count. After timeout_s all are killed, and
        the code is 124.
        """
        launcher = [
            sys.executable, "-m", "torch.distributed.run", f"--nnodes={self.count}", f"--nproc-per-node={ranks}",
            "--rdzv-backend=c10d", f"--rdzv-endpoint={self.address(0)}:{PORT}", f"--rdzv-id={uuid.uuid4().hex}",
            *options, "--no-python",
        ]  # fmt: skip
        variables = {**os.environ, **(env or {})}
        with contextlib.ExitStack() as stack:
            files = [
                [stack.enter_context(tempfile.TemporaryFile()) for _ in range(2)] for _ in range(self.count)
            ]
            started = []
            try:
                for host, (out, err) in enumerate(files):
                    to = {"stdout": out, "stderr": err} if capture else {}
                    started.append(self.start(host, [*launcher, *argv], env=variables, **to))
                meanwhile(started)
                code = self._wait(started, timeout_s)
            finally:
                for process in started:
                    if process.poll() is None:
                        self.signal(process, signal.SIGKILL)
                        process.wait()
            out, err = (tuple(_read(pair[i]) for pair in files) for i in range(2))
        return Done(code, out, err)

    def _wait(self, started: list[subprocess.Popen[bytes]], timeout_s: float) -> int:
        """The exit code of the launcher that failed first, or 0. 124: they did not end in time."""
        code, deadline = 0, time.monotonic() + timeout_s
        while any(process.poll() is None for process in started):
            there = [one for host, one in enumerate(started) if self._first[1 + host].poll() is None]
            failed = [process.returncode for process in there if process.returncode]
            if failed and not code:
                code, deadline = failed[0], min(deadline, time.monotonic() + GRACE_S)
            if time.monotonic() > deadline:
                return code or 124
            time.sleep(0.05)
        return code or max((process.returncode for process in started), key=abs)

    def close(self) -> None:
        """Removes the hosts, with all that runs on them."""
        for process in reversed(self._first):
            _end(process)
        self._first, self._pids = [], []

    def _start_switch(self) -> None:
        """A bridge in a namespace of its own. Users that are not root get a namespace of users, too."""
        try:
            self._start_namespaces(["unshare", *NEW])
        except Unavailable:
            self.close()
            self._user = ["--user", "--preserve-credentials"]
            self._start_namespaces(["unshare", "--user", "--map-root-user", *NEW])
        self._do(0, "ip link add name switch type bridge; ip link set switch up; ip link set lo up")

    def _start_host(self, host: int) -> None:
        self._start_namespaces([*self._enter(0, *KINDS), "unshare", *NEW])
        # The second line of each is what PyTorch's store looks up.
        names = "".join(
            f"{before}{self.address(other)} host{other}\\n"
            for other in range(self.count)
            for before in ("", "::ffff:")
        )
        # `netns` is a number in this process's own view: only the network of the switch is entered.
        add = f"ip link add port{host} type veth peer name eth0 netns {self._pids[1 + host]}"
        self._do(0, f"{add}; ip link set port{host} master switch up; {self._limit(f'port{host}')}", "net")
        self._do(
            1 + host,
            f"hostname host{host}; ip link set lo up; ip addr add {self.address(host)}/24 dev eth0; "
            f"ip link set eth0 up; {self._limit('eth0')}; "
            # a file of a tmpfs that nothing else sees takes the place of /etc/hosts
            f"mount -t tmpfs hosts /mnt; printf '127.0.0.1 localhost\\n{names}' > /mnt/hosts; "
            "mount --bind /mnt/hosts /etc/hosts; umount /mnt",
        )

    def _limit(self, device: str, rate: str | None = None) -> str:
        rate = rate or self.rate
        if rate is None:
            return "true"
        burst, queue = (max(LEAST, bytes_per_second(rate) * seconds) for seconds in (BURST_S, QUEUE_S))
        return f"tc qdisc add dev {device} root tbf rate {rate} burst {burst:.0f} limit {queue:.0f}"

    def _start_namespaces(self, command: list[str]) -> None:
        """Starts `cat` as the first process of new namespaces. It lives until its input ends."""
        try:
            process = subprocess.Popen(
                [*command, "cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )
        except FileNotFoundError as error:
            raise Unavailable(
                f"hosts need the program {error.filename} (packages util-linux, iproute2)"
            ) from None
        self._first.append(process)
        assert process.stdin
        assert process.stdout
        assert process.stderr
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(b"ready\n")
            process.stdin.flush()
        if not process.stdout.readline():
            said = process.stderr.read().decode(errors="replace").strip()
            raise Unavailable(f"Linux namespaces are not permitted here: {said}")
        process.stderr.close()
        pid = process.pid
        while children := _children(pid):
            pid = children[0]
        self._pids.append(pid)

    def _enter(self, which: int, *kinds: str) -> list[str]:
        return [
            "nsenter",
            f"--target={self._pids[which]}",
            *self._user,
            *(f"--{kind}" for kind in kinds),
            "--",
        ]

    def _do(self, which: int, script: str, *kinds: str) -> None:
        """Runs a script in the namespaces of the switch or of a host."""
        command = [*self._enter(which, *(kinds or KINDS)), "sh", "-euc", script]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise Unavailable(f"making hosts failed: {done.stderr.strip()} (in: {script})")


def bytes_per_second(rate: str) -> float:
    """A rate as tc takes it, such as "200mbit" or "1gbit".

    Raises:
        ValueError: it is not one.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]?)bit", rate)
    if not found or not float(found[1]):
        raise ValueError(f"rate '{rate}': must be a number with kbit, mbit or gbit, such as 200mbit")
    return float(found[1]) * {"": 1, "k": 1e3, "m": 1e6, "g": 1e9}[found[2]] / 8


def _end(process: subprocess.Popen[bytes]) -> None:
    """Closes the input of a first process, and waits until all processes of its host have ended."""
    assert process.stdin
    assert process.stdout
    with contextlib.suppress(OSError):
        process.stdin.close()
    process.wait()
    process.stdout.close()


def _children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def _read(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")
