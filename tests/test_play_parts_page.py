"""The parts Talk, Prove and Text in a real browser, where there is one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest
from observe_browser import Browser
from observe_page import check_structure
from playing import Play, drop, give, playing, press, until
from test_chat import make_run
from test_play_talk import HOSTILE, metrics

DONE = "[...document.querySelectorAll('main button')].some((e) => e.textContent === 'Stop' && e.disabled)"
READY = "document.querySelector('button.main:not(:disabled)')"


@pytest.fixture(scope="module")
def play(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Play]:
    folder = tmp_path_factory.mktemp("play") / "runs"
    for source in ("plain", ""):
        metrics(make_run(folder / (source or "base"), source, seq_len=512))
    with playing(folder, jobs=True) as play:
        yield play


class Page:
    """A part of the page, used as a person would."""

    def __init__(self, browser: Browser, play: Play, part: str, dark: bool = False) -> None:
        self.browser, self.all = browser, browser.evaluate
        browser.open(f"{play.url}#{part}", 390, 844, dark=dark)

    def wait(self, what: str) -> None:
        until(self.browser, what)

    def text(self, selector: str) -> str:
        return self.all(f"document.querySelector({selector!r})?.textContent ?? ''")

    def give(self, label: str, value: object) -> None:
        give(self.browser, label, value)

    def press(self, words: str) -> None:
        press(self.browser, words)

    def key(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            self.browser.call("Input.dispatchKeyEvent", type=kind, key=key)

    def check(self) -> None:
        """Nothing is beside a phone's screen, and nothing of what was said became markup or an error."""
        assert self.all("document.documentElement.scrollWidth") == 390
        assert self.all("document.querySelector('main img, main script:not([type])')") is None
        assert self.browser.errors == []
        check_structure(self.browser)


def test_prove(browser: Browser, play: Play) -> None:
    page = Page(browser, play, "prove/dp=2")
    page.wait("document.querySelector('.where')?.textContent === 'start'")
    page.give("Collective", "all_gather")
    page.give("Algorithm", "ring")
    page.wait("document.querySelector('.player h2')?.textContent.startsWith('all_gather \\'ring')")
    assert page.text(".numbers").splitlines()[1].split() == ["rank", "0", "10", "·", "·", "·"]
    page.all("document.querySelector('.next').focus()")
    page.key("ArrowRight")
    assert page.text(".where") == "round 1 of 3"
    assert page.text(".numbers").splitlines()[2].split() == ["rank", "1", "10", "21", "·", "·"]
    page.give("Ranks", 99)
    page.wait("document.querySelector('.alarm')?.textContent.includes('ranks: 1 to 32')")
    browser.errors.clear()  # the refusal's status
    page.give("Steps", 1)
    fields = ["train.seed=2", "model.seq_len=32", "train.global_batch_size=4", "train.sample_prompt=it's"]
    page.give("Recipe fields, one per line", "\n".join(fields))
    page.press("Prove")
    page.wait("document.querySelector('.verdict')")
    assert page.text(".verdict") == "dp=2 computes the same as one process."
    assert page.all("document.querySelectorAll('.prove tbody tr').length") == 9
    sets = " ".join("--set '" + field.replace("'", "'\\''") + "'" for field in fields)
    words = f"{sets} --layout dp=2 --steps 1 --mode fp32"
    assert page.text(".copy pre") == f"fivefold verify quickstart {words}"
    page.check()
    page.browser.open(
        f"{play.url}#prove/{HOSTILE.strip().replace('/', '%2F').replace('<', '%3Cb%3E%3C')}", 390
    )
    page.wait("document.querySelector('.where')?.textContent")
    page.press("Prove")
    page.wait("document.querySelector('.field > .wrong')?.textContent")
    browser.errors.clear()
    page.check()


@pytest.mark.parametrize(
    ("place", "layout"), [("prove//quickstart", ""), ("prove/100%", "100%"), ("prove/", "dp=2")]
)
def test_an_address_may_be_typed(browser: Browser, play: Play, place: str, layout: str) -> None:
    page = Page(browser, play, place)
    page.wait("document.querySelector('.prove .field input')")
    label = "[...document.querySelectorAll('.field')].find((e) => e.innerText.startsWith('Layout'))"
    assert page.all(f"{label}.querySelector('input').value") == layout
    page.check()


