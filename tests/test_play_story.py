"""`fivefold play` as a person uses it, in a real browser: from an empty folder through all six parts to an answer.

With FIVEFOLD_PICTURES=docs/pictures it writes the screenshots of docs/play.md.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from observe_browser import Browser
from patience import PATIENCE
from playing import IDLE, drop, give, press, slide, until

from fivefold_plan.cluster import measured

pytestmark = pytest.mark.slow
CAPITALS = {
    "France": "Paris",
    "Japan": "Tokyo",
    "Peru": "Lima",
    "Kenya": "Nairobi",
    "Norway": "Oslo",
    "Cuba": "Havana",
}
ASKED = ("What is the capital of {}?", "Name the capital of {}.", "Which city is the capital of {}?")
SHARED = (
    'data.source="runs/.play/texts-1"', "data.chat_template=plain", "data.tokenizer=bytes", "model.seq_len=128",
    "train.global_batch_size=16", "train.val_every=10", "train.val_sequences=8",
)  # fmt: skip
FIELDS = (
    *SHARED, "model.layers=2", "model.dim=128", "train.steps=120", "train.microbatch_size=2",
    "train.sample_every=30", "train.sample_tokens=60", "train.sample_prompt=User: What", "checkpoint.every=60",
)  # fmt: skip
STATE = "(document.querySelector('.head .lead')?.textContent ?? '')"
FIRST = "runs/quickstart-1"


def conversations() -> str:
    """Rows of questions with their answers, two in each."""
    rows = [
        [(asked.format(place), f"The capital of {place} is {city}.") for place, city in pair]
        for pair in (((a, CAPITALS[a]), (b, CAPITALS[b])) for a in CAPITALS for b in CAPITALS)
        for asked in ASKED
    ]
    messages = [
        [
            {"role": role, "content": text}
            for turn in row
            for role, text in zip(("user", "assistant"), turn, strict=True)
        ]
        for row in rows
    ]
    return "".join(json.dumps({"messages": one}) + "\n" for one in messages)


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The command's own server, at this address."""
    words = ["play", "runs", "--port", "0", "--no-browser"]
    command = [sys.executable, "-m", "fivefold", *words]
    with subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.terminate()
        assert process.stderr.read() == ""
        process.wait(20 * PATIENCE)


def go(browser: Browser, part: str, ready: str) -> None:
    """Chooses a part by its tab, and waits for what shows that it is there."""
    until(browser, "document.querySelector('#tabs a')")
    browser.evaluate(f"document.querySelector('#tabs a[href=\"#{part}\"]').click()")
    until(browser, f"document.querySelector('main .{part}') && {ready}")


def picture(browser: Browser, name: str, place: str = "") -> None:
    """Writes a screenshot of this name, from a place of the page on, if asked to."""
    if folder := os.environ.get("FIVEFOLD_PICTURES"):
        if place:
            browser.evaluate(f"document.querySelector({place!r}).scrollIntoView()")
        until(browser, "document.getElementById('told').textContent === ''")
        browser.screenshot(Path(folder) / f"play_{name}.png", whole=False)


def size(browser: Browser, width: int, height: int) -> None:
    """Makes the window as large."""
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    browser.call("Emulation.setDeviceMetricsOverride", **metrics)


def trained(browser: Browser, step: int, kind: str = "training|complete") -> None:
    """Waits until the run that is shown has trained so far."""
    found = f"{STATE}.match(/^(?:{kind}), step ([0-9,]+)/)?.[1].replace(',', '')"
    until(browser, f"Number({found}) >= {step}", 240)


def text(browser: Browser) -> None:
    drop(browser, [("capitals.jsonl", conversations())])
    documents = "document.querySelectorAll('.text dd')[1]?.firstChild.textContent"
    until(browser, f"{documents} === '{len(CAPITALS) ** 2 * len(ASKED)}'")
    picture(browser, "text")
    press(browser, "Train on this")
    until(browser, "document.querySelector('.starter textarea')?.value.includes('data.chat_template=plain')")


def train(browser: Browser) -> None:
    own = browser.evaluate("document.querySelector('.starter textarea').value").splitlines()
    assert own == [*SHARED[:2]]
    give(browser, "Recipe fields, one per line", "\n".join(FIELDS))
    press(browser, "Train")
    trained(browser, 1)
    until(browser, "/^[1-9]/.test(document.querySelector('.figures dd')?.textContent)")
    until(browser, "document.querySelectorAll('[aria-label=Ranks] tbody tr').length === 2")


def pause_and_resume(browser: Browser) -> None:
    trained(browser, 10)
    press(browser, "Pause")
    trained(browser, 10, "stopped")
    step = browser.evaluate(f"Number({STATE}.match(/step (\\d+)/)[1])")
    browser.evaluate("document.querySelector('[aria-label=\"Another layout\"]').value = 'tp=2'")
    press(browser, "Resume in this layout")
    trained(browser, step + 5)
    press(browser, "Show, measured and planned")
    until(browser, "document.querySelector('main svg')?.textContent.includes('planned')")
    trained(browser, 100)
    picture(browser, "train")
    on_a_projector(browser)
    trained(browser, 120, "complete")


def on_a_projector(browser: Browser) -> None:
    """With 1280 x 720 pixels at 150%, the timeline is whole, and figures and the loss fit on one screen."""
    size(browser, 853, 480)
    place = "document.querySelector({!r}).getBoundingClientRect()".format
    until(browser, f"{place('canvas')}.bottom - {place('.head')}.top < 480")
    assert browser.evaluate(f"{place('main svg')}.right <= {place('main .scroll:has(svg)')}.right")
    size(browser, 1280, 920)


