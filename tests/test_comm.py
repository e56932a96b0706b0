"""Messages over an axis: every operation beside the plain computation, what is counted, and what is said on failure."""

import errno
import re
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from marks import slow
from ranks import Pool, run_ranks
from sources import FILES, name_of, room_of
from torch import Tensor

import fivefold.comm.axis as axis_
from fivefold.comm import Axis, all_or_none
from fivefold.errors import BusyError, CommunicationError, UserError
from fivefold.launch.ranks import Ranks
from fivefold.parallel.mesh import Mesh
from fivefold.sharding.layout import Layout
from fivefold.sharding.units import Collective

DTYPES = [torch.float32, torch.bfloat16]
CPU = torch.device("cpu")


def axis_of(rank: int, world: int) -> Axis:
    return Mesh(Layout(dp_replicate=world), Ranks(rank, world, rank, world, CPU)).axis("replicate")


def of_rank(rank: int, dtype: torch.dtype, *shape: int) -> Tensor:
    """Small whole numbers: sums of them are exact in bf16, too."""
    return torch.randint(-8, 8, shape, generator=torch.Generator().manual_seed(rank)).to(dtype)


def operations(rank: int, world: int) -> None:
    """Every operation, in both dtypes, beside the same computed by one rank."""
    axis = axis_of(rank, world)
    assert (axis.size, axis.index, axis.rank, axis.ranks) == (world, rank, rank, tuple(range(world)))
    for dtype in DTYPES:
        every = [of_rank(r, dtype, 2 * world, 3) for r in range(world)]
        total, mine, rows = torch.stack(every).sum(0), slice(2 * rank, 2 * rank + 2), every[rank]

        def equal(found: Tensor, wanted: Tensor) -> None:
            assert found.dtype == wanted.dtype
            assert torch.equal(found, wanted)

        equal(axis.all_reduce(rows.clone()), total)
        equal(axis.start_all_reduce(rows.clone())(), total)
        equal(axis.all_reduce(rows.clone(), "max"), torch.stack(every).amax(0))
        equal(axis.all_reduce(rows.clone(), "min"), torch.stack(every).amin(0))
        equal(axis.all_gather(rows), torch.cat(every))
        equal(axis.run(Collective("all", "all_gather"), rows), torch.cat(every))
        equal(axis.run(Collective("all", "all_to_all", "all_reduce"), rows.clone(), backward=True), total)
        out = torch.empty_like(torch.cat(every))
        assert axis.start_all_gather(rows, out)() is out
        equal(out, torch.cat(every))
        equal(axis.start_reduce_scatter(rows)(), total[mine])
        found = axis.sum_scatter(rows.float().flatten(), torch.empty(6), dtype)
        equal(found, total[mine].float().flatten())
        equal(axis.all_to_all(rows), torch.cat([x[mine] for x in every]))
        equal(axis.start_all_to_all(rows)(), torch.cat([x[mine] for x in every]))
        equal(axis.broadcast(rows.clone(), world - 1), every[-1])
        # Uneven: rank i sends j + (i == j) rows to rank j.
        splits = [[j + (i == j) for j in range(world)] for i in range(world)]
        sent = [of_rank(r, dtype, sum(splits[r]), 3) for r in range(world)]
        taken = [splits[r][rank] for r in range(world)]
        wanted = torch.cat([x.split(splits[r])[rank] for r, x in enumerate(sent)])
        equal(axis.all_to_all(sent[rank], taken, splits[rank]), wanted)
        arriving = torch.empty_like(rows)
        around = axis.start_exchange(rows, (rank + 1) % world, arriving, (rank - 1) % world)
        assert around() is arriving
        equal(arriving, every[rank - 1])
    axis.barrier()


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_operations_are_the_plain_computation(world: int) -> None:
    operations(0, 1) if world == 1 else run_ranks(world, operations)


def overlap(rank: int, world: int) -> None:
    """Messages may be under way together, and be waited for in any order, more than once; tags tell sends apart."""
    axis = axis_of(rank, world)
    first, second = torch.full((5,), float(rank)), torch.full((7,), 10.0 * rank)
    started = axis.start_all_reduce(first), axis.start_all_gather(second)
    assert started[1]()[:7].tolist() == [0.0] * 7
    assert started[0]().tolist() == [1.0] * 5
    assert started[0]().tolist() == [1.0] * 5
    there = 1 - rank
    sends = [axis.start_send(torch.full((2,), 100.0 * rank + tag), there, tag) for tag in (1, 2)]
    arrived = {tag: axis.start_receive(torch.empty(2), there, tag) for tag in (2, 1)}
    assert {tag: found()[0].item() for tag, found in arrived.items()} == {
        t: 100.0 * there + t for t in (1, 2)
    }
    for send in sends:
        send()


