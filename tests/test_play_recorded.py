"""The page of a plan that opens offline: its sliders show the answers that were recorded."""

from __future__ import annotations

import base64
import gzip
import json
import math
import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fivefold.cli.main import app
from fivefold_plan.asked import Typed
from fivefold_play import recorded
from fivefold_play.machine import answer
from fivefold_play.position import Position

AT = Position("llama2-7b", ("train.global_batch_size=256",), "pp=2,tp=4,dp=8,zero=1,sp=true", "h100:64")


@pytest.fixture(scope="module")
def data() -> dict[str, Any]:
    return unpacked(recorded.page(AT, "llama2-7b", "a plan", budget=24)[0])


def unpacked(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/octet-stream" id="data">([A-Za-z0-9+/=]+)</script>', page)
    assert found
    return json.loads(gzip.decompress(base64.b64decode(found[1])))


def cell(data: dict[str, Any], number: int) -> dict[str, Any]:
    return {name: data["parts"][part] for name, part in data["answers"][number].items()}


def test_every_answer_is_that_of_the_page(data: dict[str, Any]) -> None:
    places, problems = [*product(*data["grid"].values())], 0
    assert len(places) == len(data["answers"]) > 10
    own = data["first"]
    assert own["tp"] == "4"
    for number, place in list(enumerate(places))[::5]:
        found, there = cell(data, number), dict(zip(data["grid"], place, strict=True))
        moves = {key: there[key] for key in ("devices", *there) if there[key] != own[key]}
        wanted = json.loads(json.dumps(answer(AT, moves, recorded.PIXELS)))
        # a file has no buttons to what is near, and does not look for it
        wanted["problem"] = wanted["problem"].partition(" Nothing near it does.")[0]
        problems += bool(found["problem"])
        assert [found.get(name) for name in ("problem", "figures", "pictures", "command", "toml")] == [
            wanted.get(name) for name in ("problem", "figures", "pictures", "command", "toml")
        ]
        assert {key: found["position"][key] for key in there} == there
        for one in found["controls"]:
            assert one["values"][one["at"]] == there.get(one["key"], one["values"][one["at"]])
            assert len(one["values"]) == len(data["grid"].get(one["key"], [0]))
    assert problems < len(places) // 5


@pytest.mark.parametrize("budget", [1, 10, 120])
def test_grids_keep_to_the_budget(budget: int) -> None:
    found = recorded.grid(AT, budget)
    cells = math.prod(map(len, found.values()))
    assert budget // 4 <= cells <= budget
    assert all(len({*values}) == len(values) for values in found.values())
    if budget == 120:
        assert {"2", "4", "8"} <= {*found["tp"]}
        assert {"1", "3"} <= {*found["zero"]}


def test_names_and_texts_are_no_markup() -> None:
    image = "x<img src=x onerror='window.hacked = 1'>"
    page, _ = recorded.page(AT, image, image, budget=1)
    assert "<img" not in page
    assert "&lt;img" in page


def test_by_the_command(tmp_path: Path) -> None:
    missing = CliRunner().invoke(
        app, ["plan", "quickstart", "--cluster", "h100:2", "--html", str(tmp_path / "no" / "x")]
    )
    assert "cannot be written" in str(missing.exception)


def test_a_search_s_page_stands_at_its_best_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded, "BUDGET", 1)
    path = tmp_path / "plan.html"
    words = ["plan", "search", "quickstart", "--cluster", "h100:2", "--html", str(path)]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    found = cell(unpacked(path.read_text()), 0)
    row = next(line for line in done.output.splitlines() if " x " in line).split()
    assert f"--layout {row[-1]}" in found["command"]
    assert row[2] in next(text for name, text, _ in found["figures"] if name == "Tokens per second")
    assert "Fastest layout for each memory" in path.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["dp=64,zero=1", "pp=4,tp=4,dp=4,zero=1"])
def test_a_whole_page_is_small(tmp_path: Path, layout: str) -> None:
    from fivefold.recipe import load
    from fivefold_plan.commands.plan import write_page

    path = tmp_path / "plan.html"
    write_page(path, load("llama2-7b", [], layout), Typed("llama2-7b", [], "h100:64"))
    assert path.stat().st_size < 3e6
    assert len(unpacked(path.read_text())["answers"]) > 100
