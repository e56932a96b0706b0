"""The order of messages between a worker and parameter servers, simulated: closed forms, bounds, its worth."""

import random

import pytest

from fivefold.schedules.priority import FIFO, ORDERS, PRIORITY, Layer, Line, Ready, Simulation

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
