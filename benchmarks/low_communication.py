r"""Training on two replica groups that synchronise every 50 steps (DiLoCo) beside summing gradients in every step:
bytes that leave a rank, and the validation loss after the same tokens from the same initial weights.

    python benchmarks/low_communication.py [--seeds 0 1 2] [--steps 1000] [--only METHOD ...] [--out FILE.json]

The default of `sync.outer_momentum` is what this chose, with seeds that no other figure is from:

    python benchmarks/low_communication.py --seeds 3 4 5 --only "diloco, momentum 0.3" "diloco, momentum 0.6" \
        "diloco, momentum 0.9" --set model.layers=2 model.dim=64 model.heads=2 model.kv_heads=2 model.ffn_dim=176

Bytes are counted over the whole run, also those of the figures that ranks agree on. Both replica groups run on this
machine; how fast links between them would have to be is the planner's to say. Runs of the same length that FILE.json
has already are kept, so it can be filled piece by piece.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

from fivefold.data import DataSet
from fivefold.host.machine import describe
from fivefold.launch.local import start_ranks
from fivefold.launch.ranks import Ranks
from fivefold.recipe import Recipe, count_parameters, load, resolve
from fivefold.train.start import prepare_data

MODEL = [
    "model.layers=4", "model.dim=128", "model.heads=4", "model.kv_heads=4", "model.ffn_dim=352", "model.seq_len=128",
    "data.tokenizer=bytes", "train.global_batch_size=16", "train.microbatch_size=8", "train.val_sequences=512",
    "optim.lr=2e-3", "precision.mode=fp32",
]  # fmt: skip
DILOCO = ["sync.method=diloco", "sync.every=50"]
MOMENTA = {m: [*DILOCO, f"sync.outer_momentum={m}"] for m in (0.3, 0.6, 0.9)}
INT8 = ["sync.fragments=4", "sync.outer_dtype=int8"]
METHODS = {
    "all": [],
    "local": ["sync.method=local", "sync.every=50"],
    **{f"diloco, momentum {m}": sets for m, sets in MOMENTA.items()},
    "diloco, momentum 0.9, 4 fragments, int8": [*MOMENTA[0.9], *INT8],
    "diloco, momentum 0.6, 4 fragments, int8, overlap 2": [*MOMENTA[0.6], *INT8, "sync.overlap=2"],
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--only", nargs="*", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--set", nargs="*", default=[], help="fields of the recipe, for all runs")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    if args.out and args.out.exists():
        before = json.loads(args.out.read_text(encoding="utf-8"))
        same = (before["steps"], before.get("set", [])) == (args.steps, args.set)
        rows = before["runs"] if same else []
    done = {(row["method"], row["seed"]) for row in rows}
    for seed in args.seeds:
        for method in args.only:
            if (method, seed) in done:
                continue
            sets = [*MODEL, f"train.steps={args.steps}", f"train.seed={seed}", *METHODS[method], *args.set]
            recipe = load("quickstart", sets, "dp=2")
            data = prepare_data(recipe, quiet=True)
            recipe = resolve(recipe, vocab_size=data.vocab_size)
            rows.append({"method": method, "seed": seed, **measured(recipe, data)})
            print(rows[-1], file=sys.stderr, flush=True)
            if args.out:
                found = {
                    "steps": args.steps,
                    "set": args.set,
                    "tokens": args.steps * 16 * 128,
                    "parameters": count_parameters(recipe.model),
                    "summary": summary(rows),
                    "runs": rows,
                    "machine": describe(),
                }
                args.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(summary(rows), indent=1))


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Per method: means over its seeds, and the ratios to `all` with the same seed."""
    base = {row["seed"]: row for row in rows if row["method"] == "all"}
    found = {}
    for method in dict.fromkeys(row["method"] for row in rows):
        mine = [row for row in rows if row["method"] == method]
        found[method] = {"val_loss": mean(row["val_loss"] for row in mine), "seeds": len(mine)}
        if pairs := [(row, base[row["seed"]]) for row in mine if row["seed"] in base]:
            found[method] |= {
                "fewer_bytes": mean(other["sent_bytes"] / row["sent_bytes"] for row, other in pairs),
                "loss_ratio": mean(row["val_loss"] / other["val_loss"] for row, other in pairs),
            }
    return found


def measured(recipe: Recipe, data: DataSet) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        out = Path(name)
        began = time.perf_counter()
        start_ranks(partial(rank, recipe, data, out), 2, fork=False)
        return json.loads((out / "found.json").read_text()) | {"seconds": time.perf_counter() - began}


def rank(recipe: Recipe, data: DataSet, out: Path, ranks: Ranks) -> int | None:
    """A rank's part of a run. The first writes the figures."""
    from fivefold.step.state import build_state
    from fivefold.step.step import take_step
    from fivefold.step.validation import validate
    from fivefold.train.job import Job
    from fivefold.train.share import reader, validation_sets
    from fivefold_plan.messages.volume import leaving
    from fivefold_plan.trace.traffic import Collectives

    state, job = build_state(recipe, ranks), Job(recipe, out, data)
    sent = Collectives(state.mesh)
    sent.listen()
    losses = []
    with reader(job, state.mesh, 0) as batches:
        for _ in range(recipe.train.steps or 0):
            losses.append(take_step(state, recipe, batches()[0]).loss)
    sent.leave()
    # the run ends with an outer step, so these are the common weights
    found = validate(state, validation_sets(job, state.mesh))
    counted = {key: (calls, size) for key, (calls, size) in sent.found.items()}
    found["sent_bytes"] = sum(leaving(counted, state.mesh.layout, state.mesh.size("replica_groups")).values())
    found["messages"] = sum(calls for calls, _ in counted.values())
    found["train_loss"] = mean(losses[-50:])
    if ranks.first:
        (out / "found.json").write_text(json.dumps(found))
    return None


if __name__ == "__main__":
    main()
