"""The report page in a real browser, where there is one: drawn, quiet, and as wide as the window."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import observe_browser
import pytest
from observe_run import make_run

from fivefold.observe.report import write_report

PROGRAM = observe_browser.find()
pytestmark = pytest.mark.skipif(
    PROGRAM is None, reason="no Chromium or Chrome here to open the report page with"
)


@pytest.fixture(scope="module")
def browser() -> Iterator[observe_browser.Browser]:
    assert PROGRAM
    with observe_browser.Browser(PROGRAM) as found:
        yield found


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(make_run(tmp_path_factory.mktemp("a-rather-long-name-of-a-run-folder" * 2), 400))


def count(browser: observe_browser.Browser, selector: str) -> int:
    return browser.evaluate(f"document.querySelectorAll({selector!r}).length")


@pytest.mark.parametrize("width", [1400, 768, 390])
@pytest.mark.parametrize("dark", [False, True])
def test_page_is_drawn_without_network_errors_or_overflow(
    browser: observe_browser.Browser, report: Path, width: int, dark: bool
) -> None:
    browser.open(report, width, dark=dark)
    assert browser.requests == [report.as_uri()], "the page asks for nothing but itself"
    assert browser.errors == []
    assert browser.evaluate("document.documentElement.scrollWidth") == width
    wider = "e => e.getBoundingClientRect().right > innerWidth + 1"
    found = f"[...document.querySelectorAll('body *')].filter({wider}).map(e => e.outerHTML.slice(0, 80))"
    assert browser.evaluate(found) == []
    # Every chart's visible line has an extent on the screen.
    boxes = browser.evaluate(
        "[...document.querySelectorAll('.scale.linear .line')].map(e => e.getBoundingClientRect().width)"
    )
    assert len(boxes) == 12
    assert min(boxes) > width / 5
    background = browser.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, background[4:-1].split(","))) < 200) == dark


def test_text_has_contrast(browser: observe_browser.Browser, report: Path) -> None:
    """WCAG 2 AA: 4.5 to 1 for text, 3 to 1 for the lines of charts; in light and dark."""
    luminance = (
        "(c => { const [r, g, b] = c.match(/[0-9.]+/g).slice(0, 3).map(v => v / 255)"
        ".map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);"
        "return 0.2126 * r + 0.7152 * g + 0.0722 * b; })"
    )
    for dark in (False, True):
        browser.open(report, dark=dark)
        paper = browser.evaluate(f"{luminance}(getComputedStyle(document.body).backgroundColor)")
        parts = {
            "h1": 4.5,
            ".lead": 4.5,
            ".figures small": 4.5,
            ".scale .left": 4.5,
            ".legend": 4.5,
            "pre": 4.5,
        }
        for selector, least in parts.items():
            ink = browser.evaluate(
                f"{luminance}(getComputedStyle(document.querySelector({selector!r})).color)"
            )
            assert (max(ink, paper) + 0.05) / (min(ink, paper) + 0.05) >= least, (selector, dark)
        for selector in (".line.first", ".line.second"):
            line = browser.evaluate(
                f"{luminance}(getComputedStyle(document.querySelector({selector!r})).stroke)"
            )
            assert (max(line, paper) + 0.05) / (min(line, paper) + 0.05) >= 3, (selector, dark)


def test_log_scale_hover_and_keys(browser: observe_browser.Browser, report: Path) -> None:
    browser.open(report)
    scales = "[...document.querySelector('.chart').querySelectorAll('.scale')]"
    shown = f"{scales}.map(e => e.getClientRects().length > 0)"
    assert browser.evaluate(shown) == [True, False]
    browser.evaluate("document.querySelector('.chart input.log').click()")
    assert browser.evaluate(shown) == [False, True]

    box = "document.querySelector('.plot').getBoundingClientRect()"
    x, y = browser.evaluate(f"[{box}.left + {box}.width / 4, {box}.top + 20]")
    browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    values = "document.querySelector('.values').innerText.split('\\n')"
    found = browser.evaluate(values)
    assert found[:2] == ["step", "101"]
    assert found[2] == "train"
    assert 1 < float(found[3]) < 9
    assert count(browser, ".cursor:not([hidden])") == 7, "every chart points at the step"
    browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=1, y=1)
    assert count(browser, ".cursor:not([hidden])") == 0

    browser.evaluate("document.querySelector('.plot').focus()")
    for key in ("Home", "ArrowRight"):
        browser.call("Input.dispatchKeyEvent", type="keyDown", key=key)
    assert browser.evaluate(values)[:2] == ["step", "2"]
    assert browser.errors == []


def test_structure_for_screen_readers(browser: observe_browser.Browser, report: Path) -> None:
    browser.open(report)
    assert count(browser, "h1") == 1
    assert browser.evaluate("document.title").endswith("training report")
    assert browser.evaluate("document.documentElement.lang") == "en"
    ids = "[...document.querySelectorAll('[id]')].map(e => e.id)"
    assert browser.evaluate(f"{ids}.length === new Set({ids}).size")
    labels = browser.evaluate("[...document.querySelectorAll('[role=img]')].map(e => e.ariaLabel)")
    assert len(labels) == 7
    assert all("at step" in label for label in labels)
    named = "[...document.querySelectorAll('[aria-labelledby]')].map(e => e.getAttribute('aria-labelledby'))"
    assert browser.evaluate(f"{named}.every(id => document.getElementById(id))")


def test_a_sample_cannot_run_scripts(browser: observe_browser.Browser, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 10)
    evil = "</pre><script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'>"
    with (run / "metrics.jsonl").open("a") as file:
        file.write(f'{{"step": 10, "sample": "{evil}"}}\n')
    path = write_report(run)
    browser.open(path)
    assert browser.evaluate("window.hacked === undefined")
    assert browser.evaluate(f"document.body.innerText.includes({evil!r})")
    # And if escaping ever failed, the policy of the page would hold.
    (broken := run / "broken.html").write_text(path.read_text("utf-8").replace("</main>", evil + "</main>"))
    browser.open(broken)
    assert browser.evaluate("window.hacked === undefined")
    assert any("Content Security Policy" in error for error in browser.errors)