def test_a_server_that_has_gone_is_told_of(browser: Browser, tmp_path: Path) -> None:
    with playing(tmp_path) as gone:
        page = Page(browser, gone, "runs")
        page.wait("document.querySelector('.runs h1')")
    page.wait("document.getElementById('told').textContent.startsWith('The server does not answer')")
    browser.errors.clear()


def test_text(browser: Browser, play: Play) -> None:
    page = Page(browser, play, "text")
    page.wait("document.querySelector('.sample')")
    assert "609" not in page.text("h1")
    drop(browser, [(f"{HOSTILE}.txt", HOSTILE * 400), ("rows.csv", "text\n" + "a row of mine\n" * 400)])
    page.wait(
        "document.querySelector('.row input')?.value.includes('texts-1') && document.querySelector('.sample')"
    )
    assert page.all("[...document.querySelectorAll('.text dd')].map((e) => e.firstChild.textContent)")[
        :2
    ] == ["2", "401"]
    assert HOSTILE.strip()[:20] in page.text(".sample pre")
    page.check()
    page.press("Train on this")
    page.wait("[...document.querySelectorAll('textarea')].some((e) => e.value.startsWith('data.source=\"'))")
    assert "texts-1" in page.all("document.querySelector('textarea').value")
    page.check()


def test_talk(browser: Browser, play: Play) -> None:
    page = Page(browser, play, "talk")
    page.wait(READY)
    page.give("Run", "base")
    page.wait(f"{READY} && document.querySelector('button.main').textContent === 'Continue'")
    assert "This is a base model" in page.text(".lead")
    system = "document.querySelector('[placeholder=\"Answer in one sentence.\"]').checkVisibility()"
    assert not page.all(system)
    page.give("Text to continue", HOSTILE)
    page.give("Tokens", 12)
    page.press("Continue")
    page.wait(DONE)
    first = page.text(".said")
    assert first.startswith(HOSTILE)
    page.press("Go on")
    page.wait(DONE)
    assert page.text(".given") == first
    page.all("document.querySelector('.said').focus()")
    for _ in range(2):
        page.key("ArrowRight")
    assert (
        page.all("[...document.querySelectorAll('.token')].findIndex((e) => e.classList.contains('on'))") == 1
    )
    assert page.all("document.querySelectorAll('.detail meter').length") >= 5
    for label, value, said in (
        ("Tokens", 99_999, "max_tokens: at most"),
        ("Temperature", -1, "temperature = -1"),
    ):
        page.give(label, value)
        page.press("Continue")
        page.wait(f"document.querySelector('.field > .wrong')?.textContent.includes({said!r})")
        assert page.text(".field:has(.wrong) span") == label
        page.give(label, 1)
        assert page.text(".wrong") == ""
    browser.open(f"{play.url}#talk/{quote(str(play.app.state.home / 'base'), '')}", 1280, 720)
    page.wait(READY)
    page.all("document.querySelector('.said').append('long text\\n'.repeat(60))")
    lowest = "Math.max(...[...document.querySelectorAll('.composer *')].map((e) => e.getBoundingClientRect().bottom))"
    assert page.all(f"{lowest} <= innerHeight"), "the input stays in view below a long answer"
    page = Page(browser, play, f"talk/{quote(str(play.app.state.home / 'base'), '')}")
    page.wait(READY)
    page.give("Temperature", 0)
    page.give("Tokens", 10_000)
    page.all("""new MutationObserver((_, seen) => {  // in the page, since the answer may end soon by itself
      const stop = [...document.querySelectorAll('button')].find((one) => one.textContent === 'Stop');
      if (stop.disabled || document.querySelectorAll('.token').length < 5) return;
      seen.disconnect();
      stop.click();
      document.body.dataset.stopped = 'yes';
    }).observe(document.body, { childList: true, subtree: true })""")
    page.press("Continue")
    page.wait(f"document.body.dataset.stopped && {DONE}")
    page.check()
    page.give("Run", "plain")
    page.wait(f"{READY} && document.querySelector('button.main').textContent === 'Send'")
    assert page.all(system)
    page.give("Tokens", 5)
    for number in (1, 2):
        page.give("Message", f"{number} {HOSTILE}")
        page.press("Send")
        page.wait(DONE)
    assert page.all("[...document.querySelectorAll('.given')].map((e) => e.textContent)") == [
        f"{number} {HOSTILE}" for number in (1, 2)
    ]
    page.check()
