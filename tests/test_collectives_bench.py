"""`fivefold bench collectives`: the fit, and a small measurement whose table is saved and used."""

import json
import subprocess
import sys
from pathlib import Path

import host_links
import host_messages
import pytest
from host_links import HostLinks

from fivefold.cli.main import main
from fivefold.schedules.collectives import Collective, Move, Wire, build, shape_of
from fivefold.schedules.collectives.cost import simulate
from fivefold_plan.bench.collectives import fastest, fitted
from fivefold_plan.cluster.clusters import of_fit


def points(alpha: float, beta: float) -> list[list[float]]:
    return [[size, alpha + beta * size] for size in (1e3, 1e5, 1e6, 4e6)]


@pytest.mark.parametrize(("alpha", "bus_alpha"), [(30e-6, 0.0), (20e-6, 10e-6)])
@pytest.mark.parametrize("shared", [1.0, 4.0])
def test_the_fit_finds_what_messages_cost(alpha: float, bus_alpha: float, shared: float) -> None:
    """And the simulation with it gives the messages back. shared: how much slower 4 messages at once are than one."""
    beta = 1 / 2e9
    pair, ring = points(alpha + bus_alpha, beta), points(alpha + 4 * bus_alpha, shared * beta)
    fit = fitted({"pair": pair, "ring": ring, "gamma": 0.0}, 4)
    assert fit["alpha"] == pytest.approx(alpha)
    assert fit["bus_alpha"] == pytest.approx(bus_alpha, abs=1e-12)
    assert fit["beta"] == pytest.approx(beta)
    assert fit["bus_beta"] == pytest.approx(shared * beta / 4)
    topology = of_fit(fit, 4)
    turn = simulate(build("all_gather", "ring", 4), topology, 4e6).seconds / 3
    assert turn == pytest.approx(alpha + max(shared * beta * 1e6 + 4 * bus_alpha, beta * 1e6), rel=0.02)


def test_the_fit_of_hosts_gives_their_messages_back() -> None:
    """Two hosts of 2 ranks on one machine, whose cards send 12 KB at once after a pause, and get acknowledgements."""
    beta, burst, acks, bus, far_bus = 1 / 24e6, 12e3, 0.04, 10e-6, 30e-6

    def far(size: float, back: float) -> list[float]:
        return [size, 1e-4 + far_bus + max(0.0, (1 + back) * size - burst) * beta]

    found = {
        "pair": points(20e-6 + bus, 1e-9),
        "ring": points(20e-6 + 4 * bus, 4e-9),
        "far": [far(size, 0.0) for size in (1e3, 1e6, 4e6)],
        "far both": [far(size, acks) for size in (1e3, 1e6, 4e6)],
        "far all": [[1e3, 1e-4 + 4 * far_bus]],
        "queue": 3e-3,
        "gamma": 1e-10,
    }
    fit = host_messages.fitted(found, local=2, machine=4)
    assert fit == pytest.approx(
        {"alpha": 20e-6, "beta": 1e-9, "bus_alpha": bus, "bus_beta": 1e-9, "gamma": 1e-10}
        | {
            "far_alpha": 1e-4,
            "far_beta": beta,
            "far_bus": far_bus,
            "burst": burst,
            "acks": acks,
            "queue": 3e-3,
        }
    )
    single = {name: points for name, points in found.items() if name not in ("pair", "ring")}
    assert host_messages.fitted(single, local=1, machine=2)["far_beta"] == pytest.approx(beta), (
        "a rank on each host"
    )
    topology = host_links.links_of(fit, 4, local=2, hosts=2)
    assert {topology.route(0, 1).links[1], topology.route(3, 2).links[1]} == {"bus 0"}
    for size in (1e3, 1e6):
        swap = Collective("all_reduce", "", 4, 1, ((Move(0, 2, range(1), True), Move(2, 0, range(1), True)),))
        one = Collective("all_reduce", "", 4, 1, ((Move(0, 2, range(1), True),),))
        for collective, back, more in ((one, 0.0, 0.0), (swap, acks, far_bus)):
            expected = far(size, back)[1] + 1e-10 * size + more
            assert host_links.simulate(collective, topology, size).seconds == pytest.approx(
                expected, rel=0.02
            )


