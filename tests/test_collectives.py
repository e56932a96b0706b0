"""Collectives as data: every algorithm proven for many numbers of ranks, its faults found, its pictures drawn."""

import math
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from message_order import group_halts, renamed

from fivefold.errors import UserError
from fivefold.observe.collective_picture import shares, to_svg, to_text
from fivefold.recipe import load, resolve
from fivefold.schedules.collectives import (
    ALGORITHMS,
    PRIMITIVES,
    Collective,
    Move,
    Primitive,
    build,
    prove,
    registry,
    shape_of,
)
from fivefold.schedules.collectives.collective import messages_of
from fivefold.schedules.collectives.families.rooted import parent
from fivefold_plan.cluster.clusters import parse
from fivefold_plan.messages.volume import counted
from fivefold_plan.predict import predict

EVERY = [(primitive, name) for primitive in PRIMITIVES for name in ALGORITHMS[primitive]]
ALL_REDUCES = [
    "reduce_broadcast", "ring", "tree", "double_tree", "halving_doubling", "butterfly", "rabenseifner",
    "hierarchical", "leaders", "in_network", "torus_2d", "mesh_2d", "mesh_2d_whole", "torus_3d", "torus",
]  # fmt: skip


def proven(collective: Collective) -> None:
    prove(collective)
    assert group_halts(collective) == []


def test_all_algorithms_are_there() -> None:
    assert set(ALGORITHMS["all_reduce"]) == set(ALL_REDUCES)
    assert all(ALGORITHMS[primitive] for primitive in PRIMITIVES)
    assert "broadcasts" in ALGORITHMS["all_gather"]


