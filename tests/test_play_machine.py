"""The part "Machine" of `fivefold play`: each position of its sliders is the plan of a command line."""

from __future__ import annotations

import os
import random
import re
import shlex
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
from patience import PATIENCE
from playing import Play, playing

from fivefold.errors import UserError
from fivefold.observe.format import memory_text, short_number
from fivefold.recipe import shipped
from fivefold.sharding.layout import parse
from fivefold_plan.advice.budget import Questions
from fivefold_plan.advice.budget import answer as answer_of
from fivefold_plan.asked import Typed, read
from fivefold_plan.cluster import measured
from fivefold_plan.pages.pictures import duration_text
from fivefold_plan.predict import Plan, predict
from fivefold_play.commands import Command, Commands
from fivefold_play.machine import answer
from fivefold_play.position import FIELDS, Position, moved

LLAMA = Position("llama2-7b", ("train.global_batch_size=256",), "pp=2,tp=4,dp=8,zero=1,sp=true", "h100:64")


def of(json: Mapping[str, str]) -> Position:
    """The position of an answer."""
    sets = tuple(filter(None, json["sets"].split("\n")))
    return Position(json["recipe"], sets, json["layout"], json["cluster"], json["price"])


def told(command: str) -> Plan:
    """The plan of a line that begins with `fivefold plan`."""
    words = shlex.split(command)
    given = {name: [b for a, b in pairwise(words) if a == name] for name in words if name[:2] == "--"}
    assert words[:2] == ["fivefold", "plan"]
    typed = Typed(words[2], given.get("--set", []), given["--cluster"][0])
    return predict(*read(typed, given["--layout"][0]))


def figure(found: Mapping[str, Any], name: str) -> str:
    return next(text for one, text, _ in found["figures"] if one == name)


def check_told(found: Mapping[str, Any]) -> None:
    """What is shown is the plan of the command that is shown."""
    plan = told(found["command"])
    assert figure(found, "Step") == duration_text(plan.step.seconds)
    assert figure(found, "Tokens per second") == f"{plan.tokens_per_s:,.0f}"
    assert figure(found, "Memory per device") == memory_text(plan.peak_bytes)
    assert found["fits"] == plan.fits == (not found["problem"])


@pytest.mark.parametrize(
    ("start", "draws"), [(LLAMA, 14), (Position("mixtral-8x7b", (), "dp=16,zero=3,ep=8", "h100:16"), 4)]
)
def test_every_position_is_what_the_command_says(start: Position, draws: int) -> None:
    draw, valid, at = random.Random(0), 0, start
    for _ in range(draws):
        sliders = [one for one in answer(at, {})["controls"] if one["key"] not in ("depth", "device")]
        one = draw.choice(sliders)
        found = answer(at, {one["key"]: draw.choice(one["values"])})
        if "figures" not in found:
            assert found["problem"]
            continue
        valid += 1
        check_told(found)
        at = of(found["position"]) if found["fits"] else start
    assert answer(at, {}) == answer(of(answer(at, {})["position"]), {}), "a position is where its moves led"
    assert valid > draws // 3


def test_dp_takes_what_other_axes_leave_and_devices_follow_dp() -> None:
    def behind(key: str, value: str) -> tuple[str, str]:
        at = moved(LLAMA, {key: value})[0]
        return at.layout, at.cluster

    assert behind("tp", "8") == ("pp=2,dp=4,tp=8,zero=1,sp=true", "h100:64")
    assert behind("pp", "1") == ("dp=16,tp=4,zero=1,sp=true", "h100:64")
    assert behind("dp", "2") == ("pp=2,dp=2,tp=4,zero=1,sp=true", "h100:16")
    assert behind("zero", "0") == ("pp=2,dp=8,tp=4,sp=true", "h100:64")
    assert behind("devices", "128") == ("pp=2,dp=16,tp=4,zero=1,sp=true", "h100:128")
    layout, cluster = behind("devices", "4")
    assert cluster == "h100:4"
    assert "dp" not in parse(layout), "the layout that is most like it has no replicas"
    nodes = moved(replace(LLAMA, cluster="h100:16x4"), {"devices": "32"})[0]
    assert nodes.cluster == "h100:8x4"
    assert answer(nodes, {})["devices"] == 32


