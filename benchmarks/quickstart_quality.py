"""Bits per byte of the quickstart on a test split, beside a plain character-level model after an equal search.

    python benchmarks/quickstart_quality.py --time      (alone on the machine)
    python benchmarks/quickstart_quality.py --train     [--minutes 30]
    python benchmarks/quickstart_quality.py             (the figures from what has been measured)

The baseline is nanoGPT's small model, read byte by byte: AdamW, warm-up, a cosine over its run. It gets the search that
quickstart's settings had (results/quickstart_tuning.md): ten runs of SHORT seconds (nanoGPT's own settings and nine
drawn from GRID with a fixed seed), then the best five of them for LONG seconds. Runs are compared by their validation
loss. The winner is then trained for as many seconds as the quickstart, with the same three seeds.

**Test split**: TEST_FILES of the tests of Python's own standard library. The source `stdlib` leaves tests out, so
neither training nor any choice of settings saw them. Each file is scored as `fivefold eval` does: windows of T tokens,
side by side, and the bits of all tokens over the bytes of the text.

Timing and training are apart, since losses do not depend on what else runs and seconds do: --time measures the seconds
per step of the quickstart and of each form in turns, and --train turns seconds into steps. It adds one row to --out for
each run that it lacks, so it can be stopped and called again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import re
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results" / "quickstart_test.json"
PROGRAM = Path(sys.executable).with_name("fivefold")
T, SHORT, LONG, SEEDS, TEST_FILES = 256, 60, 150, (0, 1, 2), 40
AT_ONCE = 32  # windows


@dataclass(frozen=True)
class Form:
    """Settings of the baseline. std: of the initial weights."""

    dim: int = 128
    layers: int = 4
    batch: int = 12
    lr: float = 1e-3
    std: float = 0.02

    @property
    def name(self) -> str:
        return " ".join(f"{key}={value}" for key, value in asdict(self).items())


GRID = {
    "dim": (128, 192, 256), "layers": (3, 4), "batch": (8, 16, 32), "lr": (1e-3, 2e-3, 4e-3), "std": (0.02, 0.05)
}  # fmt: skip
FORMS = [
    Form(),
    *random.Random(0).sample([Form(*values) for values in itertools.product(*GRID.values())], 9),
]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--time", action="store_true")
    parser.add_argument("--train", action="store_true")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no run later than this")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    found = json.loads(args.out.read_text(encoding="utf-8")) if args.out.exists() else {}
    if args.time:
        found = timed()
        write(args.out, found)
    if args.train:
        if "step_seconds" not in found:
            sys.exit(f"{args.out} has no seconds per step yet: run --time first, alone on the machine")
        last = time.monotonic() + 60 * args.minutes
        for name, run in due(found):
            if time.monotonic() > last:
                break
            found["runs"][name] = run()
            print(name, json.dumps(found["runs"][name]), flush=True)
            write(args.out, found)
    print(json.dumps(summary(found), indent=1))


def write(path: Path, found: dict[str, Any]) -> None:
    path.write_text(json.dumps(found | {"summary": summary(found)}, indent=1) + "\n", encoding="utf-8")


def timed(rounds: int = 3, seconds: float = 2.0) -> dict[str, Any]:
    """Seconds per step of the quickstart and of each form, in fp32 and bf16: medians of rounds in turns."""
    from fivefold.host.machine import describe

    taken: dict[str, list[float]] = {}
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            lines = quickstart(Path(folder), 0, 60)
        taken.setdefault("quickstart", []).append(median(x["step_s"] for x in lines if "step_s" in x))
        for form, bf16 in itertools.product(FORMS, (False, True)):
            _, step = trainer(form, 0, bf16, lambda _: 1.0)
            began, steps = 0.0, -3  # the first three are warm-up
            while steps < 3 or time.perf_counter() - began < seconds:
                if steps == 0:
                    began = time.perf_counter()
                step(steps + 3)
                steps += 1
            key = f"{form.name} {'bf16' if bf16 else 'fp32'}"
            taken.setdefault(key, []).append((time.perf_counter() - began) / steps)
    return {"step_seconds": {name: median(each) for name, each in taken.items()}, "runs": {}} | {
        "machine": describe()
    }


def due(found: dict[str, Any]) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """The runs that are missing, in order: the search, then three seeds of both."""
    runs, whole = found["runs"], 600 * found["step_seconds"]["quickstart"]

    def one(form: Form, seconds: float, seed: int = 0) -> tuple[str, Callable[[], dict[str, Any]]]:
        return f"baseline {form.name}, {seconds:.0f} s, seed {seed}", lambda: baseline(
            found, form, seconds, seed
        )

    short = [one(form, SHORT) for form in FORMS]
    yield from (run for run in short if run[0] not in runs)
    order = sorted(FORMS, key=lambda form: runs[one(form, SHORT)[0]]["val_bits_per_byte"])
    long = [one(form, LONG) for form in order[:5]]
    yield from (run for run in long if run[0] not in runs)
    best = min(order[:5], key=lambda form: runs[one(form, LONG)[0]]["val_bits_per_byte"])
    for seed in SEEDS:
        for name, run in (
            (f"quickstart, seed {seed}", lambda seed=seed: ours(seed)),
            one(best, whole, seed),
        ):
            if name not in runs:
                yield name, lambda run=run, name=name: run() | {"final": re.split(r"\W", name)[0]}


def summary(found: dict[str, Any]) -> dict[str, Any]:
    """Means over the seeds, of those runs that are there."""
    result: dict[str, Any] = {}
    for side in ("quickstart", "baseline"):
        rows = [run for run in found.get("runs", {}).values() if run.get("final") == side]
        if rows:
            bits = [row["test_bits_per_byte"] for row in rows]
            result[side] = {
                "seeds": len(rows), "test": fmean(bits), "lowest": min(bits), "highest": max(bits),
                "validation": fmean(row["val_bits_per_byte"] for row in rows),
            }  # fmt: skip
    if "step_seconds" in found:
        result["training_seconds"] = 600 * found["step_seconds"]["quickstart"]
    return result


def quickstart(out: Path, seed: int, steps: int) -> list[dict[str, Any]]:
    settings = [
        f"train.steps={steps}",
        f"train.seed={seed}",
        "train.val_sequences=4096",
        "train.sample_every=0",
    ]
    command = [
        PROGRAM,
        "train",
        "quickstart",
        "--quiet",
        "--out",
        out / "run",
        *(f"--set={x}" for x in settings),
    ]
    subprocess.run(command, check=True)
    return [json.loads(line) for line in (out / "run/metrics.jsonl").read_text().splitlines()]


def ours(seed: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        lines = quickstart(Path(folder), seed, 600)
        command = [PROGRAM, "eval", Path(folder, "run"), *test_files(), "--json"]
        texts = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)[
            "texts"
        ]
    nats, size = (sum(text[key] for text in texts) for key in ("nats", "bytes"))
    val = [line["val_bits_per_byte"] for line in lines if line.get("val_bits_per_byte")][-1]
    return {"steps": 600, "val_bits_per_byte": val, "test_bits_per_byte": nats / math.log(2) / size}


def test_files() -> list[Path]:
    files = sorted(Path(sysconfig.get_path("stdlib"), "test").glob("test_*.py"))
    if len(files) < TEST_FILES:
        sys.exit(
            "this Python has no tests of its own (the folder test of its standard library): take one that has them"
        )
    return random.Random(0).sample(files, TEST_FILES)


def data() -> Any:
    from fivefold.data import prepare
    from fivefold.recipe import load

    return prepare(load("quickstart", ["data.tokenizer=bytes", f"model.seq_len={T}"]))


def trainer(
    form: Form, seed: int, bf16: bool, decay: Callable[[int], float]
) -> tuple[torch.nn.Module, Callable[[int], None]]:
    """The model, and what takes step i. decay: the rate's factor at a step."""
    from plain import PlainGPT

    from fivefold.data import Batches

    found = data()
    train = Batches(found.train, T, form.batch, seed=seed)
    torch.manual_seed(seed)
    model = PlainGPT(found.vocab_size, form.dim, form.layers, form.dim // 32, T, form.std)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=form.lr, betas=(0.9, 0.99), weight_decay=0.1, fused=True
    )

    def step(index: int) -> None:
        for group in optimizer.param_groups:
            group["lr"] = form.lr * decay(index)
        x, y = map(torch.from_numpy, train.batch(index)[:2])
        with torch.autocast("cpu", torch.bfloat16) if bf16 else nullcontext():
            loss = model(x, y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return model, step


def baseline(found: dict[str, Any], form: Form, seconds: float, seed: int) -> dict[str, Any]:
    """Trains in the faster dtype for the steps that take so long: 100 steps of warm-up, then a cosine to a tenth."""
    taken = {
        bf16: found["step_seconds"][f"{form.name} {'bf16' if bf16 else 'fp32'}"] for bf16 in (False, True)
    }
    bf16 = taken[True] < taken[False]
    steps = round(seconds / taken[bf16])
    warm_up = min(100, steps // 5)

    def decay(i: int) -> float:
        return (i + 1) / warm_up if i < warm_up else 0.1 + 0.45 * (1 + math.cos(math.pi * i / steps))

    model, step = trainer(form, seed, bf16, decay)
    for index in range(steps):
        step(index)
    texts = [path.read_bytes() for path in test_files()]
    held_out = data().val
    val = bytes_of(held_out)
    return {
        "steps": steps,
        "bf16": bf16,
        "val_bits_per_byte": bits(model, [val]),
        "test_bits_per_byte": bits(model, texts),
    }


def bytes_of(tokens: Any) -> list[int]:
    return tokens[: len(tokens)].tolist()


@torch.no_grad()
def bits(model: torch.nn.Module, texts: list[Any]) -> float:
    """Bits per byte: each text after an end token, in windows of T side by side, the last one as long as the others."""
    nats, size = 0.0, 0
    for text in texts:
        ids, windows = torch.tensor([256, *text]), list[tuple[torch.Tensor, torch.Tensor]]()
        for start in range(0, len(text), T):
            first = max(0, min(start, len(text) - T))
            x, y = ids[first : first + T], ids[first + 1 : first + T + 1].clone()
            y[: start - first] = -100  # scored before
            windows.append((x[: len(y)], y))
        for start in range(0, len(windows), AT_ONCE):
            x, y = map(torch.stack, zip(*windows[start : start + AT_ONCE], strict=True))
            nats += model(x, y).item() * int((y >= 0).sum())
        size += len(text)
    return nats / math.log(2) / size


if __name__ == "__main__":
    main()
