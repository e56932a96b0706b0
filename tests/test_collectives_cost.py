"""Costs of collectives: equal to the formulas of textbooks, on topologies whose links are shared."""

import math
from dataclasses import replace

import pytest
from message_order import renamed

from fivefold.errors import UserError
from fivefold.schedules.collectives import ALGORITHMS, PRIMITIVES, Wire, build, shape_of
from fivefold.schedules.collectives.cost import Topology, compare, line, simulate

A, B, G = 3e-6, 1 / 400e9, 1 / 2e12  # seconds, seconds per byte sent, seconds per byte added
S = 1e6


def flat(ranks: int) -> Topology:
    return Topology("flat", ranks, ranks, Wire(A, 1 / B), reduce_s=G)


def log2(n: int) -> int:
    return math.ceil(math.log2(n))


# All-reduce of S bytes on n equal ranks (Thakur et al. 2005; Chan et al. 2007; Rabenseifner 2004).
FORMULAS = {
    "ring": lambda n: 2 * (n - 1) * A + 2 * (n - 1) / n * S * B + (n - 1) / n * S * G,
    "reduce_broadcast": lambda n: 2 * (n - 1) * A + 2 * (n - 1) * S * B + (n - 1) * S * G,
    "tree": lambda n: 2 * log2(n) * (A + S * B) + log2(n) * S * G,
    "butterfly": lambda n: log2(n) * (A + S * B + S * G),
    "halving_doubling": lambda n: 2 * log2(n) * A + 2 * (n - 1) / n * S * B + (n - 1) / n * S * G,
    "rabenseifner": lambda n: 2 * log2(n) * A + 2 * (n - 1) / n * S * B + (n - 1) / n * S * G,
}


@pytest.mark.parametrize("name", list(FORMULAS))
@pytest.mark.parametrize("ranks", [2, 4, 8, 32])
def test_all_reduce_is_the_textbook_formula(name: str, ranks: int) -> None:
    cost = simulate(build("all_reduce", name, ranks), flat(ranks), S)
    assert cost.seconds == pytest.approx(FORMULAS[name](ranks), rel=1e-9)


@pytest.mark.parametrize("ranks", [3, 5, 6, 7, 12])
def test_formulas_that_hold_for_any_number_of_ranks(ranks: int) -> None:
    for name in ("ring", "reduce_broadcast"):
        cost = simulate(build("all_reduce", name, ranks), flat(ranks), S)
        assert cost.seconds == pytest.approx(FORMULAS[name](ranks), rel=1e-9)


@pytest.mark.parametrize("grid", [(4, 4), (2, 8), (3, 5)])
def test_torus_is_rings_along_rows_and_columns(grid: tuple[int, int]) -> None:
    a, b = grid
    cost = simulate(build("all_reduce", "torus_2d", shape_of(a * b, grid=grid)), flat(a * b), S)
    bytes_ = 2 * (b - 1) / b + 2 * (a - 1) / (a * b)
    assert cost.seconds == pytest.approx(2 * (a + b - 2) * A + bytes_ * S * (B + G / 2), rel=1e-9)


@pytest.mark.parametrize("sizes", [(2, 2, 2, 2, 2), (2, 2, 2, 2, 2, 2), (3, 2, 2, 4)])
def test_a_torus_of_any_number_of_dims(sizes: tuple[int, ...]) -> None:
    """On the links of such a torus: rings along each dim, with less and less data; every message goes over one link."""
    n = math.prod(sizes)
    torus = Topology("torus", n, n, Wire(A, 1 / B), torus=sizes, reduce_s=G)
    cost = simulate(build("all_reduce", "torus", torus.shape), torus, S)
    bytes_, left = 0.0, 1.0
    for size in reversed(sizes):
        bytes_, left = bytes_ + 2 * left * (size - 1) / size, left / size
    hops = 2 * sum(size - 1 for size in sizes)
    assert cost.seconds == pytest.approx(hops * A + bytes_ * S * (B + G / 2), rel=1e-9)
    assert cost.busiest.startswith("link ")