def test_experts_are_folded_over_tensor_ranks_where_there_are_both() -> None:
    at = Position("mixtral-8x7b", (), "dp=4,tp=4,ep=2,zero=1,sp=true", "h100:16")

    def fold(moves: Mapping[str, str]) -> tuple[str | None, dict[str, Any]]:
        found = answer(at, moves)
        where = {one["key"]: one["values"][one["at"]] for one in found.get("controls", [])}
        return where.get("ep_fold"), found

    assert fold({})[0] == "false"
    value, found = fold({"ep_fold": "true"})
    assert value == "true"
    check_told(found)
    assert parse(found["position"]["layout"])["ep_fold"] is True
    assert figure(found, "Memory per device") != figure(answer(at, {}), "Memory per device")
    assert fold({"ep_fold": "true", "tp": "1"})[0] is None
    assert "out of range: ep_fold" in fold({"ep_fold": "maybe"})[1]["problem"]


def test_a_recipes_own_layout_is_fitted_to_the_devices() -> None:
    assert moved(Position("quickstart", cluster="h100:4"), {})[0].layout == "dp=4"
    assert moved(Position("llama3-405b", cluster="h100:16384"), {})[0].layout.startswith("pp=16,dp=128,tp=8")
    assert answer(Position("llama3-405b", cluster="h100:64"), {})["problem"].startswith("It does not fit")


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [("tp", "64", "heads"), ("pp", "64", "stages"), ("batch", "2", "microbatch"), ("tp", "3", "divide")],
)
def test_what_cannot_be_says_why_and_offers_what_can(key: str, value: str, why: str) -> None:
    found = answer(LLAMA, {key: value})
    assert why in found["problem"]
    assert found["nearest"]
    for near in found["nearest"]:
        assert near["words"]
        check_told(answer(of(near["position"]), {}))


@pytest.mark.parametrize(
    "at", [replace(LLAMA, layout="dp=64"), replace(LLAMA, cluster="h100:2", layout="dp=2")]
)
def test_what_does_not_fit_offers_what_does(at: Position) -> None:
    found = answer(at, {"microbatch": "4"})
    assert re.match(r"It does not fit: [\d.]+ GiB of [\d.]+ GiB per device", found["problem"])
    assert found["nearest"]
    for near in found["nearest"]:
        assert answer(of(near["position"]), {})["fits"]


def test_the_dial_says_what_it_sets_and_why() -> None:
    found = answer(replace(LLAMA, sets=(), cluster="h100:8", layout="dp=8"), {"depth": "12"})
    rows = {key: (value, source) for key, value, source in found["dial"]}
    assert rows["model.layers"] == ("12", "the depth")
    assert rows["model.dim"][0] == "768"
    assert "nanochat" in rows["model.dim"][1]
    plain = answer(LLAMA, {})["dial"]
    assert {source for _, _, source in plain} == {"the recipe"}
    back = answer(of(found["position"]), {"depth": ""})
    assert back["position"]["sets"] == ""


def stalled(plan: Plan) -> float:
    """The share of the time in which steps are taken."""
    return answer_of(plan, Questions(1e9))["effective"]


def test_prices_of_two_clusters() -> None:
    costs = {}
    for cluster, price in (("h100:64", "2.5"), ("a100:64", "1.2")):
        found = answer(replace(LLAMA, cluster=cluster), {"price": price})
        assert f"--price {price}" in found["command"]
        plan = told(found["command"].partition(" --price")[0])
        tokens = 2e12  # of the recipe
        costs[cluster] = short_number(tokens / plan.tokens_per_s / 3600 * 64 * float(price) / stalled(plan))
        assert figure(found, "Cost") == costs[cluster]
    assert costs["h100:64"] != costs["a100:64"]


