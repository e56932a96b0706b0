"""Training with parameter servers: equals one process, holds its staleness, survives lost workers, resumes."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import random
import signal
import threading
import time
from collections import Counter
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
import stored
import torch.distributed as dist
from layouts import tiny
from marks import only, slow
from pool_runs import assert_close_tensors, assert_same_tensors, lines, ranks_of, train_rank
from ranks import PATIENCE, Pool, _servers
from torch import Tensor
from worker_rows import traced_worker

from fivefold.checkpoint import store, write
from fivefold.data import prepare
from fivefold.draw.lanes import Box
from fivefold.errors import BusyError, UserError
from fivefold.launch.local import Attempt, Outcome, launch
from fivefold.models.base import init_part
from fivefold.models.card import card_of
from fivefold.observe import timelines
from fivefold.parallel.link import Kind, Link, Note
from fivefold.parallel.mesh import Mesh
from fivefold.parallel.parallelize import rounded_layers
from fivefold.parallel.server import Shard
from fivefold.parallel.worker import Exchange
from fivefold.recipe import Recipe, change, count_parameters, load, resolve
from fivefold.schedules.priority import Order
from fivefold.sharding.layout import Layout
from fivefold.sharding.sync import Servers, Shares, messages, pieces, units
from fivefold.step import step
from fivefold.train import server_run
from fivefold.train.job import Job
from fivefold.train.run import run_rank
from fivefold.train.server_run import ServerHooks, worker_state
from fivefold.train.share import batches_of
from fivefold_plan.cluster.clusters import parse
from fivefold_plan.predict import predict

SERVER = ["sync.method=server", "observe.tracker=none"]
PLAIN = [
    "sync.method=all",
    "sync.servers=1",
    "sync.order=priority",
]


@pytest.fixture(scope="module")
def room(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("server")


@pytest.fixture(scope="module")
def pools():
    """Pools of this file alone: servers and workers are in different numbers of process groups."""
    made: dict[int, Pool] = {}

    def run(world: int, *arguments: Any) -> list[Any]:
        if world not in made:
            made[world] = Pool(world)
        return made[world].run(*arguments, timeout_s=60)

    yield run
    for pool in made.values():
        pool.close()


def served(room: Path, workers: int, *overrides: str) -> Recipe:
    recipe = change(tiny(room, "dp=1", "train.global_batch_size=12"), [*SERVER, *overrides], f"dp={workers}")
    return resolve(recipe, vocab_size=prepare(recipe).vocab_size)


def rank_of_run(
    rank: int, world: int, recipe: Recipe, out: Path, resume: bool = False, slow: str = ""
) -> Any:
    """A rank's part of a run. slow: what the last worker does when it reads batches, or in which moment of its third
    share it is killed (LEAVES); or what happens to the second server: it is killed ("server"), or its third update of
    each part leaves 1e8 in a "weight", or infinity in a "state". "poison": the last worker's gradients are not finite
    from step 3 on. "spill": in step 3 its gradient of the unit SPILLED has an infinity."""
    if slow == "spill":
        if rank == world - 1:
            setattr(Exchange, "_push", _spilling(Exchange._push))  # noqa: B010, in a process that ends
        slow = ""
    if slow in LEAVES:
        if rank < recipe.servers.count:
            _count_updates(rank, out)
        elif rank == world - 1:
            setattr(Link, "tell", _leaving(Link.tell, *LEAVES[slow], lost=slow == "said elsewhere"))  # noqa: B010, in a process that ends
        slow = ""
    if slow == "poison":
        if rank == world - 1:
            setattr(server_run, "share_of", _poisoned(server_run.share_of))  # noqa: B010, in a process that ends
        slow = ""
    if slow in ("server", "weight", "state"):
        if rank == 1 and slow == "server":
            threading.Timer(2, os.kill, (os.getpid(), signal.SIGKILL)).start()
        elif rank == 1:
            setattr(Shard, "update", _destroying(Shard.update, slow))  # noqa: B010, in a process that ends
        slow = ""
    data = prepare(recipe)
    batches = _Slow(recipe, data, slow) if slow and rank == world - 1 else None
    job = Job(recipe, out, data, batches=batches, resume=resume)
    return run_rank(job, ranks_of(rank, world))


def waiting_rank(rank: int, world: int, recipe: Recipe, out: Path) -> Any:
    """The disk is full for longer than a message may take, when the run has trained its last step."""
    part, until = write.Writing.write_part, list[float]()

    def full(writing: write.Writing) -> None:
        until.append(time.monotonic() + 15)
        if time.monotonic() < until[0]:
            raise BusyError("the disk is full")
        part(writing)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(write.Writing, "write_part", full)
        job = Job(recipe, out, prepare(recipe))
        return run_rank(job, replace(ranks_of(rank, world), timeout_s=8))


@pytest.mark.slow
def test_workers_wait_for_a_last_save_however_long_it_takes(pools, room, tmp_path):
    recipe = served(room, 1, "sync.servers=2", "train.steps=2", "checkpoint.every=0")
    assert pools(3, waiting_rank, recipe, tmp_path) == [None] * 3
    assert [folder.name for folder in store.checkpoints(tmp_path)] == ["step-00000002"]
    assert len(lines(tmp_path, "alarm")) == 1


def validating_rank(rank: int, world: int, recipe: Recipe, out: Path) -> Any:
    """The first validation takes longer than a message may."""
    validate, seconds = server_run.validate, [15]

    def long(*arguments: Any) -> Any:
        time.sleep(seconds.pop() if seconds else 0)
        return validate(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server_run, "validate", long)
        return run_rank(Job(recipe, out, prepare(recipe)), replace(ranks_of(rank, world), timeout_s=8))


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [0, 2])
def test_workers_wait_for_a_validation_however_long_it_takes(pools, room, tmp_path, staleness):
    sets = ["sync.servers=2", f"sync.staleness={staleness}", "train.steps=4", "train.val_every=2"]
    assert pools(4, validating_rank, served(room, 2, *sets), tmp_path) == [None] * 4
    assert len(lines(tmp_path, "val_loss")) == 2
    assert len(lines(tmp_path, "loss")) == len(lines(tmp_path, "tokens_per_s")) == 4


def stopped_rank(rank: int, world: int, recipe: Recipe, out: Path) -> Any:
    """The second server gets a SIGTERM in step 3."""
    end_step = ServerHooks.end_step

    def ended(hooks: ServerHooks) -> Any:
        if rank == 1 and hooks.state.step == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return end_step(hooks)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ServerHooks, "end_step", ended)
        return run_rank(Job(recipe, out, prepare(recipe)), ranks_of(rank, world))


@pytest.mark.parametrize("staleness", [2, *slow(0)])
def test_a_signal_to_any_server_stops_the_run(pools, room, tmp_path, staleness):
    sets = ["sync.servers=2", f"sync.staleness={staleness}", "train.steps=40", "checkpoint.every=0"]
    assert pools(4, stopped_rank, served(room, 2, *sets), tmp_path) == [signal.SIGTERM] * 4
    (folder,) = store.checkpoints(tmp_path)
    assert 3 <= store.step_in(folder) < 40
    assert len(lines(tmp_path, "loss")) == store.step_in(folder)


def _destroying(update: Any, what: str) -> Any:
    calls = Counter[tuple[int, int]]()

    def destroying(shard: Shard, part: int, *rest: Any) -> None:
        calls[shard.message.number, part] += 1
        if calls[shard.message.number, part] == 3:
            if what == "weight":
                shard.flat[shard.message.cuts[part][0]] = 1e8
            else:
                updater: Any = shard.updater
                for name, state in updater.parts[part].states().items():
                    if name.startswith("exp_avg_sq."):  # the update of this element becomes zero
                        state.view(-1)[0] = math.inf
        update(shard, part, *rest)

    return destroying


def _poisoned(share_of: Any) -> Any:
    def poisoned(batches: Any, step: int, *rest: Any, **named: Any) -> Any:
        microbatches = share_of(batches, step, *rest, **named)
        if step >= 2:
            microbatches[:] = [microbatch._replace(weight=math.nan) for microbatch in microbatches]
        return microbatches

    return poisoned


SPILLED = 2


def _spilling(push: Any) -> Any:
    def spilling(exchange: Exchange, unit: int) -> None:
        if exchange.step == 2 and unit == SPILLED:
            for message in exchange._of_unit[unit][:1]:
                exchange._up[message.number]._slices[0][0].view(-1)[0] = math.inf
        push(exchange, unit)

    return spilling


LEAVES = {
    "in a push": (Kind.PUSHED, 1),
    "unsaid": (Kind.COMPUTED, 0),
    "half said": (Kind.COMPUTED, 1),
    "said elsewhere": (Kind.COMPUTED, 0),
    "applied": (Kind.APPLIED, 0),
}
"""Before a worker tells this to that server it is killed, when the other servers have what it told them."""


def _leaving(tell: Any, kind: Kind, server: int, lost: bool) -> Any:
    """lost: the others hear it, and that server does not."""
    told, others = Counter[int](), set[Link]()

    def leaving(link: Link, what: Kind, *rest: Any) -> None:
        others.add(link)
        told[link.peer] += what == kind
        if told[server] == (30 if kind == Kind.PUSHED else 3):
            if link.peer == server and lost:
                return
            if lost:
                tell(link, what, *rest)
            for other in others:
                other.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        tell(link, what, *rest)

    return leaving


def _count_updates(rank: int, out: Path) -> None:
    """Leaves in updates-RANK how often each part's weights have changed."""
    update, calls = Shard.update, Counter[str]()

    def counted(shard: Shard, part: int, *rest: Any) -> None:
        update(shard, part, *rest)
        calls[f"{shard.message.number}/{part}"] += 1
        (out.parent / f"updates-{rank}").write_text(json.dumps(calls))

    setattr(Shard, "update", counted)  # noqa: B010, in a process that ends


