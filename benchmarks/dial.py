"""The dial's learning rate on four widths, beside six others a factor sqrt(2) apart; with mu-P and without.

    python benchmarks/dial.py --train [--seeds 3] [--minutes 60] [--only mup] [--out FILE.json]
    python benchmarks/dial.py [--draw FILE.svg]     (the table from what has been measured, and its picture)

Each run is the recipe `dial` with a depth of 2, a width of WIDTHS with heads of 32 features, and the same TOKENS in
batches of BATCH sequences. So the dial gives all of them the same learning rate. `plain` is the same without
`model.base_dim`: initial weights and rates do not depend on the width, and equal those of mu-P at a width of 256.

The measure is the validation loss at the end, always over the same sequences, and its mean over the seeds. The aim: at
the dial's rate it is at most AIM times that of the best of the seven rates, on each width. --train adds one row to
--out for each run that it lacks, on one core, so it can be stopped and called again. All runs of a seed come before
those of the next.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

RESULTS = Path(__file__).parent / "results" / "dial.json"
WIDTHS, FORMS = (32, 64, 128, 256), {"mup": [], "plain": ["model.base_dim=none", "model.base_layers=none"]}
NOTCHES = range(-3, 4)
"""The rate is the dial's times the square root of 2 to this power."""
TOKENS, BATCH, T, AIM = 1 << 19, 8, 128, 1.005
Key = tuple[str, int, int, int]
"""Form, width, notch, seed."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--train", action="store_true")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=1e9)
    parser.add_argument("--only", choices=[*FORMS], help="runs with mu-P, or without it")
    parser.add_argument("--widths", type=int, nargs="+", default=WIDTHS)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--draw", type=Path)
    args = parser.parse_args()
    found = json.loads(args.out.read_text()) if args.out.exists() else {"tokens": TOKENS, "runs": []}
    if args.train:
        train(found, args)
    print("\n".join(table(found)))
    if args.draw:
        args.draw.write_text(picture(found))


def train(found: dict[str, Any], args: argparse.Namespace) -> None:
    from fivefold.host.machine import describe

    end, done = time.monotonic() + 60 * args.minutes, {key_of(run) for run in found["runs"]}
    for key in wanted(args):
        if key in done:
            continue
        if time.monotonic() > end:
            return
        found["runs"].append(run(*key))
        found["machine"] = describe()
        args.out.write_text(json.dumps(found, indent=1) + "\n")
        print(json.dumps(found["runs"][-1]), flush=True)


def wanted(args: argparse.Namespace) -> Iterator[Key]:
    for seed in range(args.seeds):
        for form in FORMS if args.only is None else [args.only]:
            for width in args.widths:
                yield from ((form, width, notch, seed) for notch in NOTCHES)


def key_of(run: dict[str, Any]) -> Key:
    return run["form"], run["width"], run["notch"], run["seed"]


def run(form: str, width: int, notch: int, seed: int) -> dict[str, Any]:
    """One run: its learning rate, its validation loss, its seconds of processor time."""
    import torch

    from fivefold.data import Batches, prepare
    from fivefold.launch.ranks import Ranks
    from fivefold.parallel.mesh import Microbatch
    from fivefold.recipe import change, load, resolve
    from fivefold.step.state import build_state
    from fivefold.step.step import take_step

    torch.set_num_threads(1)
    sets = [
        f"model.dim={width}",
        f"model.heads={width // 32}",
        f"model.seq_len={T}",
        "data.tokenizer=bpe:1024",
    ]
    sets += [f"train.tokens={TOKENS}", f"train.global_batch_size={BATCH}", f"train.seed={seed}"]
    recipe = load("dial", [*sets, "model.depth=2", "precision.mode=fp32", *FORMS[form]], "dp=1")
    recipe = change(recipe, [f"optim.lr={recipe.optim.lr * 2 ** (notch / 2)!r}"])
    data = prepare(recipe)
    assert data.val is not None
    recipe = resolve(recipe, vocab_size=data.vocab_size)
    state, batches = (
        build_state(recipe, Ranks(0, 1, 0, 1, torch.device("cpu"))),
        Batches(data.train, T, BATCH, seed=seed),
    )
    began = time.process_time()
    for step in range(recipe.train.steps or 0):
        inputs, targets = map(torch.from_numpy, batches.batch(step)[:2])
        take_step(state, recipe, [Microbatch(inputs, targets)])
    held_out = Batches(data.val, T, 512, seed=0).batch(0)
    with torch.no_grad():
        loss = state.module.eval()(*map(torch.from_numpy, held_out[:2])).item()
    seconds = time.process_time() - began
    return {
        "form": form, "width": width, "notch": notch, "seed": seed, "lr": recipe.optim.lr, "val_loss": loss,
        "cpu_seconds": round(seconds, 1),
    }  # fmt: skip


def curves(found: dict[str, Any], form: str) -> dict[int, dict[int, float]]:
    """Width -> notch -> validation loss: the mean over the seeds that all rates of the width have."""
    result: dict[int, dict[int, float]] = {}
    for width in dict.fromkeys(run["width"] for run in found["runs"]):
        rows = {key_of(run)[2:]: run["val_loss"] for run in found["runs"] if key_of(run)[:2] == (form, width)}
        seeds = {seed for _, seed in rows}
        whole = [seed for seed in sorted(seeds) if all((notch, seed) in rows for notch in NOTCHES)]
        if whole:
            result[width] = {notch: fmean(rows[notch, seed] for seed in whole) for notch in NOTCHES}
    return result


def table(found: dict[str, Any]) -> list[str]:
    """A row for each form and width: losses by rate, and that of the dial's rate over the best."""
    heads = " | ".join(f"{2 ** (notch / 2):.2f} x" for notch in NOTCHES)
    lines = [f"| Form | Width | Seeds | {heads} | dial's / best |", "|---" * (len(NOTCHES) + 4) + "|"]
    missed, measured = [], curves(found, "mup").keys()
    for form in FORMS:
        for width, losses in curves(found, form).items():
            ratio = losses[0] / min(losses.values())
            runs = [run for run in found["runs"] if (run["form"], run["width"]) == (form, width)]
            cells = [form, str(width), str(len({run["seed"] for run in runs}))]
            cells += [*(f"{losses[notch]:.4f}" for notch in NOTCHES), f"{ratio:.4f}"]
            lines.append(f"| {' | '.join(cells)} |")
            missed += [f"{width}: {ratio:.4f}"] if form == "mup" and ratio > AIM else []
    missed += [f"{width}: not measured" for width in WIDTHS if width not in measured]
    said = f"missed at {', '.join(missed)}" if missed else "reached"
    return [*lines, "", f"the dial's rate, at most {AIM} x the best of the seven rates on each width: {said}"]


def picture(found: dict[str, Any]) -> str:
    """Loss against rate, a curve for each width, a picture for each form. A ring marks the best of a curve."""
    from fivefold.draw.canvas import Line, stacked
    from fivefold.draw.canvas import picture as chart

    titles, pictures = {"mup": "with mu-P", "plain": "without"}, list[str]()
    for form, title in titles.items():
        rates = {(run["width"], run["notch"]): run["lr"] for run in found["runs"] if run["form"] == form}
        lines = [
            Line(f"width {width}", points := [(rates[width, n], losses[n]) for n in NOTCHES], number, dots=True,
                 marks=[min(points, key=lambda point: point[1])])
            for number, (width, losses) in enumerate(curves(found, form).items())
        ]  # fmt: skip
        pictures.append(
            chart(
                f"Loss by learning rate, measured, {title}",
                lines,
                "learning rate",
                "validation loss",
                (True, False),
            )
        )
    return stacked(filter(None, pictures))


if __name__ == "__main__":
    main()
