"""Clusters that the planner knows, and the price of collectives on them."""

import json
import re
from pathlib import Path

import pytest

from fivefold.cli.main import app
from fivefold.errors import UserError
from fivefold.host.devices import BY_NAME, PCIE
from fivefold.precision import DTYPES
from fivefold.recipe import load
from fivefold.schedules.collectives import Primitive, build
from fivefold.schedules.collectives.cost import compare, simulate
from fivefold.sharding.layout import Layout
from fivefold_plan.cluster import measured
from fivefold_plan.cluster.clusters import PRESETS, of_gpu, parse, topology
from fivefold_plan.cluster.devices import Storage
from fivefold_plan.cluster.measured import assumed_table
from fivefold_plan.messages import communication
from fivefold_plan.messages.communication import collective
from fivefold_plan.predict import predict
from fivefold_plan.setting import mode_of


@pytest.mark.parametrize("name", list(PRESETS))
def test_presets(name: str) -> None:
    per_node = {"gb200": 72, "gh200": 4, "tpu-v4": 4, "tpu-v5p": 4}.get(name, 8)
    cluster = parse(f"{name}:{128 * per_node}")
    device, sheet = cluster.device, BY_NAME[name]
    assert (cluster.per_node, cluster.nodes) == (per_node, 128)
    assert 0.4 < device.matmul <= 1
    assert cluster.intra.achieved >= cluster.inter.achieved * (cluster.wiring.cards or per_node) / per_node
    assert {dtype: device.peak.get(dtype) for dtype in DTYPES} == {d: sheet.rate(d) for d in DTYPES}


def test_every_sheet_is_a_cluster() -> None:
    assert PRESETS.keys() == BY_NAME.keys()


# Of each maker's data sheet, in its units: GB, GB/s, dense TFLOP/s, GB/s both ways of links and of 16 lanes of PCIe, as
# makers round them (32 in generation 3, doubled by each next one).
SHEETS = {
    "p100": (16, 732, {"fp32": 10.6, "fp16": 21.2, "bf16": None}, 160, 32),
    "v100": (32, 900, {"fp32": 15.7, "fp16": 125, "bf16": None, "fp8": None}, 300, 32),
    "t4": (16, 320, {"fp64": 8.1 / 32, "fp32": 8.1, "fp16": 65, "bf16": None}, 0, 32),
    "a100-40gb": (40, 1555, {"fp32": 19.5, "tf32": 156, "bf16": 312, "fp8": None}, 600, 64),
    "a100": (80, 2039, {"fp32": 19.5, "tf32": 156, "bf16": 312, "fp8": None}, 600, 64),
    "a800": (80, 2039, {"bf16": 312}, 400, 64),
    "h100": (80, 3350, {"tf32": 989 / 2, "bf16": 1979 / 2, "fp8": 3958 / 2, "fp4": None}, 900, 128),
    "h100-pcie": (80, 2000, {"bf16": 1513 / 2, "fp8": 3026 / 2}, 600, 128),
    "h800": (80, 3350, {"bf16": 1979 / 2, "fp64": 1}, 400, 128),
    "h200": (141, 4800, {"bf16": 1979 / 2, "fp8": 3958 / 2}, 900, 128),
    "gh200": (96, 4000, {"tf32": 989 / 2, "bf16": 1979 / 2, "fp8": 3958 / 2, "fp64": 67}, 900, 128),
    "b200": (180, 8000, {"tf32": 2200 / 2, "bf16": 4500 / 2, "fp8": 9000 / 2, "fp4": 18000 / 2}, 1800, 128),
    "b300": (270, 8000, {"bf16": 4500 / 2, "fp8": 9000 / 2, "fp4": 108000 / 8}, 1800, 256),
    "gb200": (186, 8000, {"bf16": 5000 / 2, "fp8": 10000 / 2, "fp4": 20000 / 2}, 1800, 128),
    "mi250x": (64, 1600, {"bf16": 383 / 2, "fp32": 95.7 / 2, "tf32": None}, 400, 64),
    "mi300x": (192, 5300, {"bf16": 1307.4, "fp8": 2614.9, "fp4": None}, 896, 128),
    "tpu-v4": (32, 1200, {"bf16": 275, "fp32": None, "fp16": None}, 600, 32),
    "tpu-v5p": (95, 2765, {"bf16": 459, "fp32": None, "fp16": None}, 1200, 32),
    "rtx4090": (24, 1008, {"fp64": 82.6 / 64, "fp32": 82.6, "bf16": 165.2, "fp8": 330.3}, 0, 64),
}


