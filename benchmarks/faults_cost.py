"""What it costs to notice faults: processor time, counted, and tokens/s of paired runs.

    python benchmarks/faults_cost.py [--ranks 2] [--pairs 8] [--steps 60] [--out FILE.json]

Counted on rank 0, as shares of the process' time in the run: the watchdog's thread; the notes of all messages and
microbatches, at what one costs in a loop; the judge of loss and norm, with what reads it; the check of the largest
weight, which AdamW's kernel takes on its way; the table of slow ranks; the search for weights that are not finite,
before a save. Of a real run (`fivefold train`) the processor time of its launcher, which waits for the ranks. A save by
itself is in checkpoints.py.

Tokens/s: with the defaults, and with observe.hang_s = 0 and faults.spike_limit = 0, in turns. The notes of messages
stay in the runs without. Nothing else should run.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

from fivefold.host.machine import describe
from fivefold.launch.ranks import Ranks
from fivefold.recipe import Recipe, load
from fivefold.sharding.layout import Layout

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from hanging import start  # pyright: ignore[reportMissingImports]
from pool_runs import lines, train_rank  # pyright: ignore[reportMissingImports]

MODELS = {
    "quickstart": (),
    "tiny": ("model.layers=2", "model.dim=32", "model.heads=4", "model.kv_heads=2", "model.seq_len=128"),
}
RECIPE = [
    "data.tokenizer=bytes", "train.global_batch_size=8", "train.val_sequences=8", "train.sample_every=100000",
    "train.val_every=100000", "observe.tracker=none",
]  # fmt: skip
OFF = ["observe.hang_s=0", "faults.spike_limit=0"]
LAYOUTS = ("dp={}", "tp={}", "dp={},zero=3")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=8, help="0: tokens/s of an earlier call are kept")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    found = json.loads(args.out.read_text()) if args.out and args.out.exists() else {}
    layouts = [layout.format(args.ranks) for layout in LAYOUTS]
    with tempfile.TemporaryDirectory(prefix="fivefold-cost-") as name:
        folder = Path(name)
        (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 20_000)
        found |= {"machine": describe(), "launcher": launcher(folder, args)}
        print(json.dumps(found["launcher"]), flush=True)
        found["counted"] = [row(folder, model, layout, args.steps) for model in MODELS for layout in layouts]
        for one in found["counted"]:
            print(json.dumps(one), flush=True)
        if args.pairs:
            found["pairs"] = [paired(folder, model, layouts[0], args.steps, args.pairs) for model in MODELS]
            print(json.dumps(found["pairs"]), flush=True)
    if args.out:
        args.out.write_text(json.dumps(found, indent=1) + "\n")
    return 0


def sets(folder: Path, model: str, steps: int) -> list[str]:
    data = [f"data.source={folder / 'text.txt'}", f"data.cache={folder / 'cache'}"]
    return [*RECIPE, *MODELS[model], *data, f"train.steps={steps}"]


def launcher(folder: Path, args: Any) -> dict[str, float]:
    """Processor seconds of a run's launcher, from the middle of the run to its last step, per second."""
    layout, steps, out = f"dp={args.ranks}", 4 * args.steps, folder / "launched"
    command = [sys.executable, "-m", "fivefold", "train", "quickstart", "--layout", layout, "--out", str(out)]
    options = [word for one in sets(folder, "quickstart", steps) for word in ("--set", one)]
    with subprocess.Popen([*command, *options], stdout=subprocess.DEVNULL) as process:
        began: tuple[float, float] | None = None
        last = 0.0, 0.0
        while process.poll() is None:
            time.sleep(0.2)
            taken = len(lines(out, "loss")) if (out / "metrics.jsonl").is_file() else 0
            if steps // 2 <= taken < steps - 1:  # after the last step the launcher writes the report
                last = cpu_s(process.pid), time.monotonic()
                began = began or last
    if process.returncode or began is None:
        raise SystemExit("the run failed")
    return {"cpu_s_per_s": (last[0] - began[0]) / (last[1] - began[1]), "seconds": last[1] - began[1]}


