"""The grid of predictions behind a plan's sliders: each cell is what `fivefold plan` says."""

from __future__ import annotations

import base64
import itertools
import math
import random
import shlex
from array import array
from dataclasses import replace
from typing import Any

import pytest

from fivefold.errors import UserError
from fivefold.plan.cluster.clusters import parse, with_margin
from fivefold.plan.pages import grid
from fivefold.plan.pages.grid import HEAD, MEMORY, as_data
from fivefold.plan.pages.pictures import pictures
from fivefold.plan.predict import Plan, limit, predict
from fivefold.plan.setting import documents_of, software_of
from fivefold.recipe import Recipe, load
from fivefold.sharding.layout import to_text

SETS = ["train.global_batch_size=256", "model.kv_heads=8"]
RECIPE = load("llama-7b", SETS, "pp=2,tp=4,dp=8,zero=1,recompute=selective,sp=true")


def as_told(command: str) -> Plan:
    """The plan of a line that begins with `fivefold plan`."""
    words = shlex.split(command)
    given = {
        name: [b for a, b in itertools.pairwise(words) if a == name] for name in words if name[:2] == "--"
    }
    recipe = load(words[2], given.get("--set", []), given["--layout"][0])
    return planned(recipe, given["--cluster"][0], *map(float, given.get("--document-tokens", [])))


def planned(recipe: Recipe, cluster: str, document_tokens: float | None = None) -> Plan:
    machine = parse(cluster)
    return predict(
        recipe, machine, replace(software_of(machine), documents=documents_of(recipe, document_tokens))
    )


def line(center: grid.Base, sets: list[str], values: dict[str, int]) -> str:
    layout = to_text(grid.layout_at(center, values))
    parts = [grid.options(center, key, value) for key, value in values.items()]
    given = {} if center.tokens is None else {"--document-tokens": center.tokens}
    command = grid.command("llama-7b", sets, given)
    return " ".join([command, f"--layout {layout}", *filter(None, parts)])


@pytest.mark.parametrize("budget", [1, 10, 500, grid.BUDGET])
def test_axes_keep_to_the_budget(budget: int) -> None:
    center = grid.base(RECIPE, "h100:64", {})
    axes = grid.axes(center, budget)
    assert [axis.key for axis in axes] == list(grid.LABELS)
    for axis in axes:
        assert axis.values[axis.at] == center.values[axis.key]
        assert list(axis.values) == sorted(set(axis.values))
    cells = math.prod(len(axis.values) for axis in axes)
    assert cells <= max(1, budget)
    if budget == grid.BUDGET:
        assert all(len(axis.values) >= 2 for axis in axes)
        assert cells > 2000


def test_chunks_divide_the_tokens_of_more_ranks() -> None:
    """48 tokens of a sequence on a rank become 24, and 12."""
    center = grid.base(
        load("llama-7b", ["model.seq_len=96"], "dp=32,tp=2,sp=true,tp_chunks=16"), "h100:64", {}
    )
    layouts = [grid.layout_at(center, center.values | {"tp": tp}) for tp in (1, 2, 4, 8)]
    assert [layout.tp_chunks for layout in layouts] == [1, 16, 8, 4]


@pytest.mark.parametrize(("document_tokens", "draws"), [(None, 60), (500.0, 15)])
def test_every_cell_is_what_the_command_says(document_tokens: float | None, draws: int) -> None:
    given = {} if document_tokens is None else {"--document-tokens": document_tokens}
    center = grid.base(RECIPE, "h100:64", given)
    axes = grid.axes(center)
    draw = random.Random(0)
    valid = 0
    for _ in range(draws):
        values = {axis.key: draw.choice(axis.values) for axis in axes}
        try:
            found = grid.plan_at(center, values)
        except UserError:
            continue
        assert as_told(line(center, SETS, values)).as_json() == found.as_json(), values
        valid += 1
    assert valid > draws // 3
    own = grid.plan_at(center, center.values).setting.sizes.seen
    assert (own.share < 0.5) == (document_tokens is not None)


def test_the_page_keeps_the_margin_that_was_asked_for() -> None:
    center = grid.base(RECIPE, "h100:64", {"--margin": 3.0})
    assert grid.plan_at(center, center.values).limit == limit(with_margin(parse("h100:64"), 3))
    assert grid.command("llama-7b", [], {"--margin": 3.0}) == "fivefold plan llama-7b --margin 3"


