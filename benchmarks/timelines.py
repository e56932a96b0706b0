"""Timelines of one step of two ranks: computing and messages, measured and planned.

Measures this machine (`fivefold bench hardware`), trains a few steps with each layout, and keeps the timelines of the
last one (`observe.trace_step`). `docs/make_pictures.py` draws them. Run nothing else meanwhile.

    python benchmarks/timelines.py --out benchmarks/results/timelines.json
    python benchmarks/timelines.py --offload --out benchmarks/results/timeline_offload.json   # one rank
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from fivefold.host.machine import describe
from fivefold.observe.timelines import read
from fivefold.schedules.timelines import StepTimeline

MODEL = {"layers": 8, "dim": 256, "heads": 8, "ffn_dim": 768, "seq_len": 256, "vocab_size": 4096}
LAYOUTS = (
    "dp=2,bucket_mib=4", "dp=2,bucket_mib=0", "dp=2,zero=1", "dp=2,zero=2", "dp=2,zero=3", "cp=2", "tp=2",
    "tp=2,sp=true",
)  # fmt: skip
OFFLOADED = "dp=1,offload=all:disk"
STEPS = 5


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("timelines.json"))
    parser.add_argument("--offload", action="store_true", help="one rank whose states are on disk")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="fivefold-timelines-") as name:
        folder = Path(name)
        os.environ["FIVEFOLD_CACHE"] = str(folder / "cache")
        tokens = np.random.default_rng(0).integers(MODEL["vocab_size"], size=200_000, dtype=np.uint16)
        np.save(folder / "tokens.npy", tokens)
        if args.offload:
            facts = {"model": MODEL, "layout": OFFLOADED, "machine": describe()}
            args.out.write_text(json.dumps(facts | trained(folder, OFFLOADED, 1)) + "\n")
            return
        fivefold("bench", "hardware", "--json")
        runs = {layout: trained(folder, layout) for layout in LAYOUTS}
    lines = [f"{'layout':22}{'step':>18}{'messages':>18}{'hidden':>14}   measured / planned"]
    for layout, found in runs.items():
        a, b = found["measured"], found["planned"]
        lines.append(
            f"{layout:22}{a['seconds']:8.3f} / {b['seconds']:.3f} s{a['under_way_s']:8.3f} / {b['under_way_s']:.3f} s"
            f"{a['hidden']:8.0%} / {b['hidden']:.0%}"
        )
    print("\n".join(lines))
    found = {"model": MODEL, "machine": describe(), "runs": runs}
    args.out.write_text(json.dumps(found) + "\n")


def fivefold(*arguments: str) -> None:
    command = [sys.executable, "-m", "fivefold.cli.main", *arguments]
    if subprocess.run(command, stdout=subprocess.DEVNULL).returncode:
        raise SystemExit(f"{' '.join(arguments)} failed")


def trained(folder: Path, layout: str, ranks: int = 2) -> dict[str, Any]:
    """Trains, and gives the timelines of the first rank and of the plan, if this machine is measured."""
    run = folder / layout.replace(",", "_").replace("=", "")
    values = {f"model.{key}": value for key, value in MODEL.items()} | {
        "data.source": f"tokens:{folder / 'tokens.npy'}", "data.val_fraction": 0, "train.steps": STEPS,
        "train.global_batch_size": 8, "train.microbatch_size": 4, "train.val_every": 0, "train.sample_every": 0,
        "precision.mode": "fp32", "model.tie_embeddings": "false", "observe.trace_step": STEPS,
        "observe.tracker": "none",
    }  # fmt: skip
    sets = [part for key, value in values.items() for part in ("--set", f"{key}={value}")]
    fivefold("train", "quickstart", "--layout", layout, *sets, "--nproc", str(ranks), "--out", str(run))
    found = dict(read(run))
    names = {"measured": "rank 0, measured", "planned": "planned"}
    return {kind: kept(found[name]) for kind, name in names.items() if name in found}


def kept(timeline: StepTimeline) -> dict[str, Any]:
    """The timeline with whole microseconds, and its figures."""
    spans = tuple(x._replace(start=round(x.start, 6), end=round(x.end, 6)) for x in timeline.spans)
    rounded = StepTimeline(spans, timeline.rank, timeline.step)
    return rounded.as_json() | {"under_way_s": rounded.under_way()}


if __name__ == "__main__":
    main()
