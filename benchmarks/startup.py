"""Seconds that a user waits: for `--help`, for `check`, and from the command to quickstart's first training step.

    python benchmarks/startup.py [--repeat 5] [--out benchmarks/results/startup.json]

Wall seconds of whole processes, the median of several; data and compiled kernels are cached by a first run that does
not count. The first step is timed on the run's own output: from the start of the process to its first step line.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import tempfile
import time
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
        "first step of fivefold train quickstart": first_step,
    }
    found = {}
    for name, measure in measures.items():
        measure()  # fills caches
        found[name] = median(measure() for _ in range(args.repeat))
        print(f"{name:42} {found[name]:6.2f} s")
    if args.out:
        from fivefold.host.machine import describe

        args.out.write_text(json.dumps({"seconds": found, "machine": describe()}, indent=1) + "\n")


def whole(*arguments: str) -> float:
    began = time.perf_counter()
    subprocess.run([FIVEFOLD, *arguments], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


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


if __name__ == "__main__":
    main()
