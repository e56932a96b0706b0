"""Training speed and memory beside the yardstick: the best plain PyTorch that we can write (`plain_best.py`).

    python benchmarks/best.py --choose                 # measures the yardstick's forms, once for a machine
    python benchmarks/best.py [--rounds 2] [--turns 8] [--only "GPT-2 124M"] --out benchmarks/results/best.json
    python benchmarks/best.py --recompute ops:gate+norm --only ... --out benchmarks/results/best_recompute.json

Every run is a process of its own. Within a round both train a shape (`shapes.py`) in turns of some seconds: while one
trains the other waits, and the order changes from turn to turn. A ratio is Fivefold's tokens/s over the yardstick's,
within a turn of both; the interval is that of their median (95%, by order statistics). Compile time and the first
steps do not count. Both have the same allocator settings. Forms that were chosen, and pairs that were measured, on
another machine do not count.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from shapes import SHAPES, Shape

WARM_UP, LEAST = 4, 2
"""Steps that do not count; steps of a turn, at least."""
READY = "ready\n"
CHOSEN = Path(__file__).with_name("results") / "best_choices.json"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--turns", type=int, default=8, help="of both, in a round")
    parser.add_argument("--seconds", type=float, default=3.0, help="of a turn")
    parser.add_argument("--only", nargs="*", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--recompute", default="none", help="Fivefold's layout.recompute")
    parser.add_argument("--choose", action="store_true")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="cores of both")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        name, how = args.worker
        return work(name, how, args.seconds)
    if args.choose:
        return choose(args.only, args.threads, args.seconds)
    # rounds of an earlier call are kept
    found: dict[str, list[dict[str, Any]]] = (of_this_machine(args.out) if args.out else {}).get("pairs", {})
    for number in range(args.rounds):
        for name in args.only:
            turns = pairs(name, args.turns, args.threads, args.recompute, args.seconds)
            found.setdefault(name, []).extend(turns)
            ratios = " ".join(f"{turn['ratio']:.3f}" for turn in turns)
            print(f"round {number + 1}  {name:22} {ratios}", file=sys.stderr, flush=True)
            if args.out:
                save(found, args.out)
    print(table(found))


def of_this_machine(path: Path) -> dict[str, Any]:
    """The content of a file; empty if there is none, or if it is another machine's."""
    from fivefold.host.machine import describe

    found = json.loads(path.read_text()) if path.exists() else {}
    here, there = describe(), found.get("machine", {})
    return found if all(there.get(key) == here[key] for key in ("cpu", "cores", "torch")) else {}


def choose(names: list[str], threads: int, seconds: float) -> None:
    """Writes the fastest form of each shape's yardstick, and the speeds of all."""
    from plain_best import choices

    from fivefold.host.machine import describe

    known = of_this_machine(CHOSEN) or {"shapes": {}}
    for name in names:
        speeds = {}
        for one in choices(SHAPES[name]):
            with running(name, one, threads, seconds) as process:
                speeds[one] = take_turn(process)
        print(name, {one: round(run["tokens_per_s"]) for one, run in speeds.items()}, flush=True)
        fastest = max(speeds, key=lambda one: speeds[one]["tokens_per_s"])
        known["shapes"][name] = {"fastest": fastest, "runs": speeds}
        CHOSEN.write_text(json.dumps({**known, "machine": describe()}, indent=1) + "\n")


def pairs(name: str, turns: int, threads: int, recompute: str, seconds: float) -> list[dict[str, Any]]:
    """Turns of both, each with its ratio. recompute: of Fivefold."""
    shapes = of_this_machine(CHOSEN).get("shapes", {})
    if name not in shapes:
        raise SystemExit(f"{name}: no form was chosen on this machine; run with --choose first")
    choice, mine = shapes[name]["fastest"], f"fivefold {recompute}"
    found = []
    with running(name, mine, threads, seconds) as ours, running(name, choice, threads, seconds) as other:
        both = {"fivefold": ours, "yardstick": other}
        for turn in range(turns):
            order = sorted(both, reverse=turn % 2 > 0)
            runs = {which: take_turn(both[which]) for which in order}
            ratio = runs["fivefold"]["tokens_per_s"] / runs["yardstick"]["tokens_per_s"]
            about = {"threads": threads, "order": order, "form": choice, "recompute": recompute}
            found.append({**about, **runs, "ratio": ratio})
    return found


