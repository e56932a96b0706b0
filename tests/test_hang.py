"""Ranks that hang are named, and slow ones; nobody is named where all make progress."""

import json
import os
import re
import resource
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import stored
import torch
from hanging import codes, serve, start, train
from marks import slow
from namespaces import Hosts, Unavailable
from pool_runs import lines, train_rank
from ranks import run_ranks
from test_train import TINY, text, tiny  # noqa: F401

from fivefold.checkpoint import write
from fivefold.comm.axis import Axis
from fivefold.comm.hang import Judge, Post, Seen, Wait
from fivefold.comm.progress import progress
from fivefold.comm.watchdog import Watchdog
from fivefold.data import prepare
from fivefold.launch import verdict
from fivefold.launch.ranks import Ranks
from fivefold.launch.verdict import HUNG
from fivefold.observe.faults import SECONDS, SlowRanks, slow_section
from fivefold.sharding.layout import Layout

CPU = torch.device("cpu")
SLEPT_S = 0.1  # by the slow rank in a step: much more than a busy machine takes away


def waits(
    group: str, number: int, ranks: tuple[int, ...], operation: str = "all_reduce", **more: Any
) -> Wait:
    return Wait(operation, group, "", ranks, group, number, at="fivefold/step/step.py:7", **more)


def post(rank: int, wait: Wait | None, still_s: float = 31, host: str = "here 1", **more: Any) -> Post:
    found = {"begun": {wait.group: wait.number} if wait else {}, "at": ("user.py:3 in work",), **more}
    return Post(
        rank,
        host,
        os.getpid(),
        1,
        12,
        found.pop("phase", ""),
        found.pop("patience", 1),
        still_s,
        wait,
        **found,
    )


def judged(
    *posts: Post | None, silent: dict[int, float] | None = None, ahead: bool = False
) -> tuple[tuple[int, ...], str] | None:
    seen = {rank: Seen(one, (silent or {}).get(rank, 0.0)) for rank, one in enumerate(posts)}
    return Judge(0, "here 1", seen, 30, 10, 30, ahead).verdict()


PAIR, TP = (0, 1), (0, 1, 2, 3)


def test_the_end_of_the_chain_is_missing() -> None:
    """Rank 0 waits for rank 2, which waits for rank 3."""
    posts = [
        post(0, waits("dp0", 5, (0, 2))), post(1, waits("dp1", 5, (1, 3))),
        post(2, waits("tp1", 9, (2, 3)), begun={"dp0": 4, "tp1": 9}), post(3, None, begun={"dp1": 4, "tp1": 8}),
    ]  # fmt: skip
    missing, said = judged(*posts) or ((), "")
    assert missing == (3,)
    assert said.startswith(
        "rank 3 is missing: it has done nothing for 31 s, after step 12, at user.py:3 in work. "
    )
    assert "Rank 0 waits in all_reduce over axis dp0 (ranks 0, 2), at fivefold/step/step.py:7" in said
    assert judged(*posts[:3], replace(posts[3], still_s=29)) is None, "it still does something"
    assert judged(*posts[:3], replace(posts[3], phase="saving", patience=10)) is None
    assert judged(*posts[:3], replace(posts[3], still_s=301, phase="saving", patience=10))
    assert judged(*posts[:3], None, silent={3: 11})


def test_ranks_that_hang_while_nobody_waits() -> None:
    """On GPUs the host that has begun the fewest messages is missing, and the others wait for their devices."""
    stuck = [post(rank, None, begun={"0": 9 - (rank == 2)}) for rank in range(3)]
    missing, said = judged(*stuck) or ((), "")
    assert missing == (0, 1, 2)
    assert said.count("it has done nothing for 31 s, after step 12, at user.py:3") == 3
    assert judged(stuck[0], replace(stuck[1], still_s=1))[0] == (0,)  # type: ignore[index]
    missing, said = judged(*stuck, ahead=True) or ((), "")
    assert missing == (2,)
    assert said.endswith("in work. Rank 0 waits in results of the device")
    several = [post(rank, None, begun={"0": 9 - rank}) for rank in range(3)]
    missing, _ = judged(*several, ahead=True) or ((), "")
    assert missing == (2,), "of the two behind this rank, the one that is furthest behind"
    assert judged(*stuck[:2], replace(stuck[2], phase="saving", patience=10), ahead=True) is None
    missing, said = judged(*stuck[:2], ahead=True) or ((), "")
    assert missing == (0, 1)
    assert "the device" not in said


