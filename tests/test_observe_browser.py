"""The report page in a real browser, where there is one: drawn, quiet, and as wide as the window."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import observe_browser
import pytest
from observe_page import check_contrast, check_drawn, check_policy, check_structure
from observe_run import make_run

from fivefold.observe.compare import page, read_runs
from fivefold.observe.report import write_report

PROGRAM = observe_browser.find()
pytestmark = pytest.mark.skipif(PROGRAM is None, reason=observe_browser.MISSING)


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
    check_drawn(browser, report, width, dark)
    # Every chart's visible line has an extent on the screen.
    boxes = browser.evaluate(
        "[...document.querySelectorAll('.scale.linear .line')].map(e => e.getBoundingClientRect().width)"
    )
    assert len(boxes) == 12
    assert min(boxes) > width / 5


def test_text_has_contrast(browser: observe_browser.Browser, report: Path) -> None:
    """WCAG 2 AA: 4.5 to 1 for text, 3 to 1 for the lines of charts; in light and dark."""
    texts = ("h1", ".lead", ".figures small", ".scale .left", ".legend", "pre")
    lines = (".line.first", ".line.second")
    check_contrast(
        browser, report, [*((t, "color", 4.5) for t in texts), *((s, "stroke", 3.0) for s in lines)]
    )


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
    check_structure(browser)
    labels = browser.evaluate("[...document.querySelectorAll('[role=img]')].map(e => e.ariaLabel)")
    assert len(labels) == 7
    assert all("at step" in label for label in labels)


def test_a_sample_cannot_run_scripts(browser: observe_browser.Browser, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 10)
    evil = "</pre><script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'>"
    with (run / "metrics.jsonl").open("a") as file:
        file.write(f'{{"step": 10, "sample": "{evil}"}}\n')
    path = write_report(run)
    browser.open(path)
    assert browser.evaluate("window.hacked === undefined")
    assert browser.evaluate(f"document.body.innerText.includes({evil!r})")
    check_policy(browser, path, evil)


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a short and a long run, so that the x axes are logarithmic."""
    folder = tmp_path_factory.mktemp("compared")
    runs = [make_run(folder / name, steps) for name, steps in (("short", 40), ("long", 400))]
    (folder / "comparison.html").write_text(page(read_runs(runs)))
    return folder / "comparison.html"


@pytest.mark.parametrize(("width", "dark"), [(1400, True), (390, False)])
def test_a_comparison_is_drawn(
    browser: observe_browser.Browser, comparison: Path, width: int, dark: bool
) -> None:
    browser.open(comparison, width, dark=dark)
    assert browser.errors == []
    assert browser.evaluate("document.documentElement.scrollWidth") == width
    assert count(browser, ".chart") == 8
    boxes = browser.evaluate(
        "[...document.querySelectorAll('.scale.linear .line')].map(e => e.getBoundingClientRect().width)"
    )
    assert min(boxes) > width / 10
    check_structure(browser)


def test_the_cursor_of_a_comparison_stays_on_its_axis(
    browser: observe_browser.Browser, comparison: Path
) -> None:
    browser.open(comparison)
    plot = "document.querySelector('[aria-labelledby=loss-tokens] .plot')"
    browser.evaluate(f"{plot}.scrollIntoView()")
    x, y = browser.evaluate(f"(b => [b.left + b.width / 2, b.top + 20])({plot}.getBoundingClientRect())")
    browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    shown = browser.evaluate(f"{plot}.querySelector('.values').innerText.split('\\n')")
    assert shown[0] == "tokens"
    middle = (4096 * 40 / 20 * 4096 * 400) ** 0.5  # a logarithmic axis from a twentieth of the short run
    assert abs(int(shown[1].replace(",", "")) / middle - 1) < 0.1
    assert count(browser, ".cursor:not([hidden])") == 2, "training and validation loss over tokens"
