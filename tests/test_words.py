"""A rank's last words reach its launcher at once, whatever the process group does when it is left.

The stand-in for NCCL: in every rank `destroy_process_group` waits for peers that do not come."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launched import Launched
from marks import slow
from ranks import PATIENCE
from test_supervisor import text, words  # noqa: F401, the text of whole runs

from fivefold.checkpoint.write import Writing
from fivefold.cli.main import main
from fivefold.errors import CommunicationError, MemoryRanOut, UserError
from fivefold.launch import local, ranks, verdict
from fivefold.launch.launchers import found
from fivefold.launch.local import Attempt, Outcome, launch
from fivefold.launch.ranks import Ranks, give_up, words_first
from fivefold.models.llama.module import Block

STUCK_S = 25.0
SOON_S = min(2 * PATIENCE, STUCK_S - 5)  # for the words


def stuck() -> None:
    """NCCL's destroy, when a peer does not come."""
    time.sleep(STUCK_S)


def note(file: Path) -> None:
    """The moment of an error. All processes of a machine share the clock."""
    file.write_text(str(time.monotonic()))


def failing(act: Callable[[], None], file: Path, of: Ranks) -> None:
    dist.barrier()
    if of.rank == 1:
        note(file)
        act()
    dist.barrier()


def fails() -> None:
    raise KeyError("of rank 1")


def fails_in_a_thread() -> None:
    """One whose error nobody waits for."""
    threading.Thread(target=lambda: give_up(KeyError("of rank 1"))).start()
    time.sleep(STUCK_S)


def mistakes() -> None:
    raise UserError("layout.tp = 3 does not divide")


def runs_out() -> None:
    raise MemoryRanOut("rank 1 ran out of memory\n[0, null]")


def loses_another() -> None:
    raise CommunicationError("rank 0 has ended")


def hangs() -> None:
    os._exit(verdict.leave("hung", "rank 0 is missing"))


def closes_slowly() -> None:
    """What is around the block waits, too: a save that is being written, a tracker."""
    with ExitStack() as stack, words_first():
        stack.callback(stuck)
        fails()


def outcome_of(work: Any) -> tuple[Outcome, float]:
    local.LEAVE_S = 0.3
    dist.destroy_process_group = stuck
    outcome = launch(Attempt(work, 2, timeout_s=60), fork=True)
    return outcome, time.monotonic()


@pytest.mark.parametrize(
    ("act", "kind"),
    [
        (fails, "failed"),
        *slow((mistakes, "error")),
        (runs_out, "exhausted"),
        *slow((loses_another, "lost"), (hangs, "hung")),
        (fails_in_a_thread, "failed"),
        (closes_slowly, "failed"),
    ],
)
def test_the_launcher_has_the_words_at_once(tmp_path: Path, act: Any, kind: str) -> None:
    launched = Launched(tmp_path / "log", outcome_of, partial(failing, act, tmp_path / "at"))
    outcome, ended = launched.value()
    failure = outcome.failure
    assert (failure.rank, failure.kind) == (1, kind)
    assert ("KeyError: 'of rank 1'" in failure.more) == (kind == "failed")
    assert kind != "exhausted" or (failure.text, failure.more) == ("rank 1 ran out of memory", "[0, null]")
    waits = {loses_another: local.SETTLE_S, closes_slowly: 0.3 + local.POLL_S}.get(act, 0.0)
    assert ended - float((tmp_path / "at").read_text()) < SOON_S + waits
    assert launched.said == ""


def test_of_ranks_that_lost_each_other_the_first_is_named(tmp_path: Path) -> None:
    for rank, moment in ((0, 11.0), (1, 10.0)):
        (tmp_path / f"lost-{rank}").write_text(f"rank {rank} lost another rank")
        os.utime(tmp_path / f"lost-{rank}", (moment, moment))
    failure = verdict.judge(tmp_path, {0: (12.0, verdict.FAILED), 1: (12.0, verdict.FAILED)}, set(), False)
    assert (failure.rank, failure.text) == (1, "rank 1 lost another rank")


# Another launcher: its ranks end by themselves


def foreign(rank: int, port: int, file: Path, abort: Callable[[], None] | None) -> None:
    given = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": 2}
    given |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in given.items()})
    dist.destroy_process_group = stuck
    if abort is not None:
        ranks.abort_groups = abort
    try:
        with ranks.join(60, 60) as of, words_first():
            failing(fails, file, of)
    except KeyError:
        assert not dist.is_initialized(), "this process may train again"
        sys.exit(9)


@pytest.mark.parametrize(
    "words", ["KeyError: 'a'", "rank 1: all_reduce failed", "rank 1 lost another rank: gone"]
)
def test_a_rank_is_named_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: str
) -> None:
    monkeypatch.delenv(verdict.FOLDER, raising=False)
    monkeypatch.setenv("RANK", "1")
    verdict.leave("failed", words)
    assert capsys.readouterr().err == f"rank 1: {words}\n".replace("rank 1: rank 1", "rank 1")