def test_a_receive_waits_for_its_sender() -> None:
    receive = waits("pp", 0, (0, 1, 2), "receive", peers=(2,))
    assert judged(post(0, receive), post(1, None, 0), post(2, None, 99))[0] == (2,)  # type: ignore[index]
    assert judged(post(0, receive), post(1, None, 99), post(2, None, 0)) is None
    twice = replace(receive, peers=(2, 2))  # as keys and values of a ring come
    _, said = judged(post(0, twice), post(1, None, 0), post(2, None, 99)) or ((), "")
    assert said.count("rank 2 is missing") == 1


def test_nobody_is_missing() -> None:
    """All wait: for each other, in different messages, or for a network that brings nothing."""
    a, b = waits("a", 1, PAIR), waits("b", 1, PAIR)
    both = post(0, a, begun={"a": 1, "b": 0}), post(1, b, begun={"a": 0, "b": 1})
    assert judged(*both) == ((), judged(*both)[1])  # type: ignore[index]
    assert "ranks wait for each other: rank 0 waits in all_reduce over axis a" in judged(*both)[1]  # type: ignore[index]
    assert judged(both[0], replace(both[1], still_s=1)) is None
    outer = [replace(one, phase="an outer step", patience=10) for one in both]
    assert judged(*outer) is None, "a large message over a slow network"
    assert judged(*(replace(one, still_s=301) for one in outer))
    other = post(1, waits("a", 1, PAIR, "broadcast"))
    assert "different messages" in judged(post(0, a), other)[1]  # type: ignore[index]
    far = post(1, a, host="there 2")
    assert judged(post(0, a), far)[0] == (1,)  # type: ignore[index]
    assert "messages of rank 1 on host there do not arrive" in judged(post(0, a), far)[1]  # type: ignore[index]


def test_a_host_that_is_silent_and_a_process_that_is() -> None:
    wait = waits("a", 3, PAIR)
    far = post(1, wait, host="there 2")
    assert (
        "rank 1 is missing: nothing is heard of host there for 11 s. "
        in judged(post(0, wait), far, silent={1: 11})[1]
    )  # type: ignore[index]
    beside = post(2, None, 1, host="there 2")
    assert judged(post(0, wait), replace(far, wait=None, still_s=1), beside, silent={1: 11}) is None, (
        "something holds its interpreter: another rank of its host is heard"
    )
    starting = replace(far, phase="starting", patience=10, wait=None, still_s=1)
    assert judged(post(0, wait), starting, silent={1: 99}) is None
    assert judged(post(0, wait), starting, silent={1: 101})
    busy = post(
        1, None, 15, begun={"a": 2}, phase="starting", patience=10
    )  # of this machine: something holds its interpreter
    assert judged(post(0, wait), busy, silent={1: 20}) is None
    assert "it has ended" in judged(post(0, wait), replace(busy, pid=2**22 + 1), silent={1: 20})[1]  # type: ignore[index]


class Board:
    """Others' posts, as a test says."""

    every_s, answers = 1.0, 0

    def __init__(self, posts: dict[int, Post]):
        self.posts = posts

    def post(self, said: str) -> None:
        self.said = json.loads(said)

    def read(self, ranks: Any) -> dict[int, dict[str, Any]]:
        self.answers += 1
        self.posts = {rank: replace(one, beat=one.beat + 1) for rank, one in self.posts.items()}
        return {rank: asdict(one) for rank, one in self.posts.items()}

    def claim(self) -> bool:
        return True

    def close(self) -> None: ...


class Left(Exception):
    pass


@pytest.fixture
def watchdog(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watchdog]:
    """Of rank 0, whose thread waits; rank 1 has done nothing for a day. Its time passes when a test says so."""
    monkeypatch.setattr(Watchdog, "_leave", lambda self, verdict: (_ for _ in ()).throw(Left(verdict.text)))
    progress.start()
    other = post(1, None, 86400, begun={"0": 0})
    found = Watchdog(Ranks(0, 2, 0, 2, CPU), 30, tmp_path, Board({1: other}))  # type: ignore[arg-type]
    yield found
    found.close()
    progress.start()


class Group:
    group_name = "0"


def pass_time(watchdog: Watchdog, seconds: int) -> int | None:
    """When it leaves."""
    for second in range(seconds):
        try:
            watchdog._look(1.0)
        except Left:
            return second
    return None


def enter() -> None:
    axis = Axis("all", [0, 1], 0, CPU, Group())  # type: ignore[arg-type]
    assert axis.ops is not None
    axis.ops.begun += 1
    progress.enter((axis, "all_reduce", axis.ops, axis.ops.begun, (), None))


