"""What the pictures of a plan show, and how they look in a terminal."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from rich.text import Text
from typer.testing import CliRunner

from fivefold.cli.main import app
from fivefold.observe.format import memory_text
from fivefold.recipe import load
from fivefold.sharding.layout import to_text as layout_text
from fivefold_plan.cluster.clusters import parse
from fivefold_plan.pages import pictures as plan_text
from fivefold_plan.pages.pictures import (
    Pictures,
    as_rows,
    frontier_svg,
    memory_svg,
    pictures,
    roofline_svg,
)
from fivefold_plan.predict import Plan, predict
from fivefold_plan.search import search as searching
from fivefold_plan.search.search import frontier, search
from fivefold_plan.time.stage_costs import pipeline, stage_costs

LAYOUTS = (
    "dp=64,zero=1",
    "dp=16,tp=4,zero=3,recompute=full",
    "pp=4,tp=4,dp=4,zero=1,sp=true",
    "pp=2,dp=32,zero=1,recompute=selective",
    "pp=4,dp=16,schedule=zbv,virtual_stages=2",
    "pp=4,dp=16,schedule=interleaved,virtual_stages=2",
    "cp=2,tp=8,dp=4,zero=1",
)


def plan(layout: str, *overrides: str, recipe: str = "llama-7b", cluster: str = "h100:64") -> Plan:
    sets = ["train.global_batch_size=512", "train.microbatch_size=1", *overrides]
    return predict(load(recipe, sets, layout), parse(cluster))


def lines(found: Pictures, width: int = 80, full: bool = True) -> list[str]:
    return [line.plain for line in plan_text.draw(found, width, False, full)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_shares_make_up_the_step(layout: str) -> None:
    found = pictures(plan(layout))
    assert sum(found.shares.values()) == pytest.approx(found.plan.step.seconds, rel=0.01)
    assert min(found.shares.values()) >= 0
    assert all(p.seconds > 0 and p.moved > 0 for p in found.roofline.points)


def test_flops_of_the_roofline_are_the_models() -> None:
    """2 FLOPs a weight of a product and token in forward, 4 in backward; full recomputation repeats the blocks' 2."""
    tokens = 512 * 4096 / 64
    block, output = 32 * (4 * 4096**2 + 3 * 4096 * 11008), 4096 * 32000
    for recompute, forward in (("none", 1), ("full", 2)):
        points = pictures(plan(f"dp=64,zero=1,recompute={recompute}")).roofline.points
        products = sum(p.flops for p in points if p.name != "attention")
        assert products == pytest.approx(((2 * forward + 4) * block + 6 * output) * tokens)
        attention = next(p for p in points if p.name == "attention")
        assert attention.flops == pytest.approx(32 * 2 * 4096 * 4096 * tokens * (forward + 2.5))


def test_roofline_keeps_under_its_roof() -> None:
    found = pictures(plan("pp=4,tp=4,dp=4,zero=1,sp=true")).roofline
    assert found.ridge == pytest.approx(989.4e12 / 3.35e12)
    for p in found.points:
        assert p.rate <= min(found.peak, p.intensity * found.bandwidth) * (1 + 1e-9) or not p.flops
        assert p.moved / p.seconds <= found.bandwidth
    bound = {p.name: found.bound(p) for p in found.points}
    assert bound["up"] == bound["attention"] == "compute"
    assert bound["norm1"] == bound["add1"] == "memory"
    thin = pictures(
        plan("dp=64,zero=1", "model.seq_len=32")
    ).roofline  # 32 tokens: weights are read for few products
    assert {p.name: thin.bound(p) for p in thin.points}["up"] == "memory"


def test_timeline_has_the_planned_times() -> None:
    found = plan("pp=4,tp=4,dp=4,zero=1", "train.global_batch_size=32")  # 8 microbatches: all are drawn
    shown = pictures(found).timeline
    assert shown is not None
    assert shown.makespan == pytest.approx(dict(found.step.terms)["pipeline, first start to last end"])
    costs = stage_costs(found.setting)
    forward = {e.action.stage: e.end - e.start for e in shown.events() if e.action.kind == "F"}
    assert forward == pytest.approx({i: c.forward for i, c in enumerate(costs)})
    assert forward[3] != forward[1] != forward[0]
    assert pictures(plan("dp=64,zero=1")).timeline is None


def test_of_many_microbatches_some_are_drawn() -> None:
    shown = pictures(plan("pp=4,tp=4,dp=4,zero=1"))
    assert shown.timeline is not None
    assert shown.plan.setting.microbatches == 128
    assert len(shown.timeline.rows[0]) == 2 * 8
    assert any("8 of 128 microbatches" in line for line in lines(shown))
    costs = stage_costs(shown.plan.setting)
    busy = 128 * sum(c.seconds for c in costs)
    whole = 1 - busy / (4 * pipeline(shown.plan.setting, costs)[0])
    assert 0.03 < whole < shown.timeline.bubble / 2
    assert any(
        f"{shown.timeline.bubble:.1%} idle in these, {whole:.1%} in the step" in x for x in lines(shown)
    )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("width", [80, 100, 140])
def test_lines_fit_the_terminal(layout: str, width: int) -> None:
    shown = lines(pictures(plan(layout)), width)
    assert max(map(len, shown)) <= width
    assert "\x1b" not in "".join(shown)