LAG_S = 0.6
"""Of a worker that lags, per batch: longer than four shares of the other worker, also on a busy machine."""


class _Slow:
    """The recipe's batches, of a worker that lags, or is killed."""

    def __init__(self, recipe: Recipe, data: Any, how: str):
        self.source = batches_of(recipe, data)
        self.how, self.read = how, 0

    def batch(self, i: int, rows: range) -> tuple[Any, Any]:
        self.read += 1
        if self.how == "lags":
            time.sleep(LAG_S)
        elif self.read > 12:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.source.batch(i, rows)


def saved(run: Path, step: int) -> dict[str, Tensor]:
    found = stored.load(store.folder_of(run, step))
    return {**found.model, **found.optimizer}


def plain(recipe: Recipe, *sets: str) -> Recipe:
    """The same run of one process."""
    return change(recipe, [*PLAIN, "sync.staleness=0", *sets], "dp=1")


@pytest.mark.parametrize(
    ("servers", "sets"),
    [
        (2, []),
        pytest.param(
            2,
            [
                "optim.name=momentum",
                "optim.grad_clip=0",
                "faults.on_nonfinite=abort",
                "sync.order=priority:4KiB",
                "train.microbatch_size=6",
            ],
            marks=pytest.mark.slow,
        ),
        pytest.param(1, ["sync.order=fifo"], marks=pytest.mark.slow),
        # one microbatch a worker: other sums would round some weights of 16 bits the other way
        pytest.param(2, ["precision.mode=bf16", "train.microbatch_size=6"], marks=pytest.mark.slow),
        pytest.param(
            1,
            ["optim.grad_clip=0", "faults.on_nonfinite=abort", "train.microbatch_size=3"],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_synchronous_equals_one_process(
    room: Path, tmp_path: Path, pools, servers: int, sets: list[str]
) -> None:
    """Losses, norms, validation; weights and moments after four steps."""
    recipe = served(room, 2, f"sync.servers={servers}", "train.steps=4", "train.val_every=2", *sets)
    out, reference = tmp_path / "run", tmp_path / "one"
    assert pools(servers + 2, rank_of_run, recipe, out) == [None] * (servers + 2)
    assert train_rank(0, 1, plain(recipe), reference) is None
    for key, rel in (("loss", 1e-6), ("grad_norm", 1e-5), ("val_loss", 1e-6), ("val_bits_per_byte", 1e-6)):
        assert lines(out, key) == pytest.approx(lines(reference, key), rel=rel), key
    assert_close_tensors(saved(out, 4), saved(reference, 4))


@pytest.mark.parametrize("clip", [0, *slow(1)])
def test_servers_skip_a_step_whole_or_not_at_all(
    room: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clip: int
) -> None:
    """An infinity in the gradient of one unit: no part of any unit changes, as in one process. Units whose gradients
    were pushed before it would have changed otherwise."""
    sets = ["train.steps=4", "sync.servers=2", "train.sample_every=0", f"optim.grad_clip={clip}"]
    recipe, out, reference = served(room, 2, *sets), tmp_path / "run", tmp_path / "one"
    assert processes(4, tmp_path, recipe, out, False, "spill") == [0, 0, 0, 0]
    computed, name = step.forward_backward, units(card_of(recipe.model))[SPILLED][0]

    def spilled(state: Any, *rest: Any) -> Any:
        loss = computed(state, *rest)
        if state.step == 2:
            state.gradients()[name].view(-1)[0] = math.inf
        return loss

    monkeypatch.setattr(step, "forward_backward", spilled)
    assert train_rank(0, 1, plain(recipe), reference) is None
    assert lines(out, "nonfinite") == lines(reference, "nonfinite") == [1]
    assert lines(out, "loss") == pytest.approx(lines(reference, "loss"), rel=1e-6)
    assert_close_tensors(saved(out, 4), saved(reference, 4))


@pytest.mark.slow
def test_servers_that_do_not_judge_save_no_part_of_a_step(room: Path, tmp_path: Path) -> None:
    """Each part changes as soon as it is there; so the run ends, and resumes from before the step."""
    sets = ["train.steps=6", "checkpoint.every=1", "optim.grad_clip=0", "faults.on_nonfinite=abort"]
    recipe = served(room, 2, "sync.servers=2", "train.sample_every=0", *sets)
    assert not recipe.servers.judging
    assert processes(4, tmp_path, recipe, tmp_path / "run", False, "spill") == [1, 1, 1, 1]
    said = (tmp_path / "error-0").read_text()
    assert "early updates may have used it. They are not saved. Resume from step 2" in said
    assert store.step_in(store.latest(tmp_path / "run")) == 2


def test_resumes_exactly_and_in_other_methods(room: Path, tmp_path: Path, pools) -> None:
    """Synchronous: the same bits. The checkpoint is an ordinary one: one process continues from it, and servers from
    one of one process."""
    whole, cut, other = (tmp_path / name for name in ("whole", "cut", "other"))
    recipe = served(room, 2, "sync.servers=2", "train.steps=4", "optim.schedule=constant")
    pools(4, rank_of_run, recipe, whole)
    pools(4, rank_of_run, change(recipe, ["train.steps=2"]), cut)
    assert train_rank(0, 1, plain(recipe, "train.steps=3"), other) is None
    pools(4, rank_of_run, recipe, other, True)
    assert_close_tensors(saved(other, 4), saved(whole, 4))
    pools(4, rank_of_run, recipe, cut, True)
    assert_same_tensors(saved(cut, 4), saved(whole, 4))
    assert train_rank(0, 1, plain(recipe, "train.steps=5"), cut, True) is None


@pytest.mark.slow
@pytest.mark.parametrize("servers", [2, 3])
def test_launches_of_their_own_resume(room: Path, tmp_path: Path, servers: int) -> None:
    """Unlike a pool's ranks they make all groups anew. The same bits as without the interruption."""
    recipe = served(room, 2, f"sync.servers={servers}", "train.steps=4", "optim.schedule=constant")
    launches = [
        (recipe, "whole", False),
        (change(recipe, ["train.steps=2"]), "cut", False),
        (recipe, "cut", True),
    ]
    for number, (one, out, resume) in enumerate(launches):
        folder = tmp_path / str(number)
        folder.mkdir()
        assert processes(servers + 2, folder, one, tmp_path / out, resume) == [0] * (servers + 2)
    assert_same_tensors(saved(tmp_path / "cut", 4), saved(tmp_path / "whole", 4))


@only("2")
@pytest.mark.parametrize("staleness", [0, 2])
def test_saves_by_time(room: Path, tmp_path: Path, pools, staleness: int) -> None:
    """No further step is handed out before it is saved, so synchronous workers compute the same bits."""
    steps = [
        "train.steps=6",
        "optim.schedule=constant",
        f"sync.staleness={staleness}",
        "checkpoint.keep_last=9",
    ]
    recipe = served(room, 2, "sync.servers=2", *steps)
    whole, timed = tmp_path / "whole", tmp_path / "timed"
    pools(4, rank_of_run, change(recipe, ["checkpoint.minutes=1e-9"]), timed)
    folders = store.checkpoints(timed)
    assert len(folders) > 2
    assert store.step_in(folders[-1]) == 6
    assert len(lines(timed, "loss")) == 6
    if staleness == 0:
        pools(4, rank_of_run, recipe, whole)
        assert_same_tensors(saved(timed, 6), saved(whole, 6))


def processes(world: int, folder: Path, *arguments: Any) -> list[int | None]:
    """Runs `rank_of_run` on processes that may end as they like. Returns their exit codes."""
    started = [
        _servers.Process(target=_process, args=(rank, world, str(folder), *arguments))
        for rank in range(world)
    ]
    for process in started:
        process.start()
    deadline = time.monotonic() + 60 * PATIENCE
    for process in started:
        process.join(max(0.0, deadline - time.monotonic()))
        if process.exitcode is None:
            process.kill()
            process.join()
    return [process.exitcode for process in started]


def _process(rank: int, world: int, folder: str, *arguments: Any) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if os.path.isdir("/sys/class/net/lo") else "lo0"
    import torch

    torch.set_num_threads(1)
    times = timedelta(seconds=30 * PATIENCE)
    dist.init_process_group(
        "gloo", store=dist.FileStore(f"{folder}/store", world), rank=rank, world_size=world, timeout=times
    )
    try:
        rank_of_run(rank, world, *arguments)
    except UserError as error:
        Path(folder, f"error-{rank}").write_text(str(error))
        raise


def told(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / timelines.WORKERS).read_text().splitlines()]


@pytest.mark.slow
def test_asynchronous_training_goes_on_without_a_worker(room: Path, tmp_path: Path) -> None:
    """The last worker is killed in the middle of a share. The others compute all shares that are left, its own, too."""
    recipe = served(room, 3, "sync.staleness=-1", "sync.servers=2", "train.steps=12", "optim.lr=3e-3")
    codes = processes(5, tmp_path, recipe, tmp_path / "run", False, "killed")
    assert codes == [0, 0, 0, 0, -signal.SIGKILL]
    losses = lines(tmp_path / "run", "loss")
    assert len(losses) == 12
    assert losses[-1] < 0.8 * losses[0]
    assert lines(tmp_path / "run", "val_loss")
    shares = [(line["step"], line["share"]) for line in told(tmp_path / "run")]
    assert set(shares) == {(step, share) for step in range(1, 13) for share in range(3)}
    assert len(shares) <= 37, "at most one twice: that of the lost worker"
    assert store.Reader(store.latest(tmp_path / "run")).meta["updates"] == 36


@only("applied-1")
@pytest.mark.parametrize("clip", [1, *slow(0)])
@pytest.mark.parametrize("when", ["said elsewhere", "applied", *slow("in a push", "unsaid", "half said")])
def test_a_share_is_applied_once_whenever_its_worker_is_lost(
    room: Path, tmp_path: Path, when: str, clip: int
) -> None:
    """On both servers, whole or not at all: all weights have the same number of updates, that of the manifest."""
    sets = [
        "sync.staleness=-1",
        "sync.servers=2",
        "train.steps=6",
        "train.sample_every=0",
        "sync.order=priority:4KiB",
    ]
    recipe = served(room, 3, *sets, f"optim.grad_clip={clip}")
    codes = processes(5, tmp_path, recipe, tmp_path / "run", False, when)
    assert codes == [0, 0, 0, 0, -signal.SIGKILL]
    updates = [json.loads((tmp_path / f"updates-{server}").read_text()) for server in range(2)]
    assert {number for of_server in updates for number in of_server.values()} == {18}
    assert store.Reader(store.latest(tmp_path / "run")).meta["updates"] == 18
    shares = Counter((line["step"], line["share"]) for line in told(tmp_path / "run"))
    assert len(shares) == 18
    assert max(shares.values()) == 1, "what was computed is not computed again"


@pytest.mark.slow
def test_a_synchronous_run_ends_with_a_lost_worker(room: Path, tmp_path: Path) -> None:
    codes = processes(3, tmp_path, served(room, 2, "train.steps=20"), tmp_path / "run", False, "killed")
    assert codes == [1, 1, -signal.SIGKILL]


@pytest.mark.slow
def test_a_lost_server_ends_the_run(room: Path, tmp_path: Path) -> None:
    """Also an asynchronous one, on all ranks, long before the time-out."""
    recipe = served(room, 2, "sync.staleness=-1", "sync.servers=2", "train.steps=100000")
    began = time.monotonic()
    codes = processes(4, tmp_path, recipe, tmp_path / "run", False, "server")
    assert codes == [1, -signal.SIGKILL, 1, 1]
    assert time.monotonic() - began < 25 * PATIENCE


@pytest.mark.parametrize(
    ("what", "staleness", "step", "every"),
    [("weight", 0, 3, 2), *slow(("weight", -1, 2, 3), ("state", 0, 3, 1))],
)
def test_what_an_update_destroys_is_never_saved(
    room: Path, tmp_path: Path, what: str, staleness: int, step: int, every: int
) -> None:
    """Weights are judged at the end of the step, when no save is due; states before a save. Two asynchronous workers
    make the third update in step 2."""
    sets = ["sync.servers=2", f"sync.staleness={staleness}", "train.steps=6", f"checkpoint.every={every}"]
    codes = processes(4, tmp_path, served(room, 2, *sets), tmp_path / "run", False, what)
    assert codes == [1, 1, 1, 1]
    for rank in range(2):
        said = (tmp_path / f"error-{rank}").read_text()
        assert said.startswith(f"after step {step} weights or optimizer states are not finite, beyond 1e+30")
    assert [store.step_in(folder) for folder in store.checkpoints(tmp_path / "run")] == [
        *range(every, step, every)
    ]
    assert len(lines(tmp_path / "run", "loss")) == step


@pytest.mark.parametrize(
    ("policy", "staleness"), [("abort", 2), *slow(("abort", 0), ("abort", -1), ("skip", 0), ("skip", 2))]
)
def test_a_run_that_ends_with_a_fault_is_saved(
    room: Path, tmp_path: Path, policy: str, staleness: int
) -> None:
    """What workers have begun by then ends first."""
    sets = ["sync.servers=2", f"sync.staleness={staleness}", "train.steps=20", "checkpoint.every=0"]
    recipe = served(room, 2, *sets, f"faults.on_nonfinite={policy}")
    assert processes(4, tmp_path, recipe, tmp_path / "run", False, "poison") == [1, 1, 1, 1]
    said = {(tmp_path / f"error-{rank}").read_text() for rank in range(2)}
    assert len(said) == 1
    assert "not finite" in said.pop()
    (folder,) = store.checkpoints(tmp_path / "run")
    assert len(lines(tmp_path / "run", "loss")) <= store.step_in(folder) < 20
    assert all(tensor.isfinite().all() for tensor in stored.load(folder).model.values())


@pytest.mark.parametrize(("staleness", "least"), [pytest.param(-1, 4, marks=pytest.mark.slow), (2, 2)])
def test_staleness_is_bounded(room: Path, tmp_path: Path, pools, staleness: int, least: int) -> None:
    """The last worker lags. lag: steps before a share's that the first server had not whole when the worker began to
    pull. Unbounded, the other one runs far ahead; bounded, as far as it may."""
    recipe = served(
        room,
        2,
        f"sync.staleness={staleness}",
        "sync.servers=2",
        "train.steps=12",
        "train.microbatch_size=6",
        "optim.grad_clip=0",
    )
    out = tmp_path / "run"
    pools(4, rank_of_run, recipe, out, False, "lags")
    lags = [line["lag"] for line in told(out)]
    assert max(lags) >= least
    assert max(lags) <= (staleness if staleness > 0 else 12)
    counts = [sum(line["worker"] == worker for line in told(out)) for worker in range(2)]
    assert sum(counts) == 24
    assert counts[0] > counts[1], "the quick worker computes more shares"
    assert lines(out, "loss")[-1] < lines(out, "loss")[0]


def test_shares_are_handed_out_once_and_within_the_bound() -> None:
    """A random schedule of workers that take, finish and are lost."""
    for seed in range(50):
        draw, staleness = random.Random(seed), seed % 4 or -1
        shares, done = Shares(4, 0, 9, staleness), []
        while len(done) < 36:
            worker = draw.choice(sorted(shares.alive))
            if len(shares.alive) > 1 and draw.random() < 0.02:
                shares.lose(worker)
            elif shares.under_way[worker] and draw.random() < 0.6:
                found = shares.under_way[worker][0]
                done.append(found)
                shares.finish(worker, *found)
            elif found := shares.take(worker):
                assert staleness == -1 or found[0] - shares.oldest <= staleness
        assert sorted(done) == [(step, share) for step in range(9) for share in range(4)]
        assert shares.oldest == 9


def test_messages_divide_the_model(room: Path) -> None:
    """Every element is in one message of one server; parts have the given size; units are in the order of forward."""
    card = card_of(served(room, 2).model)
    for count in (1, 2, 3):
        found, seen = messages(card, Servers(count, order=Order(partition=1024))), dict[str, int]()
        for message in found:
            assert all(stop - start <= 256 for start, stop in message.cuts)
            rows = [row for part in message.parts for row in part]
            assert message.size == sum(b - a for a, b in pieces(rows, _offsets(card)))
            for name, start, stop in rows:
                seen[name] = seen.get(name, 0) + stop - start
        assert sum(seen.values()) == sum(message.size for message in found)
        assert seen.keys() == card.parameters.keys()
    assert [names[0] for names in units(card)] == [
        "embed.weight",
        *(f"blocks.{i}.norm1.weight" for i in range(4)),
        "norm.weight",
    ]
    assert len(messages(card, Servers(1))) == 6


def _offsets(card: Any) -> dict[str, int]:
    found, total = {}, 0
    for name, shape in reversed(card.parameters.items()):
        found[name], total = total, total + math.prod(shape)
    return found


def test_an_error_of_a_worker_says_its_step(room: Path, tmp_path: Path, monkeypatch) -> None:
    """The same one after another step is no reason to end the run."""

    def fails(*_: object) -> None:
        raise OSError("the data are away for a moment")

    state, exchange = SimpleNamespace(step=7), SimpleNamespace(order=lambda: Note(Kind.TRAIN))
    monkeypatch.setattr(server_run, "connect", lambda *_: [])
    monkeypatch.setattr(server_run, "settle", lambda *_: [])
    monkeypatch.setattr(server_run, "worker_state", lambda *_: (state, exchange))
    monkeypatch.setattr(server_run, "_train", fails)
    with pytest.raises(OSError, match="away") as found:
        server_run.work(Job(served(room, 2), tmp_path, None), ranks_of(1, 2), None)
    assert found.value.__notes__ == ["after step 7"]


def in_fp8(rank: int, world: int, recipe: Recipe, out: Path, resume: bool) -> tuple[set[str], str]:
    """A rank's part of a run whose weights of block 2 are such that fp8 cannot hold them: one is far larger than the
    others. Returns a worker's layers in fp8, and what the rank said."""
    kept: list[Any] = []

    def with_an_outlier(seed: int, name: str, *rest: Any) -> Tensor:
        made = init_part(seed, name, *rest)
        if name == "blocks.2.mlp.down.weight":
            made[0, 0] = 2.0**28
        return made

    def kept_state(*arguments: Any) -> Any:
        kept.append(worker_state(*arguments))
        return kept[0]

    said = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(said):
        patch.setattr(server_run, "init_part", with_an_outlier)
        patch.setattr(server_run, "worker_state", kept_state)
        rank_of_run(rank, world, recipe, out, resume)
    layers = {name for state, _ in kept for name, _ in rounded_layers(state.module)}
    return layers, " ".join(said.getvalue().split())


@pytest.mark.parametrize("staleness", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_all_workers_test_fp8(room: Path, tmp_path: Path, pools, staleness: int) -> None:
    """A layer that fails computes in bf16 on all workers, as the console and fp8.json say, and after a resume."""
    sets = ["precision.mode=fp8", "precision.fp8_scaling=tensor", "optim.schedule=constant", "train.steps=1"]
    recipe = served(room, 2, "sync.servers=2", f"sync.staleness={staleness}", *sets)
    all_but_one = {
        f"blocks.{i}.{name}"
        for i in range(4)
        for name in ("attention.qkv", "attention.out", "mlp.gate_up", "mlp.down")
    } - {"blocks.2.mlp.down"}
    for resume, text in (
        (False, "WARNING: blocks.2.mlp.down failed the self-test of fp8 and computes in bf16: the "),
        (True, "fp8, except in blocks.2.mlp.down, as before"),
    ):
        steps = change(recipe, [f"train.steps={1 + resume}"])
        (_, said), other, *workers = pools(4, in_fp8, steps, tmp_path / "run", resume)
        assert text in said
        assert said.count("self-test") == (0 if resume else 2)
        assert other == (set(), "")
        assert workers == [(all_but_one, "")] * 2
        assert [*json.loads((tmp_path / "run" / "fp8.json").read_text())["in_bf16"]] == ["blocks.2.mlp.down"]
    assert len(lines(tmp_path / "run", "loss")) == 2


def other_recipe(rank: int, world: int, recipe: Recipe, out: Path) -> str:
    if rank == world - 1:
        recipe = change(recipe, ["optim.lr=0.5"])
    try:
        rank_of_run(rank, world, recipe, out)
    except UserError as error:
        return str(error)
    return ""


def test_a_worker_with_another_recipe_is_refused(room: Path, tmp_path: Path, pools) -> None:
    recipe = served(room, 2, "sync.servers=2", "train.steps=4")
    for message in pools(4, other_recipe, recipe, tmp_path / "run"):
        assert message.startswith(
            "rank 3 has another recipe than rank 0: optim.lr = 0.5, and there it is 0.001"
        )


def ends(ranks: Any) -> int | None:
    if ranks.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.5)
    Path(os.environ["FIVEFOLD_TEST_FILE"]).write_text("done")
    return None


@pytest.mark.slow
def test_the_launcher_lets_the_others_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FIVEFOLD_TEST_FILE", str(tmp_path / "done"))
    assert launch(Attempt(ends, 2, expendable=range(1, 2)), fork=False) == Outcome()
    assert (tmp_path / "done").read_text() == "done"


def test_recipes(room: Path) -> None:
    base = change(tiny(room, "dp=2"), SERVER)
    for sets, layout, words in (
        ([], "dp=2,tp=2", r"combines with dp only: .*\(layout.tp = 2\). Nearest valid: layout dp=2"),
        ([], "dp=2,zero=1", "layout.dp_shard = 2, layout.zero = 1"),
        (["layout.compress=int8"], "dp=2", "layout.compress"),
        (["sync.every=4"], "dp=2", "sync.every = 4 has no effect"),
        (["observe.noise_scale=true"], "dp=2", "is not supported with sync.method"),
        (["sync.order=priority:0KiB"], "dp=2", 'must be text, such as "fifo", "priority", "priority:256KiB"'),
        (["sync.method=all", "sync.staleness=2"], "dp=2", 'it needs sync.method = "server"'),
    ):  # fmt: skip
        with pytest.raises(UserError, match=words):
            change(base, sets, layout)
    with pytest.raises(UserError, match="balance its experts"):
        tiny(room, "dp=2", "model.arch=moe", "sync.method=server")


def planned(*sets: str, layout: str = "dp=6", cluster: str = "h100:8") -> Any:
    sizes = [
        "model.vocab_size=4096",
        "train.global_batch_size=48",
        "train.microbatch_size=4",
        "optim.grad_clip=0",
        "faults.on_nonfinite=abort",
    ]
    recipe = load("quickstart", [*sizes, "sync.method=server", "sync.servers=2", *sets], layout)
    return predict(recipe, parse(cluster))


def test_the_planner_prices_servers() -> None:
    """Bytes and memory of the busiest rank; servers share the incast; priority is no slower."""
    plan, count = planned(), count_parameters(planned().setting.model)
    assert plan.ranks == 8
    assert plan.sent["servers"] == pytest.approx(6 * count / 2 * 2, rel=0.01), (
        "two servers, six workers, bf16"
    )
    worker, server = plan.memory
    assert worker.optimizer == 0
    assert worker.params == 2 * count
    assert server.optimizer == pytest.approx(12 * count / 2, rel=0.01), "masters and moments"
    assert server.buffers == pytest.approx(6 * 4 * count / 2 + 2 * count / 2, rel=0.01)
    asynchronous = planned("sync.staleness=-1").memory[1]
    assert asynchronous.buffers == pytest.approx(6 * (4 + 2) * count / 2, rel=0.01), (
        "each worker gets weights of its own"
    )
    one = planned("sync.servers=1", cluster="h100:7")
    assert one.step.seconds > plan.step.seconds
    assert planned("sync.order=fifo").step.seconds >= plan.step.seconds
    assert planned("optim.grad_clip=1.0").step.seconds > plan.step.seconds, (
        "no weight changes before the norm is known"
    )
    assert planned("faults.on_nonfinite=skip").step.seconds > plan.step.seconds, "nor before it is judged"
    with pytest.raises(
        UserError, match=r"6 workers and sync.servers = 2 are 8 ranks, but there are 6\. Nearest valid: dp=4"
    ):
        planned(cluster="h100:6")


def test_pictures() -> None:
    """A box per share beside one for its wait; forward, backward and parts of an exchange, in order, the wire once."""
    lines = [
        {"worker": 0, "step": 1, "share": 0, "begin": 10.0, "end": 11.0, "waited_s": 0.25},
        {"worker": 1, "step": 1, "share": 1, "begin": 10.5, "end": 12.0, "waited_s": 0.0},
    ]
    assert timelines.worker_shares(lines) == {
        "worker 0": [Box(0.0, 0.25, "wait"), Box(0.25, 1.0, "b", "1")],
        "worker 1": [Box(0.5, 2.0, "b", "1")],
    }
    trace = [
        ("need", 0, 0.0, 0.5), ("need", 1, 0.7, 0.7), ("loss", 0, 1.0, 1.0), ("ready", 1, 1.5, 1.5),
        ("push", 1, 1.5, 2.5), ("ready", 0, 2.0, 2.0), ("push", 0, 2.0, 3.0), ("pull", 1, 2.6, 3.5),
    ]  # fmt: skip
    rows = traced_worker(trace)
    assert [box[:4] for box in rows["computing"]] == [
        (0.5, 0.7, "a", "0"),
        (0.7, 1.0, "a", "1"),
        (1.0, 1.5, "b", "1"),
        (1.5, 2.0, "b", "0"),
    ]
    assert [box[:4] for box in rows["pushes"]] == [(1.5, 2.5, "push", "1"), (2.5, 3.0, "push", "0")]
    assert [box[:4] for box in rows["pulls"]] == [(2.6, 3.5, "pull", "1")]
    picture = ElementTree.fromstring(timelines.workers_svg({"one <run>": rows}, "A & B"))
    assert len(picture.findall(".//{*}rect/{*}title")) == 7


def test_a_worker_validates_all_rows_whatever_its_number() -> None:
    """It has a mesh of its own, in which there is one replica group."""
    mesh = Mesh(Layout(), replace(ranks_of(1, 2), world=1))
    assert (mesh.replica_group, mesh.index("replica_groups"), mesh.rank) == (0, 0, 0)
