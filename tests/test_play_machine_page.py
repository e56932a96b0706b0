"""The part "Machine" in a real browser, where there is one: live, and as the file that opens offline."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from observe_browser import Browser
from observe_page import LUMINANCE, check_policy, check_structure
from playing import IDLE, Play, playing, press, slide, until
from test_play_recorded import AT, cell, unpacked

from fivefold_plan.cluster import measured
from fivefold_play import recorded
from fivefold_play.machine import answer
from fivefold_play.position import Position


@pytest.fixture(scope="module")
def play(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Play]:
    with pytest.MonkeyPatch.context() as patched, playing(tmp_path_factory.mktemp("runs")) as found:
        patched.setattr(measured, "load", lambda: None)
        yield found


def figures(browser: Browser, panel: int = 0) -> list[list[str]]:
    found = f"[...document.querySelectorAll('.panel')[{panel}].querySelectorAll('.figures > div')]"
    parts = "[dt, dd.firstChild, dd.querySelector('small')].map((part) => part.textContent)"
    return browser.evaluate(f"{found}.map(({{ children: [dt, dd] }}) => {parts})")


def expected(at: Position, **moves: str) -> list[list[str]]:
    return json.loads(json.dumps(answer(at, moves)["figures"]))


def test_sliders_show_the_plan_and_lead_out_of_what_cannot_be(browser: Browser, play: Play) -> None:
    browser.open(f"{play.url}#machine")
    until(browser, f"{IDLE} && document.querySelectorAll('.panel figure').length")
    assert browser.evaluate("document.querySelector('.panel .alarm')") is None, (
        "nothing is wrong at first sight"
    )
    said = browser.evaluate("document.querySelector('.panel').innerText")
    assert "has not been measured: its times are rough" in said
    assert "Measure this machine" in said
    assert "Find the fastest" not in said, "the search asks for measured times"
    assert figures(browser) == expected(Position("quickstart", cluster="local:2"))
    assert [row[1] for row in figures(browser) if row[0] == "MFU"] == ["–"]
    large = expected(Position("llama3-8b", cluster="h100:64"))
    assert figures(browser, 1) == large
    titles = "[...document.querySelectorAll('.panel h2')].map((one) => one.textContent)"
    assert browser.evaluate(titles) == ["This machine, 2 ranks", "llama3-8b on 64 x h100"]
    slide(browser, "Tokens in a sequence", "512", -1)
    assert figures(browser, 1) == large, "the sliders are of the recipe that is chosen"
    slide(browser, "Tokens in a sequence", "256", -1)
    press(browser, "Remove")
    press(browser, "The same on 64 H100")
    until(browser, f"document.querySelectorAll('.panel').length === 2 && {IDLE}")
    assert figures(browser, 1) == expected(Position("quickstart", cluster="h100:64"))
    slide(browser, "Devices", "4", 1)
    slide(browser, "Tensor parallel (tp)", "2", 1)
    layout = browser.evaluate("document.querySelectorAll('.panel')[1].querySelector('.layout').textContent")
    assert "tp=2" in layout
    at = Position("quickstart", (), layout, "h100:4")
    assert figures(browser, 1) == expected(at)
    slide(browser, "Tokens in a sequence", "512", -1)
    assert figures(browser, 1) == expected(at, seq_len="512")
    link = "[...document.querySelectorAll('.panel')[1].querySelectorAll('button')].some("
    link += "(one) => one.textContent === 'Prove this layout')"
    assert browser.evaluate(link)
    slide(browser, "Devices", "16", 1)
    assert not browser.evaluate(link), "more ranks than a proof has here"
    slide(browser, "Devices", "4", 1)
    slide(browser, "Tensor parallel (tp)", "2", 1)
    slide(browser, "Pipeline (pp)", "4", 1)
    slide(browser, "Tensor parallel (tp)", "4", 1)
    problem = browser.evaluate("document.querySelectorAll('.panel')[1].querySelector('.alarm').textContent")
    assert "4 ranks" in problem
    assert figures(browser, 1) == []
    browser.evaluate("document.querySelectorAll('.panel')[1].querySelector('.alarm button').click()")
    time.sleep(0.05)
    until(browser, IDLE)
    assert len(figures(browser, 1)) == 5
    assert browser.evaluate("document.activeElement.tagName") == "H2", (
        "a button that has gone leaves the focus near"
    )
    press(browser, "The same on 64 H100")
    until(browser, f"{IDLE} && document.querySelectorAll('.panel').length === 3")
    press(browser, "Remove")
    assert browser.evaluate("document.querySelectorAll('.panel').length") == 2
    assert browser.errors == []
    check_structure(browser)


def test_keys_move_a_slider(browser: Browser, play: Play) -> None:
    browser.open(f"{play.url}#machine")
    until(browser, f"{IDLE} && document.querySelectorAll('.panel figure').length")
    browser.evaluate("document.querySelectorAll('.panel')[1].querySelector('input[type=range]').focus()")
    browser.call("Input.dispatchKeyEvent", type="keyDown", key="Home", code="Home", windowsVirtualKeyCode=36)
    until(browser, IDLE)
    assert "1 x h100" in browser.evaluate("document.querySelectorAll('.panel h2')[1].textContent")
    assert browser.evaluate("document.activeElement.getAttribute('aria-valuetext')") == "1"


def test_a_layout_goes_to_the_form_of_a_new_run(browser: Browser, play: Play) -> None:
    at = {"recipe": "dial", "layout": "dp=2,tp=2", "sets": "model.depth=3\ntrain.microbatch_size=1"}
    browser.open(f"{play.url}#train/new/{quote(json.dumps(at))}")
    until(browser, "document.querySelector('.starter select')?.value === 'dial'")
    assert browser.evaluate("document.querySelector('.starter input').value") == at["layout"]
    assert browser.evaluate("document.querySelector('.starter textarea').value") == at["sets"]
    assert browser.evaluate("document.querySelector('.starter').closest('details').open")
    assert browser.errors == []


@pytest.mark.parametrize("width", [1400, 390])
@pytest.mark.parametrize("dark", [False, True])
def test_page_fits_and_has_contrast(browser: Browser, play: Play, width: int, dark: bool) -> None:
    browser.open(f"{play.url}#machine", width, dark=dark)
    until(browser, f"{IDLE} && document.querySelectorAll('.panel figure').length")
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    assert browser.errors == []
    labels = "[...document.querySelectorAll('input, select')].every(e => e.labels.length === 1)"
    assert browser.evaluate(labels)
    paper = browser.evaluate(f"{LUMINANCE}(getComputedStyle(document.body).backgroundColor)")
    for selector in (".slider label", ".figures dt", ".figures small", ".layout", "figcaption", "summary"):
        color = f"getComputedStyle(document.querySelector({selector!r})).color"
        ink = browser.evaluate(f"{LUMINANCE}({color})")
        assert (max(ink, paper) + 0.05) / (min(ink, paper) + 0.05) >= 4.5, selector


def test_the_recorded_page_shows_what_was_recorded(browser: Browser, tmp_path: Path) -> None:
    path, image = tmp_path / "plan.html", "x<img src=x onerror='window.hacked = 1'>"
    path.write_text(recorded.page(AT, image, "a plan", budget=24)[0])
    data: dict[str, Any] = unpacked(path.read_text())
    browser.open(path, 390)
    until(browser, f"{IDLE} && document.querySelectorAll('.panel figure').length")
    assert browser.requests == [path.as_uri()], "the page asks for nothing but itself"
    assert browser.errors == []
    assert browser.evaluate("window.hacked === undefined")
    assert browser.evaluate("document.querySelector('h1').textContent") == image
    assert browser.evaluate("document.documentElement.scrollWidth") == 390
    assert figures(browser) == expected(AT)
    for tp, zero in (("8", "1"), ("8", "3"), ("2", "3")):
        slide(browser, "Tensor parallel (tp)", tp)
        slide(browser, "ZeRO stage", zero)
        assert figures(browser) == expected(AT, tp=tp, zero=zero)
    own = next(i for i in range(len(data["answers"])) if cell(data, i)["position"]["tp"] == "2")
    assert cell(data, own)["position"]["tp"] == "2"
    check_policy(browser, path, image)