def test_own_cell_is_the_recipes_plan() -> None:
    for layout in (
        "pp=2,tp=4,dp=8,zero=1",
        "dp_replicate=8,dp_shard=8,zero=3",
        "tp=4,dp=16",
        "cp=2,dp=32,zero=2",
    ):
        recipe = load("llama-7b", SETS, layout)
        center = grid.base(recipe, "h100:64", {})
        assert grid.plan_at(center, center.values).as_json() == planned(recipe, "h100:64").as_json()


def test_clusters_by_nodes_keep_whole_nodes() -> None:
    center = grid.base(load("llama-7b", SETS, "tp=4,dp=8"), "h100:8x4", {})
    devices = grid.axes(center)[0]
    assert all(value % 4 == 0 for value in devices.values)
    assert grid.options(center, "devices", 16) == "--cluster h100:4x4"


def test_what_cannot_be_says_why() -> None:
    center = grid.base(RECIPE, "h100:64", {})
    with pytest.raises(UserError, match="2 devices cannot be divided by tp x pp x cp = 8"):
        grid.plan_at(center, center.values | {"devices": 2})
    with pytest.raises(UserError, match="global_batch_size"):
        grid.plan_at(center, center.values | {"global_batch_size": 3})
    with pytest.raises(UserError, match="heads"):
        grid.plan_at(center, center.values | {"tp": 3, "devices": 12})


def test_a_mixture_of_experts_has_a_grid() -> None:
    recipe = load("mixtral-8x7b", [], "dp=64,zero=3,ep=8")
    center = grid.base(recipe, "h100:64", {})
    found = [plan for _, plan in grid.cells(center, grid.axes(center, 40)) if isinstance(plan, Plan)]
    assert {plan.layout.tp > 1 for plan in found} == {True, False}
    for plan in found:
        assert sum(pictures(plan).shares.values()) == pytest.approx(plan.step.seconds)


def test_numbers_as_they_are_packed() -> None:
    """Read back as the page's script does."""
    center = grid.base(RECIPE, "h100:64", {})
    axes = grid.axes(center, 60)
    data = as_data(center, "fivefold plan x", axes)
    floats, starts = array("f"), array("H")
    floats.frombytes(base64.b64decode(data["floats"]))
    starts.frombytes(base64.b64decode(data["starts"]))
    at = first = valid = 0
    for (values, plan), message in zip(grid.cells(center, axes), data["index"], strict=True):
        if isinstance(plan, str):
            assert data["messages"][message - 1] == plan
            continue
        assert message == 0
        valid += 1
        length = _check(data, floats, at, plan)
        if values["pp"] > 1:
            first += _check_timeline(data, starts, first, plan)
        at += length
    assert valid > 5
    assert at == len(floats)
    assert first == len(starts)


def _check(data: dict[str, Any], floats: array[float], at: int, plan: Plan) -> int:
    """Compares a cell with its plan; returns how many numbers it has."""
    found, pp, begin = pictures(plan), plan.layout.pp, at
    head = dict(zip(HEAD, floats[at : at + len(HEAD)], strict=True))
    assert head["step"] == pytest.approx(plan.step.seconds, rel=1e-6)
    assert head["tokens_per_s"] == pytest.approx(plan.tokens_per_s, rel=1e-6)
    assert head["microbatches"] == plan.setting.microbatches
    at += len(HEAD)
    assert list(floats[at : at + len(data["shares"])]) == pytest.approx(list(found.shares.values()), rel=1e-6)
    at += len(data["shares"])
    memory = [getattr(held, name) for held in plan.memory for name in MEMORY]
    assert list(floats[at : at + 5 * pp]) == pytest.approx(memory, rel=1e-6)
    at += 5 * pp + 3 * int(head["stages"])
    seconds = dict(zip(data["operations"], floats[at : at + len(data["operations"])], strict=True))
    assert {n: s for n, s in seconds.items() if s} == pytest.approx(
        {p.name: p.seconds for p in found.roofline.points}, rel=1e-6
    )
    return at + len(data["operations"]) - begin


def _check_timeline(data: dict[str, Any], starts: array[int], first: int, plan: Plan) -> int:
    shown = pictures(plan).timeline
    assert shown is not None
    events = list(shown.events())
    few = 1 + max(event.action.microbatch for event in events)
    order = [tuple(action) for row in data["schedules"][f"{plan.layout.pp},{few}"] for action in row]
    assert order == [(e.action.kind, e.action.stage, e.action.microbatch) for e in events]
    for event, start in zip(events, starts[first:], strict=False):
        assert start / 65535 * shown.makespan == pytest.approx(event.start, abs=shown.makespan / 65000)
    return len(events)