def test_a_request_waits_behind_what_other_ranks_send() -> None:
    """A rank asks for its data through its own host's card. Two messages on one card use each other's waits."""
    net = HostLinks("two", 4, 2, Wire(0.0, 1e12), Wire(0.0, 1e6), cards=1, queue=3e-3)

    def seconds(size: float, *pairs: tuple[int, int]) -> float:
        moves = tuple(Move(a, b, range(i, i + 1)) for i, (a, b) in enumerate(pairs))
        made = Collective("all_reduce", "", 4, len(pairs), (moves,))
        return host_links.simulate(made, net, len(pairs) * size).seconds

    assert seconds(1e5, (0, 2), (2, 0)) == pytest.approx(0.1)  # each asks before it sends
    assert seconds(1e5, (1, 2), (3, 0)) == pytest.approx(0.103)
    assert seconds(1e3, (1, 2), (3, 0)) == pytest.approx(0.002)  # not behind more than there is
    assert seconds(1e5, (1, 2), (0, 3), (2, 1), (3, 0)) == pytest.approx(0.2)


def test_requests_wait_behind_the_data_of_other_ranks() -> None:
    """In a ring over 2 hosts of 2 ranks each card sends and receives. If requests wait as long as what is before them
    takes, directions no longer overlap, and each round takes twice as long."""
    made, size, near, far = (
        build("all_reduce", "ring", shape_of(4)),
        1e6,
        Wire(50e-6, 2e9),
        Wire(200e-6, 25e6),
    )
    nets = [HostLinks("hosts", 4, 2, near, far, cards=1, queue=queue) for queue in (0.0, 1.0)]
    free, queued = (host_links.simulate(made, net, size).seconds for net in nets)
    assert free == pytest.approx(1.5 * size / far.bandwidth, rel=0.01)
    assert queued == pytest.approx(2 * free, rel=0.01)


def test_a_card_that_was_idle_sends_a_burst_at_once() -> None:
    """And saves up for the next one only while it sends nothing."""
    net = HostLinks("two", 2, 1, Wire(0.0, 1e9), Wire(0.0, 1e6), burst=1e3)

    def seconds(*sizes: int) -> float:
        rounds = tuple((Move(0, 1, range(sum(sizes[:i]), sum(sizes[: i + 1]))),) for i in range(len(sizes)))
        made = Collective("all_reduce", "", 2, sum(sizes), rounds)
        return host_links.simulate(made, net, sum(sizes)).seconds

    assert seconds(900) == pytest.approx(9e-7)  # the rank's own port
    assert seconds(3000) == pytest.approx(2e-3)
    assert seconds(3000, 3000) == pytest.approx(5e-3)
    assert seconds(600, 600) == pytest.approx(2e-4, rel=0.01)


@pytest.mark.slow
def test_a_measurement_is_saved_and_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FIVEFOLD_CACHE", str(tmp_path))
    words = ["bench", "collectives", "--ranks", "2", "--sizes", "4K", "--json"]
    done = subprocess.run([sys.executable, "-m", "fivefold.cli.main", *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    fit = found["fit"]["2"]
    assert {"alpha", "beta", "bus_alpha", "bus_beta", "gamma"} == set(fit)
    assert all(value >= 0 for value in fit.values())
    times = found["seconds"]["2"]["4096"]
    assert set(times) == {"library", *found["predicted"]["2"]["4096"]}
    assert found["best"]["2"]["4096"] == fastest(times)
    assert fastest({"library": 1.0, "ring": 0.95, "tree": 2.0}) == "library", "not clearly slower"
    assert fastest({"library": 1.0, "ring": 0.85}) == "ring"
    with pytest.raises(SystemExit):
        main(["collectives", "--ranks", "2", "--size", "4K", "--topology", "local", "--json"])
    local = json.loads(capsys.readouterr().out)
    ring = next(row for row in local["algorithms"] if row["name"] == "ring")
    assert ring["seconds"] == pytest.approx(found["predicted"]["2"]["4096"]["ring"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--ranks", "1"], "--ranks: 1 is not possible; must be at least 2 and at most 64"),
        (["--sizes", "4K,much"], "--sizes: 'much' is not a size"),
    ],
)
def test_bad_input(capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["bench", "collectives", *words])
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err