def test_how_long_a_message_may_take(watchdog: Watchdog) -> None:
    assert pass_time(watchdog, 1000) == 60, "it waits for nothing, and hangs"
    with progress.phase("saving"):
        assert pass_time(watchdog, 1000) is None, "it works apart"
    enter()
    assert pass_time(watchdog, 1000) == 30
    progress.mark()
    for seconds in (300.0, *[20.0] * 10, 300.0):  # the first one compiles
        progress.end_step(1, seconds, 0.0)
    assert pass_time(watchdog, 1000) == 60, "three usual steps"


def test_it_watches_beside_more_open_files_than_select_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """And after looks that fail, which it says once."""
    left, fails, look = threading.Event(), [1, 2], Watchdog._look
    monkeypatch.setattr(Watchdog, "_leave", lambda self, verdict: left.set())

    def looks(self: Watchdog, seconds: float) -> None:
        if fails:
            raise OSError(fails.pop(), "no more files")
        look(self, seconds)

    monkeypatch.setattr(Watchdog, "_look", looks)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1024)]
    progress.start()
    other = post(1, None, 86400, begun={"0": 0})
    found = Watchdog(Ranks(0, 2, 0, 2, CPU), 0.2, tmp_path, Board({1: other}))  # type: ignore[arg-type]
    try:
        assert found._bell.fileno() >= 1024
        found.start()
        assert left.wait(20)
    finally:
        found.close()
        for file in files:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    said = capfd.readouterr().err
    assert said.count("WARNING: rank 0: the watchdog cannot watch (") == 1
    assert "no more files" in said


def test_a_rank_that_gets_on_while_it_judges_itself_names_nobody() -> None:
    assert judged(post(0, None, 31, usual_s=20.0), post(1, None, 0)) is None


def test_no_alarm_while_the_missing_rank_works_apart_or_moves(watchdog: Watchdog) -> None:
    enter()
    board = watchdog.board
    assert isinstance(board, Board)
    board.posts[1] = replace(board.posts[1], still_s=100, phase="saving", patience=10)
    assert pass_time(watchdog, 400) is None
    board.posts[1] = replace(board.posts[1], still_s=1, patience=1)
    assert pass_time(watchdog, 400) is None
    board.posts[1] = replace(board.posts[1], still_s=100)
    assert pass_time(watchdog, 400) == 0


def test_a_signal_shortens_the_wait_also_of_the_rank_that_hangs(watchdog: Watchdog) -> None:
    watchdog._note(bytes([signal.SIGTERM]))
    assert pass_time(watchdog, 100) == 10, "it hangs itself"
    enter()
    assert pass_time(watchdog, 100) == 10
    with progress.phase("saving"):
        progress.waits.clear()
        assert pass_time(watchdog, 1000) is None, "a save takes as long as it takes"


def test_a_signal_judges_nobody_whose_post_has_not_been_read(watchdog: Watchdog) -> None:
    """A store answers at a later call: after the signal the time is over before anybody's post is there."""
    enter()
    board, late = watchdog.board, [{}]
    assert isinstance(board, Board)
    board.posts[1] = replace(board.posts[1], still_s=1, phase="saving", patience=10)
    plain = board.read
    board.read = lambda ranks: late.append(plain(ranks)) or late[-2]  # type: ignore[method-assign]
    assert pass_time(watchdog, 12) is None
    watchdog._note(bytes([signal.SIGTERM]))
    assert pass_time(watchdog, 40) is None


