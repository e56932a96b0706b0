"""A small scaling law: four sizes of a llama times four lengths on the characters of a text, each at its best rate.

    python benchmarks/scaling.py --text tinyshakespeare.txt --folder runs/scaling

Two sweeps: learning rates of each size at one length, then sizes times lengths with the best rates. Both resume, so the
command can be stopped and given again. No run sees a character twice. --out has both tables, the law, and the largest
run and the largest size as predicted from the others.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from fivefold.cli.main import main as fivefold
from fivefold.files import write_atomically
from fivefold.recipe.sweep import read
from fivefold_plan.advice.scaling import results

RESULTS = Path(__file__).parent / "results" / "scaling.json"
DIMS, RATES = (16, 32, 64, 128), ("1e-3", "2e-3", "4e-3", "8e-3", "1.6e-2", "3.2e-2")
LENGTHS, LENGTH = (131072, 262144, 524288, 1048576), 262144  # of the law, of the rates
SETS = (
    "model.layers=2", "model.seq_len=128", "data.tokenizer=chars", "train.global_batch_size=8",
    "train.microbatch_size=8", "train.val_every=1000000", "train.val_sequences=400", "train.sample_tokens=1",
    "checkpoint.keep_last=1", "observe.tracker=none", "layout.dp_replicate=1",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--text", required=True)
    parser.add_argument("--folder", type=Path, default=Path("runs/scaling"))
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    sizes = f"model.dim={joined(DIMS)} model.heads={joined(dim // 16 for dim in DIMS)}"
    rates = sweep(options, "rates", [sizes, f"optim.lr={joined(RATES)}", f"train.tokens={LENGTH}"])
    best = [str(curve["best"]) for curve in rates["curves"]]
    law = sweep(options, "law", [f"{sizes} optim.lr={joined(best)}", f"train.tokens={joined(LENGTHS)}"])
    held = {
        name: results(read(options.folder / "law"), name).as_json()["held_out"]
        for name in ("largest", "size")
    }
    command = "python benchmarks/scaling.py --text TEXT"
    found = {
        "command": command,
        "sets": SETS,
        "best_rates": best,
        "law": law,
        "rates": rates,
        "held_out": held,
    }
    write_atomically(options.out, json.dumps(found, indent=1) + "\n")
    print(results(read(options.folder / "law"), "largest").text())


def joined(values: Any) -> str:
    return ",".join(map(str, values))


def sweep(options: argparse.Namespace, name: str, over: list[str]) -> dict[str, Any]:
    """Runs a sweep, or what is left of it; its results. It ends this program where the sweep stops or fails."""
    folder = options.folder / name
    sets = [word for text in (*SETS, f"data.source={options.text}") for word in ("--set", text)]
    try:
        fivefold(
            ["sweep", "quickstart", *sets, *(w for o in over for w in ("--over", o)), "--out", str(folder)]
        )
    except SystemExit as end:
        if end.code:
            sys.exit(end.code)
    found = results(read(folder)).as_json()
    for row in found["runs"]:  # where speed was measured, other work ran
        for key in ("tokens_per_s", "mfu", "train_s"):
            row.pop(key, None)
    return found


if __name__ == "__main__":
    main()
