"""The report page in a real browser, where there is one: drawn, quiet, and as wide as the window."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import observe_browser
import pytest
from observe_page import check_contrast, check_drawn, check_policy, check_structure
from observe_run import make_run
from playing import press, until

from fivefold.observe.compare import AXES, FIGURES, best, differences, read_runs
from fivefold.observe.report import write_report
from fivefold_play import recorded

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


@pytest.mark.parametrize(("width", "dark"), [(1400, True), (390, False)])
def test_a_comparison_is_the_page_with_recorded_answers(
    browser: observe_browser.Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, width: int, dark: bool
) -> None:
    """Of a short and a long run, so that the x axis is logarithmic. Any of the runs can be compared, over any axis."""
    monkeypatch.chdir(tmp_path)  # for names that are numbers, which objects of JavaScript sort
    folders = [make_run(Path(name), steps) for name, steps in (("2", 40), ("1", 400))]
    runs = read_runs(folders)
    (path := tmp_path / "comparison.html").write_text(recorded.of_runs(runs, "as text"))
    browser.open(path, width, dark=dark)
    until(browser, "document.querySelector('canvas') && document.querySelectorAll('tbody tr').length > 2")
    assert browser.requests == [path.as_uri()], "the page asks for nothing but itself"
    assert browser.errors == []
    assert browser.evaluate("document.documentElement.scrollWidth") == width
    check_structure(browser)
    assert count(browser, "h1") == 1
    legend = "[...document.querySelectorAll('.u-legend .u-label')].map((one) => one.textContent)"
    assert browser.evaluate(legend) == ["step", "2", "1"]
    bold = "[...document.querySelectorAll('td b')].map((one) => one.textContent)"
    lowest = best(runs)
    assert {*browser.evaluate(bold)} == {FIGURES[key][1](value) for key, value in lowest.items()}
    fields = "[...document.querySelectorAll('section [aria-label=Differences] tbody th')].map((one) => one.textContent)"
    assert browser.evaluate(fields) == [*differences(runs)]
    for axis in AXES[1:]:
        change = f"one.value = {axis!r}; one.dispatchEvent(new Event('change'))"
        browser.evaluate(f"{{ const one = document.querySelector('section select'); {change} }}")
        until(browser, f"{legend}[0] === {axis!r}")
    browser.evaluate("document.querySelector('tbody input').click()")
    press(browser, "Compare")
    until(browser, f"{legend}.length === 2")
    assert browser.evaluate(legend) == ["FLOPs", "1"]
    assert browser.evaluate("document.querySelector('.alarm').textContent").endswith(
        "those of all runs of this file."
    )
    assert browser.errors == []
