"""A long run of a tiny model with many saves: memory, descriptors, threads and disk stay as they are."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from pathlib import Path
from statistics import median
from typing import Any

import process

LAYOUT, EVERY = "dp=2,zero=3", 20
PATIENCE_S = 900.0
SMALLER = ["model.layers=1", "train.global_batch_size=2", "train.val_every=500", "observe.log_every=10"]


def sample(run: process.Run) -> dict[str, float]:
    """Now: of the launcher and all ranks together, and of the run's checkpoints."""
    found = {"step": float(run.step), "rss_mib": 0.0, "descriptors": 0.0, "threads": 0.0, "processes": 0.0}
    for pid in run.processes():
        with contextlib.suppress(OSError, ValueError):
            status = dict(
                line.split(":\t", 1)
                for line in Path(f"/proc/{pid}/status").read_text().splitlines()
                if ":\t" in line
            )
            found["rss_mib"] += int(status["VmRSS"].split()[0]) / 1024
            found["threads"] += int(status["Threads"])
            found["descriptors"] += len(os.listdir(f"/proc/{pid}/fd"))
            found["processes"] += 1
    files = [file for file in (run.out / "checkpoints").rglob("*") if file.is_file()]
    with contextlib.suppress(FileNotFoundError):
        found["checkpoints_mib"] = sum(file.stat().st_size for file in files) / 2**20
    return found


def soak(steps: int, folder: Path) -> dict[str, Any]:
    """Trains so many steps. By figure: the median in the second fifth of the steps, and in the last one."""
    out = folder / "soak"
    shutil.rmtree(out, ignore_errors=True)
    run = process.Run(out, LAYOUT, [*process.overrides(folder, LAYOUT, steps, EVERY), *SMALLER])
    samples = []
    began = time.monotonic()
    try:
        run.start()
        while not run.ended and time.monotonic() - began < PATIENCE_S:
            samples.append(sample(run))
            run.wait(lambda: False, 0.25)
        if run.code != 0:
            raise AssertionError(run.tail())
        left = run.left()
    finally:
        run.close()
    early = [one for one in samples if 0.2 * steps <= one["step"] < 0.4 * steps]
    late = [one for one in samples if one["step"] >= 0.8 * steps]
    figures = {
        key: {
            "early": round(median(one.get(key, 0.0) for one in early), 1),
            "late": round(median(one.get(key, 0.0) for one in late), 1),
        }
        for key in ("rss_mib", "descriptors", "threads", "processes", "checkpoints_mib")
    }
    run_files = sorted(path.name for path in out.iterdir())
    kept = sorted(path.name for path in (out / "checkpoints").iterdir())
    shutil.rmtree(out)
    return {
        "layout": LAYOUT,
        "steps": steps,
        "saves": steps // EVERY,
        "seconds": round(time.monotonic() - began),
        "samples": len(samples),
        "left_processes": len(left),
        "run_folder": run_files,
        "checkpoints": kept,
        **figures,
    }
