"""The page of `fivefold play` in a real browser, where there is one: drawn, quiet, as wide as the window, by keyboard;
hostile runs are text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from marks import slow
from observe_browser import Browser
from observe_page import FAINT
from observe_run import make_run
from playing import Play, give, playing, press, until

from fivefold.files import owned
from fivefold.observe import timelines
from fivefold.schedules.timelines import COMPUTE, Span, StepTimeline
from fivefold_play.server import PARTS

EVIL = "<img src=x onerror=window.evil=1><script>window.evil=1</script>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A usual run, one whose name, recipe, metrics and traces are hostile, and one without a step."""
    folder = tmp_path_factory.mktemp("play") / "runs"
    make_run(folder / "usual", steps=200)
    evil = make_run(folder / EVIL.replace("/", "|"), steps=40)
    (evil / "recipe.toml").write_text((evil / "recipe.toml").read_text().replace("def ", EVIL))
    with (evil / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 40, "sample": EVIL, "alarm": EVIL}) + "\n")
    (evil / "restarts.jsonl").write_text(json.dumps({"time": EVIL, "why": EVIL}) + "\n")
    span = Span(COMPUTE, "forward", f"x.{EVIL}", 0.0, 0.5)
    timelines.write(evil, StepTimeline((span, Span(EVIL, "message", EVIL, 0.2, 0.6, 8)), 0, 20))
    (make_run(folder / "new", steps=4) / "metrics.jsonl").unlink()
    return folder


@pytest.fixture(scope="module")
def play(folder: Path) -> Iterator[Play]:
    with playing(folder) as play:
        yield play


def show(browser: Browser, play: Play, place: str, width: int = 1400, dark: bool = False) -> None:
    browser.open(f"{play.url}#{place}", width, dark=dark)


def named(run: Path) -> str:
    return (
        str(run)
        .replace("%", "%25")
        .replace("/", "%2F")
        .replace("<", "%3C")
        .replace(">", "%3E")
        .replace(" ", "%20")
    )


def check_quiet(browser: Browser, play: Play, width: int) -> None:
    refused = "400 (Bad Request)"  # the console's line for what the page tells in words
    assert [error for error in browser.errors if refused not in error] == []
    assert all(url.startswith((play.origin, "data:")) for url in browser.requests), browser.requests
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    assert browser.evaluate("window.evil") is None
    assert browser.evaluate("document.querySelectorAll('main img, main script, main style').length") == 0
    assert "token" not in browser.evaluate("location.href")
    assert browser.evaluate("document.cookie") == ""  # scripts cannot read it
    assert browser.evaluate("document.querySelectorAll('[role=group]:not([aria-label])').length") == 0
    for node in browser.call("Accessibility.getFullAXTree")["nodes"]:
        role = node.get("role", {}).get("value")
        if role in ("button", "link", "textbox", "searchbox", "combobox", "checkbox", "slider"):
            assert node.get("ignored") or node.get("name", {}).get("value"), node


@pytest.mark.parametrize(("width", "dark"), [(1400, False), (390, True)])
def test_a_run_is_drawn(browser: Browser, play: Play, folder: Path, width: int, dark: bool) -> None:
    show(browser, play, f"train/{named(folder / 'usual')}", width, dark)
    until(browser, "/^[1-9]/.test(document.querySelector('.figures dd')?.textContent)")
    until(browser, "document.querySelectorAll('canvas').length === 2")
    until(browser, "document.querySelector('.sample pre')?.textContent.startsWith('def f(x):')")
    until(browser, "document.querySelector('.copy pre')?.textContent.startsWith('fivefold train ')")
    # Something is drawn in the canvas: pixels of more than the grid's colours
    colors = """(() => {
      const canvas = document.querySelector('canvas'), found = new Set();
      const d = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
      for (let i = 0; i < d.length; i += 4) if (d[i + 3] > 200) found.add(d[i] << 16 | d[i + 1] << 8 | d[i + 2]);
      return found.size; })()"""
    assert browser.evaluate(colors) > 10
    check_quiet(browser, play, width)