@pytest.mark.parametrize("name", SHEETS)
def test_sheets_are_the_makers(name: str) -> None:
    """Memory counts as the maker does: most say GB of 2^30 bytes."""
    memory, bandwidth, rates, links, pcie = SHEETS[name]
    sheet = BY_NAME[name]
    assert memory in (pytest.approx(sheet.memory / 1e9), pytest.approx(sheet.memory / 2**30))
    assert (sheet.bandwidth / 1e9, 2 * sheet.link / 1e9) == pytest.approx((bandwidth, links))
    assert 0.94 * pcie <= 2 * PCIE[sheet.pcie] / 1e9 < pcie, "what its encoding leaves"
    for dtype, rate in rates.items():
        assert sheet.rate(dtype) == (rate and pytest.approx(rate * 1e12, rel=0.03)), dtype
    assert sheet.source.startswith(sheet.maker)
    assert abs(int(sheet.generation[-5:-1]) - sheet.year) <= 2


def test_a_format_that_a_device_lacks_is_named() -> None:
    """`auto` is fp32 on a V100, as in training. TPUs have a rate of bf16 only."""
    recipe = ["model.layers=2", "train.microbatch_size=1"]
    message = "bf16: v100 has no rate of bf16 .* the planner prices fp32, fp16 on v100$"
    with pytest.raises(UserError, match=message):
        predict(load("llama2-7b", recipe), parse("v100:64"))
    auto = predict(load("llama2-7b", [*recipe, "precision.mode=auto"]), parse("v100:64"))
    assert auto.setting.mode == "fp32"
    assert mode_of("tf32", parse("a100")) == "tf32"
    with pytest.raises(UserError, match="tf32: t4 has no rate of tf32"):
        mode_of("tf32", parse("t4"))
    assert mode_of("auto", parse("tpu-v4")) == "bf16"


def test_every_named_device_can_be_planned_for() -> None:
    for name, cluster in PRESETS.items():
        recipe = load("gpt2-124m", ["train.microbatch_size=1", "model.dropout=0.1"], f"dp={cluster.per_node}")
        plan = predict(recipe, parse(name))
        assert 0 < plan.step.seconds < 3600, name
        assert plan.mfu < cluster.device.matmul, name


@pytest.mark.parametrize(
    ("text", "devices", "per_node"),
    [("64xV100", 64, 8), ("v100x64", 64, 8), ("H100 SXM:16", 16, 8), ("mi300x:8", 8, 8), ("8xmi300x", 8, 8),
     ("MI300Xx16", 16, 8), ("8x4xh100", 32, 4), ("h100x8x4", 32, 4), ("GB200-NVL72:144", 144, 72), ("gh200:8x1", 8, 1)],
)  # fmt: skip
def test_short_forms(text: str, devices: int, per_node: int) -> None:
    cluster = parse(text)
    assert (cluster.devices, cluster.per_node) == (devices, per_node)


