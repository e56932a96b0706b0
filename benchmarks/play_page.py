"""How fluid the page of `fivefold play` is, in Chromium: a run of 10^5 steps, and 50 runs of 2,000; and how much
slower a training is beside it.

    PYTHONPATH=tests python benchmarks/play_page.py [--out benchmarks/results/play_page.json]
    PYTHONPATH=tests python benchmarks/play_page.py --training [--out benchmarks/results/play_training.json]
    PYTHONPATH=tests python benchmarks/play_page.py --first [--out benchmarks/results/play_first.json]

First paint: from the navigation until the curve, or every run's figures, stand on the page (a median of some; the
server has read the run before, or not), and the processor time of the server and of the page's thread until then.
Update: the processor time of the page's thread for a line that is added every half second, and the longest task of the
browser, which a busy machine stretches. Server: the processor time of its process while it shows nothing, and while a
page watches a run that trains.

Training: in each turn the quickstart trains without a server, beside a server that nobody looks at, and beside a page
that watches it, in an order that changes from turn to turn. A turn's figure is the median of the run's step times
without the first third, divided by that of the run without a server. The spread over turns is the resolution of the
measurement.

First: from `fivefold play` in an empty folder, with an empty cache, and a click on Train, until a loss stands on the
page, and until each sample of the quickstart does.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from observe_browser import Browser, find  # pyright: ignore[reportMissingImports]
from observe_run import make_run  # pyright: ignore[reportMissingImports]

from fivefold.files import owned
from fivefold.host.machine import cores

STEPS, RUNS, EACH = 100_000, 50, 2000
TRIES, WATCHED_S = 3, 15.0


def run_of(folder: Path, steps: int) -> Path:
    """A run with lines as a training writes them."""
    make_run(folder, steps=10)
    noise = random.Random(1)
    lines = []
    for step in range(1, steps + 1):
        loss = 1.2 + 7 * (1 + step / 12) ** -0.5 + noise.gauss(0, 0.05)
        seconds = 0.2 + abs(noise.gauss(0, 0.01))
        row = {"step": step, "loss": loss, "grad_norm": abs(noise.gauss(0.5, 0.1)), "lr": 2e-3, "data_wait_s": 1e-4,
               "step_s": seconds, "peak_memory_bytes": 5 << 28, "tokens": 4096 * step, "tokens_per_s": 4096 / seconds,
               "mfu": 0.1 / seconds}  # fmt: skip
        lines.append(json.dumps(row))
        if step % max(1, steps // 20) == 0:
            lines.append(json.dumps({"step": step, "val_loss": loss + 0.1, "val_bits_per_byte": loss / 2.3}))
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def serving(folder: Path) -> tuple[subprocess.Popen[str], str]:
    command = [sys.executable, "-m", "fivefold", "play", str(folder), "--port", "0", "--no-browser"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


def processor_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def until(browser: Browser, condition: str) -> None:
    """Waits in the page until the condition holds and is painted."""
    browser.evaluate(
        f"""new Promise((done) => {{ const look = () => ({condition})
          ? requestAnimationFrame(() => requestAnimationFrame(done)) : setTimeout(look, 5); look(); }})"""
    )


def painted(browser: Browser, url: str, condition: str) -> float:
    """Milliseconds from a navigation until the condition holds."""
    browser.call("Page.navigate", url="about:blank")
    browser._until(lambda m: m.get("method") == "Page.loadEventFired")
    browser.call("Page.navigate", url=url)
    browser._until(lambda m: m.get("method") == "Page.loadEventFired")
    until(browser, condition)
    return browser.evaluate("performance.now()")


def thread_s(browser: Browser) -> float:
    """The processor time of the page's thread so far."""
    metrics = browser.call("Performance.getMetrics")["metrics"]
    return next(one["value"] for one in metrics if one["name"] == "TaskDuration")


