"""The page of a plan in a real browser, where there is one: sliders show what the planner predicts."""

from __future__ import annotations

import itertools
import random
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import observe_browser
import pytest
from observe_page import check_contrast, check_drawn, check_policy, check_structure
from typer.testing import CliRunner

from fivefold.cli.main import app
from fivefold.cli.plan import Typed, write_page
from fivefold.errors import UserError
from fivefold.observe.format import memory_text
from fivefold.plan.cluster.clusters import parse
from fivefold.plan.pages import grid
from fivefold.plan.pages.pictures import pictures
from fivefold.plan.predict import Plan, predict
from fivefold.recipe import load

PROGRAM = observe_browser.find()
needs_browser = pytest.mark.skipif(PROGRAM is None, reason=observe_browser.MISSING)
SETS = ["train.global_batch_size=256"]
LAYOUT = "pp=2,tp=4,dp=8,zero=1,sp=true"
RECIPE = load("llama-7b", SETS, LAYOUT)
BUDGET = 400


@pytest.fixture(scope="module")
def browser() -> Iterator[observe_browser.Browser]:
    assert PROGRAM
    with observe_browser.Browser(PROGRAM) as found:
        yield found


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "plan.html"
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(grid, "BUDGET", BUDGET)
        write_page(path, RECIPE, Typed("llama-7b", SETS, "h100:64"))
    return path


def set_sliders(browser: observe_browser.Browser, positions: dict[str, int]) -> None:
    moves = "".join(f"document.getElementById('s-{key}').value = {at};" for key, at in positions.items())
    browser.evaluate(f"{moves} document.getElementById('s-tp').dispatchEvent(new Event('input'))")


def text(browser: observe_browser.Browser, selector: str) -> str:
    return browser.evaluate(f"document.querySelector({selector!r}).innerText")


def column(browser: observe_browser.Browser, selector: str) -> list[str]:
    return browser.evaluate(f"[...document.querySelectorAll({selector!r})].map(e => e.textContent)")


def value(browser: observe_browser.Browser, key: str) -> float:
    return float(browser.evaluate(f"document.getElementById({key!r}).dataset.value"))


def check_against(browser: observe_browser.Browser, plan: Plan) -> None:
    """All that is shown is this plan."""
    found, step = pictures(plan), plan.step.seconds
    assert value(browser, "step") == pytest.approx(step, rel=1e-6)
    assert value(browser, "speed") == pytest.approx(plan.tokens_per_s, rel=1e-6)
    assert value(browser, "mfu") == pytest.approx(plan.mfu, rel=1e-6)
    assert value(browser, "peak") == pytest.approx(plan.peak_bytes, rel=1e-6)
    assert text(browser, "#mfu") == f"{100 * plan.mfu:.1f}%"
    assert text(browser, "#peak") == memory_text(plan.peak_bytes)
    assert ("does not fit" in text(browser, "#room")) != plan.fits
    assert column(browser, "#memory .end") == [memory_text(held.total) for held in plan.memory]
    shares = [f"{s / step:.1%}" for s in found.shares.values() if s >= 0.0005 * step]
    assert column(browser, "#shares .end") == shares
    points = sorted(found.roofline.points, key=lambda p: -p.seconds)
    assert column(browser, "#operations td:nth-child(4)") == [f"{p.seconds / step:.1%}" for p in points]
    assert column(browser, "#operations td:nth-child(5)") == [found.roofline.bound(p) for p in points]
    assert bool(browser.evaluate("document.getElementById('pipeline').hidden")) == (found.timeline is None)
    if found.timeline is not None:
        idle = [f"{found.timeline.idle_share(rank):.1%} idle" for rank in range(plan.layout.pp)]
        assert [t for t in column(browser, "#timeline text") if t.endswith("idle")] == idle
        drawn = column(browser, "#timeline rect > title")
        assert len(drawn) == sum(map(len, found.timeline.rows))


@needs_browser
def test_sliders_show_what_the_planner_predicts(browser: observe_browser.Browser, page: Path) -> None:
    browser.open(page)
    center = grid.base(RECIPE, "h100:64", {})
    axes = grid.axes(center, BUDGET)
    check_against(browser, predict(RECIPE, parse("h100:64")))
    draw, valid = random.Random(1), 0
    while valid < 12:
        positions = {axis.key: draw.randrange(len(axis.values)) for axis in axes}
        values = {axis.key: axis.values[positions[axis.key]] for axis in axes}
        set_sliders(browser, positions)
        for key, number in values.items():
            assert text(browser, f"#o-{key}") == f"{number:,}"
        if browser.evaluate("!document.getElementById('problem').hidden"):
            with pytest.raises(UserError) as error:
                grid.plan_at(center, values)
            assert str(error.value).removeprefix("recipe: ") in text(browser, "#problem")
            assert text(browser, "#step") == "–"
            assert text(browser, "#room") == ""
            assert (
                browser.evaluate("getComputedStyle(document.getElementById('memory')).visibility") == "hidden"
            )
            continue
        check_against(browser, from_command(text(browser, "#command")))
        valid += 1
    assert browser.errors == []


def from_command(line: str) -> Plan:
    """What the command that the page shows would predict."""
    words = shlex.split(line)
    pairs = list(itertools.pairwise(words))
    sets = [b for a, b in pairs if a == "--set"]
    (layout,), (cluster,) = ([b for a, b in pairs if a == name] for name in ("--layout", "--cluster"))
    assert words[:2] == ["fivefold", "plan"]
    return predict(load(words[2], sets, layout), parse(cluster))