def test_clusters_are_listed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Each device and cluster in text and JSON; one by name with all its links."""
    run("clusters")
    text = capsys.readouterr().out
    assert all(text.count(f"\n  {name} ") == 2 for name in PRESETS)
    assert re.search(r"\n  h100  .* 450 +5\.0 +63\n", text)
    assert re.search(r"\n  mi250x  .* 200 +4\.0 +36\n", text), "its host is linked by more than PCIe"
    assert "\n  mi250x: one of the 2 dies of a package" in text
    run("clusters", "--json")
    found = json.loads(capsys.readouterr().out)
    assert [one["name"] for one in found["devices"]] == list(BY_NAME)
    assert {one["name"] for one in found["clusters"]} == set(PRESETS)
    v100 = next(one for one in found["devices"] if one["name"] == "v100")
    assert (v100["flops"]["bf16"], v100["flops"]["fp16"], v100["year"]) == (None, 125e12, 2017)

    run("clusters", "b200:16", "--json")
    b200 = json.loads(capsys.readouterr().out)
    links = {row["link"]: row for row in b200["links"]}
    assert b200["devices"] == 16
    assert links["NVLink"]["each_way"] == 900e9  # 1.8 TB/s both ways
    assert links["PCIe 5.0 x16"]["each_way"] == 63e9
    assert links["network (RDMA)"]["each_way"] == 50e9  # 400 Gb/s
    assert {"memory", "host memory", "disk, reading", "disk, writing"} < links.keys()
    assert all(row["reached"] is None or row["reached"] <= row["each_way"] for row in b200["links"])

    run("clusters", "b300")
    text = capsys.readouterr().out
    assert "assumed, not measured: matmul, attention, ring" in text
    assert re.search(r"NVLink +900 +1,800 +675 +3.4 us", text)
    assert "400 Gb/s" not in text
    assert "800 Gb/s, 8 cards per node" in text

    (tmp_path / "t4.toml").write_text(
        'base = "t4"\nmatmul_share = 0.6\nfp16_tflops = 60\ninter_gb_s = 5\nnodes_per_leaf = 4\n'
        "oversubscription = 3\n"
    )
    run("clusters", str(tmp_path / "t4.toml"))
    text = capsys.readouterr().out
    assert "assumed, not measured: attention, ring" in text
    assert "fp16 60\n" in text, "of the file, not of the sheet"
    assert "40 Gb/s, 1 card per node, 4 nodes per leaf switch, oversubscribed 3 times" in text


def test_this_machine_is_a_cluster(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(measured, "load", lambda: assumed_table(cores=4))
    run("clusters", "local:2")
    text = capsys.readouterr().out
    assert "2 devices" in text
    assert "as measured" in text
    assert "host memory" not in text, "it is the device's"
    assert re.search(r"disk, writing +[\d.]+", text)


def run(*arguments: str) -> None:
    app(list(arguments), standalone_mode=False)


def test_nodes_of_other_sizes() -> None:
    cluster = parse("H100:6x4")
    assert (cluster.devices, cluster.per_node, cluster.nodes) == (24, 4, 6)
    assert parse("a100").devices == 0


def test_boards_of_four_have_no_switch(tmp_path) -> None:
    """Half of a node of eight says what its switch adds."""
    link = PRESETS["h100"].intra
    four, file = parse("h100:2x4"), 'base = "h100"\ndevices_per_node = 4\n'
    assert (four.intra.mesh, four.intra.reduce) == (True, None)
    for ranks, slower in ((2, 3), (3, 1.5), (4, 1)):
        members = communication.Group(ranks, ranks)
        switched, paired = (collective("all_gather", 1e9, members, one) for one in (parse("h100:8"), four))
        assert paired == pytest.approx(slower * switched, rel=0.05), ranks
    assert parse(str(written(tmp_path, file))).intra == four.intra
    half = parse(f"{written(tmp_path, file + 'switch_gb_s = 300')}:2x4").intra
    assert (half.mesh, half.reduce) == (False, 300e9)
    assert parse("h100:4x2").intra == link
    assert parse("h100:2x8").intra == link


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
    assert cluster.storage == Storage(2e9, 2e9, 2e9)
    file.write_text('base = "a100"\ndisk_read_gb_s = 1\ndisk_write_gb_s = 3\ndisk_both_gb_s = 1.5\n')
    assert parse(str(file)).storage == Storage(read=1e9, write=3e9, both=1.5e9)
    file.write_text('base = "a100"\nmemory_margin_percent = 3\n')
    assert parse(str(file)).device.margin == pytest.approx(0.03)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("devices = 4", "base: must be a preset"),
        ('base = "a100"\nmemory = 3', "unknown key 'memory'; did you mean 'memory_gb'"),
        ('base = "a100"\ndevices = 0', "devices: must be a whole number above 0 and at most 1e"),
        ('base = "a100"\ndevices = 1.5', "whole number"),
        ('base = "a100"\nintra_share = 1.5', "at most 1"),
        ('base = "a100"\nmemory_margin_percent = 100', "of at least 0 and at most 99, not 100"),
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


# GB/s of bus bandwidth that NVIDIA's and others' tests measured (references in clusters.toml); large messages.
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
    seconds = collective("all_reduce", size, ranks, cluster)
    n = cluster.devices
    assert 2 * (n - 1) / n * size / seconds / 1e9 == pytest.approx(busbw, rel=0.08)


# Microseconds of an all-reduce on 8 H200 (ml-engineering, network/README.md).
CURVE = {32 << 10: 39.8, 256 << 10: 39.1, 1 << 20: 46.0, 4 << 20: 68.5, 16 << 20: 133.5, 256 << 20: 1077.1}


@pytest.mark.parametrize("size", list(CURVE))
def test_all_reduce_of_any_size_as_measured(size: int) -> None:
    """Within 20%, from where latency counts to where bandwidth does."""
    seconds = collective("all_reduce", size, communication.Group(8, 8), parse("h200:8"))
    assert 1e6 * seconds == pytest.approx(CURVE[size], rel=0.2)


def test_small_messages_cost_what_the_best_algorithm_costs() -> None:
    """4 KB on 8 H100: 3 hops of a butterfly, not 14 of a ring; on 8 nodes 3 hops more."""
    cluster = parse("h100:64")
    small = collective("all_reduce", 4096, communication.Group(8, 8), cluster)
    launch = communication.LAUNCH
    assert small - launch == pytest.approx(10.2e-6, rel=0.01)
    both = collective("all_reduce", 4096, communication.Group(64, 8), cluster)
    assert both - launch == pytest.approx(10.2e-6 + 3 * 14e-6, rel=0.02)


@pytest.mark.parametrize("primitive", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all"])
@pytest.mark.parametrize(
    ("text", "ranks"), [("a100:8", 8), ("a100:32", 32), ("a100:4x1", 4), ("mi300x:8", 8)]
)
def test_prices_are_those_of_the_simulator(primitive: Primitive, text: str, ranks: int) -> None:
    """Among all algorithms none is cheaper; the planner knows the cheapest, or one about as good."""
    cluster = parse(text)
    members = communication.Group(ranks, min(ranks, cluster.per_node))
    for size in (4e3, 1e6, 1e9):
        simulated = compare(primitive, topology(text, ranks), size)[0][0].cost.seconds
        priced = collective(primitive, size, members, cluster) - communication.LAUNCH
        if cluster.intra.mesh:  # the library's rings use all wires at once, ours one
            assert size < 1e9 or priced <= simulated * 1.02
        else:
            assert simulated <= priced * 1.0001 <= 1.15 * simulated


def test_the_planner_prices_switches_that_add(tmp_path: Path) -> None:
    """NVLink's, over whole nodes: the plan takes the line of the schedule that the simulator runs."""
    cluster = parse("h100:8")
    net = topology("h100:8", 8)
    choices, _ = compare("all_reduce", net, 1e9)
    assert choices[0].algorithm.name == "in_network"
    price = collective("all_reduce", 1e9, communication.Group(8, 8), cluster) - communication.LAUNCH
    assert price == pytest.approx(choices[0].cost.seconds, rel=1e-6)
    assert 2 * 7 / 8 * 1e9 / price == pytest.approx(480e9, rel=0.01)
    assert topology("h100:8", 4).switch is topology("a100:8", 8).switch is None
    half = collective("all_reduce", 1e9, communication.Group(4, 4), cluster) - communication.LAUNCH
    rings = compare("all_reduce", topology("h100:8", 4), 1e9)[0][0].cost.seconds
    assert half == pytest.approx(rings, rel=0.01)
    own = topology(written(tmp_path, LINKS + "switch_gb_s = 350"), 4)
    sums = simulate(build("all_reduce", "in_network", 4), own, 1e9).seconds
    assert 2 * 3 / 4 * 1e9 / sums == pytest.approx(350e9, rel=0.01)
    assert topology(written(tmp_path, LINKS), 4).switch is None


