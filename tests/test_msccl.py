"""Schedules as programs of MSCCL: read and run by the rules of its parser and interpreter, they give the right sums.

The rules are those of github.com/microsoft/msccl: `src/graph/topo.cc` (what is refused) and
`src/collectives/device/msccl_interpreter.h` (what steps do, and what they wait for).
"""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from marks import slow_but
from test_collectives_cli import run

from fivefold.errors import UserError
from fivefold.schedules.collectives import (
    ALGORITHMS,
    PRIMITIVES,
    Collective,
    Primitive,
    build,
    msccl,
    shape_of,
)
from fivefold.schedules.collectives.msccl import COLLECTIVES, to_xml

E, SLOTS = 3, 1  # numbers of a chunk; messages that a connection holds before its sender waits
Buffers = dict[str, np.ndarray]
""""i", "o", "s": (chunks, E)."""


def read(text: str) -> ElementTree.Element:
    """The program, checked as MSCCL's parser does."""
    algo = ElementTree.fromstring(text)
    loop, ngpus = int(algo.get("nchunksperloop", 0)), int(algo.get("ngpus", 0))
    assert algo.get("proto") in ("Simple", "LL", "LL128")
    coll = algo.get("coll")
    times = {"allgather": (ngpus, 1), "reduce_scatter": (1, ngpus)}.get(str(coll), (1, 1))
    assert [int(gpu.get("id", -1)) for gpu in algo] == list(range(ngpus))
    for gpu in algo:
        chunks = {name: int(gpu.get(f"{name}_chunks", -1)) for name in "ios"}
        assert chunks["i"] * times[0] == chunks["o"] * times[1] == loop
        assert [int(tb.get("id", -1)) for tb in gpu] == list(range(len(gpu)))
        assert len(gpu) <= 108 * 2
        connections = [
            (end, tb.get(end), tb.get("chan"))
            for tb in gpu
            for end in ("send", "recv")
            if tb.get(end) != "-1"
        ]
        assert len(connections) == len(set(connections)), "two blocks for one connection"
        for tb in gpu:
            assert gpu.get("id") not in (tb.get("send"), tb.get("recv"))
            assert 0 <= int(tb.get("chan", -1)) < int(algo.get("nchannels", 0))
            assert [int(step.get("s", -1)) for step in tb] == list(range(len(tb)))
            assert len(tb) <= 256
            waiting = False
            for step in tb:
                kind, count, depends = (
                    step.get("type"),
                    int(step.get("cnt", -1)),
                    int(step.get("depid", -1)) >= 0,
                )
                assert not waiting or depends, "a chain of waits ends in a step that waits"
                waiting = kind == "nop"
                assert 0 < count < 72
                for end, checked in (("src", kind != "r"), ("dst", kind != "s")):
                    start = int(step.get(f"{end}off", -2))
                    assert not checked or 0 <= start <= start + count <= chunks[step.get(f"{end}buf", "")]
                if depends:
                    assert gpu[int(step.get("depid", 0))][int(step.get("deps", 0))].get("hasdep") == "1"
    return algo


def interpret(algo: ElementTree.Element, given: list[Buffers], last_first: bool = False) -> list[Buffers]:
    """Runs the program on the buffers of all ranks until nothing moves. last_first: which block goes on first where
    several can."""
    queues: dict[tuple[str, str, str], list[np.ndarray]] = defaultdict(list)
    flags: dict[tuple[int, int], int] = defaultdict(lambda: -1)
    at: dict[tuple[int, int], int] = defaultdict(int)
    blocks = [(rank, number, tb) for rank, gpu in enumerate(algo) for number, tb in enumerate(gpu)]

    def go(rank: int, number: int, tb: ElementTree.Element) -> bool:
        if at[rank, number] == len(tb):
            return False
        step, me, chan = tb[at[rank, number]], str(rank), tb.get("chan", "")
        if (other := int(step.get("depid", -1))) >= 0 and flags[rank, other] < int(step.get("deps", -1)):
            return False
        source, target = (
            given[rank][step.get(f"{end}buf", "")][int(step.get(f"{end}off", 0)) :][: int(step.get("cnt", 0))]
            for end in ("src", "dst")
        )
        kind = step.get("type")
        if kind == "s":
            queue = queues[me, tb.get("send", ""), chan]
            if len(queue) == SLOTS:
                return False
            queue.append(source.copy())
        elif kind in ("r", "rrc"):
            queue = queues[tb.get("recv", ""), me, chan]
            if not queue:
                return False
            arrived = queue.pop(0)
            assert len(arrived) == len(target), "both sides agree on what is sent"
            target[:] = arrived + source if kind == "rrc" else arrived
        elif kind == "cpy":
            target[:] = source
        else:
            assert kind == "nop"
        if step.get("hasdep") == "1":
            flags[rank, number] = int(step.get("s", -1))
        at[rank, number] += 1
        return True

    while sum(go(*block) for block in (reversed(blocks) if last_first else blocks)):
        pass
    assert not any(queues.values())
    stuck = [(rank, number) for rank, number, tb in blocks if at[rank, number] < len(tb)]
    assert not stuck, f"thread blocks {stuck} wait forever"
    return given


