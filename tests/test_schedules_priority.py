"""The order of messages between a worker and parameter servers, simulated: closed forms, bounds, its worth."""

import random
from pathlib import Path

import pytest

from fivefold.cli.main import main
from fivefold.recipe import load
from fivefold.schedules.priority import (
    FIFO,
    ORDERS,
    PRIORITY,
    SUM_ORDERS,
    WFBP,
    Layer,
    Line,
    Ready,
    Simulation,
    Sums,
)
from fivefold_plan.cluster.clusters import parse
from fivefold_plan.predict import predict
from fivefold_plan.time.servers import sums

EQUAL = [Layer(0.1, 0.2, 10, 10)] * 8


def seconds(layers: list[Layer], rate: float, **line: object) -> float:
    return Simulation(layers, Line(rate, rate, **line), iterations=12).seconds  # type: ignore[arg-type]


def test_the_queue() -> None:
    for order, wanted in ((FIFO, ["c", "b", "a0", "a1"]), (PRIORITY, ["a0", "a1", "b", "c"])):
        ready = Ready(order)
        for part, layer in (("c", 2), ("b", 1), ("a0", 0), ("a1", 0)):
            ready.add(part, layer)
        assert [ready.pop() for _ in range(4)] == wanted


@pytest.mark.parametrize("order", ORDERS)
def test_one_layer_is_a_sum(order: str) -> None:
    """Forward, backward, both ways, the update. Latencies: announced, awaited, up, told, asked for, down."""
    line = Line(5, 10, latency=0.01, part=0.003, update=0.02, partition=20, order=order)
    found = Simulation([Layer(1, 2, 20, 10)], line).seconds
    assert found == pytest.approx(3 + 20 / 5 + 10 / 10 + 2 * 0.003 + 20 * 0.02 + 6 * 0.01)


def test_ends_of_the_scale() -> None:
    """Endless links leave computing. On slow ones, if nothing changes before all has arrived, no order hides the way up
    but beside backward, and FIFO hides no way down."""
    for order in ORDERS:
        assert seconds(EQUAL, 1e12, order=order) == pytest.approx(8 * 0.3)
    up, down, first = 8 * 10 / 20, 8 * 10 / 20, 0.2
    assert seconds(EQUAL, 20, order=FIFO, together=True, partition=10) == pytest.approx(
        first + up + down + 0.8
    )
    # by priority forward runs beside the way down: the last layer's is all that follows
    assert seconds(EQUAL, 20, together=True, partition=10) == pytest.approx(first + up + down + 0.1)


def test_priority_is_worth_what_forward_hides() -> None:
    """Forward of the first layers runs beside messages of the last. What is under way cannot be overtaken."""
    for rate in (25, 33, 40):
        fifo, priority = (seconds(EQUAL, rate, order=order, partition=1, credits=2) for order in ORDERS)
        assert 1.1 < fifo / priority < 1.5
        all_at_once = [seconds(EQUAL, rate, order=order, partition=1, credits=1000) for order in ORDERS]
        assert all_at_once[0] == pytest.approx(all_at_once[1])


def test_bounds_of_any_model() -> None:
    """No iteration is shorter than computing, or than its bytes take on one way."""
    draw = random.Random(0)
    for _ in range(40):
        layers = [
            Layer(*(draw.uniform(0.01, 1) for _ in range(2)), *(draw.uniform(0, 30) for _ in range(2)))
            for _ in range(6)
        ]
        line = Line(
            draw.uniform(5, 50), draw.uniform(5, 50), draw.uniform(0, 0.01), partition=draw.uniform(1, 40),
            credits=draw.choice([1, 2, 8]), order=draw.choice(ORDERS), together=draw.random() < 0.3,
        )  # fmt: skip
        found = Simulation(layers, line, iterations=20)
        least = max(
            sum(one.forward + one.backward for one in layers),
            sum(one.pushed for one in layers) / line.up,
            sum(one.pulled for one in layers) / line.down,
        )
        assert found.seconds >= least * 0.999
        pushed = sum(end - start for what, _, start, end in found.events if what == "push")
        assert pushed == pytest.approx(20 * sum(one.pushed for one in layers) / line.up)