def test_messages_overlap() -> None:
    run_ranks(2, overlap)


def posted(rank: int, world: int) -> list[str]:
    """What an all-to-all that overlaps posts, in its order. Two of them are under way together."""
    axis, found, batch = axis_of(rank, world), [], dist.batch_isend_irecv

    def record(ops: list[dist.P2POp]) -> list[dist.Work]:
        found.extend(op.op.__name__ for op in ops)
        return batch(ops)

    dist.batch_isend_irecv = record
    try:
        started = [axis.start_all_to_all(torch.full((world, 1 << 16), k + float(rank))) for k in (0, 10)]
        arrived = [one()[:, 0].tolist() for one in reversed(started)]
    finally:
        dist.batch_isend_irecv = batch
    assert arrived == [[10 + float(r) for r in range(world)], [float(r) for r in range(world)]]
    return found


def test_an_all_to_all_posts_receives_first() -> None:
    """gloo asks for data once a receive is posted, and the request waits behind a send that is under way."""
    assert run_ranks(3, posted) == [["irecv", "irecv", "isend", "isend"] * 2] * 3


def counting(rank: int, world: int) -> list[tuple[str, str, int]]:
    axis, found = axis_of(rank, world), []
    axis_.counters.append(lambda axis, operation, size: found.append((axis.name, operation, size)))
    try:
        x = torch.zeros(4, 2)
        axis.all_reduce(x)
        axis.start_all_gather(x)()
        axis.start_reduce_scatter(x)()
        axis.sum_scatter(x.flatten(), torch.empty(4), torch.bfloat16)
        axis.all_to_all(x, [1, 2] if rank else [3, 2], [2, 2] if rank else [3, 1])
        axis.start_exchange(x, 1 - rank, torch.empty(4, 2), 1 - rank)()
    finally:
        axis_.counters.clear()
    return found


def test_a_counter_gets_the_larger_of_input_and_output() -> None:
    results = run_ranks(2, counting)
    for found in results:
        sizes = [(operation, size) for _, operation, size in found]
        assert {name for name, _, _ in found} == {"replicate"}
        assert sizes[:4] == [
            ("all_reduce", 32),
            ("all_gather", 64),
            ("reduce_scatter", 32),
            ("all_to_all", 16),
        ]
        assert sizes[4] == ("all_to_all", max(32, 40 if found is results[0] else 24))
        assert sizes[5:] == [("send", 32), ("receive", 32)]


def short(rank: int, world: int) -> Axis:
    """An axis whose messages fail after two seconds."""
    group = dist.new_group(list(range(world)), timedelta(seconds=2))
    assert isinstance(group, dist.ProcessGroup)
    return Axis("tp", range(world), rank, CPU, group, 2)


def absent(rank: int, world: int, how: str) -> str | None:
    """Rank 1 does not take part: rank 0 says so."""
    axis, x = short(rank, world), torch.zeros(8)
    if rank == 1:
        return None
    if how == "receive":
        wait = axis.start_receive(x, 1)
    elif how == "later":
        wait = axis.of_unit("blocks.3").start_all_gather(x)
    else:
        wait = partial(axis.all_reduce, x)
    with pytest.raises(CommunicationError) as caught:
        wait()
    return str(caught.value)


@pytest.mark.parametrize("how", [*slow("at once"), "later", "receive"])
def test_a_rank_that_does_not_come(how: str) -> None:
    """The other's error names rank, axis, operation and line."""
    pool = Pool(2)
    try:
        text = pool.run(absent, how)[0]
    finally:
        pool.close()
    assert text is not None
    operation = {"at once": "all_reduce", "later": "all_gather", "receive": "receive"}[how]
    assert text.startswith(f"rank 0: {operation} over axis tp (ranks 0, 1)")
    assert "timed out after 2 s: not all of these ranks took part" in text
    lines = re.findall(r"test_comm\.py:(\d+)", text)
    source = Path(__file__).read_text().splitlines()
    code = [source[int(line) - 1].strip() for line in lines]
    began = {
        "at once": [],
        "later": ['wait = axis.of_unit("blocks.3").start_all_gather(x)'],
        "receive": ["wait = axis.start_receive(x, 1)"],
    }
    assert code == [*began[how], "wait()"]
    assert ("FSDP2 unit blocks.3" in text) == (how == "later")