def test_a_rank_that_gets_on_after_a_signal_says_so(
    watchdog: Watchdog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(verdict.FOLDER, str(tmp_path))
    monkeypatch.setenv("RANK", "0")
    said = tmp_path / f"{verdict.MOVED}-0"
    with progress.phase("saving"):
        pass_time(watchdog, 2)
        assert not said.exists(), "nobody asked it to stop"
        watchdog._note(bytes([signal.SIGTERM]))
        progress.get_on()
        pass_time(watchdog, 1)
        said.unlink()
        pass_time(watchdog, 5)
        assert not said.exists(), "it does nothing"
        progress.get_on()
        pass_time(watchdog, 1)
    assert said.exists()


def test_only_rank_0_is_asked_before_something_hangs(watchdog: Watchdog) -> None:
    """Each rank that reads all posts when the run starts would be many reads of one store."""
    board, asked = watchdog.board, list[list[int]]()
    assert isinstance(board, Board)
    watchdog.ranks = Ranks(1, 3, 1, 3, CPU)
    board.posts, plain = {0: post(0, None, 0), 2: post(2, None, 0)}, board.read
    board.read = lambda ranks: (
        asked.append([*ranks]) or {r: x for r, x in plain(ranks).items() if r in asked[-1]}
    )  # type: ignore[method-assign]
    pass_time(watchdog, 3)
    assert asked == [[0]]
    enter()
    pass_time(watchdog, 20)
    assert asked[-1] == [0, 2]


def test_a_slow_save_or_load_gets_on(tmp_path: Path) -> None:
    with progress.phase("saving"):
        began = progress.moved
        folder = write.save(tmp_path / "checkpoint", {"weight": torch.zeros(4)}, None, {})
        saved = progress.moved
        stored.load(folder)
    assert began < saved < progress.moved - 1, "the end of the phase counts, too"


def test_a_rank_that_is_stopped_is_named(text: Path, tmp_path: Path) -> None:  # noqa: F811
    """Rank 0 waits for rank 2 on the data axis, rank 2 for rank 3 on the tensor axis, and rank 3 is stopped."""
    recipe = tiny(text, "layout.dp_replicate=2", "layout.tp=2", "observe.hang_s=2", "train.steps=50")
    ranks = start(4, tmp_path, train, recipe, tmp_path / "run", 3, 4, "stopped")
    assert codes(ranks) == [HUNG] * 3 + [None]
    (said,) = [file.read_text() for file in tmp_path.glob("hung-*")]
    assert said.startswith("rank 3 is missing: it is stopped (SIGSTOP). It was last seen after step ")
    assert re.search(r"waits? in \w+ over axis \w+ \(ranks [0-3, ]+\).*, at fivefold/\w+/\w+\.py:\d+", said)
    stacks = (tmp_path / "run/traces/hang-step-4.txt").read_text()
    assert stacks.startswith("rank 3 is missing")
    assert stacks.count("Thread 0x") >= 3 * 2, "of the ranks that can"
    assert "rank 3, process" in stacks
    assert "last posted, innermost first:\n  " in stacks


@pytest.mark.slow
def test_a_rank_that_loops_is_named_to_torchrun(text: Path, tmp_path: Path) -> None:  # noqa: F811
    """Its ranks meet in a store, and nobody reads their verdicts."""
    recipe = tiny(text, "layout.dp_replicate=2", "observe.hang_s=2", "train.steps=50")
    ranks = start(2, tmp_path, train, recipe, tmp_path / "run", 1, 4, "busy", store=True)
    assert codes(ranks) == [HUNG, None]
    said = (tmp_path / "error-0.txt").read_text()
    assert "rank 1 is missing: it has done nothing for 2 s, after step 4, at " in said
    assert re.search(r"hanging.py:\d+ in hang", said), "the line where it is"
    assert "hanging.py" in (tmp_path / "run/traces/hang-step-4.txt").read_text()


@pytest.mark.slow
def test_ranks_that_wait_for_a_stuck_one_can_be_stopped(text: Path, tmp_path: Path) -> None:  # noqa: F811
    """So can the stuck one, if it does not hold the interpreter."""
    recipe = tiny(text, "layout.dp_replicate=2", "observe.hang_s=6", "train.steps=50")
    ranks = start(2, tmp_path, train, recipe, tmp_path / "run", 1, 4, "busy")
    while not (tmp_path / "run/metrics.jsonl").exists() or len(lines(tmp_path / "run", "loss")) < 4:
        assert all(process.is_alive() for process in ranks), (tmp_path / "error-0.txt").read_text()
        time.sleep(0.05)
    for process in ranks:
        os.kill(process.pid, signal.SIGTERM)
    for process in ranks:
        process.join(30)
    assert [process.exitcode for process in ranks] == [128 + signal.SIGTERM] * 2
    (said,) = [file.read_text() for file in tmp_path.glob("hung-*")]
    assert said.startswith("rank 1 is missing: it has done nothing for ")


def served(text: Path, *sets: str) -> Any:  # noqa: F811
    more = ("sync.method=server", "sync.servers=2", "layout.dp_replicate=2", "observe.hang_s=2", *sets)
    recipe = tiny(text, *more, "train.steps=100000", "train.sample_every=0", "checkpoint.every=0")
    prepare(recipe)  # ranks that prepare their data one after the other would seem missing
    return recipe


def hung(folder: Path, ranks: list[Any]) -> str:
    """The one verdict of ranks with servers."""
    assert set(codes(ranks)) <= {None, HUNG, 1}  # 1: the others have left
    said = [file.read_text() for file in folder.glob("hung-*")]
    assert len(said) == 1, said
    (stacks,) = folder.glob("run/traces/hang-step-*.txt")
    assert stacks.read_text().startswith(said[0].split(". Stacks")[0])
    return said[0]


WAITS = r"waits? in [\w ]+ over axis \w+ \(ranks? [0-3, ]+\).*, at fivefold/\w+/\w+\.py:\d+"


@pytest.mark.slow
def test_a_worker_that_is_stopped_is_named(text: Path, tmp_path: Path) -> None:  # noqa: F811
    """The other one goes on without it: nobody waits, and the first server watches."""
    ranks = start(4, tmp_path, serve, served(text, "sync.staleness=-1"), tmp_path / "run", 3, 2, "stopped")
    said = hung(tmp_path, ranks)
    assert re.match(
        r"rank 3 \(worker 1\) is missing: it is stopped \(SIGSTOP\)\. It was last seen after step", said
    )


@pytest.mark.slow
@pytest.mark.parametrize("how", ["stopped", "busy", "asleep"])
@pytest.mark.parametrize("staleness", [0, 2, -1])
@pytest.mark.parametrize(
    ("who", "role"), [(0, "first server"), (1, "server 1"), (2, "worker 0"), (3, "worker 1")]
)
def test_servers_and_workers_that_hang_are_named(
    text: Path,  # noqa: F811
    tmp_path: Path,
    who: int,
    role: str,
    staleness: int,
    how: str,
) -> None:
    recipe = served(text, f"sync.staleness={staleness}")
    said = hung(tmp_path, start(4, tmp_path, serve, recipe, tmp_path / "run", who, 3, how))
    assert said.startswith(f"rank {who} ({role}) is missing: "), said
    if staleness >= 0 or who < 2:  # else the first server may just be serving the other worker
        assert re.search(rf"[Rr]anks? [0-3, ]+ {WAITS}", said), said
    if how != "stopped":
        assert re.search(r"hanging.py:\d+ in hang", said), said


def test_who_waits_for_a_slow_worker_is_not_named() -> None:
    """Rank 0 leads, rank 1 waits for an order as long as rank 2 takes, which is slow but gets on. Rank 3, which nobody
    waits for, is named once it does nothing for three of its own usual steps; also if it is silent."""
    order = waits("servers", 0, (0,), "an order", peers=(0,))
    answers = waits("workers", 0, (2,), "answers", peers=(2,))
    first, idle = post(0, answers, 0), post(1, order, 500)
    slow, other = post(2, None, 1, usual_s=100.0), post(3, None, 299, usual_s=100.0, role="worker 1")

    def overseen(*posts: Post, silent: float = 0.0) -> Any:
        seen = {rank: Seen(one, silent * (rank == 3)) for rank, one in enumerate(posts)}
        return Judge(0, "here 1", seen, 30, 10, 30).overseen((1, 2, 3))

    assert overseen(first, idle, slow, other) is None
    missing, said = overseen(first, idle, slow, replace(other, still_s=301))
    assert missing == (3,)
    assert said.startswith("rank 3 (worker 1) is missing: it has done nothing for 301 s, after step 12, at ")
    assert said.endswith("Rank 0 waits in answers over axis workers (rank 2), at fivefold/step/step.py:7")
    assert overseen(first, idle, slow, replace(other, still_s=0), silent=299.0) is None
    assert overseen(first, idle, slow, replace(other, still_s=0), silent=301.0)[0] == (3,)
    assert overseen(first, idle, slow, replace(other, still_s=500, phase="sampling", patience=10)) is None
    assert judged(post(0, answers), idle, replace(slow, still_s=99)) is None


@pytest.mark.slow
@pytest.mark.parametrize("rate", ["0", "1kbit"])
def test_a_host_that_cannot_be_reached_is_named(text: Path, tmp_path: Path, rate: str) -> None:  # noqa: F811
    """On both sides of a link that is down, or carries next to nothing."""
    run = tmp_path / "run"
    sets = (*TINY, f"data.source={text}", f"data.cache={tmp_path / 'cache'}", "layout.dp_replicate=4")
    sets += ("observe.hang_s=6", "train.steps=100000", "train.val_every=100000")
    command = [sys.executable, "-m", "fivefold.cli.main", "train", "quickstart", "--out", str(run)]
    command += [f"--set={setting}" for setting in sets]

    def lose(_: Any) -> None:
        deadline = time.monotonic() + 90
        while not (run / "metrics.jsonl").exists() or len(lines(run, "step_s")) < 60:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        hosts.connect(1, up=rate != "0", rate=None if rate == "0" else rate)

    try:
        with Hosts(2, "200mbit") as hosts:
            env = {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
            done = hosts.run(command, 2, capture=True, timeout_s=100, env=env, meanwhile=lose)
    except Unavailable as reason:
        pytest.skip(str(reason))
    assert done.code
    here, there = done.err
    print(done)
    verdicts = [
        [line for line in said.splitlines() if re.search("rank [0-3]: ", line)] for said in (here, there)
    ]
    for said, own, host in zip(verdicts, ("[01]", "[23]"), ("host1", "host0"), strict=True):
        other = "[23]" if own == "[01]" else "[01]"
        lost = rf"rank {own}: ranks? {other}(, {other})? (is|are) missing: nothing is heard of host {host} "
        slow = rf"rank {own}: messages of ranks {other}, {other} on host {host} do not arrive"
        assert re.match(f"{lost}|{slow}", said[0]), said


def slow_run(rank: int, world: int, recipe: Any, out: Path, cause: str) -> None:
    from fivefold.train import loop, share

    take_step, training_batches = loop.take_step, share.training_batches

    def slower(*arguments: Any) -> Any:
        time.sleep(SLEPT_S * rank)
        return take_step(*arguments)

    def slow_batches(*arguments: Any) -> Any:
        batches = training_batches(*arguments)

        def read(*which: Any) -> Any:
            time.sleep(1.5 * SLEPT_S * rank)  # it is read ahead: a step on a busy machine hides some of it
            return batches(*which)

        return read

    if cause == "data":
        share.training_batches = slow_batches
    else:
        loop.take_step = slower
    try:
        train_rank(rank, world, recipe, out)
    finally:
        loop.take_step, share.training_batches = take_step, training_batches


@pytest.mark.parametrize(("cause", "other"), [("computing", "data"), *slow(("data", "computing"))])
def test_a_slow_rank_is_named_within_50_steps(text: Path, tmp_path: Path, cause: str, other: str) -> None:  # noqa: F811
    recipe = tiny(text, "layout.dp_replicate=2", "train.steps=50")
    run_ranks(2, slow_run, recipe, tmp_path / "run", cause)
    (found,) = lines(tmp_path / "run", "slow_rank")
    assert found["rank"] == 1
    assert found[cause] > (0.5 if cause == "data" else 0.8) * SLEPT_S
    # On a busy machine acknowledgements wait for a core, which the kernel counts as the network.
    assert found[cause] > found[other] + found["network"], "it is named with its cause"
    assert "Slow ranks" in (tmp_path / "run/report.html").read_text()


def rows(*seconds: dict[str, float]) -> list[list[float]]:
    usual = {"computing": 1.0, "data": 0.0, "messages": 0.1, "network": 0.01, "to": 0.0}
    return [[(usual | row)[kind] for kind in SECONDS] for row in seconds]


def test_the_share_of_the_delay() -> None:
    slow = SlowRanks(Layout(dp_replicate=3))
    late = rows({"messages": 1}, {"computing": 1.6, "data": 0.4}, {"messages": 1})
    assert slow.add(late) is None, "the first window has the first steps"
    assert slow.add(late) is None, "once may be chance"
    said = "rank 1 is slow: the others wait 1 s of a step of 2.1 s for it (computing 60%, data 40%)"
    assert str(slow.add(late)) == said
    assert slow.add(late) is None, "said once"
    assert slow.add(rows({}, {}, {})) is None
    held = rows({}, {}, {"messages": 2, "network": 1.5, "to": (10 << 24) + (77 << 16) + 2})
    found = [slow.add(held) for _ in range(2)][1]
    assert str(found).endswith("for it (network 100%, to 10.77.0.2)")
    assert found is not None
    page = slow_section([{"step": 40, "slow_rank": found.figures}])
    assert "<td>2</td>" in page
    assert slow_section([]) == ""


def test_stages_of_a_pipeline_need_not_take_equally_long() -> None:
    slow, uneven = SlowRanks(Layout(pp=2)), rows({}, {"computing": 2})
    assert [slow.add(uneven) for _ in range(5)] == [None] * 5
    slower = rows({"computing": 1.9}, {"computing": 2})
    assert [slow.add(slower) for _ in range(2)][1].rank == 0  # type: ignore[union-attr]