def test_collectives_of_one_rank_cost_nothing() -> None:
    alone, cluster = communication.Group(1, 1), parse("h100:8")
    for what in ("all_reduce", "all_gather", "all_to_all"):
        assert collective(what, 1e9, alone, cluster) == 0


def test_an_all_reduce_is_a_scatter_and_a_gather() -> None:
    cluster = parse("a100:64")
    ranks = communication.Group(64, 8)
    both = collective("reduce_scatter", 8e9, ranks, cluster) + collective("all_gather", 8e9, ranks, cluster)
    assert collective("all_reduce", 8e9, ranks, cluster) == pytest.approx(both, rel=0.01)


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA H100 PCIe", "h100-pcie"), ("NVIDIA H100 NVL", "h100-nvl"),
        ("NVIDIA H200", "h200"), ("NVIDIA H200 NVL", "h200-nvl"), ("NVIDIA GB200", "gb200"),
        ("NVIDIA GH200 480GB", "gh200"),
        ("NVIDIA B300 SXM6", "b300"),
        ("NVIDIA A100-SXM4-80GB", "a100"), ("NVIDIA A100-SXM4-40GB", "a100-40gb"), ("NVIDIA A800-SXM4-80GB", "a800"),
        ("NVIDIA H800", "h800"), ("Tesla V100-SXM2-32GB", "v100"), ("Tesla P100-SXM2-16GB", "p100"), ("Tesla T4", "t4"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"), ("NVIDIA L4", "l4"), ("AMD Instinct MI300X", "mi300x"),
        ("AMD Instinct MI250X", "mi250x"),
    ],
)  # fmt: skip
def test_preset_of_a_gpu(name: str, preset: str) -> None:
    assert of_gpu(name) is PRESETS[preset]


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA A100 MIG 1g.10gb",
        "NVIDIA GB300",
        "NVIDIA GH200 144G HBM3e",
        "NVIDIA L40",
        "NVIDIA GeForce RTX 4090 D",
        "other",
    ],
)
def test_other_gpus_get_no_other_figures(name: str) -> None:
    with pytest.raises(UserError, match=rf"no figures of {name} \(it has those of p100, v100"):
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
    full = collective("all_gather", 8e9, ranks, parse("h100:64"))
    assert collective("all_gather", 8e9, ranks, half) == pytest.approx(2 * full, rel=0.01)