def wrong(rank: int, world: int) -> None:
    axis = axis_of(rank, world)
    with pytest.raises(RuntimeError, match=r"(?i)size|split|divide"):
        axis.all_to_all(torch.zeros(3, 2), [1, 1], [5, 5])
    for started in (False, True):
        out = torch.zeros(3)
        with pytest.raises(RuntimeError, match="invalid tensor size") as caught:
            axis.start_all_gather(torch.zeros(4), out)() if started else axis.all_gather(torch.zeros(4), out)
        assert not isinstance(caught.value, CommunicationError)


def test_a_wrong_call_stays_what_it_is() -> None:
    """No verdict about other ranks hides it."""
    run_ranks(2, wrong)


def failing(rank: int, world: int, mine: list[BaseException | None]) -> tuple[str, str]:
    try:
        with all_or_none(axis_of(rank, world)):
            if (error := mine[rank]) is not None:
                raise error
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def test_what_failed_on_one_rank_fails_on_all_in_its_kind() -> None:
    """A launcher starts ranks again after a fault of one of them, and not after a mistake of the user's."""
    mistake, full = UserError("layout.tp = 3"), OSError(errno.ENOSPC, "full")
    assert run_ranks(2, failing, [None, mistake]) == [("UserError", "layout.tp = 3")] * 2
    said = run_ranks(2, failing, [None, KeyError("x")])
    assert said == [("CommunicationError", "rank 1: KeyError('x')"), ("KeyError", "'x'")]
    assert run_ranks(2, failing, [full, None])[1][0] == "BusyError"
    assert run_ranks(2, failing, [BusyError("in use"), None]) == [("BusyError", "in use")] * 2
    assert run_ranks(2, failing, [mistake, BusyError("in use")]) == [("UserError", "layout.tp = 3")] * 2


def test_an_error_is_told_even_if_the_others_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*_: object) -> None:
        raise CommunicationError("gone")

    monkeypatch.setattr(Axis, "all_reduce", gone)
    with pytest.raises(KeyError, match="first") as caught, all_or_none(axis_.ALONE):
        raise KeyError("first")
    assert isinstance(caught.value.__cause__, CommunicationError)
    with pytest.raises(CommunicationError, match="gone"), all_or_none(axis_.ALONE):
        pass


def test_the_documented_error_points_at_its_message() -> None:
    root = Path(__file__).parents[1]
    (line,) = re.findall(r"zero\.py:(\d+)", (root / "docs/messages.md").read_text())
    source = (root / "src/fivefold/parallel/zero.py").read_text().splitlines()
    assert "axis.start_all_gather(" in source[int(line) - 1]


RAW = re.compile(
    r"\bdist\.(all_reduce|all_gather|reduce_scatter|all_to_all|isend|irecv|broadcast|send|recv|barrier)"
)


def test_training_sends_nothing_past_an_axis() -> None:
    """launch/ makes and ends the process group; bench/ measures torch.distributed itself."""
    files = [f for f in FILES if room_of(name_of(f)) not in ("comm", "launch", "plan.bench")]
    found = [name_of(file) for file in files if RAW.search(file.read_text())]
    assert found == []
    imports = [
        f
        for f in files
        if re.search("^import torch.distributed|^from torch.distributed", f.read_text(), re.M)
    ]
    assert sorted(map(name_of, imports)) == [
        "fivefold/checkpoint/dcp/write.py",  # the classes of its metadata
        "fivefold/kernels/private.py",  # groups of replica groups
        "fivefold/parallel/mesh.py",  # new groups, and DeviceMesh
        "fivefold/parallel/offload/rows.py",  # FSDP2
        "fivefold/parallel/zero.py",  # FSDP2
        "fivefold_plan/forecast/run.py",  # whether there is a process group
        "fivefold_plan/trace/step.py",  # a process group that is not there
        "fivefold_plan/trace/traffic.py",  # whose group a message went over, that no axis sent
    ]
