"""A run folder as a training leaves it, made without training: for the tests of the report page."""

from __future__ import annotations

import json
import math
import random
from contextlib import closing
from pathlib import Path

from fivefold.observe.metrics import MetricsWriter
from fivefold.recipe import load, resolve, to_toml

WORDS = ("def", "return", "self", "for", "in", "if", "import", "class", "None", "True", "raise", "yield")

MACHINE = {
    "cpu": "Example CPU 9000",
    "cpu_features": ["avx2", "avx512f", "avx512_bf16"],
    "cores": 2,
    "memory_bytes": 16 * 2**30,
    "os": "Linux 6.1 x86_64",
    "python": "3.11.7",
    "torch": "2.13.0",
    "gpus": [],
    "fast_bf16": True,
}


def losses(steps: int) -> list[float]:
    """A training's losses: 8.3 at first, falling as a power of the step, with noise and a spike."""
    noise = random.Random(1)
    values = [1.15 + 7.2 * (1 + step / 12) ** -0.55 + noise.gauss(0, 0.05) for step in range(steps)]
    values[steps * 2 // 3] += 1.5
    return values


# The sizes of the common work, whatever the shipped recipe has
RECIPE = (
    "model.layers=6", "model.dim=384", "model.heads=6", "model.seq_len=256", "model.tie_embeddings=false",
    "model.init_std=0.02", "train.global_batch_size=16", "train.sample_prompt=def ", "optim.schedule=wsd",
)  # fmt: skip


def make_run(folder: Path, steps: int = 800) -> Path:
    """Fill `folder` with recipe.toml, machine.json and metrics: `steps` steps, 10 validations, 5 samples."""
    noise = random.Random(2)
    resolved = resolve(load("quickstart", [*RECIPE, f"train.steps={steps}"], layout="dp=1"), vocab_size=4096)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "recipe.toml").write_text(to_toml(resolved))
    (folder / "machine.json").write_text(json.dumps(MACHINE))
    with closing(MetricsWriter(folder, tracker="none")) as writer:
        for step, loss in enumerate(losses(steps), 1):
            seconds = 0.22 * (3 if step == 1 else 1 + abs(noise.gauss(0, 0.02)))
            writer.write(
                {
                    "step": step,
                    "tokens": 4096 * step,
                    "loss": loss,
                    "grad_norm": 0.4 + 2 / math.sqrt(step) + abs(noise.gauss(0, 0.05)),
                    "lr": 2e-3 * min(step / (steps / 20), 0.55 + 0.45 * math.cos(math.pi * step / steps)),
                    "step_s": seconds,
                    "data_wait_s": 0.0004 + 0.001 * noise.random(),
                    "tokens_per_s": 4096 / seconds,
                    "mfu": 4096 / seconds * 77e6 / 2e12,
                    "peak_memory_bytes": (500 + 90 * min(1, step / 9)) * 2**20,
                }
            )
            if step % max(1, steps // 10) == 0:
                writer.write({"step": step, "val_loss": loss + 0.1, "val_bits_per_byte": (loss + 0.1) / 2.3})
            if step % max(1, steps // 5) == 0:
                text = " ".join(noise.choice(WORDS) for _ in range(60))
                writer.write({"step": step, "sample": f"def f(x):\n    return x  # {text}\n"})
    return folder