@contextmanager
def running(name: str, form: str, threads: int, seconds: float) -> Iterator[subprocess.Popen[str]]:
    """A process that has begun to train one form of a shape, and waits."""
    from fivefold.host.machine import TUNED

    environment = os.environ | {"OMP_NUM_THREADS": str(threads)} | TUNED
    command = [sys.executable, __file__, "--worker", name, form, "--seconds", str(seconds)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout
        if process.stdout.readline() != READY:
            raise SystemExit(f"{name}, {form}: failed")
        yield process
        assert process.stdin
        process.stdin.close()


def take_turn(process: subprocess.Popen[str]) -> dict[str, float]:
    assert process.stdin
    assert process.stdout
    print("go", file=process.stdin, flush=True)
    return json.loads(process.stdout.readline())


def work(name: str, form: str, seconds: float) -> None:
    """Trains for some seconds for each line that it reads, and answers with a line."""
    from fivefold.host.machine import keep_freed_memory

    keep_freed_memory()
    shape = SHAPES[name]
    if form.startswith("fivefold"):
        step = fivefold_step(shape, form.split()[1])
    else:
        from plain_best import plain_step

        step = plain_step(shape, form)
    losses = [step() for _ in range(WARM_UP)]
    Path("/proc/self/clear_refs").write_text("5")  # the peak of what follows, not of compiling
    print(READY, end="", flush=True)
    for _ in sys.stdin:
        print(json.dumps(timed(shape, step, losses, seconds)), flush=True)
    assert all(map(math.isfinite, losses)), losses


def timed(shape: Shape, step: Callable[[], float], losses: list[float], least: float) -> dict[str, float]:
    seconds: list[float] = []
    while len(seconds) < LEAST or sum(seconds) < least:
        began = time.perf_counter()
        losses.append(step())
        seconds.append(time.perf_counter() - began)
    peak = int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) / 1024
    return {
        "tokens_per_s": shape.B * shape.T / median(seconds),
        "peak_mib": round(peak),
        "steps": len(seconds),
        "loss": losses[-1],
    }


def fivefold_step(shape: Shape, recompute: str = "none"):
    """The trainer's own step: forward, backward, gradient sum, clipping, update."""
    from plain_best import batch

    from fivefold.launch import ranks as ranks_
    from fivefold.recipe import load, resolve
    from fivefold.step.state import build_state
    from fivefold.step.step import take_step
    from fivefold.train.share import share_of

    inputs, targets = batch(shape)

    class Batches:
        def batch(self, i: int, rows: range):
            return inputs[rows.start : rows.stop], targets[rows.start : rows.stop]

    base = {"moe": "moe-tiny", "gpt2": "gpt2-124m", "bert": "bert-base-mlm"}.get(shape.arch, "quickstart")
    recipe = resolve(load(base, shape.sets(), f"dp=1,recompute={recompute}"), vocab_size=shape.V)
    state = build_state(recipe, ranks_.join().__enter__())
    microbatches = share_of(Batches(), 0, shape.B, shape.b, state.mesh)
    return lambda: take_step(state, recipe, microbatches).loss


def save(found: dict[str, list[dict[str, Any]]], out: Path) -> None:
    from fivefold.host.machine import describe

    summary = {name: summarize(pairs) for name, pairs in found.items() if pairs}
    mean = math.exp(sum(math.log(row["ratio"]) for row in summary.values()) / len(summary))
    result = {"machine": describe(), "geometric_mean": mean, "summary": summary, "pairs": found}
    out.write_text(json.dumps(result, indent=1) + "\n")


def interval(ordered: list[float]) -> list[float]:
    """Between which two of these numbers the median of what they are drawn from lies in at least 95% of all cases;
    fewer than 6 numbers: the least and the largest."""
    count, below, place = len(ordered), 0.0, 0
    while (below := below + math.comb(count, place) / 2**count) <= 0.025:
        place += 1
    return [ordered[max(place - 1, 0)], ordered[min(count - place, count - 1)]]


def summarize(pairs: list[dict[str, Any]]) -> dict[str, Any]:
    ratios = sorted(found["ratio"] for found in pairs)
    row: dict[str, Any] = {
        "ratio": median(ratios),
        "interval": interval(ratios),
        "pairs": len(ratios),
        "lowest": ratios[0],
        "highest": ratios[-1],
        "form": pairs[-1]["form"],
    }
    for which in ("fivefold", "yardstick"):
        row[which] = {
            "tokens_per_s": median(p[which]["tokens_per_s"] for p in pairs),
            "peak_mib": median(p[which]["peak_mib"] for p in pairs),
        }
    return row


def table(found: dict[str, list[dict[str, Any]]]) -> str:
    lines = [
        "| shape | ratio | interval | pairs | tok/s | yardstick's | peak MiB | yardstick's |",
        "|" + "---|" * 8,
    ]
    rows = {name: summarize(pairs) for name, pairs in found.items() if pairs}
    for name, row in rows.items():
        ratios = f"{row['ratio']:.3f} | {row['interval'][0]:.3f} to {row['interval'][1]:.3f} | {row['pairs']}"
        both = (row["fivefold"], row["yardstick"])
        speeds = " | ".join(f"{one['tokens_per_s']:,.0f}" for one in both)
        peaks = " | ".join(f"{one['peak_mib']:,.0f}" for one in both)
        lines.append(f"| {name} ({row['form']}) | {ratios} | {speeds} | {peaks} |")
    mean = math.exp(sum(math.log(row["ratio"]) for row in rows.values()) / len(rows))
    return "\n".join([*lines, f"\ngeometric mean {mean:.3f}"])


if __name__ == "__main__":
    main()
