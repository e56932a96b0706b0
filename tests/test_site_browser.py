"""The documentation's site (`make docs`) in a real browser, where there are both."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import observe_browser
import pytest
from commands import REPO
from patience import PATIENCE

PROGRAM = observe_browser.find()
SITE = REPO / "build" / "site"
LECTURES = ["docs/lectures/11_communication", "docs/lectures/13_scaling_laws"]  # with formulas
PAGES = ["index", "docs/recipes", "docs/parallelism/index", "reference/comm", "examples/own_model.py",
         "docs/lectures/index", *LECTURES]  # fmt: skip
pytestmark = pytest.mark.skipif(
    PROGRAM is None or not (SITE / "index.html").exists(),
    reason="no site in build/site: make docs" if PROGRAM else observe_browser.MISSING,
)


@pytest.fixture(scope="module")
def browser() -> Iterator[observe_browser.Browser]:
    assert PROGRAM
    with observe_browser.Browser(PROGRAM, timeout=60 * PATIENCE) as found:
        yield found


@pytest.mark.parametrize("name", PAGES)
def test_pages_are_drawn(browser: observe_browser.Browser, name: str) -> None:
    """Without a network or errors, as wide as the window, light and dark, with headings and pictures."""
    for width, dark in ((1300, False), (390, True)):
        browser.open(SITE / f"{name}.html", width, dark=dark)
        assert [url for url in browser.requests if not url.startswith(("file:", "data:", "about:"))] == []
        assert browser.errors == []
        assert browser.evaluate("document.documentElement.scrollWidth") == width
        assert browser.evaluate("document.querySelectorAll('h1').length") == 1
        assert browser.evaluate("[...document.images].every(e => e.complete && e.naturalWidth > 0)")
        background = browser.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, background[4:-1].split(",")[:3])) < 200) == dark, background


@pytest.mark.parametrize("name", LECTURES)
def test_formulas_are_drawn(browser: observe_browser.Browser, name: str) -> None:
    """As MathML with a size, in sentences and in lines of their own. No TeX is left outside of code."""
    browser.open(SITE / f"{name}.html")
    drawn = "[...document.querySelectorAll('{} math')].map(e => e.getBoundingClientRect().width)"
    for kind in ("span.arithmatex", "div.arithmatex"):
        widths = browser.evaluate(drawn.replace("{}", kind))
        assert widths, kind
        assert min(widths) > 0, kind
    text = browser.evaluate(
        "(() => { const page = document.querySelector('article').cloneNode(true);"
        " page.querySelectorAll('pre, code').forEach(e => e.remove()); return page.textContent; })()"
    )
    assert [mark for mark in ("$", r"\(", r"\[", r"\frac", "arithmatex") if mark in text] == []


@pytest.mark.parametrize(
    ("words", "most", "first"),
    [("DeepSeek", None, "docs/"), ("out of memory", 1, "docs/start/troubleshooting")],
)
def test_the_search_of_a_site_opened_as_files(
    browser: observe_browser.Browser, words: str, most: int | None, first: str
) -> None:
    """most: results among which one page is."""
    links = "[...document.querySelectorAll('.md-search-result__link')].map(e => e.href)"
    # The page reads the field when a key is let go: text that is put there after the search is ready is not seen.
    typed = f"""(() => {{
      const query = document.querySelector('[data-md-component=search-query]');
      query.focus();
      query.value = {json.dumps(words)};
      query.dispatchEvent(new KeyboardEvent('keyup'));
    }})()"""
    browser.open(SITE / "index.html")
    browser.evaluate("document.querySelector('[data-md-toggle=search]').click()")
    found, end = list[str](), time.monotonic() + 60 * PATIENCE
    while not found:
        assert time.monotonic() < end, browser.errors
        browser.evaluate(typed)
        time.sleep(0.1)
        found = browser.evaluate(links)
    assert any(link.split("/build/site/")[1].startswith(first) for link in found[:most])