def test_leaders_and_whole_messages() -> None:
    """With k nodes the card of each carries 2 (k-1)/k S, as with hierarchical; but inside, every message is whole. A
    2-D mesh with two whole all-reduces sends 8/5 of what one sends with parts."""
    card = Topology("hosts", 8, 4, Wire(A, 1 / B), Wire(5 * A, 0.1 / B), cards=1)
    by = {
        name: simulate(build("all_reduce", name, card.shape), card, S) for name in ("leaders", "hierarchical")
    }
    assert by["leaders"].seconds == pytest.approx(
        2 * 2 * (A + S * B) + 2 * (5 * A + S / 2 * B / 0.1), rel=1e-9
    )
    assert {cost.link_bytes for cost in by.values()} == {S}
    grid = shape_of(16, grid=(4, 4))
    sent = {
        name: simulate(build("all_reduce", name, grid), flat(16), S).sent
        for name in ("mesh_2d", "mesh_2d_whole")
    }
    assert sent["mesh_2d_whole"] == pytest.approx(sent["mesh_2d"] * 8 / 5)


@pytest.mark.parametrize(
    ("primitive", "name", "formula"),
    [
        ("send", "direct", lambda n: A + S * B),
        ("broadcast", "binomial", lambda n: log2(n) * (A + S * B)),
        ("broadcast", "scatter_gather", lambda n: (log2(n) + n - 1) * A + 2 * (n - 1) / n * S * B),
        ("reduce", "binomial", lambda n: log2(n) * (A + S * (B + G))),
        ("scatter", "binomial", lambda n: log2(n) * A + (n - 1) / n * S * B),
        ("gather", "binomial", lambda n: log2(n) * A + (n - 1) / n * S * B),
        ("all_gather", "ring", lambda n: (n - 1) * (A + S / n * B)),
        ("all_gather", "keys_then_values", lambda n: 2 * (n - 1) * (A + S / n / 2 * B)),
        ("all_gather", "doubling", lambda n: log2(n) * A + (n - 1) / n * S * B),
        ("all_gather", "bruck", lambda n: log2(n) * A + (n - 1) / n * S * B),
        ("all_gather", "broadcasts", lambda n: n * log2(n) * (A + S / n * B)),
        ("reduce_scatter", "ring", lambda n: (n - 1) * (A + S / n * (B + G))),
        ("reduce_scatter", "halving", lambda n: log2(n) * A + (n - 1) / n * S * (B + G)),
        ("all_to_all", "direct", lambda n: (n - 1) * A + (n - 1) / n * S * B),
        ("all_to_all", "pairwise", lambda n: (n - 1) * (A + S / n * B)),
        ("all_to_all", "bruck", lambda n: log2(n) * (A + S / 2 * B)),
        ("barrier", "dissemination", lambda n: log2(n) * A),
        ("barrier", "tree", lambda n: 2 * log2(n) * A),
    ],
)
@pytest.mark.parametrize("ranks", [2, 8, 16])
def test_other_primitives(primitive: str, name: str, formula, ranks: int) -> None:
    cost = simulate(build(primitive, name, ranks), flat(ranks), S)
    if name == "broadcasts":  # the next root may begin before all others have finished
        assert log2(ranks) * A + (ranks - 1) / ranks * S * B <= cost.seconds <= formula(ranks)
    else:
        assert cost.seconds == pytest.approx(formula(ranks), rel=1e-9)


@pytest.mark.parametrize("pieces", [1, 4, 16])
def test_a_chain_is_a_pipeline(pieces: int) -> None:
    cost = simulate(build("broadcast", "chain", shape_of(8, pieces=pieces)), flat(8), S)
    # The last of 7 hops ends with the last piece. A rank sends the next piece while the last one's latency passes.
    assert cost.seconds == pytest.approx(7 * A + (pieces + 6) * S / pieces * B, rel=1e-9)


def test_double_tree_reaches_full_bandwidth_with_many_pieces() -> None:
    """2 S beta, as its paper promises, where the tree needs 2 log2 n S beta."""
    size = 1e12
    double = simulate(build("all_reduce", "double_tree", shape_of(16, pieces=64)), flat(16), size).seconds
    tree = simulate(build("all_reduce", "tree", 16), flat(16), size).seconds
    assert double < 1.35 * 2 * size * (B + G)
    assert tree > 3.9 * 2 * size * B


