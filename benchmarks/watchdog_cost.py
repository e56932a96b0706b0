"""What it costs to notice hangs and slow ranks: processor time, counted, and tokens/s of paired runs.

    python benchmarks/watchdog_cost.py [--ranks 2] [--pairs 6] [--steps 40] [--out FILE.json]

Counted on rank 0: the processor time of the watchdog, and the notes of all messages at what a note costs, timed
in a loop; as a share of the process' time in the run. `--out` writes it beside tokens/s with `observe.hang_s` = 30 and
0, in turns. The notes of messages stay in the runs with 0. Nothing else should run.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from fivefold.host.machine import describe
from fivefold.launch.ranks import Ranks
from fivefold.recipe import Recipe, load

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from hanging import start  # pyright: ignore[reportMissingImports]
from runs import lines, train_rank  # pyright: ignore[reportMissingImports]

MODELS = {
    "small": ("model.layers=4", "model.dim=256", "model.heads=8"),
    "tiny": ("model.layers=2", "model.dim=32"),
}
RECIPE = [
    "model.heads=4", "model.kv_heads=2", "model.seq_len=128", "data.tokenizer=bytes", "train.global_batch_size=8",
    "train.val_sequences=8", "train.sample_every=100000", "train.val_every=100000", "observe.tensorboard=false",
]  # fmt: skip
LAYOUTS = ("dp={}", "tp={}", "dp={},zero=3")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory(prefix="fivefold-cost-") as folder:
        Path(folder, "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 2000)
        for model in MODELS:
            for layout in LAYOUTS:
                rows.append(row(Path(folder), model, layout.format(args.ranks), args))
                print(json.dumps(rows[-1]), flush=True)
    if args.out:
        args.out.write_text(json.dumps({"machine": describe(), "rows": rows}, indent=1) + "\n")
    return 0


def row(folder: Path, model: str, layout: str, args: Any) -> dict[str, Any]:
    speeds: dict[float, list[float]] = {30.0: [], 0.0: []}
    counted: list[dict[str, float]] = []
    for pair in range(args.pairs):
        for hang_s in (30.0, 0.0) if pair % 2 else (0.0, 30.0):
            run = folder / f"{model}-{layout}-{pair}-{hang_s}"
            run.mkdir()
            data = [f"data.source={folder / 'text.txt'}", f"data.cache={folder / 'cache'}"]
            own = [f"observe.hang_s={hang_s}", f"train.steps={args.steps}"]
            recipe = load("quickstart", [*RECIPE, *MODELS[model], *data, *own], layout)
            for process in (ranks := start(args.ranks, run, measured, recipe, run)):
                process.join()
            assert all(process.exitcode == 0 for process in ranks), (run / "error-0.txt").read_text()
            speeds[hang_s].append(median(lines(run / "run", "tokens_per_s")[5:]))
            if hang_s:
                counted.append(json.loads((run / "counted.json").read_text()))
    ratios = [on / off - 1 for on, off in zip(speeds[30.0], speeds[0.0], strict=True)]
    return {
        "model": model, "layout": layout,
        "share_of_processor_time": median(one["share"] for one in counted),
        "watchdog_cpu_s_per_s": median(one["watchdog_cpu_s"] / one["seconds"] for one in counted),
        "messages_per_step": median(one["messages"] for one in counted) / args.steps,
        "note_us": median(one["note_us"] for one in counted),
        "tokens_s_change": median(ratios), "tokens_s_change_each": ratios,
    }  # fmt: skip


def measured(ranks: Ranks, recipe: Recipe, run: Path) -> None:
    """A rank's part: trains, and counts."""
    from fivefold.comm import watchdog
    from fivefold.comm.progress import progress

    found: list[watchdog.Watchdog] = []
    make = watchdog.Watchdog.start
    watchdog.Watchdog.start = lambda self: (found.append(self), make(self))[1]
    cpu, began, moved = time.process_time(), time.monotonic(), progress.moved
    train_rank(ranks.rank, ranks.world, recipe, run / "run")
    cpu, seconds, notes = time.process_time() - cpu, time.monotonic() - began, (progress.moved - moved) / 2
    if not found or ranks.rank:
        return
    times, began = 100_000, time.thread_time()
    for _ in range(times):
        progress.leave(progress.enter((None, "nothing", None, 0, (), None)))
    note_s = (time.thread_time() - began) / times
    own = found[0].cpu_s + notes * note_s
    said = {"share": own / cpu, "watchdog_cpu_s": found[0].cpu_s, "seconds": seconds, "messages": notes}
    (run / "counted.json").write_text(json.dumps(said | {"note_us": 1e6 * note_s}))


if __name__ == "__main__":
    sys.exit(main())
