"""`layout.all_reduce`: training with each algorithm of schedules/collectives beside one process, and its messages."""

import re
import threading
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from layouts import compared, side, tiny
from marks import only, slow
from pool_runs import ranks_of
from ranks import Pool, run_ranks
from steps import counted, planned, recipe_of, tracked

import fivefold.comm.axis as axis_
from fivefold.comm import Axis, Beside, Scheduled
from fivefold.comm.execute import agreed
from fivefold.errors import CommunicationError, UserError
from fivefold.host import tables
from fivefold.launch.ranks import Ranks
from fivefold.parallel.mesh import Mesh
from fivefold.recipe import change, load, resolve
from fivefold.recipe.rules.combinations import notes
from fivefold.schedules.collectives import ALGORITHMS, shape_of
from fivefold.schedules.collectives.collective import messages_of
from fivefold.schedules.collectives.registry import ALL_REDUCES, algorithm_problem, chosen, fastest, resolved
from fivefold.sharding.layout import Layout, on_node, summing_groups
from fivefold.sharding.layout import parse as parse_layout
from fivefold.train.verify import compute
from fivefold_plan.cluster.clusters import parse
from fivefold_plan.memory import memory
from fivefold_plan.messages import communication, volume
from fivefold_plan.messages.communication import Group
from fivefold_plan.predict import predict
from fivefold_plan.trace.step import trace

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def room(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("all_reduce")


def two_nodes(rank: int, world: int, recipe, steps: int, folder: Path) -> None:
    """As `layouts.side`, where each node has half of the ranks."""
    from fivefold.data import prepare

    data = prepare(recipe)
    recipe = resolve(recipe, vocab_size=data.vocab_size)
    half = world // 2
    compute(recipe, data, steps, folder, Ranks(rank, world, rank % half, half, CPU))


@only("dp=3,all_reduce=*", "dp_replicate=*")
@pytest.mark.parametrize(
    "layout",
    [
        "dp=3,all_reduce=ring",
        "dp=4,all_reduce=butterfly",
        "dp=4,all_reduce=rabenseifner",
        "dp=3,all_reduce=tree",
        "dp=4,all_reduce=hierarchical",
        "cp=2,dp=2,all_reduce=double_tree",
        "dp=4,ep=2,all_reduce=ring",
        "dp_replicate=2,dp_shard=2,zero=2,all_reduce=rabenseifner",
        "dp=2,all_reduce=auto",
        *slow(
            "dp=2,all_reduce=ring",
            "dp=4,all_reduce=halving_doubling",
            "pp=2,dp=2,schedule=zbv,virtual_stages=2,all_reduce=ring",
        ),
    ],
)
def test_training_is_that_of_one_process(room: Path, layout: str) -> None:
    recipe = tiny(room, layout, *(["train.global_batch_size=12"] if "dp=3" in layout else []))
    part = two_nodes if "hierarchical" in layout else side
    kind = ("moe" if "ep=" in layout else "dense") + ("12" if "dp=3" in layout else "")
    report = compared(recipe, part=part, folder=room / kind)
    assert report.passed, report


def sums(rank: int, world: int) -> dict[str, list[bytes]]:
    """Twice four sums that are all under way at once, of two sizes, and another axis' messages in between."""
    found: dict[str, list[bytes]] = {}
    for name in ALL_REDUCES[:-1]:
        if algorithm_problem("all_reduce", name, world):
            continue
        mesh = Mesh(Layout(dp_replicate=world, all_reduce=name), ranks_of(rank, world))
        summation, all_ = mesh.sums("batch"), mesh.axis("all")
        assert mesh.sums("batch") is summation, "one order of messages for all that sum over an axis"
        for _ in range(2):
            generators = [torch.Generator().manual_seed(10 * r) for r in range(world)]
            every = [[torch.randn(size, generator=g) for size in (1000, 37, 1000, 3)] for g in generators]
            mine = [x.clone() for x in every[rank]]
            started = [summation.start(x) for x in mine]
            other = torch.full((5,), float(rank))
            moves = all_.start_moves([(other, (rank + 1) % world)], [(torch.empty(5), (rank - 1) % world)])
            assert moves()[0] == (rank - 1) % world
            for x, wait, parts in zip(mine, started, zip(*every, strict=True), strict=True):
                assert wait() is x
                exact = torch.stack([part.double() for part in parts]).sum(0)
                torch.testing.assert_close(x.double(), exact, rtol=1e-5, atol=1e-6)
            found.setdefault(name, []).append(b"".join(x.numpy().tobytes() for x in mine))
    return found


@pytest.mark.parametrize("world", [3, 4])
def test_sums_under_way_at_once_have_the_same_bits_everywhere(world: int) -> None:
    every = run_ranks(world, sums)
    assert set(every[0]) >= {"library", "ring", "tree", "butterfly", "rabenseifner", "halving_doubling"}
    for name, (first, second) in every[0].items():
        assert first == second, f"{name}: other bits the second time"
        assert all(found[name] == [first, second] for found in every), f"{name}: other bits on another rank"


def beside(rank: int, world: int) -> tuple[bool, set[str]]:
    """Rank 1 comes late: on rank 0 the sum has begun, and the main thread goes on."""
    axis = Mesh(Layout(dp_replicate=world, all_reduce="ring"), ranks_of(rank, world)).sums("batch")
    gate, seen, x = (
        Mesh(Layout(dp_replicate=world), ranks_of(rank, world)).axis("all"),
        set[str](),
        torch.ones(8),
    )
    axis_.counters.append(lambda *_: seen.add(threading.current_thread().name))
    try:
        if rank == 1:
            gate.barrier()  # rank 0 comes here only if its sum does not hold it up
        wait = axis.start(x)
        if rank == 0:
            gate.barrier()
        return bool((wait() == world).all()), seen - {"MainThread"}
    finally:
        axis_.counters.clear()


def test_a_sum_is_under_way_while_its_rank_does_something_else() -> None:
    assert run_ranks(2, beside) == [(True, {"sums batch"})] * 2


def absent(rank: int, world: int) -> tuple[str, str] | None:
    group = dist.new_group(list(range(world)), timedelta(seconds=2))
    assert isinstance(group, dist.ProcessGroup)
    summation = Scheduled(Beside(Axis("batch", range(world), rank, CPU, group, 2)), "ring")
    if rank == 1:
        return None
    first = summation.start(torch.zeros(8))
    second = summation.start(torch.zeros(8))
    texts = []
    for wait in (second, first):
        with pytest.raises(CommunicationError) as caught:
            wait()
        texts.append(str(caught.value))
    return texts[0], texts[1]


def test_a_rank_that_does_not_come() -> None:
    """Whoever waits gets the verdict: where the sum began and where it is waited for. So do the sums behind it."""
    pool = Pool(2)
    try:
        found = pool.run(absent)[0]
    finally:
        pool.close()
    assert found is not None
    source = Path(__file__).read_text().splitlines()
    for text, began in zip(found, ("second", "first"), strict=True):
        assert text.startswith("rank 0: all_reduce by ring over axis batch (ranks 0, 1), at ")
        assert "timed out after 2 s: not all of these ranks took part" in text
        lines = [source[int(line) - 1].strip() for line in re.findall(r"test_all_reduce\.py:(\d+)", text)]
        assert lines == [f"{began} = summation.start(torch.zeros(8))", "wait()"]


@only("dp=2,all_reduce=butterfly-bf16", "dp=3,all_reduce=tree-fp32", "dp_replicate=*")
@pytest.mark.parametrize(
    ("layout", "reduce"),
    [
        ("dp=2,all_reduce=ring", "fp32"),
        ("dp=2,all_reduce=butterfly", "bf16"),
        ("dp=3,all_reduce=tree", "fp32"),
        ("dp=2,cp=2,all_reduce=rabenseifner", "fp32"),
        ("dp_replicate=2,dp_shard=2,zero=2,all_reduce=ring", "fp32"),
    ],
)
def test_messages_are_those_planned(room: Path, layout: str, reduce: str) -> None:
    more = ["train.global_batch_size=12"] if "dp=3" in layout else []
    recipe = tiny(room, layout, *more, f"precision.reduce={reduce}", mode="bf16")
    s = planned(recipe)
    for rank, step in enumerate(run_ranks(s.layout.ranks, counted, recipe, timeout_s=300)):
        assert any(what == "send" for what, _ in step.sent)
        assert volume.counted(s, rank) == step.sent, f"rank {rank} of {layout}"


def test_a_trace_sees_the_messages_and_the_scratch_of_a_real_rank() -> None:
    """The plan adds as much scratch as the trace finds."""
    how = ["layout.all_reduce=butterfly", "layout.all_reduce=library"]
    recipe, library = (recipe_of("llama", "fp32", "dp=2", "model.layers=2", one) for one in how)
    traced, s = trace(recipe, 0, 3), planned(recipe)
    assert traced.sent == volume.counted(s)
    assert traced.memory.total == run_ranks(2, tracked, recipe)[0].peak
    both = [memory.predict(replace(x, microbatches=3))[0] for x in (s, planned(library))]
    scratch = both[0].buffers - both[1].buffers
    assert scratch > 0
    assert traced.memory.total - trace(library, 0, 3).memory.total == scratch


def test_which_algorithm_sums_a_bucket(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("FIVEFOLD_CACHE", str(tmp_path))
    assert tables.best_all_reduce(2, "cpu") == {}, "not measured"
    assert chosen("auto", 2, 2, 1 << 20) is None, "the library's"
    seconds = {"1024": {"ring": 2e-4, "library": 1e-4}, "1048576": {"ring": 1e-3, "library": 2e-3}}
    tables.write(
        tables.collectives_key(),
        {
            "device": {"2": "cpu"},
            "best": {"2": {"1024": "library", "1048576": "ring"}},
            "seconds": {"2": seconds},
        },
    )
    best = tables.best_all_reduce(2, "cpu")
    assert tables.best_all_reduce(2, "cuda") == {}, "measured on another device"
    assert [resolved("auto", 2, 2, found, True) for found in (best, {}, {1024: "library"})] == [
        "auto", "library", "library",
    ]  # fmt: skip
    assert [fastest(best, size) for size in (1, 4096, 200_000, 1 << 30)] == [
        "library",
        "library",
        "ring",
        "ring",
    ]
    found = chosen("auto", 2, 2, 1 << 20, best)
    assert found is not None
    assert found.algorithm == "ring"
    assert chosen("ring", 1, 1, 100) is None
    assert tables.all_reduce_seconds(2, "ring") == [(1024, 2e-4), (1 << 20, 1e-3)]
    pipelined = chosen("reduce_broadcast", 4, 4, 8 << 20) or chosen("tree", 4, 4, 8 << 20)
    assert pipelined is not None
    assert sum(m.size for step in messages_of(found, 0, 1000).steps for m in step.sends) == 1000, (
        "2 (n-1)/n S"
    )


def tabled(rank: int, world: int) -> tuple[int, dict[int, str]]:
    axis = Mesh(Layout(dp_replicate=world), ranks_of(rank, world)).axis("all")
    local, best = agreed(2 + rank, {1024: "ring", 4096: "gone"} if rank == 0 else {2048: "tree"}, axis)
    return local, dict(best)


def by_table(rank: int, world: int) -> list[list[str]]:
    axis = Mesh(Layout(dp_replicate=world, all_reduce="auto"), ranks_of(rank, world)).sums("batch").axis
    tables_ = ({1024: "library", 1 << 20: "ring"}, {})
    found = [Scheduled(Beside(axis), "auto", world, best, open=True) for best in tables_]
    for summation in found:
        for size in (100, 1 << 18):
            x = torch.ones(size)
            summation.reserve(size, torch.float32)
            assert (summation.start(x)() == world).all()
    return [summation.notes() for summation in found]


def test_auto_goes_by_the_size_and_says_so() -> None:
    (measured, plain), *_ = run_ranks(2, by_table)
    assert measured == ['layout.all_reduce = "auto" over axis batch: 0.000381 MiB by library, 1 MiB by ring']
    assert plain == [], "the library's"


def across(rank: int, world: int, last: int = 2) -> list[str]:
    """On hosts of two ranks. last: of the ranks behind the first host."""
    on_host = 2 if rank < 2 else last
    summation = Mesh(Layout(dp_replicate=world), Ranks(rank, world, rank % on_host, on_host, CPU)).sums(
        "batch"
    )
    x = torch.ones(100)
    summation.reserve(len(x), x.dtype)
    assert (summation.start(x)() == world).all()
    return summation.notes()


def test_sums_across_hosts_are_hierarchical() -> None:
    """By default, where each has several ranks. On one host they are the library's, which says nothing."""
    assert run_ranks(4, across)[0] == [
        'layout.all_reduce = "auto" over axis batch: 0.000381 MiB by hierarchical'
    ]
    assert run_ranks(4, across, 1)[3] == run_ranks(4, across)[0], (
        "unequal hosts agree on what the first rank sees"
    )
    assert run_ranks(2, across)[0] == []
    assert resolved("auto", 4, 1, {}, True) == resolved("auto", 3, 2, {}, True) == "library"
    assert resolved("auto", 4, 2, {}, False) == "library", "NCCL does it itself"
    assert resolved("ring", 4, 2, {}, True) == "ring"


def test_all_ranks_go_by_the_table_of_the_first() -> None:
    assert run_ranks(2, tabled) == [(2, {1024: "ring"})] * 2


def test_impossible_numbers_are_refused_with_what_is_possible() -> None:
    text = r"needs a product of two numbers as its number of ranks, not 3; the nearest: 4; for 3 ranks: library, .*ring"
    with pytest.raises(UserError, match=text):
        load("quickstart", ["layout.all_reduce=torus_2d", "train.global_batch_size=12"], "dp=3")
    with pytest.raises(
        UserError, match=r"all_reduce = \"rng\": must be one of \"library\", .*did you mean 'ring'"
    ):
        load("quickstart", ["layout.all_reduce=rng"], "dp=2")
    load("quickstart", ["layout.all_reduce=torus_2d"], "dp=4")
    for name in ALL_REDUCES:
        for ranks in (2, 3, 4, 6):
            fits = name not in ALGORITHMS["all_reduce"] or ALGORITHMS["all_reduce"][name].fits(
                shape_of(ranks)
            )
            assert (algorithm_problem("all_reduce", name, ranks) is None) == fits


def uneven(rank: int, world: int) -> str:
    """Three ranks on nodes of two."""
    mesh = Mesh(Layout(dp_replicate=world, all_reduce="hierarchical"), Ranks(rank, world, rank, 2, CPU))
    with pytest.raises(UserError) as caught:
        mesh.sums("batch").reserve(8, torch.float32)
    return str(caught.value)


def test_nodes_that_an_algorithm_is_not_for() -> None:
    (text, *others) = run_ranks(3, uneven)
    assert text.startswith(
        "all_reduce 'hierarchical' needs a multiple of the ranks per node as its number of ranks (2)"
    )
    assert others == [text] * 2


@pytest.mark.parametrize(
    ("layout", "groups"),
    [
        ("dp=1", []), ("dp=4", ["batch"]), ("dp=2,cp=2", ["batch"]), ("dp=4,ep=2", ["batch", "edp"]),
        ("dp=4,ep=4", ["batch"]), ("dp=4,zero=2", []), ("dp_replicate=2,dp_shard=2,zero=3", ["replicate"]),
        ("dp_replicate=2,dp_shard=2,ep=2,zero=1", ["replicate", "edp"]), ("tp=2", []),
    ],
)  # fmt: skip
def test_groups_that_sum(layout: str, groups: list[str]) -> None:
    fields = parse_layout(layout)
    assert summing_groups(Layout(**fields)) == groups  # type: ignore[arg-type]
    recipe = load(
        "quickstart", ["layout.all_reduce=ring", *(["model.arch=moe"] if "ep" in fields else [])], layout
    )
    assert any("layout.all_reduce" in note for note in notes(recipe)) == (not groups)


def test_a_group_on_nodes() -> None:
    layout = Layout(dp_replicate=4, tp=2)
    assert [on_node(layout, "batch", node) for node in (1, 2, 4, 8, 16)] == [1, 1, 2, 4, 4]


def test_time_of_each_algorithm() -> None:
    """The library has NCCL's choice: no algorithm costs less. A butterfly sends all, every time."""
    cluster, group = parse("h100:8x2"), Group(16, 8)
    seconds = {name: communication.sum_gradients(1e8, group, cluster, name) for name in ALL_REDUCES}
    assert seconds["library"] == seconds["auto"] <= 1.000001 * min(seconds.values())
    assert seconds["ring"] < seconds["hierarchical"] < seconds["butterfly"]
    recipe = load("quickstart", ["train.global_batch_size=16"], "dp=4")
    plans = [
        predict(change(recipe, [f"layout.all_reduce={how}"]), parse("h100"))
        for how in ("library", "butterfly")
    ]
    assert plans[0].step.seconds < plans[1].step.seconds
