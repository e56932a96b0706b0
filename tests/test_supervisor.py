"""The launcher: whatever its ranks do, it ends, names the rank that failed first, and starts the run again.

Real processes and tiny models. Long sweeps over moments and layouts are in tests/chaos/."""

from __future__ import annotations

import errno
import json
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import stored
from launched import Launched, command, last_step, typed
from marks import slow
from pool_runs import assert_same_tensors, lines, train_rank
from ranks import run_ranks
from test_train import TINY

from fivefold.checkpoint import store
from fivefold.cli.main import main
from fivefold.errors import RankFailed, UserError
from fivefold.files import owned
from fivefold.launch import local, verdict
from fivefold.launch.launchers import in_pod, restarted_by
from fivefold.launch.local import Attempt, Outcome, launch
from fivefold.launch.ranks import Ranks
from fivefold.launch.verdict import Failure
from fivefold.observe.faults import read_restarts
from fivefold.recipe import change, load
from fivefold.train.job import Job
from fivefold.train.restart import Restarts, newest
from fivefold.train.start import run_command

# What ranks do


def nothing(ranks: Ranks) -> None:
    pass


def meet(act: Any, ranks: Ranks) -> int | None:
    """Rank 1 does something; rank 0 waits for it in a message."""
    import torch.distributed as dist

    dist.barrier()
    if ranks.rank == 1:
        return act()
    dist.barrier()
    return None


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def leave_silently() -> None:
    os._exit(3)


def fail() -> None:
    raise KeyError("of rank 1")


def mistake() -> None:
    raise UserError("layout.tp = 3 does not divide")


def full() -> None:
    raise OSError(errno.ENOSPC, "No space left on device", "run/step-1")


def forbidden() -> None:
    raise OSError(errno.EROFS, "Read-only file system", "run/metrics.jsonl")


def found_hung() -> None:
    os._exit(verdict.leave("hung", "rank 0 is missing in all_reduce"))


def stay(ranks: Ranks) -> None:
    """A thread keeps the process alive when its work is done."""
    import torch.distributed as dist

    dist.barrier()
    threading.Thread(target=time.sleep, args=(600,)).start()


def deaf(ranks: Ranks) -> None:
    """It notes signals, and does nothing about them."""
    print(f"rank {ranks.rank} is here", flush=True)
    time.sleep(600)


def save_for_long(ranks: Ranks) -> int:
    """Three times the grace time, and always on the way."""
    stopping = signal.getsignal(signal.SIGTERM).__self__  # type: ignore[union-attr]
    print(f"rank {ranks.rank} is here", flush=True)
    while not stopping.wanted():
        time.sleep(0.01)
    for _ in range(15):
        time.sleep(0.1)
        if ranks.rank == 0:
            verdict.get_on()
    return signal.SIGTERM


def outcome_of(work: Any, grace_s: float | None = None, leave_s: float = 5.0) -> Outcome:
    local.LEAVE_S, verdict.PATIENCE_S = leave_s, 0
    grace = None if grace_s is None else lambda: grace_s
    return launch(Attempt(work, 2, grace_s=grace), True, lambda failure: print("again?", flush=True))


def test_a_rank_that_has_saved_is_not_the_one_that_failed(tmp_path: Path) -> None:
    """The other one did not leave within the grace time."""
    (tmp_path / "stopped-1").write_text("15")
    found = verdict.judge(tmp_path, {0: (2.0, -9), 1: (1.0, verdict.STOPPED)}, {0}, False)
    assert (found.rank, found.text) == (0, "rank 0 did not end by itself, and was killed")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs a mount namespace")
