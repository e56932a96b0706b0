"""Clusters that the planner knows, and the price of collectives on them."""

from pathlib import Path

import pytest

from fivefold.errors import UserError
from fivefold.plan import communication
from fivefold.plan.clusters import PRESETS, of_gpu, parse
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