def test_a_hostile_run_is_text(browser: Browser, play: Play, folder: Path) -> None:
    run = folder / EVIL.replace("/", "|")
    show(browser, play, f"train/{named(run)}")
    until(browser, "document.querySelectorAll('.alarm[role]').length === 2")
    press(browser, "Show, measured and planned")
    until(browser, "document.querySelector('main svg text')")
    until(browser, f"document.querySelector('.sample pre')?.textContent === {json.dumps(EVIL)}")
    assert EVIL in browser.evaluate("document.querySelector('.alarm').textContent")
    assert (
        browser.evaluate("document.querySelectorAll('main svg script, main svg img, main svg style').length")
        == 0
    )
    check_quiet(browser, play, 1400)
    show(browser, play, "runs")
    until(browser, "document.querySelectorAll('tbody tr').length === 3")
    until(browser, "![...document.querySelectorAll('tbody a')].some((a) => a.textContent === '...')")
    browser.evaluate("document.querySelectorAll('tbody input').forEach((box) => box.click())")
    browser.evaluate("[...document.querySelectorAll('tbody button')].forEach((more) => more.click())")
    press(browser, "Compare")  # one of them has no metrics
    until(browser, "document.querySelector('.wrong')?.textContent.includes('no metrics here')")
    browser.evaluate("""[...document.querySelectorAll('tbody tr')].forEach((row) => {
        if (row.textContent.includes('runs/new')) row.querySelector('input').click(); })""")
    press(browser, "Compare")
    until(browser, "document.querySelector('canvas')")
    assert browser.evaluate("document.querySelector('.wrong')") is None
    check_quiet(browser, play, 1400)


def test_a_step_comes_and_nothing_under_the_hand_changes(browser: Browser, play: Play, folder: Path) -> None:
    run = make_run(folder / "live", steps=30)
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join([*lines[:10], json.dumps({"step": 7, "alarm": "odd"}) + "\n"]))
    with owned(run):
        show(browser, play, f"train/{named(run)}")
        until(browser, "document.querySelector('.head .lead')?.textContent === 'training, step 7 of 30'")
        until(
            browser, "document.querySelector('main').textContent.includes('trains')"
        )  # its rank: this process
        until(browser, "document.querySelector('[aria-label=\"Another layout\"]')?.checkVisibility()")
        # All that stands there and can have the focus, and what a screen reader says
        browser.evaluate("""(() => {
          const kinds = ':is(select, option, input, button, a, summary, .scroll, .copy pre)';
          window.kept = [...document.querySelectorAll(`main ${kinds}`)];
          window.said = [];
          new MutationObserver((all) => all.forEach((one) => said.push(one.target.role + one.target.textContent)))
            .observe(document.querySelector('[role=alert]').parentElement, { childList: true, subtree: true });
          new MutationObserver(() => said.push(document.querySelector('main [role=status]').textContent))
            .observe(document.querySelector('main [role=status]'), { childList: true });
          document.querySelector('[aria-label="Another layout"]').focus(); })()""")
        with (run / "metrics.jsonl").open("a") as file:
            file.writelines(lines[10:])
        until(browser, "document.querySelector('.head .lead')?.textContent === 'training, step 30 of 30'")
        assert browser.evaluate("kept.filter((one) => !one.isConnected).map((one) => one.outerHTML)") == []
        assert browser.evaluate("[document.activeElement.ariaLabel, said]") == ["Another layout", []]
    until(browser, "document.querySelector('.head .lead')?.textContent === 'complete, step 30 of 30'")
    assert browser.evaluate("said") == ["complete"]
    until(
        browser,
        "[...document.querySelectorAll('button')].every((b) => b.textContent !== 'Pause' || b.hidden)",
    )
    check_quiet(browser, play, 1400)


