"""A Slurm of one node on this machine, from the distribution's packages. It listens on the loopback interface only.

with Slurm(folder) as slurm:
    slurm.run("sbatch", "script.sh")
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue")
PATH = f"{os.environ.get('PATH', '')}:/usr/sbin"
CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmdPort={node}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=1,bf_interval=1
SlurmdParameters=config_overrides
ReturnToService=2
MailProg=/bin/true
NodeName={host} NodeAddr=127.0.0.1 CPUs={tasks} State=UNKNOWN
PartitionName=test Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class Unavailable(Exception):
    """There is no Slurm here, or it does not start. The message says why."""


class Slurm:
    def __init__(self, folder: Path, tasks: int = 2):
        self.folder, self.tasks = folder, tasks
        self._running: list[subprocess.Popen[bytes]] = []
        self.env = os.environ | {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": PATH}

    def __enter__(self) -> Slurm:
        missing = [name for name in PROGRAMS if not shutil.which(name, path=PATH)]
        if missing:
            raise Unavailable(
                f"no {', '.join(missing)}; on Debian: apt install munge slurmctld slurmd slurm-client"
            )
        host = socket.gethostname().partition(".")[0]
        with socket.socket() as one, socket.socket() as two:
            for found in (one, two):
                found.bind(("127.0.0.1", 0))
            ports = {"controller": one.getsockname()[1], "node": two.getsockname()[1]}
        for name in ("state", "spool"):
            (self.folder / name).mkdir()
        values = {"host": host, "folder": self.folder, "user": _user(), "tasks": self.tasks, **ports}
        (self.folder / "slurm.conf").write_text(CONFIG.format(**values))
        key = self.folder / "key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        self.folder.chmod(0o755)
        files = {name: self.folder / f"munge.{name}" for name in ("pid", "log", "seed")}
        try:
            self._start(
                "munged", "--foreground", "--force", f"--key-file={key}", f"--socket={self.folder / 'munge'}",
                *(f"--{name}-file={path}" for name, path in files.items()),
            )  # fmt: skip
            self._until(lambda: (self.folder / "munge").exists(), "munged")
            self._start("slurmctld", "-D", "-i")
            self._start("slurmd", "-D", "-N", host)
            self._until(lambda: "idle" in self.run("sinfo", "-h", "-o", "%T", check=False), "the node")
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, *words: str, check: bool = True) -> str:
        """What a command of Slurm's prints."""
        done = subprocess.run(words, env=self.env, capture_output=True, text=True, timeout=60)
        assert not check or done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout

    def job(self, number: str) -> dict[str, str]:
        """The fields of a job, such as JobState and Restarts."""
        text = self.run("scontrol", "--oneliner", "show", "job", number)
        return dict(word.split("=", 1) for word in text.split() if "=" in word)

    def close(self) -> None:
        with_jobs = [process for process in self._running if process.poll() is None]
        if len(with_jobs) == 3:
            self.run("scancel", "--user", _user(), check=False)
            time.sleep(1)
        for process in reversed(with_jobs):
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._running = []

    def _start(self, *words: str) -> None:
        log = (self.folder / f"{words[0]}.out").open("wb")
        self._running.append(subprocess.Popen(words, env=self.env, stdout=log, stderr=log))

    def _until(self, there, what: str, seconds: float = 30) -> None:
        deadline = time.monotonic() + seconds
        while not there():
            ended = [process for process in self._running if process.poll() is not None]
            if ended or time.monotonic() > deadline:
                said = "".join(file.read_text()[-500:] for file in sorted(self.folder.glob("*.out")))
                raise Unavailable(f"{what} did not start: {said.strip()}")
            time.sleep(0.1)


def _user() -> str:
    import pwd

    return pwd.getpwuid(os.getuid()).pw_name
