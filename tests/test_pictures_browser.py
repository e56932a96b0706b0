"""Every picture of docs as Chromium draws it: no text overlaps another, leaves the picture, or is too small."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import REPO
from observe_browser import MISSING, Browser, find

PROGRAM = find()
pytestmark = pytest.mark.skipif(PROGRAM is None, reason=MISSING)
PICTURES = sorted((REPO / "docs").rglob("*.svg"))
QUICK = {"criteria.svg", "overlap.svg", "hybrid.svg"}
LEAST = 11  # pixels at a picture's natural size
FAULTS = """(() => {
  const root = document.documentElement, size = root.viewBox.baseVal, found = [];
  const scale = size.width ? root.getBoundingClientRect().width / size.width : 1;
  const frame = root.getBoundingClientRect();
  const texts = [...document.querySelectorAll("text")].filter(t => t.textContent.trim()).map(text => {
    const box = text.getBoundingClientRect(), tall = parseFloat(getComputedStyle(text).fontSize);
    const rest = (box.height - 0.72 * tall * scale) / 2;  // above and below the letters
    const turned = box.height > 2 * tall * scale;
    const inner = text.ownerSVGElement;  // what it cuts off is not seen
    const top = frame.top + inner.y.baseVal.value * scale, bottom = top + inner.height.baseVal.value * scale;
    if (inner !== root && (box.bottom <= top + 1 || box.top >= bottom - 1)) return null;
    return {words: text.textContent.trim(), tall, left: box.left, right: box.right,
      top: box.top + (turned ? 0 : rest), bottom: box.bottom - (turned ? 0 : rest)};
  }).filter(Boolean);
  const lines = [...document.querySelectorAll("path.limit, path.now")].map(line => line.getBoundingClientRect());
  const by = 1 * scale;
  texts.forEach((one, i) => {
    if (one.tall < LEAST) found.push(`small ${one.tall}: ${one.words}`);
    if (one.left < frame.left - by || one.right > frame.right + by || one.top < frame.top - by
      || one.bottom > frame.bottom + by) found.push(`outside: ${one.words}`);
    for (const line of lines.filter(line => line.width < by))
      if (line.left > one.left && line.left < one.right && line.top < one.bottom - by && one.top < line.bottom - by)
        found.push(`crossed by a line: ${one.words}`);
    for (const two of texts.slice(i + 1))
      if (one.left < two.right - by && two.left < one.right - by && one.top < two.bottom - by
        && two.top < one.bottom - by) found.push(`overlap: ${one.words} | ${two.words}`);
  });
  return found;
})()""".replace("LEAST", str(LEAST))


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    assert PROGRAM is not None
    with Browser(PROGRAM) as opened:
        yield opened


def faults(browser: Browser, picture: Path, dark: bool) -> list[str]:
    browser.open(picture, width=1600, height=1200, dark=dark)
    return browser.evaluate(FAULTS)


@pytest.mark.parametrize(
    "picture",
    [
        pytest.param(path, id=path.stem, marks=[] if path.name in QUICK else pytest.mark.slow)
        for path in PICTURES
    ],
)
def test_texts_of_a_picture_are_apart_inside_and_large_enough(browser: Browser, picture: Path) -> None:
    for dark in (False, True):
        assert faults(browser, picture, dark) == []