def one_run(browser: Browser, folder: Path) -> dict[str, object]:
    run = run_of(folder / "long", STEPS)
    process, url = serving(folder)
    place = f"{url}#train/{str(run).replace('/', '%2F')}"
    figures = "[...document.querySelectorAll('.figures dd')].some((one) => one.textContent.startsWith('1.'))"
    there = f"document.querySelector('canvas') && {figures}"
    browser.call("Performance.enable", timeDomain="threadTicks")
    try:
        costs = list[tuple[float, float, float]]()
        for _ in range(TRIES + 1):
            before = processor_s(process.pid)
            seconds = painted(browser, place, there)
            costs.append((seconds, processor_s(process.pid) - before, thread_s(browser)))
            time.sleep(2)  # further columns come
        first, *more = [seconds for seconds, _, _ in costs]
        server, thread = (statistics.median(one[i] for one in costs[1:]) for i in (1, 2))
        browser.evaluate(
            "window.longest = 0; new PerformanceObserver((all) => all.getEntries().forEach((one) => "
            "{ longest = Math.max(longest, one.duration); })).observe({ type: 'longtask' })"
        )
        time.sleep(1)
        page, steps = thread_s(browser), round(WATCHED_S * 2)
        with owned(run), open(run / "metrics.jsonl", "a") as file:
            before, began = processor_s(process.pid), time.monotonic()
            for step in range(STEPS + 1, STEPS + 1 + steps):
                line = {
                    "step": step,
                    "loss": 1.3,
                    "step_s": 0.5,
                    "tokens_per_s": 8192,
                    "mfu": 0.2,
                    "lr": 1e-3,
                }
                file.write(json.dumps(line) + "\n")
                file.flush()
                time.sleep(0.5)
            open_share = (processor_s(process.pid) - before) / (time.monotonic() - began)
        update = (thread_s(browser) - page) / steps
        time.sleep(1)
        shown = browser.evaluate("document.querySelector('.head .lead').textContent")
        assert f"{STEPS + steps:,}" in shown, shown
        longest = browser.evaluate("longest")
        browser.call("Page.navigate", url="about:blank")
        time.sleep(2)
        with owned(run):
            before, began = processor_s(process.pid), time.monotonic()
            time.sleep(WATCHED_S)
            closed_share = (processor_s(process.pid) - before) / (time.monotonic() - began)
    finally:
        process.terminate()
        process.wait()
    return {
        "steps": STEPS,
        "first_paint_ms": round(statistics.median(more)),
        "first_paint_of_the_server_ms": round(first),
        "first_paint_server_processor_ms": round(1000 * server),
        "first_paint_page_processor_ms": round(1000 * thread),
        "update_processor_ms": round(1000 * update, 1),
        "longest_task_of_an_update_ms": round(longest) if longest else "below 50",
        "server_share_of_a_core_open": round(open_share, 4),
        "server_share_of_a_core_closed": round(closed_share, 4),
    }


def many_runs(browser: Browser, folder: Path) -> dict[str, object]:
    for number in range(RUNS):
        run_of(folder / f"run-{number}", EACH)
    process, url = serving(folder)
    rows = f"document.querySelectorAll('tbody tr').length == {RUNS}"
    full = f"{rows} && ![...document.querySelectorAll('tbody a')].some((a) => a.textContent == '...')"
    try:
        names = painted(browser, f"{url}#runs", rows)
        until(browser, full)
        filled = browser.evaluate("performance.now()")
        again = painted(browser, f"{url}#runs", full)
    finally:
        process.terminate()
        process.wait()
    return {
        "runs": RUNS,
        "steps": EACH,
        "first_paint_ms": round(names),
        "all_figures_ms": round(filled),
        "all_figures_known_ms": round(again),
    }


def first_run(browser: Browser, folder: Path) -> dict[str, object]:
    """Seconds until the page has a loss, and until each sample with its text, since the server was started."""
    (folder / "runs").mkdir(parents=True)
    os.environ["FIVEFOLD_CACHE"] = str(folder / "cache")
    began = time.monotonic()
    process, url = serving(folder / "runs")
    samples = "[...document.querySelectorAll('.sample pre')].map((one) => one.textContent)"
    button = "[...document.querySelectorAll('.starter button')].find((one) => one.textContent === 'Train')"
    texts = dict[str, float]()
    try:
        browser.call("Page.navigate", url=url)
        until(browser, button)
        shown = time.monotonic() - began
        browser.evaluate(f"{button}.click()")
        until(browser, "/^[1-9]/.test(document.querySelector('.figures dd')?.textContent)")
        loss = time.monotonic() - began
        while not browser.evaluate("/complete/.test(document.querySelector('.head .lead').textContent)"):
            for text in browser.evaluate(samples):
                texts.setdefault(text, round(time.monotonic() - began, 1))
            time.sleep(0.2)
    finally:
        process.terminate()
        process.wait()
    found = [{"seconds": seconds, "text": text} for text, seconds in texts.items()]
    return {"page_s": round(shown, 1), "first_loss_s": round(loss, 1), "samples": found}


