"""Seconds that a user waits: for `--help`, `check`, `compare`, until quickstart's first step, and for a step's lines.

    python benchmarks/startup.py [--repeat 5] [--out benchmarks/results/startup.json]

Wall seconds of whole processes, the median of several; data and compiled kernels are cached by a first run that does
not count. The first step is timed on the run's own output: from the start of the process to its first step line.
"""

from __future__ import annotations

import argparse
import io
import json
import shutil
import subprocess
import tempfile
import time
from contextlib import closing
from pathlib import Path
from statistics import median

FIVEFOLD = shutil.which("fivefold") or "fivefold"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    measures = {
        "fivefold --help": lambda: whole("--help"),
        "fivefold check quickstart": lambda: whole("check", "quickstart"),
        "fivefold compare llama-7b --cluster h100:8": lambda: whole(
            "compare", "llama-7b", "--cluster", "h100:8"
        ),
        "fivefold plan llama-7b --html": page,
        "first step of fivefold train quickstart": first_step,
        "a step's lines: console and metrics.jsonl": lines_of_a_step,
    }
    found = {}
    for name, measure in measures.items():
        measure()  # fills caches
        found[name] = median(measure() for _ in range(args.repeat))
        print(f"{name:42} {found[name]:9.5f} s")
    if args.out:
        from fivefold.host.machine import describe

        args.out.write_text(json.dumps({"seconds": found, "machine": describe()}, indent=1) + "\n")


def whole(*arguments: str) -> float:
    began = time.perf_counter()
    subprocess.run([FIVEFOLD, *arguments], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


def page() -> float:
    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder, "plan.html"))
        return whole("plan", "llama-7b", "--cluster", "h100:64", "--layout", "dp=64,zero=1", "--html", file)


def first_step() -> float:
    with tempfile.TemporaryDirectory() as folder:
        command = [FIVEFOLD, "train", "quickstart", "--out", str(Path(folder, "run")), "--set=train.steps=2"]
        began = time.perf_counter()
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith("step "):
                    seconds = time.perf_counter() - began
                    break
            else:
                raise SystemExit("the run printed no step")
            process.stdout.read()
        return seconds


def lines_of_a_step(steps: int = 300) -> float:
    """Seconds that a step spends on what it tells: its line on a terminal and its line in metrics.jsonl."""
    from fivefold.observe.console import Console
    from fivefold.observe.metrics import MetricsWriter

    facts = {"tokens": 4096, "loss": 5.4, "grad_norm": 0.75, "lr": 1e-3, "tokens_per_s": 3900.0, "mfu": 0.72}
    facts |= {"step_s": 0.5, "data_wait_s": 0.005, "peak_memory_bytes": 2**30}
    screen = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    with (
        tempfile.TemporaryDirectory() as folder,
        closing(Console(steps, file=screen, terminal=True)) as console,
        closing(MetricsWriter(Path(folder))) as writer,
    ):
        began = time.perf_counter()
        for step in range(1, steps + 1):
            console.step({"step": step, **facts})
            writer.write({"step": step, **facts})
        return (time.perf_counter() - began) / steps


if __name__ == "__main__":
    main()
