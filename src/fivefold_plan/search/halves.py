"""The searches of a space, in one process or, if they take long, in two, each of which searches half of it."""

from __future__ import annotations

import math
import signal
import sys
import threading
import weakref
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import NamedTuple

from fivefold.host import cores
from fivefold_plan.predict import Plan, price
from fivefold_plan.search.best_first import ALL, Order, Search
from fivefold_plan.search.bound import Bounds
from fivefold_plan.search.space import Choice, Space

LONG = 2**13  # entries of a search; one process looks at them in a few seconds
HALVES = 2


class Asked(NamedTuple):
    """A search. every: for all plans, not a glimpse. indivisible: as in `Space`."""

    most: float
    below: float
    every: bool
    indivisible: bool


class Told(NamedTuple):
    """What a search has found. plan: of so many seconds; None: those to come take at least as many. lost: layouts
    that do not fit, so far. looked: entries that it has refined. peak, order: bytes of the plan, and its place in
    the space, which tell equally fast ones apart."""

    seconds: float
    lost: int
    plan: Plan | Choice | None
    looked: int = 0
    peak: float = 0.0
    order: Order = ()


class Halves:
    """Searches of a space, with caches that they share. lost: layouts that do not fit, of those that the last of them
    looked at.

    Two processes take them where the system copies a process safely: on Linux, without other threads here. two: at
    once. None: a search that takes long starts again in two processes, which know all bounds found so far.
    """

    def __init__(self, space: Space, bounds: Bounds, two: bool | None = None):
        self.space, self.bounds, self.lost, self._pipes = space, bounds, 0, list[Connection]()
        self._one = two is False or cores() < HALVES or sys.platform != "linux"
        if two:
            self._divide()

    def _divide(self) -> None:
        fork = get_context("fork")
        for number in range(HALVES):
            here, there = fork.Pipe()
            args = there, self.space, self.bounds, slice(number, None, HALVES)
            process = fork.Process(target=_serve, args=args, daemon=True)
            process.start()
            there.close()
            weakref.finalize(self, _end, process)
            self._pipes.append(here)

    def plans(self, most: float) -> Iterator[Plan]:
        """Every plan that takes at most so many bytes, fastest first."""
        answers = self._answers(Asked(most, math.inf, True, False))
        heads = [next(answer) for answer in answers]
        lost, found = [0] * len(heads), False
        while True:
            number, head = min(enumerate(heads), key=lambda one: (one[1].seconds, one[1].peak, one[1].order))
            lost[number] = head.lost
            self.lost = sum(lost)
            if head.seconds == math.inf:
                return
            if head.plan:
                found = True
                yield self._priced(head.plan)
            elif head.looked > LONG and not (
                found or self._one or self._pipes or threading.active_count() > 1
            ):
                answers.clear()  # with what it has in memory
                self._divide()
                yield from self.plans(most)
                return
            heads[number] = next(answers[number])

    def glimpse(self, most: float, below: float, indivisible: bool = False) -> Plan | None:
        """`Search.glimpse`, of each half."""
        heads = [next(answer) for answer in self._answers(Asked(most, below, False, indivisible))]
        plans = [self._priced(head.plan) for head in heads if head.plan]
        return min(plans, key=lambda plan: plan.step.seconds, default=None)

    def _answers(self, asked: Asked) -> list[Iterator[Told]]:
        if not self._pipes:
            return [_search(self.space, self.bounds, asked, ALL)]
        for pipe in self._pipes:
            pipe.send(asked)
        return [_received(pipe) for pipe in self._pipes]

    def _priced(self, plan: Plan | Choice) -> Plan:
        if isinstance(plan, Plan):
            return plan
        return price(self.bounds.setting(plan), self.bounds.shared.operations(plan).parts)


def choice_of(plan: Plan) -> Choice:
    s = plan.setting
    return Choice(s.layout, s.sizes.B, s.microbatches, s.mode, s.sequences)


def _search(space: Space, bounds: Bounds, asked: Asked, part: slice) -> Iterator[Told]:
    if asked.indivisible:
        space = replace(space, indivisible=True)
    run = Search(space, bounds, asked.most, asked.below, part)
    if asked.every:
        for seconds, order, plan in run.progress():
            yield Told(seconds, run.lost, plan, run.looked, plan.peak_bytes if plan else 0.0, order)
    plan = None if asked.every else run.glimpse()
    yield Told(math.inf, run.lost, plan)


def _received(pipe: Connection) -> Iterator[Told]:
    """What the process at the other end of a pipe finds. Whoever takes no more of it stops the process."""
    last = False
    try:
        while not last:
            told = pipe.recv()
            last = told.seconds == math.inf
            yield told
    finally:
        if not last:
            pipe.send(None)
            while pipe.recv().seconds < math.inf:
                pass


def _serve(pipe: Connection, space: Space, bounds: Bounds, part: slice) -> None:
    """A process that answers searches of its half until it is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process hears it, and ends this one
    while True:
        if (asked := pipe.recv()) is None:  # it was told to stop when it had
            continue
        for told in _search(space, bounds, asked, part):
            if pipe.poll():
                pipe.send(Told(math.inf, 0, None))
                break
            plan = choice_of(told.plan) if isinstance(told.plan, Plan) else None
            pipe.send(told._replace(plan=plan))


def _end(process: BaseProcess) -> None:
    process.kill()
    process.join()
