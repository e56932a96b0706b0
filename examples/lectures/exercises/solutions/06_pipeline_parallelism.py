"""Pipeline parallelism: the order of a stage's work, what it keeps, and how long it waits.

Work is ("F", i) or ("B", i): forward or backward of microbatch i. Time: three quarters of an hour. Data: none. Plain
Python.
"""

Work = tuple[str, int]


def gpipe(microbatches: int) -> list[Work]:
    """The order of every stage in GPipe: all forwards, then all backwards, the last microbatch first."""
    numbers = range(microbatches)
    return [*(("F", i) for i in numbers), *(("B", i) for i in reversed(numbers))]


def one_f_one_b(stage: int, stages: int, microbatches: int) -> list[Work]:
    """The order of a stage in 1F1B. It begins with as many forwards as there are stages behind it. Then it runs a
    forward and a backward in turns, until no forward is left, and ends with the other backwards. Both go in order of
    the microbatches."""
    warm = min(stages - 1 - stage, microbatches)
    order: list[Work] = [("F", i) for i in range(warm)]
    for i in range(warm, microbatches):
        order += [("F", i), ("B", i - warm)]
    return order + [("B", i) for i in range(microbatches - warm, microbatches)]


def kept(order: list[Work]) -> int:
    """The most microbatches whose activations a stage keeps at a time: from their forward to their backward."""
    now = most = 0
    for kind, _ in order:
        now += 1 if kind == "F" else -1
        most = max(most, now)
    return most


def bubble(stages: int, microbatches: int, virtual: int = 1) -> float:
    """Idle time of a device over its time at work, with equal stages: (p - 1) / (v m)."""
    return (stages - 1) / (virtual * microbatches)


def finished(orders: list[list[Work]], forward: float, backward: float) -> float:
    """The time at which the last work ends. orders: of each stage. A forward needs that of the stage before, a backward
    that of the stage behind; messages take no time."""
    done: dict[tuple[str, int, int], float] = {}
    at, clock = [0] * len(orders), [0.0] * len(orders)
    while any(at[stage] < len(order) for stage, order in enumerate(orders)):
        for stage, order in enumerate(orders):
            while at[stage] < len(order):
                kind, i = order[at[stage]]
                other = stage - 1 if kind == "F" else stage + 1
                outside = not 0 <= other < len(orders)
                if not outside and (kind, i, other) not in done:
                    break
                ready = 0.0 if outside else done[kind, i, other]
                clock[stage] = max(clock[stage], ready) + (forward if kind == "F" else backward)
                done[kind, i, stage] = clock[stage]
                at[stage] += 1
    return max(clock)