def cpu_s(pid: int) -> float:
    """Processor seconds of a process up to now, without its children (proc(5): utime, stime)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def row(folder: Path, model: str, layout: str, steps: int) -> dict[str, Any]:
    """The shares of a layout."""
    run = trained(folder, model, layout, steps, [])
    shares = json.loads((run / "counted.json").read_text())
    return {"model": model, "layout": layout, "share": sum(shares.values()), "shares": shares}


def paired(folder: Path, model: str, layout: str, steps: int, pairs: int) -> dict[str, Any]:
    """The change of tokens/s, with and without, in pairs."""
    changes = []
    for pair in range(pairs):
        speeds: dict[bool, float] = {}
        for on in (True, False) if pair % 2 else (False, True):
            run = trained(folder, model, layout, steps, [] if on else OFF)
            speeds[on] = median(lines(run / "run", "tokens_per_s")[5:])
        changes.append(speeds[True] / speeds[False] - 1)
        print(f"{model} {layout}: {changes[-1]:+.2%}", flush=True)
    error = stdev(changes) / math.sqrt(pairs) if pairs > 1 else None
    return {
        "model": model, "layout": layout, "tokens_s_change": mean(changes), "standard_error": error, "each": changes,
    }  # fmt: skip


def trained(folder: Path, model: str, layout: str, steps: int, changes: list[str]) -> Path:
    """Trains, and counts. Returns its folder."""
    run = Path(tempfile.mkdtemp(dir=folder))
    recipe = load("quickstart", [*sets(folder, model, steps), *changes], layout)
    for process in (ranks := start(Layout.from_recipe(recipe.layout).ranks, run, measured, recipe, run)):
        process.join()
    assert all(process.exitcode == 0 for process in ranks), (run / "error-0.txt").read_text()
    return run


def measured(ranks: Ranks, recipe: Recipe, run: Path) -> None:
    """A rank's part: trains, and counts."""
    from fivefold.comm import watchdog
    from fivefold.comm.progress import progress
    from fivefold.step import step
    from fivefold.train import loop

    found: list[watchdog.Watchdog] = []
    begin = watchdog.Watchdog.start
    watchdog.Watchdog.start = lambda self: (found.append(self), begin(self))[1]
    seconds = {
        "judge": timed((step, "judge"), (loop, "judged")),
        "check of the last update": timed((step, "last_update")),
        "table of slow ranks": timed((step, "own_seconds")),
        "search for weights that are not finite": timed((loop, "weights_fault")),
    }
    cpu, moved = time.process_time(), progress.moved
    train_rank(ranks.rank, ranks.world, recipe, run / "run")
    cpu, notes = time.process_time() - cpu, progress.moved - moved
    if not found or ranks.rank:
        return
    own = {part: sum(each) for part, each in seconds.items()}
    own |= {"watchdog": found[0].cpu_s, "notes": notes * note_s()}
    (run / "counted.json").write_text(json.dumps({part: one / cpu for part, one in own.items()}))


def timed(*places: tuple[Any, str]) -> list[float]:
    """Replaces functions by ones that add their processor seconds to the list."""
    found: list[float] = []

    def wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            began = time.thread_time()
            try:
                return function(*args, **options)
            finally:
                found.append(time.thread_time() - began)

        return call

    for owner, name in places:
        setattr(owner, name, wrapped(getattr(owner, name)))
    return found


def note_s() -> float:
    """Processor seconds of one note: a message has two, a microbatch one."""
    from fivefold.comm.progress import progress

    times, began = 100_000, time.thread_time()
    for _ in range(times):
        progress.leave(progress.enter((None, "nothing", None, 0, (), None)))
    return (time.thread_time() - began) / times / 2


if __name__ == "__main__":
    sys.exit(main())
