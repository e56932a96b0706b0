"""The part "Prove" of the page: proofs as jobs, and collectives with the numbers that their moves lead to."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playing import Play, playing
from test_player import data

from fivefold.observe.collective_picture import values
from fivefold.schedules.collectives import ALGORITHMS, build
from fivefold.schedules.collectives import prove as states_of
from fivefold_play import prove
from fivefold_play.state import State


@pytest.fixture(scope="module")
def play(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Play]:
    with playing(tmp_path_factory.mktemp("prove") / "runs") as play:
        yield play


@pytest.mark.parametrize(
    ("primitive", "name", "ranks"),
    [("all_reduce", "ring", 4), ("all_to_all", "pairwise", 4), ("reduce_scatter", "ring", 3), ("broadcast", "tree", 5)],
)  # fmt: skip
def test_values_are_what_the_moves_lead_to(primitive: str, name: str, ranks: int) -> None:
    name = name if name in ALGORITHMS[primitive] else next(iter(ALGORITHMS[primitive]))  # type: ignore[index]
    made = build(primitive, name, ranks)
    numbers = [{c: 10 * (rank + 1) + c for c in made.holds(rank)} for rank in range(ranks)]
    for state, moves in zip(states_of(made), (*made.rounds, ()), strict=True):
        rows = [line.split()[2:] for line in values(made, state).splitlines()[1:]]
        wanted = [[str(row.get(c, "·")) for c in range(min(16, made.chunks))] for row in numbers]
        assert rows == wanted
        before = [dict(row) for row in numbers]
        for source, target, chunks, adds in moves:
            for c in chunks:
                numbers[target][c] = before[source][c] + (numbers[target][c] if adds else 0)


def test_a_collective_is_that_of_the_command(play: Play) -> None:
    found = play.get("prove/choices")["collectives"]
    assert {name: [*known] for name, known in found.items()} == {
        name: [*known] for name, known in ALGORITHMS.items()
    }
    page = play.get("prove/collective?primitive=all_reduce&algorithm=ring&ranks=4&local=0")["player"]
    [facts] = map(json.loads, data(page))
    assert [len(frame["moves"]) for frame in facts["frames"]] == [0, *[4] * 6]
    assert facts["frames"][-1]["values"].split()[-4:] == ["100", "104", "108", "112"]
    for primitive, known in ALGORITHMS.items():  # each can be shown for some number of ranks
        for name in known:
            asked = [
                f"primitive={primitive}&algorithm={name}&ranks={n}&local={k}" for n, k in ((4, 0), (8, 4))
            ]
            codes = {play.ask(f"/api/prove/collective?{one}", Cookie=play.cookie)[0] for one in asked}
            assert 200 in codes, name
    hostile = "primitive=all_reduce&ranks=4&local=0&algorithm=%3Cscript%3Ealert(1)%3C/script%3E"
    assert "is unknown" in play.get(f"prove/collective?{hostile}", 400)["error"]
    for ranks in ("33", "-1", "1e9", "", "4;rm", "%D9%A4"):  # the last is a digit of Arabic
        play.get(f"prove/collective?primitive=all_reduce&algorithm=ring&ranks={ranks}&local=0", 400)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"recipe": "../x"}, "is no shipped recipe and no run"),
        ({"layout": "tp=5"}, "layout.tp = 5 must divide"),
        ({"layout": "--html=x.html"}, "layout"),
        ({"set": ["data.source=/etc"]}, "lies outside of the page's folders"),
        ({"steps": 0}, "steps: 1 to 20"),
        ({"steps": True}, "steps: 1 to 20"),
        (
            {"recipe": "llama3-405b", "layout": "dp=1", "set": ["data.source=stdlib"]},
            "one process needs 5.91 TiB, and",
        ),
        ({"mode": "--json"}, "mode: "),
        ({"mode": ["fp32"]}, "mode: "),
    ],
)
def test_what_cannot_be_proven(play: Play, given: dict[str, Any], words: str) -> None:
    asked = {"recipe": "quickstart", "layout": "dp=2", "steps": 1, "mode": "fp32"} | given
    assert words in play.post("prove/start", asked, 400)["error"]
    assert play.app.state.commands.last(prove.KIND) is None


def test_a_proof_runs_and_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = {"passed": False, "layout": "dp=2"}
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    (tmp_path / "go").touch()
    (tmp_path / "python").write_text(
        f'#!/bin/sh\nshift 3; mktemp >"{tmp_path}/made"; echo "$@" >&2\n'
        f'while [ -e "{tmp_path}/go" ]; do sleep 0.05; done\n'
        f"echo '{json.dumps(report)}'; echo 'error: wrong' >&2; exit 1\n"
    )
    (tmp_path / "python").chmod(0o755)
    state = State([tmp_path / "runs"])
    asked = {"recipe": "quickstart", "layout": "dp=2", "steps": 2, "mode": "bf16"}
    made = prove.start(state, asked)
    assert made["command"] == "fivefold verify quickstart --layout dp=2 --steps 2 --mode bf16"
    first = prove.watched(state, made["name"])
    found = next(first)
    assert (found["is"], found["report"]) == ("runs", None)
    while not found or not found["said"]:
        found = next(first)
    left = Path((tmp_path / "made").read_text().strip())
    assert left.is_file()
    other = prove.start(state, asked)
    [*_, last] = [one for one in first if one]
    assert last == {"is": "ended", "said": "stopped", "report": None}
    assert left.is_relative_to(tmp_path / "temporary")
    assert not left.exists(), "what a stopped proof leaves is removed"
    assert (last_one := state.commands.last(prove.KIND))
    assert last_one.limit.interval == 600
    second = prove.watched(state, other["name"])
    next(second)
    (tmp_path / "go").unlink()
    [*_, last] = [one for one in second if one]
    assert last["is"] == "ended"
    assert last["report"] == report
    assert [*(tmp_path / "temporary").iterdir()] == []
    assert re.fullmatch(r"verify quickstart .*--json\nerror: wrong", last["said"])
    for name in (made["name"], "", "../x"):
        with pytest.raises(Exception, match="no such proof"):
            next(prove.watched(state, name))


def test_a_proof_is_stopped_from_the_page(play: Play) -> None:
    asked = {"recipe": "quickstart", "layout": "dp=2", "steps": 20, "mode": "fp32"}
    name = play.post("prove/start", asked)["name"]
    watched = play.events(f"prove/watch?name={name}")
    assert next(watched)["is"] == "runs"
    assert play.post("prove/stop", {}) == {}
    [*_, last] = watched
    assert (last["is"], last["said"]) == ("ended", "stopped")