def test_pictures_are_drawn_to_the_width_and_name_everything() -> None:
    for width in (330, 700):
        drawn = {name: svg for name, _, svg in answer(LLAMA, {}, width)["pictures"]}
        assert list(drawn) == [
            "Memory per device",
            "Time of a step",
            "Timeline",
            "Messages per step",
            "Roofline",
        ]
        for svg in drawn.values():
            assert "<style" not in svg
        wide = int(re.findall(r'width="(\d+)"', drawn["Memory per device"])[0])
        assert wide <= width + 40
    assert ">all_gather" in drawn["Messages per step"] or "all_gather" in drawn["Messages per step"]
    assert "Messages per step" not in {
        one[0] for one in answer(Position("quickstart", (), "dp=1", "h100:1"), {})["pictures"]
    }


@pytest.fixture(scope="module")
def play(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with playing(tmp_path_factory.mktemp("runs")) as found:
        yield found


def ask(play: Play, code: int = 200, /, **given: str) -> Any:
    at = {"recipe": "quickstart", "sets": "", "layout": "", "cluster": "h100:2", "price": ""}
    return play.get(f"machine/plan?{urlencode(at | given)}", code)


def test_requests_and_what_they_answer(play: Play) -> None:
    assert play.get("machine/start")["recipe"] in shipped()
    found = ask(play)
    assert found["position"]["layout"] == "dp=2"
    check_told(found)
    there = ask(play, **found["position"], move="devices", to="4")
    assert there["position"] == found["position"] | {"layout": "dp=4", "cluster": "h100:4"}
    other = ask(play, **found["position"], move="recipe", to="llama3-8b")
    assert other["position"]["recipe"] == "llama3-8b"


@pytest.mark.parametrize(
    "given",
    [
        {"recipe": "/etc/passwd"},
        {"recipe": "../quickstart"},
        {"recipe": "<script>alert(1)</script>"},
        {"recipe": ""},
        {"move": "recipe", "to": "/etc/passwd"},
        {"cluster": "/etc/hostname.toml:2"},
        {"cluster": "lab.toml"},
        {"sets": "data.source=/etc/passwd"},
        {"sets": "train.init_from=/root"},
        {"sets": "model.arch=custom"},
        {"price": "-1"},
        {"price": "nan"},
        {"width": "1e9"},
        {"width": "-1"},
    ],
)
def test_requests_reach_nothing_else(play: Play, given: dict[str, str]) -> None:
    assert ask(play, 400, **given)["error"]


@pytest.mark.parametrize(
    "given",
    [
        {"layout": "dp=99999999999999999999"},
        {"layout": "tp=0"},
        {"layout": "<b>=1"},
        {"layout": "zb_costs=<script>,pp=2"},
        {"cluster": "h100:99999999999999"},
        {"cluster": "h100:0"},
        {"cluster": "h100:<b>"},
        {"sets": f"model.layers={'9' * 5000}"},
        {"sets": "model.layers=<img src=x>"},
        {"sets": "model.depth=1e400"},
        {"sets": "train.global_batch_size=1\ntrain.global_batch_size=2"},
        {"move": "tp", "to": "9" * 400},
        {"move": "tp", "to": "-3"},
        {"move": "dp", "to": "1000000"},
        {"move": "devices", "to": "0"},
        {"move": "devices", "to": "720720"},
        {"move": "zero", "to": "7"},
        {"move": "schedule", "to": "<b>"},
        {"move": "recompute", "to": "budget:1B"},
        {"move": "precision", "to": "fp1"},
        {"move": "depth", "to": "100000"},
        {"move": "device", "to": "../x.toml"},
        {"move": "__class__", "to": "1"},
    ],
)
def test_nonsense_is_refused_in_words(play: Play, given: dict[str, str]) -> None:
    began = time.perf_counter()
    found = ask(play, **given)
    assert "problem" in found
    assert found["problem"] or "figures" in found
    for _, _, svg in found.get("pictures", ()):
        assert "<img" not in svg
        assert "<b>" not in svg
    assert time.perf_counter() - began < 10


def test_no_move_leads_to_a_file(play: Play) -> None:
    assert "no device of the page; did you mean 'h100'" in ask(play, move="device", to="h10")["problem"]
    found = ask(play, move="device", to="/etc/hostname.toml")
    assert "'/etc/hostname.toml' is no device of the page" in found["problem"]


def test_a_machine_without_a_table_can_be_measured(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured, "load", lambda: None)
    found = ask(play, cluster="local:2")
    assert (found["measure"], found["problem"]) == (True, "")
    assert found["fits"]
    there = ask(play, move="device", to="local")
    assert there["measure"]
    assert there["position"]["cluster"] == "local:2"


def test_commands_that_fail_say_what_they_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And no module of the folder where the server was started takes the place of one of Python's."""
    (tmp_path / "typer.py").write_text("open('ran', 'w')")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="no such file, and no shipped recipe"):
        Commands().start("plan", ["plan", "no-such-recipe"]).result()
    assert not (tmp_path / "ran").exists()


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Takes the place of Python: a shell script."""

    def written(script: str) -> None:
        (tmp_path / "python").write_text(f"#!/bin/sh\nshift 3\n{script}\n")
        (tmp_path / "python").chmod(0o755)

    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    return written


def gone(pid: int) -> bool:
    with suppress(ProcessLookupError):
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    return True


def test_a_command_ends_with_all_that_it_started(
    program: Callable[[str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By another one of its kind, by its limit, and with the server; also if it does not want to."""
    monkeypatch.setattr("fivefold_play.commands.MOMENT", 0.2)
    program(f"trap '' TERM; sleep 60 & echo $! > {tmp_path}/child-$1; while :; do wait; done")
    commands, children = Commands(), list[int]()

    def start(name: str) -> Command:
        command = commands.start("machine", [name])
        while not (path := tmp_path / f"child-{name}").exists() or not path.read_text():
            time.sleep(0.01)
        children.append(int(path.read_text()))
        return command

    first = start("a")
    second = start("b")
    with pytest.raises(UserError, match=r"^stopped$"):
        first.result()
    assert second.runs
    second.limit.function(*second.limit.args)  # as when its time is over
    with pytest.raises(UserError, match="more than 10 minutes"):
        second.result()
    third = start("c")
    commands.end()
    with pytest.raises(UserError, match=r"^stopped$"):
        third.result()
    with pytest.raises(UserError, match="the server ends"):
        commands.start("machine", ["d"])
    until = time.monotonic() + 20 * PATIENCE
    while not all(map(gone, children)):  # killed, which a busy machine takes a moment for
        assert time.monotonic() < until
        time.sleep(0.01)


