"""CPU hosts like this machine, connected by a network: read from a file, priced inside and between them."""

import json
from pathlib import Path

import pytest

from fivefold.cli.main import main
from fivefold.errors import UserError
from fivefold.host import tables
from fivefold.recipe import load
from fivefold_plan.cluster import measured
from fivefold_plan.cluster.clusters import parse, topology
from fivefold_plan.cluster.devices import Cluster
from fivefold_plan.cluster.measured import assumed_table
from fivefold_plan.messages import communication
from fivefold_plan.messages.communication import Group, collective
from fivefold_plan.predict import predict

HOSTS = 'base = "local"\ndevices_per_node = 2\ninter_gb_s = 0.025\ninter_latency_us = 100\n'
SETS = ["train.sample_every=0", "model.vocab_size=4096", "train.microbatch_size=2", "precision.mode=fp32"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache with a made-up table of this machine."""
    monkeypatch.setenv("FIVEFOLD_CACHE", str(tmp_path))
    measured.save(assumed_table())
    return tmp_path


def hosts(folder: Path, more: str = "", count: str = "2x2") -> Cluster:
    file = folder / "my.toml"
    file.write_text(HOSTS + more)
    return parse(f"{file}:{count}")


def test_messages_inside_and_between_hosts(folder: Path) -> None:
    cluster = hosts(folder)
    assert (cluster.name, cluster.devices, cluster.per_node, cluster.nodes) == ("my", 4, 2, 2)
    inside, across, pair = Group(2, 2), Group(4, 2), Group(2, 1)
    size = 8e6
    assert collective("all_reduce", size, inside, cluster) == pytest.approx(1e-4 + size / 1e9)
    # gloo's ring in the order of hosts: each card carries 2 (n-1)/n S. Half of the longest way's 6 hops are far.
    ring = 3 * 1e-4 + 3 * 1e-4 + 1.5 * size / 25e6
    assert collective("all_reduce", size, across, cluster) == pytest.approx(ring, rel=1e-3)
    # two such groups share each card
    assert collective("all_reduce", size, pair, cluster) == pytest.approx(2e-4 + size / 12.5e6, rel=1e-3)
    # each rank sends two others, behind one card, a quarter
    assert communication.scatter_gradients(size, across, cluster) == pytest.approx(size / 25e6, rel=2e-3)
    assert communication.send(size, True, cluster) == pytest.approx(1e-4 + size / 12.5e6)
    many = hosts(folder, count="50x2")
    assert collective("all_reduce", size, Group(100, 2), many) == pytest.approx(
        2 * 99 * (1e-4 + size / 100 / 25e6), rel=0.01
    )
    assert communication.held(1.0, inside, cluster) == 0.75
    assert communication.held(1.0, across, cluster) == 0.0
    hierarchical = communication.sum_gradients(size, across, cluster, "hierarchical")
    assert hierarchical == pytest.approx(size / 25e6 + size / 1e9, rel=0.01)
    assert communication.sum_gradients(size, Group(64, 2), hosts(folder, count="32x2"), "hierarchical") == (
        pytest.approx(communication.sum_gradients(size, Group(100, 2), many, "hierarchical"), rel=0.1)
    )


def test_hosts_on_one_machine_share_its_cores(folder: Path) -> None:
    apart, together = hosts(folder), hosts(folder, "hosts_per_machine = 2\n")
    assert (apart.for_ranks(4).oversubscription, together.for_ranks(4).oversubscription) == (1, 2)
    assert apart.device.memory == 2 * together.device.memory
    recipe = load("quickstart", SETS, "dp=4")
    slow, fast = (predict(recipe, cluster).step for cluster in (together, apart))
    assert slow.compute > 1.5 * fast.compute


def test_layouts_that_stay_inside_a_host_are_faster(folder: Path) -> None:
    """A slow link. Through each card a ring sends 1.5 times as much as hierarchical sums, the default, and ZeRO-3 in
    all ranks three times as much as in those of a host."""
    layouts = ("dp=4", "dp=4,all_reduce=library", "dp_replicate=2,dp_shard=2,zero=3", "dp=4,zero=3")
    default, ring, hybrid, whole = (
        predict(load("quickstart", SETS, text), hosts(folder)).step.seconds for text in layouts
    )
    assert max(default, hybrid) < 0.85 * ring
    assert ring < whole


def test_commands_read_the_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hosts(folder)
    fit = {"alpha": 1e-5, "beta": 1e-9, "bus_alpha": 1e-6, "bus_beta": 1e-10, "gamma": 1e-10}
    tables.write(tables.collectives_key(), {"fit": {"2": fit}})
    found = {}
    for words in (
        ["plan", "quickstart", "--cluster", f"{folder / 'my.toml'}:2x2", "--layout", "dp=4", "--json"],
        ["collectives", "--ranks", "4", "--size", "10M", "--topology", str(folder / "my.toml"), "--json"],
    ):
        with pytest.raises(SystemExit) as exit_:
            main([*words, *(f"--set={setting}" for setting in SETS if words[0] == "plan")])
        assert not exit_.value.code
        found[words[0]] = json.loads(capsys.readouterr().out)
    assert found["plan"]["cluster"] == "my:4"
    times = {row["name"]: row["seconds"] for row in found["collectives"]["algorithms"]}
    size = 10 << 20  # a card carries S, and 1.5 S in a ring
    assert times["hierarchical"] == pytest.approx(size / 25e6 + size / 1e9, rel=0.01)
    assert times["ring"] == pytest.approx(1.5 * size / 25e6, rel=0.01)
    assert topology(str(folder / "my.toml"), 4).route(0, 2).links[2] == "bus 0"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('base = "local"\ndevices_per_node = 2', "inter_gb_s is missing: hosts like this machine need it"),
        (
            HOSTS + "intra_gb_s = 5",
            "intra_gb_s: the base is this machine, as it was measured (keys besides base:",
        ),
        (HOSTS + "torus = [2]", "torus: the base is this machine"),
        (HOSTS + "hosts_per_machine = 0.5", "hosts_per_machine: must be a whole number above 0"),
        ('base = "h100"\nhosts_per_machine = 2', 'hosts_per_machine: only with base = "local"'),
    ],
)
def test_errors(folder: Path, text: str, message: str) -> None:
    file = folder / "bad.toml"
    file.write_text(text)
    with pytest.raises(UserError) as error:
        parse(str(file))
    assert message in str(error.value)


def test_a_machine_alone_has_no_hosts(folder: Path) -> None:
    with pytest.raises(UserError, match="this machine is one node; write local:4"):
        parse("local:2x2")