@pytest.mark.parametrize("nodes", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("local", [1, 2, 3, 4])
def test_lines_are_the_simulation(nodes: int, local: int) -> None:
    """Formulas for large groups are exact; where ranks fold, they may count a round that overlaps."""
    ranks = nodes * local
    topology = Topology("two levels", ranks, local, Wire(A, 1 / B), Wire(5 * A, 0.12 / B))
    seen = set()
    for primitive in PRIMITIVES if ranks > 1 else ():
        for name, made in ALGORITHMS[primitive].items():
            shape = topology.shape
            formula = made.line(shape, topology.levels) if made.line and made.fits(shape) else None
            if formula is None:
                continue
            found = line(build(primitive, name, shape), topology)
            fold = name in ("butterfly", "rabenseifner") and ranks & (ranks - 1)
            rel = 0.5 if fold else 1e-6
            assert found.alpha <= formula.alpha * (1 + 1e-9)
            assert found.alpha == pytest.approx(formula.alpha, rel=rel), f"{primitive} {name}"
            assert found.beta == pytest.approx(formula.beta, rel=1e-6), f"{primitive} {name}"
            for size in (1e3, 1e6):  # between its ends a line is an upper bound
                both = simulate(build(primitive, name, shape), topology, size).seconds
                assert both <= (formula.alpha + formula.beta * size) * (1 + 1e-9)
            seen.add(name)
    assert ranks == 1 or seen >= {"ring", "hierarchical", "direct"}


FAR = 25e6  # 200 Mbit/s


def hosts(nodes: int, local: int) -> Topology:
    return Topology("hosts", nodes * local, local, Wire(50e-6, 2e9), Wire(200e-6, FAR), cards=1)


def test_one_card_per_host_is_shared() -> None:
    """2 hosts of 2 ranks, 10 MB: hierarchical sends S through each card, the ring 1.5 S, alternating ranks 3 S."""
    size, topology = 10e6, hosts(2, 2)
    shape = topology.shape
    tree = simulate(build("all_reduce", "hierarchical", shape), topology, size)
    ring = simulate(build("all_reduce", "ring", shape_of(4)), topology, size)
    zigzag = simulate(renamed(build("all_reduce", "ring", 4), [0, 2, 1, 3]), topology, size)
    for cost, share in ((tree, 1.0), (ring, 1.5), (zigzag, 3.0)):
        assert cost.link_bytes == pytest.approx(share * size)
        assert cost.busiest.startswith("card ")
        assert cost.seconds > share * size / FAR
    assert ring.seconds / tree.seconds >= 1.35
    assert zigzag.seconds / tree.seconds >= 2.4


@pytest.mark.parametrize("over", [1, 2, 4])
def test_oversubscribed_spine(over: float) -> None:
    """All-to-all between 2 leaves of 4 nodes: everything for the other leaf goes over its links to the spine."""
    size, fast = 1e9, Wire(0.0, 1e12)
    topology = Topology("clos", 8, 1, fast, Wire(0.0, 10e9), leaf=4, oversubscription=over)
    cost = simulate(build("all_to_all", "direct", topology.shape), topology, size)
    spine = 4 * size * 4 / 8 / (4 * 10e9 / over)
    assert cost.seconds == pytest.approx(max(size * 7 / 8 / 10e9, spine))
    assert cost.busiest.startswith("leaf" if over > 1 else "card")


def test_nvlink_domains_and_pcie() -> None:
    """Pairs with NVLink bridges: the ring is as slow as PCIe; a message inside a pair is not."""
    topology = Topology("bridges", 4, 4, Wire(1e-6, 300e9), domain=2, pcie=Wire(2e-6, 30e9))
    assert topology.route(0, 1).links == ("rank 0 out", "rank 1 in")
    assert topology.route(1, 2).links == ("pcie 1 out", "pcie 2 in")
    ring = line(build("all_reduce", "ring", 4), topology)
    assert ring.beta == pytest.approx(1.5 / 30e9)


def test_ways_through_a_torus() -> None:
    torus = Topology("torus", 16, 16, Wire(1e-6, 50e9), torus=(4, 4))
    assert torus.route(0, 3).links == ("link 0 to 3",)
    assert torus.route(0, 6).links == ("link 0 to 4", "link 4 to 5", "link 5 to 6")
    assert torus.route(0, 6).latency == pytest.approx(3e-6)
    rows = line(build("all_reduce", "torus_2d", torus.shape), torus)
    assert rows.alpha == pytest.approx(12 * 1e-6)
    far_first = line(build("all_reduce", "halving_doubling", torus.shape), torus)
    assert far_first.beta > 1.5 * rows.beta  # far partners share the links between them
    choices, _ = compare("all_reduce", torus, 64e6)
    assert choices[0].algorithm.name in ("torus_2d", "ring")


def test_every_pair_its_own_wire() -> None:
    """A ring uses one of a device's 7 wires, an all-to-all uses all."""
    mesh = Topology("mesh", 8, 8, Wire(0.0, 7e9), pairs=True)
    assert line(build("all_gather", "ring", 8), mesh).beta == pytest.approx(7 / 8 / 1e9)
    assert line(build("all_to_all", "direct", 8), mesh).beta == pytest.approx(1 / 8 / 1e9)


def test_a_shared_bus() -> None:
    """Local processes share the machine's memory: n messages at once take n times as long."""
    bus = Topology("bus", 4, 4, Wire(10e-6, 1e12), bus=Wire(1e-6, 1e9))
    cost = simulate(build("all_gather", "ring", 4), bus, 4e6)
    assert cost.seconds == pytest.approx(3 * (10e-6 + 4 * (1e-6 + 1e6 / 1e9)))
    assert cost.busiest == "bus 0"


def test_small_messages_on_8_h100() -> None:
    """4 KB: butterfly 3 hops of 3.4 us, Rabenseifner 6, ring 14."""
    h100 = Topology("h100", 8, 8, Wire(3.4e-6, 367e9))
    choices, refused = compare("all_reduce", h100, 4096)
    us = {choice.algorithm.name: 1e6 * choice.cost.seconds for choice in choices}
    assert choices[0].algorithm.name == "butterfly"
    assert us["butterfly"] == pytest.approx(10.2, rel=0.01)
    assert us["rabenseifner"] == pytest.approx(20.4, rel=0.01)
    assert us["ring"] == pytest.approx(47.6, rel=0.01)
    assert refused == {"in_network": "needs a switch that adds"}
    large = compare("all_reduce", h100, 1e9)[0]
    assert large[0].cost.sent == pytest.approx(1.75e9)
    assert compare("all_reduce", replace(h100, ranks=7), 1e6)[1] == refused | {
        "torus_2d": "needs a product of two numbers, not 7",
        "mesh_2d": "needs a product of two numbers, not 7",
        "mesh_2d_whole": "needs a product of two numbers, not 7",
        "torus_3d": "needs a product of three numbers, not 7",
        "torus": "needs a product of two or more numbers, not 7",
    }


@pytest.mark.parametrize("size", [1e3, 1e9])
def test_in_network_sums(size: float) -> None:
    """A rank sends S and gets S, at once: the switch adds while data arrives. Its line is the simulation."""
    net = replace(flat(8), switch=Wire(5 * A, 0.9 / B))
    schedule = build("all_reduce", "in_network", 8)
    cost = simulate(schedule, net, size)
    assert cost.seconds == pytest.approx(5 * A + size * B / 0.9, rel=1e-9)
    assert cost.sent == pytest.approx(size)
    formula = ALGORITHMS["all_reduce"]["in_network"].line
    assert formula is not None
    assert formula(net.shape, flat(8).levels) is None
    assert formula(net.shape, net.levels) == pytest.approx(line(schedule, net), rel=1e-9)
    assert (compare("all_reduce", net, size)[0][0].algorithm.name == "in_network") == (size > 1e6)


def test_errors() -> None:
    with pytest.raises(UserError, match="16 ranks on nodes of 8 need a link between nodes, which is missing"):
        Topology("half", 16, 8, Wire(1e-6, 1e9))
    with pytest.raises(UserError, match="torus: 4x3 has 12 devices, but a node has 16"):
        Topology("torus", 16, 16, Wire(1e-6, 1e9), torus=(4, 3))