def test_a_result_is_the_first_line(program: Callable[[str], None]) -> None:
    program("""echo '{"passed": false}'; echo '{"error": {"message": "it differs"}}'; exit 1""")
    assert Commands().start("a", []).result() == {"passed": False}
    program("""echo '{"error": {"message": "wrong"}}'; echo noise >&2; exit 2""")
    with pytest.raises(UserError, match=r"^wrong$"):
        Commands().start("a", []).result()
    program("echo half; exit 3")
    with pytest.raises(UserError, match=r"^it has ended with code 3$"):
        Commands().start("a", []).result()


@pytest.mark.slow
def test_a_search_ends_at_a_position(play: Play) -> None:
    at = {"recipe": "quickstart", "sets": "", "layout": "dp=2", "cluster": "h100:2", "price": ""}
    found = play.post("machine/search", at)
    assert found["rows"]
    best = answer(of(found["rows"][0]["position"]), {})
    check_told(best)
    assert figure(best, "Tokens per second") in found["rows"][0]["words"][1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("at", "most"),
    [
        (Position("quickstart", cluster="h100:4"), 0.3),
        (Position("llama3-8b", cluster="h100:64"), 0.3),
        (Position("llama3-405b", cluster="h100:16384"), 1.5),
    ],
    ids=lambda value: value.recipe if isinstance(value, Position) else "",
)
def test_sliders_answer_at_once(at: Position, most: float) -> None:
    at = moved(at, {})[0]
    for one in answer(at, {})["controls"]:
        if one["key"] in FIELDS or one["key"] == "device":
            continue
        for value in one["values"][max(0, one["at"] - 1) : one["at"] + 2]:
            took = []
            for _ in range(3):
                began = time.process_time()
                answer(at, {one["key"]: value})
                took.append(time.process_time() - began)
            assert min(took) < most, (one["key"], value)