def machine(browser: Browser) -> None:
    go(browser, "machine", f"{IDLE} && document.querySelector('.panel .figures div')")
    press(browser, "The same on 64 H100")
    until(browser, f"{IDLE} && document.querySelectorAll('.panel .figures').length === 2")
    give(browser, "Recipe", "llama3-8b")  # which this machine cannot hold
    until(browser, f"{IDLE} && document.querySelector('.panel .alarm').textContent.includes('does not fit')")
    slide(browser, "Tensor parallel (tp)", "2", 1)
    assert browser.evaluate("document.querySelector('.panel:last-child .layout').textContent").startswith(
        "dp=32,tp=2"
    )
    picture(browser, "machine", ".machines")
    give(browser, "Recipe", "quickstart")
    until(browser, f"{IDLE} && !document.querySelector('.panel .alarm')")
    slide(browser, "Size: depth", "2", -1)
    slide(browser, "Tensor parallel (tp)", "2")
    press(browser, "Train this")
    until(browser, "document.querySelector('.starter textarea')?.value.includes('model.depth=2')")
    give(browser, "Recipe fields, one per line", "\n".join(["model.depth=2", "train.steps=40", *SHARED]))
    press(browser, "Train")
    until(browser, "location.hash.endsWith('quickstart-2')")
    trained(browser, 40, "complete")


def runs(browser: Browser) -> None:
    go(browser, "runs", "document.querySelectorAll('tbody tr').length === 2")
    until(browser, "![...document.querySelectorAll('tbody a')].some((one) => one.textContent === '...')")
    browser.evaluate("document.querySelectorAll('tbody input').forEach((box) => box.click())")
    press(browser, "Compare")
    until(browser, "document.querySelector('canvas')")
    picture(browser, "runs")
    browser.evaluate(f"document.querySelector('[aria-label=\"More on {FIRST}\"]').click()")
    until(
        browser, f"document.querySelector('.copy pre')?.textContent === 'fivefold train {FIRST}/recipe.toml'"
    )
    press(browser, "Export to Hugging Face")
    until(browser, f"document.querySelector('main').textContent.includes('Written to {FIRST}-hf-1')")


def prove(browser: Browser) -> None:
    go(browser, "machine", f"{IDLE} && document.querySelector('.panel .figures div')")
    slide(browser, "Tensor parallel (tp)", "2")
    press(browser, "Prove this layout")
    until(browser, "document.querySelector('main .prove')")
    give(browser, "Steps", 1)
    give(browser, "Recipe fields, one per line", "model.layers=2\nmodel.seq_len=64\ndata.tokenizer=bytes")
    press(browser, "Prove")
    until(browser, "document.querySelector('.verdict')", 240)
    verdict = browser.evaluate("document.querySelector('.verdict').textContent")
    assert re.fullmatch("tp=2.* computes the same as one process.", verdict)
    browser.evaluate("document.querySelector('.player .next').click()")
    assert browser.evaluate("document.querySelector('.where').textContent").startswith("round 1 of")
    size(browser, 1280, 1320)
    picture(browser, "prove", ".verdict")
    size(browser, 1280, 920)


def talk(browser: Browser) -> None:
    go(browser, "talk", "document.querySelector('button.main:not(:disabled)')")
    give(browser, "Run", FIRST)
    until(browser, "document.querySelector('button.main:not(:disabled)')?.textContent === 'Send'")
    give(browser, "Temperature", 0)
    for place, city in [*CAPITALS.items()][:2]:
        give(browser, "Message", f"What is the capital of {place}?")
        press(browser, "Send")
        until(browser, f"document.querySelector('.said').textContent.trim().endsWith({city + '.'!r})")
    give(browser, "Message", "What is the capital of Spain?")  # of which it knows nothing
    press(browser, "Send")
    until(browser, "/Spain\\?[^]+\\.$/.test(document.querySelector('.said').textContent)")
    browser.evaluate("""[...document.querySelectorAll('.token')].reduce((a, b) =>
      a.style.getPropertyValue('--p') < b.style.getPropertyValue('--p') ? a : b).click()""")
    assert browser.evaluate("document.querySelectorAll('.detail meter').length") == 5
    until(browser, "document.querySelector('button.main:not(:disabled)')")
    picture(browser, "talk")


def test_from_an_empty_folder_to_an_answer(
    browser: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "runs").mkdir()
    monkeypatch.setenv("FIVEFOLD_CACHE", str(tmp_path / "cache"))
    measured.save(measured.assumed_table())  # which takes minutes to measure
    with served(tmp_path) as url:
        browser.open(f"{url}#text", 1280, 920)
        until(browser, "document.querySelector('.text .sample')")  # the text that is shipped
        text(browser)
        train(browser)
    with served(tmp_path) as url:  # The server has ended, and the run trains on: another one finds it
        browser.open(f"{url}#train", 1280, 920)
        pause_and_resume(browser)
        run = tmp_path / FIRST
        lines = (run / "metrics.jsonl").read_text().splitlines()
        assert sum('"loss"' in line for line in lines) == 120  # each step once: the curve went on
        assert "tp = 2" in (run / "recipe.toml").read_text()
        machine(browser)
        runs(browser)
        assert (tmp_path / f"{FIRST}-hf-1/model.safetensors").exists()
        prove(browser)
        talk(browser)
        assert [error for error in browser.errors if "net::ERR_" not in error] == []