def right(collective: Collective, last_first: bool) -> None:
    """Runs a program; in place, as MSCCL is told: what is no input is overwritten or garbage."""
    algo, n, chunks = read(to_xml(collective)), collective.ranks, collective.whole
    rng = np.random.default_rng(0)
    every = rng.integers(-9, 9, (n, chunks, E)).astype(float)
    part = chunks // n
    given: list[Buffers] = []
    for rank, x in enumerate(every):
        garbage = np.full((chunks, E), np.nan)
        scratch = np.full((int(algo[rank].get("s_chunks", 0)), E), np.nan)
        if collective.primitive == "all_gather":
            garbage[rank * part : (rank + 1) * part] = x[rank * part : (rank + 1) * part]
            given.append({"i": garbage[rank * part : (rank + 1) * part], "o": garbage, "s": scratch})
        else:
            given.append({"i": x.copy(), "o": garbage, "s": scratch})
    found = interpret(algo, given, last_first)
    for rank, buffers in enumerate(found):
        mine = slice(rank * part, (rank + 1) * part)
        if collective.primitive == "all_reduce":
            assert np.array_equal(buffers["i"], every.sum(0)), rank
        elif collective.primitive == "reduce_scatter":
            assert np.array_equal(buffers["i"][mine], every.sum(0)[mine]), rank
        elif collective.primitive == "all_gather":
            assert np.array_equal(
                buffers["o"], np.concatenate([x[r * part :][:part] for r, x in enumerate(every)])
            )
        else:
            assert np.array_equal(buffers["o"], every[:, rank]), rank


EVERY: list[tuple[Primitive, str]] = [
    (primitive, name)
    for primitive in PRIMITIVES
    for name, made in ALGORITHMS[primitive].items()
    if primitive in COLLECTIVES and not made.switches
]


@pytest.mark.parametrize(
    ("ranks", "local"), slow_but([(4, 2)], [(2, 2), (3, 3), (4, 2), (6, 3), (8, 4), (8, 8)])
)
def test_programs_give_the_right_sums(ranks: int, local: int) -> None:
    """In any order of blocks that MSCCL's waits allow, with one message under way per connection."""
    seen = set()
    for primitive, name in EVERY:
        made = ALGORITHMS[primitive][name]
        shape = shape_of(ranks, local, pieces=made.pieces[len(made.pieces) // 2])
        if made.fits(shape):
            seen.add(primitive)
            for last_first in (False, True):
                right(build(primitive, name, shape), last_first)
    assert seen == set(COLLECTIVES)


def test_a_wait_that_is_missing_is_found() -> None:
    """A butterfly overwrites what it sends in the same round: without waits the sums are wrong in some order."""
    collective = build("all_reduce", "butterfly", 4)
    algo = read(to_xml(collective))
    steps = [step for step in algo.iter("step") if step.get("depid") != "-1"]
    assert steps
    for step in steps:
        step.set("depid", "-1")
    wrong = 0
    for last_first in (False, True):
        given = [{name: np.full((1, E), 1.0 + rank) for name in "ios"} for rank in range(4)]
        wrong += any((buffers["i"] != 10).any() for buffers in interpret(algo, given, last_first))
    assert wrong


def test_what_msccl_cannot_do(monkeypatch: pytest.MonkeyPatch) -> None:
    for primitive, name in (("broadcast", "binomial"), ("all_reduce", "in_network")):
        with pytest.raises(
            UserError, match=rf"{primitive} '{name}' has no program for MSCCL \(valid: all_reduce, "
        ):
            to_xml(build(primitive, name, 4))
    monkeypatch.setattr(msccl, "MOST_STEPS", 5)
    text = "1 peers in a direction (at most 32), 6 steps in a block (at most 5)"
    with pytest.raises(UserError, match=re.escape(text)):
        to_xml(build("all_reduce", "ring", 4))
    with pytest.raises(UserError, match=re.escape("39 peers in a direction (at most 32)")):
        to_xml(build("all_to_all", "direct", 40))


def test_the_fastest_between_ranks_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With a switch that adds the fastest is none of MSCCL's; and it may be for more bytes than MSCCL's default."""
    path = tmp_path / "program.xml"
    assert run("--size", "1G", "--msccl", str(path)) == 0
    algo = ElementTree.parse(path).getroot()
    assert algo.get("name") != "in_network"
    assert int(algo.get("maxBytes", "0")) > 2**30
    for words, text in (
        (["--msccl", str(path)], "no switch that adds"),
        (["--ranks", "7"], "needs a switch"),
    ):
        assert run("--draw", "in_network", *words) == 2
        assert text in capsys.readouterr().err


def test_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "ring.xml"
    assert run("--ranks", "4", "--draw", "ring", "--msccl", str(path), "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["pictures"] == {"msccl": str(path)}
    assert path.read_text() == to_xml(build("all_reduce", "ring", 4))
    assert run("--ranks", "4", "--primitive", "barrier", "--msccl", str(path)) == 2
    assert "has no program for MSCCL" in capsys.readouterr().err