WAYS = ("absent", "closed", "open")


def trained(browser: Browser, folder: Path, way: str, steps: int, layout: str) -> dict[str, float]:
    """Seconds of a step (median), and processor seconds of the run, beside no server, a server, or a page."""
    served, run = None if way == "absent" else serving(folder), folder / f"run-{way}"
    sets = [f"train.steps={steps}", "observe.tracker=none", "train.sample_tokens=2"]
    words = [
        "train",
        "quickstart",
        "--layout",
        layout,
        "--out",
        str(run),
        *(w for s in sets for w in ("--set", s)),
    ]
    before = os.times()
    process = subprocess.Popen([sys.executable, "-m", "fivefold", *words], stdout=subprocess.DEVNULL)
    try:
        if served is not None and way == "open":
            while not (run / "metrics.jsonl").exists():
                assert process.poll() is None
                time.sleep(0.2)
            browser.call("Page.navigate", url=f"{served[1]}#train/{str(run).replace('/', '%2F')}")
            until(browser, "document.querySelector('canvas')")
        assert process.wait() == 0
        spent = os.times()
        if way == "open":
            time.sleep(1)
            shown = browser.evaluate("document.querySelector('.head .lead').textContent")
            assert f"{steps:,}" in shown, shown
            browser.call("Page.navigate", url="about:blank")
    finally:
        process.terminate()  # if something has failed
        process.wait()
        if served is not None:
            served[0].terminate()
            served[0].wait()
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    seconds = [line["step_s"] for line in lines if "step_s" in line]
    shutil.rmtree(run)
    processor = spent.children_user + spent.children_system - before.children_user - before.children_system
    return {"step_s": statistics.median(seconds[steps // 3 :]), "processor_s": processor}


def training(browser: Browser, folder: Path, turns: int, steps: int, layout: str) -> dict[str, object]:
    folder.mkdir()
    trained(browser, folder, "absent", steps, layout)  # what is tokenized and compiled once
    ratios: dict[str, list[float]] = {way: [] for way in WAYS[1:]}
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    processor: dict[str, list[float]] = {way: [] for way in WAYS}
    for turn in range(turns):
        found = {}
        for i in range(len(WAYS)):
            way = WAYS[(i + turn) % len(WAYS)]
            found[way] = trained(browser, folder, way, steps, layout)
            seconds[way].append(found[way]["step_s"])
            processor[way].append(found[way]["processor_s"])
        for way, own in ratios.items():
            own.append(found[way]["step_s"] / found["absent"]["step_s"])
        print({way: round(own[-1], 4) for way, own in ratios.items()}, found, file=sys.stderr, flush=True)
    slower = {way: [round(100 * (ratio - 1), 2) for ratio in own] for way, own in ratios.items()}
    return {
        "turns": turns,
        "steps": steps,
        "layout": layout,
        "step_ms": {way: round(1000 * statistics.median(own), 1) for way, own in seconds.items()},
        "processor_s": {way: round(statistics.median(own), 2) for way, own in processor.items()},
        "slower_percent": {way: round(statistics.median(own), 2) for way, own in slower.items()},
        "slower_percent_of_turns": slower,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--training", action="store_true")
    parser.add_argument("--first", action="store_true")
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--layout", default="dp=2")
    given = parser.parse_args()
    out, program = given.out, find()
    assert program, "no Chromium"
    with tempfile.TemporaryDirectory() as name, Browser(program, timeout=60) as browser:
        found: dict[str, object] = {"cores": cores(), "load_before": os.getloadavg()[0]}
        if given.first:
            found |= first_run(browser, Path(name) / "first")
        elif given.training:
            found |= training(browser, Path(name) / "runs", given.turns, given.steps, given.layout)
        else:
            found["one_run"] = one_run(browser, Path(name) / "one")
            found["many_runs"] = many_runs(browser, Path(name) / "many")
        found["load_after"] = os.getloadavg()[0]
    text = json.dumps(found, indent=1)
    print(text)
    if out:
        out.write_text(text + "\n")


if __name__ == "__main__":
    main()