def test_memory_bars() -> None:
    found = pictures(plan("pp=4,tp=4,dp=4,zero=1"))
    bars = [line for line in lines(found) if line.startswith("  stage ")]
    assert len(bars) == 4
    room = 80 - 21
    for bar, held in zip(bars, found.plan.memory, strict=True):
        assert bar.endswith(memory_text(held.total))
        for name, (fill, _) in plan_text.KINDS.items():
            assert abs(bar.count(fill) - room * getattr(held, name) / found.plan.limit) <= 1.5
        assert bar[11:].index("┃") == room - 1, "the limit is the bar's end"


def test_memory_beyond_the_limit() -> None:
    found = pictures(plan("dp=64", "train.microbatch_size=4"))
    held = found.plan.memory[0].total
    assert held > found.plan.limit
    (bar,) = (line for line in lines(found) if line.startswith("  stage "))
    assert bar[11:].index("┃") == round(59 * found.plan.limit / held)
    assert not bar[11:70].rstrip("∙░▒▓█┃"), "the bar fills its room"


def test_one_stage_and_a_pipeline_in_words() -> None:
    one = "\n".join(lines(pictures(plan("dp=64,zero=1"))))
    assert "stage 0" in one
    assert "stage 1" not in one
    assert "pipeline" not in one
    many = "\n".join(lines(pictures(plan("pp=4,tp=4,dp=4,zero=1"))))
    assert "rank 3 │" in many
    assert "waiting for other stages" in many
    for text in (one, many):
        assert "compute-bound operations" in text
        assert "limit" in text
        assert "  a up" in text


def test_short_form_of_a_long_pipeline() -> None:
    found = pictures(plan("pp=32,dp=2"))
    short, full = lines(found, full=False), lines(found)
    assert sum(line.startswith("  stage") for line in short) == plan_text.MOST_ROWS
    assert sum(line.startswith("  stage") for line in full) == 32
    assert any("stage 31" in line for line in short)
    assert "  8 of 32; --pictures draws all" in short


def test_colour_is_only_an_addition() -> None:
    found = pictures(plan("pp=4,tp=4,dp=4,zero=1"))
    plain = lines(found)
    coloured = list(plan_text.draw(found, 80, True, True))
    assert [line.plain for line in coloured] == plain
    assert any(isinstance(line, Text) and line.spans for line in coloured)


def test_svg_pictures() -> None:
    found = pictures(plan("pp=4,tp=4,dp=4,zero=1"))
    bars = memory_svg(found.plan, "<b>'s & memory")
    assert "<b>" not in bars
    assert "&lt;b&gt;&#x27;s &amp; memory" in bars
    assert bars.count('height="22"') == 4 * 5
    roof = roofline_svg(found.roofline, found.plan.step.seconds, "roof")
    assert roof.count("<circle") == len(found.roofline.points)


def test_command_line(tmp_path: Path) -> None:
    options = ["plan", "llama-7b", "--cluster", "h100:64"]
    plain = CliRunner().invoke(app, options)
    drawn = CliRunner().invoke(app, [*options, "--pictures"], env={"COLUMNS": "80"})
    assert plain.exit_code == drawn.exit_code == 0
    assert drawn.output.startswith(plain.output)
    assert "roofline" in drawn.output
    assert "roofline" not in plain.output
    assert "\x1b" not in drawn.output
    assert max(map(len, drawn.output[len(plain.output) :].splitlines())) <= 80
    both = CliRunner().invoke(app, [*options, "--pictures", "--json"])
    assert "leave one out" in str(both.exception)


def test_frontier_of_a_search() -> None:
    """Each is the fastest that takes no more; the best is the search's own."""
    recipe = load("llama-7b", ["train.global_batch_size=64", "train.microbatch_size=1"], "dp=1")
    found = search(recipe, parse("h100:8"), 3)
    plans = frontier(found)
    assert len(plans) > 3
    assert plans[-1] == found.plans[0]
    for smaller, larger in itertools.pairwise(plans):
        assert smaller.peak_bytes < larger.peak_bytes
        assert smaller.tokens_per_s < larger.tokens_per_s
        fastest = found.within(larger.peak_bytes - 1)
        assert fastest is not None
        assert smaller.tokens_per_s <= fastest.tokens_per_s < larger.tokens_per_s
    shown = [line.plain for line in plan_text.frontier(plans, 80)]
    assert max(map(len, shown)) <= 80
    assert sum("█" in line for line in shown) == len(plans)
    words = "".join(line.strip() for line in shown)
    assert all(layout_text(plan.layout) in words for plan in plans)
    rows = as_rows(plans)
    picture = frontier_svg(rows, found.plans[0].limit, "frontier")
    assert picture.count("<circle") == len(plans)


def test_frontier_by_the_command(tmp_path: Path) -> None:
    options = ["plan", "search", "llama-7b", "--set", "train.global_batch_size=64", "--cluster", "h100:8"]
    drawn = CliRunner().invoke(app, [*options, "--pictures"])
    assert drawn.exit_code == 0
    assert drawn.output.index("frontier: ") < drawn.output.index("memory per device")


def test_no_frontier_is_searched_that_nobody_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of its plans takes another search."""
    drawn = list[bool]()
    monkeypatch.setattr(searching, "frontier", lambda found: drawn.append(True) or [])
    options = ["plan", "search", "quickstart", "--cluster", "h100:2", "--top", "1"]
    for more, times in (([], 0), (["--json"], 0), (["--pictures"], 1)):
        assert CliRunner().invoke(app, [*options, *more]).exit_code == 0
        assert len(drawn) == times