def summed(layers: list[Layer], order: str, partition: float = 10, rate: float = 50) -> Sums:
    line = Line(1.0, 1.0, partition=partition, order=order)
    return Sums(layers, line, iterations=12, takes=lambda size: size / rate)


def test_orders_of_sums_by_hand() -> None:
    """8 equal layers: forward 0.1, backward 0.2, a sum 0.2. FIFO adds all sums. WFBP hides all but the last one. By
    priority the last one, which is the first layer's, is what stays: its sum follows its backward, and all others are
    hidden. The ideal hides it, too."""
    computing, sums, last = 8 * 0.3, 8 * 0.2, 0.2
    assert summed(EQUAL, FIFO).seconds == pytest.approx(computing + sums)
    assert summed(EQUAL, WFBP).seconds == pytest.approx(computing + last)
    assert summed(EQUAL, PRIORITY).seconds == pytest.approx(computing + last)
    assert summed(EQUAL, FIFO).ideal == pytest.approx(computing)
    # on links of half the rate sums take 3.2, of which WFBP hides those beside 7 backwards; forward hides more of them
    fifo, wfbp, priority = (summed(EQUAL, order, rate=25) for order in SUM_ORDERS)
    assert fifo.seconds == pytest.approx(computing + 2 * sums)
    assert wfbp.seconds == pytest.approx(0.8 + 0.2 + 2 * sums)
    assert wfbp.ideal == pytest.approx(2 * sums)
    assert wfbp.ideal < priority.seconds < 0.9 * wfbp.seconds
    # a FIFO step: no sum begins before backward has ended
    begins = {start for what, _, start, _ in fifo.events if what == "push"}
    backward = [(start, end) for what, _, start, end in fifo.events if what == "backward"]
    assert not any(start - 1e-9 <= begin < end - 1e-9 for begin in begins for start, end in backward)


def test_no_order_of_sums_beats_the_ideal() -> None:
    """Any model: ideal <= priority in small parts <= WFBP <= FIFO."""
    draw = random.Random(1)
    for _ in range(12):
        layers = [
            Layer(draw.uniform(0.01, 1), draw.uniform(0.01, 1), draw.uniform(0, 30), 0.0) for _ in range(6)
        ]
        rate = draw.uniform(5, 30)
        fifo, wfbp, priority = (summed(layers, order, 1, rate) for order in SUM_ORDERS)
        assert fifo.ideal - 1e-9 <= priority.seconds <= 1.02 * wfbp.seconds
        assert wfbp.seconds <= fifo.seconds + 1e-9


def test_orders_of_a_planned_layout(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """WFBP takes about as long as the plan says, whose buckets are not layers. Other layouts have no such sums."""
    small = ["train.global_batch_size=8", "data.document_masks=false"]
    plan = predict(load("gpt2-124m", small, "dp=8"), parse("h100:8x1"))
    runs, terms = sums(plan.setting), dict(plan.step.terms)
    wanted = terms["pipeline, first start to last end"] + terms["exposed gradient sums"]
    assert runs[WFBP].seconds == pytest.approx(wanted, rel=0.1)
    assert runs[PRIORITY].ideal < runs[PRIORITY].seconds < runs[WFBP].seconds < runs[FIFO].seconds
    for layout, cluster in (("dp=8,zero=3", "h100:8"), ("dp=2,pp=4", "h100:8"), ("dp=1", "h100:1")):
        assert sums(predict(load("gpt2-124m", small, layout), parse(cluster)).setting) == {}
    arguments = ["draw", "gpt2-124m", "--layout", "dp=8", "--cluster", "h100:8x1", "--out", str(tmp_path)]
    with pytest.raises(SystemExit) as ended:
        main([*arguments, *(part for one in small for part in ("--set", one))])
    assert not ended.value.code
    out, picture = capsys.readouterr().out, (tmp_path / "orders.svg").read_text()
    for words in SUM_ORDERS.values():
        assert words in out
        assert words in picture
    assert f"ideal: everything overlaps            {runs[FIFO].ideal:.4g}" in out