def test_two_ranks_in_a_folder_that_is_read_only(tmp_path: Path) -> None:
    """A run that starts there, and one that resumes: one message, at once. root may write in spite of modes, so the
    folder is mounted read-only."""
    if subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode:
        pytest.skip("needs a mount namespace, which is not permitted here")
    text, run = tmp_path / "text.txt", tmp_path / "run"
    text.write_text("".join(f"{i} squared is {i * i}. " for i in range(2000)))
    sets = [one for one in TINY if not one.startswith("layout.")]
    sets += [f"data.source={text}", f"data.cache={tmp_path / 'cache'}", "optim.schedule=constant"]
    recipe = load("quickstart", [*sets, "train.steps=2"], "dp=2")
    (tmp_path / "empty").mkdir()
    run_ranks(2, train_rank, recipe, run)
    train = [sys.executable, "-m", "fivefold", "train"]
    new = [*train, "quickstart", "--layout", "dp=2", "--out", str(tmp_path / "empty")]
    new += [word for one in sets for word in ("--set", one)]
    old = [*train, str(run), "--resume", "--set", "train.steps=4"]
    for folder, words in ((tmp_path / "empty", new), (run, old)):
        mount = f'mount --bind {folder} {folder} && mount -o remount,bind,ro {folder} && exec "$@"'
        done = subprocess.run(
            ["unshare", "-m", "sh", "-c", mount, "sh", *words],
            capture_output=True, text=True, timeout=60, check=False, env=os.environ | {"OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        assert done.returncode in (verdict.USER, verdict.BUSY), done.stderr
        assert "Traceback" not in done.stderr
        assert "Read-only file system" in done.stderr
        assert len(done.stderr.splitlines()) < 15, done.stderr
    assert store.latest(run).name == "step-00000002"  # pyright: ignore[reportOptionalMemberAccess]


@pytest.mark.parametrize("jump_s", [-86400.0, 86400.0])
def test_a_clock_that_is_set_does_not_change_who_failed_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jump_s: float
) -> None:
    """Rank 0 raises 2 s after rank 1 was killed, or 2 s before. Then somebody sets the clock."""
    plain = time.time
    monkeypatch.setenv(verdict.FOLDER, str(tmp_path))
    monkeypatch.setenv("RANK", "0")
    before = time.monotonic() - 2
    verdict.leave("failed", "RuntimeError: all is lost")
    monkeypatch.setattr(time, "time", lambda: plain() + jump_s)
    after = time.monotonic() + 2
    for at, first in ((before, 1), (after, 0)):
        found = verdict.judge(tmp_path, {0: (after, verdict.FAILED), 1: (at, -signal.SIGKILL)}, (), False)
        assert found.rank == first


def test_a_rank_that_dies_of_being_asked_for_its_stacks_is_not_the_failure(tmp_path: Path) -> None:
    """faulthandler reads the stacks of threads that may end meanwhile."""
    ended = {0: (1.0, verdict.HUNG), 1: (0.5, -signal.SIGSEGV)}
    assert verdict.judge(tmp_path, ended, {0}, False).text == "rank 1 was killed (SIGSEGV)"
    (tmp_path / "hung-0").write_text("rank 1 is missing in all_reduce")
    assert verdict.judge(tmp_path, ended, {0}, False).text == "rank 1 is missing in all_reduce"


def test_a_pod_without_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setattr(sys, "stdin", None)
    assert in_pod()
    monkeypatch.setattr(sys, "ps1", "In : ", raising=False)
    assert not in_pod(), "somebody types, perhaps in a notebook"


@pytest.mark.parametrize(
    ("act", "kind", "text"),
    [
        (die, "killed", "rank 1 was killed (SIGKILL)"),
        (leave_silently, "ended", "rank 1 ended (exit code 3) without a message"),
        (fail, "failed", "rank 1 failed: KeyError: 'of rank 1'"),
        (mistake, "error", "layout.tp = 3 does not divide"),
        *slow((forbidden, "error", "run/metrics.jsonl: Read-only file system")),
        (full, "busy", "run/step-1: No space left on device"),
        (found_hung, "hung", "rank 0 is missing in all_reduce"),
    ],
)
def test_the_rank_that_failed_is_named_once(tmp_path: Path, act: Any, kind: str, text: str) -> None:
    """Not the survivor, whose connection broke, and without its traceback."""
    launched = Launched(tmp_path / "log", outcome_of, partial(meet, act))
    failure = launched.value().failure
    assert (failure.rank, failure.kind, failure.text) == (1, kind, text)
    assert ("KeyError" in failure.more) == (act is fail)
    assert launched.said == ("again?\n" if kind != "error" else ""), "a user's error is not tried again"


def test_ranks_that_do_not_end_are_ended(tmp_path: Path) -> None:
    """One whose thread stays after its work; one that takes no notice of signals, and is suspended besides."""
    assert Launched(tmp_path / "stay", outcome_of, stay, None, 0.3).value(20) == Outcome()
    launched = Launched(tmp_path / "deaf", outcome_of, deaf, 0.5)
    launched.until(lambda: launched.said.count("is here") == 2)
    launched.send(signal.SIGSTOP, launched.ranks()[0])
    launched.send(signal.SIGTERM)
    outcome = launched.value(20)
    assert outcome.signal == signal.SIGTERM
    assert "did not end by itself" in outcome.failure.text
    saving = Launched(tmp_path / "saving", outcome_of, save_for_long, 0.5)
    saving.until(lambda: saving.said.count("is here") == 2)
    saving.send(signal.SIGTERM)
    assert saving.value(20) == Outcome(stopped=signal.SIGTERM), "they get on, and are waited for"
    plain = Launched(tmp_path / "plain", outcome_of, deaf)
    plain.until(lambda: plain.said.count("is here") == 2)
    plain.send(signal.SIGTERM)
    assert plain.value(20) == Outcome(stopped=signal.SIGTERM), "they have nothing to save"


def test_a_second_ctrl_c_and_a_killed_launcher_end_deaf_ranks(tmp_path: Path) -> None:
    launched = Launched(tmp_path / "twice", outcome_of, deaf, 600.0)
    launched.until(lambda: launched.said.count("is here") == 2)
    for _ in range(2):
        launched.send(signal.SIGINT)
        time.sleep(0.3)
    assert launched.value(20).signal == signal.SIGINT
    launched = Launched(tmp_path / "killed", outcome_of, deaf, 0.5)
    launched.until(lambda: launched.said.count("is here") == 2)
    ranks = launched.ranks()
    launched.send(signal.SIGKILL)
    launched.wait()
    end = time.monotonic() + 20
    while any(Path(f"/proc/{pid}/exe").exists() for pid in ranks):
        assert time.monotonic() < end, "they are still there"
        time.sleep(0.05)


def test_folders_of_killed_launchers_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "fivefold-other").mkdir()  # not of a launcher
    code = (
        "import os, sys, tempfile; tempfile.tempdir = sys.argv[1]\n"
        "from fivefold.launch.local import scratch_folder\n"
        "with scratch_folder(): os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    assert len([*tmp_path.iterdir()]) == 2, "it was left behind"
    with local.scratch_folder() as own:
        assert {path.name for path in tmp_path.iterdir()} == {"fivefold-other", own.name}
        assert local.remove_stale() == [], "its owner lives"
    assert [path.name for path in tmp_path.iterdir()] == ["fivefold-other"]


# A run folder has one owner


def test_a_run_folder_has_one_owner(tmp_path: Path) -> None:
    with owned(tmp_path):
        with (
            pytest.raises(UserError, match=rf"in use: process {os.getpid()} on .* since 20"),
            owned(tmp_path),
        ):
            pass
        (tmp_path / ".lock").write_text('{"pid": [1], "host": "\\u001b[31m"}')
        with pytest.raises(UserError, match=r"in use: process 0 on \?"), owned(tmp_path):
            pass
    with owned(tmp_path):
        pass
    link = tmp_path / "run"
    link.mkdir()
    (link / ".lock").symlink_to(tmp_path / "target")
    with pytest.raises(OSError, match=r"\.lock"), owned(link):
        pass
    assert not (tmp_path / "target").exists()


# Whole runs


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog. " * 200)
    return path


def recipe_of(text: Path, *sets: str) -> list[str]:
    return [
        *TINY,
        f"data.source={text}",
        f"data.cache={text.parent / 'cache'}",
        "train.sample_tokens=2",
        *sets,
    ]


def words(out: Path, text: Path, *sets: str) -> list[str]:
    return [
        "train",
        "quickstart",
        *(f"--set={one}" for one in recipe_of(text, *sets)),
        "--nproc=2",
        f"--out={out}",
    ]


LONG = ("train.steps=40", "checkpoint.every=5", "train.val_every=0")


@pytest.fixture(scope="module")
def whole(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two ranks that nothing disturbed."""
    out = tmp_path_factory.mktemp("whole") / "run"
    run_ranks(
        2, train_rank, change(load("quickstart", recipe_of(text, *LONG)), ["layout.dp_replicate=2"]), out
    )
    return out


def assert_same_run(run: Path, whole: Path) -> None:
    ours, theirs = stored.load(store.latest(run)), stored.load(store.latest(whole))
    assert_same_tensors(ours.model, theirs.model)
    assert_same_tensors(ours.optimizer, theirs.optimizer)
    assert lines(run, "loss") == lines(whole, "loss"), "each step is recorded once"


def test_killed_ranks_are_started_again(text: Path, tmp_path: Path, whole: Path) -> None:
    """Before the first checkpoint, then after one. Nobody does anything, and the weights are the same bits."""
    out = tmp_path / "run"
    run = command(tmp_path / "log", *words(out, text, *LONG))
    run.until(lambda: last_step(out) in range(1, 5) or last_step(out))
    first = run.ranks()
    run.send(signal.SIGKILL, first[1])
    run.until(lambda: {*run.ranks()}.isdisjoint(first) and len(run.ranks()) == 2 and last_step(out) > 10)
    run.send(signal.SIGKILL, run.ranks()[0])
    assert run.wait() == verdict.DONE, run.said
    assert_same_run(out, whole)
    assert "was killed (SIGKILL), after step" in run.said
    assert "Starting 2 ranks again from" in run.said
    assert "Traceback" not in run.said
    assert [line["kind"] for line in map(json.loads, (out / "restarts.jsonl").open())] == ["killed"] * 2
    assert "2 restarts." in (out / "report.html").read_text()
    assert any(line.split() == ["restarts", "2"] for line in run.said.splitlines())


def test_one_signal_to_one_rank_stops_the_run_and_it_resumes(text: Path, tmp_path: Path, whole: Path) -> None:
    out = tmp_path / "run"
    run = command(tmp_path / "log", *words(out, text, *LONG))
    run.until(lambda: last_step(out) > 2)
    run.send(signal.SIGTERM, run.ranks()[1])
    assert run.wait(20) == verdict.STOPPED, run.said
    assert "stopped before the end" in run.said
    again = command(tmp_path / "again", "train", str(out), "--resume")
    assert again.wait() == verdict.DONE, again.said
    assert_same_run(out, whole)


def test_a_run_in_use_is_refused_and_a_suspended_rank_does_not_keep_it_from_stopping(
    text: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    run = command(tmp_path / "log", *words(out, text, "train.steps=100000"))
    run.until(lambda: last_step(out) > 2)
    second = command(tmp_path / "second", "train", str(out), "--resume")
    assert second.wait() == verdict.BUSY
    assert f"{out} is in use: process {run.pid} on " in second.said
    run.send(signal.SIGSTOP, run.ranks()[1])
    time.sleep(0.3)
    run.send(signal.SIGTERM)
    assert run.wait(20) == verdict.STOPPED, run.said
    assert last_step(out) == stored.load(store.latest(out)).meta["step"]


def test_a_stop_that_cannot_save_says_so(text: Path, tmp_path: Path) -> None:
    """128 + signal, and what is lost."""
    out = tmp_path / "run"
    run = command(tmp_path / "log", *words(out, text, "train.steps=100000"))
    run.until(lambda: last_step(out) > 2)
    (out / "checkpoints").write_text("not a folder")
    run.send(signal.SIGTERM)
    assert run.wait(30) == verdict.unsaved(signal.SIGTERM), run.said
    assert "stopped by SIGTERM, but not saved: " in run.said
    assert "No step is saved; " in run.said
    assert "Traceback" not in run.said


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["dp=2", "pp=2", "tp=2"])
@pytest.mark.parametrize("which", ["launcher", "rank"])
def test_a_signal_at_any_moment(text: Path, tmp_path: Path, layout: str, which: str) -> None:
    """From the first moment to the last: the run is complete, or stopped with everything saved; resumed, it ends."""
    for moment in range(12):
        out = tmp_path / str(moment)
        run = command(out.with_suffix(".log"), *words(out, text, "train.steps=12"), f"--layout={layout}")
        began = time.monotonic()
        while time.monotonic() - began < 0.25 * moment and run.process.is_alive():
            time.sleep(0.01)
        ranks = run.ranks()
        if run.process.is_alive() and (which == "launcher" or len(ranks) == 2):
            run.send(signal.SIGTERM, ranks[1] if which == "rank" else None)
        code = run.wait(30)
        begun = out.exists()  # before, the process dies by the signal as every other one
        assert code in (verdict.DONE, verdict.STOPPED) or (code == -signal.SIGTERM and not begun), run.said
        assert "Traceback" not in run.said
        if code == verdict.DONE:
            assert last_step(out) == 12


@pytest.mark.parametrize("moment", [0, *slow(1, 2, 3, 4)])
def test_ctrl_c_in_the_last_moments(text: Path, tmp_path: Path, moment: int) -> None:
    """It comes to the launcher and to all ranks at once. From the last step, and from the last validation on."""
    out, steps = tmp_path / "run", 12
    run = typed(tmp_path / "log", *words(out, text, f"train.steps={steps}"))
    if moment % 2:
        run.until(lambda: last_step(out) == steps)
    else:
        run.until(lambda: f"validation  step {steps}" in run.said)
    time.sleep(random.uniform(0, 0.06) + 0.06 * moment)
    ctrl_c(run)
    assert run.wait(20) in (verdict.DONE, verdict.STOPPED), run.said
    assert "Traceback" not in run.said
    assert stored.load(store.latest(out)).meta["step"] == last_step(out) == steps
    with pytest.raises(ProcessLookupError):
        os.killpg(run.pid, 0)


def ctrl_c(run: Launched) -> None:
    with suppress(ProcessLookupError):  # it has ended
        os.killpg(run.pid, signal.SIGINT)


@pytest.mark.slow
@pytest.mark.parametrize("again", [True, False])
def test_ctrl_c_twice_while_a_rank_is_suspended(text: Path, tmp_path: Path, again: bool) -> None:
    """The first one continues it, and all save. If it is suspended again at once, the second one ends all."""
    out = tmp_path / "run"
    run = typed(tmp_path / "log", *words(out, text, "train.steps=100000"))
    run.until(lambda: last_step(out) > 2)
    rank, began = run.ranks()[1], time.monotonic()
    run.send(signal.SIGSTOP, rank)
    time.sleep(0.5)
    ctrl_c(run)
    while run.process.is_alive() and time.monotonic() - began < verdict.PATIENCE_S + 2:
        if again:
            with suppress(ProcessLookupError):
                run.send(signal.SIGSTOP, rank)
        time.sleep(0.001)
    ctrl_c(run)
    assert run.wait(20) == (verdict.unsaved(signal.SIGINT) if again else verdict.STOPPED), run.said
    assert "Traceback" not in run.said
    with pytest.raises(ProcessLookupError):
        os.killpg(run.pid, 0)


class Dying:
    """Batches of a rank that dies whenever it computes this one."""

    def __init__(self, at: int, how: Any):
        self.at, self.how = at, how

    def batch(self, i: int, rows: range) -> Any:
        if i == self.at and os.environ.get("RANK") == "1":
            self.how()
        return self.rows(i, rows)

    def rows(self, i: int, rows: range) -> Any:
        x = np.full((len(rows), 16), i % 7, dtype=np.int64)
        return x, x


def train_dying(sets: list[str], out: Path, at: int, how: Any) -> str:
    from fivefold.train import restart

    restart.LONGEST_S = 0.0
    more = ["model.vocab_size=300", "train.val_every=0", "checkpoint.every=2"]
    try:
        run_command(load("quickstart", [*sets, *more]), nproc=2, out=out, batches=Dying(at, how))
    except (UserError, RankFailed) as error:
        return f"{type(error).__name__}: {error}"
    return "complete"


def test_a_death_that_repeats_uses_the_budget_up(text: Path, tmp_path: Path) -> None:
    """The same traceback at the same step is the last, whatever is left. One message and one traceback."""
    sets = recipe_of(text, "launch.restarts=30", "train.steps=40")
    run = Launched(tmp_path / "log", train_dying, sets, tmp_path / "run", 3, fail)
    said = run.value()
    assert said.startswith("RankFailed: rank 1 failed: KeyError: 'of rank 1', after step ")
    assert "died 2 times without a newer checkpoint" in said
    assert ("Resume from the last checkpoint" in said) == bool(newest(tmp_path / "run")), "if one was saved"
    assert run.said.count("Traceback") == 1
    assert run.said.count("Starting 2 ranks again") <= 2, "the first death may come before step 2 is saved"


@pytest.mark.slow
def test_one_rank_may_have_a_launcher(text: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    run = command(tmp_path / "log", *words(out, text, *LONG), "--nproc=1:1", "--layout=dp=1")
    run.until(lambda: last_step(out) > 7)
    (rank,) = run.ranks()
    run.send(signal.SIGKILL, rank)
    assert run.wait() == verdict.DONE, run.said
    assert last_step(out) == 40
    assert [line["kind"] for line in read_restarts(out)] == ["killed"]


class DyingOnce(Dying):
    """`at` names the batch, `how` a file that says that it has happened."""

    def batch(self, i: int, rows: range) -> Any:
        if i == self.at and os.environ.get("RANK") == "1" and not self.how.exists():
            self.how.touch()
            die()
        return self.rows(i, rows)


@pytest.mark.slow
def test_spawned_ranks_are_started_again(text: Path, tmp_path: Path) -> None:
    """As from Python, and with GPUs."""
    sets = [
        *recipe_of(text, "train.steps=8", "train.val_every=0", "checkpoint.every=2"),
        "model.vocab_size=300",
    ]
    batches = DyingOnce(5, tmp_path / "died")
    out = run_command(load("quickstart", sets), nproc=2, out=tmp_path / "run", batches=batches, fork=False)
    assert [line["kind"] for line in read_restarts(out)] == ["killed"]
    whole = DyingOnce(-1, tmp_path / "died")
    other = run_command(load("quickstart", sets), nproc=2, out=tmp_path / "other", batches=whole, fork=False)
    assert_same_run(out, other)


@pytest.mark.slow
def test_the_next_start_waits_for_ranks_whose_launcher_was_killed(text: Path, tmp_path: Path) -> None:
    """They save and leave."""
    out = tmp_path / "run"
    sets = ("train.steps=100000", "checkpoint.every=5", "optim.warmup_steps=0")
    run = command(tmp_path / "log", *words(out, text, *sets))
    run.until(lambda: last_step(out) > 7)
    ranks = run.ranks()
    run.send(signal.SIGKILL)
    more = f"--set=train.steps={last_step(out) + 60}"
    again = command(tmp_path / "again", "train", str(out), "--resume", more)
    assert again.wait() == verdict.DONE, again.said
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)
    assert len(lines(out, "loss")) == max(lines(out, "step"))


def test_too_few_files_are_one_message(text: Path, tmp_path: Path) -> None:
    """`ulimit -n 16` with two ranks."""
    run = Launched(tmp_path / "log", with_few_files, words(tmp_path / "run", text))
    assert run.wait() == verdict.USER
    assert run.said.startswith("error: the limit of open files is 16 (ulimit -n), and a run needs 128.")


def with_few_files(command: list[str]) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (16, 16))
    main(command)


def test_exit_codes_of_a_signal_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While data is prepared nothing can be lost. A signal after the last step changes nothing."""
    from fivefold.train import start

    def preparing(*_: Any, **__: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(start, "run_command", preparing)
    with pytest.raises(SystemExit) as stopped:
        main(["train", "quickstart", f"--out={tmp_path / 'run'}"])
    assert stopped.value.code == verdict.STOPPED

    def complete(*_: Any, **__: Any) -> None:
        start.run_complete()
        preparing()

    monkeypatch.setattr(start, "run_command", complete)
    with pytest.raises(SystemExit) as done:
        main(["train", "quickstart", f"--out={tmp_path / 'run'}"])
    assert done.value.code == verdict.DONE


def test_restarts_by_other_launchers_go_on(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without being asked for: of Slurm by its count, of Kubernetes in a pod where nobody types, also from Python."""
    recipe = change(load("quickstart", recipe_of(text, "train.steps=2", "train.val_every=0")))
    out = run_command(recipe, out=tmp_path / "run")
    with pytest.raises(UserError, match="already holds a run"):
        run_command(recipe, out=out)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "0")
    assert restarted_by() is None
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    run_command(change(recipe, ["train.steps=4", "optim.schedule=constant"]), out=out)
    assert lines(out, "step")[-1] == 4
    (line,) = read_restarts(out)
    assert (line["why"], line["from_step"]) == ("Slurm started the ranks again", 2)
    monkeypatch.delenv("SLURM_RESTART_COUNT")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    run_command(change(recipe, ["train.steps=6", "optim.schedule=constant"]), out=out)
    assert lines(out, "step")[-1] == 6
    assert run_command(recipe, name=str(tmp_path / "new")).name == "new-1", "a new folder is new"


@pytest.mark.parametrize("counts", ["01", *slow("10")])
def test_ranks_of_torchrun_resume_together_whatever_each_was_told(
    text: Path, tmp_path: Path, counts: str
) -> None:
    """torchrun counts the restarts of each host by itself: a rank died on one of two hosts, with a rank each."""
    out, sets = tmp_path / "run", ("train.val_every=0", "optim.schedule=constant")
    recipe = change(load("quickstart", recipe_of(text, "train.steps=2", *sets)))
    run_command(recipe, out=out, nproc=1)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    ranks = [
        command(
            tmp_path / f"log-{rank}",
            *words(out, text, "train.steps=4", "launch.timeout=20", *sets),
            RANK=str(rank),
            WORLD_SIZE="2",
            LOCAL_RANK=str(rank),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=port,
            TORCHELASTIC_RESTART_COUNT=count,
            TORCHELASTIC_MAX_RESTARTS="3",
            TORCHELASTIC_RUN_ID="none",
        )
        for rank, count in enumerate(counts)
    ]
    assert [rank.wait() for rank in ranks] == [verdict.DONE] * 2, "\n".join(rank.said for rank in ranks)
    assert "resuming after step 2" in ranks[0].said
    assert lines(out, "step")[-1] == 4


@pytest.mark.slow
def test_a_launch_of_torchrun_goes_back_once(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Though the first rank's count is 0 again after another host has joined."""
    sets = ("train.steps=4", "checkpoint.every=2", "train.val_every=0", "optim.schedule=constant")
    recipe = change(load("quickstart", recipe_of(text, *sets)))
    out = run_command(recipe, out=tmp_path / "run", nproc=1)
    chosen = out / "checkpoints" / "step-00000002"
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    for one, goes_back in (("one", True), ("one", False), ("two", True), ("none", True), ("none", True)):
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", one)
        capsys.readouterr()
        run_command(recipe, out=out, resume_from=chosen, nproc=1)
        said = capsys.readouterr()
        assert ("so it is set aside" in said.err) == goes_back, one
        assert ("resuming after step 2" in said.out) == goes_back, one


def test_restarts_wait_longer_each_time_and_end_at_the_same_traceback(tmp_path: Path) -> None:
    job = Job(change(load("quickstart"), ["launch.restarts=100"]), tmp_path)

    def again(*failures: Failure) -> list[float | None]:
        tried = Restarts(job, lambda _: Attempt(lambda ranks: None, 1))
        followed = [tried.again(failure) for failure in failures]
        return [one[0] if one else None for one in followed]

    (tmp_path / ".lock").touch()  # the folder is owned
    killed = Failure(0, "killed", "rank 0 was killed")
    assert again(*[killed] * 9) == [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]
    first, second = (Failure(0, "error", "an error", f"ValueError: {word}") for word in ("this", "that"))
    assert again(first, second) == [0.0, 1.0], "another error may pass"
    assert again(first, first) == [0.0, None], "the same one would come every time"


def test_a_signal_that_lost_steps_has_its_own_code() -> None:
    assert verdict.unsaved(signal.SIGTERM) == 143
