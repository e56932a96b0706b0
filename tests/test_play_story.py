"""`fivefold play` as a person uses it, in a real browser: from an empty folder to an exported model.

With FIVEFOLD_PICTURES=docs/pictures it writes the screenshots of docs/play.md.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import observe_browser
import pytest
from observe_browser import Browser
from playing import press, until

PROGRAM = observe_browser.find()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(PROGRAM is None, reason=observe_browser.MISSING),
]
FIELDS = (
    "train.steps=300", "model.layers=2", "model.dim=128", "model.seq_len=256", "train.global_batch_size=8",
    "train.val_every=25", "train.sample_every=25", "train.sample_tokens=80", "checkpoint.every=100",
)  # fmt: skip


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
        process.wait(20)


def see(browser: Browser, url: str, width: int = 1100, dark: bool = False) -> None:
    browser.call(
        "Emulation.setDeviceMetricsOverride", width=width, height=920, deviceScaleFactor=1, mobile=width < 500
    )
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    browser.call("Emulation.setEmulatedMedia", features=[scheme])
    browser.call("Page.navigate", url=url)
    browser._until(lambda m: m.get("method") == "Page.loadEventFired")


def picture(browser: Browser, name: str) -> None:
    if folder := os.environ.get("FIVEFOLD_PICTURES"):
        browser.screenshot(Path(folder) / f"play_{name}.png", whole=False)


def training(step: int) -> str:
    """True in the page once the run has trained so far."""
    return f"Number(document.querySelector('.lead[role]')?.textContent.match(/step (\\d+)/)?.[1]) >= {step}"


def test_from_an_empty_folder_to_an_exported_model(tmp_path: Path) -> None:
    assert PROGRAM
    state = "(document.querySelector('.lead[role]')?.textContent ?? '')"
    (tmp_path / "runs").mkdir()
    with Browser(PROGRAM, timeout=120) as browser:
        with served(tmp_path) as url:
            see(browser, url)
            until(browser, "document.querySelector('.starter option')")
            fields = "\\n".join(FIELDS)
            browser.evaluate(f"document.querySelector('.starter textarea').value = '{fields}'")
            press(browser, "Train")
            until(browser, training(5), 240)
            until(browser, "document.querySelectorAll('[aria-label=Ranks] tbody tr').length === 2")
        # The server has ended, and the run trains on: another server finds it
        with served(tmp_path) as url:
            see(browser, url)
            until(browser, f"{state}.startsWith('training') && {training(30)}", 240)
            press(browser, "Pause")
            until(browser, f"{state}.startsWith('stopped')", 120)
            step = browser.evaluate(f"Number({state}.match(/step (\\d+)/)[1])")
            browser.evaluate("document.querySelector('[aria-label=\"Another layout\"]').value = 'tp=2'")
            press(browser, "Resume in this layout")
            until(browser, f"{state}.startsWith('training') && {training(step + 5)}", 240)
            press(browser, "Show, measured and planned")
            until(browser, "document.querySelector('main svg')?.textContent.includes('planned')")
            until(browser, training(250), 240)
            picture(browser, "train")
            until(browser, f"{state}.startsWith('complete')", 240)
            lines = (tmp_path / "runs/quickstart-1/metrics.jsonl").read_text().splitlines()
            assert sum('"loss"' in line for line in lines) == 300  # each step once: the curve went on
            assert "tensor = 2" in (tmp_path / "runs/quickstart-1/recipe.toml").read_text().replace(
                "tp =", "tensor ="
            )
            press(browser, "Train again")
            until(
                browser,
                "document.querySelector('select[aria-label=Run] option[selected]')?.value === 'runs/quickstart-2'",
                240,
            )
            press(browser, "Pause")
            browser.evaluate("location.hash = 'runs'")
            until(browser, "document.querySelectorAll('tbody tr').length === 2")
            browser.evaluate("document.querySelectorAll('tbody input').forEach((box) => box.click())")
            press(browser, "Compare")
            until(browser, "document.querySelector('canvas')")
            picture(browser, "runs")
            browser.evaluate("document.querySelector('[aria-label=\"More on runs/quickstart-1\"]').click()")
            press(browser, "Export to Hugging Face")
            until(
                browser,
                "document.querySelector('main').textContent.includes('Written to runs/quickstart-1-hf-1')",
                120,
            )
            assert (tmp_path / "runs/quickstart-1-hf-1/model.safetensors").exists()
            see(browser, f"{url}#train/runs%2Fquickstart-1", 390, dark=True)
            until(browser, training(300))
            picture(browser, "phone")
            # The console tells that the first server had ended
            assert [error for error in browser.errors if "net::ERR_" not in error] == []
