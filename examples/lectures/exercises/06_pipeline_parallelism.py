"""Pipeline parallelism: the order of a stage's work, what it keeps, and how long it waits.

Work is ("F", i) or ("B", i): forward or backward of microbatch i. Time: three quarters of an hour. Data: none. Plain
Python.
"""

Work = tuple[str, int]


def gpipe(microbatches: int) -> list[Work]:
    """The order of every stage in GPipe: all forwards, then all backwards, the last microbatch first."""
    raise NotImplementedError


def one_f_one_b(stage: int, stages: int, microbatches: int) -> list[Work]:
    """The order of a stage in 1F1B. It begins with as many forwards as there are stages behind it. Then it runs a
    forward and a backward in turns, until no forward is left, and ends with the other backwards. Both go in order of
    the microbatches."""
    raise NotImplementedError


def kept(order: list[Work]) -> int:
    """The most microbatches whose activations a stage keeps at a time: from their forward to their backward."""
    raise NotImplementedError


def bubble(stages: int, microbatches: int, virtual: int = 1) -> float:
    """Idle time of a device over its time at work, with equal stages: (p - 1) / (v m)."""
    raise NotImplementedError


def finished(orders: list[list[Work]], forward: float, backward: float) -> float:
    """The time at which the last work ends. orders: of each stage. A forward needs that of the stage before, a backward
    that of the stage behind; messages take no time."""
    raise NotImplementedError