def test_a_row_changes_and_its_controls_stay(browser: Browser, play: Play, folder: Path) -> None:
    run = make_run(folder / "row", steps=20)
    make_run(folder / "few", steps=10)
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:10]))
    with owned(run):
        show(browser, play, "runs")
        link = f"[...document.querySelectorAll('tbody a')].find((a) => a.hash.endsWith({named(run)!r}))"
        until(browser, f"{link}?.textContent === 'training, step 6 of 20'")
        few = "[...document.querySelectorAll('tbody tr')].find((one) => one.innerText.includes('step 10 of 10'))"
        until(browser, few)
        for words in ("Steps", "Steps ↑"):  # the highest first
            press(browser, words)
        until(browser, f"{few}.compareDocumentPosition({link}) & Node.DOCUMENT_POSITION_FOLLOWING")
        browser.evaluate(f"{link}.focus(); {link}.closest('tr').querySelector('input').click()")
        with (run / "metrics.jsonl").open("a") as file:
            file.writelines(lines[10:])
        until(browser, f"{link}.textContent === 'training, step 20 of 20'")
        until(browser, f"{few}.compareDocumentPosition({link}) & Node.DOCUMENT_POSITION_PRECEDING")
        assert browser.evaluate(f"document.activeElement === {link}")
        press(browser, "Compare")
        until(browser, "document.querySelector('canvas')")
        axis = "[...document.querySelectorAll('main select')].find((one) => one.value === 'step')"
        browser.evaluate(f"(window.axis = {axis}).focus(); axis.value = 'tokens'; axis.onchange?.()")
        browser.evaluate("axis.dispatchEvent(new Event('change'))")
        until(browser, "document.querySelector('.u-legend th')?.textContent.startsWith('tokens')")
        assert browser.evaluate("document.activeElement === axis")
        browser.evaluate("""(() => {
          const real = window.fetch;
          let late = 400; // milliseconds, of the first answer
          window.fetch = async (...given) => {
            const wait = late;
            late = 0;
            const found = await real(...given);
            await new Promise((done) => setTimeout(done, wait));
            return found;
          };
          for (const over of ['seconds', 'step']) { axis.value = over; axis.dispatchEvent(new Event('change')); }
        })()""")
        until(browser, "document.querySelector('.u-legend th')?.textContent.startsWith('step')")
        browser.evaluate("window.drawn = document.querySelector('.plot-here')")
        browser.evaluate("new Promise((done) => setTimeout(done, 600))")
        assert browser.evaluate("drawn.isConnected"), "an answer that comes late is not drawn"
    check_quiet(browser, play, 1400)


def test_a_hidden_page_leaves_its_streams(browser: Browser, play: Play, folder: Path) -> None:
    show(browser, play, f"train/{named(folder / 'usual')}")
    until(browser, "document.querySelectorAll('.copy button').length >= 2")
    browser.evaluate(
        "document.querySelector('.copy button').focus(); window.focused = document.activeElement"
    )
    before = len(browser.requests)
    for hidden in ("true", "false"):
        browser.evaluate(
            f"Object.defineProperty(document, 'hidden', {{ value: {hidden}, configurable: true }})"
        )
        browser.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
        browser.evaluate("new Promise((done) => setTimeout(done, 100))")
        asked = [url for url in browser.requests[before:] if re.search("/train/(jobs|watch)", url)]
        assert len(asked) == (0 if hidden == "true" else 2), asked
    until(
        browser,
        "performance.getEntriesByType('resource').filter((one) => one.name.includes('about')).length > 1",
    )
    assert browser.evaluate("document.activeElement === focused && focused.isConnected")
    check_quiet(browser, play, 1400)


def key(browser: Browser, name: str, code: int, text: str = "") -> None:
    for kind in ("keyDown", "keyUp"):
        browser.call("Input.dispatchKeyEvent", type=kind, key=name, code=name, windowsVirtualKeyCode=code,
                     **({"text": text} if text and kind == "keyDown" else {}))  # fmt: skip


def test_the_keyboard_reaches_all(browser: Browser, play: Play, folder: Path) -> None:
    show(browser, play, f"train/{named(folder / 'usual')}")
    until(browser, "document.querySelectorAll('.copy button').length >= 2")
    reached = set()
    for _ in range(40):
        key(browser, "Tab", 9)
        words = "document.activeElement.textContent.trim().slice(0, 30) || document.activeElement.type"
        reached.add(browser.evaluate(f"document.activeElement.tagName + ' ' + ({words})"))
    wanted = {"A Skip to the content", "A Train", "A Runs", "SUMMARY Start a run", "BUTTON Train again", "INPUT range",
              "INPUT checkbox", "BUTTON Copy", "SUMMARY Recipe"}  # fmt: skip
    assert wanted <= reached, wanted - reached
    assert (
        browser.evaluate("document.querySelector('[aria-label=\"Another layout\"]').checkVisibility()")
        is False
    )
    show(browser, play, "train")
    until(browser, "document.querySelectorAll('#tabs a').length >= 2")
    place = "[...document.querySelectorAll('#tabs a')].findIndex((one) => one.textContent === 'Runs')"
    for _ in range(2 + browser.evaluate(place)):
        key(browser, "Tab", 9)
    assert browser.evaluate("document.activeElement.textContent") == "Runs"
    key(browser, "Enter", 13, "\r")
    until(browser, "location.hash === '#runs' && document.querySelector('tbody')")
    assert browser.evaluate("document.querySelector('#tabs a[aria-current]').textContent") == "Runs"


