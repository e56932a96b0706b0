"""What holds for every page that the program writes, checked in a real browser."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from observe_browser import Browser

LUMINANCE = (
    "(c => { const [r, g, b] = c.match(/[0-9.]+/g).slice(0, 3).map(v => v / 255)"
    ".map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);"
    "return 0.2126 * r + 0.7152 * g + 0.0722 * b; })"
)
"""WCAG 2's relative luminance of a CSS colour."""


def check_drawn(browser: Browser, page: Path, width: int, dark: bool) -> None:
    """Opens the page: it asks for nothing but itself, is as wide as the window, and light or dark as asked."""
    browser.open(page, width, dark=dark)
    assert browser.requests == [page.as_uri()], "the page asks for nothing but itself"
    assert browser.errors == []
    assert browser.evaluate("document.documentElement.scrollWidth") == width
    wider = "e => e.getBoundingClientRect().right > innerWidth + 1"
    found = f"[...document.querySelectorAll('body *')].filter({wider}).map(e => e.outerHTML.slice(0, 80))"
    assert browser.evaluate(found) == []
    background = browser.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, background[4:-1].split(","))) < 200) == dark


def check_contrast(browser: Browser, page: Path, parts: Iterable[tuple[str, str, float]]) -> None:
    """parts: (selector, style that has the colour, least contrast to the page), in light and in dark."""
    for dark in (False, True):
        browser.open(page, dark=dark)
        paper = browser.evaluate(f"{LUMINANCE}(getComputedStyle(document.body).backgroundColor)")
        for selector, style, least in parts:
            ink = browser.evaluate(
                f"{LUMINANCE}(getComputedStyle(document.querySelector({selector!r})).{style})"
            )
            assert (max(ink, paper) + 0.05) / (min(ink, paper) + 0.05) >= least, (selector, dark)


FAINT = f"""(() => {{
  const luminance = {LUMINANCE}, faint = [];
  const parts = (c) => {{
    const v = c.match(/[0-9.]+/g).map((one, i) => one * (c.startsWith('color(') && i < 3 ? 255 : 1));
    return [v.slice(0, 3), v[3] ?? 1];
  }};
  const over = (below, [color, alpha], opacity) => below.map((v, i) => v + (color[i] - v) * alpha * opacity);
  const all = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let text; (text = all.nextNode());) {{
    const e = text.parentElement, box = e.getBoundingClientRect(), own = getComputedStyle(e), chain = [];
    const quiet = e.closest('svg, noscript, script, style, .sr, .skip, :disabled, option, .player');
    if (!text.data.trim() || quiet || !e.checkVisibility() || !box.width) continue;
    for (let one = e; one; one = one.parentElement) chain.unshift(getComputedStyle(one));
    let paper = parts(getComputedStyle(document.body).backgroundColor)[0], opacity = 1;
    for (const one of chain) {{
      opacity *= one.opacity;
      paper = over(paper, parts(one.backgroundColor), opacity);
    }}
    const ink = over(paper, parts(own.color), opacity);
    const [low, high] = [ink, paper].map((c) => luminance(`rgb(${{c}})`)).sort((a, b) => a - b);
    const size = parseFloat(own.fontSize), large = size >= 24 || (size >= 18.66 && own.fontWeight >= 700);
    const contrast = (high + 0.05) / (low + 0.05);
    if (contrast < (large ? 3 : 4.5)) faint.push([text.data.trim().slice(0, 60), contrast.toFixed(2)]);
  }}
  return faint;
}})()"""
"""In the page that is open: texts with less contrast to what is behind them than WCAG 2 AA asks for, with opacity."""


def check_structure(browser: Browser) -> None:
    """Of the page that is open: what screen readers need."""
    assert browser.evaluate("document.documentElement.lang") == "en"
    ids = "[...document.querySelectorAll('[id]')].map(e => e.id)"
    assert browser.evaluate(f"{ids}.length === new Set({ids}).size")
    named = "[...document.querySelectorAll('[aria-labelledby]')].map(e => e.getAttribute('aria-labelledby'))"
    assert browser.evaluate(f"{named}.every(id => document.getElementById(id))")


def check_policy(browser: Browser, page: Path, evil: str) -> None:
    """If escaping ever failed, the policy of the page would hold. evil: HTML that sets window.hacked."""
    broken = page.with_name("broken.html")
    broken.write_text(page.read_text("utf-8").replace("</main>", evil + "</main>"))
    browser.open(broken)
    assert browser.evaluate("window.hacked === undefined")
    assert any("Content Security Policy" in error for error in browser.errors)
