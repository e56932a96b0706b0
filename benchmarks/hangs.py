"""How long it takes until a rank that hangs is named, and whether it is the right one.

    python benchmarks/hangs.py [--cases 20] [--hang-s 30] [--at-once 4] [--out benchmarks/results/hangs.json]
    python benchmarks/hangs.py --servers --out benchmarks/results/hangs_servers.json

Each case trains a tiny model with real processes in one of several layouts. One rank hangs in a random step: it is
stopped (SIGSTOP), or loops or sleeps in Python, at the start of the step, in a forward, or while it reads data. Seconds
count from the hang to the verdict. --servers: two parameter servers and two workers, synchronous, with bounded
staleness, or without a bound; a server hangs while it updates weights, a worker in its share.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from fivefold.data import prepare
from fivefold.host.machine import describe
from fivefold.launch.ranks import Ranks
from fivefold.recipe import Recipe, load

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from hanging import codes, hang, serve, start  # pyright: ignore[reportMissingImports]
from pool_runs import train_rank  # pyright: ignore[reportMissingImports]

LAYOUTS = {
    "dp=2": 2, "tp=2": 2, "pp=2": 2, "cp=2": 2, "dp=2,zero=3": 2, "dp=2,tp=2": 4, "dp=2,pp=2": 4, "dp=4": 4,
    "dp=4,all_reduce=ring": 4,
}  # fmt: skip
HOW = ("stopped", "busy", "asleep")
STALENESS = (0, 2, -1)
WHERE = ("step", "forward", "data", "validation")
TINY = [
    "model.layers=2", "model.dim=32", "model.heads=4", "model.kv_heads=2", "model.seq_len=16",
    "data.tokenizer=bytes", "train.global_batch_size=8", "train.microbatch_size=1", "train.steps=100000",
    "train.val_sequences=8", "train.val_every=5", "train.sample_every=100000", "observe.tracker=none",
]  # fmt: skip
LIMIT_S = 5  # beyond hang_s


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=20)
    parser.add_argument("--hang-s", type=float, default=30)
    parser.add_argument("--at-once", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--servers", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    draw, cases = random.Random(args.seed), []
    for number in range(args.cases):
        layout, ranks = [*LAYOUTS.items()][number % len(LAYOUTS)]
        how, where = HOW[number % 3], draw.choice(WHERE)
        if args.servers:
            layout, ranks, where = f"staleness={STALENESS[number // 3 % 3]}", 4, "server or share"
        who = number // 9 % 4 if args.servers else draw.randrange(ranks)
        cases.append((layout, ranks, who, how, where, draw.randrange(5, 40)))
    with tempfile.TemporaryDirectory(prefix="fivefold-hangs-") as folder:
        source = Path(folder, "text.txt")
        source.write_text("the quick brown fox jumps over the lazy dog. " * 200)
        with ThreadPoolExecutor(args.at_once) as pool:
            rows = [*pool.map(lambda n: case(Path(folder), n, cases[n], args.hang_s), range(len(cases)))]
    right = sum(row["right"] and row["seconds"] <= args.hang_s + LIMIT_S for row in rows)
    worst = max(row["seconds"] for row in rows)
    print(f"{right} of {len(rows)} within {args.hang_s + LIMIT_S:g} s and right; slowest {worst:.1f} s")
    if args.out:
        options = f"--cases {args.cases} --hang-s {args.hang_s:g} --at-once {args.at_once} --seed {args.seed}"
        options += " --servers" * args.servers
        found = {
            "command": f"python benchmarks/hangs.py {options}",
            "machine": describe(),
            "hang_s": args.hang_s,
            "right": right,
            "slowest_s": worst,
            "cases": rows,
        }
        args.out.write_text(json.dumps(found, indent=1) + "\n")
    return int(right < len(rows))


def case(
    folder: Path, number: int, what: tuple[str, int, int, str, str, int], hang_s: float
) -> dict[str, Any]:
    layout, world, who, how, where, step = what
    run = folder / str(number)
    run.mkdir()
    data = [
        f"data.source={folder / 'text.txt'}",
        f"data.cache={folder / 'cache'}",
        f"observe.hang_s={hang_s}",
    ]
    if layout.startswith("staleness"):
        data += ["sync.method=server", "sync.servers=2", f"sync.{layout}", "checkpoint.every=0"]
        recipe = load("quickstart", [*TINY, *data], "dp=2")
        prepare(recipe)
        ranks = start(world, run, serve, recipe, run / "run", who, step, how)
    else:
        recipe = load("quickstart", [*TINY, *data], layout)
        ranks = start(world, run, hangs, recipe, run, who, how, where, step)
    codes(ranks, hang_s + 120)
    said = sorted(run.glob("hung-*"))
    text = said[0].read_text() if said else ""
    hung = run / "began"
    seconds = said[0].stat().st_mtime - float(hung.read_text()) if said and hung.exists() else float("inf")
    row = {
        "layout": layout,
        "rank": who,
        "how": how,
        "where": where,
        "step": step,
        "seconds": round(seconds, 2),
    }
    row |= {
        "right": len(said) == 1 and is_right(text, who),
        "verdict": re.sub(r"(?<!\w)/\S*/", "", text)[:600],
    }
    print(json.dumps(row), flush=True)
    return row


def is_right(verdict: str, who: int) -> bool:
    """True if a verdict names this rank once, with the message that the others wait in, its axis, and lines of ours."""
    named = re.match(rf"rank {who} (\(.*?\) )?is missing", verdict) and verdict.count("is missing") == 1
    waits = re.search(
        r"waits? in [\w ]+ over axis \w+ .*?, at fivefold/[^\s,]+(, waited for at (\S+))?", verdict
    )
    return named is not None and waits is not None and (waits[2] or "fivefold/").startswith("fivefold/")


def hangs(ranks: Ranks, recipe: Recipe, run: Path, who: int, how: str, where: str, step: int) -> None:
    """A rank's part of a case."""
    from fivefold.comm.progress import progress
    from fivefold.models.llama.module import Block
    from fivefold.train import hooks, loop, share

    def hooked(function: Any) -> Any:
        def inner(*arguments: Any, **named: Any) -> Any:
            if ranks.rank == who and progress.step >= step:
                (run / "began").write_text(str(time.time()))
                hang(how)
            return function(*arguments, **named)

        return inner

    places = {
        "step": (loop, "take_step"), "forward": (Block, "forward"), "data": (share, "share_of"),
        "validation": (hooks, "validate"),
    }  # fmt: skip
    place, name = places[where]
    setattr(place, name, hooked(getattr(place, name)))
    train_rank(ranks.rank, ranks.world, recipe, run / "run")


if __name__ == "__main__":
    sys.exit(main())
