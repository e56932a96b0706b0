"""Clusters that the planner knows, and the price of collectives on them."""

from pathlib import Path

import pytest

from fivefold.errors import UserError
from fivefold.plan import communication
from fivefold.plan.clusters import PRESETS, of_gpu, parse
from fivefold.plan.topology import topology
from fivefold.schedules.collectives.cost import compare
from fivefold.spread.layout import Layout


@pytest.mark.parametrize("name", list(PRESETS))
def test_presets(name: str) -> None:
    cluster = parse(f"{name}:16384")
    assert (cluster.devices, cluster.per_node, cluster.nodes) == (16384, 8, 2048)
    assert 0.4 < cluster.device.matmul <= 1
    assert cluster.device.peak["bf16"] > 4 * cluster.device.peak["fp32"]
    assert cluster.intra.achieved > cluster.inter.achieved


def test_nodes_of_other_sizes() -> None:
    cluster = parse("H100:6x4")
    assert (cluster.devices, cluster.per_node, cluster.nodes) == (24, 4, 6)
    assert parse("a100").devices == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("h10:64", "did you mean 'h100'"),
        ("h100:0", "0 devices; at least 1"),
        ("h100:8x0", "0 devices"),
        ("h100:", "number of devices is missing"),
        ("h100:many", "'many' is not a number of devices"),
        ("h100:-4", "'-4' is not a number of devices"),
        ("nowhere.toml", "cannot be read"),
    ],
)
def test_errors(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse(text)


def test_own_cluster(tmp_path: Path) -> None:
    file = tmp_path / "lab.toml"
    file.write_text('base = "a100"\ndevices = 12\ndevices_per_node = 4\nmemory_gb = 40\ninter_gb_s = 12.5\n')
    cluster = parse(str(file))
    assert (cluster.name, cluster.devices, cluster.per_node) == ("lab", 12, 4)
    assert (cluster.device.memory, cluster.inter.bandwidth) == (40e9, 12.5e9)
    assert cluster.device.peak["bf16"] == 312e12
    assert parse(f"{file}:2x4").devices == 8


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("devices = 4", "base: must be a preset"),
        ('base = "a100"\nmemory = 3', "unknown key 'memory'; did you mean 'memory_gb'"),
        ('base = "a100"\ndevices = 0', "devices: must be a whole number above 0 and at most 1e"),
        ('base = "a100"\ndevices = 1.5', "whole number"),
        ('base = "a100"\nintra_share = 1.5', "at most 1"),
        ('base = "a100"\nmemory_gb = "big"', "must be a number above 0"),
        ("base = ", "not valid TOML"),
    ],
)
def test_own_cluster_errors(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "bad.toml"
    file.write_text(text)
    with pytest.raises(UserError, match=message):
        parse(str(file))


def test_groups_are_placed_as_ranks_are() -> None:
    layout, cluster = Layout(pp=2, dp_shard=4, tp=4, zero=1), parse("h100:32")
    sizes = {name: communication.group(layout, cluster, name) for name in ("tp", "shard", "pp", "batch")}
    assert (sizes["tp"].ranks, sizes["tp"].local, sizes["tp"].nodes) == (4, 4, 1)
    assert (sizes["shard"].ranks, sizes["shard"].local, sizes["shard"].nodes) == (4, 2, 2)
    assert (sizes["pp"].ranks, sizes["pp"].local, sizes["pp"].nodes) == (2, 1, 2)


# GB/s of bus bandwidth that NVIDIA's and others' tests measured (references in clusters.py); large messages.
MEASURED = [
    ("a100:8", 16 * 2**30, 234.9),
    ("h100:8", 16 * 2**30, 480.0),
    ("b200:8", 16 * 2**30, 845.7),
    ("a100:32", 16 * 2**30, 192),
    ("h100:32", 16 * 2**30, 370),
    ("mi300x:8", 4 * 2**30, 312.9),
    ("mi300x:2", 4 * 2**30, 47.7),
]


@pytest.mark.parametrize(("text", "size", "busbw"), MEASURED)
def test_all_reduce_as_measured(text: str, size: int, busbw: float) -> None:
    cluster = parse(text)
    ranks = communication.group(Layout(dp_replicate=cluster.devices), cluster, "batch")
    seconds = communication.all_reduce(size, ranks, cluster)
    n = cluster.devices
    assert 2 * (n - 1) / n * size / seconds / 1e9 == pytest.approx(busbw, rel=0.08)


# Microseconds of an all-reduce on 8 H200 (ml-engineering, network/README.md).
CURVE = {32 << 10: 39.8, 256 << 10: 39.1, 1 << 20: 46.0, 4 << 20: 68.5, 16 << 20: 133.5, 256 << 20: 1077.1}


@pytest.mark.parametrize("size", list(CURVE))
def test_all_reduce_of_any_size_as_measured(size: int) -> None:
    """Within 20%, from where latency counts to where bandwidth does."""
    seconds = communication.all_reduce(size, communication.Group(8, 8), parse("h200:8"))
    assert 1e6 * seconds == pytest.approx(CURVE[size], rel=0.2)


def test_small_messages_cost_what_the_best_algorithm_costs() -> None:
    """4 KB on 8 H100: 3 hops of a butterfly, not 14 of a ring; on 8 nodes 3 hops more."""
    cluster = parse("h100:64")
    small, launch = communication.all_reduce(4096, communication.Group(8, 8), cluster), communication.LAUNCH
    assert small - launch == pytest.approx(10.2e-6, rel=0.01)
    both = communication.all_reduce(4096, communication.Group(64, 8), cluster)
    assert both - launch == pytest.approx(10.2e-6 + 3 * 14e-6, rel=0.02)


SIMULATED = [("all_reduce", communication.all_reduce), ("all_gather", communication.all_gather),
             ("reduce_scatter", communication.reduce_scatter), ("all_to_all", communication.all_to_all)]  # fmt: skip


@pytest.mark.parametrize(("primitive", "price"), SIMULATED)
@pytest.mark.parametrize(
    ("text", "ranks"), [("a100:8", 8), ("a100:32", 32), ("a100:4x1", 4), ("mi300x:8", 8)]
)
def test_prices_are_those_of_the_simulator(primitive: str, price, text: str, ranks: int) -> None:
    """Among all algorithms none is cheaper; the planner knows the cheapest, or one about as good."""
    cluster = parse(text)
    members = communication.Group(ranks, min(ranks, cluster.per_node))
    for size in (4e3, 1e6, 1e9):
        simulated = compare(primitive, topology(text, ranks), size)[0][0].cost.seconds
        priced = price(size, members, cluster) - communication.LAUNCH
        if cluster.intra.mesh:  # the library's rings use all wires at once, ours one
            assert size < 1e9 or priced <= simulated * 1.02
        else:
            assert simulated <= priced * 1.0001 <= 1.15 * simulated


def test_collectives_of_one_rank_cost_nothing() -> None:
    alone, cluster = communication.Group(1, 1), parse("h100:8")
    for price in (communication.all_reduce, communication.all_gather, communication.all_to_all):
        assert price(1e9, alone, cluster) == 0


def test_an_all_reduce_is_a_scatter_and_a_gather() -> None:
    cluster = parse("a100:64")
    ranks = communication.Group(64, 8)
    both = communication.reduce_scatter(8e9, ranks, cluster) + communication.all_gather(8e9, ranks, cluster)
    assert communication.all_reduce(8e9, ranks, cluster) == pytest.approx(both, rel=0.01)


@pytest.mark.parametrize(
    ("name", "preset"),
    [("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA A100-SXM4-80GB", "a100"), ("AMD Instinct MI300X", "mi300x")],
)
def test_preset_of_a_gpu(name: str, preset: str) -> None:
    assert of_gpu(name) is PRESETS[preset]


@pytest.mark.parametrize(
    "name",
    ["NVIDIA H100 PCIe", "NVIDIA H100 NVL", "NVIDIA GB200", "NVIDIA L4", "NVIDIA A100 MIG 1g.10gb", "other"],
)
def test_other_gpus_get_no_other_figures(name: str) -> None:
    with pytest.raises(UserError, match=rf"no figures of {name} \(it has those of a100, h100"):
        of_gpu(name)


LINKS = "devices_per_node = 4\nintra_gb_s = 20\nintra_latency_us = 2\n"


def written(folder: Path, text: str) -> str:
    file = folder / "net.toml"
    file.write_text(text)
    return str(file)


def test_topology_of_a_file(tmp_path: Path) -> None:
    """Every key of a file's links arrives; a base has the links of its preset."""
    text = LINKS + (
        "inter_gb_s = 5\ninter_latency_us = 9\nnics_per_node = 2\nnvlink_domain = 2\n"
        "pcie_gb_s = 8\npcie_latency_us = 1\n"
        "nodes_per_leaf = 2\noversubscription = 3\n"
    )
    net = topology(written(tmp_path, text), 16)
    assert (net.ranks, net.local, net.cards, net.domain, net.leaf, net.oversubscription) == (
        16,
        4,
        2,
        2,
        2,
        3.0,
    )
    assert (net.near.bandwidth, net.far and net.far.bandwidth, net.pcie and net.pcie.bandwidth) == (
        20e9,
        5e9,
        8e9,
    )
    assert net.route(0, 12).links == (
        "pcie 0 out", "card 0.0 out", "leaf 0 up", "leaf 1 down", "card 3.0 in", "pcie 12 in"
    )  # fmt: skip
    assert net.bandwidth("leaf 0 up") == pytest.approx(2 * 2 * 5e9 / 3)
    grid = topology(written(tmp_path, LINKS + "torus = [2, 2]"), 4)
    assert grid.torus == (2, 2)
    assert grid.far is None
    based = topology(written(tmp_path, 'base = "a100"\nnics_per_node = 4'), 16)
    assert based.near.bandwidth == PRESETS["a100"].intra.achieved
    assert (based.far, based.cards) == ((14e-6, pytest.approx(24e9)), 4)
    assert topology("h100:4x4", 16).local == 4


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("intra_gb_s = 20\nintra_latency_us = 2", "devices_per_node is missing"),
        (LINKS.replace("intra_latency_us = 2\n", ""), "intra_latency_us is missing: give it, or a base"),
        (LINKS, "16 ranks on nodes of 4 need a link between nodes, which is missing: give inter_gb_s"),
        (LINKS + "inter_gb_s = 5", r"inter_latency_us is missing \(there is inter_gb_s\)"),
        (LINKS + "nics_per_node = 2", r"inter_gb_s is missing \(there is nics_per_node\)"),
        (LINKS + "oversubscription = 0.5", "oversubscription: must be a number of at least 1"),
        (LINKS + "torus = 4", "torus: must be a list of sizes"),
        (
            LINKS + "torus = [4, 4]\ninter_gb_s = 5\ninter_latency_us = 9",
            "4x4 has 16 devices, but a node has 4",
        ),
        (LINKS + "inter_gbs = 5", "unknown key 'inter_gbs'; did you mean 'inter_gb_s'"),
        (LINKS + "devices = 8", "16 ranks need as many devices, but it has 8"),
    ],
)
def test_topology_errors(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        topology(written(tmp_path, text), 16)


def test_shared_cards_slow_the_planner_down(tmp_path: Path) -> None:
    """Half the cards: half the bandwidth between nodes for everyone, if all send."""
    half = parse(written(tmp_path, 'base = "h100"\nnics_per_node = 4\ndevices = 64'))
    assert half.rail == parse("h100:64").rail / 2
    spine = parse(written(tmp_path, 'base = "h100"\nnodes_per_leaf = 4\noversubscription = 2\ndevices = 64'))
    assert spine.rail == parse("h100:64").rail / 2
    ranks = communication.Group(8, 1)
    full = communication.all_gather(8e9, ranks, parse("h100:64"))
    assert communication.all_gather(8e9, ranks, half) == pytest.approx(2 * full, rel=0.01)