@pytest.mark.parametrize(("primitive", "name"), EVERY)
def test_every_algorithm_is_proven_for_1_to_17_ranks(primitive: Primitive, name: str) -> None:
    """Or refuses, naming a number that it is for."""
    made = ALGORITHMS[primitive][name]
    for ranks in range(1, 18):
        shape = shape_of(ranks, pieces=made.pieces[len(made.pieces) // 2], root=ranks // 2)
        if made.fits(shape):
            proven(build(primitive, name, shape))
            continue
        with pytest.raises(UserError, match=f"needs .* not {ranks}; the nearest: ") as caught:
            build(primitive, name, shape)
        for near in map(int, re.findall(r"\d+", str(caught.value).split("nearest: ")[1])):
            proven(build(primitive, name, near))


@pytest.mark.parametrize(("primitive", "name"), [(p, n) for p, n in EVERY if n in ("ring", "hierarchical")])
def test_the_moves_of_one_rank_alone(primitive: Primitive, name: str) -> None:
    """Are those that it has among all, with their bytes and places, for sizes that divide badly, too."""
    for ranks, local in ((1, 1), (2, 2), (3, 1), (7, 7), (9, 2), (12, 4)):
        shape = shape_of(ranks, local)
        if not ALGORITHMS[primitive][name].fits(shape):
            continue
        whole = build(primitive, name, shape)
        for rank in {0, ranks // 2, ranks - 1}:
            alone = build(primitive, name, shape, rank)
            assert alone.rows[rank] == whole.rows[rank]
            if not ALGORITHMS[primitive][name].alone:
                assert alone is whole
            elif ranks > 1:
                assert all(rank in move[:2] for moves in alone.rounds for move in moves)
                with pytest.raises(AssertionError, match="only rank"):
                    messages_of(alone, (rank + 1) % ranks, 8)
            for size in (0, 7 * ranks, 997 if primitive == "all_reduce" else 1000 * ranks):
                assert messages_of(alone, rank, size) == messages_of(whole, rank, size)


def test_a_plan_makes_the_moves_of_its_ranks_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ring of 1,024 ranks on nodes of 8 has 16.8 million."""
    made = list[Collective]()
    build.cache_clear()
    monkeypatch.setattr(registry, "Collective", lambda *facts: made.append(Collective(*facts)) or made[-1])
    fields = "dp_replicate=3,dp_shard=72,zero=3,all_reduce=ring,all_gather=ring,reduce_scatter=ring"
    recipe = resolve(load("quickstart", ["train.global_batch_size=216"], fields), vocab_size=96)
    counted(predict(recipe, parse("h100:216")).setting, rank=5)
    assert {one.primitive for one in made} == {"all_reduce", "all_gather", "reduce_scatter"}
    assert all(one.alone is not None for one in made)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(EVERY), st.data())
def test_every_algorithm_is_proven_for_any_shape(which: tuple[Primitive, str], data: st.DataObject) -> None:
    made = ALGORITHMS[which[0]][which[1]]
    nodes, local = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 6))
    ranks = nodes * local
    shape = shape_of(
        ranks,
        local,
        pieces=data.draw(st.sampled_from(made.pieces)),
        root=data.draw(st.integers(0, ranks - 1)),
    )
    if made.fits(shape):
        proven(build(*which, shape))


@pytest.mark.parametrize(
    "grid", [(2, 3), (4, 2), (3, 5), (2, 2, 3), (3, 2, 2), (2, 1, 3, 2), (3, 2, 2, 2, 2), (2, 2, 2, 2, 2, 2)]
)
def test_grids_of_other_forms(grid: tuple[int, ...]) -> None:
    """A torus takes sum(size - 1) rounds of sums and as many of copies, whatever its number of dims."""
    ranks = math.prod(grid)
    for name in {2: ("torus_2d", "mesh_2d", "mesh_2d_whole"), 3: ("torus_3d",)}.get(len(grid), ()):
        proven(build("all_reduce", name, shape_of(ranks, grid=grid)))
    torus = build("all_reduce", "torus", shape_of(ranks, grid=grid))
    proven(torus)
    assert len(torus.rounds) == 2 * sum(size - 1 for size in grid)
    for moves in torus.rounds:  # every message goes to a neighbour along one dim
        for move in moves:
            steps = [
                (b - a) % size
                for a, b, size in zip(place(move.source, grid), place(move.target, grid), grid, strict=True)
            ]
            assert sorted(steps)[:-1] == [0] * (len(grid) - 1), move
            assert max(steps) in (1, grid[steps.index(max(steps))] - 1), move
    with pytest.raises(UserError, match=r"grid: .* ranks, not 7"):
        shape_of(7, grid=grid)


def test_a_switch_adds() -> None:
    """A rank sends and gets everything once. The switch contributes nothing and has every sum in the end."""
    collective = build("all_reduce", "in_network", 5)
    last = prove(collective)[-1]
    assert (len(collective.rounds), collective.members, len(last)) == (2, 6, 6)
    assert {bits for row in last for bits, _ in row.values()} == {0b11111}
    for rank in range(5):
        moves = [move for moves in collective.rounds for move in moves if rank in move[:2]]
        assert {5 if move.source == rank else move.source for move in moves} == {5}
        assert sum(len(move.chunks) for move in moves) == 2 * collective.chunks
    text = to_text(build("all_reduce", "in_network", 2))
    assert (
        text.splitlines()[0]
        == "all_reduce 'in_network': 2 ranks, 1 chunks, 2 rounds; 2 is a switch that adds"
    )
    assert "round 1   0 +0→ 2   1 +0→ 2" in text
    with pytest.raises(UserError, match="rank 0 ends without rank 0's contribution"):
        prove(replace(collective, rounds=(collective.rounds[0][1:], *collective.rounds[1:])))


def place(rank: int, grid: tuple[int, ...]) -> list[int]:
    """Where a rank is, by dim."""
    found = []
    for size in reversed(grid):
        rank, at = divmod(rank, size)
        found.append(at)
    return found[::-1]


def test_only_leaders_send_between_nodes() -> None:
    """They have everything of their node by then; the others wait."""
    collective = build("all_reduce", "leaders", shape_of(12, 4))
    states = prove(collective)
    across = [
        (number, move)
        for number, moves in enumerate(collective.rounds)
        for move in moves
        if move.source // 4 != move.target // 4
    ]
    assert {rank for _, move in across for rank in move[:2]} == {0, 4, 8}
    first = min(number for number, _ in across)
    assert {states[first][rank][c][0] for rank in (0, 4, 8) for c in range(3)} == {0xF, 0xF0, 0xF00}
    assert all(len({m.target // 4, m.source // 4}) == 1 for moves in collective.rounds[-2:] for m in moves)


def test_whole_messages_go_along_rows_then_columns() -> None:
    """After the first half every row of a 3 x 4 mesh has its whole sum; then only columns send."""
    collective = build("all_reduce", "mesh_2d_whole", shape_of(12, grid=(3, 4)))
    states, half = prove(collective), 2 * (4 - 1)
    for rank, row in enumerate(states[half]):
        assert {bits for bits, _ in row.values()} == {0xF << rank // 4 * 4}, rank
    assert len(collective.rounds) == half + 2 * (3 - 1)
    for number, moves in enumerate(collective.rounds):
        assert all(abs(m.source - m.target) == (1 if number < half else 4) for m in moves)


@pytest.mark.parametrize("name", ["ring", "butterfly", "double_tree"])
def test_ranks_may_change_places(name: str) -> None:
    proven(renamed(build("all_reduce", name, 6), [3, 0, 4, 1, 5, 2]))


@pytest.mark.parametrize("ranks", [2, 5, 8, 13, 64])
def test_a_rank_with_two_children_in_one_tree_has_few_in_the_other(ranks: int) -> None:
    children = [sum(parent(r, ranks) == above for r in range(1, ranks)) for above in range(ranks)]
    other = [(r - 1) % ranks if ranks % 2 else ranks - 1 - r for r in range(ranks)]
    assert max(children) <= 2
    assert max(children[r] + children[other[r]] for r in range(ranks)) <= 3


def small(*rounds: list[Move], primitive: Primitive = "all_reduce", ranks: int = 2) -> Collective:
    return Collective(primitive, "own", ranks, 1, tuple(map(tuple, rounds)))


ALL = range(1)
BOTH = [Move(0, 1, ALL, True), Move(1, 0, ALL, True)]


@pytest.mark.parametrize(
    ("collective", "message"),
    [
        (small(BOTH[:1]), "rank 0 ends without rank 1's contribution to chunk 0"),
        (small(BOTH, BOTH), "round 2: rank 0 sends chunk 0 to rank 1, so that rank 1's contribution counts twice"),
        (small([Move(0, 1, range(1, 2), True)]), "sends chunk 1 to rank 1, but does not have it"),
        (small([Move(0, 2, ALL)]), "a move from rank 0 to rank 2 is not possible"),
        (small([Move(0, 1, ALL, True)], primitive="gather"), "has nothing to add it to"),
        (small([Move(0, 1, ALL), Move(1, 0, ALL, True)]), "sends its own away in the same round"),
        (small([Move(0, 2, ALL), Move(1, 2, ALL)], ranks=3), "which gets it twice"),
        (
            small([Move(a, b, ALL, True) for a in range(3) for b in range(3) if a != b], ranks=3),
            "rank 2 adds chunk 0 in another order",  # (c + a) + b, where the others have (a + b) + c
        ),
    ],
)  # fmt: skip
def test_faults_are_found(collective: Collective, message: str) -> None:
    if collective.primitive == "gather":
        collective = replace(collective, chunks=2)
    with pytest.raises(UserError, match=message):
        prove(collective)


def test_a_wrong_order_is_found() -> None:
    ring = build("all_reduce", "ring", 3)
    swapped = [row[:] for row in ring.rows]
    swapped[1][0], swapped[1][1] = swapped[1][1], swapped[1][0]
    with pytest.raises(AssertionError):
        group_halts(ring, swapped)
    # Each waits for the message of the one before it, once rank 0 wants to receive before it sends.
    around = Collective("all_reduce", "own", 3, 1, tuple((Move(r, (r + 1) % 3, ALL),) for r in range(3)))
    assert group_halts(around) == []
    assert group_halts(around, [around.rows[0][::-1], *around.rows[1:]]) == [(0, 0), (1, 0), (2, 0)]


@pytest.mark.parametrize(
    ("primitive", "name", "ranks", "message"),
    [
        ("all_reduce", "rnig", 4, "algorithm 'rnig' is unknown; did you mean 'ring'"),
        ("all_redcue", "ring", 4, "primitive: 'all_redcue' is unknown; did you mean 'all_reduce'"),
        ("all_reduce", "ring", 0, "ranks: 0 is not possible; must be at least 1"),
        ("all_reduce", "torus_2d", 7, "a product of two numbers as its number of ranks, not 7; the nearest: 6 or 8"),
        ("all_reduce", "torus_3d", 9, "a product of three numbers .* the nearest: 8 or 12"),
        ("reduce_scatter", "halving", 6, "a power of two .* the nearest: 4 or 8"),
    ],
)  # fmt: skip
def test_bad_input(primitive: str, name: str, ranks: int, message: str) -> None:
    with pytest.raises(UserError, match=message):
        build(primitive, name, ranks)


def test_incomplete_nodes() -> None:
    with pytest.raises(
        UserError, match=r"a multiple of the ranks per node .*\(4\), not 6; the nearest: 4 or 8"
    ):
        build("all_reduce", "hierarchical", shape_of(6, 4))


def test_text() -> None:
    text = to_text(build("all_reduce", "ring", 3))
    assert text.splitlines() == [
        "all_reduce 'ring': 3 ranks, 3 chunks, 4 rounds",
        "start     ▃▃▃  ▃▃▃  ▃▃▃",
        "round 1   2 +1→ 0   0 +2→ 1   1 +0→ 2",
        "          ▃▅▃  ▃▃▅  ▅▃▃",
        "round 2   2 +0→ 0   0 +1→ 1   1 +2→ 2",
        "          █▅▃  ▃█▅  ▅▃█",
        "round 3   0 =0→ 1   1 =1→ 2   2 =2→ 0",
        "          █▅█  ██▅  ▅██",
        "round 4   0 =2→ 1   1 =0→ 2   2 =1→ 0",
        "          ███  ███  ███",
    ]
    assert max(map(len, to_text(build("all_reduce", "ring", 32), 100).splitlines())) <= 100


@pytest.mark.parametrize(("primitive", "name"), EVERY)
def test_pictures(primitive: Primitive, name: str) -> None:
    """One arrow for each pair of ranks in a round; what ranks want is full in the end."""
    collective = build(primitive, name, 8)
    picture = ElementTree.fromstring(to_svg(collective))
    tips = [node for node in picture.iter() if "tip" in node.get("class", "")]
    assert len(tips) == sum(len({move[:2] for move in moves}) for moves in collective.rounds)
    last = shares(collective)[-1]
    for rank, cells in enumerate(last):
        if collective.wants(rank) == range(collective.chunks) or primitive == "all_to_all":
            assert set(cells) == {1.0}