@needs_browser
def test_keyboard_moves_a_slider(browser: observe_browser.Browser, page: Path) -> None:
    browser.open(page)
    axis = next(axis for axis in grid.axes(grid.base(RECIPE, "h100:64", {}), BUDGET) if axis.key == "tp")
    before = value(browser, "step")
    browser.evaluate("document.getElementById('s-tp').focus()")
    browser.call("Input.dispatchKeyEvent", type="keyDown", key="Home", code="Home", windowsVirtualKeyCode=36)
    assert text(browser, "#o-tp") == str(axis.values[0])
    browser.call(
        "Input.dispatchKeyEvent",
        type="keyDown",
        key="ArrowRight",
        code="ArrowRight",
        windowsVirtualKeyCode=39,
    )
    assert text(browser, "#o-tp") == str(axis.values[1])
    shown = browser.evaluate("document.getElementById('s-tp').getAttribute('aria-valuetext')")
    assert shown == str(axis.values[1])
    other = next(i for i in range(len(axis.values)) if i != axis.at)
    set_sliders(browser, {"tp": other})
    assert value(browser, "step") != before
    browser.evaluate("document.getElementById('own').click()")
    assert text(browser, "#o-tp") == "4"
    assert value(browser, "step") == before


@needs_browser
def test_frontier_is_of_what_the_sliders_reach(browser: observe_browser.Browser, page: Path) -> None:
    browser.open(page)
    rows = browser.evaluate(
        "[...document.querySelectorAll('#best tr')].map(r => [...r.cells].map(c => c.innerText))"
    )
    speed = [float(row[1].replace(",", "")) for row in rows]
    memory = [float(row[2].removesuffix(" GiB")) for row in rows]
    assert speed == sorted(speed, reverse=True)
    assert memory == sorted(memory, reverse=True)
    center = grid.base(RECIPE, "h100:64", {})
    fast: list[Any] = []
    for values, plan in grid.cells(center, grid.axes(center, BUDGET)):
        same = all(
            values[k] == v
            for k, v in center.values.items()
            if k not in ("microbatch_size", "tp", "pp", "zero")
        )
        if same and isinstance(plan, Plan) and plan.fits:
            fast.append(plan)
    best = max(fast, key=lambda plan: plan.tokens_per_s)
    assert speed[0] == pytest.approx(best.tokens_per_s, rel=1e-3)
    browser.evaluate("document.querySelector('#best button').click()")
    assert value(browser, "speed") == pytest.approx(best.tokens_per_s, rel=1e-6)


@needs_browser
@pytest.mark.parametrize("width", [1400, 768, 390])
@pytest.mark.parametrize("dark", [False, True])
def test_page_is_drawn_without_network_errors_or_overflow(
    browser: observe_browser.Browser, page: Path, width: int, dark: bool
) -> None:
    check_drawn(browser, page, width, dark)
    small = "parseFloat(getComputedStyle(e).fontSize) < 10.5 && e.getClientRects().length"
    assert (
        browser.evaluate(
            f"[...document.querySelectorAll('text, p, td, dt, dd, label')].filter(e => {small}).length"
        )
        == 0
    )


@needs_browser
def test_text_and_colours_have_contrast(browser: observe_browser.Browser, page: Path) -> None:
    """WCAG 2 AA: 4.5 to 1 for text, 3 to 1 for shapes; in light and dark."""
    shapes = [f"#memory i.{kind}" for kind in ("params", "gradients", "optimizer", "activations", "buffers")]
    parts = [(s, "backgroundColor", 3.0) for s in [*shapes, "#memory .limit"]]
    parts += [
        (s, "color", 4.5)
        for s in ("h1", ".lead", ".slider label", ".figures dt", ".keys", "th", "td", ".note")
    ]
    parts += [(s, "fill", 4.5) for s in (".picture text", ".picture text.name")]
    parts += [(s, "fill", 3.0) for s in (".picture .F", ".picture .B")]
    check_contrast(browser, page, parts)


@needs_browser
def test_structure_for_screen_readers(browser: observe_browser.Browser, page: Path) -> None:
    browser.open(page)
    assert browser.evaluate("document.title") == "llama-7b: plan"
    check_structure(browser)
    assert browser.evaluate("[...document.querySelectorAll('input')].every(e => e.labels.length === 1)")
    assert browser.evaluate("[...document.querySelectorAll('svg')].every(e => e.ariaLabel.length > 20)")


@needs_browser
def test_a_recipes_name_cannot_run_scripts(
    browser: observe_browser.Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grid, "BUDGET", 20)
    image = "x<img src=x onerror='window.hacked = 1'>"
    script = "</script><script>window.hacked = 2</script>"
    path = tmp_path / "plan.html"
    search = [predict(RECIPE, parse("h100:64"))]
    write_page(path, RECIPE, Typed(image + ".toml", [f"model.layers={script}"], "h100:64"), search)
    browser.open(path)
    assert browser.evaluate("window.hacked === undefined")
    assert browser.errors == []
    assert text(browser, "h1") == image
    words = shlex.split(text(browser, "#command"))
    assert words[2] == image + ".toml"
    assert words[4] == f"model.layers={script}"
    check_policy(browser, path, image + script)


def test_page_by_the_command(tmp_path: Path) -> None:
    missing = CliRunner().invoke(
        app, ["plan", "quickstart", "--cluster", "h100:2", "--html", str(tmp_path / "no" / "x")]
    )
    assert "cannot be written" in str(missing.exception)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["dp=64,zero=1", "pp=4,tp=4,dp=4,zero=1"])
def test_a_whole_page_is_small(tmp_path: Path, layout: str) -> None:
    path = tmp_path / "plan.html"
    write_page(path, load("llama-7b", SETS, layout), Typed("llama-7b", SETS, "h100:64"))
    assert path.stat().st_size < 3e6
