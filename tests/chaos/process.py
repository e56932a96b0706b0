"""A training run in processes of its own: started by the command line, followed line by line, killed at will."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

TINY = [
    "model.layers=4", "model.dim=32", "model.heads=4", "model.kv_heads=4", "model.ffn_dim=48", "model.seq_len=16",
    "data.tokenizer=bytes", "data.val_fraction=0.1", "train.global_batch_size=8", "train.microbatch_size=1",
    "train.val_sequences=7", "train.val_every=20", "train.sample_tokens=8", "train.sample_every=0",
    "optim.warmup_steps=0", "optim.schedule=constant", "precision.mode=fp32", "observe.log_every=1",
]  # fmt: skip
MOE = ["model.arch=moe", "model.experts=4", "model.experts_per_token=2"]
MAIN = [sys.executable, "-m", "fivefold.cli.main"]
MARKER = "FIVEFOLD_CHAOS"  # in the environment of all processes of a run
STEP = re.compile(r"step +(\d+)/(\d+) ")
BEGIN = re.compile(r"; run folder ")  # a line of every start of the ranks
BACK_OFF = re.compile(r"ranks? again in ([\d.]+) s ")  # the launcher waits


def overrides(folder: Path, layout: str, steps: int, every: int) -> list[str]:
    """Settings of a tiny run. Its text and cache lie in `folder`."""
    text = folder / "text.txt"
    if not text.exists():
        text.write_text("".join(f"{i} and {i * i % 89} make {i + i * i % 89}; " for i in range(900)))
    return [
        *TINY, *(MOE if "ep=" in layout else []), f"data.source={text}", f"data.cache={folder / 'cache'}",
        f"train.steps={steps}", f"checkpoint.every={every}", "launch.restarts=1000",
    ]  # fmt: skip


class Run:
    """Processes that train into a folder. options: more of the command's. lines: (time.monotonic, text) of what they
    print."""

    def __init__(self, out: Path, layout: str, sets: Sequence[str], options: Sequence[str] = ()):
        self.out, self.layout, self.sets, self.options = out, layout, list(sets), list(options)
        self.word = uuid.uuid4().hex
        self.lines: list[tuple[float, str]] = []
        self.news = threading.Condition()
        self.popen: subprocess.Popen[str] | None = None
        self.starts = 0

    def start(self) -> None:
        """Starts the run, or goes on with it."""
        if (self.out / "recipe.toml").is_file():
            command = ["train", str(self.out), "--resume"]
        else:
            sets = [part for one in self.sets for part in ("--set", one)]
            command = ["train", "quickstart", "--out", str(self.out), "--layout", self.layout, *sets]
        self.popen = subprocess.Popen(
            [*MAIN, *command, *self.options],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=os.environ | {MARKER: self.word, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
            start_new_session=True,
        )
        self.starts += 1
        threading.Thread(target=self._follow, args=(self.popen,), daemon=True).start()

    def _follow(self, popen: subprocess.Popen[str]) -> None:
        assert popen.stdout is not None
        for line in popen.stdout:
            with self.news:
                self.lines.append((time.monotonic(), line.rstrip("\n")))
                self.news.notify_all()

    @property
    def ended(self) -> bool:
        return self.popen is None or self.popen.poll() is not None

    @property
    def code(self) -> int | None:
        return self.popen.poll() if self.popen else None

    def wait(self, found: Callable[[], bool], timeout_s: float, poll_s: float = 0.01) -> bool:
        """Waits until something is found, or the launcher has ended, or for so long. True: it was found."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            ended = self.ended
            if found():
                return True
            if ended:
                return False
            with self.news:
                self.news.wait(poll_s)
        return False

    def stepped(self, since: float = 0.0) -> float | None:
        """When the first step ended that ranks took which began after a time; None: not yet."""
        begun = False
        for at, line in list(self.lines):
            begun = begun or (at > since and bool(BEGIN.search(line)))
            if begun and STEP.search(line):
                return at
        return None

    def begun(self) -> float:
        """Just before the last start of the ranks."""
        return max((at for at, line in list(self.lines) if BEGIN.search(line)), default=0.001) - 0.001

    def waited(self, since: float) -> float:
        """Seconds that the launcher has waited after a time before it started the ranks again."""
        found = [BACK_OFF.search(line) for at, line in list(self.lines) if at > since]
        return sum(float(one[1]) for one in found if one)

    @property
    def step(self) -> int:
        """The last step that was printed."""
        for _, line in reversed(list(self.lines)):
            if found := STEP.search(line):
                return int(found[1])
        return 0

    def processes(self) -> list[int]:
        """All processes of the run but zombies, the launcher first."""
        found = []
        for entry in os.listdir("/proc"):
            if entry.isdigit():
                with contextlib.suppress(OSError, IndexError):
                    if f"{MARKER}={self.word}".encode() in Path("/proc", entry, "environ").read_bytes():
                        state = Path("/proc", entry, "stat").read_text().rpartition(")")[2].split()[0]
                        if state != "Z":
                            found.append(int(entry))
        return sorted(found)

    def ranks(self) -> list[int]:
        """The ranks: those processes that no other descends from, without the launcher."""
        parents = set()
        alive = self.processes()
        for pid in alive:
            with contextlib.suppress(OSError):
                parents.add(int(Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[1]))
        return [pid for pid in alive if pid not in parents and self.popen and pid != self.popen.pid]

    def launcher(self) -> int:
        assert self.popen is not None
        return self.popen.pid

    def left(self, timeout_s: float = 45.0) -> list[int]:
        """Waits until all processes are gone, which may take launch.grace. Returns those that are not."""
        deadline = time.monotonic() + timeout_s
        while (alive := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.02)
        return alive

    def close(self) -> None:
        """Kills what is left."""
        for pid in self.processes():
            send(pid, signal.SIGKILL)
        if self.popen is not None:
            self.popen.wait()

    def tail(self, count: int = 40) -> str:
        return "\n".join(line for _, line in self.lines[-count:])


def send(pid: int, number: int) -> bool:
    """Sends a signal. False: there is no such process any more."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True