@pytest.mark.parametrize(("abort", "code"), [(None, 9), (stuck, verdict.FAILED)])
def test_a_rank_of_another_launcher_ends_at_once(tmp_path: Path, abort: Any, code: int) -> None:
    """Also if its backend does not let go."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    at = tmp_path / "at"
    both = [Launched(tmp_path / f"{rank}", foreign, rank, port, at, abort) for rank in (0, 1)]
    assert both[1].wait() == code, both[1].said
    assert time.monotonic() - float(at.read_text()) < SOON_S
    assert both[1].said.startswith("rank 1: KeyError: 'of rank 1'\n")
    both[0].kill()


PROGRAM = """
import sys, pathlib
sys.path.insert(0, {tests!r})
from test_words import disturbed
disturbed({where!r}, pathlib.Path({at!r}), {words!r})
"""


@pytest.mark.slow
@pytest.mark.parametrize("agents", [1, 2])
def test_torchrun_has_the_words_at_once(text: Path, tmp_path: Path, agents: int) -> None:  # noqa: F811
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    program, at = tmp_path / "program.py", tmp_path / "at"
    given = [word for word in words(tmp_path / "run", text, "train.steps=20") if "--nproc" not in word]
    own = {"tests": str(Path(__file__).parent), "where": "forward", "at": str(at), "words": given}
    program.write_text(PROGRAM.format(**own))
    command = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={agents}"]
    command += [f"--nproc-per-node={2 // agents}", "--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{port}"]
    environment = {k: v for k, v in os.environ.items() if "SOCKET_IFNAME" not in k}
    logs = [(tmp_path / f"log-{agent}").open("w+") for agent in range(agents)]
    started = [subprocess.Popen([*command, str(program)], env=environment, stderr=log) for log in logs]
    trace, said, until = 'raise KeyError("of rank 1")', "", time.monotonic() + 120 * PATIENCE
    while said.count(trace) < 1 and time.monotonic() < until:
        time.sleep(0.05)
        said = "".join(Path(log.name).read_text() for log in logs)
    assert time.monotonic() - float(at.read_text()) < SOON_S
    codes = [process.wait(120 * PATIENCE) for process in started]
    said = "".join(Path(log.name).read_text() for log in logs)
    assert all(codes), said
    assert re.search(r"^rank 1: KeyError: 'of rank 1'$", said, re.M), said
    assert said.count(trace) == 1, "the traceback, once"


# Whole runs


def disturbed(where: str, at: Path, given: list[str]) -> None:
    """`fivefold WORDS` whose rank 1 fails in a forward, runs out of memory there, loops, or fails in its first save,
    written at once or beside the steps."""
    forward, write_part, calls = Block.forward, Writing.write_part, [0]

    def wrong(*given: Any, **named: Any) -> Any:
        calls[0] += 1
        if calls[0] != (1 if where in SAVES else 12) or (found() or (0,))[0] != 1:
            return (write_part if where in SAVES else forward)(*given, **named)
        note(at)
        if where == "memory":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        if where == "hang":
            time.sleep(600)
        if where == "stop":
            os.kill(os.getppid(), signal.SIGTERM)
            return forward(*given, **named)
        raise KeyError("of rank 1")

    dist.destroy_process_group = stuck
    setattr(*((Writing, "write_part") if where in SAVES else (Block, "forward")), wrong)
    main(given)


SAVES = ("save", "beside")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "sets", "code", "says"),
    [
        ("forward", [], verdict.FAILED, r"^failed: rank 1 failed: KeyError: 'of rank 1', after step \d"),
        ("save", ["checkpoint.asynchronous=false"], verdict.FAILED, r"^failed: rank 1 failed: KeyError"),
        ("beside", [], verdict.STOPPED, r"cannot write the checkpoint .*KeyError\('of rank 1'\)"),
        (
            "memory",
            [],
            verdict.USER,
            r"^error: rank 1 ran out of memory in step \d, asking for 2.00 GiB more",
        ),
        ("stop", [], verdict.STOPPED, r"^stopping: finishing the steps under way"),
        ("hang", ["observe.hang_s=3"], verdict.FAILED, r"^failed: rank 1 is missing"),
    ],
)
def test_a_run_has_the_words_at_once(
    text: Path,  # noqa: F811
    tmp_path: Path,
    where: str,
    sets: list[str],
    code: int,
    says: str,
) -> None:
    """An error that repeats ends the run at the second traceback, though restarts are left."""
    out, at = tmp_path / "run", tmp_path / "at"
    more = [
        "train.steps=2000",
        f"checkpoint.every={3 * (where in SAVES)}",
        "train.val_every=0",
        "launch.restarts=5",
        *sets,
    ]
    more += ["observe.memory_step=0", "observe.trace_step=0"]
    run = Launched(tmp_path / "log", disturbed, where, at, words(out, text, *more))
    if where == "beside":  # an alarm, and the run goes on
        run.until(lambda: re.search(says, run.said, re.M), 120)
        assert time.monotonic() - float(at.read_text()) < SOON_S
        run.send(signal.SIGTERM)
    assert run.wait(240) == code, run.said
    assert re.search(says, run.said, re.M), run.said
    starts = run.said.count("Starting 2 ranks again")
    assert starts == {"forward": 1, "save": 1}.get(where, starts)
    assert run.said.count("Traceback") == (where in ("forward", "save"))
    waits = {"hang": 60.0, "memory": 60.0, "stop": local.LEAVE_S}.get(
        where, 0.0
    )  # to be found; for the planner
    assert where == "beside" or time.monotonic() - float(at.read_text()) < SOON_S + waits
