"""Validation bits per byte of the quickstart, beside a plain character-level model trained for the same minutes.

    python benchmarks/quickstart_quality.py [--out benchmarks/results/quickstart_quality.json]

Runs `fivefold train quickstart`, then trains the plain baseline for the seconds that quickstart's steps took, on the
same text and the same split, byte by byte (the source is almost all ASCII): nanoGPT's small-machine shape (GPT of 4
layers, 4 heads, D 128) with T 256 and batch 12, learning rate 1e-3 with warm-up and a cosine over its time. Both are
judged in bits per byte of the whole validation split.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

T, BATCH = 256, 12


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, "run")
        program = Path(sys.executable).with_name("fivefold")
        began = time.perf_counter()
        subprocess.run(
            [program, "train", "quickstart", "--out", run, "--set=train.val_sequences=4096"], check=True
        )
        whole = time.perf_counter() - began
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    seconds = sum(line.get("step_s", 0.0) for line in lines)
    ours = [line["val_bits_per_byte"] for line in lines if "val_bits_per_byte" in line][-1]
    plain = baseline(seconds)
    result = {"command_seconds": whole, "training_seconds": seconds, "fivefold_bits_per_byte": ours, **plain}
    print(json.dumps(result, indent=1))
    if args.out:
        from fivefold.host.machine import describe

        args.out.write_text(json.dumps(result | {"machine": describe()}, indent=1) + "\n")


def baseline(seconds: float) -> dict[str, float]:
    from plain import PlainGPT

    from fivefold.data import Batches, prepare
    from fivefold.recipe import load

    recipe = load(
        "quickstart", ["data.tokenizer=bytes", f"model.seq_len={T}", f"train.global_batch_size={BATCH}"]
    )
    data = prepare(recipe)
    assert data.val is not None
    train = Batches(data.train, T, BATCH, seed=0)
    val = Batches(data.val, T, 4096, seed=0, shuffle=False)
    torch.manual_seed(0)
    model = PlainGPT(data.vocab_size, 128, 4, 4, T)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1, fused=True
    )
    began, index = time.perf_counter(), 0
    while (spent := time.perf_counter() - began) < seconds:
        decay = (1 + math.cos(math.pi * spent / seconds)) / 2
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * (index + 1) / 100 if index < 100 else 1e-4 + 9e-4 * decay
        x, y = map(torch.from_numpy, train.batch(index)[:2])
        model(x, y).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        index += 1
    with torch.no_grad():
        x, y = map(torch.from_numpy, val.batch(0, range(min(4096, val.sequences)))[:2])
        loss = sum(model(a, b).item() * len(a) for a, b in zip(x.split(64), y.split(64), strict=True)) / len(
            x
        )
    return {"baseline_bits_per_byte": loss / math.log(2), "baseline_steps": index}


if __name__ == "__main__":
    main()