WRONG = [
    ("train", "Recipe fields, one per line", "train.stepz=3", "Train", "did you mean 'steps'"),
    ("train", "Layout", "tp=3", "Train", "layout.tp = 3 must divide"),
    ("prove", "Layout", "dp=x", "Prove", "must be a whole number"),
    *slow(
        ("train", "Layout", "zz=2", "Train", "'zz' is not an axis"),
        ("prove", "Recipe fields, one per line", "nonsense", "Prove", "must have the form"),
        ("prove", "Steps", "99", "Prove", "steps: 1 to 20"),
    ),
]


@pytest.mark.parametrize(("part", "label", "value", "action", "said"), WRONG)
def test_the_field_that_is_wrong_is_marked(
    browser: Browser, play: Play, part: str, label: str, value: str, action: str, said: str
) -> None:
    """Its message stands under it, is legible, and stays until the field changes."""
    dark = len(value) % 2 == 0
    show(browser, play, part, 390 if dark else 1280, dark)
    if part == "train":
        until(browser, "document.querySelector('.starter option') && document.querySelector('.head .lead')")
        browser.evaluate("document.querySelector('.starter').closest('details').open = true")
    give(browser, label, value)
    press(browser, action)
    until(browser, f"document.querySelector('.wrong')?.textContent.includes({json.dumps(said)})")
    field = "document.querySelector('.wrong').closest('.field')"
    assert browser.evaluate(f"{field}?.querySelector('span').textContent") == label
    marked = f"[...document.querySelectorAll('[aria-invalid]')].map((one) => {field}.contains(one))"
    assert browser.evaluate(marked) == [True]
    top = f"document.querySelector('.wrong').getBoundingClientRect().top - {field}.lastElementChild"
    assert browser.evaluate(f"{top}.previousElementSibling.getBoundingClientRect().bottom") >= 0
    assert browser.evaluate(FAINT) == []
    assert browser.evaluate("document.documentElement.scrollWidth") <= (390 if dark else 1280)
    give(browser, label, "dp=1")
    assert browser.evaluate("document.querySelectorAll('.wrong, [aria-invalid]').length") == 0


def test_what_names_no_field_is_said_beside_the_button(browser: Browser, play: Play) -> None:
    for dark in (False, True):
        show(browser, play, "runs", 390, dark)
        until(browser, "document.querySelector('tbody tr')")
        press(browser, "Compare")
        until(browser, "document.querySelector('.row > .wrong')?.textContent.startsWith('Choose runs')")
        browser.evaluate("import('./page/kit.js').then((kit) => kit.tell('All of it is bad', true))")
        until(browser, "document.querySelector('#told.bad')")
        assert browser.evaluate(FAINT) == []
        check_quiet(browser, play, 390)
        browser.evaluate("document.querySelector('#told').click()")
        assert browser.evaluate("document.querySelector('#told').textContent") == ""


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("part", PARTS)
def test_all_text_has_contrast(browser: Browser, play: Play, part: str, dark: bool) -> None:
    show(browser, play, part, dark=dark)
    until(browser, f"document.querySelector('main > .{part} :is(button, .figures)')")
    until(browser, "!document.querySelector('[aria-busy]')")
    browser.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    verdict = "['good', 'bad'].map((kind) => Object.assign(document.createElement('p'), "
    verdict += "{ className: `verdict ${kind}`, textContent: kind }))"
    browser.evaluate(f"document.querySelector('main').append(...{verdict})")
    assert browser.evaluate(FAINT) == []
